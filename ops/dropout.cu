#include "torus/core/cuda.h"
#include "torus/core/random.h"
#include "torus/ops/dropout.h"

namespace torus {

namespace {

using gpu::Pack;

// A thread takes `width` neighbouring draws, whose four words decide about four runs of `width` elements,
// dropout_lanes apart. With packs, all tensors lie on multiples of 16 bytes. residual may be null.
template <class T, bool packs>
__global__ void __launch_bounds__(256)
    drop(T* __restrict__ y, const T* __restrict__ x, const T* __restrict__ residual, int64_t count,
         gpu::Replayed<uint64_t> start, uint64_t key, uint32_t limit, gpu::compute<T> scale) {
  using C = gpu::compute<T>;
  constexpr int width = Pack<T>::count, runs = dropout_lanes / width;
  const int64_t blocks = (count + dropout_block - 1) / dropout_block;
  const uint64_t first = start.get();
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < blocks * runs; i += stride) {
    const int64_t block = i / runs, lane = i % runs * width, at = block * dropout_block + lane;
    const bool whole = packs && (block + 1) * dropout_block <= count;
    const auto load = [&](Pack<T>(&into)[4], const T* from) {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (whole)
          into[k] = *reinterpret_cast<const Pack<T>*>(from + at + k * dropout_lanes);
        else
#pragma unroll
          for (int j = 0; j < width; ++j)
            if (const int64_t e = at + k * dropout_lanes + j; e < count) into[k].at[j] = from[e];
    };
    Pack<T> in[4], out[4], added[4];
    load(in, x);
    if (residual) load(added, residual);
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const uint64_t position = first + static_cast<uint64_t>(block * dropout_lanes + lane + j);
      const auto words =
          philox({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0}, key);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const C kept = words[k] > limit ? gpu::widen(in[k].at[j]) * scale : C(0);
        out[k].at[j] = gpu::narrow<T>(residual ? kept + gpu::widen(added[k].at[j]) : kept);
      }
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

void dropout(Tensor& y, const Tensor& x, const Tensor& residual, DropoutDraws draws) {
  if (y.numel() == 0) return;
  const Tensor in_order = x.contiguous(), added = residual.defined() ? residual.contiguous() : residual;
  const cudaStream_t stream = gpu::stream_of(y);
  const gpu::Replayed<uint64_t> start = gpu::replayed_position(draws.start);
  gpu::dispatch_floating(y.dtype(), "dropout", [&](auto zero) {
    using T = decltype(zero);
    T* const to = gpu::write<T>(y);
    const T *const from = gpu::read<T>(in_order), *const more =
                                                      added.defined() ? gpu::read<T>(added) : nullptr;
    const int64_t blocks = (y.numel() + dropout_block - 1) / dropout_block;
    const unsigned grid = gpu::blocks_for(blocks * (dropout_lanes / Pack<T>::count), 256);
    const auto scale = static_cast<gpu::compute<T>>(draws.scale);
    const auto launch = [&](auto kernel) {
      kernel<<<grid, 256, 0, stream>>>(to, from, more, y.numel(), start, draws.seed, draws.limit, scale);
    };
    if (gpu::is_aligned(to) && gpu::is_aligned(from) && gpu::is_aligned(more))
      launch(drop<T, true>);
    else
      launch(drop<T, false>);
    gpu::check_launch("dropout");
  });
}

const CudaKernel<void(Tensor&, const Tensor&, const Tensor&, DropoutDraws)> dropout_kernel{"dropout",
                                                                                           dropout};

}  // namespace

}  // namespace torus
