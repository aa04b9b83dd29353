// What .cu files share: streams, errors, element types, and elementwise kernels. For kernels; not installed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>

#include "torus/core/kernel.h"
#include "torus/core/tensor.h"

namespace torus::gpu {

// ------------------------------------------------------------------------------------------- launching

/// Throws Error{Device} "[what] CUDA error: ..." unless `error` is cudaSuccess.
void check_call(cudaError_t error, const char* what);
/// After each launch: throws if it was refused (bad grid, too much shared memory). Does not wait.
inline void check_launch(const char* what) { check_call(cudaGetLastError(), what); }

/// Makes the device of a tensor current, and gives the stream that its work is launched on.
cudaStream_t stream_of(Device device);
inline cudaStream_t stream_of(const Tensor& tensor) { return stream_of(tensor.device()); }

/// Properties of a device, read once.
const cudaDeviceProp& properties(Device device);

/// Zeroed memory that is kept for good, as for workspaces: for work on any stream, also within a capture.
/// Throws Error{Memory}.
void* allocate_for_good(size_t bytes, Device where);

/// Lets a kernel use more than 48 KB of shared memory, `bytes` of it dynamic. Cheap enough to call before
/// each launch.
void allow_shared_memory(const void* kernel, size_t bytes);

/// Blocks of `threads` that cover `count` indices, for kernels that stride over the rest of the grid.
inline unsigned blocks_for(int64_t count, int threads, int64_t most = 1 << 20) {
  const int64_t blocks = (count + threads - 1) / threads;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

/// What a kernel found wrong with its arguments, such as an index out of range: kernels cannot throw, so the
/// first fault is kept, and thrown by the next copy to the host (or synchronize).
struct Fault {
  int code;  // 0: none; else an index into the table of `fault_code`
  int64_t value, bound;
};
/// Where kernels on this device report: memory of the host that the device sees.
Fault* fault_slot(Device device);
/// A code for messages "[op] what VALUE is outside [0, BOUND)". `op` and `what` are literals.
int fault_code(const char* op, const char* what);
__device__ inline void report(Fault* slot, int code, int64_t value, int64_t bound) {
  if (atomicCAS(&slot->code, 0, -1) == 0) {
    slot->value = value;
    slot->bound = bound;
    __threadfence_system();
    atomicExch(&slot->code, code);
  }
}

/// Between contiguous memory of the host and of a device, in stream order. From the host it returns at once
/// (the data goes through pinned buffers); to the host it waits, and throws what kernels reported.
void copy_from_host(void* to, const void* from, size_t bytes, Device where);
void copy_to_host(void* to, const void* from, size_t bytes, Device where);

// ------------------------------------------------------------------------------- numbers known only at
// replay

/// True while a step is captured into a graph.
bool capturing();
/// To be called before what cannot be captured, such as a wait for the device: what was captured so far runs,
/// and the step goes on as it is. `why` is for CapturedStep::why_not. Outside of a capture does nothing.
void end_capture(const char* why);
/// Which capture this is, from 1 on; 0 outside of one. What a captured step makes anew at each replay must
/// have been made in that very capture.
uint64_t capture_number();
/// A number that a kernel reads where it stands: the value given, or, in a captured step, a word in device
/// memory that each replay sets anew.
template <class T>
struct Replayed {
  T value;
  const T* at;  // null: `value`
  __device__ T get() const { return at ? *at : value; }
};
/// `now` outside a capture; inside it, a slot that each replay fills with `later()`.
Replayed<double> replayed(double now, std::function<double()> later);
/// A position in a generator, from which `count` draws were just reserved. While captured, each replay adds
/// how far the generator has moved since.
Replayed<uint64_t> replayed_position(uint64_t position);
/// In a captured step: what its kernels use stays alive as long as the graph. Else nothing.
void keep_for_replays(std::shared_ptr<const void> what);

// -------------------------------------------------------------------------------------- element types

template <class T>
struct Stored {
  using type = T;
};
template <>
struct Stored<Half> {
  using type = __half;
};
template <>
struct Stored<BFloat16> {
  using type = __nv_bfloat16;
};
/// How the element type T of torus is spelled on the device: the same bits.
template <class T>
using stored = typename Stored<T>::type;

template <class T>
inline constexpr bool is_16_bit = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;
/// What arithmetic on T (a device type) runs in.
template <class T>
using compute = std::conditional_t<is_16_bit<T>, float, T>;

/// An unsigned integer of T's size. Kernels that only move elements know them by these: four types for all.
template <class T>
using bits = std::conditional_t<
    sizeof(T) == 8, uint64_t,
    std::conditional_t<sizeof(T) == 4, uint32_t, std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>>;

/// To the compute type and back, rounding to nearest even.
template <class T>
__host__ __device__ inline compute<T> widen(T value) {
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(value);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(value);
  else
    return value;
}
template <class T, class C>
__host__ __device__ inline T narrow(C value) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(static_cast<float>(value));
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(static_cast<float>(value));
  else
    return static_cast<T>(value);
}

/// Calls f(T{}) with the device type of `dtype`.
template <class F>
void dispatch(DType dtype, F&& f) {
  torus::dispatch(dtype, [&](auto zero) { f(stored<decltype(zero)>{}); });
}
template <class F>
void dispatch_floating(DType dtype, const char* op, F&& f) {
  torus::dispatch_floating(dtype, op, [&](auto zero) { f(stored<decltype(zero)>{}); });
}

/// First element, as the device type: `read<T>(x)` and `write<T>(y)`, which bumps the version.
template <class T>
const T* read(const Tensor& tensor) {
  if constexpr (std::is_same_v<T, __half>)
    return reinterpret_cast<const T*>(tensor.data<Half>());
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return reinterpret_cast<const T*>(tensor.data<BFloat16>());
  else
    return tensor.data<T>();
}
template <class T>
T* write(Tensor& tensor) {
  if constexpr (std::is_same_v<T, __half>)
    return reinterpret_cast<T*>(tensor.mutable_data<Half>());
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return reinterpret_cast<T*>(tensor.mutable_data<BFloat16>());
  else
    return tensor.mutable_data<T>();
}

/// 16 bytes of T, moved at once. Its address must be a multiple of 16.
template <class T>
struct alignas(16) Pack {
  static constexpr int count = 16 / sizeof(T);
  T at[count];
};
inline bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// ---------------------------------------------------------------------------------------- strided walks

/// Places of N tensors of one shape by one linear index (row-major), their axes joined where all lie in line.
template <int N>
struct Strided {
  int axes = 0;
  int64_t count = 1;
  int64_t size[Shape::max_axes] = {};
  int64_t step[N][Shape::max_axes] = {};

  Strided(const Shape& shape, const std::array<Shape, N>& strides) {
    for (int axis = 0; axis < shape.dim(); ++axis) {
      count *= shape[axis];
      if (shape[axis] == 1) continue;
      bool joins = axes > 0;
      for (int t = 0; joins && t < N; ++t)
        joins = step[t][axes - 1] == strides[static_cast<size_t>(t)][axis] * shape[axis];
      if (!joins) ++axes;
      size[axes - 1] = joins ? size[axes - 1] * shape[axis] : shape[axis];
      for (int t = 0; t < N; ++t) step[t][axes - 1] = strides[static_cast<size_t>(t)][axis];
    }
  }

  /// Offsets, in elements, of index i in each tensor.
  __device__ void offsets(int64_t i, int64_t (&at)[N]) const {
#pragma unroll
    for (int t = 0; t < N; ++t) at[t] = 0;
    if (count <= 0x7fffffff) {  // 32-bit divisions are several times faster
      uint32_t rest = static_cast<uint32_t>(i);
      for (int axis = axes - 1; axis >= 0; --axis) {
        const uint32_t length = static_cast<uint32_t>(size[axis]), next = axis > 0 ? rest / length : 0;
        const int64_t index = rest - next * length;
#pragma unroll
        for (int t = 0; t < N; ++t) at[t] += index * step[t][axis];
        rest = next;
      }
    } else {
      int64_t rest = i;
      for (int axis = axes - 1; axis >= 0; --axis) {
        const int64_t next = axis > 0 ? rest / size[axis] : 0, index = rest - next * size[axis];
#pragma unroll
        for (int t = 0; t < N; ++t) at[t] += index * step[t][axis];
        rest = next;
      }
    }
  }
};

// ------------------------------------------------------------------------------------- elementwise kernels

namespace detail {

template <class T, int N>
struct Pointers {
  const T* at[N];
};

template <class T, class F, int N, size_t... I>
__device__ inline T apply(const F& f, const compute<T> (&x)[N], std::index_sequence<I...>) {
  return narrow<T>(f(x[I]...));
}

// All tensors contiguous; one whose bit of `constant` is set has a single element.
template <class T, int N, class F>
__global__ void map_packs(T* y, Pointers<T, N> x, unsigned constant, int64_t count, F f) {
  constexpr int width = Pack<T>::count;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x * width;
  compute<T> fixed[N];
#pragma unroll
  for (int t = 0; t < N; ++t)
    if (constant >> t & 1) fixed[t] = widen(x.at[t][0]);
  for (int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width; i < count; i += stride) {
    if (i + width <= count) {
      Pack<T> from[N], to;
#pragma unroll
      for (int t = 0; t < N; ++t)
        if (!(constant >> t & 1)) from[t] = *reinterpret_cast<const Pack<T>*>(x.at[t] + i);
#pragma unroll
      for (int j = 0; j < width; ++j) {
        compute<T> value[N];
#pragma unroll
        for (int t = 0; t < N; ++t) value[t] = constant >> t & 1 ? fixed[t] : widen(from[t].at[j]);
        to.at[j] = apply<T>(f, value, std::make_index_sequence<N>{});
      }
      *reinterpret_cast<Pack<T>*>(y + i) = to;
    } else {
      for (int64_t j = i; j < count; ++j) {
        compute<T> value[N];
#pragma unroll
        for (int t = 0; t < N; ++t) value[t] = constant >> t & 1 ? fixed[t] : widen(x.at[t][j]);
        y[j] = apply<T>(f, value, std::make_index_sequence<N>{});
      }
    }
  }
}

template <class T, int N, class F>
__global__ void map_strided(T* y, Pointers<T, N> x, const __grid_constant__ Strided<N + 1> walk, F f) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < walk.count; i += stride) {
    int64_t at[N + 1];
    walk.offsets(i, at);
    compute<T> value[N];
#pragma unroll
    for (int t = 0; t < N; ++t) value[t] = widen(x.at[t][at[t + 1]]);
    y[at[0]] = apply<T>(f, value, std::make_index_sequence<N>{});
  }
}

}  // namespace detail

/// y = f(x...) element by element in the compute type. The x have y's dtype (floating) and shape, any
/// strides. F is a functor with a templated `__device__ C operator()(C...) const`; it may hold numbers.
template <class F, class... Inputs>
void map_elements(const char* op, Tensor& y, const F& f, const Inputs&... x) {
  constexpr int n = sizeof...(Inputs);
  if (y.numel() == 0) return;
  const cudaStream_t stream = stream_of(y);
  gpu::dispatch_floating(y.dtype(), op, [&](auto zero) {
    using T = decltype(zero);
    T* const to = write<T>(y);
    const detail::Pointers<T, n> from{{read<T>(x)...}};
    unsigned constant = 0, packed = 0;
    int t = 0;
    const auto classify = [&](const Tensor& tensor) {
      bool fixed = true;
      for (int axis = 0; axis < tensor.dim(); ++axis)
        fixed = fixed && (tensor.strides()[axis] == 0 || tensor.size(axis) == 1);
      if (fixed && tensor.numel() > 1)
        constant |= 1u << t;
      else if (tensor.is_contiguous() && is_aligned(from.at[t]))
        packed |= 1u << t;
      ++t;
    };
    (classify(x), ...);
    constexpr int threads = 256;
    if (y.is_contiguous() && is_aligned(to) && (constant | packed) == (1u << n) - 1) {
      const unsigned blocks = blocks_for(y.numel(), threads * Pack<T>::count);
      detail::map_packs<T, n><<<blocks, threads, 0, stream>>>(to, from, constant, y.numel(), f);
    } else {
      const Strided<n + 1> walk(y.shape(), {y.strides(), x.strides()...});
      detail::map_strided<T, n><<<blocks_for(y.numel(), threads), threads, 0, stream>>>(to, from, walk, f);
    }
    check_launch(op);
  });
}

/// The same as a launcher of tensors alone, to register: `CudaKernel<...>{"mul", map<Multiply>}`.
template <class F, class... Inputs>
void map(Tensor& y, const Inputs&... x) {
  map_elements("map", y, F{}, x...);
}

// ------------------------------------------------------------------------------------------ reductions

/// The sum (or, by `op`, another commutative reduction) of a value a lane over the warp, in every lane.
template <class C, class Op>
__device__ inline C warp_reduce(C value, Op op) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value = op(value, __shfl_xor_sync(0xffffffffu, value, lane));
  return value;
}
struct Plus {
  template <class C>
  __device__ C operator()(C a, C b) const {
    return a + b;
  }
};
struct Larger {  // NaN wins
  template <class C>
  __device__ C operator()(C a, C b) const {
    return a != a || a > b ? a : b;
  }
};
template <class C>
__device__ inline C warp_sum(C value) {
  return warp_reduce(value, Plus{});
}

/// The same over a block of up to 1024 threads, in every thread; a fixed order. `space`: 32 C of shared
/// memory, free again after the call's second barrier, so that two calls in a row may share it.
template <class C, class Op>
__device__ inline C block_reduce(C value, C identity, C* space, Op op) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
  value = warp_reduce(value, op);
  if (warps == 1) return value;
  if (lane == 0) space[warp] = value;
  __syncthreads();
  value = warp_reduce(lane < warps ? space[lane] : identity, op);
  __syncthreads();
  return value;
}
template <class C>
__device__ inline C block_sum(C value, C* space) {
  return block_reduce(value, C(0), space, Plus{});
}

}  // namespace torus::gpu
