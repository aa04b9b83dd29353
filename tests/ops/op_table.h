// The op table: one row an op, from which op_table_test.cpp makes every test that all ops share.
#pragma once

#include <cmath>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "torus/ops/ops.h"

namespace torus::testing {

using Index = std::vector<int64_t>;
using Variables = std::vector<Variable>;

/// What references compute with: values in row-major order, and none of the library's strides.
struct Array {
  Shape shape;
  std::vector<double> values;

  explicit Array(const Shape& size) : shape(size), values(static_cast<size_t>(size.numel())) {}
  explicit Array(const Tensor& tensor) : shape(tensor.shape()), values(tensor.to_vector<double>()) {}

  /// Indices align at the end, and an axis of size 1 has the same value at each.
  size_t place(const Index& index) const {
    int64_t result = 0;
    for (int axis = 0; axis < shape.dim(); ++axis) {
      const int64_t i = index[index.size() - static_cast<size_t>(shape.dim() - axis)];
      result = result * shape[axis] + (shape[axis] == 1 ? 0 : i);
    }
    return static_cast<size_t>(result);
  }
  double at(const Index& index) const { return values[place(index)]; }
  double& at(const Index& index) { return values[place(index)]; }
};
using Arrays = std::vector<Array>;

template <class F>
void for_each_index(const Shape& shape, F&& f) {
  Index index(static_cast<size_t>(shape.dim()), 0);
  for (int64_t count = shape.numel(); count > 0; --count) {
    f(static_cast<const Index&>(index));
    for (int axis = shape.dim() - 1; axis >= 0; --axis) {
      auto& i = index[static_cast<size_t>(axis)];
      if (++i < shape[axis]) break;
      i = 0;
    }
  }
}

/// y at each index of `shape` is x at source(index).
template <class F>
Arrays taken(const Array& x, const Shape& shape, F source) {
  Array y(shape);
  for_each_index(shape, [&](const Index& i) { y.at(i) = x.at(source(i)); });
  return {y};
}

/// Of `shape`, spread over [0, bound), with repeats.
Tensor indices_for(const Shape& shape, int64_t bound);

/// One op: how to call it, what it should compute, and on which shapes.
struct Row {
  std::string name;
  std::function<Variables(const Variables&)> op;
  std::function<Arrays(const Arrays&)> reference;
  /// Shapes of the inputs: broadcast, size-1 and empty ones too. In the first, each gradient is far from
  /// zero.
  std::vector<std::vector<Shape>> cases;
  /// Large enough to be shared between threads.
  std::vector<Shape> large;
  double low = -2, high = 2;  // of the inputs

  friend std::ostream& operator<<(std::ostream& out, const Row& row) { return out << row.name; }
};

/// A row for every op of ops.h.
std::vector<Row> op_table();
/// Those of ops that pick, move or turn elements.
std::vector<Row> rows_of_places();

}  // namespace torus::testing
