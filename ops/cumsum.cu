#include "torus/core/cuda.h"

namespace torus {

namespace {

using namespace gpu;

constexpr int threads = 256;

// `lanes` threads walk a line together, as many places at a time: 1, a warp, or the whole block.
template <class T>
__global__ void cumsum_lines(T* y, const T* x, const __grid_constant__ Strided<2> lines, int64_t length,
                             int64_t y_along, int64_t x_along, int lanes) {
  __shared__ double space[32];
  const int lane = threadIdx.x % lanes, warp = lane / 32, warps = lanes / 32;
  const int64_t groups = int64_t{gridDim.x} * (blockDim.x / lanes);
  for (int64_t line = int64_t{blockIdx.x} * (blockDim.x / lanes) + threadIdx.x / lanes; line < lines.count;
       line += groups) {
    int64_t at[2];
    lines.offsets(line, at);
    T* const to = y + at[0];
    const T* const from = x + at[1];
    double before = 0;  // the sum of all places that were passed
    for (int64_t first = 0; first < length; first += lanes) {
      const int64_t i = first + lane;
      double sum = i < length ? static_cast<double>(widen(from[i * x_along])) : 0;
      double all = sum;
      if (lanes > 1) {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const double other = __shfl_up_sync(0xffffffffu, sum, step);
          if (lane % 32 >= step) sum += other;
        }
        all = __shfl_sync(0xffffffffu, sum, 31);
      }
      if (lanes > 32) {
        if (lane % 32 == 31) space[warp] = sum;
        __syncthreads();
        all = 0;
        double earlier = 0;
        for (int w = 0; w < warps; ++w) {
          if (w == warp) earlier = all;
          all += space[w];
        }
        sum += earlier;
        __syncthreads();
      }
      if (i < length) to[i * y_along] = narrow<T>(static_cast<compute<T>>(before + sum));
      before += all;
    }
  }
}

void cumsum(Tensor& y, const Tensor& x, int axis, bool backwards) {
  if (y.numel() == 0) return;
  const cudaStream_t stream = stream_of(y);
  const int64_t length = x.size(axis);
  Shape shape = x.shape();
  shape[axis] = 1;
  const Strided<2> lines(shape, {y.strides(), x.strides()});
  int64_t y_along = y.strides()[axis], x_along = x.strides()[axis];
  // Threads of their own for short lines, and where neighbouring lines lie side by side and are many.
  const bool apart = length < 32 || (x_along != 1 && lines.count >= 1 << 16);
  const int lanes = apart ? 1 : length <= 512 || lines.count >= 1 << 14 ? 32 : threads;
  gpu::dispatch_floating(y.dtype(), "cumsum", [&](auto zero) {
    using T = decltype(zero);
    T* to = write<T>(y);
    const T* from = read<T>(x);
    if (backwards) {
      to += (length - 1) * y_along, y_along = -y_along;
      from += (length - 1) * x_along, x_along = -x_along;
    }
    cumsum_lines<<<blocks_for(lines.count, threads / lanes), threads, 0, stream>>>(to, from, lines, length,
                                                                                   y_along, x_along, lanes);
    check_launch("cumsum");
  });
}

const CudaKernel<void(Tensor&, const Tensor&, int, bool)> cumsum_kernel{"cumsum", cumsum};

}  // namespace

}  // namespace torus
