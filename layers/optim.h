// Optimizers and what surrounds them: clipping, learning-rate schedules.
#pragma once

#include <functional>

#include "torus/layers/module.h"

namespace torus {

/// The usual rule of which parameters decay: matrices and embeddings do, biases and norms do not.
inline bool has_two_axes(const NamedParameter& entry) { return entry.parameter.dim() >= 2; }

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  std::function<bool(const NamedParameter&)> decays = has_two_axes;
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019). In step t of a parameter p with gradient
/// g:
///   p -= lr * weight_decay * p                                  where `decays`
///   m = beta1 * m + (1 - beta1) * g,   v = beta2 * v + (1 - beta2) * g^2
///   p -= lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
/// f32 and f64, with m and v as the parameter. The bits do not depend on the thread count.
class AdamW {
 public:
  /// Trains these; throws Error{DType} on 16-bit ones.
  explicit AdamW(std::vector<NamedParameter> parameters, const AdamWOptions& options = {});

  /// One step for every parameter that has a gradient; a parameter without one stays, and its t does not
  /// count on.
  void step();
  void zero_grad();
  void set_lr(double lr) { options_.lr = lr; }
  const AdamWOptions& options() const { return options_; }

  /// One entry a parameter, in the order given: what a checkpoint must hold.
  struct State {
    Tensor first, second;  // m and v, shaped as the parameter
    int64_t steps = 0;     // t
  };
  std::vector<State>& states() { return states_; }
  const std::vector<State>& states() const { return states_; }
  const std::vector<NamedParameter>& parameters() const { return parameters_; }

 private:
  std::vector<NamedParameter> parameters_;
  AdamWOptions options_;
  std::vector<State> states_;
};

/// Scales all gradients by max_norm / norm if the Euclidean norm of all of them together is larger than
/// max_norm. Returns the norm before. Summed in f64 in a fixed order, whatever the thread count. If the norm
/// is infinite or NaN the gradients stay as they are: the caller sees it in the result and should not step.
double clip_grad_norm(const std::vector<Parameter>& parameters, double max_norm);

/// Learning rate of step 0, 1, ...: rises linearly over `warmup` steps to `peak`, then falls along half a
/// cosine to `floor` at step `total`, and stays there.
double warmup_cosine(int64_t step, int64_t warmup, int64_t total, double peak, double floor = 0);

}  // namespace torus
