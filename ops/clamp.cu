#include "torus/core/cuda.h"

namespace torus {

namespace {

// The comparisons keep a NaN.
struct Clamp {
  double low, high;
  template <class C>
  __device__ C operator()(C x) const {
    const C raised = x < C(low) ? C(low) : x;
    return raised > C(high) ? C(high) : raised;
  }
};
struct ClampBackward {
  double low, high;
  template <class C>
  __device__ C operator()(C dy, C x) const {
    return x < C(low) || x > C(high) ? C(0) : dy;
  }
};

const CudaKernel<void(Tensor&, const Tensor&, double, double)> forward{
    "clamp", [](Tensor& y, const Tensor& x, double low, double high) {
      gpu::map_elements("clamp", y, Clamp{low, high}, x);
    }};
const CudaKernel<void(Tensor&, const Tensor&, const Tensor&, double, double)> backward{
    "clamp.backward", [](Tensor& dx, const Tensor& dy, const Tensor& x, double low, double high) {
      gpu::map_elements("clamp.backward", dx, ClampBackward{low, high}, dy, x);
    }};

}  // namespace

}  // namespace torus
