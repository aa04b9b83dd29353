// The oracle: attention composed of ordinary ops, one line of the definition at a time. It asks the mask's
// predicate pair by pair and shares no tile code with the fused backends.
#include <algorithm>
#include <cmath>
#include <limits>

#include "torus/core/kernel.h"
#include "torus/ops/attention/backend.h"
#include "torus/ops/attention/map.h"
#include "torus/ops/ops.h"

namespace torus::detail {

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// What follows is made on the host, pair by pair, and moved to where q is.

// True where the pair is not allowed: [B, H, Nq, Nk], with 1 for B or H where the mask does not depend on
// them.
Tensor forbidden_pairs(const AttentionProblem& problem) {
  const MaskRule& rule = problem.mask.rule();
  const int64_t batches = rule.per_batch() ? problem.batch() : 1,
                heads = rule.per_head() ? problem.heads() : 1;
  Tensor result = Tensor::empty({batches, heads, problem.queries(), problem.keys()}, boolean);
  bool* data = result.mutable_data<bool>();
  for (int64_t b = 0; b < batches; ++b)
    for (int64_t h = 0; h < heads; ++h) {
      const MaskShape shape{problem.queries(), problem.keys(), problem.batch(), b, h};
      for (int64_t q = 0; q < problem.queries(); ++q)
        for (int64_t k = 0; k < problem.keys(); ++k) *data++ = !rule.allows(shape, q, k);
    }
  return result.to(problem.q.device());
}

// The place of each pair in a table of relative biases, without its head: [Nq, Nk].
Tensor table_places(const AttentionBias& bias, int64_t tokens) {
  Tensor result = Tensor::empty({tokens, tokens}, i64);
  int64_t* data = result.mutable_data<int64_t>();
  const Shape& sizes = bias.value().shape();
  for (int64_t q = 0; q < tokens; ++q)
    for (int64_t k = 0; k < tokens; ++k) {
      int64_t place = 0, stride = 1, from = q, to = k;
      for (int a = static_cast<int>(bias.grid().size()) - 1; a >= 0; --a) {
        const int64_t length = bias.grid()[static_cast<size_t>(a)], size = sizes[a + 1];
        int64_t offset = to % length - from % length;
        if (bias.wrapped()[static_cast<size_t>(a)]) {
          // The nearest of the images one turn apart; of two equally near ones that below.
          for (int64_t image : {offset - length, offset + length})
            if (std::abs(image) < std::abs(offset) || (std::abs(image) == std::abs(offset) && image < offset))
              offset = image;
        }
        place += (std::clamp(offset, -(size / 2), size / 2) + size / 2) * stride;
        stride *= size, from /= length, to /= length;
      }
      *data++ = place;
    }
  return result.to(bias.value().device());
}

// One term as an ordinary tensor that broadcasts to [B, H, Nq, Nk].
Variable dense_bias(const AttentionBias& bias, const AttentionProblem& problem) {
  const Variable& value = bias.value();
  if (bias.kind() == AttentionBias::Kind::dense) return value;
  const int64_t heads = value.size(0), queries = problem.queries(), keys = problem.keys();
  if (bias.kind() == AttentionBias::Kind::alibi) {
    Tensor distance = Tensor::empty({queries, keys}, f64);
    double* data = distance.mutable_data<double>();
    for (int64_t q = 0; q < queries; ++q)
      for (int64_t k = 0; k < keys; ++k) *data++ = static_cast<double>(-std::abs((k - keys) - (q - queries)));
    return cast(reshape(cast(value, f64), {heads, 1, 1}) * Variable(distance.to(value.device())),
                problem.q.dtype());
  }
  const Variable rows = transpose(reshape(value, {heads, value.numel() / heads}), 0, 1);
  return permute(embedding(rows, table_places(bias, queries)), {2, 0, 1});
}

// keep / (1 - p), [B, H, Nq, Nk].
Tensor dropout_factors(const AttentionProblem& problem) {
  const AttentionDropout& dropout = problem.dropout;
  const int64_t matrices = problem.batch() * problem.heads(), queries = problem.queries(),
                keys = problem.keys();
  Tensor result = Tensor::empty({problem.batch(), problem.heads(), queries, keys}, f64);
  double* data = result.mutable_data<double>();
  for (int64_t bh = 0; bh < matrices; ++bh)
    for (int64_t q = 0; q < queries; ++q) {
      const uint32_t row = dropout.row_word(bh, q);
      for (int64_t k = 0; k < keys; ++k)
        *data++ = AttentionDropout::mix(row, static_cast<uint32_t>(k)) >= dropout.threshold()
                      ? dropout.keep_scale()
                      : 0;
    }
  return result.to(problem.q.device());
}

// Repeats each key head for its group of query heads: [B, Hk, N, D] to [B, H, N, D].
Variable repeat_heads(const Variable& x, int64_t group) {
  if (group == 1) return x;
  if (group == 0) return slice(x, 1, 0, 0);
  const int64_t b = x.size(0), h = x.size(1), n = x.size(2), d = x.size(3);
  return reshape(expand(reshape(x, {b, h, 1, n, d}), {b, h, group, n, d}), {b, h * group, n, d});
}

void equals_cpu(Tensor& result, const Tensor& x, double value) {
  const Tensor wide = x.to(f64).contiguous();
  const double* from = wide.data<double>();
  bool* to = result.mutable_data<bool>();
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] == value;
}

const Kernel<void(Tensor&, const Tensor&, double)> equals_kernel{"equals", equals_cpu};

}  // namespace

Tensor equals(const Tensor& x, double value) {
  Tensor result = Tensor::empty(x.shape(), boolean, x.device());
  equals_kernel(x.device(), result, x, value);
  return result;
}

AttentionOutput reference_attention(const Variable& q, const Variable& k, const Variable& v,
                                    const AttentionProblem& problem) {
  const int64_t batch = problem.batch(), heads = problem.heads(), queries = problem.queries();
  const DType dtype = q.dtype(), lse_dtype = dtype == f64 ? f64 : f32;
  const int64_t group = heads / std::max<int64_t>(problem.kv_heads(), 1);
  const Variable k_heads = repeat_heads(k, group), v_heads = repeat_heads(v, group);

  Variable s = matmul(q, transpose(k_heads, 2, 3)) * problem.scale;
  if (problem.softcap > 0) s = tanh(s / problem.softcap) * problem.softcap;
  for (const AttentionBias& bias : problem.bias) s = s + dense_bias(bias, problem);
  if (s.numel() == 0) {  // no row has a key: sums of nothing
    const Variable none = masked_fill(sum(s, {-1}), Tensor::full({1}, 1, boolean, q.device()), -infinity);
    return {matmul(s, v_heads), cast(none, lse_dtype)};
  }
  s = masked_fill(s, forbidden_pairs(problem), -infinity);
  // The row's maximum is only for range: no gradient flows through it.
  Tensor top = max(s.detach(), -1, true).value();
  top = masked_fill(top, equals(top, -infinity), 0).value();
  const Variable e = exp(s - Variable(top)), total = sum(e, {-1}, true);
  const Tensor no_key = equals(total.value(), 0);
  const Variable safe_total = masked_fill(total, no_key, 1);
  const Variable lse = masked_fill(log(safe_total) + Variable(top), no_key, -infinity);
  Variable p = e / safe_total;
  if (problem.dropout.active()) p = p * Variable(dropout_factors(problem).to(dtype));
  return {matmul(p, v_heads), cast(reshape(lse, {batch, heads, queries}), lse_dtype)};
}

}  // namespace torus::detail
