#include "torus/core/cuda.h"

namespace torus {

namespace {

using namespace gpu;

// A grid of three axes, missing ones of size 1, and its patches.
struct Grid {
  int64_t channels, size[3] = {1, 1, 1}, patch[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, count[3] = {1, 1, 1};
};

// Each element of x [B, C, grid...] adds up the patches that hold it, in order.
template <class T>
__global__ void add_patches(T* x, const T* tokens, const __grid_constant__ Grid grid, int64_t elements) {
  const int64_t patch_size = grid.patch[0] * grid.patch[1] * grid.patch[2];
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements;
       i += int64_t{gridDim.x} * blockDim.x) {
    int64_t rest = i, at[3], first[3], last[3];  // place in the grid, and the patches that hold it
#pragma unroll
    for (int axis = 2; axis >= 0; --axis) {
      const int64_t place = rest % grid.size[axis], stride = grid.stride[axis], patch = grid.patch[axis];
      rest /= grid.size[axis];
      at[axis] = place;
      first[axis] = place < patch ? 0 : (place - patch) / stride + 1;
      last[axis] = min(place / stride, grid.count[axis] - 1);
    }
    const int64_t channel = rest % grid.channels, batch = rest / grid.channels;
    compute<T> sum = 0;
    for (int64_t a = first[0]; a <= last[0]; ++a)
      for (int64_t b = first[1]; b <= last[1]; ++b)
        for (int64_t c = first[2]; c <= last[2]; ++c) {
          const int64_t token = ((batch * grid.count[0] + a) * grid.count[1] + b) * grid.count[2] + c;
          const int64_t inside =
              ((at[0] - a * grid.stride[0]) * grid.patch[1] + at[1] - b * grid.stride[1]) * grid.patch[2] +
              at[2] - c * grid.stride[2];
          sum += widen(tokens[(token * grid.channels + channel) * patch_size + inside]);
        }
    x[i] = narrow<T>(sum);
  }
}

void fold(Tensor& x, const Tensor& tokens, const Shape& patch, const Shape& stride) {
  if (x.numel() == 0) return;
  const cudaStream_t stream = stream_of(x);
  const Tensor from = tokens.contiguous();
  Grid grid{x.size(1)};
  for (int axis = 0; axis < patch.dim(); ++axis) {
    const int to = 3 - patch.dim() + axis;
    grid.size[to] = x.size(2 + axis);
    grid.patch[to] = patch[axis];
    grid.stride[to] = stride[axis];
    grid.count[to] = (grid.size[to] - patch[axis]) / stride[axis] + 1;
  }
  gpu::dispatch_floating(x.dtype(), "fold", [&](auto zero) {
    using T = decltype(zero);
    add_patches<<<blocks_for(x.numel(), 256), 256, 0, stream>>>(write<T>(x), read<T>(from), grid, x.numel());
    check_launch("fold");
  });
}

const CudaKernel<void(Tensor&, const Tensor&, const Shape&, const Shape&)> fold_kernel{"fold", fold};

}  // namespace

}  // namespace torus
