#include <cstring>

#include "torus/core/cuda.h"

namespace torus {

namespace {

using namespace gpu;

constexpr int threads = 256;

// Axes of x and y, where element i of y along an axis is element i - before of x. An axis along which nothing
// moves is joined to the one before it where both lie in one line.
struct Moves {
  int axes = 0;
  int64_t y_size[Shape::max_axes], x_size[Shape::max_axes], before[Shape::max_axes];
  int64_t y_step[Shape::max_axes], x_step[Shape::max_axes];

  Moves(const Tensor& y, const Tensor& x, const Shape& shift, bool around) {
    for (int axis = 0; axis < y.dim(); ++axis) {
      const int64_t size = x.size(axis), to = y.size(axis), y_along = y.strides()[axis],
                    x_along = x.strides()[axis];
      const int64_t by = around && size > 0 ? (shift[axis] % size + size) % size : shift[axis];
      const bool still = by == 0 && size == to;
      if (still && size == 1) continue;
      const int last = axes - 1;
      if (still && axes > 0 && y_step[last] == y_along * size && x_step[last] == x_along * size) {
        y_size[last] *= size, x_size[last] *= size, before[last] *= size;
        y_step[last] = y_along, x_step[last] = x_along;
      } else {
        y_size[axes] = to, x_size[axes] = size, before[axes] = by;
        y_step[axes] = y_along, x_step[axes] = x_along;
        ++axes;
      }
    }
  }

  // Whether all can move `width` elements at a time.
  bool divides(int64_t width) const {
    if (axes == 0) return false;
    const int last = axes - 1;
    bool fits = y_step[last] == 1 && x_step[last] == 1 && y_size[last] % width == 0 &&
                x_size[last] % width == 0 && before[last] % width == 0;
    for (int axis = 0; axis < last; ++axis)
      fits = fits && y_step[axis] % width == 0 && x_step[axis] % width == 0;
    return fits;
  }
  void divide(int64_t width) {
    const int last = axes - 1;
    y_size[last] /= width, x_size[last] /= width, before[last] /= width;
    for (int axis = 0; axis < last; ++axis) y_step[axis] /= width, x_step[axis] /= width;
  }
};

// index becomes its place along an axis of `size`, the innermost yet; the rest goes on to the axes before.
__device__ int64_t split_off(int64_t& index, int64_t size, bool small) {
  const int64_t rest = small ? static_cast<uint32_t>(index) / static_cast<uint32_t>(size) : index / size;
  const int64_t place = index - rest * size;
  index = rest;
  return place;
}

template <class T>
__global__ void move_places(T* y, const T* x, const __grid_constant__ Moves moves, int64_t count, bool around,
                            T value) {
  const bool small = count <= 0x7fffffff;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    int64_t rest = i, to = 0, from = 0;
    bool inside = true;
    for (int axis = moves.axes - 1; axis >= 0; --axis) {
      const int64_t at = split_off(rest, moves.y_size[axis], small), size = moves.x_size[axis];
      int64_t source = at - moves.before[axis];
      if (around) {
        if (source < 0) source += size;
        if (source >= size) source %= size;
      }
      inside = inside && source >= 0 && source < size;
      to += at * moves.y_step[axis];
      from += source * moves.x_step[axis];
    }
    y[to] = inside ? x[from] : value;
  }
}

void pad(Tensor& y, const Tensor& x, const Shape& before, bool around, double value) {
  if (y.numel() == 0) return;
  const cudaStream_t stream = stream_of(y);
  Moves moves(y, x, before, around);
  gpu::dispatch(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const to = write<T>(y);
    const T* const from = read<T>(x);
    constexpr int width = Pack<T>::count;
    Pack<T> values;
    for (T& element : values.at) element = narrow<T>(value);
    const auto launch = [&](auto element, int64_t count) {
      using Moved = decltype(element);
      std::memcpy(&element, &values, sizeof element);
      move_places<<<blocks_for(count, threads), threads, 0, stream>>>(
          reinterpret_cast<Moved*>(to), reinterpret_cast<const Moved*>(from), moves, count, around, element);
      check_launch("pad");
    };
    if (is_aligned(to) && is_aligned(from) && moves.divides(width)) {
      moves.divide(width);
      launch(uint4{}, y.numel() / width);
    } else {
      launch(bits<T>{}, y.numel());
    }
  });
}

// dx = the sum of its images in dy, in a fixed order. Of `moves`, y is dy and x is dx.
template <class T>
__global__ void add_images(T* dx, const T* dy, const __grid_constant__ Moves moves, int64_t count) {
  const bool small = count <= 0x7fffffff;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    int64_t rest = i, to = 0, from = 0, images = 1, images_along[Shape::max_axes];
    for (int axis = moves.axes - 1; axis >= 0; --axis) {
      const int64_t size = moves.x_size[axis], at = split_off(rest, size, small);
      int64_t first = at + moves.before[axis];
      if (first >= size) first -= size;
      to += at * moves.x_step[axis];
      from += first * moves.y_step[axis];
      images_along[axis] = (moves.y_size[axis] - 1 - first) / size + 1;
      images *= images_along[axis];
    }
    compute<T> sum = 0;
    for (int64_t image = 0; image < images; ++image) {
      int64_t left = image, at = from;
      for (int axis = moves.axes - 1; axis >= 0 && left > 0; --axis)
        at += split_off(left, images_along[axis], false) * moves.x_size[axis] * moves.y_step[axis];
      sum += widen(dy[at]);
    }
    dx[to] = narrow<T>(sum);
  }
}

void around_backward(Tensor& dx, const Tensor& dy, const Shape& before) {
  if (dx.numel() == 0) return;
  const cudaStream_t stream = stream_of(dx);
  const Moves moves(dy, dx, before, true);
  gpu::dispatch_floating(dx.dtype(), "pad", [&](auto zero) {
    using T = decltype(zero);
    add_images<<<blocks_for(dx.numel(), threads), threads, 0, stream>>>(write<T>(dx), read<T>(dy), moves,
                                                                        dx.numel());
    check_launch("pad.around_backward");
  });
}

const CudaKernel<void(Tensor&, const Tensor&, const Shape&, bool, double)> pad_kernel{"pad", pad};
const CudaKernel<void(Tensor&, const Tensor&, const Shape&)> around_backward_kernel{"pad.around_backward",
                                                                                    around_backward};

}  // namespace

}  // namespace torus
