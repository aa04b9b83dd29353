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

// How the rows of a kernel lie: `warps` share one, each of their threads with up to `held` packs of it.
template <int warps_, int held_>
struct RowLayout {
  static constexpr int warps = warps_, held = held_;
};

// Sums over the `warps` warps that share a row: one, or all of the block.
template <int warps, class C>
__device__ inline C row_sum(C value, C* space) {
  if constexpr (warps == 1)
    return warp_sum(value);
  else
    return block_sum(value, space);
}

template <class C>
__device__ inline C reciprocal_root(C value) {
  return C(1) / sqrt(value);
}

template <bool centred, class C>
struct RowStatistics {
  C near = 0, off = 0, rstd = 0;

  __device__ C normalised(C x) const { return centred ? (x - near - off) * rstd : x * rstd; }
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
template <bool centred, class C, class Each, class Sum>
__device__ inline RowStatistics<centred, C> row_statistics(const Each& each, const Sum& sum, int64_t n,
                                                           C eps) {
  RowStatistics<centred, C> result;
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

// Rows of whole packs, kept in registers. bias may be null.
template <class T, bool centred, class Layout>
__global__ void __launch_bounds__(norm_threads)
    norm_forward(T* __restrict__ y, compute<T>* __restrict__ statistics, const T* __restrict__ x,
                 const T* __restrict__ weight, const T* __restrict__ bias, int64_t rows, int n,
                 compute<T> eps) {
  using C = compute<T>;
  constexpr int warps = Layout::warps, held = Layout::held, width = Pack<T>::count, threads = 32 * warps,
                groups = norm_threads / threads;
  __shared__ C space[32];
  const int thread = threadIdx.x % threads, packs = n / width;
  for (int64_t row = int64_t{blockIdx.x} * groups + threadIdx.x / threads; row < rows;
       row += int64_t{gridDim.x} * groups) {
    const Pack<T>* const from = reinterpret_cast<const Pack<T>*>(x + row * n);
    Pack<T> in[held];
#pragma unroll
    for (int k = 0; k < held; ++k)
      if (const int p = thread + k * threads; p < packs) in[k] = from[p];
    const auto each = [&](auto&& f) {
#pragma unroll
      for (int k = 0; k < held; ++k)
        if (thread + k * threads < packs)
#pragma unroll
          for (int j = 0; j < width; ++j) f(widen(in[k].at[j]));
    };
    const auto row_statistics_of = row_statistics<centred, C>(
        each, [&](C value) { return row_sum<warps>(value, space); }, n, eps);
    Pack<T>* const to = reinterpret_cast<Pack<T>*>(y + row * n);
#pragma unroll
    for (int k = 0; k < held; ++k) {
      const int p = thread + k * threads;
      if (p >= packs) continue;
      const Pack<T> w = reinterpret_cast<const Pack<T>*>(weight)[p];
      Pack<T> b, out;
      if (bias) b = reinterpret_cast<const Pack<T>*>(bias)[p];
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const C scaled = row_statistics_of.normalised(widen(in[k].at[j])) * widen(w.at[j]);
        out.at[j] = narrow<T>(bias ? scaled + widen(b.at[j]) : scaled);
      }
      to[p] = out;
    }
    if (thread == 0) row_statistics_of.store(statistics + row * norm_statistics<centred>);
  }
}

// Any row, read again for each pass; a block a row.
template <class T, bool centred>
__global__ void __launch_bounds__(norm_threads)
    norm_forward_any(T* __restrict__ y, compute<T>* __restrict__ statistics, const T* __restrict__ x,
                     const T* __restrict__ weight, const T* __restrict__ bias, int64_t rows, int64_t n,
                     compute<T> eps) {
  using C = compute<T>;
  __shared__ C space[32];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const from = x + row * n;
    const auto each = [&](auto&& f) {
      for (int64_t i = threadIdx.x; i < n; i += norm_threads) f(widen(from[i]));
    };
    const auto row_statistics_of = row_statistics<centred, C>(
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
// block of g * h and, if centred, of g.
template <class T, bool centred, class Layout>
__global__ void __launch_bounds__(norm_threads, is_16_bit<T> && Layout::held <= 3 ? 2 : 1)
    norm_backward(T* __restrict__ dx, compute<T>* __restrict__ parts, const T* __restrict__ g,
                  const T* __restrict__ x, const T* __restrict__ weight,
                  const compute<T>* __restrict__ statistics, int64_t rows, int n, bool adds) {
  using C = compute<T>;
  constexpr int warps = Layout::warps, held = Layout::held, width = Pack<T>::count, threads = 32 * warps,
                groups = norm_threads / threads, sums = centred ? 2 : 1;
  extern __shared__ __align__(16) unsigned char dynamic[];  // groups > 1: sums * n of C
  __shared__ C space[32];
  const int thread = threadIdx.x % threads, group = threadIdx.x / threads, packs = n / width;
  const C share = C(1) / C(n);
  C dw[held][width] = {}, db[held][width] = {};
  for (int64_t row = int64_t{blockIdx.x} * groups + group; row < rows; row += int64_t{gridDim.x} * groups) {
    const Pack<T>* const from_g = reinterpret_cast<const Pack<T>*>(g + row * n);
    const Pack<T>* const from_x = reinterpret_cast<const Pack<T>*>(x + row * n);
    Pack<T>* const to = reinterpret_cast<Pack<T>*>(dx + row * n);
    Pack<T> in_g[held], in_x[held], before[held];
#pragma unroll
    for (int k = 0; k < held; ++k)
      if (const int p = thread + k * threads; p < packs) {
        in_g[k] = from_g[p];
        in_x[k] = from_x[p];
        if (adds) before[k] = to[p];
      }
    const auto of = RowStatistics<centred, C>::load(statistics + row * norm_statistics<centred>);
    C plain = 0, along = 0;
#pragma unroll
    for (int k = 0; k < held; ++k) {
      const int p = thread + k * threads;
      if (p >= packs) continue;
      const Pack<T> w = reinterpret_cast<const Pack<T>*>(weight)[p];
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const C grad = widen(in_g[k].at[j]), h = of.normalised(widen(in_x[k].at[j])),
                scaled = grad * widen(w.at[j]);
        plain += scaled;
        along += scaled * h;
        dw[k][j] += grad * h;
        if (centred) db[k][j] += grad;
      }
    }
    if (!dx) continue;
    plain = centred ? row_sum<warps>(plain, space) * share : C(0);
    along = row_sum<warps>(along, space) * share;
#pragma unroll
    for (int k = 0; k < held; ++k) {
      const int p = thread + k * threads;
      if (p >= packs) continue;
      const Pack<T> w = reinterpret_cast<const Pack<T>*>(weight)[p];
      Pack<T> out;
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const C h = of.normalised(widen(in_x[k].at[j]));
        const C grad = of.rstd * (widen(in_g[k].at[j]) * widen(w.at[j]) - plain - h * along);
        out.at[j] = narrow<T>(adds ? widen(before[k].at[j]) + grad : grad);
      }
      to[p] = out;
    }
  }
  if (!parts) return;
  C* const part = parts + int64_t{blockIdx.x} * sums * n;
  C* const into = groups > 1 ? reinterpret_cast<C*>(dynamic) : part;
  // One group after the other: a fixed order of additions.
#pragma unroll 1
  for (int turn = 0; turn < groups; ++turn) {
    if (turn == group) {
#pragma unroll
      for (int k = 0; k < held; ++k) {
        const int p = thread + k * threads;
        if (p >= packs) continue;
#pragma unroll
        for (int j = 0; j < width; ++j) {
          const int at = p * width + j;
          into[at] = turn == 0 ? dw[k][j] : into[at] + dw[k][j];
          if (centred) into[n + at] = turn == 0 ? db[k][j] : into[n + at] + db[k][j];
        }
      }
    }
    if (groups > 1) __syncthreads();
  }
  if (groups > 1)
    for (int i = threadIdx.x; i < sums * n; i += norm_threads) part[i] = into[i];
}

// Any row; a block a row, whose threads add to what is theirs of its part.
template <class T, bool centred>
__global__ void __launch_bounds__(norm_threads)
    norm_backward_any(T* __restrict__ dx, compute<T>* __restrict__ parts, const T* __restrict__ g,
                      const T* __restrict__ x, const T* __restrict__ weight,
                      const compute<T>* __restrict__ statistics, int64_t rows, int64_t n, bool adds) {
  using C = compute<T>;
  __shared__ C space[32];
  C* const part = parts ? parts + int64_t{blockIdx.x} * (centred ? 2 : 1) * n : nullptr;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T *const from_g = g + row * n, *const from_x = x + row * n;
    const auto of = RowStatistics<centred, C>::load(statistics + row * norm_statistics<centred>);
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
// order.
template <class T>
__global__ void norm_sum_parts(T* dw, T* db, const compute<T>* parts, int64_t blocks, int64_t n) {
  using C = compute<T>;
  __shared__ C space[8][33];
  T* const to = blockIdx.y == 0 ? dw : db;
  if (!to) return;
  const int64_t i = int64_t{blockIdx.x} * 32 + threadIdx.x;
  C sum = 0;
  if (i < n)
#pragma unroll 8
    for (int64_t block = threadIdx.y; block < blocks; block += 8)
      sum += parts[(block * gridDim.y + blockIdx.y) * n + i];
  space[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || i >= n) return;
#pragma unroll
  for (int part = 1; part < 8; ++part) sum += space[part][threadIdx.x];
  to[i] = narrow<T>(sum);
}

// Calls f with the RowLayout for rows of n elements, or with 0 where rows cannot be kept in registers.
template <class T, class F, class... Pointers>
void with_row_layout(int64_t n, const F& f, const Pointers*... pointers) {
  constexpr int64_t of_warp = 32 * Pack<T>::count;  // elements, for each pack that its threads hold
  constexpr int most = norm_held<T>, all = norm_threads / 32;
  if (n % Pack<T>::count != 0 || !(is_aligned(pointers) && ...) || n > most * of_warp * all) return f(0);
  if (n > most * of_warp) return f(RowLayout<all, most>{});
  if constexpr (sizeof(T) < 8) {  // fewer registers let more rows be under way
    if (n <= of_warp) return f(RowLayout<1, 1>{});
    if (n <= most / 2 * of_warp) return f(RowLayout<1, most / 2>{});
    if (n <= most * 3 / 4 * of_warp) return f(RowLayout<1, most * 3 / 4>{});
  }
  f(RowLayout<1, most>{});
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
            norm_forward_any<T, centred>
                <<<blocks_for(rows, 1), norm_threads, 0, stream>>>(to, moments, from, w, b, rows, n, C(eps));
          else
            norm_forward<T, centred, Layout>
                <<<blocks_for(rows, norm_threads / 32 / Layout::warps), norm_threads, 0, stream>>>(
                    to, moments, from, w, b, rows, static_cast<int>(n), C(eps));
        },
        to, from, w, b);
    check_launch(op);
  });
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
    // A few rows for each group of warps, so that there are not many parts to sum.
    const auto prepare = [&](int64_t rows_a_block) {
      blocks = std::min<int64_t>(2 * properties(x.device()).multiProcessorCount,
                                 blocks_for(rows, static_cast<int>(rows_a_block)));
      if (!wants_parts) return;
      parts = Tensor::empty({blocks, sums, n}, statistics.dtype(), x.device());
      part = write<C>(parts);
    };
    with_row_layout<T>(
        n,
        [&](auto layout) {
          using Layout = decltype(layout);
          if constexpr (std::is_same_v<Layout, int>) {
            prepare(1);
            norm_backward_any<T, centred><<<static_cast<unsigned>(blocks), norm_threads, 0, stream>>>(
                to, part, grad, from, w, moments, rows, n, adds);
          } else {
            constexpr int groups = norm_threads / 32 / Layout::warps;
            prepare(groups > 1 ? 4 * groups : 1);
            const size_t shared = part && groups > 1 ? static_cast<size_t>(sums * n) * sizeof(C) : 0;
            norm_backward<T, centred, Layout>
                <<<static_cast<unsigned>(blocks), norm_threads, shared, stream>>>(
                    to, part, grad, from, w, moments, rows, static_cast<int>(n), adds);
          }
        },
        to, grad, from, w);
    check_launch(op);
    if (!part) return;
    norm_sum_parts<T><<<dim3(static_cast<unsigned>((n + 31) / 32), sums), dim3(32, 8), 0, stream>>>(
        dw.defined() ? write<T>(dw) : nullptr, db.defined() ? write<T>(db) : nullptr, part, blocks, n);
    check_launch(op);
  });
}

}  // namespace torus::gpu
