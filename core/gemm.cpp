#include "torus/core/gemm.h"

#define EIGEN_DONT_PARALLELIZE
#include <Eigen/Core>

#include <algorithm>

#include "torus/core/kernel.h"
#include "torus/core/parallel.h"

namespace torus {

namespace {

// One matrix of a batch: pointer and strides, at least one of them 1.
template <class T>
struct MatrixView {
  T* data;
  int64_t row_stride, column_stride;
};

template <class T>
using Dynamic = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <class T>
using RowMajorMap = Eigen::Map<Dynamic<T>, 0, Eigen::OuterStride<>>;

// Calls f with an Eigen map of `a`, as it lies or transposed.
template <class T, class F>
void with_map(MatrixView<const T> a, int64_t rows, int64_t columns, F&& f) {
  if (a.column_stride == 1 || columns == 1)
    f(Eigen::Map<const Dynamic<T>, 0, Eigen::OuterStride<>>(a.data, rows, columns, Eigen::OuterStride<>(a.row_stride)));
  else
    f(Eigen::Map<const Dynamic<T>, 0, Eigen::OuterStride<>>(a.data, columns, rows, Eigen::OuterStride<>(a.column_stride))
          .transpose());
}

// c [m, n] (+)= a [m, k] @ b [k, n], on one thread.
template <class T>
void multiply(MatrixView<T> c, MatrixView<const T> a, MatrixView<const T> b, int64_t m, int64_t n, int64_t k,
              bool accumulate) {
  RowMajorMap<T> result(c.data, m, n, Eigen::OuterStride<>(c.row_stride));
  if (!accumulate) result.setZero();
  if (k == 0) return;
  with_map(a, m, k, [&](const auto& left) {
    with_map(b, k, n, [&](const auto& right) { result.noalias() += left * right; });
  });
}

// Splits a product into parts that depend on its sizes alone, so the bits do not depend on the thread count.
struct Parts {
  int64_t rows, columns;  // of one part
  Parts(int64_t m, int64_t n) : rows(m), columns(n) {
    constexpr int64_t wanted = 8, least = 64;
    int64_t& split = m >= n ? rows : columns;
    split = std::max(least, (split + wanted - 1) / wanted);
    split = (split + 15) / 16 * 16;
  }
};

template <class T>
void product_of(Tensor& c, const Tensor& a, const Tensor& b, const Tensor& bias, bool accumulate) {
  const int64_t m = c.size(-2), n = c.size(-1), k = a.size(-1);
  const Shape batch = c.shape().slice(0, c.dim() - 2);
  const int64_t batches = batch.numel();
  const Parts parts(m, n);
  const int64_t down = (m + parts.rows - 1) / parts.rows, across = (n + parts.columns - 1) / parts.columns;
  T* const c_data = c.mutable_data<T>();
  const T* const a_data = a.data<T>();
  const T* const b_data = b.data<T>();
  const T* const bias_data = bias.defined() ? bias.data<T>() : nullptr;
  parallel_for(0, batches * down * across, m * n * k < 32768 ? 32768 / (m * n * k + 1) : 1,
               [&](int64_t first, int64_t last) {
                 for (int64_t task = first; task < last; ++task) {
                   int64_t index = task / (down * across);
                   const int64_t row = task / across % down * parts.rows, column = task % across * parts.columns;
                   const int64_t rows = std::min(parts.rows, m - row), columns = std::min(parts.columns, n - column);
                   T* to = c_data + row * c.strides()[-2] + column;
                   const T* left = a_data + row * a.strides()[-2];
                   const T* right = b_data + column * b.strides()[-1];
                   for (int axis = batch.dim() - 1; axis >= 0; --axis) {
                     const int64_t at = index % batch[axis];
                     index /= batch[axis];
                     to += at * c.strides()[axis];
                     left += at * a.strides()[axis];
                     right += at * b.strides()[axis];
                   }
                   if (bias_data)
                     for (int64_t i = 0; i < rows; ++i) {
                       T* line = to + i * c.strides()[-2];
                       for (int64_t j = 0; j < columns; ++j)
                         line[j] = accumulate ? line[j] + bias_data[column + j] : bias_data[column + j];
                     }
                   multiply<T>({to, c.strides()[-2], 1}, {left, a.strides()[-2], a.strides()[-1]},
                               {right, b.strides()[-2], b.strides()[-1]}, rows, columns, k, accumulate || bias_data);
                 }
               });
}

// An operand that can be used in place has a unit stride along its rows or its columns.
Tensor usable(const Tensor& x) {
  const bool rows = x.strides()[-1] == 1 || x.size(-1) == 1, columns = x.strides()[-2] == 1 || x.size(-2) == 1;
  return rows || columns ? x : x.contiguous();
}

void product_cpu(Tensor& c, const Tensor& a, const Tensor& b, const Tensor& bias, bool accumulate) {
  if (c.numel() == 0) return;
  const DType wide = c.dtype() == f64 ? f64 : f32;
  if (c.dtype() != wide || c.strides()[-1] != 1) {  // 16-bit floats, and results without a unit stride
    Tensor result = Tensor::empty(c.shape(), wide);
    if (accumulate) result.copy_(c);
    product_cpu(result, a.to(wide), b.to(wide), bias.defined() ? bias.to(wide) : bias, accumulate);
    c.copy_(result);
  } else if (wide == f64) {
    product_of<double>(c, a, b, bias, accumulate);
  } else {
    product_of<float>(c, a, b, bias, accumulate);
  }
}

const Kernel<void(Tensor&, const Tensor&, const Tensor&, const Tensor&, bool)> product_kernel{"product", product_cpu};

}  // namespace

void product(Tensor& c, const Tensor& a, const Tensor& b, const ProductOptions& options) {
  check(c.dim() >= 2 && a.dim() >= 2 && b.dim() >= 2, Error::Kind::Shape, "[product] expected matrices, got ",
        a.shape(), " and ", b.shape());
  check(a.dtype() == c.dtype() && b.dtype() == c.dtype() && is_floating(c.dtype()), Error::Kind::DType,
        "[product] expected one floating dtype, got ", a.dtype(), " and ", b.dtype(), " into ", c.dtype());
  check(a.size(-1) == b.size(-2) && a.size(-2) == c.size(-2) && b.size(-1) == c.size(-1), Error::Kind::Shape,
        "[product] ", a.shape(), " times ", b.shape(), " does not give ", c.shape());
  check(!options.bias.defined() || options.bias.shape() == Shape{c.size(-1)}, Error::Kind::Shape,
        "[product] bias must be [", c.size(-1), "]");
  // Leading axes of c, with the matrices' own last two.
  const auto spread = [&](const Tensor& x) {
    Shape shape = c.shape();
    shape[-2] = x.size(-2);
    shape[-1] = x.size(-1);
    return usable(x).expand(shape);
  };
  const Tensor bias = options.bias.defined() ? options.bias.contiguous() : Tensor();
  product_kernel(c.device(), c, spread(a), spread(b), bias, options.accumulate);
}

}  // namespace torus
