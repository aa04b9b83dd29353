// Random shapes and strides against plain loops.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <limits>

#include "ops/op_table.h"

namespace torus::testing {
namespace {

int64_t between(int64_t low, int64_t high) { return *rc::gen::inRange<int64_t>(low, high + 1); }
bool coin() { return between(0, 1) == 1; }

Shape random_shape(int64_t min_axes, int64_t max_axes) {
  Shape shape;
  for (int64_t axes = between(min_axes, max_axes); axes > 0; --axes) shape.push_back(between(0, 5));
  return shape;
}

// A shape that broadcasts to `shape`.
Shape shrunk(const Shape& shape) {
  Shape result = shape.slice(static_cast<int>(between(0, shape.dim())), shape.dim());
  for (int axis = 0; axis < result.dim(); ++axis)
    if (between(0, 3) == 0) result[axis] = 1;
  return result;
}

// Random values, or whole numbers, in memory of any axis order, with gaps (NaN), repeated slices and an
// offset.
Tensor random_tensor(const Shape& shape, DType dtype = f64, bool whole = false) {
  Generator generator(static_cast<uint64_t>(between(0, 1 << 30)));
  std::vector<int> order(static_cast<size_t>(shape.dim())), inverse(order.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  for (size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[static_cast<size_t>(between(0, static_cast<int64_t>(i) - 1))]);
  Shape memory;
  std::vector<int64_t> first, step;
  std::vector<bool> repeated;
  for (size_t i = 0; i < order.size(); ++i) {
    const int64_t size = shape[order[i]];
    inverse[static_cast<size_t>(order[i])] = static_cast<int>(i);
    repeated.push_back(size > 0 && between(0, 5) == 0);
    first.push_back(coin() ? between(0, 2) : 0);
    step.push_back(coin() ? between(1, 3) : 1);
    memory.push_back(first.back() + step.back() * (repeated.back() ? 1 : size) + between(0, 1));
  }
  Tensor view = Tensor::full(memory, std::numeric_limits<double>::quiet_NaN(), dtype);
  for (int axis = 0; axis < memory.dim(); ++axis) {
    const auto i = static_cast<size_t>(axis);
    const int64_t size = repeated[i] ? 1 : shape[order[i]];
    view = view.slice(axis, first[i], first[i] + step[i] * size, step[i]);
  }
  view = view.permute(inverse);
  view.copy_(whole ? randint(view.shape(), -9, 10, generator).to(dtype)
                   : randn(view.shape(), 0, 1, f64, generator));
  return view.expand(shape);
}

// Sums of terms, and of the magnitudes of these: terms may cancel, and what rounding leaves is measured by
// them.
struct Sums {
  Array values, sizes;

  explicit Sums(const Shape& shape) : values(shape), sizes(shape) {}
  void add(const Index& i, double term) {
    values.at(i) += term;
    sizes.at(i) += std::abs(term);
  }
  /// Adds a term at each index of `shape`, into the place that broadcasts to it.
  void add(const Shape& shape, const std::function<double(const Index&)>& term) {
    for_each_index(shape, [&](const Index& i) { add(i, term(i)); });
  }
};

bool near(const Tensor& got, const Sums& expected, double tolerance) {
  if (got.shape() != expected.values.shape) return false;
  const auto values = got.to_vector<double>();
  for (size_t i = 0; i < values.size(); ++i)
    if (!(std::abs(values[i] - expected.values.values[i]) <= tolerance * expected.sizes.values[i]))
      return false;
  return true;
}

bool near(const Tensor& got, const Array& expected, double tolerance) {
  Sums one_term(expected.shape);
  one_term.add(expected.shape, [&](const Index& i) { return expected.at(i); });
  return near(got, one_term, tolerance);
}

RC_GTEST_PROP(Properties, ProductsBroadcast, ()) {
  const Shape shape = random_shape(0, 4);
  const bool whole_left = coin();
  const Tensor a = random_tensor(whole_left ? shape : shrunk(shape));
  const Tensor b = random_tensor(whole_left ? shrunk(shape) : shape), g = random_tensor(shape);
  Tape tape;
  const Variable x(a, true), y(b, true), z = x * y;
  tape.backward(z, {.seed = g});
  const Array left(a), right(b), grad(g);
  Sums expected(shape), dx(a.shape()), dy(b.shape());
  expected.add(shape, [&](const Index& i) { return left.at(i) * right.at(i); });
  dx.add(shape, [&](const Index& i) { return grad.at(i) * right.at(i); });
  dy.add(shape, [&](const Index& i) { return grad.at(i) * left.at(i); });
  RC_ASSERT(near(z.value(), expected, 1e-14));
  RC_ASSERT(near(x.grad(), dx, 1e-12));
  RC_ASSERT(near(y.grad(), dy, 1e-12));
}

RC_GTEST_PROP(Properties, QuotientsBroadcast, ()) {
  const Shape shape = random_shape(0, 4);
  const Tensor a = random_tensor(shrunk(shape)), b = random_tensor(shape);
  const Tensor d = (exp(Variable(b))).value(), g = random_tensor(shape);
  Tape tape;
  const Variable x(a, true), y(d, true), z = x / y;
  tape.backward(z, {.seed = g});
  const Array left(a), right(d), grad(g);
  Sums expected(shape), dx(a.shape()), dy(shape);
  expected.add(shape, [&](const Index& i) { return left.at(i) / right.at(i); });
  dx.add(shape, [&](const Index& i) { return grad.at(i) / right.at(i); });
  dy.add(shape, [&](const Index& i) { return -grad.at(i) * left.at(i) / (right.at(i) * right.at(i)); });
  RC_ASSERT(near(z.value(), expected, 1e-14));
  RC_ASSERT(near(x.grad(), dx, 1e-12));
  RC_ASSERT(near(y.grad(), dy, 1e-12));
}

RC_GTEST_PROP(Properties, FunctionsOfOneElement, ()) {
  const Shape shape = random_shape(0, 5);
  const Tensor a = random_tensor(shape, f32), g = random_tensor(shape, f32);
  Tape tape;
  const Variable x(a, true), y = silu(x);
  tape.backward(y, {.seed = g});
  const Array at(a), grad(g);
  Sums expected(shape), dx(shape);
  for_each_index(shape, [&](const Index& i) {
    const double v = at.at(i), s = 1 / (1 + std::exp(-v));
    expected.add(i, v * s);
    dx.add(i, grad.at(i) * s);
    dx.add(i, grad.at(i) * s * v * (1 - s));
  });
  RC_ASSERT(near(y.value(), expected, 1e-6));
  RC_ASSERT(near(x.grad(), dx, 1e-6));
}

RC_GTEST_PROP(Properties, Reductions, ()) {
  const Shape shape = random_shape(1, 5);
  const Tensor a = random_tensor(shape);
  const bool keep = coin();
  std::vector<int> axes;
  Shape kept = shape, wanted;
  for (int axis = 0; axis < shape.dim(); ++axis) {
    const bool gone = coin();
    if (gone) axes.push_back(coin() ? axis : axis - shape.dim()), kept[axis] = 1;
    if (!gone || keep) wanted.push_back(kept[axis]);
  }
  if (axes.empty()) {  // means all
    wanted = {};
    for (int axis = 0; axis < shape.dim(); ++axis) {
      kept[axis] = 1;
      if (keep) wanted.push_back(1);
    }
  }
  Sums total(kept);
  const Array at(a);
  total.add(shape, [&](const Index& i) { return at.at(i); });
  total.values.shape = total.sizes.shape = wanted;
  const Tensor g = random_tensor(wanted);
  Tape tape;
  const Variable x(a, true), y = sum(x, axes, keep);
  RC_ASSERT(near(y.value(), total, 1e-12));
  tape.backward(y, {.seed = g});
  Array grad(g);
  Sums dx(shape);
  grad.shape = kept;
  dx.add(shape, [&](const Index& i) { return grad.at(i); });
  RC_ASSERT(near(x.grad(), dx, 1e-12));
  if (shape.numel() == 0) return;
  const double count = static_cast<double>(shape.numel() / kept.numel());
  for (Array* part : {&total.values, &total.sizes})
    for (double& v : part->values) v /= count;
  RC_ASSERT(near(mean(Variable(a), axes, keep).value(), total, 1e-12));
}

RC_GTEST_PROP(Properties, LargeSums, ()) {
  // Sizes around those of blocks and strips, in any order of axes. Sums of whole numbers are exact in any
  // order.
  const Shape shape{between(1, 3), between(100, 300), between(1, 40)};
  const Tensor a = random_tensor(shape, f32, true);
  Shape kept = shape;
  for (int axis = 0; axis < 3; ++axis)
    if (coin()) kept[axis] = 1;
  Sums expected(kept);
  const Array at(a);
  expected.add(shape, [&](const Index& i) { return at.at(i); });
  RC_ASSERT(near(sum_to(a, kept), expected, 0));
}

RC_GTEST_PROP(Properties, Matmul, ()) {
  const Shape batch = random_shape(0, 2);
  const int64_t m = between(0, 9), k = between(0, 9), n = between(0, 9);
  const bool whole_left = coin();
  Shape of_a = whole_left ? batch : shrunk(batch), of_b = whole_left ? shrunk(batch) : batch, shape = batch;
  for (int64_t size : {m, k}) of_a.push_back(size);
  for (int64_t size : {k, n}) of_b.push_back(size);
  for (int64_t size : {m, n}) shape.push_back(size);
  const Tensor a = random_tensor(of_a), b = random_tensor(of_b), g = random_tensor(shape);
  Tape tape;
  const Variable x(a, true), y(b, true), z = matmul(x, y);
  tape.backward(z, {.seed = g});
  const Array left(a), right(b), grad(g);
  Sums expected(shape), dx(of_a), dy(of_b);
  for_each_index(shape, [&](const Index& i) {
    Index row = i, column = i;
    for (int64_t depth = 0; depth < k; ++depth) {
      row.back() = depth;
      column[column.size() - 2] = depth;
      expected.add(i, left.at(row) * right.at(column));
      dx.add(row, grad.at(i) * right.at(column));
      dy.add(column, grad.at(i) * left.at(row));
    }
  });
  RC_ASSERT(near(z.value(), expected, 1e-12));
  RC_ASSERT(near(x.grad(), dx, 1e-12));
  RC_ASSERT(near(y.grad(), dy, 1e-12));
}

RC_GTEST_PROP(Properties, GatherAndScatter, ()) {
  const Shape shape = random_shape(1, 4);
  const int axis = static_cast<int>(between(0, shape.dim() - 1));
  Shape of_index = shape, of_result = shape;
  of_index[axis] = of_result[axis] = shape[axis] > 0 ? between(0, 9) : 0;
  for (int i = 0; i < shape.dim(); ++i)
    if (i != axis && coin()) of_index[i] = 1;
  Tensor index = indices_for(of_index, std::max<int64_t>(shape[axis], 1));
  if (coin()) index = index.transpose(0, -1).clone().transpose(0, -1);
  const Tensor a = random_tensor(shape), source = random_tensor(of_result), g = random_tensor(of_result);
  const Array at(a), from(source), grad(g), places(index);
  const auto redirected = [&](Index i) {
    i[static_cast<size_t>(axis)] = static_cast<int64_t>(places.at(i));
    return i;
  };
  Array expected(of_result);
  Sums dx(shape), sums(shape);
  sums.add(shape, [&](const Index& i) { return at.at(i); });
  for_each_index(of_result, [&](const Index& i) {
    expected.at(i) = at.at(redirected(i));
    dx.add(redirected(i), grad.at(i));
    sums.add(redirected(i), from.at(i));
  });
  Tape tape;
  const Variable x(a, true), y = gather(x, axis - shape.dim(), index);
  tape.backward(y, {.seed = g});
  RC_ASSERT(near(y.value(), expected, 0));
  RC_ASSERT(near(x.grad(), dx, 1e-12));
  RC_ASSERT(near(scatter_add(a, axis, index, source).value(), sums, 1e-12));
}

RC_GTEST_PROP(Properties, PadAndRoll, ()) {
  const Shape shape = random_shape(1, 4);
  const bool circular = coin();
  std::vector<int> axes;
  std::vector<Margin> margins;
  std::vector<int64_t> shifts;
  Shape padded = shape;
  Index before(static_cast<size_t>(shape.dim())), shift(before);
  for (int axis = shape.dim() - 1; axis >= 0; --axis) {
    if (coin() || (circular && shape[axis] == 0)) continue;
    axes.push_back(axis);
    margins.push_back({between(0, 7), between(0, 7)});
    shifts.push_back(between(-9, 9));
    before[static_cast<size_t>(axis)] = margins.back().before;
    shift[static_cast<size_t>(axis)] = shifts.back();
    padded[axis] += margins.back().before + margins.back().after;
  }
  // The index `by` places earlier, around the axes; whether it was inside without going around.
  const auto earlier = [&](Index i, const Index& by) {
    bool inside = true;
    for (size_t axis = 0; axis < i.size(); ++axis) {
      const int64_t length = shape[static_cast<int>(axis)];
      i[axis] -= by[axis];
      inside = inside && i[axis] >= 0 && i[axis] < length;
      if (length > 0) i[axis] = (i[axis] % length + length) % length;
    }
    return std::pair(i, inside);
  };
  const Tensor a = random_tensor(shape), g = random_tensor(padded);
  const Array at(a), grad(g);
  Array expected(padded), turned(shape);
  Sums dx(shape);
  for_each_index(padded, [&](const Index& i) {
    const auto [from, inside] = earlier(i, before);
    expected.at(i) = inside || circular ? at.at(from) : 2.5;
    if (inside || circular) dx.add(from, grad.at(i));
  });
  for_each_index(shape, [&](const Index& i) { turned.at(i) = at.at(earlier(i, shift).first); });
  Tape tape;
  const Variable x(a, true), y = pad(x, margins, axes, circular ? Padding::circular : Padding::constant, 2.5);
  tape.backward(y, {.seed = g});
  RC_ASSERT(near(y.value(), expected, 0));
  RC_ASSERT(near(x.grad(), dx, 1e-12));
  RC_ASSERT(near(roll(a, shifts, axes).value(), turned, 0));
}

RC_GTEST_PROP(Properties, FoldIsTheTransposeOfUnfold, ()) {
  Shape grid{between(0, 2), between(0, 3)};
  std::vector<int64_t> patch, stride, sizes;
  for (int64_t axes = between(1, 3); axes > 0; --axes) {
    patch.push_back(between(1, 3));
    stride.push_back(between(1, 4));
    sizes.push_back(patch.back() + stride.back() * between(0, 2));
    grid.push_back(sizes.back());
  }
  const Tensor x = random_tensor(grid);
  const Tensor tokens = unfold(x, patch, stride).value();
  const Tensor t = random_tensor(tokens.shape());
  const double there = sum(Variable(tokens) * t).item();
  const double back = sum(Variable(x) * fold(t, sizes, patch, stride)).item();
  RC_ASSERT(std::abs(there - back) <= 1e-12 * (1 + std::abs(there)) * static_cast<double>(1 + t.numel()));
}

RC_GTEST_PROP(Properties, Einsum, ()) {
  // Each of six letters is in one or both operands, and perhaps in the result.
  std::string terms[3];
  Shape all;
  for (char letter : std::string("abcdef")) {
    const int64_t where_to = between(0, 3);  // 0: in no term
    const bool in[] = {(where_to & 1) != 0, (where_to & 2) != 0, where_to > 0 && coin()};
    all.push_back(where_to > 0 ? between(0, 3) : 1);
    for (size_t term = 0; term < 3; ++term) {
      if (in[term])
        terms[term].insert(static_cast<size_t>(between(0, static_cast<int64_t>(terms[term].size()))), 1,
                           letter);
    }
  }
  const auto index = [&](const Index& i, const std::string& term) {
    Index result;
    for (char letter : term) result.push_back(i[static_cast<size_t>(letter - 'a')]);
    return result;
  };
  const auto shape_of = [&](const std::string& term) {
    Shape shape;
    for (char letter : term) shape.push_back(all[letter - 'a']);
    return shape;
  };
  const Tensor a = random_tensor(shape_of(terms[0])), b = random_tensor(shape_of(terms[1]));
  const Tensor g = random_tensor(shape_of(terms[2]));
  const Array left(a), right(b), grad(g);
  Sums expected(g.shape()), dx(a.shape()), dy(b.shape());
  for_each_index(all, [&](const Index& i) {
    const Index of_a = index(i, terms[0]), of_b = index(i, terms[1]), of_y = index(i, terms[2]);
    expected.add(of_y, left.at(of_a) * right.at(of_b));
    dx.add(of_a, grad.at(of_y) * right.at(of_b));
    dy.add(of_b, grad.at(of_y) * left.at(of_a));
  });
  Tape tape;
  const Variable x(a, true), y(b, true);
  const Variable z = einsum(terms[0] + ", " + terms[1] + " -> " + terms[2], x, y);
  tape.backward(z, {.seed = g});
  RC_ASSERT(near(z.value(), expected, 1e-12));
  RC_ASSERT(near(x.grad(), dx, 1e-12));
  RC_ASSERT(near(y.grad(), dy, 1e-12));
}

}  // namespace
}  // namespace torus::testing
