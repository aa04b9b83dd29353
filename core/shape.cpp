#include "torus/core/shape.h"

#include <algorithm>
#include <ostream>

namespace torus {

int64_t Shape::numel() const {
  int64_t product = 1;
  bool overflow = false;
  for (int64_t size : *this) {
    if (size == 0) return 0;
    overflow |= __builtin_mul_overflow(product, size, &product);
  }
  check(!overflow, Error::Kind::Shape, "[shape] ", *this, " has more than 2^63 elements");
  return product;
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '[';
  for (int axis = 0; axis < shape.dim(); ++axis) out << (axis ? ", " : "") << shape[axis];
  return out << ']';
}

Shape row_major_strides(const Shape& shape) {
  Shape strides = shape;
  int64_t stride = 1;
  for (int axis = shape.dim() - 1; axis >= 0; --axis) {
    strides[axis] = stride;
    stride *= std::max<int64_t>(shape[axis], 1);
  }
  return strides;
}

int checked_axis(const char* op, int axis, int dim) {
  check(axis >= -dim && axis < dim, Error::Kind::Shape, "[", op, "] axis must be in [", -dim, ", ", dim, "), got ",
        axis);
  return axis < 0 ? axis + dim : axis;
}

Shape broadcast_shapes(const char* op, const Shape& a, const Shape& b) {
  Shape result = a.dim() >= b.dim() ? a : b;
  const Shape& shorter = a.dim() >= b.dim() ? b : a;
  for (int axis = 1; axis <= shorter.dim(); ++axis) {
    const int64_t mine = result[-axis], other = shorter[-axis];
    check(mine == other || mine == 1 || other == 1, Error::Kind::Shape, "[", op, "] shapes ", a, " and ", b,
          " do not broadcast: axis ", -axis, " has ", a[-axis], " and ", b[-axis]);
    if (mine == 1) result[-axis] = other;
  }
  return result;
}

}  // namespace torus
