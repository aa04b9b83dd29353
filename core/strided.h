// Walking several strided tensors of one shape together. For kernels on the CPU; not installed.
#pragma once

#include <algorithm>
#include <array>

#include "torus/core/parallel.h"
#include "torus/core/tensor.h"

namespace torus {

/// Calls f(offsets, steps, count) for runs that cover every index of `shape` once: element i of a run is at
/// offsets[t] + i * steps[t] of tensor t. Axes that lie in one line in all tensors are joined, so contiguous
/// tensors come as few long runs. Threads take disjoint runs, so at least one tensor must be free of overlap.
template <size_t N, class F>
void for_each_run(const Shape& shape, std::array<Shape, N> strides, int64_t grain, F&& f) {
  std::array<int64_t, Shape::max_axes> sizes{};
  std::array<std::array<int64_t, N>, Shape::max_axes> steps{};
  int axes = 0;
  for (int axis = 0; axis < shape.dim(); ++axis) {
    if (shape[axis] == 0) return;
    if (shape[axis] == 1) continue;
    const auto at = static_cast<size_t>(axes);
    bool joins = axes > 0;
    for (size_t t = 0; joins && t < N; ++t) joins = steps[at - 1][t] == strides[t][axis] * shape[axis];
    const size_t to = joins ? at - 1 : at;
    sizes[to] = joins ? sizes[to] * shape[axis] : shape[axis];
    for (size_t t = 0; t < N; ++t) steps[to][t] = strides[t][axis];
    if (!joins) ++axes;
  }
  if (axes == 0) {
    sizes[0] = 1;
    axes = 1;
  }
  const auto inner = static_cast<size_t>(axes - 1);
  const int64_t length = sizes[inner];
  int64_t total = length;
  for (size_t axis = 0; axis < inner; ++axis) total *= sizes[axis];

  // Split the flat index space; a part may begin and end inside a run.
  parallel_for(0, total, grain, [&](int64_t first, int64_t last) {
    while (first < last) {
      int64_t row = first / length;
      const int64_t start = first % length, count = std::min(length - start, last - first);
      std::array<int64_t, N> offsets{};
      for (size_t t = 0; t < N; ++t) offsets[t] = start * steps[inner][t];
      for (size_t axis = inner; axis-- > 0;) {
        const int64_t index = row % sizes[axis];
        row /= sizes[axis];
        for (size_t t = 0; t < N; ++t) offsets[t] += index * steps[axis][t];
      }
      f(offsets, steps[inner], count);
      first += count;
    }
  });
}

/// [..., C] as a matrix [N, C]; a view where the strides allow one.
inline Tensor as_rows(const Tensor& x) {
  return x.reshape({x.shape().slice(0, x.dim() - 1).numel(), x.shape().back()});
}

/// Elements below which a loop stays on one thread.
inline constexpr int64_t elementwise_grain = 16384;

}  // namespace torus
