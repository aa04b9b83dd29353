#include "torus/autograd/gradcheck.h"
#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// The shape of x with the reduced axes as 1, and without them.
struct Reduced {
  Shape kept, dropped;
};

Reduced reduced_shapes(const char* op, const Shape& shape, const std::vector<int>& axes) {
  std::array<bool, Shape::max_axes> gone{};
  for (int wanted : axes) {
    const auto axis = static_cast<size_t>(checked_axis(op, wanted, shape.dim()));
    check(!gone[axis], Error::Kind::Shape, "[", op, "] axis ", axis, " comes twice");
    gone[axis] = true;
  }
  Reduced result;
  for (int axis = 0; axis < shape.dim(); ++axis) {
    const bool reduce = axes.empty() || gone[static_cast<size_t>(axis)];
    result.kept.push_back(reduce ? 1 : shape[axis]);
    if (!reduce) result.dropped.push_back(shape[axis]);
  }
  return result;
}

// The sum over axes, over `divisor`.
Variable sum_axes(const char* op, const Variable& x, const Reduced& shapes, bool keep, double divisor) {
  const Tensor y = sum_to(x.value(), shapes.kept, divisor);
  return record(
      op, {x}, keep ? y : y.reshape(shapes.dropped),
      [kept = shapes.kept, shape = x.shape(), divisor](const OutputGrads& grads) -> std::vector<Tensor> {
        // Nothing is left to sum: this only divides.
        return {sum_to(grads[0].reshape(kept), kept, divisor).expand(shape)};
      });
}

// The largest of each run along `axis` and where it first is; a NaN is larger than any number. value and
// place have the shape of x with a 1 at `axis`.
void max_cpu(Tensor& value, Tensor& place, const Tensor& x, int axis) {
  dispatch_floating(x.dtype(), "max", [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    const T* from = x.data<T>();
    T* best = value.mutable_data<T>();
    int64_t* at = place.mutable_data<int64_t>();
    const int64_t length = x.size(axis), along = x.strides()[axis];
    for_each_run<3>(value.shape(), {value.strides(), place.strides(), x.strides()},
                    elementwise_grain / length + 1, [&](const auto& offset, const auto& step, int64_t count) {
                      for (int64_t i = 0; i < count; ++i) {
                        const T* run = from + offset[2] + i * step[2];
                        C top = C(run[0]);
                        int64_t first = 0;
                        for (int64_t j = 1; j < length; ++j) {
                          const C candidate = C(run[j * along]);
                          if (candidate > top || (candidate != candidate && top == top))
                            top = candidate, first = j;
                        }
                        best[offset[0] + i * step[0]] = static_cast<T>(top);
                        at[offset[1] + i * step[1]] = first;
                      }
                    });
  });
}

// dx = dy at the place of each maximum, 0 elsewhere. dy and place have a 1 at `axis`.
void max_backward_cpu(Tensor& dx, const Tensor& dy, const Tensor& place, int axis) {
  dx.fill_(0);
  dispatch_floating(dx.dtype(), "max", [&](auto zero) {
    using T = decltype(zero);
    T* to = dx.mutable_data<T>();
    const T* from = dy.data<T>();
    const int64_t* at = place.data<int64_t>();
    const int64_t along = dx.strides()[axis];
    for_each_run<3>(dy.shape(), {dx.strides(), dy.strides(), place.strides()}, elementwise_grain,
                    [&](const auto& offset, const auto& step, int64_t count) {
                      for (int64_t i = 0; i < count; ++i)
                        to[offset[0] + i * step[0] + at[offset[2] + i * step[2]] * along] =
                            from[offset[1] + i * step[1]];
                    });
  });
}

const Kernel<void(Tensor&, Tensor&, const Tensor&, int)> max_kernel{"max", max_cpu};
const Kernel<void(Tensor&, const Tensor&, const Tensor&, int)> max_backward_kernel{"max.backward",
                                                                                   max_backward_cpu};

// 1 at each maximum and 0 elsewhere: changes sign where another element becomes the largest.
Tensor chosen(const Tensor& place, const Shape& shape, int axis) {
  Tensor result = Tensor::empty(shape, f64, place.device());
  max_backward_kernel(place.device(), result, Tensor::full(place.shape(), 1, f64, place.device()), place,
                      axis);
  return result;
}

}  // namespace

Variable sum(const Variable& x, const std::vector<int>& axes, bool keep) {
  check_floating("sum", x);
  return sum_axes("sum", x, reduced_shapes("sum", x.shape(), axes), keep, 1);
}

Variable mean(const Variable& x, const std::vector<int>& axes, bool keep) {
  check_floating("mean", x);
  const Reduced shapes = reduced_shapes("mean", x.shape(), axes);
  int64_t count = 1;
  for (int axis = 0; axis < x.dim(); ++axis)
    if (axes.empty() || shapes.kept[axis] != x.size(axis)) count *= x.size(axis);
  check(count > 0, Error::Kind::Shape, "[mean] expected at least one element to average, got shape ",
        x.shape());
  return sum_axes("mean", x, shapes, keep, static_cast<double>(count));
}

Variable max(const Variable& x, int axis, bool keep) {
  check_floating("max", x);
  axis = checked_axis("max", axis, x.dim());
  check(x.size(axis) > 0, Error::Kind::Shape, "[max] expected at least one element along axis ", axis,
        ", got shape ", x.shape());
  Shape shape = x.shape();
  shape[axis] = 1;
  Tensor y = Tensor::empty(shape, x.dtype(), x.device()), place = Tensor::empty(shape, i64, x.device());
  max_kernel(x.device(), y, place, x.value(), axis);
  if (kinks_wanted()) note_kink(chosen(place, x.shape(), axis));
  // Saved: where each maximum is.
  return record(
      "max", {x}, keep ? y : y.squeeze(axis),
      [axis, keep, shape = x.shape(), place = Saved(place)](const OutputGrads& grads) -> std::vector<Tensor> {
        Tensor dx = Tensor::empty(shape, grads[0].dtype(), grads[0].device());
        max_backward_kernel(dx.device(), dx, keep ? grads[0] : grads[0].unsqueeze(axis), place.get(), axis);
        return {dx};
      });
}

}  // namespace torus
