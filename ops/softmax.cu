#include <algorithm>
#include <cmath>

#include "torus/core/cuda.h"

namespace torus {

namespace {

using namespace gpu;

constexpr int threads = 256;

template <class C>
__device__ C minus_infinity() {
  return -static_cast<C>(INFINITY);
}

// ------------------------------------------------------------------------------------- along the last axis

template <class T, int width>
struct alignas(width * sizeof(T)) Chunk {
  T at[width];
};

// N rows of one length, shared by `lanes` threads: a warp, or the whole block. Each thread keeps its first
// chunks in registers; what is beyond them is read again by every walk, from cache.
template <class T, int width, int N>
struct Rows {
  using C = compute<T>;
  static constexpr int kept = width > 1 ? 4 : 8;
  const T* from[N];
  int64_t length;
  int lane, lanes;
  C values[kept][N][width];

  __device__ void read(int64_t i, C (&into)[N][width]) const {
#pragma unroll
    for (int t = 0; t < N; ++t) {
      const auto chunk = *reinterpret_cast<const Chunk<T, width>*>(from[t] + i);
#pragma unroll
      for (int j = 0; j < width; ++j) into[t][j] = widen(chunk.at[j]);
    }
  }

  // To be called first.
  __device__ void load() {
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      const int64_t i = static_cast<int64_t>(k * lanes + lane) * width;
      if (i < length) read(i, values[k]);
    }
  }

  // Calls f(index of the first, values, are they kept) for each chunk of this thread. f may change the
  // values; of kept ones, later walks see it.
  template <class F>
  __device__ void each(const F& f) {
#pragma unroll
    for (int k = 0; k < kept; ++k) {
      const int64_t i = static_cast<int64_t>(k * lanes + lane) * width;
      if (i < length) f(i, values[k], std::true_type{});
    }
    for (int64_t i = static_cast<int64_t>(kept * lanes + lane) * width; i < length;
         i += int64_t{lanes} * width) {
      C rest[N][width];
      read(i, rest);
      f(i, rest, std::false_type{});
    }
  }
};

template <class T, int width>
__device__ void store(T* to, const compute<T> (&values)[width]) {
  Chunk<T, width> chunk;
#pragma unroll
  for (int j = 0; j < width; ++j) chunk.at[j] = narrow<T>(values[j]);
  *reinterpret_cast<Chunk<T, width>*>(to) = chunk;
}

template <class C, class Op>
__device__ C reduce_lanes(C value, C identity, int lanes, C* space, Op op) {
  return lanes == 32 ? warp_reduce(value, op) : block_reduce(value, identity, space, op);
}

// Which row a thread works on, and how many rows the grid works on at once.
struct Place {
  int64_t first, step;
  int lane;
  __device__ explicit Place(int lanes)
      : first(int64_t{blockIdx.x} * (blockDim.x / lanes) + threadIdx.x / lanes),
        step(int64_t{gridDim.x} * (blockDim.x / lanes)),
        lane(threadIdx.x % lanes) {}
};

enum class Result { softmax, log_softmax, logsumexp };

// y has the shape of x, or one element a row for logsumexp.
template <class T, int width, Result result>
__global__ void __launch_bounds__(threads)
    forward_rows(T* y, const T* x, int64_t rows, int64_t length, int lanes) {
  using C = compute<T>;
  __shared__ C space[32];
  const Place place(lanes);
  for (int64_t i = place.first; i < rows; i += place.step) {
    Rows<T, width, 1> row{{x + i * length}, length, place.lane, lanes};
    row.load();
    C largest = minus_infinity<C>();
    row.each([&](int64_t, const C(&v)[1][width], auto) {
#pragma unroll
      for (int j = 0; j < width; ++j) largest = Larger{}(largest, v[0][j]);
    });
    largest = reduce_lanes(largest, minus_infinity<C>(), lanes, space, Larger{});
    const C shift = result == Result::logsumexp && std::isinf(largest) ? C(0) : largest;
    C sum = 0;
    row.each([&](int64_t, C(&v)[1][width], auto) {
#pragma unroll
      for (int j = 0; j < width; ++j) {
        const C e = std::exp(v[0][j] - shift);
        sum += e;
        if (result == Result::softmax) v[0][j] = e;
      }
    });
    sum = reduce_lanes(sum, C(0), lanes, space, Plus{});
    if constexpr (result == Result::logsumexp) {
      if (place.lane == 0) y[i] = narrow<T>(shift + std::log(sum));
    } else {
      const C last = result == Result::softmax ? 1 / sum : std::log(sum);
      row.each([&](int64_t at, const C(&v)[1][width], auto kept) {
        C to[width];
#pragma unroll
        for (int j = 0; j < width; ++j) {
          if constexpr (result == Result::log_softmax)
            to[j] = (v[0][j] - shift) - last;
          else
            to[j] = (kept ? v[0][j] : std::exp(v[0][j] - shift)) * last;
        }
        store<T, width>(y + i * length + at, to);
      });
    }
  }
}

// From the result y and its gradient g.
template <class T, int width, bool logarithm>
__global__ void __launch_bounds__(threads)
    backward_rows(T* dx, const T* y, const T* g, int64_t rows, int64_t length, int lanes) {
  using C = compute<T>;
  __shared__ C space[32];
  const Place place(lanes);
  for (int64_t i = place.first; i < rows; i += place.step) {
    Rows<T, width, 2> row{{y + i * length, g + i * length}, length, place.lane, lanes};
    row.load();
    C sum = 0;
    row.each([&](int64_t, const C(&v)[2][width], auto) {
#pragma unroll
      for (int j = 0; j < width; ++j) sum += logarithm ? v[1][j] : v[1][j] * v[0][j];
    });
    sum = reduce_lanes(sum, C(0), lanes, space, Plus{});
    row.each([&](int64_t at, const C(&v)[2][width], auto) {
      C to[width];
#pragma unroll
      for (int j = 0; j < width; ++j)
        to[j] = logarithm ? v[1][j] - std::exp(v[0][j]) * sum : v[0][j] * (v[1][j] - sum);
      store<T, width>(dx + i * length + at, to);
    });
  }
}

// --------------------------------------------------------------------------------------- along another axis

// x is [outer, length, inner]. Threads lie along the columns; `blockDim.y` of them share one, and meet in
// `space`, which holds a C a thread.
template <class C, class Op>
__device__ C reduce_column(C value, C* space, Op op) {
  if (blockDim.y == 1) return value;
  space[threadIdx.y * blockDim.x + threadIdx.x] = value;
  __syncthreads();
  C result = space[threadIdx.x];
  for (unsigned row = 1; row < blockDim.y; ++row) result = op(result, space[row * blockDim.x + threadIdx.x]);
  __syncthreads();
  return result;
}

// Columns beyond the last do as the last does, so that all threads meet, but write nothing.
struct Column {
  int64_t index, offset;
  bool real;
  __device__ Column(int64_t first, int64_t columns, int64_t length, int64_t inner) {
    index = first + threadIdx.x;
    real = index < columns;
    if (!real) index = columns - 1;
    offset = index / inner * length * inner + index % inner;
  }
};

template <class T, Result result>
__global__ void __launch_bounds__(threads)
    forward_columns(T* y, const T* x, int64_t columns, int64_t length, int64_t inner) {
  using C = compute<T>;
  __shared__ C space[threads];
  for (int64_t first = int64_t{blockIdx.x} * blockDim.x; first < columns;
       first += int64_t{gridDim.x} * blockDim.x) {
    const Column column(first, columns, length, inner);
    const T* const from = x + column.offset;
    C largest = minus_infinity<C>();
    for (int64_t i = threadIdx.y; i < length; i += blockDim.y)
      largest = Larger{}(largest, widen(from[i * inner]));
    largest = reduce_column(largest, space, Larger{});
    const C shift = result == Result::logsumexp && std::isinf(largest) ? C(0) : largest;
    C sum = 0;
    for (int64_t i = threadIdx.y; i < length; i += blockDim.y)
      sum += std::exp(widen(from[i * inner]) - shift);
    sum = reduce_column(sum, space, Plus{});
    if (!column.real) continue;
    if constexpr (result == Result::logsumexp) {
      if (threadIdx.y == 0) y[column.index] = narrow<T>(shift + std::log(sum));
    } else {
      T* const to = y + column.offset;
      const C last = result == Result::softmax ? 1 / sum : std::log(sum);
      for (int64_t i = threadIdx.y; i < length; i += blockDim.y) {
        const C shifted = widen(from[i * inner]) - shift;
        to[i * inner] = narrow<T>(result == Result::softmax ? std::exp(shifted) * last : shifted - last);
      }
    }
  }
}

template <class T, bool logarithm>
__global__ void __launch_bounds__(threads)
    backward_columns(T* dx, const T* y, const T* g, int64_t columns, int64_t length, int64_t inner) {
  using C = compute<T>;
  __shared__ C space[threads];
  for (int64_t first = int64_t{blockIdx.x} * blockDim.x; first < columns;
       first += int64_t{gridDim.x} * blockDim.x) {
    const Column column(first, columns, length, inner);
    C sum = 0;
    for (int64_t i = threadIdx.y; i < length; i += blockDim.y) {
      const int64_t at = column.offset + i * inner;
      sum += logarithm ? widen(g[at]) : widen(g[at]) * widen(y[at]);
    }
    sum = reduce_column(sum, space, Plus{});
    if (!column.real) continue;
    for (int64_t i = threadIdx.y; i < length; i += blockDim.y) {
      const int64_t at = column.offset + i * inner;
      const C result = widen(y[at]), grad = widen(g[at]);
      dx[at] = narrow<T>(logarithm ? grad - std::exp(result) * sum : result * (grad - sum));
    }
  }
}

// ------------------------------------------------------------------------------------------------ launching

// A contiguous tensor seen as [outer, length, inner].
struct Slices {
  int64_t outer = 1, length, inner = 1;
  Slices(const Shape& shape, int axis) : length(shape[axis]) {
    for (int i = 0; i < axis; ++i) outer *= shape[i];
    for (int i = axis + 1; i < shape.dim(); ++i) inner *= shape[i];
  }
  int64_t columns() const { return outer * inner; }

  // Threads that share a row: a warp as long as it can keep a row in registers, which is where it is fastest.
  int lanes(int width) const { return length <= 32 * 4 * width ? 32 : threads; }
  unsigned row_blocks(int lanes) const { return blocks_for(outer, threads / lanes); }

  // Columns get 8 threads each unless they are many, or short.
  dim3 column_threads() const {
    return columns() >= 1 << 18 || length < 16 ? dim3(threads, 1) : dim3(threads / 8, 8);
  }
  unsigned column_blocks() const { return blocks_for(columns(), static_cast<int>(column_threads().x)); }
};

// Calls f(width) with the elements that a chunk may have: 16 bytes of them, or one.
template <class T, class F>
void with_width(bool packs, F&& f) {
  if (packs)
    f(std::integral_constant<int, Pack<T>::count>{});
  else
    f(std::integral_constant<int, 1>{});
}

template <Result result, class T>
void launch_forward(T* y, const T* x, const Slices& s, cudaStream_t stream) {
  if (s.inner > 1) {
    forward_columns<T, result>
        <<<s.column_blocks(), s.column_threads(), 0, stream>>>(y, x, s.columns(), s.length, s.inner);
    return;
  }
  const bool packs =
      s.length % Pack<T>::count == 0 && is_aligned(x) && (result == Result::logsumexp || is_aligned(y));
  with_width<T>(packs, [&](auto width) {
    const int lanes = s.lanes(width);
    forward_rows<T, width(), result>
        <<<s.row_blocks(lanes), threads, 0, stream>>>(y, x, s.outer, s.length, lanes);
  });
}

template <bool logarithm, class T>
void launch_backward(T* dx, const T* y, const T* g, const Slices& s, cudaStream_t stream) {
  if (s.inner > 1) {
    backward_columns<T, logarithm>
        <<<s.column_blocks(), s.column_threads(), 0, stream>>>(dx, y, g, s.columns(), s.length, s.inner);
    return;
  }
  const bool packs = s.length % Pack<T>::count == 0 && is_aligned(dx) && is_aligned(y) && is_aligned(g);
  with_width<T>(packs, [&](auto width) {
    const int lanes = s.lanes(width);
    backward_rows<T, width(), logarithm>
        <<<s.row_blocks(lanes), threads, 0, stream>>>(dx, y, g, s.outer, s.length, lanes);
  });
}

void softmax_forward(Tensor& y, const Tensor& x, int axis, bool logarithm) {
  if (x.numel() == 0) return;
  const cudaStream_t stream = stream_of(x);
  const Slices slices(x.shape(), axis);
  gpu::dispatch_floating(x.dtype(), "softmax", [&](auto zero) {
    using T = decltype(zero);
    if (logarithm)
      launch_forward<Result::log_softmax>(write<T>(y), read<T>(x), slices, stream);
    else
      launch_forward<Result::softmax>(write<T>(y), read<T>(x), slices, stream);
    check_launch("softmax");
  });
}

void softmax_backward(Tensor& dx, const Tensor& y, const Tensor& g, int axis, bool logarithm) {
  if (y.numel() == 0) return;
  const cudaStream_t stream = stream_of(y);
  const Slices slices(y.shape(), axis);
  gpu::dispatch_floating(y.dtype(), "softmax", [&](auto zero) {
    using T = decltype(zero);
    if (logarithm)
      launch_backward<true>(write<T>(dx), read<T>(y), read<T>(g), slices, stream);
    else
      launch_backward<false>(write<T>(dx), read<T>(y), read<T>(g), slices, stream);
    check_launch("softmax.backward");
  });
}

void logsumexp_forward(Tensor& y, const Tensor& x, int axis) {
  if (y.numel() == 0) return;
  if (x.numel() == 0) {
    y.fill_(-INFINITY);
    return;
  }
  const cudaStream_t stream = stream_of(x);
  const Slices slices(x.shape(), axis);
  gpu::dispatch_floating(x.dtype(), "logsumexp", [&](auto zero) {
    using T = decltype(zero);
    launch_forward<Result::logsumexp>(write<T>(y), read<T>(x), slices, stream);
    check_launch("logsumexp");
  });
}

struct LogsumexpBackward {
  template <class C>
  __device__ C operator()(C dy, C x, C y) const {
    return y == minus_infinity<C>() ? C(0) : dy * std::exp(x - y);
  }
};

const CudaKernel<void(Tensor&, const Tensor&, int, bool)> forward_kernel{"softmax.forward", softmax_forward};
const CudaKernel<void(Tensor&, const Tensor&, const Tensor&, int, bool)> backward_kernel{"softmax.backward",
                                                                                         softmax_backward};
const CudaKernel<void(Tensor&, const Tensor&, int)> logsumexp_kernel{"logsumexp.forward", logsumexp_forward};
const CudaKernel<void(Tensor&, const Tensor&, const Tensor&, const Tensor&)> logsumexp_backward_kernel{
    "logsumexp.backward", gpu::map<LogsumexpBackward>};

}  // namespace

}  // namespace torus
