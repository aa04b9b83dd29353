#include <cmath>

#include "torus/core/kernel.h"
#include "torus/core/strided.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// A 16-bit float as the integer it is stored in: choosing between structs does not vectorise.
template <class T>
auto& bits_of(T& element) {
  if constexpr (sizeof(T) == 2)
    return element.bits;
  else
    return element;
}

// What makes the loop vectorise: constant steps, bytes for bool, and both values read before the choice.
template <class T, class StepA, class StepB>
void choose_run(T* to, const unsigned char* condition, const T* a, const T* b, int64_t count, StepA a_step,
                StepB b_step) {
  for (int64_t i = 0; i < count; ++i) {
    const auto yes = bits_of(a[i * a_step]), no = bits_of(b[i * b_step]);
    bits_of(to[i]) = condition[i] != 0 ? yes : no;
  }
}

// y = a where condition, b elsewhere; all of one shape. b may be y itself.
void where_cpu(Tensor& y, const Tensor& condition, const Tensor& a, const Tensor& b) {
  dispatch(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const y_data = y.mutable_data<T>();
    const auto* const condition_data = reinterpret_cast<const unsigned char*>(condition.data<bool>());
    const T *const a_data = a.data<T>(), *const b_data = b.data<T>();
    for_each_run<4>(y.shape(), {y.strides(), condition.strides(), a.strides(), b.strides()},
                    elementwise_grain, [=](const auto& offset, const auto& step, int64_t count) {
                      T* to = y_data + offset[0];
                      const unsigned char* which = condition_data + offset[1];
                      const T *yes = a_data + offset[2], *no = b_data + offset[3];
                      constexpr std::integral_constant<int64_t, 0> same;
                      constexpr std::integral_constant<int64_t, 1> next;
                      const bool plain = step[0] == 1 && step[1] == 1;
                      if (plain && step[2] == 1 && step[3] == 1)
                        choose_run(to, which, yes, no, count, next, next);
                      else if (plain && step[2] == 0 && step[3] == 1)
                        choose_run(to, which, yes, no, count, same, next);
                      else if (plain && step[2] == 1 && step[3] == 0)
                        choose_run(to, which, yes, no, count, next, same);
                      else
                        for (int64_t i = 0; i < count; ++i)
                          to[i * step[0]] = which[i * step[1]] ? yes[i * step[2]] : no[i * step[3]];
                    });
  });
}

const Kernel<void(Tensor&, const Tensor&, const Tensor&, const Tensor&)> where_kernel{"where", where_cpu};

// The shape is that of `condition`.
Tensor chosen(const Tensor& condition, const Tensor& a, const Tensor& b) {
  Tensor y = Tensor::empty(condition.shape(), a.dtype(), a.device());
  where_kernel(y.device(), y, condition, a.expand(y.shape()), b.expand(y.shape()));
  return y;
}

Tensor constant(double value, const Tensor& like) {
  return Tensor::full({}, value, like.dtype(), like.device()).expand(like.shape());
}

// The mask, stretched to x.
Tensor checked_mask(const char* op, const Tensor& x, const Tensor& mask, double value) {
  check(is_floating(x.dtype()) || (std::isfinite(value) && value == std::trunc(value)), Error::Kind::Value,
        "[", op, "] expected an integer to fill ", x.dtype(), " with, got ", value);
  check(mask.dtype() == boolean, Error::Kind::DType, "[", op, "] mask must be bool, got ", mask.dtype());
  check(mask.device() == x.device(), Error::Kind::Device, "[", op, "] mask must be on ", x.device(),
        " as x, got ", mask.device());
  check(broadcast_shapes(op, x.shape(), mask.shape()) == x.shape(), Error::Kind::Shape, "[", op, "] mask ",
        mask.shape(), " must broadcast to x ", x.shape());
  return mask.expand(x.shape());
}

}  // namespace

Variable where(const Tensor& condition, const Variable& a, const Variable& b) {
  check_defined("where", "a", a);
  check_defined("where", "b", b);
  const ProfileScope scope("where", ScopeKind::forward);
  check(condition.dtype() == boolean, Error::Kind::DType, "[where] condition must be bool, got ",
        condition.dtype());
  check(a.dtype() == b.dtype(), Error::Kind::DType, "[where] expected one dtype, got ", a.dtype(), " and ",
        b.dtype());
  check(a.device() == b.device() && a.device() == condition.device(), Error::Kind::Device,
        "[where] expected one device, got ", condition.device(), ", ", a.device(), " and ", b.device());
  const Tensor which = condition.expand(
      broadcast_shapes("where", condition.shape(), broadcast_shapes("where", a.shape(), b.shape())));
  // Saved: only the condition; what is not chosen gets no gradient.
  return record("where", {a, b}, chosen(which, a.value(), b.value()),
                [saved = Saved(which)](const OutputGrads& grads) -> std::vector<Tensor> {
                  const Tensor& condition_of = saved.get();
                  const Tensor &dy = grads[0], none = constant(0, dy);
                  return {grads.wants(0) ? chosen(condition_of, dy, none) : Tensor(),
                          grads.wants(1) ? chosen(condition_of, none, dy) : Tensor()};
                });
}

Variable masked_fill(const Variable& x, const Tensor& mask, double value) {
  check_defined("masked_fill", "x", x);
  const ProfileScope scope("masked_fill", ScopeKind::forward);
  const Tensor which = checked_mask("masked_fill", x.value(), mask, value);
  // Saved: only the mask; filled elements get no gradient.
  return record(
      "masked_fill", {x}, chosen(which, constant(value, x.value()), x.value()),
      [saved = Saved(which)](const OutputGrads& grads) -> std::vector<Tensor> {
        return {chosen(saved.get(), constant(0, grads[0]), grads[0])};
      },
      Infinities::both);
}

Tensor& masked_fill_(Tensor& x, const Tensor& mask, double value) {
  ProfileScope scope("masked_fill_", ScopeKind::forward);
  scope.show(x);
  const Tensor which = checked_mask("masked_fill_", x, mask, value);
  for (int axis = 0; axis < x.dim(); ++axis)
    check(x.size(axis) <= 1 || x.strides()[axis] != 0, Error::Kind::Shape,
          "[masked_fill_] x must have its own memory for each element, but axis ", axis, " is expanded");
  where_kernel(x.device(), x, which, constant(value, x), x);
  return x;
}

Variable& masked_fill_(Variable& x, const Tensor& mask, double value) {
  check_defined("masked_fill_", "x", x);
  check(!recording("masked_fill_", {x}) && x.tape_id() == 0, Error::Kind::Value,
        "[masked_fill_] writing in place would make the gradient of x wrong; use masked_fill");
  Tensor memory = x.value();
  masked_fill_(memory, mask, value);
  return x;
}

}  // namespace torus
