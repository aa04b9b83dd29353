#include <algorithm>
#include <cmath>

#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// Rows whose contributions to the gradient of weight are summed by one task; fixed, so that the bits do not
// depend on the thread count.
constexpr int64_t block = 64;

// One row of n; returns 1 / sqrt(mean(x^2) + eps).
template <class T, class C>
C forward_row(T* y, const T* x, const T* weight, int64_t n, C eps) {
  C squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; ++i) squares += C(x[i]) * C(x[i]);
  const C scale = 1 / std::sqrt(squares / static_cast<C>(n) + eps);
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(C(x[i]) * scale * C(weight[i]));
  return scale;
}

// With h = x * scale: dx = scale * (g * w - h * mean(g * w * h)), added to what is there if `adds`;
// dw += g * h; those that are not null.
template <class T, class C>
void backward_row(T* dx, C* dw, const T* g, const T* x, const T* weight, C scale, int64_t n, bool adds) {
  if (dw)
    for (int64_t i = 0; i < n; ++i) dw[i] += C(g[i]) * (C(x[i]) * scale);
  if (!dx) return;
  C along = 0;
#pragma omp simd reduction(+ : along)
  for (int64_t i = 0; i < n; ++i) along += C(g[i]) * C(weight[i]) * (C(x[i]) * scale);
  along /= static_cast<C>(n);
  const auto slope = [=](int64_t i) { return scale * (C(g[i]) * C(weight[i]) - C(x[i]) * scale * along); };
  if (adds)
    for (int64_t i = 0; i < n; ++i) dx[i] = static_cast<T>(C(dx[i]) + slope(i));
  else
    for (int64_t i = 0; i < n; ++i) dx[i] = static_cast<T>(slope(i));
}

// All tensors are contiguous; x, y [N, C], weight [C], scales [N].
void rms_norm_forward_cpu(Tensor& y, Tensor& scales, const Tensor& x, const Tensor& weight, double eps) {
  const int64_t n = x.size(-1);
  dispatch_floating(x.dtype(), "rms_norm", [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    T* const to = y.mutable_data<T>();
    C* const scale = scales.mutable_data<C>();
    const T* const from = x.data<T>();
    const T* const w = weight.data<T>();
    parallel_for(0, x.size(0), elementwise_grain / (n + 1) + 1, [=](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row)
        scale[row] = forward_row(to + row * n, from + row * n, w, n, static_cast<C>(eps));
    });
  });
}

// Sets those of dx [N, C] and dw [C] that are defined; adds to dx if `adds`.
void rms_norm_backward_cpu(Tensor& dx, Tensor& dw, const Tensor& g, const Tensor& x, const Tensor& weight,
                           const Tensor& scales, bool adds) {
  const int64_t rows = x.size(0), n = x.size(-1), blocks = (rows + block - 1) / block;
  dispatch_floating(x.dtype(), "rms_norm", [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    Tensor parts = dw.defined() ? Tensor::zeros({blocks, n}, scales.dtype()) : Tensor();
    T* const to = dx.defined() ? dx.mutable_data<T>() : nullptr;
    C* const sums = dw.defined() ? parts.mutable_data<C>() : nullptr;
    const T* const grad = g.data<T>();
    const T* const from = x.data<T>();
    const T* const w = weight.data<T>();
    const C* const scale = scales.data<C>();
    parallel_for(0, blocks, elementwise_grain / (block * n + 1) + 1, [=](int64_t first, int64_t last) {
      for (int64_t row = first * block; row < std::min(last * block, rows); ++row)
        backward_row(to ? to + row * n : nullptr, sums ? sums + row / block * n : nullptr, grad + row * n,
                     from + row * n, w, scale[row], n, adds);
    });
    if (dw.defined()) dw.copy_(sum_to(parts, dw.shape()));
  });
}

const Kernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, double)> forward_kernel{
    "rms_norm.forward", rms_norm_forward_cpu};
const Kernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool)>
    backward_kernel{"rms_norm.backward", rms_norm_backward_cpu};

}  // namespace

Variable rms_norm(const Variable& x, const Variable& weight, double eps) {
  const ProfileScope scope("rms_norm", ScopeKind::forward);
  check_floating("rms_norm", x);
  check(x.dim() >= 1, Error::Kind::Shape, "[rms_norm] x must have at least one axis");
  check_channels("rms_norm", "weight", weight, x);
  check(eps >= 0, Error::Kind::Value, "[rms_norm] eps must be at least 0, got ", eps);

  const Tensor flat = as_rows(x.value()).contiguous(), scale = weight.value().contiguous();
  Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  Tensor scales = Tensor::empty({flat.size(0)}, x.dtype() == f64 ? f64 : f32, x.device());
  forward_kernel(x.device(), y, scales, flat, scale, eps);
  // Saved: x and the scale of each row, from which the normalised rows are made again; weight.
  return record("rms_norm", {x, weight}, y,
                [shape = x.shape(), saved_x = Saved(flat), saved_weight = Saved(scale),
                 saved_scales = Saved(scales)](const OutputGrads& grads) -> std::vector<Tensor> {
                  const Tensor &from = saved_x.get(), &w = saved_weight.get();
                  const auto like = [&](size_t input, const Shape& size) {
                    return grads.wants(input) ? Tensor::empty(size, from.dtype(), from.device()) : Tensor();
                  };
                  Tensor dx = grads.sum(0), dw = like(1, w.shape());
                  const bool adds = dx.defined();
                  if (!adds) dx = like(0, shape);
                  backward_kernel(from.device(), dx, dw, grads[0].contiguous(), from, w, saved_scales.get(),
                                  adds);
                  return {dx, dw};
                });
}

}  // namespace torus
