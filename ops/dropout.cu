#include "torus/core/cuda.h"
#include "torus/core/random.h"
#include "torus/ops/dropout.h"

namespace torus {

namespace {

using gpu::Pack;

// A thread takes `width` neighbouring draws, whose four words decide about four runs of `width` elements,
// dropout_lanes apart. With packs, x and y lie on multiples of 16 bytes.
template <class T, bool packs>
__global__ void __launch_bounds__(256)
    drop(T* __restrict__ y, const T* __restrict__ x, int64_t count, gpu::Replayed<uint64_t> start,
         uint64_t key, uint32_t limit, gpu::compute<T> scale) {
  using C = gpu::compute<T>;
  constexpr int width = Pack<T>::count, runs = dropout_lanes / width;
  const int64_t blocks = (count + dropout_block - 1) / dropout_block;
  const uint64_t first = start.get();
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < blocks * runs; i += stride) {
    const int64_t block = i / runs, lane = i % runs * width, at = block * dropout_block + lane;
    const bool whole = packs && (block + 1) * dropout_block <= count;
    Pack<T> in[4], out[4];
    if (whole)
#pragma unroll
      for (int k = 0; k < 4; ++k) in[k] = *reinterpret_cast<const Pack<T>*>(x + at + k * dropout_lanes);
    else
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int j = 0; j < width; ++j)
          if (const int64_t e = at + k * dropout_lanes + j; e < count) in[k].at[j] = x[e];
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const uint64_t position = first + static_cast<uint64_t>(block * dropout_lanes + lane + j);
      const auto words =
          philox({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0}, key);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        out[k].at[j] = gpu::narrow<T>(words[k] > limit ? gpu::widen(in[k].at[j]) * scale : C(0));
    }
    if (whole)
#pragma unroll
      for (int k = 0; k < 4; ++k) *reinterpret_cast<Pack<T>*>(y + at + k * dropout_lanes) = out[k];
    else
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int j = 0; j < width; ++j)
          if (const int64_t e = at + k * dropout_lanes + j; e < count) y[e] = out[k].at[j];
  }
}

void dropout(Tensor& y, const Tensor& x, DropoutDraws draws) {
  if (y.numel() == 0) return;
  const Tensor in_order = x.contiguous();
  const cudaStream_t stream = gpu::stream_of(y);
  const gpu::Replayed<uint64_t> start = gpu::replayed_position(draws.start);
  gpu::dispatch_floating(y.dtype(), "dropout", [&](auto zero) {
    using T = decltype(zero);
    T* const to = gpu::write<T>(y);
    const T* const from = gpu::read<T>(in_order);
    const int64_t blocks = (y.numel() + dropout_block - 1) / dropout_block;
    const unsigned grid = gpu::blocks_for(blocks * (dropout_lanes / Pack<T>::count), 256);
    const auto scale = static_cast<gpu::compute<T>>(draws.scale);
    if (gpu::is_aligned(to) && gpu::is_aligned(from))
      drop<T, true><<<grid, 256, 0, stream>>>(to, from, y.numel(), start, draws.seed, draws.limit, scale);
    else
      drop<T, false><<<grid, 256, 0, stream>>>(to, from, y.numel(), start, draws.seed, draws.limit, scale);
    gpu::check_launch("dropout");
  });
}

const CudaKernel<void(Tensor&, const Tensor&, DropoutDraws)> dropout_kernel{"dropout", dropout};

}  // namespace

}  // namespace torus
