#include "torus/core/kernel.h"
#include "torus/core/strided.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// y = value where mask, x elsewhere; all of one shape.
void masked_fill_cpu(Tensor& y, const Tensor& x, const Tensor& mask, double value) {
  dispatch(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* to = y.mutable_data<T>();
    const T* from = x.data<T>();
    const bool* where = mask.data<bool>();
    const T fill = static_cast<T>(value);
    for_each_run<3>(y.shape(), {y.strides(), x.strides(), mask.strides()}, elementwise_grain,
                    [&](auto offset, auto step, int64_t count) {
                      for (int64_t i = 0; i < count; ++i)
                        to[offset[0] + i * step[0]] =
                            where[offset[2] + i * step[2]] ? fill : from[offset[1] + i * step[1]];
                    });
  });
}

const Kernel<void(Tensor&, const Tensor&, const Tensor&, double)> masked_fill_kernel{"masked_fill",
                                                                                     masked_fill_cpu};

Tensor filled(const Tensor& x, const Tensor& mask, double value) {
  Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  masked_fill_kernel(x.device(), y, x, mask, value);
  return y;
}

}  // namespace

Variable masked_fill(const Variable& x, const Tensor& mask, double value) {
  check(mask.dtype() == boolean, Error::Kind::DType, "[masked_fill] mask must be bool, got ", mask.dtype());
  check(broadcast_shapes("masked_fill", x.shape(), mask.shape()) == x.shape(), Error::Kind::Shape,
        "[masked_fill] mask ", mask.shape(), " must broadcast to x ", x.shape());
  const Tensor where = mask.expand(x.shape());
  // Saved: only the mask; filled elements get no gradient.
  return record("masked_fill", {x}, filled(x.value(), where, value),
                [saved = Saved(where)](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {filled(grads[0], saved.get(), 0)};
                });
}

}  // namespace torus
