// The functions of unary.cpp, accurate to a few units in the last place: see there for the choices at kinks
// and far out.
#include <cmath>

#include "torus/core/cuda.h"

namespace torus {

namespace {

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
// `narrow`, here and below: of 16-bit numbers, whose compute type is float.

// The sigmoid and its derivative, which is not value * (1 - value): that loses its digits near 1.
template <class C>
struct ValueAndSlope {
  C value, slope;
};
template <class C>
__device__ ValueAndSlope<C> sigmoid_and_slope(C x, bool narrow = false) {
  C e, r;
  if constexpr (std::is_same_v<C, float>) {
    e = narrow ? __expf(-fabsf(x)) : std::exp(-std::abs(x));
    r = narrow ? __fdividef(1.f, 1 + e) : 1 / (1 + e);
  } else {
    e = std::exp(-std::abs(x));
    r = 1 / (1 + e);
  }
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

// Phi(x), the normal distribution's, and its density.
template <class C>
struct NormalOf {
  C below, density;
};

// To 16 bits and more, at a third of the price of normcdf: erfc by its Chebyshev approximation of relative
// error 1.2e-7 (Press et al., Numerical Recipes, section 6.2).
__device__ inline NormalOf<float> normal_of_16_bits(float x) {
  const float z = fabsf(x) * 0.70710678f, t = __fdividef(1.f, 1.f + 0.5f * z), square = z * z;
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
  const float tail = 0.5f * t * __expf(p - square);
  return {x < 0 ? tail : 1 - tail, 0.39894228f * __expf(-square)};
}

template <class C>
__device__ NormalOf<C> normal(C x, bool narrow) {
  if constexpr (std::is_same_v<C, float>)
    if (narrow) return normal_of_16_bits(x);
  return {normcdf(x), C(0.39894228040143267794) * std::exp(C(-0.5) * (x * x))};
}

struct GeluExact {
  bool narrow;
  template <class C>
  __device__ C operator()(C x) const {
    return x * normal(x, narrow).below;
  }
};
struct GeluExactBackward {
  bool narrow;
  template <class C>
  __device__ C operator()(C dy, C x) const {
    const auto [below, density] = normal(x, narrow);
    return dy * (below + x * density);
  }
};
bool is_narrow(const Tensor& x) { return x.dtype() == f16 || x.dtype() == bf16; }
const CudaKernel<Unary> gelu_exact{"gelu.exact", [](Tensor& y, const Tensor& x) {
                                     gpu::map_elements("gelu", y, GeluExact{is_narrow(x)}, x);
                                   }};
const CudaKernel<Binary> gelu_exact_backward{
    "gelu.exact_backward", [](Tensor& dx, const Tensor& dy, const Tensor& x) {
      gpu::map_elements("gelu.backward", dx, GeluExactBackward{is_narrow(x)}, dy, x);
    }};

template <class C>
__device__ C gelu_argument(C x) {
  return C(1.5957691216057307) * (x + C(0.044715) * (x * x * x));
}
struct GeluTanh {
  bool narrow;
  template <class C>
  __device__ C operator()(C x) const {
    if constexpr (std::is_same_v<C, float>)
      if (narrow) return __fdividef(x, 1 + __expf(-gelu_argument(x)));  // 0 where the divisor is huge
    return x * sigmoid(gelu_argument(x));
  }
};
struct GeluTanhBackward {
  bool narrow;
  template <class C>
  __device__ C operator()(C dy, C x) const {
    const C near = x < -64 ? C(-64) : (x > 64 ? C(64) : x);
    const auto [value, slope] = sigmoid_and_slope(gelu_argument(near), narrow);
    return dy * (value + near * slope * (C(1.5957691216057307) * (1 + C(3 * 0.044715) * (near * near))));
  }
};
const CudaKernel<Unary> gelu_tanh{
    "gelu.tanh", [](Tensor& y, const Tensor& x) { gpu::map_elements("gelu", y, GeluTanh{is_narrow(x)}, x); }};
const CudaKernel<Binary> gelu_tanh_backward{
    "gelu.tanh_backward", [](Tensor& dx, const Tensor& dy, const Tensor& x) {
      gpu::map_elements("gelu.backward", dx, GeluTanhBackward{is_narrow(x)}, dy, x);
    }};

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
