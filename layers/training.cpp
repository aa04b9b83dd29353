#include "torus/layers/training.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "torus/core/kernel.h"
#include "torus/layers/optim_kernels.h"

namespace torus {

using optim::Combination;

double backward_mean(int64_t count, const std::function<Variable(int64_t)>& loss, double scale) {
  check(count > 0, Error::Kind::Value, "[backward_mean] expected at least one loss, got ", count);
  return backward_mean(std::vector<double>(static_cast<size_t>(count), 1), loss, scale);
}

double backward_mean(const std::vector<double>& weights, const std::function<Variable(int64_t)>& loss,
                     double scale) {
  check(!weights.empty(), Error::Kind::Value, "[backward_mean] expected at least one loss, got 0");
  double sum = 0, total = 0;
  for (double weight : weights) {
    check(weight >= 0 && std::isfinite(weight), Error::Kind::Value,
          "[backward_mean] expected finite weights of at least 0, got ", weight);
    sum += weight;
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0) continue;
    const double share = weights[i] / sum;
    Tape tape;
    const Variable value = loss(static_cast<int64_t>(i));
    tape.backward(value, {.seed = Tensor::full(value.shape(), scale * share, value.dtype(), value.device())});
    total += share * value.item();
  }
  return total;
}

int64_t counted_targets(const Tensor& targets, int64_t ignored) {
  check(targets.dtype() == i64, Error::Kind::DType, "[counted_targets] expected targets of i64, got ",
        targets.dtype());
  const auto all = targets.to_vector<int64_t>();
  return std::count_if(all.begin(), all.end(), [=](int64_t target) { return target != ignored; });
}

namespace {

void combine_cpu(std::span<Combination> all, double factor) {
  const NoGrad only_values;
  for (auto& [to, from, add] : all) {
    // In f32 or f64, whichever of both is.
    const DType dtype = to.dtype() == f64 || to.dtype() == f32 ? to.dtype() : f32;
    const Variable scaled = Variable(from.to(dtype)) * factor;
    to.copy_((add ? Variable(to) + scaled : scaled).value());
  }
}

const Kernel<optim::CombineFunction> combine_kernel{"weights.combine", combine_cpu};

void combine(std::vector<Combination>& all, double factor) {
  if (!all.empty()) combine_kernel(all.front().to.device(), all, factor);
}

}  // namespace

ExponentialMovingAverage::ExponentialMovingAverage(std::vector<NamedParameter> parameters, double decay)
    : parameters_(std::move(parameters)), decay_(decay) {
  check(decay >= 0 && decay < 1, Error::Kind::Value, "[ema] expected 0 <= decay < 1, got ", decay);
  check_parameters("ema", parameters_);
  for (const auto& [name, parameter] : parameters_)
    averages_.push_back(parameter.value().to(parameter.dtype() == f64 ? f64 : f32).clone());
}

void ExponentialMovingAverage::update() {
  check(swapped_.empty(), Error::Kind::Value,
        "[ema] the averages are swapped in; swap them out to update them");
  std::vector<Combination> decayed, added;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    decayed.push_back({averages_[i], averages_[i], false});
    added.push_back({averages_[i], parameters_[i].parameter.value(), true});
  }
  combine(decayed, decay_);
  combine(added, 1 - decay_);
}

void ExponentialMovingAverage::swap_in() {
  check(swapped_.empty(), Error::Kind::Value, "[ema] the averages are swapped in already");
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i].parameter;
    const Tensor own = parameter.value();
    Tensor lent = Tensor::empty(own.shape(), own.dtype(), own.device());
    lent.copy_(averages_[i]);
    swapped_.push_back({own, lent, lent.version()});
    parameter.mutable_value() = lent;
  }
}

void ExponentialMovingAverage::swap_out() {
  check(!swapped_.empty() || parameters_.empty(), Error::Kind::Value,
        "[ema] the averages are not swapped in");
  std::string written;  // a parameter that was
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& [name, parameter] = parameters_[i];
    const auto& [own, lent, version] = swapped_[i];
    if (parameter.value().storage() != lent.storage() || lent.version() != version) written = name;
    parameter.mutable_value() = own;
  }
  swapped_.clear();
  check(written.empty(), Error::Kind::Version, "[ema] expected nothing to write to the parameters while the ",
        "averages were in, but ", written, " was written to");
}

std::map<std::string, Tensor> ExponentialMovingAverage::named_averages() const {
  std::map<std::string, Tensor> result;
  for (size_t i = 0; i < parameters_.size(); ++i) result[parameters_[i].name] = averages_[i];
  return result;
}

void ExponentialMovingAverage::restore(const std::map<std::string, Tensor>& averages) {
  check(averages.size() == averages_.size(), Error::Kind::Value, "[ema] expected the averages of ",
        averages_.size(), " parameters, got ", averages.size());
  for (const auto& [name, parameter] : parameters_) {
    const auto found = averages.find(name);
    check(found != averages.end(), Error::Kind::Value, "[ema] expected the average of ", name, ", got none");
    check(found->second.shape() == parameter.shape() && is_floating(found->second.dtype()),
          Error::Kind::Value, "[ema] expected the average of ", name, " to be floating ", parameter.shape(),
          ", got ", found->second.dtype(), ' ', found->second.shape());
  }
  for (size_t i = 0; i < parameters_.size(); ++i) averages_[i].copy_(averages.at(parameters_[i].name));
}

MasterWeights::MasterWeights(std::vector<NamedParameter> parameters) : parameters_(std::move(parameters)) {
  for (const auto& [name, parameter] : parameters_) {
    const bool narrow = parameter.dtype() == f16 || parameter.dtype() == bf16;
    masters_.push_back({name, Parameter(narrow ? parameter.value().to(f32) : parameter.value())});
  }
}

void MasterWeights::take_gradients(double factor) {
  std::vector<Combination> all;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter &from = parameters_[i].parameter, &to = masters_[i].parameter;
    if (!from.grad().defined()) continue;
    const bool add = to.grad().defined();
    if (!add) to.mutable_grad() = Tensor::empty(to.shape(), to.dtype(), to.device());
    all.push_back({to.grad(), from.grad(), add});
    from.zero_grad();
  }
  combine(all, factor);
}

void MasterWeights::publish() {
  std::vector<Combination> all;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Tensor &narrow = parameters_[i].parameter.value(), &master = masters_[i].parameter.value();
    if (narrow.storage() != master.storage()) all.push_back({narrow, master, false});
  }
  combine(all, 1);
}

namespace {

void update_scale_cpu(Tensor& state, const Tensor& grad_norm, double growth, int64_t interval) {
  double* const scale = state.mutable_data<double>();
  double& good = scale[1];
  const bool finite = std::isfinite(grad_norm.item());
  if (finite && ++good < static_cast<double>(interval)) return;
  scale[0] = finite ? scale[0] * growth : scale[0] / growth;
  good = 0;
}

const Kernel<optim::ScaleFunction> scale_kernel{"loss_scale.update", update_scale_cpu};

}  // namespace

LossScale::LossScale(const LossScaleOptions& options, Device device)
    : options_(options), state_(Tensor::from<double>({options.initial, 0}).to(device)) {
  check(options.initial > 0 && options.growth > 1 && options.interval > 0, Error::Kind::Value,
        "[loss_scale] expected initial > 0, growth > 1 and interval > 0, got ", options.initial, ", ",
        options.growth, " and ", options.interval);
}

void LossScale::update(const Tensor& grad_norm) {
  check(grad_norm.numel() == 1 && grad_norm.dtype() == f64 && grad_norm.device() == state_.device(),
        Error::Kind::Value, "[loss_scale] expected one element of f64 on ", state_.device());
  scale_kernel(state_.device(), state_, grad_norm, options_.growth, options_.interval);
}

bool LossScale::update(bool finite) {
  update(Tensor::full({}, finite ? 0 : std::numeric_limits<double>::infinity(), f64, state_.device()));
  return finite;
}

}  // namespace torus
