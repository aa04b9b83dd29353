#include "torus/core/gemm.h"
#include "torus/core/strided.h"
#include "torus/ops/ops.h"

namespace torus {

Variable linear(const Variable& x, const Variable& weight, const Variable& bias, const Variable& residual) {
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

  Shape shape = x.shape();
  shape[-1] = out;
  if (residual.defined()) {
    check(residual.shape() == shape, Error::Kind::Shape, "[linear] residual must be ", shape,
          " (the result), got ", residual.shape());
    check(residual.dtype() == x.dtype(), Error::Kind::DType, "[linear] residual must be ", x.dtype(),
          " as x, got ", residual.dtype());
    check(residual.device() == x.device(), Error::Kind::Device, "[linear] residual must be on ", x.device(),
          " as x, got ", residual.device());
  }

  const Tensor rows = as_rows(x.value());
  Tensor y = Tensor::empty({rows.size(0), out}, x.dtype(), x.device());
  product(y, rows, weight.value().transpose(0, 1),
          {.bias = bias.defined() ? bias.value() : Tensor(),
           .addend = residual.defined() ? as_rows(residual.value()) : Tensor()});
  // Saved: x for the gradient of weight, weight for that of x.
  return record("linear", {x, weight, bias, residual}, y.reshape(shape),
                [shape = x.shape(), saved_x = Saved(weight.requires_grad() ? rows : Tensor()),
                 saved_weight = Saved(x.requires_grad() ? weight.value() : Tensor())](
                    const OutputGrads& grads) -> std::vector<Tensor> {
                  const Tensor dy = as_rows(grads[0]);
                  // a @ b, added to the gradient that the input has so far.
                  const auto add_product = [&](size_t input, const Tensor& a, const Tensor& b,
                                               const Shape& to, Tensor* row_sums = nullptr) {
                    Tensor d = grads.sum(input);
                    const bool accumulate = d.defined();
                    if (!accumulate) d = Tensor::empty(to, dy.dtype(), dy.device());
                    Tensor matrix = as_rows(d);
                    product(matrix, a, b, {.accumulate = accumulate, .row_sums = row_sums});
                    return d;
                  };
                  Tensor dx, dw, db;
                  if (grads.wants(0)) dx = add_product(0, dy, saved_weight.get(), shape);
                  if (grads.wants(1))
                    dw = add_product(1, dy.transpose(0, 1), saved_x.get(), {dy.size(1), shape.back()},
                                     grads.wants(2) ? &db : nullptr);
                  else if (grads.wants(2))
                    db = sum_to(dy, {dy.size(1)});
                  return {dx, dw, db, grads.wants(3) ? grads[0] : Tensor()};
                });
}

}  // namespace torus
