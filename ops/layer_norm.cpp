#include <algorithm>
#include <cmath>

#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// Rows whose contributions to the gradients of weight and bias are summed by one task; fixed, so that the
// bits do not depend on the thread count.
constexpr int64_t block = 64;

// One row of n; statistics gets its mean, in two parts so that a mean far from 0 costs no accuracy, and
// 1 / sqrt(variance + eps).
template <class T, class C>
void forward_row(T* y, C* statistics, const T* x, const T* weight, const T* bias, int64_t n, C eps) {
  C sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += C(x[i]);
  // Moments about a rounded mean, corrected by how far it was off.
  const C near = sum / static_cast<C>(n);
  C off = 0, squares = 0;
#pragma omp simd reduction(+ : off, squares)
  for (int64_t i = 0; i < n; ++i) {
    const C d = C(x[i]) - near;
    off += d;
    squares += d * d;
  }
  off /= static_cast<C>(n);
  const C variance = std::max(C(0), squares / static_cast<C>(n) - off * off);
  const C rstd = 1 / std::sqrt(variance + eps);
  if (bias)
    for (int64_t i = 0; i < n; ++i)
      y[i] = static_cast<T>((C(x[i]) - near - off) * rstd * C(weight[i]) + C(bias[i]));
  else
    for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>((C(x[i]) - near - off) * rstd * C(weight[i]));
  statistics[0] = near;
  statistics[1] = off;
  statistics[2] = rstd;
}

// With h = (x - mean) * rstd: dx = rstd * (g * w - mean(g * w) - h * mean(g * w * h)), added to what is there
// if `adds`; dw += g * h, db += g; those that are not null.
template <class T, class C>
void backward_row(T* dx, C* dw, C* db, const T* g, const T* x, const T* weight, const C* statistics,
                  int64_t n, bool adds) {
  const C near = statistics[0], off = statistics[1], rstd = statistics[2];
  if (dw)
    for (int64_t i = 0; i < n; ++i) dw[i] += C(g[i]) * ((C(x[i]) - near - off) * rstd);
  if (db)
    for (int64_t i = 0; i < n; ++i) db[i] += C(g[i]);
  if (!dx) return;
  C plain = 0, along = 0;
#pragma omp simd reduction(+ : plain, along)
  for (int64_t i = 0; i < n; ++i) {
    const C scaled = C(g[i]) * C(weight[i]);
    plain += scaled;
    along += scaled * ((C(x[i]) - near - off) * rstd);
  }
  plain /= static_cast<C>(n);
  along /= static_cast<C>(n);
  const auto slope = [=](int64_t i) {
    return rstd * (C(g[i]) * C(weight[i]) - plain - (C(x[i]) - near - off) * rstd * along);
  };
  if (adds)
    for (int64_t i = 0; i < n; ++i) dx[i] = static_cast<T>(C(dx[i]) + slope(i));
  else
    for (int64_t i = 0; i < n; ++i) dx[i] = static_cast<T>(slope(i));
}

// All tensors are contiguous; x, y [N, C]; weight, bias [C], bias may be undefined; statistics [N, 3].
void layer_norm_forward_cpu(Tensor& y, Tensor& statistics, const Tensor& x, const Tensor& weight,
                            const Tensor& bias, double eps) {
  const int64_t n = x.size(-1);
  dispatch_floating(x.dtype(), "layer_norm", [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    T* const to = y.mutable_data<T>();
    C* const moments = statistics.mutable_data<C>();
    const T* const from = x.data<T>();
    const T* const w = weight.data<T>();
    const T* const b = bias.defined() ? bias.data<T>() : nullptr;
    parallel_for(0, x.size(0), elementwise_grain / (n + 1) + 1, [=](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row)
        forward_row(to + row * n, moments + 3 * row, from + row * n, w, b, n, static_cast<C>(eps));
    });
  });
}

// Sets those of dx [N, C], dw [C] and db [C] that are defined; adds to dx if `adds`.
void layer_norm_backward_cpu(Tensor& dx, Tensor& dw, Tensor& db, const Tensor& g, const Tensor& x,
                             const Tensor& weight, const Tensor& statistics, bool adds) {
  const int64_t rows = x.size(0), n = x.size(-1), blocks = (rows + block - 1) / block;
  dispatch_floating(x.dtype(), "layer_norm", [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    Tensor dw_parts = dw.defined() ? Tensor::zeros({blocks, n}, statistics.dtype()) : Tensor();
    Tensor db_parts = db.defined() ? Tensor::zeros({blocks, n}, statistics.dtype()) : Tensor();
    T* const to = dx.defined() ? dx.mutable_data<T>() : nullptr;
    C* const dw_sums = dw.defined() ? dw_parts.mutable_data<C>() : nullptr;
    C* const db_sums = db.defined() ? db_parts.mutable_data<C>() : nullptr;
    const T* const grad = g.data<T>();
    const T* const from = x.data<T>();
    const T* const w = weight.data<T>();
    const C* const moments = statistics.data<C>();
    parallel_for(0, blocks, elementwise_grain / (block * n + 1) + 1, [=](int64_t first, int64_t last) {
      for (int64_t row = first * block; row < std::min(last * block, rows); ++row) {
        const int64_t part = row / block * n;
        backward_row(to ? to + row * n : nullptr, dw_sums ? dw_sums + part : nullptr,
                     db_sums ? db_sums + part : nullptr, grad + row * n, from + row * n, w, moments + 3 * row,
                     n, adds);
      }
    });
    if (dw.defined()) dw.copy_(sum_to(dw_parts, dw.shape()));
    if (db.defined()) db.copy_(sum_to(db_parts, db.shape()));
  });
}

const Kernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&, double)> forward_kernel{
    "layer_norm.forward", layer_norm_forward_cpu};
const Kernel<void(Tensor&, Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                  bool)>
    backward_kernel{"layer_norm.backward", layer_norm_backward_cpu};

}  // namespace

Variable layer_norm(const Variable& x, const Variable& weight, const Variable& bias, double eps) {
  const ProfileScope scope("layer_norm", ScopeKind::forward);
  check_floating("layer_norm", x);
  check(x.dim() >= 1, Error::Kind::Shape, "[layer_norm] x must have at least one axis");
  check_channels("layer_norm", "weight", weight, x);
  if (bias.defined()) check_channels("layer_norm", "bias", bias, x);
  check(eps >= 0, Error::Kind::Value, "[layer_norm] eps must be at least 0, got ", eps);

  const Tensor flat = as_rows(x.value()).contiguous(), scale = weight.value().contiguous();
  Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  Tensor statistics = Tensor::empty({flat.size(0), 3}, x.dtype() == f64 ? f64 : f32, x.device());
  forward_kernel(x.device(), y, statistics, flat, scale,
                 bias.defined() ? bias.value().contiguous() : Tensor(), eps);
  // Saved: x and its statistics, from which the normalised rows are made again; weight.
  return record("layer_norm", {x, weight, bias}, y,
                [shape = x.shape(), saved_x = Saved(flat), saved_weight = Saved(scale),
                 saved_statistics = Saved(statistics)](const OutputGrads& grads) -> std::vector<Tensor> {
                  const Tensor &from = saved_x.get(), &w = saved_weight.get();
                  const auto like = [&](size_t input, const Shape& size) {
                    return grads.wants(input) ? Tensor::empty(size, from.dtype(), from.device()) : Tensor();
                  };
                  Tensor dx = grads.sum(0), dw = like(1, w.shape()), db = like(2, w.shape());
                  const bool adds = dx.defined();
                  if (!adds) dx = like(0, shape);
                  backward_kernel(from.device(), dx, dw, db, grads[0].contiguous(), from, w,
                                  saved_statistics.get(), adds);
                  return {dx, dw, db};
                });
}

}  // namespace torus
