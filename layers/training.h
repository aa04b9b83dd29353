// What surrounds training steps: accumulation, averages of the weights, mixed precision, evaluation.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "torus/autograd/tape.h"
#include "torus/layers/module.h"
#include "torus/ops/ops.h"

namespace torus {

/// Adds the gradient of the mean of loss(0), ..., loss(count - 1) into the leaves, and returns that mean. One
/// tape after another, so memory is that of one loss. `scale` multiplies the gradients, not the result.
double backward_mean(int64_t count, const std::function<Variable(int64_t)>& loss, double scale = 1);
/// The same for a mean weighed by `weights`, one a loss; of weight 0 none is computed, and no weight at all
/// gives 0. A batch equals its parts only if each mean loss is weighed by the targets that count in it:
/// `counted_targets`.
double backward_mean(const std::vector<double>& weights, const std::function<Variable(int64_t)>& loss,
                     double scale = 1);
/// How many targets (i64) are not `ignored`: of how many their loss is the mean. Waits for the device.
int64_t counted_targets(const Tensor& targets, int64_t ignored = ignore_none);

/// Mean of loss(batch) over a range of batches, each counted alike. Records nothing; the module and those
/// below it are not in training meanwhile. Throws Error{Value} without a batch.
template <class Batches, class Loss>
double mean_loss(Module& module, Batches&& batches, Loss&& loss);

/// Averages of parameters: average = decay * average + (1 - decay) * parameter at each update, from the
/// values that the parameters have when it is made. In f32 for 16-bit parameters. The update may be part of a
/// CapturedStep. A run that goes on needs
///
///     checkpoint.averages = average.named_averages();  // before it is saved
///     average.restore(checkpoint.averages);            // after it was loaded
class ExponentialMovingAverage {
 public:
  ExponentialMovingAverage(std::vector<NamedParameter> parameters, double decay);
  /// After each step of the optimizer.
  void update();
  /// Lets the parameters have copies of their averages, say to evaluate, and then their own values again, bit
  /// for bit. Throws Error{Value} where they have them already. What is written to a parameter in between, as
  /// by a step of an optimizer, would be lost: swap_out then throws Error{Version}, after it has swapped.
  void swap_in();
  void swap_out();
  /// One entry a parameter, in the order given; updated in place.
  const std::vector<Tensor>& averages() const { return averages_; }
  /// The same by name.
  std::map<std::string, Tensor> named_averages() const;
  /// Sets the averages to copies of these, converted. Throws Error{Value}, before it changes anything, where
  /// they are of other names or shapes.
  void restore(const std::map<std::string, Tensor>& averages);

 private:
  std::vector<NamedParameter> parameters_;
  double decay_;
  std::vector<Tensor> averages_;
  struct Swapped {
    Tensor own, lent;
    uint64_t version;  // of what is lent
  };
  std::vector<Swapped> swapped_;  // while the averages are in; empty otherwise
};

/// f32 masters, and f32 gradients, of a model's 16-bit parameters. Optimizers keep masters of their own;
/// these serve where the gradients of several backward passes are to be added up in f32 (or seen in f32). The
/// optimizer is made from `masters()`:
///
///     GPT model({.dtype = bf16});
///     MasterWeights weights(model.named_parameters());
///     AdamW optimizer(weights.masters());
///     ...
///     for (...) {
///       tape.backward(loss);
///       weights.take_gradients(1.0 / count);
///     }
///     optimizer.step();
///     weights.publish();
///     optimizer.zero_grad();
///
/// The master of a parameter of f32 or f64 shares its memory.
class MasterWeights {
 public:
  explicit MasterWeights(std::vector<NamedParameter> parameters);
  const std::vector<NamedParameter>& masters() const { return masters_; }
  /// Adds the gradients, multiplied by `factor`, to those of the masters, and drops the model's.
  void take_gradients(double factor = 1);
  /// Rounds the masters into the model.
  void publish();

 private:
  std::vector<NamedParameter> parameters_, masters_;
};

struct LossScaleOptions {
  double initial = 32768;  // the largest power of two in f16
  double growth = 2;
  int64_t interval = 2000;  // good steps after which it grows
};

/// A factor for the gradients of f16, so that small ones do not vanish. Goes down when one is infinite:
///
///     LossScale scale({}, device);
///     ...
///     tape.backward(loss, {.seed = scale.tensor().to(loss.dtype())});
///     const Tensor norm = grad_norm(model.parameters());
///     optimizer.step({.grad_norm = norm, .max_norm = 1, .loss_scale = scale.tensor()});
///     scale.update(norm);
///     optimizer.zero_grad();
///
/// On CUDA the scale lives in device memory: only `value` and the update by a bool make the host wait.
class LossScale {
 public:
  explicit LossScale(const LossScaleOptions& options = {}, Device device = cpu);
  double value() const { return tensor().item(); }
  /// One element of f64.
  Tensor tensor() const { return state_.select(0, 0); }
  /// After each step, given the norm of its gradients. If it is not finite, the step was skipped and the
  /// scale is divided by `growth`; after `interval` good steps in line, multiplied.
  void update(const Tensor& grad_norm);
  /// [2] of f64, the scale and the good steps since it changed: what a run that goes on needs.
  Tensor state() const { return state_; }
  void set_state(const Tensor& state) { state_.copy_(state); }
  /// The same by the host: whether the gradients are all finite, which is returned.
  bool update(bool finite);

 private:
  LossScaleOptions options_;
  Tensor state_;  // f64 [2]: the scale, and good steps since it last changed
};

namespace detail {

/// While alive, a module and those below it are not in training, and nothing records.
class Evaluating {
 public:
  explicit Evaluating(Module& module) {
    for (Module* each : module.modules()) training_.emplace_back(each, each->training());
    module.train(false);
  }
  ~Evaluating() {
    for (const auto& [module, training] : training_) module->train(training);  // parents first
  }
  Evaluating(const Evaluating&) = delete;
  Evaluating& operator=(const Evaluating&) = delete;

 private:
  std::vector<std::pair<Module*, bool>> training_;
  NoGrad only_values_;
};

}  // namespace detail

template <class Batches, class Loss>
double mean_loss(Module& module, Batches&& batches, Loss&& loss) {
  const detail::Evaluating evaluating(module);
  double total = 0;
  int64_t count = 0;
  for (const auto& batch : batches) {
    total += loss(batch).item();
    ++count;
  }
  check(count > 0, Error::Kind::Value, "[mean_loss] expected at least one batch, got none");
  return total / static_cast<double>(count);
}

}  // namespace torus
