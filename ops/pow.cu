#include <cmath>

#include "torus/core/cuda.h"

namespace torus {

namespace {

// x^p for one p. The powers that formulas are made of are told apart once a launch, as on the CPU.
enum class Form { zero, one, square, cube, reciprocal, root, reciprocal_root, other };

Form form_of(double p) {
  if (p == 0) return Form::zero;
  if (p == 1) return Form::one;
  if (p == 2) return Form::square;
  if (p == 3) return Form::cube;
  if (p == -1) return Form::reciprocal;
  if (p == 0.5) return Form::root;
  if (p == -0.5) return Form::reciprocal_root;
  return Form::other;
}

struct Power {
  double p;
  Form form;
  explicit Power(double exponent) : p(exponent), form(form_of(exponent)) {}
  template <class C>
  __device__ C operator()(C x) const {
    switch (form) {
      case Form::zero:
        return C(1);
      case Form::one:
        return x;
      case Form::square:
        return x * x;
      case Form::cube:
        return x * x * x;
      case Form::reciprocal:
        return 1 / x;
      case Form::root:
        return std::sqrt(x);
      case Form::reciprocal_root:
        return 1 / std::sqrt(x);
      default:
        return std::pow(x, static_cast<C>(p));
    }
  }
};
struct PowerBackward {
  double p;
  Power power;
  template <class C>
  __device__ C operator()(C dy, C x) const {
    return dy * (static_cast<C>(p) * power(x));
  }
};

const CudaKernel<void(Tensor&, const Tensor&, double)> scalar{
    "pow.scalar", [](Tensor& y, const Tensor& x, double p) { gpu::map_elements("pow", y, Power(p), x); }};
const CudaKernel<void(Tensor&, const Tensor&, const Tensor&, double)> scalar_backward{
    "pow.scalar_backward", [](Tensor& dx, const Tensor& dy, const Tensor& x, double p) {
      gpu::map_elements("pow.backward", dx, PowerBackward{p, Power(p - 1)}, dy, x);
    }};

struct Pow {
  template <class C>
  __device__ C operator()(C x, C p) const {
    return std::pow(x, p);
  }
};
struct BaseBackward {
  template <class C>
  __device__ C operator()(C dy, C x, C p) const {
    return p == 0 ? C(0) : dy * (p * std::pow(x, p - 1));
  }
};
struct ExponentBackward {
  template <class C>
  __device__ C operator()(C dy, C x, C p) const {
    return x == 0 && p >= 0 ? C(0) : dy * (std::pow(x, p) * std::log(x));
  }
};
const CudaKernel<void(Tensor&, const Tensor&, const Tensor&)> pow_kernel{"pow", gpu::map<Pow>};
const CudaKernel<void(Tensor&, const Tensor&, const Tensor&, const Tensor&)> base_backward{
    "pow.base_backward", gpu::map<BaseBackward>},
    exponent_backward{"pow.exponent_backward", gpu::map<ExponentBackward>};

}  // namespace

}  // namespace torus
