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
#include <utility>

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

/// The first thing that a kernel launched by `launch` does: it may have begun while the one before it on the
/// stream still ran, and waits for that here. The next one may begin from here on.
__device__ inline void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
/// Whether a kernel was compiled for devices on which it waits, which must be the one it runs on.
bool waits_for_kernel_before(const void* kernel);
/// Launches a kernel that begins with `wait_for_kernel_before`, which hides most of what a launch costs the
/// device.
template <auto kernel, class... Args>
void launch(const char* what, dim3 grid, dim3 block, cudaStream_t stream, Args&&... args) {
  static const bool waits = waits_for_kernel_before(reinterpret_cast<const void*>(kernel));
  cudaLaunchAttribute overlaps{};
  overlaps.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlaps.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &overlaps;
  config.numAttrs = waits ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  check_launch(what);
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

/// The elements of a pack, loaded as four words, in the compute type, and back. Taken from a Pack one by one,
/// those of 16 bits cost several times the instructions.
template <class T>
__device__ inline void widen_pack(compute<T> (&to)[Pack<T>::count], const uint4& pack) {
  const uint32_t word[4] = {pack.x, pack.y, pack.z, pack.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if constexpr (std::is_same_v<T, __half>) {
      const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&word[i]));
      to[2 * i] = two.x;
      to[2 * i + 1] = two.y;
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      to[2 * i] = __uint_as_float(word[i] << 16);
      to[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    } else if constexpr (sizeof(T) == 4) {
      to[i] = __uint_as_float(word[i]);
    } else if (i % 2 == 0) {
      to[i / 2] = __hiloint2double(static_cast<int>(word[i + 1]), static_cast<int>(word[i]));
    }
}
template <class T>
__device__ inline uint4 narrow_pack(const compute<T> (&from)[Pack<T>::count]) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 two = __floats2half2_rn(from[2 * i], from[2 * i + 1]);
      word[i] = *reinterpret_cast<const uint32_t*>(&two);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
      word[i] = *reinterpret_cast<const uint32_t*>(&two);
    } else if constexpr (sizeof(T) == 4) {
      word[i] = __float_as_uint(from[i]);
    } else {
      word[i] = static_cast<uint32_t>(i % 2 ? __double2hiint(from[i / 2]) : __double2loint(from[i / 2]));
    }
  return {word[0], word[1], word[2], word[3]};
}
/// A pack of one element many times.
template <class T>
__device__ inline uint4 pack_of_one(const T* from) {
  if constexpr (sizeof(T) == 8) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    return {words.x, words.y, words.x, words.y};
  } else {
    uint32_t word = *reinterpret_cast<const bits<T>*>(from);
    if constexpr (sizeof(T) == 2) word |= word << 16;
    return {word, word, word, word};
  }
}

/// 2^x, to what 16 bits need and more.
__device__ inline float approximate_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

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
#pragma unroll 1
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

constexpr int map_threads = 256, map_packs_at_once = 2;

namespace detail {

template <class T, int N>
struct Pointers {
  const T* at[N];
};

template <class F, class C, int N, size_t... I>
__device__ inline C apply(const F& f, const C (&x)[N], std::index_sequence<I...>) {
  return f(x[I]...);
}

template <class T, class F, int N>
__device__ inline uint4 apply_to_packs(const F& f, const uint4 (&from)[N]) {
  using C = compute<T>;
  constexpr int width = Pack<T>::count;
  C in[N][width], out[width];
#pragma unroll
  for (int t = 0; t < N; ++t) widen_pack<T>(in[t], from[t]);
#pragma unroll
  for (int j = 0; j < width; ++j) {
    C value[N];
#pragma unroll
    for (int t = 0; t < N; ++t) value[t] = in[t][j];
    out[j] = apply(f, value, std::make_index_sequence<N>{});
  }
  return narrow_pack<T>(out);
}

template <class T>
__device__ inline uint4 load_pack(const T* from, bool repeated) {
  return repeated ? pack_of_one(from) : *reinterpret_cast<const uint4*>(from);
}

// All tensors contiguous, or of a single element where the bit of `repeated` is set.
template <class T, int N, class F>
__global__ void __launch_bounds__(map_threads)
    map_packs(T* y, Pointers<T, N> x, unsigned repeated, int64_t count, F f) {
  constexpr int width = Pack<T>::count, at_once = map_packs_at_once, step = map_threads * width;
  wait_for_kernel_before();
  for (int64_t first = int64_t{blockIdx.x} * (at_once * step) + threadIdx.x * width; first < count;
       first += int64_t{gridDim.x} * (at_once * step)) {
    uint4 from[at_once][N];
#pragma unroll
    for (int k = 0; k < at_once; ++k)
#pragma unroll
      for (int t = 0; t < N; ++t)
        if (const int64_t i = first + k * step; i + width <= count)
          from[k][t] = load_pack(x.at[t] + (repeated >> t & 1 ? 0 : i), repeated >> t & 1);
#pragma unroll
    for (int k = 0; k < at_once; ++k)
      if (const int64_t i = first + k * step; i + width <= count)
        *reinterpret_cast<uint4*>(y + i) = apply_to_packs<T>(f, from[k]);
  }
  // What is less than a pack.
  const int64_t i = count / width * width + threadIdx.x;
  if (blockIdx.x > 0 || i >= count) return;
  compute<T> value[N];
#pragma unroll
  for (int t = 0; t < N; ++t) value[t] = widen(x.at[t][repeated >> t & 1 ? 0 : i]);
  y[i] = narrow<T>(apply(f, value, std::make_index_sequence<N>{}));
}

// Along the last axis of `walk`, which counts in packs, elements lie side by side, or are one and the same
// where the bit of `repeated` is set.
template <class T, int N, class F>
__global__ void __launch_bounds__(map_threads)
    map_strided_packs(T* y, Pointers<T, N> x, const __grid_constant__ Strided<N + 1> walk, unsigned repeated,
                      F f) {
  wait_for_kernel_before();
  const int64_t stride = int64_t{gridDim.x} * map_threads;
  for (int64_t i = int64_t{blockIdx.x} * map_threads + threadIdx.x; i < walk.count; i += stride) {
    int64_t at[N + 1];
    walk.offsets(i, at);
    uint4 from[N];
#pragma unroll
    for (int t = 0; t < N; ++t) from[t] = load_pack(x.at[t] + at[t + 1], repeated >> t & 1);
    *reinterpret_cast<uint4*>(y + at[0]) = apply_to_packs<T>(f, from);
  }
}

template <class T, int N, class F>
__global__ void __launch_bounds__(map_threads)
    map_strided(T* y, Pointers<T, N> x, const __grid_constant__ Strided<N + 1> walk, F f) {
  wait_for_kernel_before();
  const int64_t stride = int64_t{gridDim.x} * map_threads;
  for (int64_t i = int64_t{blockIdx.x} * map_threads + threadIdx.x; i < walk.count; i += stride) {
    int64_t at[N + 1];
    walk.offsets(i, at);
    compute<T> value[N];
#pragma unroll
    for (int t = 0; t < N; ++t) value[t] = widen(x.at[t][at[t + 1]]);
    y[at[0]] = narrow<T>(apply(f, value, std::make_index_sequence<N>{}));
  }
}

// Whether the last axis of a walk is one of whole packs in each tensor, or, with its bit of `repeated` set,
// of one element. Only a single axis may end with less than a pack. The first tensor is written.
template <int N>
bool moves_packs(const Strided<N>& walk, int width, const bool (&aligned)[N], unsigned& repeated) {
  const int last = walk.axes - 1;
  if (last < 0 || (last > 0 && walk.size[last] % width != 0)) return false;
  repeated = 0;
  for (int t = 0; t < N; ++t) {
    if (t > 0 && walk.step[t][last] == 0) {
      repeated |= 1u << (t - 1);
      continue;
    }
    if (walk.step[t][last] != 1 || !aligned[t]) return false;
    for (int axis = 0; axis < last; ++axis)
      if (walk.step[t][axis] % width != 0) return false;
  }
  return true;
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
    Strided<n + 1> walk(y.shape(), {y.strides(), x.strides()...});
    constexpr int width = Pack<T>::count;
    unsigned repeated = 0;
    if (!detail::moves_packs(walk, width, {is_aligned(to), is_aligned(read<T>(x))...}, repeated)) {
      launch<detail::map_strided<T, n, F>>(op, blocks_for(walk.count, map_threads), map_threads, stream, to,
                                           from, walk, f);
    } else if (walk.axes == 1) {
      const unsigned blocks = blocks_for(walk.count, map_threads * map_packs_at_once * width);
      launch<detail::map_packs<T, n, F>>(op, blocks, map_threads, stream, to, from, repeated, walk.count, f);
    } else {
      const int last = walk.axes - 1;
      walk.size[last] /= width;
      walk.count /= width;
      for (auto& step : walk.step) step[last] *= width;
      launch<detail::map_strided_packs<T, n, F>>(op, blocks_for(walk.count, map_threads), map_threads, stream,
                                                 to, from, walk, repeated, f);
    }
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
