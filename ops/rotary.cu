#include "torus/core/cuda.h"

namespace torus {

namespace {

using namespace gpu;

template <class T, int width>
struct alignas(width * sizeof(T) < 16 ? width * sizeof(T) : 16) Chunk {
  T at[width];
};

// A thread turns `width` neighbouring pairs. `walk`: x, y and the cosines, by row and chunk.
template <class T, int width>
__global__ void turn_pairs(T* y, const T* x, const compute<T>* codes, const __grid_constant__ Strided<3> walk,
                           int64_t pairs, int64_t to_sines, compute<T> sign) {
  using C = compute<T>;
  using Values = Chunk<T, width>;
  using Codes = Chunk<C, width>;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < walk.count;
       i += int64_t{gridDim.x} * blockDim.x) {
    int64_t at[3];
    walk.offsets(i, at);
    const auto first = *reinterpret_cast<const Values*>(x + at[0]);
    const auto second = *reinterpret_cast<const Values*>(x + at[0] + pairs);
    const auto cosines = *reinterpret_cast<const Codes*>(codes + at[2]);
    const auto sines = *reinterpret_cast<const Codes*>(codes + at[2] + to_sines);
    Values to_first, to_second;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const C a = widen(first.at[j]), b = widen(second.at[j]), c = cosines.at[j], s = sign * sines.at[j];
      to_first.at[j] = narrow<T>(a * c - b * s);
      to_second.at[j] = narrow<T>(b * c + a * s);
    }
    *reinterpret_cast<Values*>(y + at[1]) = to_first;
    *reinterpret_cast<Values*>(y + at[1] + pairs) = to_second;
  }
}

void rotary(Tensor& y, const Tensor& x, const Tensor& codes, bool back) {
  if (y.numel() == 0) return;
  const cudaStream_t stream = stream_of(y);
  keep_for_replays(codes.storage());  // a layer may forget them before the last replay
  const int64_t tokens = codes.size(1), pairs = codes.size(2);
  gpu::dispatch_floating(x.dtype(), "rotary", [&](auto zero) {
    using T = decltype(zero);
    using C = compute<T>;
    T* const to = write<T>(y);
    const T* const from = read<T>(x);
    const C* const angles = codes.data<C>();
    const auto launch = [&](auto width) {
      constexpr int w = width();
      Shape shape = y.shape(), x_steps = x.strides(), y_steps = y.strides(), code_steps = shape;
      for (int axis = 0; axis < shape.dim(); ++axis) code_steps[axis] = 0;
      code_steps[-2] = pairs;
      shape[-1] = pairs / w;
      x_steps[-1] = y_steps[-1] = code_steps[-1] = w;
      const Strided<3> walk(shape, {x_steps, y_steps, code_steps});
      turn_pairs<T, w><<<blocks_for(walk.count, 256), 256, 0, stream>>>(to, from, angles, walk, pairs,
                                                                        tokens * pairs, back ? C(-1) : C(1));
      check_launch("rotary");
    };
    constexpr int width = Pack<T>::count;
    bool packs = pairs % width == 0 && is_aligned(to) && is_aligned(from) && is_aligned(angles);
    for (int axis = 0; axis + 1 < x.dim(); ++axis)
      packs = packs && (x.strides()[axis] % width == 0 || x.size(axis) == 1);
    if (packs)
      launch(std::integral_constant<int, width>{});
    else
      launch(std::integral_constant<int, 1>{});
  });
}

const CudaKernel<void(Tensor&, const Tensor&, const Tensor&, bool)> rotary_kernel{"rotary", rotary};

}  // namespace

}  // namespace torus
