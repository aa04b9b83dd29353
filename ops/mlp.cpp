#include "torus/core/gemm.h"
#include "torus/core/profiler.h"
#include "torus/core/strided.h"
#include "torus/ops/gelu.h"
#include "torus/ops/linear.h"
#include "torus/ops/ops.h"

namespace torus {

Variable mlp(const Variable& x, const Variable& up, const Variable& up_bias, const Variable& down,
             const Variable& down_bias, const Variable& residual, Gelu form) {
  check_defined("mlp", "x", x);
  check_defined("mlp", "up", up);
  check_defined("mlp", "down", down);
  const ProfileScope scope("mlp", ScopeKind::forward);
  const Shape shape =
      check_linear("mlp", check_linear("mlp", x.shape(), x, up, up_bias), x, down, down_bias, residual);
  const Tensor rows = as_rows(x.value());
  const auto matrix = [&](int64_t columns) {
    return Tensor::empty({rows.size(0), columns}, x.dtype(), x.device());
  };
  const auto value_of = [](const Variable& given) { return given.defined() ? given.value() : Tensor(); };
  Tensor input = matrix(up.size(0)), hidden = matrix(up.size(0)), y = matrix(down.size(0));
  if (form != Gelu::tanh ||
      !product_gelu(hidden, input, rows, up.value().transpose(0, 1), value_of(up_bias))) {
    product(input, rows, up.value().transpose(0, 1), {.bias = value_of(up_bias)});
    gelu_forward(hidden, input, form);
  }
  product(y, hidden, down.value().transpose(0, 1),
          {.bias = value_of(down_bias), .addend = residual.defined() ? as_rows(residual.value()) : Tensor()});
  // Saved: of what each product read, what the other operand's gradient needs, and the input of GELU for its
  // derivative.
  const bool wants_input = x.requires_grad() || up.requires_grad() || up_bias.requires_grad();
  const auto if_wanted = [](bool wanted, const Tensor& tensor) { return Saved(wanted ? tensor : Tensor()); };
  return record(
      "mlp", {x, up, up_bias, down, down_bias, residual}, y.reshape(shape),
      [form, x_shape = x.shape(), up_shape = up.shape(), down_shape = down.shape(),
       saved_x = if_wanted(up.requires_grad(), rows), saved_up = if_wanted(x.requires_grad(), up.value()),
       saved_down = if_wanted(wants_input, down.value()), saved_input = if_wanted(wants_input, input),
       saved_hidden =
           if_wanted(down.requires_grad(), hidden)](const OutputGrads& grads) -> std::vector<Tensor> {
        const Tensor dy = as_rows(grads[0]);
        std::vector<Tensor> result(6);
        if (grads.wants(4)) result[4] = sum_to(dy, {dy.size(1)});
        if (grads.wants(3))
          result[3] = add_product(grads, 3, dy.transpose(0, 1), saved_hidden.get(), down_shape);
        if (grads.wants(5)) result[5] = grads[0];
        if (!grads.wants(0) && !grads.wants(1) && !grads.wants(2)) return result;

        const Tensor& at = saved_input.get();
        Tensor d_input = Tensor::empty(at.shape(), at.dtype(), at.device());
        product(d_input, dy, saved_down.get());
        if (grads.wants(2))
          result[2] = gelu_backward_and_sums(d_input, d_input, at, form);
        else
          gelu_backward(d_input, d_input, at, form);
        if (grads.wants(0)) result[0] = add_product(grads, 0, d_input, saved_up.get(), x_shape);
        if (grads.wants(1))
          result[1] = add_product(grads, 1, d_input.transpose(0, 1), saved_x.get(), up_shape);
        return result;
      });
}

}  // namespace torus
