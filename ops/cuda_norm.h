// Normalisation of rows on CUDA: what layer_norm (centred) and rms_norm share. For kernels; not installed.
#pragma once

#include <algorithm>

#include "torus/core/cuda.h"

namespace torus::gpu {

// Statistics of a row. Centred: its mean in two parts, so that a mean far from 0 costs no accuracy, and
// 1 / sqrt(variance + eps); else 1 / sqrt(mean(x^2) + eps) alone.
template <bool centred>
inline constexpr int norm_statistics = centred ? 3 : 1;

constexpr int norm_threads = 256;

// The most packs of a row that a thread keeps in registers.
template <class T>
inline constexpr int norm_held = is_16_bit<T> ? 4 : 8;

// How the rows of a kernel lie: `lanes` threads share one (a part of a warp, a warp or the block), each with
// up to `held` packs of it.
template <int lanes_, int held_>
struct RowLayout {
  static constexpr int lanes = lanes_, held = held_;
};

// Whether the backward pass has registers for a row and the next; with as many threads as they allow.
template <class T, class Layout>
inline constexpr bool norm_loads_ahead = is_16_bit<T>&& Layout::held <= 3 && Layout::lanes <= 32;
template <class T, class Layout>
inline constexpr int norm_backward_threads = norm_loads_ahead<T, Layout> ? 384 : norm_threads;

// Sums over the threads that share a row, in each of them.
template <int lanes, class C>
__device__ inline C row_sum(C value, C* space) {
  if constexpr (lanes > 32) {
    return block_sum(value, space);
  } else {
#pragma unroll
    for (int lane = lanes / 2; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
    return value;
  }
}

template <class C>
__device__ inline C reciprocal_root(C value) {
  return C(1) / sqrt(value);
}

template <bool centred, class T>
struct RowStatistics {
  using C = compute<T>;
  C near = 0, off = 0, rstd = 0;

  __device__ C normalised(C x) const {
    if constexpr (!centred) return x * rstd;
    // The rounding of the mean is small beside that of a 16-bit x.
    if constexpr (is_16_bit<T>) return (x - (near + off)) * rstd;
    return (x - near - off) * rstd;
  }
  __device__ void store(C* to) const {
    if constexpr (centred) {
      to[0] = near;
      to[1] = off;
      to[2] = rstd;
    } else {
      to[0] = rstd;
    }
  }
  __device__ static RowStatistics load(const C* from) {
    if constexpr (centred)
      return {from[0], from[1], from[2]};
    else
      return {0, 0, from[0]};
  }
};

// Of n elements that `each(f)` calls f with, a part in each thread; `sum` adds over the threads.
template <bool centred, class T, class Each, class Sum>
__device__ inline RowStatistics<centred, T> row_statistics(const Each& each, const Sum& sum, int64_t n,
                                                           compute<T> eps) {
  using C = compute<T>;
  RowStatistics<centred, T> result;
  if constexpr (centred) {
    C total = 0;
    each([&](C x) { total += x; });
    result.near = sum(total) / C(n);
    // Moments about a rounded mean, corrected by how far it was off.
    C off = 0, squares = 0;
    each([&](C x) {
      const C d = x - result.near;
      off += d;
      squares += d * d;
    });
    result.off = sum(off) / C(n);
    const C variance = sum(squares) / C(n) - result.off * result.off;
    result.rstd = reciprocal_root((variance < 0 ? C(0) : variance) + eps);  // NaN stays
  } else {
    C squares = 0;
    each([&](C x) { squares += x * x; });
    result.rstd = reciprocal_root(sum(squares) / C(n) + eps);
  }
  return result;
}

// The packs of a row of `count` that are this thread's; zeros beyond.
template <class Layout, class T>
__device__ inline void load_row(uint4 (&to)[Layout::held], const T* row, int thread, int count) {
#pragma unroll
  for (int k = 0; k < Layout::held; ++k) {
    const int p = thread + k * Layout::lanes;
    to[k] = p < count ? reinterpret_cast<const uint4*>(row)[p] : uint4{};
  }
}

// Rows of whole packs, kept in registers. bias may be null.
template <class T, bool centred, class Layout>
__global__ void __launch_bounds__(norm_threads)
    norm_forward(T* __restrict__ y, compute<T>* __restrict__ statistics, const T* __restrict__ x,
                 const T* __restrict__ weight, const T* __restrict__ bias, int64_t rows, int n,
                 compute<T> eps) {
  wait_for_kernel_before();
  using C = compute<T>;
  constexpr int lanes = Layout::lanes, held = Layout::held, width = Pack<T>::count,
                groups = norm_threads / lanes;
  __shared__ C space[32];
  const int thread = threadIdx.x % lanes, group = threadIdx.x / lanes, packs = n / width;
  for (int64_t first = int64_t{blockIdx.x} * groups; first < rows; first += int64_t{gridDim.x} * groups) {
    const int64_t row = first + group;
    const bool there = row < rows;
    uint4 in[held];
    load_row<Layout>(in, x + row * n, thread, there ? packs : 0);
    const auto each = [&](auto&& f) {
#pragma unroll
      for (int k = 0; k < held; ++k) {
        C value[width];
        widen_pack<T>(value, in[k]);
        if (thread + k * lanes < packs)
#pragma unroll
          for (int j = 0; j < width; ++j) f(value[j]);
      }
    };
    const auto of = row_statistics<centred, T>(
        each, [&](C value) { return row_sum<lanes>(value, space); }, n, eps);
    if (!there) continue;
#pragma unroll
    for (int k = 0; k < held; ++k) {
      const int p = thread + k * lanes;
      if (p >= packs) continue;
      C value[width], w[width], b[width] = {};
      widen_pack<T>(value, in[k]);
      widen_pack<T>(w, reinterpret_cast<const uint4*>(weight)[p]);
      if (bias) widen_pack<T>(b, reinterpret_cast<const uint4*>(bias)[p]);
#pragma unroll
      for (int j = 0; j < width; ++j) value[j] = of.normalised(value[j]) * w[j] + b[j];
      reinterpret_cast<uint4*>(y + row * n)[p] = narrow_pack<T>(value);
    }
    if (thread == 0) of.store(statistics + row * norm_statistics<centred>);
  }
}

// Any row, read again for each pass; a block a row.
template <class T, bool centred>
__global__ void __launch_bounds__(norm_threads)
    norm_forward_any(T* __restrict__ y, compute<T>* __restrict__ statistics, const T* __restrict__ x,
                     const T* __restrict__ weight, const T* __restrict__ bias, int64_t rows, int64_t n,
                     compute<T> eps) {
  wait_for_kernel_before();
  using C = compute<T>;
  __shared__ C space[32];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const from = x + row * n;
    const auto each = [&](auto&& f) {
      for (int64_t i = threadIdx.x; i < n; i += norm_threads) f(widen(from[i]));
    };
    const auto row_statistics_of = row_statistics<centred, T>(
        each, [&](C value) { return block_sum(value, space); }, n, eps);
    for (int64_t i = threadIdx.x; i < n; i += norm_threads) {
      const C scaled = row_statistics_of.normalised(widen(from[i])) * widen(weight[i]);
      y[row * n + i] = narrow<T>(bias ? scaled + widen(bias[i]) : scaled);
    }
    if (threadIdx.x == 0) row_statistics_of.store(statistics + row * norm_statistics<centred>);
  }
}

// With h the normalised row: dx = rstd * (g * w - mean(g * w) - h * mean(g * w * h)), the first mean only if
// centred; added to what dx holds if `adds`. parts [blocks, 1 or 2, n] gets the sums over the rows of each
// block of g * h and, if centred, of g. Each thread keeps those of its columns in registers to the end.
template <class T, bool centred, class Layout>
__global__ void __launch_bounds__(norm_backward_threads<T, Layout>, 1)
    norm_backward(T* __restrict__ dx, compute<T>* __restrict__ parts, const T* __restrict__ g,
                  const T* __restrict__ x, const T* __restrict__ weight,
                  const compute<T>* __restrict__ statistics, int64_t rows, int n, bool adds) {
  wait_for_kernel_before();
  using C = compute<T>;
  constexpr int lanes = Layout::lanes, held = Layout::held, width = Pack<T>::count,
                threads = norm_backward_threads<T, Layout>, groups = threads / lanes, sums = centred ? 2 : 1,
                warps = groups > 1 ? threads / 32 : 1;
  constexpr bool ahead = norm_loads_ahead<T, Layout>;
  __shared__ C space[32];
  __shared__ C handed[(warps + 1) / 2][held * width][32];
  const int thread = threadIdx.x % lanes, group = threadIdx.x / lanes, packs = n / width;
  const C share = C(1) / C(n);
  struct Row {
    RowStatistics<centred, T> of;
    uint4 g[held], x[held], before[held];
  };
  // Rows and columns that are not there count as zeros, so that no lane goes another way.
  const auto load = [&](int64_t row) {
    const int count = row < rows ? packs : 0;
    Row result;
    load_row<Layout>(result.g, g + row * n, thread, count);
    load_row<Layout>(result.x, x + row * n, thread, count);
    load_row<Layout>(result.before, dx + row * n, thread, adds ? count : 0);
    result.of = RowStatistics<centred, T>::load(statistics + min(row, rows - 1) * norm_statistics<centred>);
    return result;
  };
  C total[sums][held][width] = {};
  const int64_t stride = int64_t{gridDim.x} * groups;
  int64_t first = int64_t{blockIdx.x} * groups;
  Row next;
  if (ahead) next = load(first + group);
  for (; first < rows; first += stride) {
    const int64_t row = first + group;
    const Row in = ahead ? next : load(row);
    if (ahead) next = load(row + stride);
    uint4 weights[held];
    load_row<Layout>(weights, weight, thread, row < rows ? packs : 0);
    C plain = 0, along = 0;
#pragma unroll
    for (int k = 0; k < held; ++k) {
      C grad[width], value[width], w[width];
      widen_pack<T>(grad, in.g[k]);
      widen_pack<T>(value, in.x[k]);
      widen_pack<T>(w, weights[k]);
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const C h = in.of.normalised(value[j]), scaled = grad[j] * w[j];
        plain += scaled;
        along += scaled * h;
        total[0][k][j] += grad[j] * h;
        if (centred) total[sums - 1][k][j] += grad[j];
      }
    }
    if (!dx) continue;
    plain = centred ? row_sum<lanes>(plain, space) * share : C(0);
    along = row_sum<lanes>(along, space) * share;
#pragma unroll
    for (int k = 0; k < held; ++k) {
      const int p = thread + k * lanes;
      C grad[width], value[width], w[width], before[width];
      widen_pack<T>(grad, in.g[k]);
      widen_pack<T>(value, in.x[k]);
      widen_pack<T>(w, weights[k]);
      widen_pack<T>(before, in.before[k]);
#pragma unroll
      for (int j = 0; j < width; ++j)
        grad[j] = in.of.rstd * (grad[j] * w[j] - plain - in.of.normalised(value[j]) * along) + before[j];
      if (row < rows && p < packs) reinterpret_cast<uint4*>(dx + row * n)[p] = narrow_pack<T>(grad);
    }
  }
  if (!parts) return;
  // Over the groups of a warp, and then over the warps, half of which hand their sums to the other half, and
  // so on: a fixed order of additions.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int s = 0; s < sums; ++s) {
    const auto for_each_total = [&](auto&& f) {
#pragma unroll
      for (int k = 0; k < held; ++k)
#pragma unroll
        for (int j = 0; j < width; ++j) f(total[s][k][j], k * width + j);
    };
    if constexpr (lanes < 32)
      for_each_total([&](C& sum, int) {
#pragma unroll
        for (int step = lanes; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      });
#pragma unroll 1
    for (int count = warps; count > 1; count = (count + 1) / 2) {
      const int half = (count + 1) / 2;
      if (warp >= half && warp < count)
        for_each_total([&](C sum, int at) { handed[warp - half][at][lane] = sum; });
      __syncthreads();
      if (warp + half < count) for_each_total([&](C& sum, int at) { sum += handed[warp][at][lane]; });
      __syncthreads();
    }
    if (threadIdx.x >= lanes) continue;
    C* const part = parts + (int64_t{blockIdx.x} * sums + s) * n;
#pragma unroll
    for (int k = 0; k < held; ++k)
      if (const int p = thread + k * lanes; p < packs)
#pragma unroll
        for (int j = 0; j < width; ++j) part[p * width + j] = total[s][k][j];
  }
}

// Any row; a block a row, whose threads add to what is theirs of its part.
template <class T, bool centred>
__global__ void __launch_bounds__(norm_threads)
    norm_backward_any(T* __restrict__ dx, compute<T>* __restrict__ parts, const T* __restrict__ g,
                      const T* __restrict__ x, const T* __restrict__ weight,
                      const compute<T>* __restrict__ statistics, int64_t rows, int64_t n, bool adds) {
  wait_for_kernel_before();
  using C = compute<T>;
  __shared__ C space[32];
  C* const part = parts ? parts + int64_t{blockIdx.x} * (centred ? 2 : 1) * n : nullptr;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T *const from_g = g + row * n, *const from_x = x + row * n;
    const auto of = RowStatistics<centred, T>::load(statistics + row * norm_statistics<centred>);
    const bool first = row == blockIdx.x;
    C plain = 0, along = 0;
    for (int64_t i = threadIdx.x; i < n; i += norm_threads) {
      const C grad = widen(from_g[i]), h = of.normalised(widen(from_x[i])), scaled = grad * widen(weight[i]);
      plain += scaled;
      along += scaled * h;
      if (!part) continue;
      part[i] = first ? grad * h : part[i] + grad * h;
      if (centred) part[n + i] = first ? grad : part[n + i] + grad;
    }
    if (!dx) continue;
    plain = centred ? block_sum(plain, space) / C(n) : C(0);
    along = block_sum(along, space) / C(n);
    for (int64_t i = threadIdx.x; i < n; i += norm_threads) {
      const C h = of.normalised(widen(from_x[i]));
      const C grad = of.rstd * (widen(from_g[i]) * widen(weight[i]) - plain - h * along);
      dx[row * n + i] = narrow<T>(adds ? widen(dx[row * n + i]) + grad : grad);
    }
  }
}

// dw[i], and for blockIdx.y == 1 db[i], = the sum over blocks of parts [blocks, gridDim.y, n], in a fixed
// order. 32 warps take turns at the parts, all of them in flight at once if they are not very many.
template <class T>
__global__ void __launch_bounds__(1024)
    norm_sum_parts(T* dw, T* db, const compute<T>* parts, int64_t blocks, int64_t n) {
  wait_for_kernel_before();
  using C = compute<T>;
  constexpr int at_once = 8;
  __shared__ C space[32][33];
  T* const to = blockIdx.y == 0 ? dw : db;
  if (!to) return;
  const int lane = threadIdx.x, warp = threadIdx.y;
  const int64_t first_column = int64_t{blockIdx.x} * 32, column = first_column + lane;
  const C* from = parts + (int64_t{warp} * gridDim.y + blockIdx.y) * n + column;
  const int64_t step = int64_t{32} * gridDim.y * n;
  C sum = 0;
#pragma unroll 1
  for (int64_t first = warp; first < blocks; first += 32 * at_once, from += at_once * step) {
    C in[at_once];
#pragma unroll
    for (int k = 0; k < at_once; ++k) in[k] = first + k * 32 < blocks && column < n ? from[k * step] : C(0);
#pragma unroll
    for (int k = 0; k < at_once; ++k) sum += in[k];
  }
  space[warp][lane] = sum;
  __syncthreads();
  sum = warp_sum(space[lane][warp]);
  if (lane == 0 && first_column + warp < n) to[first_column + warp] = narrow<T>(sum);
}

// Calls f with the RowLayout for rows of n elements, or with 0 where rows cannot be kept in registers: the
// one that leaves the fewest lanes without work, with the fewest registers, so that more rows are under way.
template <class T, class F, class... Pointers>
void with_row_layout(int64_t n, const F& f, const Pointers*... pointers) {
  constexpr int64_t width = Pack<T>::count;
  constexpr int most = norm_held<T>;
  const int64_t packs = n / width;
  if (n % width != 0 || !(is_aligned(pointers) && ...) || packs > most * norm_threads) return f(0);
  if (packs > most * 32) return f(RowLayout<norm_threads, most>{});
  if constexpr (sizeof(T) < 8) {
    if (packs <= 16) return f(RowLayout<16, 1>{});
    if (packs <= most / 2 * 16) return f(RowLayout<16, most / 2>{});
    if (packs <= most * 3 / 4 * 16) return f(RowLayout<16, most * 3 / 4>{});
    if (packs <= most / 2 * 32) return f(RowLayout<32, most / 2>{});
    if (packs <= most * 3 / 4 * 32) return f(RowLayout<32, most * 3 / 4>{});
  }
  f(RowLayout<32, most>{});
}

/// y = normalised x * weight + bias, all contiguous, x, y [N, C]; bias may be undefined.
template <bool centred>
void launch_norm_forward(const char* op, Tensor& y, Tensor& statistics, const Tensor& x, const Tensor& weight,
                         const Tensor& bias, double eps) {
  const int64_t rows = x.size(0), n = x.size(1);
  if (x.numel() == 0) return;
  const cudaStream_t stream = stream_of(x);
  gpu::dispatch_floating(x.dtype(), op, [&](auto zero) {
    using T = decltype(zero);
    using C = compute<T>;
    T* const to = write<T>(y);
    C* const moments = write<C>(statistics);
    const T *const from = read<T>(x), *const w = read<T>(weight),
                   *const b = bias.defined() ? read<T>(bias) : nullptr;
    with_row_layout<T>(
        n,
        [&](auto layout) {
          using Layout = decltype(layout);
          if constexpr (std::is_same_v<Layout, int>)
            launch<norm_forward_any<T, centred>>(op, blocks_for(rows, 1), norm_threads, stream, to, moments,
                                                 from, w, b, rows, n, C(eps));
          else
            launch<norm_forward<T, centred, Layout>>(op, blocks_for(rows, norm_threads / Layout::lanes),
                                                     norm_threads, stream, to, moments, from, w, b, rows,
                                                     static_cast<int>(n), C(eps));
        },
        to, from, w, b);
  });
}

// A function, because GCC 12 takes a constant of a type that a lambda within a lambda deduces for that of the
// first such type.
template <class T, class Layout>
int norm_backward_launched() {
  return norm_backward_threads<T, Layout>;
}

/// Sets those of dx [N, C], dw [C] and db [C] that are defined; adds to dx if `adds`.
template <bool centred>
void launch_norm_backward(const char* op, Tensor& dx, Tensor& dw, Tensor& db, const Tensor& g,
                          const Tensor& x, const Tensor& weight, const Tensor& statistics, bool adds) {
  const int64_t rows = x.size(0), n = x.size(1);
  if (x.numel() == 0) {
    if (dw.defined()) dw.fill_(0);
    if (db.defined()) db.fill_(0);
    return;
  }
  const cudaStream_t stream = stream_of(x);
  gpu::dispatch_floating(x.dtype(), op, [&](auto zero) {
    using T = decltype(zero);
    using C = compute<T>;
    constexpr int sums = centred ? 2 : 1;
    T* const to = dx.defined() ? write<T>(dx) : nullptr;
    const T *const grad = read<T>(g), *const from = read<T>(x), *const w = read<T>(weight);
    const C* const moments = read<C>(statistics);
    const bool wants_parts = dw.defined() || db.defined();
    int64_t blocks = 0;
    Tensor parts;
    C* part = nullptr;
    const auto prepare = [&](int rows_a_block, int most) {
      blocks = std::min<int64_t>(most * properties(x.device()).multiProcessorCount,
                                 blocks_for(rows, rows_a_block));
      if (!wants_parts) return;
      parts = Tensor::empty({blocks, sums, n}, statistics.dtype(), x.device());
      part = write<C>(parts);
    };
    with_row_layout<T>(
        n,
        [&](auto layout) {
          using Layout = decltype(layout);
          if constexpr (std::is_same_v<Layout, int>) {
            prepare(1, 2);
            launch<norm_backward_any<T, centred>>(op, static_cast<unsigned>(blocks), norm_threads, stream, to,
                                                  part, grad, from, w, moments, rows, n, adds);
          } else {
            const int threads = norm_backward_launched<T, Layout>();
            prepare(threads / Layout::lanes, 1);
            launch<norm_backward<T, centred, Layout>>(op, static_cast<unsigned>(blocks), threads, stream, to,
                                                      part, grad, from, w, moments, rows, static_cast<int>(n),
                                                      adds);
          }
        },
        to, grad, from, w);
    if (!part) return;
    launch<norm_sum_parts<T>>(op, dim3(static_cast<unsigned>((n + 31) / 32), sums), dim3(32, 32), stream,
                              dw.defined() ? write<T>(dw) : nullptr, db.defined() ? write<T>(db) : nullptr,
                              part, blocks, n);
  });
}

}  // namespace torus::gpu
