#include "torus/core/cuda.h"

namespace torus {

namespace {

using Unary = void(Tensor&, const Tensor&);
using Binary = void(Tensor&, const Tensor&, const Tensor&);
using Ternary = void(Tensor&, const Tensor&, const Tensor&, const Tensor&);
using Scalar = void(Tensor&, const Tensor&, double);

struct Add {
  template <class C>
  __device__ C operator()(C a, C b) const {
    return a + b;
  }
};
struct Sub {
  template <class C>
  __device__ C operator()(C a, C b) const {
    return a - b;
  }
};
struct Mul {
  template <class C>
  __device__ C operator()(C a, C b) const {
    return a * b;
  }
};
struct Div {
  template <class C>
  __device__ C operator()(C a, C b) const {
    return a / b;
  }
};
struct DivBackward {
  template <class C>
  __device__ C operator()(C dy, C a, C b) const {
    return -dy * (a / b / b);
  }
};
struct Neg {
  template <class C>
  __device__ C operator()(C x) const {
    return -x;
  }
};
const CudaKernel<Binary> add{"add", gpu::map<Add>}, sub{"sub", gpu::map<Sub>}, mul{"mul", gpu::map<Mul>},
    div{"div", gpu::map<Div>};
const CudaKernel<Ternary> div_backward{"div.backward", gpu::map<DivBackward>};
const CudaKernel<Unary> neg{"neg", gpu::map<Neg>};

// F on x and a number, which is rounded to the type of the arithmetic.
template <class F>
struct WithScalar {
  double number;
  template <class C>
  __device__ C operator()(C x) const {
    return F{}(x, static_cast<C>(number));
  }
};
template <class F>
void map_scalar(Tensor& y, const Tensor& x, double number) {
  gpu::map_elements("scalar", y, WithScalar<F>{number}, x);
}

struct DivInto {
  template <class C>
  __device__ C operator()(C b, C a) const {
    return a / b;
  }
};
struct DivIntoBackward {
  double number;
  template <class C>
  __device__ C operator()(C dy, C b) const {
    return -dy * (static_cast<C>(number) / b / b);
  }
};
const CudaKernel<Scalar> add_scalar{"add.scalar", map_scalar<Add>}, mul_scalar{"mul.scalar", map_scalar<Mul>},
    div_scalar{"div.scalar", map_scalar<Div>}, scalar_div{"scalar.div", map_scalar<DivInto>};
const CudaKernel<void(Tensor&, const Tensor&, const Tensor&, double)> scalar_div_backward{
    "scalar.div.backward", [](Tensor& dx, const Tensor& dy, const Tensor& x, double number) {
      gpu::map_elements("scalar.div.backward", dx, DivIntoBackward{number}, dy, x);
    }};

}  // namespace

}  // namespace torus
