#include <cmath>

#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// `count` slices along an axis, from `from` on in x, that are those from `to` on in y.
struct Segment {
  int64_t to, from, count;
};

// y holds x again and again, so that slice `before` of y is slice 0 of x.
std::vector<Segment> wrapped(int64_t length, int64_t x_length, int64_t before) {
  std::vector<Segment> segments;
  int64_t from = x_length > 0 ? (x_length - before % x_length) % x_length : 0;
  for (int64_t to = 0; to < length;) {
    const int64_t count = std::min(x_length - from, length - to);
    segments.push_back({to, from, count});
    to += count;
    from = 0;
  }
  return segments;
}

// The same once.
Segment placed(int64_t length, int64_t x_length, int64_t before) {
  const int64_t to = std::max<int64_t>(before, 0), from = std::max<int64_t>(-before, 0);
  return {to, from, std::min(length - to, x_length - from)};
}

// Calls f(block of y, block of x) for each choice of one segment an axis.
template <class F>
void for_each_block(Tensor y, Tensor x, const Shape& before, bool around, const F& f, int axis = 0) {
  if (axis == y.dim()) return f(y, x);
  const int64_t length = y.size(axis), x_length = x.size(axis), shift = before[axis];
  const auto segments =
      around ? wrapped(length, x_length, shift) : std::vector<Segment>{placed(length, x_length, shift)};
  for (const auto& [to, from, count] : segments)
    for_each_block(y.slice(axis, to, to + count), x.slice(axis, from, from + count), before, around, f,
                   axis + 1);
}

// y[i] = x[i - before], with indices taken around the axes of x, or `value` outside of x. Any dtype.
void pad_cpu(Tensor& y, const Tensor& x, const Shape& before, bool around, double value) {
  if (!around && y.numel() > x.numel()) y.fill_(value);
  for_each_block(y, x, before, around, [](Tensor& to, const Tensor& from) { to.copy_(from); });
}

// The transpose of y[i] = x[i - before] taken around, where y holds all of x. Sums in at least f32.
void around_backward_cpu(Tensor& dx, const Tensor& dy, const Shape& before) {
  const DType wide = dx.dtype() == f64 ? f64 : f32;
  Tensor sums = dx.dtype() == wide ? dx : Tensor::empty(dx.shape(), wide);
  sums.fill_(0);
  for_each_block(dy.to(wide), sums, before, true, [](const Tensor& from, Tensor& to) { add_into(to, from); });
  if (dx.dtype() != wide) dx.copy_(sums);
}

const Kernel<void(Tensor&, const Tensor&, const Shape&, bool, double)> pad_kernel{"pad", pad_cpu};
const Kernel<void(Tensor&, const Tensor&, const Shape&)> around_backward_kernel{"pad.around_backward",
                                                                                around_backward_cpu};

Tensor moved(const Tensor& x, const Shape& shape, const Shape& before, bool around, double value = 0) {
  Tensor y = Tensor::empty(shape, x.dtype(), x.device());
  pad_kernel(x.device(), y, x, before, around, value);
  return y;
}

// Zeros, one an axis of x.
Shape no_shift(const Variable& x) {
  Shape shift;
  for (int axis = 0; axis < x.dim(); ++axis) shift.push_back(0);
  return shift;
}

Shape negated(Shape shift) {
  for (int axis = 0; axis < shift.dim(); ++axis) shift[axis] = -shift[axis];
  return shift;
}

// The axes counted from 0, each once, as many as `amounts`.
std::vector<int> distinct_axes(const char* op, const char* amounts, size_t count, std::vector<int> axes,
                               int dim) {
  check(count == axes.size(), Error::Kind::Shape, "[", op, "] expected one of ", amounts, " an axis, got ",
        count, " for ", axes.size(), " axes");
  std::array<bool, Shape::max_axes> seen{};
  for (int& axis : axes) {
    axis = checked_axis(op, axis, dim);
    auto& already = seen[static_cast<size_t>(axis)];
    check(!already, Error::Kind::Shape, "[", op, "] axis ", axis, " comes twice");
    already = true;
  }
  return axes;
}

}  // namespace

Variable pad(const Variable& x, const std::vector<Margin>& margins, const std::vector<int>& axes,
             Padding padding, double value) {
  check_defined("pad", "x", x);
  const ProfileScope scope("pad", ScopeKind::forward);
  const std::vector<int> at = distinct_axes("pad", "margins", margins.size(), axes, x.dim());
  const bool circular = padding == Padding::circular;
  Shape shape = x.shape(), shift = no_shift(x);
  for (size_t i = 0; i < at.size(); ++i) {
    const auto [before, after] = margins[i];
    const int64_t length = x.size(at[i]), padded = before + length + after;
    check(before >= 0 && after >= 0, Error::Kind::Shape, "[pad] margins must be at least 0, got ", before,
          " and ", after, " on axis ", at[i], "; use slice to shorten");
    check(!circular || length > 0 || padded == 0, Error::Kind::Shape, "[pad] axis ", at[i], " of ", x.shape(),
          " is empty: there is nothing to go around");
    shape[at[i]] = padded;
    shift[at[i]] = before;
  }
  return record(
      "pad", {x}, moved(x.value(), shape, shift, circular, value),
      [circular, shift, old = x.shape()](const OutputGrads& grads) -> std::vector<Tensor> {
        const Tensor& dy = grads[0];
        if (!circular) return {moved(dy, old, negated(shift), false)};
        Tensor dx = Tensor::empty(old, dy.dtype(), dy.device());
        around_backward_kernel(dy.device(), dx, dy, shift);
        return {dx};
      },
      std::isinf(value) ? Infinities::both : Infinities::none);
}

Variable roll(const Variable& x, const std::vector<int64_t>& shifts, const std::vector<int>& axes) {
  check_defined("roll", "x", x);
  const ProfileScope scope("roll", ScopeKind::forward);
  const std::vector<int> at = distinct_axes("roll", "shifts", shifts.size(), axes, x.dim());
  Shape shift = no_shift(x);
  for (size_t i = 0; i < at.size(); ++i) shift[at[i]] = shifts[i];
  return record("roll", {x}, moved(x.value(), x.shape(), shift, true),
                [shift](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {moved(grads[0], grads[0].shape(), negated(shift), true)};
                });
}

}  // namespace torus
