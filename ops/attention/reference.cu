#include "torus/core/cuda.h"

namespace torus {

namespace {

using namespace gpu;

template <class T>
__global__ void compare(bool* result, const T* x, const __grid_constant__ Strided<2> walk, double value) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < walk.count;
       i += int64_t{gridDim.x} * blockDim.x) {
    int64_t at[2];
    walk.offsets(i, at);
    result[at[0]] = static_cast<double>(widen(x[at[1]])) == value;
  }
}

void equals(Tensor& result, const Tensor& x, double value) {
  if (x.numel() == 0) return;
  const cudaStream_t stream = stream_of(x);
  gpu::dispatch_floating(x.dtype(), "equals", [&](auto zero) {
    using T = decltype(zero);
    compare<<<blocks_for(x.numel(), 256), 256, 0, stream>>>(
        result.mutable_data<bool>(), read<T>(x), Strided<2>(x.shape(), {result.strides(), x.strides()}),
        value);
    check_launch("equals");
  });
}

const CudaKernel<void(Tensor&, const Tensor&, double)> equals_kernel{"equals", equals};

}  // namespace

}  // namespace torus
