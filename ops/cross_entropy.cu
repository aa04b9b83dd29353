#include <algorithm>
#include <cstdint>

#include "torus/core/cuda.h"

namespace torus {

namespace {

using gpu::Pack;

constexpr int threads = 256;

template <class T, class C>
__device__ inline C exponential(C x) {
  if constexpr (gpu::is_16_bit<T>) {  // inputs of 16 bits need no more than this
    return gpu::approximate_exp2(x * 1.4426950408889634f);
  } else {
    return exp(x);
  }
}

// A NaN is no matter here: it is in the sum of exponentials.
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }
struct Larger {
  template <class C>
  __device__ C operator()(C a, C b) const {
    return larger(a, b);
  }
};

// A row of n elements as what lies before its first multiple of 16 bytes, whole packs, and the rest.
struct Cut {
  int64_t head, packs;

  template <class T>
  __device__ static Cut of(const T* row, int64_t n) {
    const int64_t before =
        static_cast<int64_t>((16 - reinterpret_cast<uintptr_t>(row) % 16) % 16 / sizeof(T));
    const int64_t head = before < n ? before : n;
    return {head, (n - head) / Pack<T>::count};
  }
};

// The largest of what was seen, the sum of exp(x - largest), and the plain sum.
template <class C>
struct Seen {
  C largest, sum = 0, total = 0;
};

template <int warps, class C>
__device__ inline C over_row(C value, C identity, C* space, auto op) {
  if constexpr (warps == 1)
    return gpu::warp_reduce(value, op);
  else
    return gpu::block_reduce(value, identity, space, op);
}

// A row for each group of `warps` warps, `apart` elements after the one before. losses [rows] gets the loss
// of each row in f64, 0 where ignored.
template <class T, int warps>
__global__ void __launch_bounds__(threads)
    forward_rows(double* __restrict__ losses, gpu::compute<T>* __restrict__ statistics,
                 const T* __restrict__ logits, int64_t apart, const int64_t* __restrict__ targets,
                 int64_t rows, int64_t n, int64_t ignore_index, double smoothing, gpu::Fault* faults,
                 int fault) {
  using C = gpu::compute<T>;
  constexpr int width = Pack<T>::count, row_threads = 32 * warps, groups = threads / row_threads;
  constexpr int at_once = 4;  // packs in flight
  const C infinity = static_cast<C>(INFINITY);
  __shared__ C space[32];
  __shared__ double space_f64[32];
  const int thread = threadIdx.x % row_threads;
  for (int64_t row = int64_t{blockIdx.x} * groups + threadIdx.x / row_threads; row < rows;
       row += int64_t{gridDim.x} * groups) {
    const int64_t target = targets[row];
    if (target == ignore_index || target < 0 || target >= n) {
      if (thread == 0) {
        losses[row] = 0;
        if (target != ignore_index) gpu::report(faults, fault, target, n);
      }
      continue;
    }
    const T* const x = logits + row * apart;
    const Cut cut = Cut::of(x, n);
    const Pack<T>* const packs = reinterpret_cast<const Pack<T>*>(x + cut.head);
    Seen<C> seen{-infinity};
    const auto take = [&](C value) {
      const C above = larger(seen.largest, value);
      // -inf - -inf would be NaN where nothing finite was seen yet.
      if (above != seen.largest) seen.sum *= exponential<T>(seen.largest - above);
      seen.largest = above;
      if (value > -infinity || value != value) seen.sum += exponential<T>(value - above);
      seen.total += value;
    };
    int64_t p = thread;
    for (; p + (at_once - 1) * row_threads < cut.packs; p += at_once * row_threads) {
      Pack<T> in[at_once];
#pragma unroll
      for (int k = 0; k < at_once; ++k) in[k] = packs[p + k * row_threads];
      C above = seen.largest;
#pragma unroll
      for (int k = 0; k < at_once; ++k)
#pragma unroll
        for (int j = 0; j < width; ++j) above = larger(above, gpu::widen(in[k].at[j]));
      if (above != seen.largest) seen.sum *= exponential<T>(seen.largest - above);
      seen.largest = above;
      const C from = above == -infinity ? C(0) : above;  // so that -inf adds 0
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        C sum = 0;
#pragma unroll
        for (int j = 0; j < width; ++j) sum += exponential<T>(gpu::widen(in[k].at[j]) - from);
        seen.sum += sum;
      }
      if (smoothing > 0)
#pragma unroll
        for (int k = 0; k < at_once; ++k)
#pragma unroll
          for (int j = 0; j < width; ++j) seen.total += gpu::widen(in[k].at[j]);
    }
    for (; p < cut.packs; p += row_threads) {
      const Pack<T> in = packs[p];
#pragma unroll
      for (int j = 0; j < width; ++j) take(gpu::widen(in.at[j]));
    }
    const int64_t tail = cut.head + cut.packs * width, outside = cut.head + n - tail;
    for (int64_t i = thread; i < outside; i += row_threads)
      take(gpu::widen(x[i < cut.head ? i : tail + i - cut.head]));

    const C largest = over_row<warps>(seen.largest, -infinity, space, Larger{});
    // 0 where all was -inf; a NaN stays one.
    const C scaled = seen.sum == 0 ? C(0) : seen.sum * exponential<T>(seen.largest - largest);
    const C sum = over_row<warps>(scaled, C(0), space, gpu::Plus{});
    // How far the target, or the smoothed mean of all classes, is below the largest.
    double below = static_cast<double>(largest) - static_cast<double>(gpu::widen(x[target]));
    if (smoothing > 0) {
      const double total = over_row<warps>(static_cast<double>(seen.total), 0.0, space_f64, gpu::Plus{}) /
                           static_cast<double>(n);
      below = (1 - smoothing) * below + smoothing * (static_cast<double>(largest) - total);
    }
    if (thread == 0) {
      statistics[2 * row] = largest;
      statistics[2 * row + 1] = sum;
      losses[row] = log(static_cast<double>(sum)) + below;
    }
  }
}

// One block: `count` gets the number of targets that are not ignored; with losses, loss gets their mean.
template <class C>
__global__ void __launch_bounds__(1024)
    mean_of_rows(C* loss, int64_t* count, const double* losses, const int64_t* targets, int64_t rows,
                 int64_t ignore_index) {
  __shared__ double space[32];
  __shared__ int64_t space_i64[32];
  double total = 0;
  int64_t counted = 0;
#pragma unroll 4
  for (int64_t row = threadIdx.x; row < rows; row += 1024) {
    if (losses) total += losses[row];
    counted += targets[row] != ignore_index;
  }
  total = gpu::block_sum(total, space);
  counted = gpu::block_sum(counted, space_i64);
  if (threadIdx.x > 0) return;
  if (count) *count = counted;
  if (loss) {
    const double mean = counted > 0 ? total / static_cast<double>(counted) : 0;
    *loss = static_cast<C>(mean);
  }
}

// dlogits may be logits: each element is read before it is written, by the same thread.
template <class T, int warps>
__global__ void __launch_bounds__(threads)
    backward_rows(T* dlogits, int64_t d_apart, const gpu::compute<T>* __restrict__ grad, const T* logits,
                  int64_t apart, const int64_t* __restrict__ targets,
                  const gpu::compute<T>* __restrict__ statistics, const int64_t* __restrict__ count,
                  int64_t rows, int64_t n, int64_t ignore_index, double smoothing) {
  using C = gpu::compute<T>;
  constexpr int width = Pack<T>::count, row_threads = 32 * warps, groups = threads / row_threads;
  constexpr int at_once = 4;
  const int thread = threadIdx.x % row_threads;
  const C weight = *grad / static_cast<C>(*count > 0 ? *count : 1);
  const C spread = static_cast<C>(smoothing / static_cast<double>(n)) * weight,
          rest = static_cast<C>(1 - smoothing) * weight;
  for (int64_t row = int64_t{blockIdx.x} * groups + threadIdx.x / row_threads; row < rows;
       row += int64_t{gridDim.x} * groups) {
    const int64_t target = targets[row];
    const T* const x = logits + row * apart;
    T* const dx = dlogits + row * d_apart;
    if (target == ignore_index || target < 0 || target >= n) {
      for (int64_t i = thread; i < n; i += row_threads) dx[i] = gpu::narrow<T>(C(0));
      continue;
    }
    const C largest = statistics[2 * row], scale = weight / statistics[2 * row + 1];
    const auto gradient = [&](T value) {
      return exponential<T>(gpu::widen(value) - largest) * scale - spread;
    };
    const Cut cut = Cut::of(x, n);
    const bool alike = reinterpret_cast<uintptr_t>(x) % 16 == reinterpret_cast<uintptr_t>(dx) % 16;
    const int64_t packs = alike ? cut.packs : 0;
    const Pack<T>* const from = reinterpret_cast<const Pack<T>*>(x + cut.head);
    Pack<T>* const to = reinterpret_cast<Pack<T>*>(dx + cut.head);
    for (int64_t p = thread; p < packs; p += at_once * row_threads) {
      Pack<T> in[at_once];
#pragma unroll
      for (int k = 0; k < at_once; ++k)
        if (p + k * row_threads < packs) in[k] = from[p + k * row_threads];
#pragma unroll
      for (int k = 0; k < at_once; ++k) {
        const int64_t at = p + k * row_threads;
        if (at >= packs) continue;
        Pack<T> out;
#pragma unroll
        for (int j = 0; j < width; ++j) out.at[j] = gpu::narrow<T>(gradient(in[k].at[j]));
        const int64_t hit = target - (cut.head + at * width);
        if (hit >= 0 && hit < width)
#pragma unroll
          for (int j = 0; j < width; ++j)
            if (j == hit) out.at[j] = gpu::narrow<T>(gradient(in[k].at[j]) - rest);
        to[at] = out;
      }
    }
    const int64_t tail = cut.head + packs * width, outside = cut.head + n - tail;
    for (int64_t i = thread; i < outside; i += row_threads) {
      const int64_t at = i < cut.head ? i : tail + i - cut.head;
      dx[at] = gpu::narrow<T>(gradient(x[at]) - (at == target ? rest : C(0)));
    }
  }
}

// Short rows have a warp each, long ones a block.
constexpr int64_t short_row = 2048;
constexpr int warps_of_block = threads / 32;

int target_fault() {
  static const int code = gpu::fault_code("cross_entropy", "target");
  return code;
}

void forward(Tensor& loss, Tensor& statistics, const Tensor& logits, const Tensor& targets,
             int64_t ignore_index, double smoothing) {
  const int64_t rows = logits.size(0), n = logits.size(1);
  const cudaStream_t stream = gpu::stream_of(logits);
  const int fault = target_fault();
  gpu::Fault* const faults = gpu::fault_slot(logits.device());
  Tensor losses = Tensor::empty({rows}, f64, logits.device());
  gpu::dispatch_floating(logits.dtype(), "cross_entropy", [&](auto zero) {
    using T = decltype(zero);
    double* const to = gpu::write<double>(losses);
    const auto launch = [&](auto kernel, int rows_a_block) {
      if (rows == 0) return;
      kernel<<<gpu::blocks_for(rows, rows_a_block), threads, 0, stream>>>(
          to, gpu::write<gpu::compute<T>>(statistics), gpu::read<T>(logits), logits.strides()[0],
          gpu::read<int64_t>(targets), rows, n, ignore_index, smoothing, faults, fault);
      gpu::check_launch("cross_entropy");
    };
    if (n <= short_row)
      launch(forward_rows<T, 1>, warps_of_block);
    else
      launch(forward_rows<T, warps_of_block>, 1);
    mean_of_rows<gpu::compute<T>><<<1, 1024, 0, stream>>>(gpu::write<gpu::compute<T>>(loss), nullptr, to,
                                                          gpu::read<int64_t>(targets), rows, ignore_index);
    gpu::check_launch("cross_entropy");
  });
}

void backward(Tensor& dlogits, const Tensor& grad, const Tensor& logits, const Tensor& targets,
              const Tensor& statistics, int64_t ignore_index, double smoothing) {
  const int64_t rows = logits.size(0), n = logits.size(1);
  if (logits.numel() == 0) return;
  const cudaStream_t stream = gpu::stream_of(logits);
  Tensor count = Tensor::empty({}, i64, logits.device());
  gpu::dispatch_floating(logits.dtype(), "cross_entropy", [&](auto zero) {
    using T = decltype(zero);
    int64_t* const counted = gpu::write<int64_t>(count);
    mean_of_rows<gpu::compute<T>>
        <<<1, 1024, 0, stream>>>(nullptr, counted, nullptr, gpu::read<int64_t>(targets), rows, ignore_index);
    gpu::check_launch("cross_entropy");
    const auto launch = [&](auto kernel, int rows_a_block) {
      kernel<<<gpu::blocks_for(rows, rows_a_block), threads, 0, stream>>>(
          gpu::write<T>(dlogits), dlogits.strides()[0], gpu::read<gpu::compute<T>>(grad),
          gpu::read<T>(logits), logits.strides()[0], gpu::read<int64_t>(targets),
          gpu::read<gpu::compute<T>>(statistics), counted, rows, n, ignore_index, smoothing);
      gpu::check_launch("cross_entropy");
    };
    if (n <= short_row)
      launch(backward_rows<T, 1>, warps_of_block);
    else
      launch(backward_rows<T, warps_of_block>, 1);
  });
}

const CudaKernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, int64_t, double)> forward_kernel{
    "cross_entropy.forward", forward};
const CudaKernel<void(Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, double)>
    backward_kernel{"cross_entropy.backward", backward};

}  // namespace

}  // namespace torus
