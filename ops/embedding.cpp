#include <algorithm>

#include "torus/core/kernel.h"
#include "torus/core/strided.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// All tensors are contiguous: y [N, C], weight [V, C], indices [N].
void embedding_forward_cpu(Tensor& y, const Tensor& weight, const Tensor& indices) {
  const int64_t n = indices.numel(), vocabulary = weight.size(0), width = weight.size(1);
  const int64_t* const index = indices.data<int64_t>();
  for (int64_t i = 0; i < n; ++i)
    check(index[i] >= 0 && index[i] < vocabulary, Error::Kind::Value, "[embedding] index ", index[i],
          " at position ", i, " is outside [0, ", vocabulary, ")");
  dispatch_floating(weight.dtype(), "embedding", [&](auto zero) {
    using T = decltype(zero);
    T* const to = y.mutable_data<T>();
    const T* const from = weight.data<T>();
    parallel_for(0, n, elementwise_grain / (width + 1) + 1, [=](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) std::copy_n(from + index[i] * width, width, to + i * width);
    });
  });
}

// dw [V, C] = the sums of the rows of g [N, C] by index, and of what it holds if `adds`. Each thread owns
// channels and takes the rows in order, so the bits do not depend on the thread count.
void embedding_backward_cpu(Tensor& dw, const Tensor& g, const Tensor& indices, bool adds) {
  const int64_t n = indices.numel(), width = dw.size(1);
  constexpr int64_t channels = 16;  // owned together: a cache line of floats
  const int64_t* const index = indices.data<int64_t>();
  Tensor sums = Tensor::zeros(dw.shape(), dw.dtype() == f64 ? f64 : f32);
  dispatch_floating(dw.dtype(), "embedding", [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    C* const to = sums.mutable_data<C>();
    const T* const from = g.data<T>();
    parallel_for(0, (width + channels - 1) / channels, elementwise_grain / (n * channels + 1) + 1,
                 [=](int64_t first, int64_t last) {
                   const int64_t begin = first * channels, end = std::min(last * channels, width);
                   for (int64_t i = 0; i < n; ++i) {
                     C* sum = to + index[i] * width;
                     const T* with = from + i * width;
                     for (int64_t j = begin; j < end; ++j) sum[j] += C(with[j]);
                   }
                 });
    T* const dw_data = dw.mutable_data<T>();
    parallel_for(0, dw.numel(), elementwise_grain, [=](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        dw_data[i] = static_cast<T>(adds ? C(dw_data[i]) + to[i] : to[i]);
    });
  });
}

const Kernel<void(Tensor&, const Tensor&, const Tensor&)> forward_kernel{"embedding.forward",
                                                                         embedding_forward_cpu};
const Kernel<void(Tensor&, const Tensor&, const Tensor&, bool)> backward_kernel{"embedding.backward",
                                                                                embedding_backward_cpu};

}  // namespace

Variable embedding(const Variable& weight, const Tensor& indices) {
  check_defined("embedding", "weight", weight);
  const ProfileScope scope("embedding", ScopeKind::forward);
  check(weight.dim() == 2, Error::Kind::Shape, "[embedding] weight must be [V, C], got ", weight.shape());
  check(is_floating(weight.dtype()), Error::Kind::DType, "[embedding] weight must be floating, got ",
        weight.dtype());
  check(indices.dtype() == i64, Error::Kind::DType, "[embedding] indices must be i64, got ", indices.dtype());
  check(indices.device() == weight.device(), Error::Kind::Device, "[embedding] indices must be on ",
        weight.device(), " as weight, got ", indices.device());
  Shape shape = indices.shape();
  shape.push_back(weight.size(1));
  const Tensor rows = indices.contiguous();
  Tensor y = Tensor::empty(shape, weight.dtype(), weight.device());
  forward_kernel(weight.device(), y, weight.value().contiguous(), rows);
  // Saved: the indices only.
  return record(
      "embedding", {weight}, y,
      [shape = weight.shape(), saved = Saved(rows)](const OutputGrads& grads) -> std::vector<Tensor> {
        Tensor dw = grads.sum(0);  // of a tied output layer, whose rows are mostly not among the indices
        const bool adds = dw.defined();
        if (!adds) dw = Tensor::empty(shape, grads[0].dtype(), grads[0].device());
        backward_kernel(dw.device(), dw, grads[0].contiguous(), saved.get(), adds);
        return {dw};
      });
}

}  // namespace torus
