// Sums over the rows of a matrix on CUDA. For kernels; not installed.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>

#include "torus/core/cuda.h"

namespace torus::gpu {

constexpr int column_threads = 512, column_blocks = 2;  // `column_blocks` on a multiprocessor

/// Of a block: `lanes` threads lie along a row, `width` columns each, and `groups` such rows of threads share
/// a part of the rows.
template <int width>
struct ColumnLayout {
  static constexpr int lanes = width > 1 ? 16 : 32, groups = column_threads / lanes, across = lanes * width;
};

namespace detail {

constexpr int64_t most_tickets = 1024;
// Counters of the blocks of a kernel that have ended, kept for good: kernels leave them at 0.
inline uint32_t* tickets_of(Device device) {
  static std::mutex mutex;
  static auto* all = new std::map<int, uint32_t*>;
  std::lock_guard lock(mutex);
  uint32_t*& tickets = (*all)[device.index];
  if (!tickets) tickets = static_cast<uint32_t*>(allocate_for_good(most_tickets * sizeof(uint32_t), device));
  return tickets;
}

// into[column] = the sum over the rows of `source` / divisor. A thread walks down every `groups`-th row.
// Block y of gridDim.y takes a part of the rows; the last block of some columns adds their parts, in order:
// `tickets`, 0 before and after, tell which it is.
template <class T, class Rows>
__global__ void __launch_bounds__(column_threads, column_blocks)
    sum_columns(T* into, compute<T>* parts, uint32_t* tickets, const __grid_constant__ Rows source,
                int64_t rows, int64_t columns, int64_t part, compute<T> divisor) {
  using C = compute<T>;
  constexpr int width = Rows::width, at_once = Rows::at_once;
  using Layout = ColumnLayout<width>;
  constexpr int lanes = Layout::lanes, groups = Layout::groups, across = Layout::across,
                warps = column_threads / 32;
  constexpr int pack = Pack<C>::count, helpers = column_threads / (across / pack);
  __shared__ C space[std::max(warps, helpers)][across];
  __shared__ bool is_last;
  wait_for_kernel_before();
  const int thread = threadIdx.x, lane = thread % lanes;
  const int64_t column = (int64_t{blockIdx.x} * lanes + lane) * width;
  C sum[width] = {};
  if (column < columns) {
    const int64_t first = blockIdx.y * part + thread / lanes;
    auto at = source.start(first, column), at_taken = at;
    for (auto left = static_cast<int>(min(rows, (blockIdx.y + 1) * part) - first); left > 0;
         left -= groups * at_once) {
      typename Rows::Loaded in[at_once];
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        in[k] = source.load(at, k * groups < left);
        source.advance(at);
      }
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        C values[width];
        source.take(values, in[k], at_taken, k * groups < left);
        source.advance(at_taken);
#pragma unroll
        for (int j = 0; j < width; ++j) sum[j] += values[j];
      }
    }
  }
#pragma unroll
  for (int j = 0; j < width; ++j) {
    if (lanes < 32) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 16);
    if (thread % 32 < lanes) space[thread / 32][j * lanes + lane] = sum[j];
  }
  __syncthreads();
  C total = 0;
  if (thread < across)
#pragma unroll
    for (int warp = 0; warp < warps; ++warp) total += space[warp][thread];
  if (gridDim.y > 1) {
    C* const own = parts + int64_t{blockIdx.x} * gridDim.y * across;
    if (thread < across) own[blockIdx.y * across + thread] = total;
    __syncthreads();
    if (thread == 0) {
      __threadfence();
      is_last = atomicAdd(&tickets[blockIdx.x], 1) == gridDim.y - 1;
      __threadfence();
    }
    __syncthreads();
    if (!is_last) return;
    const unsigned helper = thread / (across / pack), at = thread % (across / pack) * pack;
    C sums[pack] = {};
    for (unsigned first = helper; first < gridDim.y; first += helpers * 8) {
      uint4 in[8];
#pragma unroll
      for (unsigned k = 0; k < 8; ++k) {
        const unsigned p = first + k * helpers;
        in[k] = p < gridDim.y ? __ldcg(reinterpret_cast<const uint4*>(own + p * across + at)) : uint4{};
      }
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        C values[pack];
        widen_pack<C>(values, in[k]);
#pragma unroll
        for (int j = 0; j < pack; ++j) sums[j] += values[j];
      }
    }
#pragma unroll
    for (int j = 0; j < pack; ++j) space[helper][at + j] = sums[j];
    __syncthreads();
    total = 0;
    if (thread < across)
#pragma unroll
      for (int h = 0; h < helpers; ++h) total += space[h][thread];
    if (thread == 0) tickets[blockIdx.x] = 0;
  }
  const int64_t to = (int64_t{blockIdx.x} * lanes + lane) * width + thread / lanes;
  if (thread < across && to < columns) into[to] = narrow<T>(total / divisor);
}

}  // namespace detail

/// into[column] = the sum over `rows` rows of `source` / divisor, in the compute type. The parts, and with
/// them the bits, depend on nothing but the sizes, the width and the device. `source` gives a thread `width`
/// columns side by side, of `at_once` rows before it adds the first: `load` at a place, and `take` turns what
/// was loaded into numbers (of rows that are not `there`, of zeros).
template <class T, class Rows>
void launch_sum_columns(Tensor& into, const Rows& source, int64_t rows, int64_t columns, double divisor) {
  using C = compute<T>;
  using Layout = ColumnLayout<Rows::width>;
  const cudaStream_t stream = stream_of(into);
  // As many blocks as run at once; four times as many where they are too many for that to come out even.
  const int64_t blocks = (columns + Layout::across - 1) / Layout::across;
  const int64_t at_once = column_blocks * properties(into.device()).multiProcessorCount;
  const int64_t wanted =
      blocks > detail::most_tickets ? 1 : (4 * blocks > at_once ? 4 : 1) * at_once / blocks;
  const int64_t each = std::max<int64_t>(1, wanted) * Layout::groups;
  const int64_t part = std::max<int64_t>(4, (rows + each - 1) / each) * Layout::groups;
  const int64_t parts = std::max<int64_t>(1, (rows + part - 1) / part);
  Tensor space;
  if (parts > 1)
    space = Tensor::empty(Shape{blocks * parts * Layout::across}, sizeof(C) == 8 ? f64 : f32, into.device());
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(parts));
  launch<detail::sum_columns<T, Rows>>(
      "sum_to", grid, column_threads, stream, write<T>(into), parts > 1 ? write<C>(space) : nullptr,
      detail::tickets_of(into.device()), source, rows, columns, part, C(divisor));
}

}  // namespace torus::gpu
