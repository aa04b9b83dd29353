#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "torus/core/kernel.h"
#include "torus/core/strided.h"
#include "torus/core/vector_math.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

int64_t count_targets(const Tensor& targets, int64_t ignore_index) {
  const int64_t* target = targets.data<int64_t>();
  return targets.numel() - std::count(target, target + targets.numel(), ignore_index);
}

// All tensors are contiguous: logits [N, V], whose rows may be apart, targets [N]. statistics [N, 2] gets the
// largest logit of each row and the sum of exp(logit - largest): unlike their lse, they keep full accuracy
// when logits are large.
void cross_entropy_forward_cpu(Tensor& loss, Tensor& statistics, const Tensor& logits, const Tensor& targets,
                               int64_t ignore_index, double smoothing) {
  const int64_t rows = logits.size(0), n = logits.size(1);
  const int64_t* const target = targets.data<int64_t>();
  for (int64_t row = 0; row < rows; ++row)
    check(target[row] == ignore_index || (target[row] >= 0 && target[row] < n), Error::Kind::Value,
          "[cross_entropy] target ", target[row], " at position ", row, " is outside [0, ", n,
          ") and not ignore_index ", ignore_index);
  dispatch_floating(logits.dtype(), "cross_entropy", [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    const T* const x = logits.data<T>();
    const int64_t apart = logits.strides()[0];
    C* const statistics_data = statistics.mutable_data<C>();
    std::vector<double> losses(static_cast<size_t>(rows), 0);
    parallel_for(0, rows, elementwise_grain / (4 * n + 1) + 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        if (target[row] == ignore_index) continue;
        const T* from = x + row * apart;
        const C largest = vmath::largest_of(from, n), sum = vmath::sum_of_exponentials(from, n, largest);
        statistics_data[2 * row] = largest;
        statistics_data[2 * row + 1] = sum;
        // How far the target, or the smoothed mean of all classes, is below the largest.
        double below = static_cast<double>(largest) - static_cast<double>(C(from[target[row]]));
        if (smoothing > 0) {
          C total = 0;
#pragma omp simd reduction(+ : total)
          for (int64_t i = 0; i < n; ++i) total += largest - C(from[i]);
          below = (1 - smoothing) * below + smoothing * (static_cast<double>(total) / static_cast<double>(n));
        }
        losses[static_cast<size_t>(row)] = std::log(static_cast<double>(sum)) + below;
      }
    });
    double total = 0;
    for (double one : losses) total += one;
    const int64_t count = count_targets(targets, ignore_index);
    *loss.mutable_data<C>() = static_cast<C>(count ? total / static_cast<double>(count) : 0);
  });
}

// dlogits = (softmax(logits) - (1 - smoothing) * one_hot(target) - smoothing / V) * grad / count, 0 in
// ignored rows. dlogits may be logits.
void cross_entropy_backward_cpu(Tensor& dlogits, const Tensor& grad, const Tensor& logits,
                                const Tensor& targets, const Tensor& statistics, int64_t ignore_index,
                                double smoothing) {
  const int64_t rows = logits.size(0), n = logits.size(1);
  const int64_t* const target = targets.data<int64_t>();
  const int64_t count = count_targets(targets, ignore_index);
  dispatch_floating(logits.dtype(), "cross_entropy", [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    T* const dx = dlogits.mutable_data<T>();
    const T* const x = logits.data<T>();
    const int64_t apart = logits.strides()[0], d_apart = dlogits.strides()[0];
    const C* const statistics_data = statistics.data<C>();
    const C spread = static_cast<C>(smoothing / static_cast<double>(n)), rest = static_cast<C>(1 - smoothing);
    const C weight = static_cast<C>(*grad.data<C>() / static_cast<C>(std::max<int64_t>(count, 1)));
    parallel_for(0, rows, elementwise_grain / (2 * n + 1) + 1, [=](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        T* to = dx + row * d_apart;
        if (target[row] == ignore_index) {
          std::fill_n(to, n, T(C(0)));
          continue;
        }
        const T* from = x + row * apart;
        const C largest = statistics_data[2 * row], inverse = 1 / statistics_data[2 * row + 1];
        const C hit = vmath::exp(C(from[target[row]]) - largest) * inverse;
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i)
          to[i] = static_cast<T>((vmath::exp(C(from[i]) - largest) * inverse - spread) * weight);
        to[target[row]] = static_cast<T>((hit - spread - rest) * weight);
      }
    });
  });
}

const Kernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, int64_t, double)> forward_kernel{
    "cross_entropy.forward", cross_entropy_forward_cpu};
const Kernel<void(Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t, double)>
    backward_kernel{"cross_entropy.backward", cross_entropy_backward_cpu};

}  // namespace

Variable cross_entropy(const Variable& logits, const Tensor& targets, int64_t ignore_index,
                       double smoothing) {
  check_defined("cross_entropy", "logits", logits);
  const ProfileScope scope("cross_entropy", ScopeKind::forward);
  check(logits.dim() >= 1 && logits.shape().slice(0, logits.dim() - 1) == targets.shape(), Error::Kind::Shape,
        "[cross_entropy] expected logits [..., V] and targets [...], got ", logits.shape(), " and ",
        targets.shape());
  check(is_floating(logits.dtype()), Error::Kind::DType, "[cross_entropy] logits must be floating, got ",
        logits.dtype());
  check(targets.dtype() == i64, Error::Kind::DType, "[cross_entropy] targets must be i64, got ",
        targets.dtype());
  check(targets.device() == logits.device(), Error::Kind::Device, "[cross_entropy] targets must be on ",
        logits.device(), " as logits, got ", targets.device());
  check(smoothing >= 0 && smoothing < 1, Error::Kind::Value,
        "[cross_entropy] smoothing must be in [0, 1), got ", smoothing);
  Tensor flat = as_rows(logits.value());
  if (flat.strides()[1] != 1 || flat.strides()[0] < flat.size(1)) flat = flat.contiguous();
  const Tensor wanted = targets.contiguous();
  const DType wide = logits.dtype() == f64 ? f64 : f32;
  Tensor loss = Tensor::empty({}, wide, logits.device());
  Tensor statistics = Tensor::empty({flat.size(0), 2}, wide, logits.device());
  forward_kernel(logits.device(), loss, statistics, flat, wanted, ignore_index, smoothing);
  // Saved: the logits, the targets and two numbers a row, from which the probabilities are made again.
  return record("cross_entropy", {logits}, loss,
                [ignore_index, smoothing, shape = logits.shape(), saved_logits = Saved(flat),
                 saved_targets = Saved(wanted),
                 saved_statistics = Saved(statistics)](const OutputGrads& grads) -> std::vector<Tensor> {
                  const Tensor& x = saved_logits.get();
                  // Logits that nobody else will read become their gradient: no second [N, V] tensor.
                  const bool reuse = !grads.keeps_graph() && x.storage().use_count() == 1;
                  Tensor dx = reuse ? x : Tensor::empty(x.shape(), x.dtype(), x.device());
                  backward_kernel(x.device(), dx, grads[0], x, saved_targets.get(), saved_statistics.get(),
                                  ignore_index, smoothing);
                  return {dx.reshape(shape)};
                });
}

}  // namespace torus
