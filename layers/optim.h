// Optimizers and what surrounds them: clipping, learning-rate schedules.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "torus/layers/module.h"

namespace torus {

namespace optim {
struct StepItem;
struct StepNumbers;
}  // namespace optim

/// The usual rule of which parameters decay: matrices and embeddings do, biases and norms do not.
inline bool has_two_axes(const NamedParameter& entry) { return entry.parameter.dim() >= 2; }

/// What all parameters of a group share.
struct ParameterGroup {
  std::function<bool(const NamedParameter&)> contains;
  double lr_scale = 1;     // the learning rate is multiplied by it
  double decay_scale = 1;  // and so is the weight decay, of those that decay
};

struct StepOptions {
  /// The gradients' norm, as `grad_norm` gives it. If it is infinite or NaN nothing is stepped, and no t
  /// counts on; on CUDA the device decides, and the host waits for nothing.
  Tensor grad_norm = {};
  /// Gradients are scaled so that their norm, with the factors below, is at most this.
  double max_norm = std::numeric_limits<double>::infinity();
  /// Multiplies the gradients, say 1 / the number of backward passes that were added up.
  double grad_scale = 1;
  /// Divides the gradients: `LossScale::tensor()`, if the loss was scaled.
  Tensor loss_scale = {};
};

/// What trains parameters, all of them on one device. A 16-bit parameter has a master in f32, made from it,
/// that is stepped; the parameter is the master rounded (Micikevicius et al., 2018). So training in 16 bits
/// is
///
///     GPT model({.dtype = bf16});
///     AdamW optimizer(model.named_parameters());
///     ...
///     tape.backward(loss);
///     optimizer.step({.grad_norm = grad_norm(model.parameters()), .max_norm = 1});
///     optimizer.zero_grad();
///
/// The state is kept in the dtype that is stepped. Bits are the same for any thread count. A parameter decays
/// where `decays` says so; the first of `groups` that contains it scales its learning rate and decay. On CUDA
/// a step is a few kernels however many parameters there are; captured, it goes on with `lr` and t as they
/// are at each replay, as long as this object lives.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// One step for every parameter that has a gradient; a parameter without one stays, and its t does not
  /// count on.
  void step(const StepOptions& options = {});
  void zero_grad();
  /// lr at least 0.
  void set_lr(double lr);
  double lr() const { return lr_; }
  /// "adamw": of the messages and of the checkpoint.
  const std::string& name() const { return name_; }

  /// One entry a parameter, in the order given: what a checkpoint must hold.
  struct State {
    Tensor first, second;  // shaped as the parameter; undefined where the optimizer needs none
    int64_t steps = 0;     // t
    Tensor master;         // f32, of a 16-bit parameter: undefined for others
  };
  /// On CUDA waits for the device, which counts t.
  const std::vector<State>& states() const;
  /// Copies, converted, what is defined of other states; to be called after the parameters were set. (A
  /// 16-bit parameter that is set alone has its master made anew.)
  void set_states(const std::vector<State>& states);
  const std::vector<NamedParameter>& parameters() const { return parameters_; }

 protected:
  struct Settings {
    double lr, weight_decay;
    const std::function<bool(const NamedParameter&)>& decays;
    const std::vector<ParameterGroup>& groups;
    std::vector<std::pair<const char*, double>> decay_rates;  // of averages, and their names: in [0, 1)
    double eps = 0;
  };
  /// `moments(parameter)` tensors of each state are made, of zeros. Throws Error{Value} on a parameter or a
  /// name that comes twice, and on settings out of their range.
  Optimizer(std::string name, std::vector<NamedParameter> parameters, const Settings& settings,
            const std::function<int(const NamedParameter&)>& moments);
  /// Those that have a gradient, each with its own scale of the learning rate and its weight decay.
  virtual void update(std::span<optim::StepItem> items, const optim::StepNumbers& numbers) = 0;

 private:
  struct Scales {
    double lr, decay;
  };
  // The storage of a 16-bit parameter when its master was last rounded into it, and its version.
  struct Rounded {
    std::weak_ptr<Storage> storage;
    uint64_t version = 0;
  };
  void note_rounded(size_t parameter);
  bool is_rounded(size_t parameter) const;

  std::string name_;
  std::vector<NamedParameter> parameters_;
  double lr_ = 0;
  std::vector<Scales> scales_;
  mutable std::vector<State> states_;  // on CUDA, t is as of the last call of states()
  std::vector<Rounded> rounded_;
  Device device_;
  Tensor steps_;  // CUDA: t of each parameter, f64
};

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  std::function<bool(const NamedParameter&)> decays = has_two_axes;
  std::vector<ParameterGroup> groups = {};
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019). In step t of a parameter p with gradient
/// g:
///   p -= lr * weight_decay * p                                  where `decays`
///   m = beta1 * m + (1 - beta1) * g,   v = beta2 * v + (1 - beta2) * g^2
///   p -= lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)
class AdamW : public Optimizer {
 public:
  explicit AdamW(std::vector<NamedParameter> parameters, const AdamWOptions& options = {});

 private:
  void update(std::span<optim::StepItem> items, const optim::StepNumbers& numbers) override;

  AdamWOptions options_;
};

struct SGDOptions {
  double lr = 0.01;
  double momentum = 0;
  bool nesterov = false;
  double weight_decay = 0;
  std::function<bool(const NamedParameter&)> decays = has_two_axes;
  std::vector<ParameterGroup> groups = {};
};

/// Stochastic gradient descent, as PyTorch's:
///   g += weight_decay * p                                       where `decays`
///   m = momentum * m + g
///   p -= lr * m, or with `nesterov` (Sutskever et al., 2013), lr * (g + momentum * m)
class SGD : public Optimizer {
 public:
  explicit SGD(std::vector<NamedParameter> parameters, const SGDOptions& options = {});

 private:
  void update(std::span<optim::StepItem> items, const optim::StepNumbers& numbers) override;

  SGDOptions options_;
};

struct LionOptions {
  double lr = 1e-4;
  double beta1 = 0.9, beta2 = 0.99;
  double weight_decay = 0.1;
  std::function<bool(const NamedParameter&)> decays = has_two_axes;
  std::vector<ParameterGroup> groups = {};
};

/// Lion (Chen et al., 2023):
///   p -= lr * weight_decay * p                                  where `decays`
///   p -= lr * sign(beta1 * m + (1 - beta1) * g)
///   m = beta2 * m + (1 - beta2) * g
class Lion : public Optimizer {
 public:
  explicit Lion(std::vector<NamedParameter> parameters, const LionOptions& options = {});

 private:
  void update(std::span<optim::StepItem> items, const optim::StepNumbers& numbers) override;

  LionOptions options_;
};

/// The usual rule of what Muon orthogonalises: matrices inside the model, not embeddings (`tokens`,
/// `positions`) nor the output layer (`head`).
bool is_hidden_matrix(const NamedParameter& entry);

struct MuonOptions {
  double lr = 0.02;
  double momentum = 0.95;
  bool nesterov = true;
  double weight_decay = 0.01;
  std::function<bool(const NamedParameter&)> decays = has_two_axes;
  std::vector<ParameterGroup> groups = {};
  std::function<bool(const NamedParameter&)> orthogonalizes = is_hidden_matrix;  // only of two axes
  double adam_lr_scale = 0.015;  // the learning rate of the others is lr times it
  double adam_beta1 = 0.9, adam_beta2 = 0.95, adam_eps = 1e-10;
};

/// Muon (Jordan et al., 2024). A matrix p [O, I] with gradient g:
///   p -= lr * weight_decay * p                                  where `decays`
///   m = momentum * m + g
///   p -= lr * sqrt(max(1, O / I)) * orthogonalized(m, or with `nesterov` g + momentum * m)
/// Every other parameter steps as by AdamW.
class Muon : public Optimizer {
 public:
  explicit Muon(std::vector<NamedParameter> parameters, const MuonOptions& options = {});

 private:
  void update(std::span<optim::StepItem> items, const optim::StepNumbers& numbers) override;

  MuonOptions options_;
};

/// About U V^T of the singular value decomposition U S V^T of a matrix: singular values end between about 0.7
/// and 1.2. Five steps of a Newton-Schulz iteration, X <- a X + (b X X^T + c (X X^T)^2) X with (a, b, c) =
/// (3.4445, -4.775, 2.0315), from X = matrix / (its norm + 1e-7).
Tensor orthogonalized(const Tensor& matrix);

/// The Euclidean norm of all gradients together: one element of f64 on their device, for which the host does
/// not wait. Summed in f64 in a fixed order, whatever the thread count. 0 where there is none.
Tensor grad_norm(const std::vector<Parameter>& parameters);
/// Scales all gradients by max_norm / norm if their norm is larger than max_norm. Returns the norm before. If
/// it is infinite or NaN the gradients stay as they are: the caller sees it in the result and should not
/// step. `Optimizer::step` clips on its own, with no pass over the gradients and no wait: see StepOptions.
double clip_grad_norm(const std::vector<Parameter>& parameters, double max_norm);

// Schedules: the learning rate of step 0, 1, ... Each rises linearly over `warmup` steps to `peak`.

/// Stays at the peak.
double warmup_constant(int64_t step, int64_t warmup, double peak);
/// Falls linearly to `floor` at step `total`, and stays there.
double warmup_linear(int64_t step, int64_t warmup, int64_t total, double peak, double floor = 0);
/// Falls along half a cosine to `floor` at step `total`, and stays there.
double warmup_cosine(int64_t step, int64_t warmup, int64_t total, double peak, double floor = 0);
/// Stays at the peak until the last `decay` steps, over which it falls linearly to `floor` at step `total`
/// (Hu et al., 2024). warmup + decay <= total.
double warmup_stable_decay(int64_t step, int64_t warmup, int64_t decay, int64_t total, double peak,
                           double floor = 0);

}  // namespace torus
