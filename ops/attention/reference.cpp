// The oracle: attention composed of ordinary ops, one line of the definition at a time. It asks the mask's
// predicate pair by pair and shares no tile code with the fused backends.
#include <cmath>
#include <limits>

#include "torus/ops/attention/backend.h"
#include "torus/ops/attention/map.h"
#include "torus/ops/ops.h"

namespace torus::detail {

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// [Nq, Nk], true where the pair is not allowed.
Tensor forbidden_pairs(const Mask& mask, int64_t queries, int64_t keys) {
  Tensor result = Tensor::empty({queries, keys}, boolean);
  bool* data = result.mutable_data<bool>();
  for (int64_t q = 0; q < queries; ++q)
    for (int64_t k = 0; k < keys; ++k) data[q * keys + k] = !mask.rule().allows(q, k, queries, keys);
  return result;
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
  return result;
}

// Repeats each key head for its group of query heads: [B, Hk, N, D] to [B, H, N, D].
Variable repeat_heads(const Variable& x, int64_t group) {
  if (group == 1) return x;
  const int64_t b = x.size(0), h = x.size(1), n = x.size(2), d = x.size(3);
  return reshape(expand(reshape(x, {b, h, 1, n, d}), {b, h, group, n, d}), {b, h * group, n, d});
}

// True where x equals `value`.
Tensor equals(const Tensor& x, double value) {
  Tensor result = Tensor::empty(x.shape(), boolean, x.device());
  const Tensor wide = x.to(f64).contiguous();
  for (int64_t i = 0; i < x.numel(); ++i) result.mutable_data<bool>()[i] = wide.data<double>()[i] == value;
  return result;
}

}  // namespace

AttentionOutput reference_attention(const Variable& q, const Variable& k, const Variable& v,
                                    const AttentionProblem& problem) {
  const int64_t batch = problem.batch(), heads = problem.heads(), queries = problem.queries(),
                keys = problem.keys();
  const DType dtype = q.dtype(), lse_dtype = dtype == f64 ? f64 : f32;
  if (queries == 0 || keys == 0 || batch == 0 || heads == 0) {  // no row has a key: constants
    return {Variable(Tensor::zeros({batch, heads, queries, problem.value_width()}, dtype)),
            Variable(Tensor::full({batch, heads, queries}, -infinity, lse_dtype))};
  }
  const int64_t group = heads / problem.kv_heads();
  const Tensor forbidden = forbidden_pairs(problem.mask, queries, keys);
  const Variable k_heads = repeat_heads(k, group), v_heads = repeat_heads(v, group);

  const Variable s = masked_fill(matmul(q, transpose(k_heads, 2, 3)) * problem.scale, forbidden, -infinity);
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
