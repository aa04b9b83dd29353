#include <cmath>

#include "torus/core/cuda.h"

namespace torus {

namespace {

using namespace gpu;

constexpr int threads = 256;

// A candidate for the extreme of a line.
template <class C>
struct Candidate {
  C value;
  int64_t at;
};

// The one that comes before the other in the result: NaN first, then the extreme, then the lower place. A
// total order of the candidates of one line, so any tree gives the same result.
template <bool largest>
struct First {
  template <class C>
  __device__ Candidate<C> operator()(const Candidate<C>& a, const Candidate<C>& b) const {
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    const bool ahead = a_nan ? !b_nan : !b_nan && (largest ? a.value > b.value : a.value < b.value);
    const bool level = (a_nan && b_nan) || a.value == b.value;
    return ahead || (level && a.at < b.at) ? a : b;
  }
};

// `lanes` threads share a line: 1, a warp, or the whole block.
template <bool largest, class T>
__global__ void find_extremes(T* value, int64_t* place, const T* x, const __grid_constant__ Strided<3> lines,
                              int64_t length, int64_t along, int lanes) {
  using C = compute<T>;
  __shared__ Candidate<C> space[32];
  const First<largest> first;
  const int lane = threadIdx.x % lanes;
  const int64_t groups = int64_t{gridDim.x} * (blockDim.x / lanes);
  for (int64_t line = int64_t{blockIdx.x} * (blockDim.x / lanes) + threadIdx.x / lanes; line < lines.count;
       line += groups) {
    int64_t at[3];
    lines.offsets(line, at);
    const T* const run = x + at[2];
    // Lanes beyond the line repeat its first element, which changes nothing.
    Candidate<C> best{widen(run[0]), 0};
    for (int64_t i = lane; i < length; i += lanes) best = first(best, Candidate<C>{widen(run[i * along]), i});
    const auto across = [&] {
#pragma unroll
      for (int step = 16; step > 0; step /= 2)
        best = first(best, Candidate<C>{__shfl_xor_sync(0xffffffffu, best.value, step),
                                        __shfl_xor_sync(0xffffffffu, best.at, step)});
    };
    if (lanes > 1) across();
    if (lanes > 32) {
      if (lane % 32 == 0) space[lane / 32] = best;
      __syncthreads();
      best = space[lane % 32 < lanes / 32 ? lane % 32 : 0];
      __syncthreads();
      across();
    }
    if (lane == 0) {
      value[at[0]] = narrow<T>(best.value);
      place[at[1]] = best.at;
    }
  }
}

template <bool largest>
void extreme(Tensor& value, Tensor& place, const Tensor& x, int axis) {
  if (value.numel() == 0) return;
  const cudaStream_t stream = stream_of(x);
  const int64_t length = x.size(axis), along = x.strides()[axis], count = value.numel();
  // Threads of their own for short lines, and where neighbouring lines lie side by side and are many.
  const bool apart = length < 32 || (along != 1 && count >= 1 << 16);
  const int lanes = apart ? 1 : length <= 2048 || count >= 1 << 14 ? 32 : threads;
  gpu::dispatch_floating(x.dtype(), "max", [&](auto zero) {
    using T = decltype(zero);
    find_extremes<largest><<<blocks_for(count, threads / lanes), threads, 0, stream>>>(
        write<T>(value), place.mutable_data<int64_t>(), read<T>(x),
        Strided<3>(value.shape(), {value.strides(), place.strides(), x.strides()}), length, along, lanes);
    check_launch("max");
  });
}

template <class T>
__global__ void put_gradients(T* dx, const T* dy, const int64_t* place,
                              const __grid_constant__ Strided<3> lines, int64_t along) {
  for (int64_t line = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; line < lines.count;
       line += int64_t{gridDim.x} * blockDim.x) {
    int64_t at[3];
    lines.offsets(line, at);
    dx[at[0] + place[at[2]] * along] = dy[at[1]];
  }
}

void extreme_backward(Tensor& dx, const Tensor& dy, const Tensor& place, int axis) {
  dx.fill_(0);
  if (dy.numel() == 0) return;
  const cudaStream_t stream = stream_of(dx);
  gpu::dispatch_floating(dx.dtype(), "max", [&](auto zero) {
    using T = decltype(zero);
    put_gradients<<<blocks_for(dy.numel(), threads), threads, 0, stream>>>(
        write<T>(dx), read<T>(dy), place.data<int64_t>(),
        Strided<3>(dy.shape(), {dx.strides(), dy.strides(), place.strides()}), dx.strides()[axis]);
    check_launch("max.backward");
  });
}

const CudaKernel<void(Tensor&, Tensor&, const Tensor&, int)> max_kernel{"max", extreme<true>},
    min_kernel{"min", extreme<false>};
const CudaKernel<void(Tensor&, const Tensor&, const Tensor&, int)> backward_kernel{"max.backward",
                                                                                   extreme_backward};

struct SquareAbout {
  template <class C>
  __device__ C operator()(C x, C mean) const {
    return (x - mean) * (x - mean);
  }
};
struct VarBackward {
  double scale;
  template <class C>
  __device__ C operator()(C dy, C x, C mean) const {
    return dy * (static_cast<C>(scale) * (x - mean));
  }
};
const CudaKernel<void(Tensor&, const Tensor&, const Tensor&)> square_kernel{"var.square",
                                                                            gpu::map<SquareAbout>};
const CudaKernel<void(Tensor&, const Tensor&, const Tensor&, const Tensor&, double)> var_backward{
    "var.backward", [](Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& mean, double scale) {
      gpu::map_elements("var.backward", dx, VarBackward{scale}, dy, x, mean);
    }};

}  // namespace

}  // namespace torus
