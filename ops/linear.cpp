#include "torus/ops/linear.h"

#include "torus/core/gemm.h"
#include "torus/core/profiler.h"
#include "torus/core/strided.h"
#include "torus/ops/ops.h"

namespace torus {

Shape check_linear(const char* op, const Shape& applied_to, const Variable& x, const Variable& weight,
                   const Variable& bias, const Variable& residual) {
  check(applied_to.dim() >= 1 && weight.dim() == 2, Error::Kind::Shape, "[", op,
        "] expected x [..., I] and weight [O, I], got ", applied_to, " and ", weight.shape());
  Shape shape = applied_to;
  shape[-1] = weight.size(0);
  check(weight.size(1) == applied_to.back(), Error::Kind::Shape, "[", op, "] weight must have ",
        applied_to.back(), " columns (last dimension of x), got ", weight.size(1));
  check(is_floating(x.dtype()) && weight.dtype() == x.dtype(), Error::Kind::DType, "[", op,
        "] x and weight must share a floating dtype, got ", x.dtype(), " and ", weight.dtype());
  check(weight.device() == x.device(), Error::Kind::Device, "[", op,
        "] x and weight must share a device, got ", x.device(), " and ", weight.device());
  const auto check_like_x = [&](const char* name, const Variable& given, const Shape& wanted,
                                const char* why) {
    check(given.shape() == wanted, Error::Kind::Shape, "[", op, "] ", name, " must be ", wanted, " (", why,
          "), got ", given.shape());
    check(given.dtype() == x.dtype(), Error::Kind::DType, "[", op, "] ", name, " must be ", x.dtype(),
          " as x, got ", given.dtype());
    check(given.device() == x.device(), Error::Kind::Device, "[", op, "] ", name, " must be on ", x.device(),
          " as x, got ", given.device());
  };
  if (bias.defined()) check_like_x("bias", bias, {weight.size(0)}, "rows of weight");
  if (residual.defined()) check_like_x("residual", residual, shape, "the result");
  return shape;
}

Tensor add_product(const OutputGrads& grads, size_t input, const Tensor& a, const Tensor& b,
                   const Shape& shape) {
  Tensor sum = grads.sum(input);
  const bool accumulate = sum.defined();
  if (!accumulate) sum = Tensor::empty(shape, a.dtype(), a.device());
  Tensor matrix = as_rows(sum);
  product(matrix, a, b, {.accumulate = accumulate});
  return sum;
}

namespace {

// [rows, columns] for a product. On CUDA, long rows of 16-bit numbers begin on multiples of 16 bytes, so that
// the products that they go through are fast whatever their length is, such as that of a vocabulary.
Tensor aligned_rows(int64_t rows, int64_t columns, DType dtype, Device device) {
  const bool pads = device != cpu && size_of(dtype) == 2 && columns > 32;
  return Tensor::empty({rows, pads ? (columns + 7) / 8 * 8 : columns}, dtype, device).slice(1, 0, columns);
}

}  // namespace

Variable linear(const Variable& x, const Variable& weight, const Variable& bias, const Variable& residual) {
  check_defined("linear", "x", x);
  check_defined("linear", "weight", weight);
  const ProfileScope scope("linear", ScopeKind::forward);
  const Shape shape = check_linear("linear", x.shape(), x, weight, bias, residual);
  const Tensor rows = as_rows(x.value());
  Tensor y = aligned_rows(rows.size(0), shape.back(), x.dtype(), x.device());
  product(y, rows, weight.value().transpose(0, 1),
          {.bias = bias.defined() ? bias.value() : Tensor(),
           .addend = residual.defined() ? as_rows(residual.value()) : Tensor()});
  // Saved: x for the gradient of weight, weight for that of x.
  return record("linear", {x, weight, bias, residual}, y.reshape(shape),
                [x_shape = x.shape(), w_shape = weight.shape(),
                 saved_x = Saved(weight.requires_grad() ? rows : Tensor()),
                 saved_weight = Saved(x.requires_grad() ? weight.value() : Tensor())](
                    const OutputGrads& grads) -> std::vector<Tensor> {
                  const Tensor dy = as_rows(grads[0]);
                  Tensor dx, dw, db;
                  if (grads.wants(2)) db = sum_to(dy, {dy.size(1)});
                  if (grads.wants(0)) dx = add_product(grads, 0, dy, saved_weight.get(), x_shape);
                  if (grads.wants(1)) dw = add_product(grads, 1, dy.transpose(0, 1), saved_x.get(), w_shape);
                  return {dx, dw, db, grads.wants(3) ? grads[0] : Tensor()};
                });
}

}  // namespace torus
