#include "torus/ops/cuda_norm.h"

namespace torus {

namespace {

void forward(Tensor& y, Tensor& statistics, const Tensor& x, const Tensor& weight, const Tensor& bias,
             double eps) {
  gpu::launch_norm_forward<true>("layer_norm", y, statistics, x, weight, bias, eps);
}

void backward(Tensor& dx, Tensor& dw, Tensor& db, const Tensor& g, const Tensor& x, const Tensor& weight,
              const Tensor& statistics, bool adds) {
  gpu::launch_norm_backward<true>("layer_norm", dx, dw, db, g, x, weight, statistics, adds);
}

const CudaKernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&, double)> forward_kernel{
    "layer_norm.forward", forward};
const CudaKernel<void(Tensor&, Tensor&, Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      bool)>
    backward_kernel{"layer_norm.backward", backward};

}  // namespace

}  // namespace torus
