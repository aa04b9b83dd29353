// Sizes or strides of up to 8 axes, without a heap allocation.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <span>
#include <string>

#include "torus/core/error.h"

namespace torus {

/// Up to 8 axis lengths (or strides). Axes count from 0; negative ones count from the end.
class Shape {
 public:
  static constexpr int max_axes = 8;

  Shape() = default;
  Shape(std::initializer_list<int64_t> sizes) : Shape(std::span(sizes.begin(), sizes.size())) {}
  explicit Shape(std::span<const int64_t> sizes) {
    for (int64_t size : sizes) push_back(size);
  }

  int dim() const { return dim_; }
  int64_t operator[](int axis) const { return sizes_[static_cast<size_t>(axis < 0 ? axis + dim_ : axis)]; }
  int64_t& operator[](int axis) { return sizes_[static_cast<size_t>(axis < 0 ? axis + dim_ : axis)]; }
  const int64_t* begin() const { return sizes_.data(); }
  const int64_t* end() const { return sizes_.data() + dim_; }
  int64_t back() const { return (*this)[-1]; }

  void push_back(int64_t size) {
    check(dim_ < max_axes, Error::Kind::Shape, "[shape] a tensor has at most ", max_axes, " axes");
    sizes_[static_cast<size_t>(dim_++)] = size;
  }
  void insert(int axis, int64_t size) {
    push_back(size);
    for (int i = dim_ - 1; i > axis; --i) (*this)[i] = (*this)[i - 1];
    (*this)[axis] = size;
  }
  void erase(int axis) {
    for (int i = axis; i + 1 < dim_; ++i) (*this)[i] = (*this)[i + 1];
    --dim_;
  }
  /// The axes [first, last).
  Shape slice(int first, int last) const { return Shape(std::span(begin() + first, begin() + last)); }

  /// Number of elements: the product of the sizes, 1 for no axes. Throws Error{Shape} past 2^63 - 1.
  int64_t numel() const;

  bool operator==(const Shape& other) const {
    return dim_ == other.dim_ && std::equal(begin(), end(), other.begin());
  }

 private:
  std::array<int64_t, max_axes> sizes_{};
  int dim_ = 0;
};

std::ostream& operator<<(std::ostream& out, const Shape& shape);  // [2, 3]

/// Strides of a row-major tensor of this shape, in elements.
Shape row_major_strides(const Shape& shape);

/// The axis counted from 0. Throws Error{Shape} unless -dim <= axis < dim.
int checked_axis(const char* op, int axis, int dim);

/// The shape that both broadcast to, NumPy's rule: axes align at the end, a size of 1 stretches. Throws
/// Error{Shape} naming both.
Shape broadcast_shapes(const char* op, const Shape& a, const Shape& b);

}  // namespace torus
