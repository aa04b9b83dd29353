#include "torus/ops/cuda_norm.h"

namespace torus {

namespace {

void forward(Tensor& y, Tensor& scales, const Tensor& x, const Tensor& weight, double eps) {
  gpu::launch_norm_forward<false>("rms_norm", y, scales, x, weight, Tensor(), eps);
}

void backward(Tensor& dx, Tensor& dw, const Tensor& g, const Tensor& x, const Tensor& weight,
              const Tensor& scales, bool adds) {
  Tensor no_bias;
  gpu::launch_norm_backward<false>("rms_norm", dx, dw, no_bias, g, x, weight, scales, adds);
}

const CudaKernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, double)> forward_kernel{
    "rms_norm.forward", forward};
const CudaKernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool)>
    backward_kernel{"rms_norm.backward", backward};

}  // namespace

}  // namespace torus
