// The kernels of tensors: filling, copying, adding, summing over axes.
#include <algorithm>

#include "torus/core/column_sums.h"
#include "torus/core/cuda.h"

namespace torus {

namespace {

using namespace gpu;

// --------------------------------------------------------------------------------------------- fill and copy

template <class T>
__global__ void fill_places(T* to, const __grid_constant__ Strided<1> walk, T value) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < walk.count; i += stride) {
    int64_t at[1];
    walk.offsets(i, at);
    to[at[0]] = value;
  }
}

void fill(Tensor& tensor, double value) {
  if (tensor.numel() == 0) return;
  const cudaStream_t stream = stream_of(tensor);
  gpu::dispatch(tensor.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const to = write<T>(tensor);
    if (value == 0 && !std::signbit(value) && tensor.is_contiguous()) {
      check_call(cudaMemsetAsync(to, 0, static_cast<size_t>(tensor.numel()) * sizeof(T), stream), "fill");
      return;
    }
    fill_places<<<blocks_for(tensor.numel(), 256), 256, 0, stream>>>(
        to, Strided<1>(tensor.shape(), {tensor.strides()}), narrow<T>(value));
    check_launch("fill");
  });
}

template <class To, class From>
__device__ To converted(From value) {
  if constexpr (std::is_same_v<To, From>)
    return value;
  else if constexpr (std::is_same_v<To, bool>)
    return widen(value) != 0;
  else
    return narrow<To>(widen(value));
}

template <class To, class From>
__global__ void copy_places(To* to, const From* from, const __grid_constant__ Strided<2> walk) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < walk.count; i += stride) {
    int64_t at[2];
    walk.offsets(i, at);
    to[at[0]] = converted<To>(from[at[1]]);
  }
}

template <class T>
void launch_copy(T* to, const T* from, const Strided<2>& walk, cudaStream_t stream) {
  copy_places<T, T><<<blocks_for(walk.count, 256), 256, 0, stream>>>(to, from, walk);
  check_launch("copy");
}

// Of one dtype of `size` bytes: elements move in packs of 16 bytes where runs along the last axis allow it.
void copy_bytes(void* to, const void* from, Strided<2> walk, size_t size, cudaStream_t stream) {
  const int64_t pack = 16 / static_cast<int64_t>(size);
  bool packs = walk.axes > 0 && walk.step[0][walk.axes - 1] == 1 && walk.step[1][walk.axes - 1] == 1 &&
               walk.size[walk.axes - 1] % pack == 0 && is_aligned(to) && is_aligned(from);
  for (int axis = 0; axis + 1 < walk.axes; ++axis)
    packs = packs && walk.step[0][axis] % pack == 0 && walk.step[1][axis] % pack == 0;
  if (packs) {
    walk.count /= pack;
    walk.size[walk.axes - 1] /= pack;
    for (int axis = 0; axis + 1 < walk.axes; ++axis) walk.step[0][axis] /= pack, walk.step[1][axis] /= pack;
    return launch_copy(static_cast<uint4*>(to), static_cast<const uint4*>(from), walk, stream);
  }
  if (size == 8)
    return launch_copy(static_cast<uint64_t*>(to), static_cast<const uint64_t*>(from), walk, stream);
  if (size == 4)
    return launch_copy(static_cast<uint32_t*>(to), static_cast<const uint32_t*>(from), walk, stream);
  if (size == 2)
    return launch_copy(static_cast<uint16_t*>(to), static_cast<const uint16_t*>(from), walk, stream);
  launch_copy(static_cast<uint8_t*>(to), static_cast<const uint8_t*>(from), walk, stream);
}

const void* first_byte(const Tensor& tensor) {
  const void* result = nullptr;
  torus::dispatch(tensor.dtype(), [&](auto zero) { result = tensor.data<decltype(zero)>(); });
  return result;
}
void* first_byte_to_write(Tensor& tensor) {
  void* result = nullptr;
  torus::dispatch(tensor.dtype(), [&](auto zero) { result = tensor.mutable_data<decltype(zero)>(); });
  return result;
}

// On one device.
void copy_here(Tensor& into, const Tensor& from) {
  const cudaStream_t stream = stream_of(into);
  const Strided<2> walk(into.shape(), {into.strides(), from.strides()});
  if (into.dtype() == from.dtype())
    return copy_bytes(first_byte_to_write(into), first_byte(from), walk, size_of(into.dtype()), stream);
  gpu::dispatch(into.dtype(), [&](auto to_zero) {
    gpu::dispatch(from.dtype(), [&](auto from_zero) {
      using To = decltype(to_zero);
      using From = decltype(from_zero);
      if constexpr (!std::is_same_v<To, From>) {
        copy_places<To, From>
            <<<blocks_for(walk.count, 256), 256, 0, stream>>>(write<To>(into), read<From>(from), walk);
        check_launch("copy");
      }
    });
  });
}

// `from` has the shape of `into`; at least one of them is on a device.
void copy(Tensor& into, const Tensor& from) {
  if (into.numel() == 0) return;
  if (into.device() == from.device()) return copy_here(into, from);
  const size_t bytes = static_cast<size_t>(into.numel()) * size_of(into.dtype());
  if (from.device().kind == DeviceKind::cpu) {
    const Tensor ready = from.to(into.dtype()).contiguous();
    Tensor target = into.is_contiguous() ? into : Tensor::empty(into.shape(), into.dtype(), into.device());
    copy_from_host(first_byte_to_write(target), first_byte(ready), bytes, into.device());
    if (!into.is_contiguous()) copy_here(into, target);
    return;
  }
  const Tensor ready = from.to(into.dtype()).contiguous();
  if (into.device().kind == DeviceKind::cpu) {
    Tensor target = into.is_contiguous() ? into : Tensor::empty(into.shape(), into.dtype());
    copy_to_host(first_byte_to_write(target), first_byte(ready), bytes, from.device());
    if (!into.is_contiguous()) into.copy_(target);
    return;
  }
  // Between two devices, by way of the host: each has its own stream.
  into.copy_(ready.to(cpu));
}

// --------------------------------------------------------------------------------------------------- sums

void add_into_places(Tensor& into, const Tensor& from) { map_elements("add_into", into, Plus{}, into, from); }

// The axes [first, last) of a tensor as one index, as in a Strided of one tensor.
Strided<1> walk_of(const Tensor& tensor, int first, int last) {
  return Strided<1>(tensor.shape().slice(first, last), {tensor.strides().slice(first, last)});
}

__device__ inline int64_t place(const Strided<1>& walk, int64_t i) {
  if (walk.axes == 1) return i * walk.step[0][0];
  int64_t at[1];
  walk.offsets(i, at);
  return at[0];
}

constexpr int sum_threads = 256;

// One block sums part blockIdx.y of what output blockIdx.x adds up.
template <class T, class C>
__global__ void sum_lines(C* parts, const T* from, const __grid_constant__ Strided<1> summed,
                          const __grid_constant__ Strided<1> kept, int64_t part) {
  __shared__ C space[32];
  const int64_t last = min(summed.count, (blockIdx.y + 1) * part);
  for (int64_t j = blockIdx.x; j < kept.count; j += gridDim.x) {
    const T* const line = from + place(kept, j);
    C sum = 0;
    for (int64_t i = blockIdx.y * part + threadIdx.x; i < last; i += blockDim.x)
      sum += widen(line[place(summed, i)]);
    sum = block_sum(sum, space);
    if (threadIdx.x == 0) parts[blockIdx.y * kept.count + j] = sum;
  }
}

// Sources of launch_sum_columns: elements at any places, side by side if `width` is more than 1.
template <class T, int width_>
struct StridedRows {
  static constexpr int width = width_, at_once = width > 1 ? 4 : 8;  // as many as registers are enough for
  using Loaded = std::conditional_t<(width > 1), uint4, T>;
  struct Cursor {
    const T* top;
    int64_t row;
  };
  const T* from;
  Strided<1> summed, kept;

  __device__ Cursor start(int64_t row, int64_t column) const { return {from + place(kept, column), row}; }
  __device__ Loaded load(const Cursor& at, bool there) const {
    return there ? *reinterpret_cast<const Loaded*>(at.top + place(summed, at.row)) : Loaded{};
  }
  __device__ static void take(compute<T> (&values)[width], const Loaded& in, const Cursor&, bool) {
    if constexpr (width > 1)
      widen_pack<T>(values, in);
    else
      values[0] = widen(in);
  }
  __device__ void advance(Cursor& at) const { at.row += ColumnLayout<width>::groups; }
};

// The usual case, whole rows at one distance: little stands between a load and the next.
template <class T>
struct EvenRows {
  static constexpr int width = Pack<T>::count, at_once = 8;
  using Loaded = uint4;
  const T* from;
  int64_t distance, step = distance * ColumnLayout<width>::groups;

  __device__ const T* start(int64_t row, int64_t column) const { return from + row * distance + column; }
  __device__ uint4 load(const T* at, bool there) const {
    return there ? *reinterpret_cast<const uint4*>(at) : uint4{};
  }
  __device__ static void take(compute<T> (&values)[width], const uint4& in, const T*, bool) {
    widen_pack<T>(values, in);
  }
  __device__ void advance(const T*& at) const { at += step; }
};

// 8 rows of threads share the parts of each output.
template <class T, class C>
__global__ void add_parts(T* into, const C* parts, int64_t count, int64_t parts_count, C divisor) {
  __shared__ C space[8][32];
  for (int64_t first = int64_t{blockIdx.x} * 32; first < count; first += int64_t{gridDim.x} * 32) {
    const int64_t j = first + threadIdx.x;
    C sum = 0;
    if (j < count)
      for (int64_t p = threadIdx.y; p < parts_count; p += 8) sum += parts[p * count + j];
    space[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && j < count) {
      C total = 0;
      for (int row = 0; row < 8; ++row) total += space[row][threadIdx.x];
      into[j] = narrow<T>(total / divisor);
    }
    __syncthreads();
  }
}

// `from` is permuted so that the `summed` axes come first; `into` is contiguous. Parts of a fixed size are
// summed by a block each, and then in order: the bits depend on nothing but the shape.
void sum_leading(Tensor& into, const Tensor& from, int summed_axes, double divisor) {
  if (into.numel() == 0) return;
  const cudaStream_t stream = stream_of(into);
  const Strided<1> summed = walk_of(from, 0, summed_axes), kept = walk_of(from, summed_axes, from.dim());
  const auto inner = [](const Strided<1>& walk) { return walk.axes ? walk.step[0][walk.axes - 1] : 0; };
  const bool by_column =
      kept.axes > 0 && kept.size[kept.axes - 1] >= 8 && (summed.axes == 0 || inner(kept) < inner(summed));
  gpu::dispatch_floating(into.dtype(), "sum_to", [&](auto zero) {
    using T = decltype(zero);
    using C = compute<T>;
    constexpr int width = Pack<T>::count;
    const T* const data = read<T>(from);
    bool packs =
        width > 1 && kept.axes == 1 && kept.step[0][0] == 1 && kept.count % width == 0 && is_aligned(data);
    for (int axis = 0; axis < summed.axes; ++axis) packs = packs && summed.step[0][axis] % width == 0;
    if (by_column) {
      const auto sum = [&](const auto& source) {
        launch_sum_columns<T>(into, source, summed.count, kept.count, divisor);
      };
      if (packs && summed.axes <= 1)
        sum(EvenRows<T>{data, summed.step[0][0]});
      else if (packs)
        sum(StridedRows<T, width>{data, summed, kept});
      else
        sum(StridedRows<T, 1>{data, summed, kept});
      return;
    }
    // Enough blocks for any device, each with enough to do.
    const int64_t wanted = std::max<int64_t>(1, 512 / kept.count);
    const int64_t part = std::max<int64_t>(2048, (summed.count + wanted - 1) / wanted);
    const int64_t parts = std::max<int64_t>(1, (summed.count + part - 1) / part);
    Tensor space = Tensor::empty({parts * kept.count}, std::is_same_v<C, double> ? f64 : f32, into.device());
    C* const to = write<C>(space);
    const auto lines = static_cast<unsigned>(std::min<int64_t>(kept.count, 1 << 20));
    sum_lines<<<dim3(lines, static_cast<unsigned>(parts)), sum_threads, 0, stream>>>(to, data, summed, kept,
                                                                                     part);
    check_launch("sum_to");
    add_parts<<<blocks_for(kept.count, 32), dim3(32, 8), 0, stream>>>(write<T>(into), to, kept.count, parts,
                                                                      C(divisor));
    check_launch("sum_to");
  });
}

const CudaKernel<void(Tensor&, double)> fill_kernel{"fill", fill};
const CudaKernel<void(Tensor&, const Tensor&)> copy_kernel{"copy", copy};
const CudaKernel<void(Tensor&, const Tensor&)> add_into_kernel{"add_into", add_into_places};
const CudaKernel<void(Tensor&, const Tensor&, int, double)> sum_leading_kernel{"sum_to", sum_leading};

}  // namespace

}  // namespace torus
