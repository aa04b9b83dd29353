#include <algorithm>
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "torus/core/cuda.h"

namespace torus {

namespace {

using namespace gpu;

constexpr int threads = 256;

__device__ int64_t first_index() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ int64_t grid_size() { return int64_t{gridDim.x} * blockDim.x; }

// Without the repeats of its expanded axes, but for `kept`.
Tensor distinct_indices(const Tensor& index, int kept = -1) {
  Tensor distinct = index;
  for (int axis = 0; axis < index.dim(); ++axis)
    if (axis != kept && index.strides()[axis] == 0 && index.size(axis) > 1)
      distinct = distinct.slice(axis, 0, 1);
  return distinct;
}

// ------------------------------------------------------------------------------------------------- checks

// An index out of range is reported, and what was launched after it must leave such indices alone.
__global__ void report_outside(const int64_t* index, const __grid_constant__ Strided<1> walk, int64_t bound,
                               Fault* slot, int code) {
  for (int64_t i = first_index(); i < walk.count; i += grid_size()) {
    int64_t at[1];
    walk.offsets(i, at);
    const int64_t value = index[at[0]];
    if (value < 0 || value >= bound) report(slot, code, value, bound);
  }
}

void check_indices(const char* op, const Tensor& index, int64_t bound) {
  const Tensor distinct = distinct_indices(index);
  if (distinct.numel() == 0) return;
  const cudaStream_t stream = stream_of(index);
  report_outside<<<blocks_for(distinct.numel(), threads), threads, 0, stream>>>(
      distinct.data<int64_t>(), Strided<1>(distinct.shape(), {distinct.strides()}), bound,
      fault_slot(index.device()), fault_code(op, "index"));
  check_launch(op);
}

// ------------------------------------------------------------------------------------------------- gather

// `walk`: y, the line of x, and the index.
template <class T>
__global__ void gather_places(T* y, const T* x, const int64_t* index, const __grid_constant__ Strided<3> walk,
                              int64_t along, int64_t bound) {
  for (int64_t i = first_index(); i < walk.count; i += grid_size()) {
    int64_t at[3];
    walk.offsets(i, at);
    const int64_t place = index[at[2]];
    y[at[0]] = place >= 0 && place < bound ? x[at[1] + place * along] : T(0);
  }
}

// Strides from line to line: the place along `axis` comes from elsewhere.
Shape line_strides(const Tensor& x, int axis) {
  Shape strides = x.strides();
  strides[axis] = 0;
  return strides;
}

void gather(Tensor& y, const Tensor& x, const Tensor& index, int axis) {
  if (y.numel() == 0) return;
  const cudaStream_t stream = stream_of(y);
  const Strided<3> walk(y.shape(), {y.strides(), line_strides(x, axis), index.strides()});
  gpu::dispatch(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    gather_places<<<blocks_for(y.numel(), threads), threads, 0, stream>>>(
        reinterpret_cast<bits<T>*>(write<T>(y)), reinterpret_cast<const bits<T>*>(read<T>(x)),
        index.data<int64_t>(), walk, x.strides()[axis], x.size(axis));
    check_launch("gather");
  });
}

// -------------------------------------------------------------------------------------------- scatter_add

// For lines that are short: a thread adds up each, in order. `lines`: the sums, the source, and the index.
template <class T>
__global__ void add_lines(T* sums, const T* source, const int64_t* index,
                          const __grid_constant__ Strided<3> lines, int64_t length, int64_t sums_along,
                          int64_t source_along, int64_t index_along, int64_t bound) {
  for (int64_t line = first_index(); line < lines.count; line += grid_size()) {
    int64_t at[3];
    lines.offsets(line, at);
    for (int64_t i = 0; i < length; ++i) {
      const int64_t place = index[at[2] + i * index_along];
      if (place >= 0 && place < bound) sums[at[0] + place * sums_along] += source[at[1] + i * source_along];
    }
  }
}

// The key of each index is the element of `sums` that it names, by its line (row-major) and its place there;
// that of one out of range is the first that names none.
__global__ void make_keys(uint64_t* keys, int64_t* order, const int64_t* index,
                          const __grid_constant__ Strided<1> walk, int64_t length, int64_t inner,
                          int64_t bound) {
  const int64_t none = walk.count / length * bound;
  for (int64_t i = first_index(); i < walk.count; i += grid_size()) {
    int64_t at[1];
    walk.offsets(i, at);
    const int64_t place = index[at[0]], line = i / (length * inner) * inner + i % inner;
    keys[i] = static_cast<uint64_t>(place >= 0 && place < bound ? line * bound + place : none);
    order[i] = i;
  }
}

// The indices sorted by key; equal keys keep their order.
struct SortedIndices {
  Tensor keys, order;
  const uint64_t* key_data() const { return reinterpret_cast<const uint64_t*>(keys.data<int64_t>()); }
};

SortedIndices sorted_indices(const Tensor& index, int axis, int64_t bound) {
  const cudaStream_t stream = stream_of(index);
  const Device device = index.device();
  const int64_t count = index.numel(), length = index.size(axis);
  const int64_t inner = index.shape().slice(axis + 1, index.dim()).numel();
  const auto numbers = [&] { return Tensor::empty({count}, i64, device); };
  Tensor keys = numbers(), order = numbers(), sorted_keys = numbers(), sorted_order = numbers();
  const auto words = [](Tensor& tensor) {
    return reinterpret_cast<uint64_t*>(tensor.mutable_data<int64_t>());
  };
  make_keys<<<blocks_for(count, threads), threads, 0, stream>>>(
      words(keys), order.mutable_data<int64_t>(), index.data<int64_t>(),
      Strided<1>(index.shape(), {index.strides()}), length, inner, bound);
  check_launch("scatter_add");
  const int last_bit =
      std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(count / length * bound))));
  size_t bytes = 0;
  const auto sort = [&](void* space) {
    check_call(cub::DeviceRadixSort::SortPairs(
                   space, bytes, words(keys), words(sorted_keys), order.mutable_data<int64_t>(),
                   sorted_order.mutable_data<int64_t>(), count, 0, last_bit, stream),
               "scatter_add");
  };
  sort(nullptr);
  Tensor space = Tensor::empty({static_cast<int64_t>(bytes)}, u8, device);
  sort(space.mutable_data<uint8_t>());
  return {sorted_keys, sorted_order};
}

// `lanes` threads, 1 or a warp, add up a run of equal keys, in a fixed order, at one of the places that share
// the indices. `pairs`: the source and the line of sums by index, `shared`: the same by such a place.
template <class T>
__global__ void add_runs(T* sums, const T* source, const uint64_t* keys, const int64_t* order,
                         const __grid_constant__ Strided<2> pairs, const __grid_constant__ Strided<2> shared,
                         uint64_t lines, int64_t along, uint64_t bound, int lanes) {
  const int lane = threadIdx.x % lanes;
  const int64_t count = pairs.count;
  for (int64_t i = first_index() / lanes; i < count * shared.count; i += grid_size() / lanes) {
    const int64_t head = i / shared.count;
    const uint64_t key = keys[head];
    if (key == lines * bound || (head > 0 && keys[head - 1] == key)) continue;
    int64_t here[2], at[2];
    shared.offsets(i - head * shared.count, here);
    T sum = 0;
    for (int64_t k = head + lane; k < count && keys[k] == key; k += lanes) {
      pairs.offsets(order[k], at);
      sum += source[at[0] + here[0]];
    }
    if (lanes > 1) sum = warp_sum(sum);
    if (lane > 0) continue;
    pairs.offsets(order[head], at);
    sums[at[1] + here[1] + static_cast<int64_t>(key % bound) * along] += sum;
  }
}

void scatter_add(Tensor& sums, const Tensor& source, const Tensor& index, int axis) {
  if (source.numel() == 0) return;
  const cudaStream_t stream = stream_of(sums);
  const int64_t length = source.size(axis), bound = sums.size(axis), along = sums.strides()[axis];
  Shape line_shape = source.shape();
  line_shape[axis] = 1;
  const int64_t lines = line_shape.numel();
  const bool by_line = length <= 4 || (length <= 64 && lines >= 1 << 14);
  gpu::dispatch_floating(sums.dtype(), "scatter_add", [&](auto zero) {
    using T = decltype(zero);
    if constexpr (is_16_bit<T>) {
      fail(Error::Kind::DType, "[scatter_add] sums must be f32 or f64, got ", sums.dtype());
    } else if (by_line) {
      add_lines<<<blocks_for(lines, threads), threads, 0, stream>>>(
          write<T>(sums), read<T>(source), index.data<int64_t>(),
          Strided<3>(line_shape, {sums.strides(), source.strides(), index.strides()}), length, along,
          source.strides()[axis], index.strides()[axis], bound);
    } else {
      const Tensor distinct = distinct_indices(index, axis);
      const SortedIndices sorted = sorted_indices(distinct, axis, bound);
      Shape shared_shape = source.shape();
      for (int i = 0; i < source.dim(); ++i)
        if (i == axis || distinct.size(i) == source.size(i)) shared_shape[i] = 1;
      const Strided<2> pairs(distinct.shape(), {source.strides(), line_strides(sums, axis)});
      const Strided<2> shared(shared_shape, {source.strides(), sums.strides()});
      const int lanes = shared.count < 32 ? 32 : 1;
      add_runs<<<blocks_for(pairs.count * shared.count, threads / lanes), threads, 0, stream>>>(
          write<T>(sums), read<T>(source), sorted.key_data(), sorted.order.data<int64_t>(), pairs, shared,
          static_cast<uint64_t>(pairs.count / length), along, static_cast<uint64_t>(bound), lanes);
    }
    check_launch("scatter_add");
  });
}

// ------------------------------------------------------------------------------------------------ one_hot

template <class T>
__global__ void put_ones(T* y, const int64_t* indices, int64_t count, int64_t classes) {
  for (int64_t i = first_index(); i < count; i += grid_size())
    if (indices[i] >= 0 && indices[i] < classes) y[i * classes + indices[i]] = narrow<T>(1.f);
}

void one_hot(Tensor& y, const Tensor& indices) {
  if (y.numel() == 0) return;
  const cudaStream_t stream = stream_of(y);
  gpu::dispatch(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    put_ones<<<blocks_for(indices.numel(), threads), threads, 0, stream>>>(
        write<T>(y), indices.data<int64_t>(), indices.numel(), y.size(-1));
    check_launch("one_hot");
  });
}

using Index = void(Tensor&, const Tensor&, const Tensor&, int);
const CudaKernel<Index> gather_kernel{"gather", gather}, scatter_add_kernel{"scatter_add", scatter_add};
const CudaKernel<void(const char*, const Tensor&, int64_t)> check_kernel{"check_indices", check_indices};
const CudaKernel<void(Tensor&, const Tensor&)> one_hot_kernel{"one_hot", one_hot};

}  // namespace

}  // namespace torus
