#include "torus/ops/attention/attention.h"

#include <algorithm>
#include <cmath>

#include "torus/autograd/tape.h"
#include "torus/ops/attention/backend.h"
#include "torus/ops/attention/map.h"

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

const AttentionBackend& choose(const AttentionProblem& problem, Backend wanted) {
  std::string refusals;
  for (const AttentionBackend& backend : detail::attention_backends()) {
    if (wanted != Backend::automatic ? backend.id != wanted : !allowed(backend.id)) continue;
    const std::string refusal = backend.refusal(problem);
    if (refusal.empty()) return backend;
    refusals += std::string(refusals.empty() ? "" : "; ") + name(backend.id) + ": " + refusal;
  }
  fail(Error::Kind::Device, "[attention] no backend can run this: ",
       refusals.empty() ? "none is allowed by the BackendScope" : refusals);
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
  }
  return "unknown";
}

const std::vector<AttentionBackend>& detail::attention_backends() {
  static const std::vector<AttentionBackend> backends{cpu_attention};
  return backends;
}

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
  check_shapes(q.value(), k.value(), v.value());
  check(options.dropout >= 0 && options.dropout <= 1, Error::Kind::Value,
        "[attention] dropout must be in [0, 1], got ", options.dropout);
  AttentionProblem problem;
  problem.q = unit_stride(q.value());
  problem.k = unit_stride(k.value());
  problem.v = unit_stride(v.value());
  problem.mask = options.mask;
  problem.mask.rule().check_lengths(problem.queries(), problem.keys());
  problem.scale =
      options.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<int64_t>(problem.width(), 1))));
  check(std::isfinite(problem.scale), Error::Kind::Value, "[attention] scale must be finite, got ",
        problem.scale);
  problem.deterministic = options.deterministic;
  if (options.dropout > 0) {
    Generator& generator = options.generator ? *options.generator : default_generator();
    problem.dropout = {static_cast<float>(options.dropout), generator.seed(), generator.reserve(1)};
  }

  const bool reference_only =
      options.backend == Backend::reference ||
      (options.backend == Backend::automatic && allowed_backends == std::vector{Backend::reference});
  if (reference_only) return detail::reference_attention(q, k, v, problem);

  const AttentionBackend& backend = choose(problem, options.backend);
  const DType lse_dtype = q.dtype() == f64 ? f64 : f32;
  Tensor out = detail::empty_heads(problem.batch(), problem.heads(), problem.queries(), problem.value_width(),
                                   q.dtype(), q.device());
  Tensor lse = Tensor::empty({problem.batch(), problem.heads(), problem.queries()}, lse_dtype, q.device());
  backend.forward(problem, out, lse);

  // Saved: the operands, out (for delta = rowsum(dO * O)) and lse (to recompute the weights).
  const Saved saved_q(problem.q), saved_k(problem.k), saved_v(problem.v), saved_out(out), saved_lse(lse);
  problem.q = problem.k = problem.v = Tensor();
  auto results = record("attention", std::vector{q, k, v}, std::vector{out, lse},
                        [=, run = backend.backward](const OutputGrads& grads) mutable -> std::vector<Tensor> {
                          AttentionProblem again = problem;
                          again.q = saved_q.get(), again.k = saved_k.get(), again.v = saved_v.get();
                          AttentionGradients g;
                          g.out = saved_out.get(), g.lse = saved_lse.get();
                          g.d_out = grads[0].defined() ? unit_stride(grads[0]) : Tensor();
                          g.d_lse = grads[1];
                          const auto like = [&](const Tensor& x) {
                            return detail::empty_heads(x.size(0), x.size(1), x.size(2), x.size(3), x.dtype(),
                                                       x.device());
                          };
                          if (grads.wants(0)) g.dq = like(again.q);
                          if (grads.wants(1)) g.dk = like(again.k);
                          if (grads.wants(2)) g.dv = like(again.v);
                          run(again, g);
                          return {g.dq, g.dk, g.dv};
                        });
  return {results[0], results[1]};
}

}  // namespace torus
