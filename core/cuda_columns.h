// Sums over the rows of matrices. For kernels; not installed.
#pragma once

#include <algorithm>

#include "torus/core/cuda.h"

namespace torus::gpu {

constexpr int64_t most_tickets = 1024;
/// Counters of the blocks of a kernel that have ended, kept for good: kernels leave them at 0.
uint32_t* tickets_of(Device device);

constexpr int column_threads = 256;

// Of a block: `lanes` threads lie along a row, `width` columns each, and `groups` such rows of threads share
// a part of the rows.
template <int width>
struct ColumnLayout {
  static constexpr int lanes = width > 1 ? 16 : 32, groups = column_threads / lanes, across = lanes * width;
};

// into[column] = the sum over rows of what `source` has there, / divisor. Block y of gridDim.y takes a part
// of the rows; the last block of some columns adds their parts, in order: `tickets`, 0 before and after, tell
// which it is. Source has
//     Loaded, at_once           what is loaded at a place, and how many places are under way
//     top(column)               a cursor
//     load(cursor, row)         Loaded
//     take(loaded, cursor, row, values)  `width` values; may store something besides
template <class T, int width, class Source>
__global__ void __launch_bounds__(column_threads, sizeof(compute<T>) == 8 ? 2 : 4)
    sum_columns(T* into, compute<T>* parts, uint32_t* tickets, const __grid_constant__ Source source,
                int64_t rows, int64_t columns, int64_t part, compute<T> divisor) {
  using C = compute<T>;
  using Layout = ColumnLayout<width>;
  constexpr int lanes = Layout::lanes, groups = Layout::groups, across = Layout::across,
                warps = column_threads / 32, at_once = Source::at_once;
  constexpr int pack = Pack<C>::count, helpers = column_threads / (across / pack);
  __shared__ C space[std::max(warps, helpers)][across];
  __shared__ bool is_last;
  wait_for_kernel_before();
  const int thread = threadIdx.x, lane = thread % lanes;
  const int64_t column = (int64_t{blockIdx.x} * lanes + lane) * width;
  C sum[width] = {};
  if (column < columns) {
    const auto cursor = source.top(column);
    const int64_t end = min(rows, (blockIdx.y + 1) * part);
    for (int64_t first = blockIdx.y * part + thread / lanes; first < end; first += groups * at_once) {
      typename Source::Loaded in[at_once];
#pragma unroll
      for (int k = 0; k < at_once; ++k)
        if (const int64_t row = first + k * groups; row < end) in[k] = source.load(cursor, row);
#pragma unroll
      for (int k = 0; k < at_once; ++k)
        if (const int64_t row = first + k * groups; row < end) {
          C values[width];
          source.take(in[k], cursor, row, values);
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
    __threadfence();
    __syncthreads();
    if (thread == 0) is_last = atomicAdd(&tickets[blockIdx.x], 1) == gridDim.y - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const int helper = thread / (across / pack), at = thread % (across / pack) * pack;
    C sums[pack] = {};
#pragma unroll 8
    for (unsigned p = helper; p < gridDim.y; p += helpers) {
      C values[pack];
      widen_pack<C>(values, __ldcg(reinterpret_cast<const uint4*>(own + p * across + at)));
#pragma unroll
      for (int j = 0; j < pack; ++j) sums[j] += values[j];
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

/// Launches it, for columns that are a multiple of `width`. The parts, and with them the bits, depend on
/// nothing but the sizes.
template <class T, int width, class Source>
void launch_sum_columns(const char* op, Tensor& into, const Source& source, int64_t rows, int64_t columns,
                        double divisor) {
  using C = compute<T>;
  using Layout = ColumnLayout<width>;
  const cudaStream_t stream = stream_of(into);
  // Enough blocks for any device, each with enough to do.
  const int64_t blocks = (columns + Layout::across - 1) / Layout::across;
  const int64_t wanted = std::max<int64_t>(1, most_tickets / 2 / blocks);
  const int64_t part =
      std::max<int64_t>(4, (rows + wanted * Layout::groups - 1) / (wanted * Layout::groups)) * Layout::groups;
  const int64_t parts = std::max<int64_t>(1, (rows + part - 1) / part);
  Tensor space;
  if (parts > 1)
    space = Tensor::empty(Shape{blocks * parts * Layout::across}, sizeof(C) == 8 ? f64 : f32, into.device());
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(parts));
  launch<sum_columns<T, width, Source>>(op, grid, column_threads, stream, write<T>(into),
                                        parts > 1 ? write<C>(space) : nullptr, tickets_of(into.device()),
                                        source, rows, columns, part, C(divisor));
}

}  // namespace torus::gpu
