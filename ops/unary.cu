// The functions of unary.cpp, accurate to a few units in the last place: see there for the choices at kinks
// and far out.
#include <cmath>

#include "torus/core/column_sums.h"
#include "torus/core/cuda.h"

namespace torus {

namespace {

using gpu::approximate_exp2;

using Unary = void(Tensor&, const Tensor&);
using Binary = void(Tensor&, const Tensor&, const Tensor&);

struct Exp {
  template <class C>
  __device__ C operator()(C x) const {
    return std::exp(x);
  }
};
struct ExpBackward {
  template <class C>
  __device__ C operator()(C dy, C y) const {
    return dy * y;
  }
};
const CudaKernel<Unary> exp_kernel{"exp", gpu::map<Exp>};
const CudaKernel<Binary> exp_backward{"exp.backward", gpu::map<ExpBackward>};

struct Log {
  template <class C>
  __device__ C operator()(C x) const {
    return std::log(x);
  }
};
struct LogBackward {
  template <class C>
  __device__ C operator()(C dy, C x) const {
    return dy / x;
  }
};
const CudaKernel<Unary> log_kernel{"log", gpu::map<Log>};
const CudaKernel<Binary> log_backward{"log.backward", gpu::map<LogBackward>};

struct Sqrt {
  template <class C>
  __device__ C operator()(C x) const {
    return std::sqrt(x);
  }
};
struct SqrtBackward {
  template <class C>
  __device__ C operator()(C dy, C y) const {
    return dy / (y + y);
  }
};
const CudaKernel<Unary> sqrt_kernel{"sqrt", gpu::map<Sqrt>};
const CudaKernel<Binary> sqrt_backward{"sqrt.backward", gpu::map<SqrtBackward>};

struct Tanh {
  template <class C>
  __device__ C operator()(C x) const {
    return std::tanh(x);
  }
};
struct TanhBackward {
  template <class C>
  __device__ C operator()(C dy, C y) const {
    return dy * (1 - y * y);
  }
};
const CudaKernel<Unary> tanh_kernel{"tanh", gpu::map<Tanh>};
const CudaKernel<Binary> tanh_backward{"tanh.backward", gpu::map<TanhBackward>};

struct Abs {
  template <class C>
  __device__ C operator()(C x) const {
    return std::abs(x);
  }
};
struct AbsBackward {
  template <class C>
  __device__ C operator()(C dy, C x) const {
    return x == 0 ? C(0) : (x < 0 ? -dy : dy);
  }
};
const CudaKernel<Unary> abs_kernel{"abs", gpu::map<Abs>};
const CudaKernel<Binary> abs_backward{"abs.backward", gpu::map<AbsBackward>};

template <class C>
__device__ C sigmoid(C x) {
  return 1 / (1 + std::exp(-x));
}
// The sigmoid and its derivative, which is not value * (1 - value): that loses its digits near 1.
template <class C>
struct ValueAndSlope {
  C value, slope;
};
template <class C>
__device__ ValueAndSlope<C> sigmoid_and_slope(C x) {
  const C e = std::exp(-std::abs(x)), r = 1 / (1 + e);
  return {x < 0 ? e * r : r, e * r * r};
}

struct Sigmoid {
  template <class C>
  __device__ C operator()(C x) const {
    return sigmoid(x);
  }
};
struct SigmoidBackward {
  template <class C>
  __device__ C operator()(C dy, C x) const {
    return dy * sigmoid_and_slope(x).slope;
  }
};
const CudaKernel<Unary> sigmoid_kernel{"sigmoid", gpu::map<Sigmoid>};
const CudaKernel<Binary> sigmoid_backward{"sigmoid.backward", gpu::map<SigmoidBackward>};

struct Relu {
  template <class C>
  __device__ C operator()(C x) const {
    return x < 0 ? C(0) : x;
  }
};
struct ReluBackward {
  template <class C>
  __device__ C operator()(C dy, C y) const {
    return y <= 0 ? C(0) : dy;
  }
};
const CudaKernel<Unary> relu_kernel{"relu", gpu::map<Relu>};
const CudaKernel<Binary> relu_backward{"relu.backward", gpu::map<ReluBackward>};

// 1 / x, to what 16 bits need and more; 0 if x is huge.
__device__ inline float approximate_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Phi(x), the normal distribution's, and its density.
template <class C>
struct NormalOf {
  C below, density;
};

// To 16 bits and more, at a third of the price of normcdf: erfc by its Chebyshev approximation of relative
// error 1.2e-7 (Press et al., Numerical Recipes, section 6.2).
__device__ inline NormalOf<float> normal_of_16_bits(float x) {
  const float z = fabsf(x) * 0.70710678f, t = approximate_reciprocal(1.f + 0.5f * z);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  // e^-z^2, of which the tail has its part too.
  const float gaussian = approximate_exp2(z * z * -1.44269504f);
  const float tail = 0.5f * t * approximate_exp2(p * 1.44269504f) * gaussian;
  return {x < 0 ? tail : 1 - tail, 0.39894228f * gaussian};
}

template <bool narrow, class C>
__device__ NormalOf<C> normal(C x) {
  if constexpr (narrow && std::is_same_v<C, float>)
    return normal_of_16_bits(x);
  else
    return {normcdf(x), C(0.39894228040143267794) * std::exp(C(-0.5) * (x * x))};
}

// `narrow`, here and below: of 16-bit numbers, whose compute type is float.
template <bool narrow>
struct GeluExact {
  template <class C>
  __device__ C operator()(C x) const {
    return x * normal<narrow>(x).below;
  }
};
template <bool narrow>
struct GeluExactBackward {
  template <class C>
  __device__ C operator()(C dy, C x) const {
    const auto [below, density] = normal<narrow>(x);
    return dy * (below + x * density);
  }
};

template <class C>
__device__ C gelu_argument(C x) {
  return C(1.5957691216057307) * (x + C(0.044715) * (x * x * x));
}
// e^-gelu_argument(x), of the square of x or what stands for it.
__device__ inline float gelu_exponential(float x, float square) {
  return approximate_exp2(x * (-0.10294324f * square - 2.3022082f));
}
template <bool narrow>
struct GeluTanh {
  template <class C>
  __device__ C operator()(C x) const {
    if constexpr (narrow && std::is_same_v<C, float>)
      return x * approximate_reciprocal(1 + gelu_exponential(x, x * x));
    else
      return x * sigmoid(gelu_argument(x));
  }
};
template <bool narrow>
struct GeluTanhBackward {
  template <class C>
  __device__ C operator()(C dy, C x) const {
    constexpr C c = C(1.5957691216057307), c3 = C(3 * 0.044715) * c;
    if constexpr (narrow && std::is_same_v<C, float>) {
      const float near = fminf(fmaxf(x, -64.f), 64.f), square = near * near;
      const float value = approximate_reciprocal(1 + gelu_exponential(x, square));  // NaN if x is
      return dy * (value + near * (value - value * value) * (c3 * square + c));
    } else {
      const C near = x < -64 ? C(-64) : (x > 64 ? C(64) : x);
      const auto [value, slope] = sigmoid_and_slope(gelu_argument(near));
      return dy * (value + near * slope * (c3 * (near * near) + c));
    }
  }
};

// The same for 16-bit numbers and others, with f<true> and f<false>.
template <template <bool> class F, class... Inputs>
void map_narrow_or_not(Tensor& y, const Inputs&... x) {
  if (y.dtype() == f16 || y.dtype() == bf16)
    gpu::map_elements("gelu", y, F<true>{}, x...);
  else
    gpu::map_elements("gelu", y, F<false>{}, x...);
}
const CudaKernel<Unary> gelu_exact{"gelu.exact", map_narrow_or_not<GeluExact, Tensor>},
    gelu_tanh{"gelu.tanh", map_narrow_or_not<GeluTanh, Tensor>};
const CudaKernel<Binary> gelu_exact_backward{"gelu.exact_backward",
                                             map_narrow_or_not<GeluExactBackward, Tensor, Tensor>},
    gelu_tanh_backward{"gelu.tanh_backward", map_narrow_or_not<GeluTanhBackward, Tensor, Tensor>};

// A source of launch_sum_columns: rows of dx = F(dy, x), rounded, which it writes. dx may be where dy is.
template <class T, class F>
struct BackwardRows {
  static constexpr int width = gpu::Pack<T>::count, at_once = 2;
  struct Loaded {
    uint4 dy, x;
  };
  T* dx;
  const T *dy, *x;
  int64_t columns, step = columns * gpu::ColumnLayout<width>::groups;

  __device__ int64_t start(int64_t row, int64_t column) const { return row * columns + column; }
  __device__ Loaded load(int64_t at, bool there) const {
    if (!there) at = 0;
    return {*reinterpret_cast<const uint4*>(dy + at), *reinterpret_cast<const uint4*>(x + at)};
  }
  __device__ void take(float (&values)[width], const Loaded& in, int64_t at, bool there) const {
    const uint4 rounded = gpu::detail::apply_to_packs<T>(F{}, {in.dy, in.x});
    if (there) __stcg(reinterpret_cast<uint4*>(dx + at), rounded);
    gpu::widen_pack<T>(values, there ? rounded : uint4{});
  }
  __device__ void advance(int64_t& at) const { at += step; }
};

// Of 16-bit numbers alone: for others the time goes into arithmetic.
template <template <bool> class F>
void backward_and_sums(Tensor& dx, Tensor& sums, const Tensor& dy, const Tensor& x, bool& done) {
  if ((x.dtype() != f16 && x.dtype() != bf16) || x.numel() == 0 || x.size(1) % 8 != 0) return;
  gpu::dispatch_floating(x.dtype(), "gelu", [&](auto zero) {
    using T = decltype(zero);
    if constexpr (gpu::is_16_bit<T>) {
      for (const Tensor* tensor : {static_cast<const Tensor*>(&dx), &dy, &x})
        if (!tensor->is_contiguous() || !gpu::is_aligned(gpu::read<T>(*tensor))) return;
      const BackwardRows<T, F<true>> rows{gpu::write<T>(dx), gpu::read<T>(dy), gpu::read<T>(x), x.size(1)};
      gpu::launch_sum_columns<T>(sums, rows, x.size(0), x.size(1), 1);
      done = true;
    }
  });
}
const CudaKernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, bool&)> gelu_exact_sums{
    "gelu.exact_backward_and_sums", backward_and_sums<GeluExactBackward>},
    gelu_tanh_sums{"gelu.tanh_backward_and_sums", backward_and_sums<GeluTanhBackward>};

struct Silu {
  template <class C>
  __device__ C operator()(C x) const {
    return x * sigmoid(x);
  }
};
struct SiluBackward {
  template <class C>
  __device__ C operator()(C dy, C x) const {
    const auto [value, slope] = sigmoid_and_slope(x);
    return dy * (value + x * slope);
  }
};
const CudaKernel<Unary> silu_kernel{"silu", gpu::map<Silu>};
const CudaKernel<Binary> silu_backward{"silu.backward", gpu::map<SiluBackward>};

}  // namespace

}  // namespace torus
