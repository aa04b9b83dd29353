#include "torus/core/gemm.h"
#include "torus/core/strided.h"
#include "torus/ops/ops.h"

namespace torus {

Variable linear(const Variable& x, const Variable& weight, const Variable& bias) {
  check(x.dim() >= 1 && weight.dim() == 2, Error::Kind::Shape,
        "[linear] expected x [..., I] and weight [O, I], got ", x.shape(), " and ", weight.shape());
  const int64_t in = x.size(-1), out = weight.size(0);
  check(weight.size(1) == in, Error::Kind::Shape, "[linear] weight must have ", in,
        " columns (last dimension of x), got ", weight.size(1));
  check(is_floating(x.dtype()) && weight.dtype() == x.dtype(), Error::Kind::DType,
        "[linear] x and weight must share a floating dtype, got ", x.dtype(), " and ", weight.dtype());
  check(weight.device() == x.device(), Error::Kind::Device, "[linear] x and weight must share a device, got ",
        x.device(), " and ", weight.device());
  if (bias.defined()) {
    check(bias.shape() == Shape{out}, Error::Kind::Shape, "[linear] bias must be [", out,
          "] (rows of weight), got ", bias.shape());
    check(bias.dtype() == x.dtype(), Error::Kind::DType, "[linear] bias must be ", x.dtype(), " as x, got ",
          bias.dtype());
    check(bias.device() == x.device(), Error::Kind::Device, "[linear] bias must be on ", x.device(),
          " as x, got ", bias.device());
  }

  const Tensor rows = as_rows(x.value());
  Tensor y = Tensor::empty({rows.size(0), out}, x.dtype(), x.device());
  product(y, rows, weight.value().transpose(0, 1), {.bias = bias.defined() ? bias.value() : Tensor()});
  Shape shape = x.shape();
  shape[-1] = out;
  // Saved: x for the gradient of weight, weight for that of x. The engine sums dy over rows for bias.
  return record("linear", {x, weight, bias}, y.reshape(shape),
                [shape = x.shape(), saved_x = Saved(weight.requires_grad() ? rows : Tensor()),
                 saved_weight = Saved(x.requires_grad() ? weight.value() : Tensor())](
                    const OutputGrads& grads) -> std::vector<Tensor> {
                  const Tensor dy = as_rows(grads[0]);
                  Tensor dx, dw;
                  if (grads.wants(0)) {
                    dx = Tensor::empty({dy.size(0), shape.back()}, dy.dtype(), dy.device());
                    product(dx, dy, saved_weight.get());
                    dx = dx.reshape(shape);
                  }
                  if (grads.wants(1)) {
                    dw = Tensor::empty({dy.size(1), shape.back()}, dy.dtype(), dy.device());
                    product(dw, dy.transpose(0, 1), saved_x.get());
                  }
                  return {dx, dw, dy};
                });
}

}  // namespace torus
