#include <algorithm>
#include <bit>
#include <cstdint>
#include <cub/device/device_radix_sort.cuh>

#include "torus/core/cuda.h"

namespace torus {

namespace {

constexpr int threads = 128, warps_a_block = threads / 32;

// `width` elements moved at once.
template <class T, int width>
struct alignas(sizeof(T) * width) Some {
  T at[width];
};

// A warp a row of y [N, C], C a multiple of width; zeros where the index is out of range.
template <class T, int width>
__global__ void __launch_bounds__(threads)
    gather_rows(T* __restrict__ y, const T* __restrict__ weight, const int64_t* __restrict__ indices,
                int64_t rows, int64_t vocabulary, int64_t n, gpu::Fault* faults, int fault) {
  using Moved = Some<T, width>;
  const int lane = threadIdx.x % 32;
  const int64_t count = n / width, stride = int64_t{gridDim.x} * warps_a_block;
  for (int64_t row = int64_t{blockIdx.x} * warps_a_block + threadIdx.x / 32; row < rows; row += stride) {
    const int64_t index = indices[row];
    const bool inside = index >= 0 && index < vocabulary;
    if (!inside && lane == 0) gpu::report(faults, fault, index, vocabulary);
    const Moved* const from = reinterpret_cast<const Moved*>(weight + (inside ? index : 0) * n);
    Moved* const to = reinterpret_cast<Moved*>(y + row * n);
    if (!inside) {  // the caller will be told; until then others may read the row
      for (int64_t i = lane; i < count; i += 32) to[i] = Moved{};
      continue;
    }
#pragma unroll 4
    for (int64_t i = lane; i < count; i += 32) to[i] = from[i];
  }
}

// What is sorted: the index of each row, `vocabulary` where it is out of range, and its position.
__global__ void number_rows(uint32_t* keys, uint32_t* positions, const int64_t* indices, int64_t rows,
                            int64_t vocabulary) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows; i += stride) {
    const int64_t index = indices[i];
    keys[i] = static_cast<uint32_t>(index >= 0 && index < vocabulary ? index : vocabulary);
    positions[i] = static_cast<uint32_t>(i);
  }
}

// first[v] = how many sorted keys are below v, for v in [0, vocabulary].
__global__ void find_firsts(uint32_t* first, const uint32_t* keys, int64_t rows, int64_t vocabulary) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t v = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; v <= vocabulary; v += stride) {
    int64_t low = 0, high = rows;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (keys[middle] < v)
        low = middle + 1;
      else
        high = middle;
    }
    first[v] = static_cast<uint32_t>(low);
  }
}

// Rows of one index that a warp sums, and that a block does: more are left to several blocks.
constexpr uint32_t few = 32, most_of_block = 256;
// Rows of an index that a block sums: piece 0, 1, ... of them. If there are several, the sums of this one go
// to row `slot` of a table.
struct Piece {
  uint32_t index, piece, slot;
};
__device__ inline uint32_t pieces_of(const uint32_t* firsts, uint32_t index) {
  return (firsts[index + 1] - firsts[index] + most_of_block - 1) / most_of_block;
}
// Vectors of a row that a lane sums at once; wider rows are cut along blockIdx.x.
constexpr int held = 4;

// The rows positions[first], positions[first + step], ... below last, added to sums in this order.
template <class T, int width>
__device__ inline void add_rows(gpu::compute<T> (&sums)[held][width], const T* g, const uint32_t* positions,
                                uint32_t first, uint32_t last, uint32_t step, int64_t n, int64_t from) {
  using Moved = Some<T, width>;
  const int lane = threadIdx.x % 32;
#pragma unroll 2
  for (uint32_t s = first; s < last; s += step) {
    const T* const row = g + int64_t{positions[s]} * n;
    Moved in[held];
#pragma unroll
    for (int k = 0; k < held; ++k)
      if (const int64_t i = from + (lane + 32 * k) * width; i < n)
        in[k] = *reinterpret_cast<const Moved*>(row + i);
#pragma unroll
    for (int k = 0; k < held; ++k)
      if (from + (lane + 32 * k) * width < n)
#pragma unroll
        for (int j = 0; j < width; ++j) sums[k][j] += gpu::widen(in[k].at[j]);
  }
}

template <class T, int width>
__device__ inline void store_sums(T* row, const gpu::compute<T> (&sums)[held][width], int64_t n, int64_t from,
                                  bool adds) {
  using Moved = Some<T, width>;
#pragma unroll
  for (int k = 0; k < held; ++k) {
    const int64_t i = from + (threadIdx.x % 32 + 32 * k) * width;
    if (i >= n) continue;
    Moved* const to = reinterpret_cast<Moved*>(row + i);
    Moved out;
    if (adds) out = *to;
#pragma unroll
    for (int j = 0; j < width; ++j)
      out.at[j] = gpu::narrow<T>(adds ? gpu::widen(out.at[j]) + sums[k][j] : sums[k][j]);
    *to = out;
  }
}

// A warp an index: dw of those with few rows, or none; the others are put on the list `many`, whose order is
// no matter. counts, of the list and of the slots that it uses, start at 0. If `adds`, to what dw holds.
template <class T, int width>
__global__ void __launch_bounds__(threads)
    sum_few(T* __restrict__ dw, Piece* many, uint32_t* counts, const T* __restrict__ g,
            const uint32_t* __restrict__ positions, const uint32_t* __restrict__ firsts, int64_t vocabulary,
            int64_t n, bool adds) {
  const int64_t from = int64_t{blockIdx.x} * 32 * held * width;
  const int64_t stride = int64_t{gridDim.y} * warps_a_block;
  for (int64_t v = int64_t{blockIdx.y} * warps_a_block + threadIdx.x / 32; v < vocabulary; v += stride) {
    const uint32_t first = firsts[v], last = firsts[v + 1];
    if (last - first > few) {
      if (threadIdx.x % 32 > 0 || blockIdx.x > 0) continue;
      const auto index = static_cast<uint32_t>(v);
      const uint32_t pieces = pieces_of(firsts, index), entry = atomicAdd(&counts[0], pieces),
                     slot = pieces > 1 ? atomicAdd(&counts[1], pieces) : 0;
      for (uint32_t piece = 0; piece < pieces; ++piece) many[entry + piece] = {index, piece, slot + piece};
      continue;
    }
    if (adds && first == last) continue;
    gpu::compute<T> sums[held][width] = {};
    add_rows<T, width>(sums, g, positions, first, last, 1, n, from);
    store_sums<T, width>(dw + v * n, sums, n, from, adds);
  }
}

constexpr int many_warps = 16;

// A block an entry of the list: each warp sums every 16th row, then the sums are added in order, into dw or a
// row of `slots` [number of slots, n].
template <class T, int width>
__global__ void __launch_bounds__(32 * many_warps)
    sum_many(T* __restrict__ dw, gpu::compute<T>* __restrict__ slots, const Piece* __restrict__ many,
             const uint32_t* __restrict__ counts, const T* __restrict__ g,
             const uint32_t* __restrict__ positions, const uint32_t* __restrict__ firsts, int64_t n,
             bool adds) {
  using C = gpu::compute<T>;
  __shared__ C total[held][width][32];
  const int64_t from = int64_t{blockIdx.x} * 32 * held * width;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (uint32_t entry = blockIdx.y; entry < counts[0]; entry += gridDim.y) {
    const auto [v, piece, slot] = many[entry];
    const bool alone = pieces_of(firsts, v) == 1;
    const uint32_t first = firsts[v] + piece * most_of_block,
                   last = min(firsts[v + 1], first + most_of_block);
    C sums[held][width] = {};
    add_rows<T, width>(sums, g, positions, first + warp, last, many_warps, n, from);
#pragma unroll 1
    for (int turn = 0; turn < many_warps; ++turn) {
      if (turn == warp) {
#pragma unroll
        for (int k = 0; k < held; ++k)
#pragma unroll
          for (int j = 0; j < width; ++j) {
            sums[k][j] = turn == 0 ? sums[k][j] : total[k][j][lane] + sums[k][j];
            total[k][j][lane] = sums[k][j];
          }
        if (turn == many_warps - 1 && alone) store_sums<T, width>(dw + int64_t{v} * n, sums, n, from, adds);
        if (turn == many_warps - 1 && !alone)
          store_sums<C, width>(slots + int64_t{slot} * n, sums, n, from, false);
      }
      __syncthreads();
    }
  }
}

// A block an entry of the list: dw of those indices whose sums are in slots, at the first of which they are
// added in order. A thread a column, blockIdx.x of them.
template <class T>
__global__ void __launch_bounds__(threads)
    sum_slots(T* __restrict__ dw, const gpu::compute<T>* __restrict__ slots, const Piece* __restrict__ many,
              const uint32_t* __restrict__ counts, const uint32_t* __restrict__ firsts, int64_t n,
              bool adds) {
  const int64_t i = int64_t{blockIdx.x} * threads + threadIdx.x;
  if (i >= n) return;
  for (uint32_t entry = blockIdx.y; entry < counts[0]; entry += gridDim.y) {
    const auto [v, piece, slot] = many[entry];
    const uint32_t pieces = piece == 0 ? pieces_of(firsts, v) : 1;
    if (pieces == 1) continue;
    gpu::compute<T> sum = 0;
#pragma unroll 8
    for (uint32_t p = 0; p < pieces; ++p) sum += slots[int64_t{slot + p} * n + i];
    T& to = dw[int64_t{v} * n + i];
    to = gpu::narrow<T>(adds ? gpu::widen(to) + sum : sum);
  }
}

// Where indices are few, all in one kernel: a block an index and 32 * width columns. It lists the rows of its
// index, a piece of `indices` after the other, and its warps take turns with them; then their sums are added
// in order.
constexpr int list_warps = 32, list_piece = 4096;

template <class T, int width>
__global__ void __launch_bounds__(32 * list_warps)
    sum_listed(T* __restrict__ dw, const T* __restrict__ g, const int64_t* __restrict__ indices, int64_t rows,
               int64_t n, bool adds) {
  using C = gpu::compute<T>;
  using Moved = Some<T, width>;
  constexpr int own = list_piece / list_warps / 32;  // indices of the piece that a thread looks at
  __shared__ uint16_t list[list_piece];
  __shared__ int found_by[list_warps];
  __shared__ C total[list_warps][32 * width];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t columns = int64_t{blockIdx.x} * 32 * width, from = columns + lane * width;
  C sums[width] = {};
  for (int64_t start = 0; start < rows; start += list_piece) {
    unsigned hits[own];
    int count = 0;
#pragma unroll
    for (int k = 0; k < own; ++k) {
      const int64_t i = start + (warp * own + k) * 32 + lane;
      hits[k] = __ballot_sync(0xffffffffu, i < rows && indices[i] == blockIdx.y);
      count += __popc(hits[k]);
    }
    if (lane == 0) found_by[warp] = count;
    __syncthreads();
    int place = gpu::warp_sum(lane < warp ? found_by[lane] : 0);
    const int found = gpu::warp_sum(found_by[lane]);
#pragma unroll
    for (int k = 0; k < own; ++k) {
      if (hits[k] >> lane & 1)
        list[place + __popc(hits[k] & ((1u << lane) - 1))] =
            static_cast<uint16_t>((warp * own + k) * 32 + lane);
      place += __popc(hits[k]);
    }
    __syncthreads();
    if (from < n)
#pragma unroll 4
      for (int i = warp; i < found; i += list_warps) {
        const Moved in = *reinterpret_cast<const Moved*>(g + (start + list[i]) * n + from);
#pragma unroll
        for (int j = 0; j < width; ++j) sums[j] += gpu::widen(in.at[j]);
      }
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < width; ++j) total[warp][lane * width + j] = sums[j];
  __syncthreads();
  const int column = threadIdx.x;
  if (column >= 32 * width || columns + column >= n) return;
  C sum = 0;
#pragma unroll
  for (int w = 0; w < list_warps; ++w) sum += total[w][column];
  T& to = dw[blockIdx.y * n + columns + column];
  to = gpu::narrow<T>(adds ? gpu::widen(to) + sum : sum);
}
// Each block reads all indices.
bool lists(int64_t vocabulary, int64_t rows) { return vocabulary <= 1024 && vocabulary * rows <= 1 << 23; }

template <class T>
bool moves_packs(int64_t n, const T* a, const T* b) {
  return n % gpu::Pack<T>::count == 0 && gpu::is_aligned(a) && gpu::is_aligned(b);
}

// Of a row of n elements; along grid.x, which has no limit.
unsigned parts_of(int64_t n, int64_t part) { return static_cast<unsigned>((n + part - 1) / part); }

int index_fault() {
  static const int code = gpu::fault_code("embedding", "index");
  return code;
}

void forward(Tensor& y, const Tensor& weight, const Tensor& indices) {
  const int64_t rows = indices.numel(), n = weight.size(1);
  if (y.numel() == 0) return;
  const cudaStream_t stream = gpu::stream_of(y);
  gpu::Fault* const faults = gpu::fault_slot(y.device());
  const int fault = index_fault();
  gpu::dispatch_floating(y.dtype(), "embedding", [&](auto zero) {
    using T = decltype(zero);
    T* const to = gpu::write<T>(y);
    const T* const from = gpu::read<T>(weight);
    const auto launch = [&](auto kernel) {
      kernel<<<gpu::blocks_for(rows, warps_a_block), threads, 0, stream>>>(
          to, from, gpu::read<int64_t>(indices), rows, weight.size(0), n, faults, fault);
      gpu::check_launch("embedding");
    };
    if (moves_packs(n, to, from))
      launch(gather_rows<T, gpu::Pack<T>::count>);
    else
      launch(gather_rows<T, 1>);
  });
}

void backward_by_lists(Tensor& dw, const Tensor& g, const Tensor& indices, bool adds) {
  const int64_t n = dw.size(1);
  gpu::dispatch_floating(dw.dtype(), "embedding", [&](auto zero) {
    using T = decltype(zero);
    T* const to = gpu::write<T>(dw);
    const T* const from = gpu::read<T>(g);
    const auto launch = [&](auto kernel, int64_t width) {
      const dim3 grid(parts_of(n, 32 * width), static_cast<unsigned>(dw.size(0)));
      kernel<<<grid, 32 * list_warps, 0, gpu::stream_of(dw)>>>(to, from, gpu::read<int64_t>(indices),
                                                               indices.numel(), n, adds);
      gpu::check_launch("embedding");
    };
    if (moves_packs(n, to, from))
      launch(sum_listed<T, gpu::Pack<T>::count>, gpu::Pack<T>::count);
    else
      launch(sum_listed<T, 1>, 1);
  });
}

// Rows are sorted by index, which keeps their order within one, so that each sum is taken in order.
void backward(Tensor& dw, const Tensor& g, const Tensor& indices, bool adds) {
  const int64_t rows = indices.numel(), vocabulary = dw.size(0), n = dw.size(1);
  if (dw.numel() == 0) return;
  if (lists(vocabulary, rows)) return backward_by_lists(dw, g, indices, adds);
  check(rows < int64_t{1} << 31 && vocabulary < int64_t{1} << 31, Error::Kind::Shape,
        "[embedding] expected fewer than 2^31 rows and indices, got ", rows, " and ", vocabulary);
  const cudaStream_t stream = gpu::stream_of(dw);
  const auto words = [&](int64_t count) { return Tensor::empty({count}, i32, dw.device()); };
  const auto pointer = [](Tensor& tensor) {
    return reinterpret_cast<uint32_t*>(gpu::write<int32_t>(tensor));
  };
  Tensor unsorted_keys = words(rows), unsorted_positions = words(rows), sorted_keys = words(rows),
         sorted_positions = words(rows), first_of = words(vocabulary + 1);
  const int64_t most_many = rows / (few + 1), most_slots = 2 * rows / (most_of_block + 1);
  Tensor many_list = words(most_many * 3), count_words = words(2);
  count_words.fill_(0);
  uint32_t *const keys = pointer(unsorted_keys), *const numbers = pointer(unsorted_positions),
                  *const sorted = pointer(sorted_keys), *const positions = pointer(sorted_positions),
                  *const firsts = pointer(first_of), *const counts = pointer(count_words);
  Piece* const many = reinterpret_cast<Piece*>(pointer(many_list));
  if (rows > 0) {
    number_rows<<<gpu::blocks_for(rows, 256), 256, 0, stream>>>(keys, numbers, gpu::read<int64_t>(indices),
                                                                rows, vocabulary);
    gpu::check_launch("embedding");
    const int bits = std::bit_width(static_cast<uint64_t>(vocabulary));
    size_t bytes = 0;
    const auto sort = [&](void* space) {
      gpu::check_call(cub::DeviceRadixSort::SortPairs(space, bytes, keys, sorted, numbers, positions,
                                                      static_cast<int>(rows), 0, bits, stream),
                      "embedding");
    };
    sort(nullptr);
    Tensor space = Tensor::empty({static_cast<int64_t>(bytes)}, u8, dw.device());
    sort(gpu::write<uint8_t>(space));
  }
  find_firsts<<<gpu::blocks_for(vocabulary + 1, 256), 256, 0, stream>>>(firsts, sorted, rows, vocabulary);
  gpu::check_launch("embedding");
  gpu::dispatch_floating(dw.dtype(), "embedding", [&](auto zero) {
    using T = decltype(zero);
    T* const to = gpu::write<T>(dw);
    const T* const from = gpu::read<T>(g);
    using C = gpu::compute<T>;
    Tensor slots = Tensor::empty(Shape{most_slots, n}, sizeof(C) == 8 ? f64 : f32, dw.device());
    C* const sums = gpu::write<C>(slots);
    const auto launch = [&](auto sum_few_kernel, auto sum_many_kernel, int64_t width) {
      const unsigned parts = parts_of(n, 32 * held * width);
      sum_few_kernel<<<dim3(parts, gpu::blocks_for(vocabulary, warps_a_block, 65535)), threads, 0, stream>>>(
          to, many, counts, from, positions, firsts, vocabulary, n, adds);
      gpu::check_launch("embedding");
      if (most_many == 0) return;
      const unsigned entries = gpu::blocks_for(most_many, 1, 1024);
      sum_many_kernel<<<dim3(parts, entries), 32 * many_warps, 0, stream>>>(to, sums, many, counts, from,
                                                                            positions, firsts, n, adds);
      gpu::check_launch("embedding");
      if (most_slots == 0) return;
      sum_slots<<<dim3(parts_of(n, threads), entries), threads, 0, stream>>>(to, sums, many, counts, firsts,
                                                                             n, adds);
      gpu::check_launch("embedding");
    };
    if (moves_packs(n, to, from))
      launch(sum_few<T, gpu::Pack<T>::count>, sum_many<T, gpu::Pack<T>::count>, gpu::Pack<T>::count);
    else
      launch(sum_few<T, 1>, sum_many<T, 1>, 1);
  });
}

const CudaKernel<void(Tensor&, const Tensor&, const Tensor&)> forward_kernel{"embedding.forward", forward};
const CudaKernel<void(Tensor&, const Tensor&, const Tensor&, bool)> backward_kernel{"embedding.backward",
                                                                                    backward};

}  // namespace

}  // namespace torus
