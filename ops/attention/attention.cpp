#include "torus/ops/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "torus/autograd/tape.h"
#include "torus/core/profiler.h"
#include "torus/ops/attention/backend.h"
#include "torus/ops/attention/map.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

using detail::AttentionBackend;
using detail::AttentionGradients;
using detail::AttentionProblem;

thread_local std::vector<Backend> allowed_backends;  // empty: all

bool allowed(Backend backend) {
  return allowed_backends.empty() ||
         std::find(allowed_backends.begin(), allowed_backends.end(), backend) != allowed_backends.end();
}

void check_shapes(const Tensor& q, const Tensor& k, const Tensor& v) {
  for (const auto& [tensor, letter] : {std::pair(&q, 'q'), std::pair(&k, 'k'), std::pair(&v, 'v')}) {
    check(tensor->dim() == 4, Error::Kind::Shape, "[attention] ", letter, " must be [B, H, N, D], got ",
          tensor->shape());
    check(tensor->dtype() == q.dtype() && is_floating(q.dtype()), Error::Kind::DType,
          "[attention] q, k and v must share a floating dtype, got ", q.dtype(), ", ", k.dtype(), " and ",
          v.dtype());
    check(tensor->device() == q.device(), Error::Kind::Device,
          "[attention] q, k and v must share a device, got ", q.device(), ", ", k.device(), " and ",
          v.device());
  }
  check(k.size(0) == q.size(0) && v.size(0) == q.size(0), Error::Kind::Shape,
        "[attention] q, k and v must have one batch size, got ", q.shape(), ", ", k.shape(), " and ",
        v.shape());
  check(k.size(1) == v.size(1) && k.size(2) == v.size(2), Error::Kind::Shape,
        "[attention] k and v must have the same heads and tokens, got ", k.shape(), " and ", v.shape());
  check(k.size(3) == q.size(3), Error::Kind::Shape, "[attention] q and k must have one width, got ",
        q.shape(), " and ", k.shape());
  check(q.size(1) == 0 || (k.size(1) > 0 && q.size(1) % k.size(1) == 0), Error::Kind::Shape,
        "[attention] the heads of q must be a multiple of those of k, got ", q.size(1), " and ", k.size(1));
}

Tensor unit_stride(const Tensor& x) { return x.strides()[3] == 1 || x.size(3) <= 1 ? x : x.contiguous(); }

// The shape that a dense bias of fewer axes stands for: 4 axes.
Variable four_axes(const Variable& x) {
  Shape shape = x.shape();
  while (shape.dim() < 4) shape.insert(0, 1);
  return shape == x.shape() ? x : reshape(x, shape);
}

// Memory for the gradients of q, k and v. Where these lie side by side, as the parts of one projection do,
// the gradients do so too: `split` then takes them as they are.
void make_gradients(AttentionGradients& g, const AttentionProblem& p, const OutputGrads& grads) {
  const Tensor* const operands[] = {&p.q, &p.k, &p.v};
  Tensor* const made[] = {&g.dq, &g.dk, &g.dv};
  const Shape& strides = p.q.strides();
  const int64_t row = strides[2];
  bool side_by_side = p.q.numel() > 0 && p.k.numel() > 0 && p.q.size(2) == p.k.size(2) && strides[3] == 1 &&
                      (p.batch() == 1 || strides[0] == p.q.size(2) * row);
  int64_t width = 0;
  for (int i = 0; i < 3; ++i) {
    const Tensor& x = *operands[i];
    side_by_side = side_by_side && grads.wants(static_cast<size_t>(i)) && x.storage() == p.q.storage() &&
                   x.strides() == strides && x.offset() == p.q.offset() + width && strides[1] == x.size(3);
    width += x.size(1) * x.size(3);
  }
  if (side_by_side && width == row) {
    const Tensor all = Tensor::empty({p.batch(), p.q.size(2), row}, p.q.dtype(), p.q.device());
    for (int i = 0; i < 3; ++i)
      *made[i] = all.as_strided(operands[i]->shape(), strides, operands[i]->offset() - p.q.offset());
    return;
  }
  for (int i = 0; i < 3; ++i) {
    const Tensor& x = *operands[i];
    if (grads.wants(static_cast<size_t>(i)))
      *made[i] = detail::empty_heads(x.size(0), x.size(1), x.size(2), x.size(3), x.dtype(), x.device());
  }
}

void check_bias(const AttentionBias& bias, const AttentionProblem& problem) {
  const Tensor& value = bias.value().value();
  check(value.device() == problem.q.device(), Error::Kind::Device, "[attention] a bias must be on ",
        problem.q.device(), " as q, got ", value.device());
  if (bias.kind() == AttentionBias::Kind::alibi) {
    check(value.size(0) == problem.heads(), Error::Kind::Shape,
          "[attention] alibi needs one slope for each of ", problem.heads(), " heads, got ", value.size(0));
    return;
  }
  check(value.dtype() == problem.q.dtype(), Error::Kind::DType, "[attention] a bias must be ",
        problem.q.dtype(), " as q, got ", value.dtype());
  if (bias.kind() == AttentionBias::Kind::dense) {
    const Shape scores{problem.batch(), problem.heads(), problem.queries(), problem.keys()};
    for (int a = 0; a < 4; ++a)
      check(value.size(a) == scores[a] || value.size(a) == 1, Error::Kind::Shape,
            "[attention] a bias must broadcast to ", scores, ", got ", value.shape());
    return;
  }
  check(value.size(0) == 1 || value.size(0) == problem.heads(), Error::Kind::Shape,
        "[attention] a table of relative biases must be for 1 or ", problem.heads(), " heads, got ",
        value.size(0));
  const detail::Grid grid("relative_bias", bias.grid());
  grid.check_tokens("relative_bias", problem.queries(), "queries");
  grid.check_tokens("relative_bias", problem.keys(), "keys");
}

// The gradient of what is added to all scores of a row alike: weights do not change, and lse by as much.
Tensor row_gradient(const AttentionGradients& g, DType dtype) {
  if (!g.d_lse.defined()) return Tensor();
  const Tensor no_key = detail::equals(g.lse, -std::numeric_limits<double>::infinity());
  return masked_fill(Variable(g.d_lse), no_key, 0).value().to(dtype).unsqueeze(3);
}

// `widths`: of the rows that each allowed score is multiplied with or made from.
void count(ProfileScope& scope, const AttentionProblem& p, int64_t widths,
           std::initializer_list<const Tensor*> tensors) {
  if (!scope) return;
  if (p.batch() == 0) return;
  for (const Tensor* tensor : tensors) scope.add(*tensor);
  if (p.mask.rule().packed()) return;  // only the device knows their lengths
  scope.add_flops(2.0 * static_cast<double>(p.batch() * p.heads() * widths) *
                  static_cast<double>(p.mask.rule().map({p.queries(), p.keys(), p.batch()})->needed));
}

const AttentionBackend& choose(const AttentionProblem& problem, Backend wanted) {
  std::string refusals;
  for (const AttentionBackend& backend : detail::attention_backends()) {
    if (wanted != Backend::automatic ? backend.id != wanted : !allowed(backend.id)) continue;
    const std::string refusal = backend.refusal(problem);
    if (refusal.empty()) return backend;
    refusals += std::string(refusals.empty() ? "" : "; ") + name(backend.id) + ": " + refusal;
  }
  if (refusals.empty())
    refusals = wanted == Backend::automatic ? "none is allowed by the BackendScope"
                                            : name(wanted) + std::string(" is not in this build");
  fail(Error::Kind::Device, "[attention] no backend can run this: ", refusals);
}

}  // namespace

const char* name(Backend backend) {
  switch (backend) {
    case Backend::automatic:
      return "automatic";
    case Backend::reference:
      return "reference";
    case Backend::cpu:
      return "cpu";
    case Backend::cuda_simt:
      return "cuda_simt";
    case Backend::cuda_mma:
      return "cuda_mma";
    case Backend::hopper:
      return "hopper";
  }
  return "unknown";
}

namespace {
std::vector<AttentionBackend>& registered_backends() {
  static std::vector<AttentionBackend> backends;
  return backends;
}
}  // namespace

detail::RegisteredBackend::RegisteredBackend(const AttentionBackend& backend) {
  auto& all = registered_backends();
  const auto slower = std::find_if(all.begin(), all.end(),
                                   [&](const AttentionBackend& other) { return other.id < backend.id; });
  all.insert(slower, backend);
}

const std::vector<AttentionBackend>& detail::attention_backends() { return registered_backends(); }

Tensor detail::empty_heads(int64_t batch, int64_t heads, int64_t tokens, int64_t width, DType dtype,
                           Device device) {
  return Tensor::empty({batch, tokens, heads, width}, dtype, device).transpose(1, 2);
}

BackendScope::BackendScope(std::initializer_list<Backend> backends) : outer_(allowed_backends) {
  check(backends.size() > 0, Error::Kind::Value, "[BackendScope] expected at least one backend, got none");
  allowed_backends = backends;
}

BackendScope::~BackendScope() { allowed_backends = outer_; }

AttentionOutput attention(const Variable& q, const Variable& k, const Variable& v,
                          const AttentionOptions& options) {
  check_defined("attention", "q", q);
  check_defined("attention", "k", k);
  check_defined("attention", "v", v);
  ProfileScope op_scope("attention", ScopeKind::forward);
  check_shapes(q.value(), k.value(), v.value());
  check(options.dropout >= 0 && options.dropout <= 1, Error::Kind::Value,
        "[attention] dropout must be in [0, 1], got ", options.dropout);
  AttentionProblem problem;
  problem.q = unit_stride(q.value());
  problem.k = unit_stride(k.value());
  problem.v = unit_stride(v.value());
  problem.mask = options.mask;
  problem.mask.rule().check_shape({problem.queries(), problem.keys(), problem.batch()});
  std::vector<Variable> inputs{q, k, v};
  for (const AttentionBias& term : options.bias) {
    switch (term.kind()) {
      case AttentionBias::Kind::dense:
        problem.bias.emplace_back(four_axes(term.value()));
        break;
      case AttentionBias::Kind::alibi:
        problem.bias.push_back(term.with(Variable(term.value().value().to(q.device()))));
        break;
      case AttentionBias::Kind::relative:
        problem.bias.push_back(term);
        break;
    }
    check_bias(problem.bias.back(), problem);
    inputs.push_back(problem.bias.back().value());
  }
  // Scores are computed in f32 but for f64.
  const DType lse_dtype = q.dtype() == f64 ? f64 : f32;
  const auto rounded = [&](double x) {
    return lse_dtype == f64 ? x : static_cast<double>(static_cast<float>(x));
  };
  check(std::isfinite(rounded(options.softcap)) && options.softcap >= 0 &&
            (rounded(options.softcap) > 0 || options.softcap == 0),
        Error::Kind::Value, "[attention] softcap must be 0 or a positive number of ", lse_dtype, ", got ",
        options.softcap);
  problem.softcap = options.softcap;
  problem.scale =
      options.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<int64_t>(problem.width(), 1))));
  check(std::isfinite(rounded(problem.scale)), Error::Kind::Value, "[attention] scale must be finite in ",
        lse_dtype, ", got ", problem.scale);
  problem.deterministic = options.deterministic;
  if (options.dropout > 0) {
    Generator& generator = options.generator ? *options.generator : default_generator();
    problem.dropout = {static_cast<float>(options.dropout), generator.seed(), generator.reserve(1)};
  }

  const bool reference_only =
      options.backend == Backend::reference ||
      (options.backend == Backend::automatic && allowed_backends == std::vector{Backend::reference});
  const detail::PackedDocuments* packed = problem.mask.rule().packed();
  if (packed && (reference_only || q.device() == cpu || packed->lengths.device() == cpu)) {
    problem.mask = packed->settled();
    problem.mask.rule().check_shape({problem.queries(), problem.keys(), problem.batch()});
    packed = nullptr;
  }
  if (packed)
    check(packed->lengths.device() == q.device(), Error::Kind::Device,
          "[attention] lengths of documents must be on ", q.device(), " as q, got ",
          packed->lengths.device());
  if (reference_only) {
    for (const Variable* x : {&q, &k, &v}) op_scope.show(x->value());
    return detail::reference_attention(q, k, v, problem);
  }

  const AttentionBackend& backend = choose(problem, options.backend);
  Tensor out = detail::empty_heads(problem.batch(), problem.heads(), problem.queries(), problem.value_width(),
                                   q.dtype(), q.device());
  Tensor lse = Tensor::empty({problem.batch(), problem.heads(), problem.queries()}, lse_dtype, q.device());
  {
    ProfileScope scope("attention.forward", ScopeKind::kernel);
    count(scope, problem, problem.width() + problem.value_width(),
          {&problem.q, &problem.k, &problem.v, &out, &lse});
    out.storage()->note_kernel("attention");
    lse.storage()->note_kernel("attention");
    backend.forward(problem, out, lse);
  }

  // Saved: the operands, out (for delta = rowsum(dO * O)) and lse (to recompute the weights).
  std::vector<Saved> saved;
  for (const Tensor& x : {problem.q, problem.k, problem.v, out, lse}) saved.emplace_back(x);
  std::vector<AttentionBias> terms;  // handles would keep the tape of their values: values are saved alone
  for (AttentionBias& term : problem.bias) {
    saved.emplace_back(term.value().value());
    terms.push_back(term.with(Variable()));
  }
  // And the lengths of documents, from which backward's map is made.
  if (packed) saved.emplace_back(packed->lengths);
  problem.q = problem.k = problem.v = Tensor();
  problem.bias.clear();
  auto results = record(
      "attention", inputs, std::vector{out, lse},
      [=, run = backend.backward](const OutputGrads& grads) -> std::vector<Tensor> {
        AttentionProblem again = problem;
        again.q = saved[0].get(), again.k = saved[1].get(), again.v = saved[2].get();
        if (saved.size() > 5 + terms.size()) saved.back().get();  // for the check of its version
        AttentionGradients g;
        g.out = saved[3].get(), g.lse = saved[4].get();
        g.d_out = grads[0].defined() ? unit_stride(grads[0]) : Tensor();
        g.d_lse = grads[1];
        make_gradients(g, again, grads);
        for (const Tensor* gradient : {&g.dq, &g.dk, &g.dv})
          if (gradient->defined()) gradient->storage()->note_kernel("attention.backward");
        std::vector<Tensor> constant_along_keys(terms.size());
        for (size_t i = 0; i < terms.size(); ++i) {
          const Tensor& value = saved[5 + i].get();
          again.bias.push_back(terms[i].with(Variable(value)));
          g.d_bias.emplace_back();
          if (!grads.wants(3 + i)) continue;
          if (terms[i].kind() == AttentionBias::Kind::dense && value.size(3) == 1)
            constant_along_keys[i] = row_gradient(g, value.dtype());
          else
            g.d_bias[i] = Tensor::empty(value.shape(), value.dtype(), value.device());
        }
        {
          ProfileScope scope("attention.backward", ScopeKind::kernel);
          count(scope, again, 3 * again.width() + 2 * again.value_width(),
                {&again.q, &again.k, &again.v, &g.out, &g.d_out, &g.dq, &g.dk, &g.dv});
          run(again, g);
        }
        std::vector<Tensor> result{g.dq, g.dk, g.dv};
        for (size_t i = 0; i < terms.size(); ++i)
          result.push_back(g.d_bias[i].defined() ? g.d_bias[i] : constant_along_keys[i]);
        return result;
      },
      Infinities::negative);
  return {results[0], results[1]};
}

Variable split_heads(const Variable& x, int64_t heads) {
  check_defined("split_heads", "x", x);
  check(x.dim() == 3 && heads > 0 && x.size(2) % heads == 0, Error::Kind::Shape,
        "[split_heads] expected x [B, N, C], C a multiple of ", heads, " heads, got ", x.shape());
  return transpose(reshape(x, {x.size(0), x.size(1), heads, x.size(2) / heads}), 1, 2);
}

Variable join_heads(const Variable& x) {
  check_defined("join_heads", "x", x);
  check(x.dim() == 4, Error::Kind::Shape, "[join_heads] expected x [B, H, N, D], got ", x.shape());
  return reshape(transpose(x, 1, 2), {x.size(0), x.size(2), x.size(1) * x.size(3)});
}

}  // namespace torus
