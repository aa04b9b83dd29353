#include <array>
#include <cmath>

#include "torus/core/vector_math.h"
#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// A contiguous tensor seen as [outer, length, inner], to run along its middle axis.
struct Slices {
  int64_t outer = 1, length, inner = 1;
  Slices(const Shape& shape, int axis) : length(shape[axis]) {
    for (int i = 0; i < axis; ++i) outer *= shape[i];
    for (int i = axis + 1; i < shape.dim(); ++i) inner *= shape[i];
  }
};

// y = softmax(x), or its logarithm, of one row of `n`.
template <class T>
void softmax_row(T* y, const T* x, int64_t n, bool logarithm) {
  using C = Compute<T>;
  const C largest = vmath::largest_of(x, n), sum = vmath::sum_of_exponentials(x, n, largest);
  if (logarithm) {
    const C log_sum = std::log(sum);
    for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>((C(x[i]) - largest) - log_sum);
  } else {
    const C scale = 1 / sum;
    for (int64_t i = 0; i < n; ++i) y[i] = static_cast<T>(vmath::exp(C(x[i]) - largest) * scale);
  }
}

// The gradient of one row from its result y and the gradient g of that.
template <class T>
void softmax_row_backward(T* dx, const T* y, const T* g, int64_t n, bool logarithm) {
  using C = Compute<T>;
  C sum = 0;
  if (logarithm) {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += C(g[i]);
    for (int64_t i = 0; i < n; ++i) dx[i] = static_cast<T>(C(g[i]) - vmath::exp(C(y[i])) * sum);
  } else {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += C(g[i]) * C(y[i]);
    for (int64_t i = 0; i < n; ++i) dx[i] = static_cast<T>(C(y[i]) * (C(g[i]) - sum));
  }
}

// Columns of one [length, inner] matrix that are worked on together where the axis is not the last.
constexpr int64_t strip = 64;

template <class T>
using Strip = std::array<Compute<T>, strip>;

// `largest_of` and `sum_of_exponentials` of `width` columns, at most `strip`, of a matrix with rows `stride`
// apart.
template <class T>
Strip<T> largest_of_strip(const T* x, int64_t length, int64_t stride, int64_t width) {
  using C = Compute<T>;
  Strip<T> largest;
  largest.fill(-std::numeric_limits<C>::infinity());
  const auto count = static_cast<size_t>(width);
  for (int64_t i = 0; i < length; ++i)
    for (size_t j = 0; j < count; ++j) {
      const C value = x[i * stride + static_cast<int64_t>(j)];
      largest[j] = value > largest[j] ? value : largest[j];
    }
  return largest;
}

template <class T>
Strip<T> exponentials_of_strip(const T* x, int64_t length, int64_t stride, int64_t width,
                               const Strip<T>& shift) {
  using C = Compute<T>;
  Strip<T> sum{};
  const auto count = static_cast<size_t>(width);
  for (int64_t i = 0; i < length; ++i)
    for (size_t j = 0; j < count; ++j)
      sum[j] += vmath::exp(C(x[i * stride + static_cast<int64_t>(j)]) - shift[j]);
  return sum;
}

// The same as `softmax_row` for the columns of a strip.
template <class T>
void softmax_strip(T* y, const T* x, int64_t length, int64_t stride, int64_t width, bool logarithm) {
  using C = Compute<T>;
  const Strip<T> largest = largest_of_strip(x, length, stride, width);
  Strip<T> sum = exponentials_of_strip(x, length, stride, width, largest);
  const auto count = static_cast<size_t>(width);
  for (size_t j = 0; j < count; ++j) sum[j] = logarithm ? std::log(sum[j]) : 1 / sum[j];
  for (int64_t i = 0; i < length; ++i)
    for (size_t j = 0; j < count; ++j) {
      const int64_t at = i * stride + static_cast<int64_t>(j);
      const C shifted = C(x[at]) - largest[j];
      y[at] = static_cast<T>(logarithm ? shifted - sum[j] : vmath::exp(shifted) * sum[j]);
    }
}

template <class T>
void softmax_strip_backward(T* dx, const T* y, const T* g, int64_t length, int64_t stride, int64_t width,
                            bool logarithm) {
  using C = Compute<T>;
  std::array<C, strip> sum{};
  const auto count = static_cast<size_t>(width);
  for (int64_t i = 0; i < length; ++i)
    for (size_t j = 0; j < count; ++j) {
      const int64_t at = i * stride + static_cast<int64_t>(j);
      sum[j] += logarithm ? C(g[at]) : C(g[at]) * C(y[at]);
    }
  for (int64_t i = 0; i < length; ++i)
    for (size_t j = 0; j < count; ++j) {
      const int64_t at = i * stride + static_cast<int64_t>(j);
      dx[at] = static_cast<T>(logarithm ? C(g[at]) - vmath::exp(C(y[at])) * sum[j]
                                        : C(y[at]) * (C(g[at]) - sum[j]));
    }
}

// Calls row(offset, length) for each slice if the axis is the last, strip(offset, length, stride, width)
// otherwise.
template <class Row, class Strip>
void for_each_slice(const Slices& s, Row&& row, Strip&& strips) {
  if (s.inner == 1) {
    parallel_for(0, s.outer, elementwise_grain / (4 * s.length + 1) + 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) row(i * s.length, s.length);
    });
    return;
  }
  const int64_t across = (s.inner + strip - 1) / strip;
  parallel_for(0, s.outer * across, elementwise_grain / (4 * s.length * std::min(s.inner, strip) + 1) + 1,
               [&](int64_t first, int64_t last) {
                 for (int64_t i = first; i < last; ++i) {
                   const int64_t column = i % across * strip;
                   strips(i / across * s.length * s.inner + column, s.length, s.inner,
                          std::min(strip, s.inner - column));
                 }
               });
}

// All tensors are contiguous and of one shape.
void softmax_forward_cpu(Tensor& y, const Tensor& x, int axis, bool logarithm) {
  if (x.numel() == 0) return;
  dispatch_floating(x.dtype(), "softmax", [&](auto zero) {
    using T = decltype(zero);
    T* to = y.mutable_data<T>();
    const T* from = x.data<T>();
    for_each_slice(
        Slices(x.shape(), axis),
        [=](int64_t at, int64_t length) { softmax_row(to + at, from + at, length, logarithm); },
        [=](int64_t at, int64_t length, int64_t stride, int64_t width) {
          softmax_strip(to + at, from + at, length, stride, width, logarithm);
        });
  });
}

void softmax_backward_cpu(Tensor& dx, const Tensor& y, const Tensor& g, int axis, bool logarithm) {
  if (y.numel() == 0) return;
  dispatch_floating(y.dtype(), "softmax", [&](auto zero) {
    using T = decltype(zero);
    T* to = dx.mutable_data<T>();
    const T* result = y.data<T>();
    const T* grad = g.data<T>();
    for_each_slice(
        Slices(y.shape(), axis),
        [=](int64_t at, int64_t length) {
          softmax_row_backward(to + at, result + at, grad + at, length, logarithm);
        },
        [=](int64_t at, int64_t length, int64_t stride, int64_t width) {
          softmax_strip_backward(to + at, result + at, grad + at, length, stride, width, logarithm);
        });
  });
}

// log(sum(exp(x))) of one row; of -inf or inf alone, that.
template <class T>
T logsumexp_row(const T* x, int64_t n) {
  using C = Compute<T>;
  const C largest = vmath::largest_of(x, n), shift = std::isinf(largest) ? C(0) : largest;
  return static_cast<T>(shift + std::log(vmath::sum_of_exponentials(x, n, shift)));
}

template <class T>
void logsumexp_strip(T* y, const T* x, int64_t length, int64_t stride, int64_t width) {
  using C = Compute<T>;
  Strip<T> shift = largest_of_strip(x, length, stride, width);
  const auto count = static_cast<size_t>(width);
  for (size_t j = 0; j < count; ++j) shift[j] = std::isinf(shift[j]) ? C(0) : shift[j];
  const Strip<T> sum = exponentials_of_strip(x, length, stride, width, shift);
  for (size_t j = 0; j < count; ++j) y[j] = static_cast<T>(shift[j] + std::log(sum[j]));
}

// y has the shape of x with a 1 at `axis`; both are contiguous.
void logsumexp_forward_cpu(Tensor& y, const Tensor& x, int axis) {
  if (y.numel() == 0) return;
  if (x.numel() == 0) {
    y.fill_(-std::numeric_limits<double>::infinity());
    return;
  }
  dispatch_floating(x.dtype(), "logsumexp", [&](auto zero) {
    using T = decltype(zero);
    T* to = y.mutable_data<T>();
    const T* from = x.data<T>();
    for_each_slice(
        Slices(x.shape(), axis),
        [=](int64_t at, int64_t length) { to[at / length] = logsumexp_row(from + at, length); },
        [=](int64_t at, int64_t length, int64_t stride, int64_t width) {
          logsumexp_strip(to + at / (length * stride) * stride + at % stride, from + at, length, stride,
                          width);
        });
  });
}

// dx = dy * exp(x - y), 0 in slices of -inf alone.
const Kernel<void(Tensor&, const Tensor&, const Tensor&, const Tensor&)> logsumexp_backward_kernel{
    "logsumexp.backward", map<[](auto dy, auto x, auto y) {
      using C = decltype(y);
      return y < std::numeric_limits<C>::lowest() ? C(0) : dy * vmath::exp(x - y);
    }>};

const Kernel<void(Tensor&, const Tensor&, int)> logsumexp_forward_kernel{"logsumexp.forward",
                                                                         logsumexp_forward_cpu};
const Kernel<void(Tensor&, const Tensor&, int, bool)> forward_kernel{"softmax.forward", softmax_forward_cpu};
const Kernel<void(Tensor&, const Tensor&, const Tensor&, int, bool)> backward_kernel{"softmax.backward",
                                                                                     softmax_backward_cpu};

Variable softmax_of(const char* op, const Variable& x, int axis, bool logarithm) {
  const ProfileScope scope(op, ScopeKind::forward);
  check_floating(op, x);
  axis = checked_axis(op, axis, x.dim());
  Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  forward_kernel(x.device(), y, x.value().contiguous(), axis, logarithm);
  // Saved: the result; its slices are all that their gradients depend on.
  return record(op, {x}, y, [=, saved = Saved(y)](const OutputGrads& grads) -> std::vector<Tensor> {
    const Tensor& result = saved.get();
    Tensor dx = Tensor::empty(result.shape(), result.dtype(), result.device());
    backward_kernel(dx.device(), dx, result, grads[0].contiguous(), axis, logarithm);
    return {dx};
  });
}

}  // namespace

Variable softmax(const Variable& x, int axis) { return softmax_of("softmax", x, axis, false); }
Tensor& softmax_(Tensor& x, int axis) {
  ProfileScope scope("softmax_", ScopeKind::forward);
  scope.show(x);
  check_floating("softmax_", x);
  check(x.is_contiguous(), Error::Kind::Shape, "[softmax_] x must be contiguous, got strides ", x.strides());
  // Each slice is read before it is written, and each element by the thread that writes it.
  forward_kernel(x.device(), x, x, checked_axis("softmax_", axis, x.dim()), false);
  return x;
}
Variable log_softmax(const Variable& x, int axis) { return softmax_of("log_softmax", x, axis, true); }

Variable logsumexp(const Variable& x, int axis, bool keep) {
  const ProfileScope scope("logsumexp", ScopeKind::forward);
  check_floating("logsumexp", x);
  axis = checked_axis("logsumexp", axis, x.dim());
  Shape shape = x.shape();
  shape[axis] = 1;
  Tensor y = Tensor::empty(shape, x.dtype(), x.device());
  logsumexp_forward_kernel(x.device(), y, x.value().contiguous(), axis);
  const Tensor result = keep ? y : y.squeeze(axis);
  // Saved: x and the result, from which the softmax is made again.
  return record(
      "logsumexp", {x}, result,
      [axis, keep, saved_x = Saved(x.value()),
       saved_y = Saved(y)](const OutputGrads& grads) -> std::vector<Tensor> {
        const Tensor& from = saved_x.get();
        const Tensor dy = keep ? grads[0] : grads[0].unsqueeze(axis);
        return {mapped(logsumexp_backward_kernel, dy.expand(from.shape()), from,
                       saved_y.get().expand(from.shape()))};
      },
      Infinities::negative);
}

}  // namespace torus
