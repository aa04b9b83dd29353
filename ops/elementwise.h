// Elementwise kernels: one loop for all of them. For op code; not installed.
#pragma once

#include <array>
#include <utility>

#include "torus/autograd/tape.h"
#include "torus/core/kernel.h"
#include "torus/core/strided.h"

namespace torus {

using UnaryKernel = Kernel<void(Tensor&, const Tensor&)>;
using BinaryKernel = Kernel<void(Tensor&, const Tensor&, const Tensor&)>;
using TernaryKernel = Kernel<void(Tensor&, const Tensor&, const Tensor&, const Tensor&)>;
using ScalarKernel = Kernel<void(Tensor&, const Tensor&, double)>;

namespace detail {

// to[i] = f(from[k][i * step[k]]...) with step[k] a constant where it is 0 or 1, so that the loop vectorises.
template <class T, class F, size_t N, class... Steps>
void map_run(T* to, const std::array<const T*, N>& from, const std::array<int64_t, N>& step, int64_t count,
             const F& f, Steps... steps) {
  constexpr size_t k = sizeof...(Steps);
  if constexpr (k < N) {
    if (step[k] == 1)
      map_run(to, from, step, count, f, steps..., std::integral_constant<int64_t, 1>{});
    else
      map_run(to, from, step, count, f, steps..., std::integral_constant<int64_t, 0>{});
  } else {
    [&]<size_t... I>(std::index_sequence<I...>) {
      const std::array<const T*, N> local = from;
      for (int64_t i = 0; i < count; ++i)
        to[i] = static_cast<T>(f(static_cast<Compute<T>>(local[I][i * Steps::value])...));
    }
    (std::make_index_sequence<N>{});
  }
}

}  // namespace detail

/// y = f(x...) element by element, on the CPU, in float for 16-bit floats. The x have y's dtype and shape,
/// and any strides.
template <class F, class... Inputs>
void map_elements(Tensor& y, const F& f, const Inputs&... x) {
  constexpr size_t n = sizeof...(Inputs);
  dispatch_floating(y.dtype(), "map_elements", [&](auto zero) {
    using T = decltype(zero);
    T* to = y.mutable_data<T>();
    const std::array<const T*, n> from{x.template data<T>()...};
    for_each_run<n + 1>(y.shape(), {y.strides(), x.strides()...}, elementwise_grain,
                        [&](const auto& offset, const auto& step, int64_t count) {
                          std::array<const T*, n> first;
                          std::array<int64_t, n> steps;
                          bool constant = step[0] == 1;
                          for (size_t k = 0; k < n; ++k) {
                            first[k] = from[k] + offset[k + 1];
                            steps[k] = step[k + 1];
                            constant = constant && (steps[k] == 0 || steps[k] == 1);
                          }
                          T* out = to + offset[0];
                          if (constant) return detail::map_run(out, first, steps, count, f);
                          [&]<size_t... I>(std::index_sequence<I...>) {
                            for (int64_t i = 0; i < count; ++i)
                              out[i * step[0]] =
                                  static_cast<T>(f(static_cast<Compute<T>>(first[I][i * steps[I]])...));
                          }
                          (std::make_index_sequence<n>{});
                        });
  });
}

/// The same as a kernel of tensors alone: `BinaryKernel{"mul", map<[](auto a, auto b) { return a * b; }>}`.
template <auto f, class... Inputs>
void map(Tensor& y, const Inputs&... x) {
  map_elements(y, f, x...);
}

inline void check_floating(const char* op, const Variable& x) {
  check_defined(op, "x", x);
  check(is_floating(x.dtype()), Error::Kind::DType, "[", op, "] expected a floating dtype, got ", x.dtype());
}

/// That a parameter of an op along the last axis of x, such as the weight of a norm, is [C] and like x.
inline void check_channels(const char* op, const char* name, const Variable& parameter, const Variable& x) {
  check_defined(op, name, parameter);
  check(parameter.dim() == 1, Error::Kind::Shape, "[", op, "] ", name, " must have one axis, got shape ",
        parameter.shape());
  check(parameter.numel() == x.size(-1), Error::Kind::Shape, "[", op, "] ", name, " must have ", x.size(-1),
        " elements (last dimension of x), got ", parameter.numel());
  check(parameter.dtype() == x.dtype(), Error::Kind::DType, "[", op, "] ", name, " must be ", x.dtype(),
        " as x, got ", parameter.dtype());
  check(parameter.device() == x.device(), Error::Kind::Device, "[", op, "] ", name, " must be on ",
        x.device(), " as x, got ", parameter.device());
}

/// Both operands, stretched to their common shape.
struct Operands {
  Tensor a, b;
};

inline Operands broadcast(const char* op, const Variable& a, const Variable& b) {
  check_defined(op, "a", a);
  check_defined(op, "b", b);
  check_floating(op, a);
  check(a.dtype() == b.dtype(), Error::Kind::DType, "[", op, "] expected one dtype, got ", a.dtype(), " and ",
        b.dtype());
  check(a.device() == b.device(), Error::Kind::Device, "[", op, "] expected one device, got ", a.device(),
        " and ", b.device());
  const Shape shape = broadcast_shapes(op, a.shape(), b.shape());
  return {a.value().expand(shape), b.value().expand(shape)};
}

/// A new tensor like x, filled by `kernel(y, x, rest...)`.
template <class K, class... Rest>
Tensor mapped(const K& kernel, const Tensor& x, const Rest&... rest) {
  Tensor y = Tensor::empty(x.shape(), x.dtype(), x.device());
  kernel(x.device(), y, x, rest...);
  return y;
}

}  // namespace torus
