#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// `count` slices along an axis, from `from` on in x, that are those from `to` on in y.
struct Segment {
  int64_t to, from, count;
};

// One axis of x, the length it has in y, and which slices of y are which of x.
struct Moves {
  int axis;
  int64_t length;
  std::vector<Segment> segments;
};
using Plan = std::vector<Moves>;

// y holds x again and again, so that slice `shift` of y is slice 0 of x.
std::vector<Segment> wrapped(int64_t length, int64_t x_length, int64_t shift) {
  std::vector<Segment> segments;
  int64_t from = x_length > 0 ? (x_length - shift % x_length) % x_length : 0;
  for (int64_t to = 0; to < length;) {
    const int64_t count = std::min(x_length - from, length - to);
    segments.push_back({to, from, count});
    to += count;
    from = 0;
  }
  return segments;
}

// Calls f(block of y, block of x) for each choice of one segment an axis.
template <class F>
void for_each_block(const Plan& plan, size_t depth, Tensor y, Tensor x, const F& f) {
  if (depth == plan.size()) return f(y, x);
  const Moves& moves = plan[depth];
  for (const auto& [to, from, count] : moves.segments)
    for_each_block(plan, depth + 1, y.slice(moves.axis, to, to + count),
                   x.slice(moves.axis, from, from + count), f);
}

Tensor moved(const Plan& plan, const Tensor& x, bool fills, double value) {
  Shape shape = x.shape();
  for (const Moves& moves : plan) shape[moves.axis] = moves.length;
  Tensor y = Tensor::empty(shape, x.dtype(), x.device());
  if (fills) y.fill_(value);
  for_each_block(plan, 0, y, x, [](Tensor& to, const Tensor& from) { to.copy_(from); });
  return y;
}

// The transpose of `moved`, where y holds all of x: once, or `repeated` and then summed in at least f32.
Tensor moved_back(const Plan& plan, const Tensor& dy, const Shape& shape, bool repeated) {
  const DType dtype = dy.dtype(), wide = dtype == f64 ? f64 : f32;
  if (!repeated) {
    Tensor dx = Tensor::empty(shape, dtype, dy.device());
    for_each_block(plan, 0, dy, dx, [](const Tensor& from, Tensor& to) { to.copy_(from); });
    return dx;
  }
  Tensor dx = Tensor::zeros(shape, wide, dy.device());
  for_each_block(plan, 0, dy.to(wide), dx, [](const Tensor& from, Tensor& to) { add_into(to, from); });
  return dx.to(dtype);
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
  const std::vector<int> at = distinct_axes("pad", "margins", margins.size(), axes, x.dim());
  const bool circular = padding == Padding::circular;
  Plan plan;
  for (size_t i = 0; i < at.size(); ++i) {
    const auto [before, after] = margins[i];
    const int64_t length = x.size(at[i]), padded = before + length + after;
    check(before >= 0 && after >= 0, Error::Kind::Shape, "[pad] margins must be at least 0, got ", before,
          " and ", after, " on axis ", at[i], "; use slice to shorten");
    check(!circular || length > 0 || padded == 0, Error::Kind::Shape, "[pad] axis ", at[i], " of ", x.shape(),
          " is empty: there is nothing to go around");
    plan.push_back({at[i], padded,
                    circular ? wrapped(padded, length, before) : std::vector<Segment>{{before, 0, length}}});
  }
  return record("pad", {x}, moved(plan, x.value(), !circular, value),
                [plan, circular, shape = x.shape()](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {moved_back(plan, grads[0], shape, circular)};
                });
}

Variable roll(const Variable& x, const std::vector<int64_t>& shifts, const std::vector<int>& axes) {
  const std::vector<int> at = distinct_axes("roll", "shifts", shifts.size(), axes, x.dim());
  Plan plan;
  for (size_t i = 0; i < at.size(); ++i) {
    const int64_t length = x.size(at[i]);
    plan.push_back({at[i], length, wrapped(length, length, shifts[i])});
  }
  return record("roll", {x}, moved(plan, x.value(), false, 0),
                [plan, shape = x.shape()](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {moved_back(plan, grads[0], shape, false)};
                });
}

}  // namespace torus
