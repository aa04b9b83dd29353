#include <functional>

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

// The first of each run along `axis` that no other one precedes, and where it is; a NaN precedes any number.
// value and place have the shape of x with a 1 at `axis`.
template <class Precedes>
void extreme_cpu(Tensor& value, Tensor& place, const Tensor& x, int axis, Precedes precedes) {
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
                          if (precedes(candidate, top) || (candidate != candidate && top == top))
                            top = candidate, first = j;
                        }
                        best[offset[0] + i * step[0]] = static_cast<T>(top);
                        at[offset[1] + i * step[1]] = first;
                      }
                    });
  });
}

void max_cpu(Tensor& value, Tensor& place, const Tensor& x, int axis) {
  extreme_cpu(value, place, x, axis, std::greater<>());
}
void min_cpu(Tensor& value, Tensor& place, const Tensor& x, int axis) {
  extreme_cpu(value, place, x, axis, std::less<>());
}

// dx = dy at each place, 0 elsewhere. dy and place have a 1 at `axis`.
void extreme_backward_cpu(Tensor& dx, const Tensor& dy, const Tensor& place, int axis) {
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

using ExtremeKernel = Kernel<void(Tensor&, Tensor&, const Tensor&, int)>;
const ExtremeKernel max_kernel{"max", max_cpu}, min_kernel{"min", min_cpu};
const Kernel<void(Tensor&, const Tensor&, const Tensor&, int)> extreme_backward_kernel{"max.backward",
                                                                                       extreme_backward_cpu};

// 1 at each place and 0 elsewhere: changes sign where another element is chosen.
Tensor chosen(const Tensor& place, const Shape& shape, int axis) {
  Tensor result = Tensor::empty(shape, f64, place.device());
  extreme_backward_kernel(place.device(), result, Tensor::full(place.shape(), 1, f64, place.device()), place,
                          axis);
  return result;
}

struct Extreme {
  Tensor value, place;  // with a 1 at the axis
};

Extreme find_extreme(const char* op, const ExtremeKernel& kernel, const Variable& x, int axis) {
  check(x.size(axis) > 0, Error::Kind::Shape, "[", op, "] expected at least one element along axis ", axis,
        ", got shape ", x.shape());
  Shape shape = x.shape();
  shape[axis] = 1;
  Extreme found{Tensor::empty(shape, x.dtype(), x.device()), Tensor::empty(shape, i64, x.device())};
  kernel(x.device(), found.value, found.place, x.value(), axis);
  return found;
}

Variable extreme(const char* op, const ExtremeKernel& kernel, const Variable& x, int axis, bool keep) {
  const ProfileScope scope(op, ScopeKind::forward);
  check_floating(op, x);
  axis = checked_axis(op, axis, x.dim());
  const auto [y, place] = find_extreme(op, kernel, x, axis);
  if (kinks_wanted()) note_kink(chosen(place, x.shape(), axis));
  // Saved: where each extreme is.
  return record(
      op, {x}, keep ? y : y.squeeze(axis),
      [axis, keep, shape = x.shape(), saved = Saved(place)](const OutputGrads& grads) -> std::vector<Tensor> {
        Tensor dx = Tensor::empty(shape, grads[0].dtype(), grads[0].device());
        extreme_backward_kernel(dx.device(), dx, keep ? grads[0] : grads[0].unsqueeze(axis), saved.get(),
                                axis);
        return {dx};
      });
}

// Elements that each sum over the axes adds.
int64_t count_reduced(const Shape& shape, const Reduced& shapes) {
  int64_t count = 1;
  for (int axis = 0; axis < shape.dim(); ++axis)
    if (shapes.kept[axis] != shape[axis]) count *= shape[axis];
  return count;
}

const BinaryKernel square_kernel{"var.square",
                                 map<[](auto x, auto mean) { return (x - mean) * (x - mean); }>};
const Kernel<void(Tensor&, const Tensor&, const Tensor&, const Tensor&, double)> var_backward_kernel{
    "var.backward", [](Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& mean, double scale) {
      map_elements(
          dx, [scale](auto g, auto at, auto m) { return g * (decltype(at)(scale) * (at - m)); }, dy, x, mean);
    }};

}  // namespace

Variable sum(const Variable& x, const std::vector<int>& axes, bool keep) {
  const ProfileScope scope("sum", ScopeKind::forward);
  check_floating("sum", x);
  return sum_axes("sum", x, reduced_shapes("sum", x.shape(), axes), keep, 1);
}

Variable mean(const Variable& x, const std::vector<int>& axes, bool keep) {
  const ProfileScope scope("mean", ScopeKind::forward);
  check_floating("mean", x);
  const Reduced shapes = reduced_shapes("mean", x.shape(), axes);
  const int64_t count = count_reduced(x.shape(), shapes);
  check(count > 0, Error::Kind::Shape, "[mean] expected at least one element to average, got shape ",
        x.shape());
  return sum_axes("mean", x, shapes, keep, static_cast<double>(count));
}

Variable max(const Variable& x, int axis, bool keep) { return extreme("max", max_kernel, x, axis, keep); }
Variable min(const Variable& x, int axis, bool keep) { return extreme("min", min_kernel, x, axis, keep); }

Tensor argmax(const Variable& x, int axis, bool keep) {
  check_floating("argmax", x);
  ProfileScope scope("argmax", ScopeKind::forward);
  scope.show(x.value());
  axis = checked_axis("argmax", axis, x.dim());
  const Tensor place = find_extreme("argmax", max_kernel, x, axis).place;
  return keep ? place : place.squeeze(axis);
}

Variable var(const Variable& x, const std::vector<int>& axes, bool keep, int64_t correction) {
  const ProfileScope scope("var", ScopeKind::forward);
  check_floating("var", x);
  const Reduced shapes = reduced_shapes("var", x.shape(), axes);
  const int64_t count = count_reduced(x.shape(), shapes);
  check(correction >= 0 && count > correction, Error::Kind::Shape, "[var] expected 0 <= correction < ", count,
        " (elements reduced of shape ", x.shape(), "), got ", correction);
  const auto degrees = static_cast<double>(count - correction);
  // 16-bit floats are widened: a rounded mean would add its error to every element.
  const Tensor wide = x.value().to(x.dtype() == f64 ? f64 : f32);
  const Tensor mean = sum_to(wide, shapes.kept, static_cast<double>(count)).expand(x.shape());
  const Tensor y = sum_to(mapped(square_kernel, wide, mean), shapes.kept, degrees).to(x.dtype());
  // Saved: x and the mean.
  return record(
      "var", {x}, keep ? y : y.reshape(shapes.dropped),
      [kept = shapes.kept, degrees, saved_x = Saved(x.value()),
       saved_mean = Saved(mean)](const OutputGrads& grads) -> std::vector<Tensor> {
        const Tensor &from = saved_x.get(), &centre = saved_mean.get();
        const Tensor dy = grads[0].reshape(kept).to(centre.dtype()).expand(from.shape());
        return {
            mapped(var_backward_kernel, dy, from.to(centre.dtype()), centre, 2 / degrees).to(from.dtype())};
      });
}

}  // namespace torus
