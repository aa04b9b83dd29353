#include "torus/layers/optim.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "torus/core/kernel.h"
#include "torus/core/memory.h"
#include "torus/core/strided.h"
#include "torus/layers/optim_kernels.h"
#include "torus/ops/ops.h"

namespace torus {

using namespace optim;

namespace {

// What the gradients are multiplied by: with the scales, and so that their norm is at most `max_norm`.
// Reads the norm. NaN where it is not finite.
double gradient_factor(const StepNumbers& numbers) {
  const double scale = numbers.grad_scale / (numbers.loss_scale.defined() ? numbers.loss_scale.item() : 1);
  if (!numbers.grad_norm.defined()) return scale;
  const double norm = numbers.grad_norm.item();
  if (!std::isfinite(norm)) return std::numeric_limits<double>::quiet_NaN();
  return norm * scale > numbers.max_norm ? numbers.max_norm / norm : scale;
}

// Calls update(p, moments..., g) for each element, on the CPU, and rounds a master into its parameter.
template <int moments, class Update>
void update_item(StepItem& item, double factor, const Update& update) {
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    const Tensor grad = item.grad.to(item.value.dtype());
    // What stands for a moment that is not there is not touched.
    Tensor &first = moments > 0 ? item.first : item.value, &second = moments > 1 ? item.second : item.value;
    T* const p_data = item.value.mutable_data<T>();
    T* const m_data = first.mutable_data<T>();
    T* const v_data = second.mutable_data<T>();
    const T* const g_data = grad.data<T>();
    const T by = T(factor);
    for_each_run<4>(item.value.shape(),
                    {item.value.strides(), first.strides(), second.strides(), grad.strides()},
                    elementwise_grain, [&](auto offset, auto step, int64_t count) {
                      T* p = p_data + offset[0];
                      T* m = m_data + offset[1];
                      T* v = v_data + offset[2];
                      const T* g = g_data + offset[3];
                      const auto walk = [=](auto p_step, auto m_step, auto v_step, auto g_step) {
#pragma GCC ivdep
                        for (int64_t i = 0; i < count; ++i) {
                          if constexpr (moments == 2)
                            update(p[i * p_step], m[i * m_step], v[i * v_step], by * g[i * g_step]);
                          else if constexpr (moments == 1)
                            update(p[i * p_step], m[i * m_step], by * g[i * g_step]);
                          else
                            update(p[i * p_step], by * g[i * g_step]);
                        }
                      };
                      const std::integral_constant<int64_t, 1> one;
                      if (step == decltype(step){1, 1, 1, 1})
                        walk(one, one, one, one);
                      else
                        walk(step[0], step[1], step[2], step[3]);
                    });
  };
  item.value.dtype() == f64 ? run(double{}) : run(float{});
  if (item.narrow.defined()) item.narrow.copy_(item.value);
}

void adamw_cpu(std::span<StepItem> items, const StepNumbers& numbers, AdamWRule rule) {
  const double factor = gradient_factor(numbers);
  for (StepItem& item : items) {
    const auto t = static_cast<double>(item.steps);
    const double lr = numbers.lr() * item.lr_scale, keep = 1 - lr * item.decay,
                 rate = lr / (1 - std::pow(rule.beta1, t)),
                 root_scale = 1 / std::sqrt(1 - std::pow(rule.beta2, t));
    update_item<2>(item, factor, [=]<class T>(T& p, T& m, T& v, T g) {
      m = T(rule.beta1) * m + T(1 - rule.beta1) * g;
      v = T(rule.beta2) * v + T(1 - rule.beta2) * g * g;
      p = T(keep) * p - T(rate) * m / (T(root_scale) * std::sqrt(v) + T(rule.eps));
    });
  }
}

void sgd_cpu(std::span<StepItem> items, const StepNumbers& numbers, SGDRule rule) {
  const double factor = gradient_factor(numbers);
  for (StepItem& item : items) {
    const double lr = numbers.lr() * item.lr_scale, decay = item.decay;
    if (rule.momentum == 0)
      update_item<0>(item, factor, [=]<class T>(T& p, T g) { p -= T(lr) * (g + T(decay) * p); });
    else
      update_item<1>(item, factor, [=]<class T>(T& p, T& m, T g) {
        g += T(decay) * p;
        m = T(rule.momentum) * m + g;
        p -= T(lr) * (rule.nesterov ? g + T(rule.momentum) * m : m);
      });
  }
}

void lion_cpu(std::span<StepItem> items, const StepNumbers& numbers, LionRule rule) {
  const double factor = gradient_factor(numbers);
  for (StepItem& item : items) {
    const double lr = numbers.lr() * item.lr_scale, keep = 1 - lr * item.decay;
    update_item<1>(item, factor, [=]<class T>(T& p, T& m, T g) {
      const T direction = T(rule.beta1) * m + T(1 - rule.beta1) * g;
      // A NaN stays one.
      const T sign = direction > 0 ? T(1) : direction < 0 ? T(-1) : direction;
      p = T(keep) * p - T(lr) * sign;
      m = T(rule.beta2) * m + T(1 - rule.beta2) * g;
    });
  }
}

// Blocks of a fixed length, then their sums in order.
void add_squares(double& sum, const Tensor& tensor) {
  constexpr int64_t block = 4096;
  const Tensor flat = tensor.contiguous();
  const int64_t count = flat.numel(), blocks = (count + block - 1) / block;
  std::vector<double> partial(static_cast<size_t>(blocks));
  dispatch_floating(flat.dtype(), "grad_norm", [&](auto zero) {
    using T = decltype(zero);
    const T* data = flat.data<T>();
    parallel_for(0, blocks, 4, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; ++b) {
        constexpr int64_t lanes = 8;  // independent sums, so that the additions overlap
        double sums[lanes] = {};
        const int64_t end = std::min(count, (b + 1) * block);
        int64_t i = b * block;
        for (; i + lanes <= end; i += lanes)
          for (int64_t lane = 0; lane < lanes; ++lane) {
            const auto value = static_cast<double>(static_cast<Compute<T>>(data[i + lane]));
            sums[lane] += value * value;
          }
        for (; i < end; ++i) {
          const auto value = static_cast<double>(static_cast<Compute<T>>(data[i]));
          sums[0] += value * value;
        }
        for (double lane : sums) partial[static_cast<size_t>(b)] += lane;
      }
    });
  });
  for (double value : partial) sum += value;
}

void grad_norm_cpu(Tensor& norm, std::span<const Tensor> grads) {
  double squares = 0;
  for (const Tensor& grad : grads) add_squares(squares, grad);
  norm.fill_(std::sqrt(squares));
}

void scale(Tensor& tensor, double factor) {
  dispatch_floating(tensor.dtype(), "clip_grad_norm", [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    T* data = tensor.mutable_data<T>();
    const C by = static_cast<C>(factor);
    for_each_run<1>(tensor.shape(), {tensor.strides()}, elementwise_grain,
                    [&](auto offset, auto step, int64_t count) {
                      T* to = data + offset[0];
                      for (int64_t i = 0; i < count; ++i)
                        to[i * step[0]] = static_cast<T>(C(to[i * step[0]]) * by);
                    });
  });
}

void clip_cpu(std::span<Tensor> grads, const Tensor& norm, double max_norm) {
  const double size = norm.item();
  if (!std::isfinite(size) || size <= max_norm) return;
  for (Tensor& grad : grads) scale(grad, max_norm / size);
}

const Kernel<StepFunction<AdamWRule>> adamw_kernel{"adamw.step", adamw_cpu};
const Kernel<StepFunction<SGDRule>> sgd_kernel{"sgd.step", sgd_cpu};
const Kernel<StepFunction<LionRule>> lion_kernel{"lion.step", lion_cpu};
const Kernel<NormFunction> norm_kernel{"grad_norm", grad_norm_cpu};
const Kernel<ClipFunction> clip_kernel{"clip_grad_norm", clip_cpu};

Device device_of(std::span<StepItem> items) { return items.front().value.device(); }

void check_range(const std::string& who, const char* what, double value,
                 double end = std::numeric_limits<double>::infinity()) {
  check(value >= 0 && value < end, Error::Kind::Value, "[", who, "] expected 0 <= ", what, " < ", end,
        ", got ", value);
}

}  // namespace

Optimizer::Optimizer(std::string name, std::vector<NamedParameter> parameters, const Settings& settings,
                     const std::function<int(const NamedParameter&)>& moments)
    : name_(std::move(name)), parameters_(std::move(parameters)) {
  check_parameters(name_, parameters_);
  set_lr(settings.lr);
  check_range(name_, "weight_decay", settings.weight_decay);
  check_range(name_, "eps", settings.eps);
  for (const auto& [what, rate] : settings.decay_rates) check_range(name_, what, rate, 1);
  for (const ParameterGroup& group : settings.groups) {
    check_range(name_, "lr_scale", group.lr_scale);
    check_range(name_, "decay_scale", group.decay_scale);
  }
  if (!parameters_.empty()) device_ = parameters_.front().parameter.device();
  rounded_.resize(parameters_.size());
  for (const NamedParameter& entry : parameters_) {
    const Parameter& parameter = entry.parameter;
    check(parameter.device() == device_, Error::Kind::Device, "[", name_, "] expected all parameters on ",
          device_, ", got ", entry.name, " on ", parameter.device());
    Scales scales{1, settings.decays(entry) ? settings.weight_decay : 0};
    for (const ParameterGroup& group : settings.groups)
      if (group.contains(entry)) {
        scales = {group.lr_scale, group.decay_scale * scales.decay};
        break;
      }
    scales_.push_back(scales);
    const DType dtype = parameter.dtype() == f64 ? f64 : f32;
    const auto zeros = [&](int moment) {
      return moment < moments(entry) ? Tensor::zeros(parameter.shape(), dtype, device_) : Tensor();
    };
    State& state = states_.emplace_back(zeros(0), zeros(1));
    if (parameter.dtype() == dtype) continue;
    state.master = parameter.value().to(dtype).contiguous();
    note_rounded(states_.size() - 1);
  }
  if (device_.kind == DeviceKind::cuda)
    steps_ = Tensor::zeros({static_cast<int64_t>(parameters_.size())}, f64, device_);
}

void Optimizer::set_lr(double lr) {
  check_range(name_, "lr", lr);
  lr_ = lr;
}

void Optimizer::note_rounded(size_t parameter) {
  const Tensor& value = parameters_[parameter].parameter.value();
  rounded_[parameter] = {value.storage(), value.version()};
}

bool Optimizer::is_rounded(size_t parameter) const {
  const Tensor& value = parameters_[parameter].parameter.value();
  const auto storage = rounded_[parameter].storage.lock();
  return storage && storage == value.storage() && storage->version() == rounded_[parameter].version;
}

void Optimizer::step(const StepOptions& options) {
  check(options.max_norm > 0 && options.grad_scale > 0, Error::Kind::Value, "[", name_,
        "] max_norm and grad_scale must be positive, got ", options.max_norm, " and ", options.grad_scale);
  const Tensor& norm = options.grad_norm;
  check(norm.defined() || options.max_norm == std::numeric_limits<double>::infinity(), Error::Kind::Value,
        "[", name_, "] max_norm needs grad_norm");
  const auto is_number = [&](const Tensor& tensor) {
    return !tensor.defined() || (tensor.numel() == 1 && tensor.dtype() == f64 && tensor.device() == device_);
  };
  check(is_number(norm), Error::Kind::Value, "[", name_,
        "] expected grad_norm as of grad_norm(parameters) on ", device_);
  check(is_number(options.loss_scale), Error::Kind::Value, "[", name_,
        "] expected loss_scale as of LossScale on ", device_);
  const bool on_cpu = device_.kind == DeviceKind::cpu;
  if (on_cpu && norm.defined() && !std::isfinite(norm.item())) return;
  std::vector<optim::StepItem> items;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i].parameter;
    State& state = states_[i];
    const Tensor& grad = parameter.grad();
    if (!grad.defined()) continue;
    check(grad.shape() == parameter.shape() && grad.dtype() == parameter.dtype(), Error::Kind::Shape, "[",
          name_, "] the gradient of ", parameters_[i].name, " must be ", parameter.dtype(), " ",
          parameter.shape(), ", got ", grad.dtype(), " ", grad.shape());
    check(parameter.device() == device_ && grad.device() == device_, Error::Kind::Device, "[", name_,
          "] expected ", parameters_[i].name, " and its gradient on ", device_, ", got ", parameter.device(),
          " and ", grad.device());
    if (on_cpu) ++state.steps;
    const Tensor& value = parameter.value();
    const bool narrow = state.master.defined();
    if (narrow && !is_rounded(i)) state.master.copy_(value);
    items.push_back({.value = narrow ? state.master : value,
                     .narrow = narrow ? value : Tensor(),
                     .grad = grad,
                     .first = state.first,
                     .second = state.second,
                     .lr_scale = scales_[i].lr,
                     .decay = scales_[i].decay,
                     .steps = state.steps,
                     .index = static_cast<int64_t>(i)});
  }
  if (items.empty()) return;
  update(items, {.lr = [this] { return lr_; },
                 .grad_norm = norm,
                 .max_norm = options.max_norm,
                 .grad_scale = options.grad_scale,
                 .loss_scale = options.loss_scale,
                 .steps = steps_});
  for (const optim::StepItem& item : items)
    if (item.narrow.defined()) note_rounded(static_cast<size_t>(item.index));
}

const std::vector<Optimizer::State>& Optimizer::states() const {
  if (steps_.defined()) {
    const auto steps = steps_.to_vector<double>();
    for (size_t i = 0; i < states_.size(); ++i) states_[i].steps = static_cast<int64_t>(steps[i]);
  }
  return states_;
}

void Optimizer::set_states(const std::vector<State>& states) {
  check(states.size() == states_.size(), Error::Kind::Value, "[", name_, "] expected ", states_.size(),
        " states, got ", states.size());
  std::vector<double> steps;
  for (size_t i = 0; i < states.size(); ++i) {
    const auto set = [](Tensor& to, const Tensor& from) {
      if (to.defined() && from.defined()) to.copy_(from);
    };
    set(states_[i].first, states[i].first);
    set(states_[i].second, states[i].second);
    set(states_[i].master, states[i].master);
    if (states[i].master.defined()) note_rounded(i);
    states_[i].steps = states[i].steps;
    steps.push_back(static_cast<double>(states[i].steps));
  }
  if (steps_.defined()) steps_.copy_(Tensor::from(steps, steps_.shape()));
}

void Optimizer::zero_grad() {
  for (auto& entry : parameters_) entry.parameter.zero_grad();
}

AdamW::AdamW(std::vector<NamedParameter> parameters, const AdamWOptions& o)
    : Optimizer("adamw", std::move(parameters),
                {o.lr, o.weight_decay, o.decays, o.groups, {{"beta1", o.beta1}, {"beta2", o.beta2}}, o.eps},
                [](const NamedParameter&) { return 2; }),
      options_(o) {}

void AdamW::update(std::span<StepItem> items, const StepNumbers& numbers) {
  adamw_kernel(device_of(items), items, numbers, {options_.beta1, options_.beta2, options_.eps});
}

SGD::SGD(std::vector<NamedParameter> parameters, const SGDOptions& o)
    : Optimizer("sgd", std::move(parameters),
                {o.lr, o.weight_decay, o.decays, o.groups, {{"momentum", o.momentum}}},
                [&](const NamedParameter&) { return o.momentum == 0 ? 0 : 1; }),
      options_(o) {
  check(!o.nesterov || o.momentum > 0, Error::Kind::Value, "[sgd] nesterov needs momentum, got ", o.momentum);
}

void SGD::update(std::span<StepItem> items, const StepNumbers& numbers) {
  sgd_kernel(device_of(items), items, numbers, {options_.momentum, options_.nesterov});
}

Lion::Lion(std::vector<NamedParameter> parameters, const LionOptions& o)
    : Optimizer("lion", std::move(parameters),
                {o.lr, o.weight_decay, o.decays, o.groups, {{"beta1", o.beta1}, {"beta2", o.beta2}}},
                [](const NamedParameter&) { return 1; }),
      options_(o) {}

void Lion::update(std::span<StepItem> items, const StepNumbers& numbers) {
  lion_kernel(device_of(items), items, numbers, {options_.beta1, options_.beta2});
}

bool is_hidden_matrix(const NamedParameter& entry) {
  const auto is = [&](const char* module) { return entry.name.ends_with(std::string(module) + ".weight"); };
  return entry.parameter.dim() == 2 && !is("tokens") && !is("positions") && !is("head");
}

Tensor orthogonalized(const Tensor& matrix) {
  check(matrix.dim() == 2, Error::Kind::Shape, "[muon] expected a matrix, got ", matrix.shape());
  const NoGrad only_values;
  // The shorter side first, so that X X^T is small.
  const bool tall = matrix.size(0) > matrix.size(1);
  const Variable start(tall ? matrix.transpose(0, 1) : matrix);
  Variable x = start / (sqrt(sum(start * start)) + 1e-7);
  for (int i = 0; i < 5; ++i) {
    const Variable square = matmul(x, transpose(x, 0, 1));
    x = x * 3.4445 + matmul(square * -4.775 + matmul(square, square) * 2.0315, x);
  }
  return tall ? x.value().transpose(0, 1) : x.value();
}

Muon::Muon(std::vector<NamedParameter> parameters, const MuonOptions& o)
    : Optimizer("muon", std::move(parameters),
                {o.lr,
                 o.weight_decay,
                 o.decays,
                 o.groups,
                 {{"momentum", o.momentum}, {"adam_beta1", o.adam_beta1}, {"adam_beta2", o.adam_beta2}},
                 o.adam_eps},
                [&](const NamedParameter& entry) { return o.orthogonalizes(entry) ? 1 : 2; }),
      options_(o) {
  check_range(name(), "adam_lr_scale", o.adam_lr_scale);
  for (const NamedParameter& entry : this->parameters())
    check(!o.orthogonalizes(entry) || entry.parameter.dim() == 2, Error::Kind::Shape, "[muon] ", entry.name,
          " has shape ", entry.parameter.shape(), "; only matrices can be orthogonalised");
}

void Muon::update(std::span<StepItem> items, const StepNumbers& numbers) {
  std::vector<StepItem> others;
  // The steps that surround the orthogonalisation are those of SGD: one from 0, uphill at rate 1, gives the
  // direction and counts t; another takes it from the parameter.
  StepNumbers uphill = numbers;
  uphill.lr = [] { return -1.0; };
  StepNumbers along{.lr = numbers.lr,
                    .grad_norm = numbers.grad_norm,
                    .max_norm = std::numeric_limits<double>::infinity(),
                    .grad_scale = 1,
                    .loss_scale = {},
                    .steps = {}};
  if (numbers.steps.defined()) along.steps = Tensor::zeros({1}, f64, numbers.steps.device());
  for (StepItem& item : items) {
    if (item.second.defined()) {
      others.push_back(item);
      others.back().lr_scale *= options_.adam_lr_scale;
      continue;
    }
    const Tensor& value = item.value;
    StepItem first = item, second = item;
    first.value = Tensor::zeros(value.shape(), value.dtype(), value.device());
    first.narrow = Tensor();
    first.grad = item.grad.to(value.dtype());
    first.lr_scale = 1, first.decay = 0;
    sgd_kernel(value.device(), {&first, 1}, uphill, {options_.momentum, options_.nesterov});
    const auto rows = static_cast<double>(value.size(0)), columns = static_cast<double>(value.size(1));
    const double stretch = std::sqrt(std::max(1.0, rows / columns));
    second.narrow = second.first = Tensor();
    second.grad = orthogonalized(first.value);
    second.lr_scale *= stretch, second.decay /= stretch;
    second.index = 0;
    sgd_kernel(value.device(), {&second, 1}, along, {0, false});
    if (item.narrow.defined()) item.narrow.copy_(value);
  }
  if (others.empty()) return;
  adamw_kernel(device_of(others), others, numbers,
               {options_.adam_beta1, options_.adam_beta2, options_.adam_eps});
}

namespace {

std::vector<Tensor> gradients_of(const std::vector<Parameter>& parameters) {
  std::vector<Tensor> grads;
  for (const Parameter& parameter : parameters)
    if (parameter.grad().defined()) grads.push_back(parameter.grad());
  for (const Tensor& grad : grads)
    check(grad.device() == grads.front().device(), Error::Kind::Device,
          "[grad_norm] expected all gradients on ", grads.front().device(), ", got ", grad.device());
  return grads;
}

}  // namespace

Tensor grad_norm(const std::vector<Parameter>& parameters) {
  const std::vector<Tensor> grads = gradients_of(parameters);
  const Device device = !grads.empty()        ? grads.front().device()
                        : !parameters.empty() ? parameters.front().device()
                                              : cpu;
  Tensor norm = Tensor::empty({}, f64, device);
  norm_kernel(device, norm, grads);
  return norm;
}

double clip_grad_norm(const std::vector<Parameter>& parameters, double max_norm) {
  check(max_norm > 0, Error::Kind::Value, "[clip_grad_norm] max_norm must be positive, got ", max_norm);
  std::vector<Tensor> grads = gradients_of(parameters);
  const Tensor norm = grad_norm(parameters);
  clip_kernel(norm.device(), grads, norm, max_norm);
  return norm.item();
}

namespace {

// How far step lies between first (0) and last (1).
double progress(int64_t step, int64_t first, int64_t last) {
  if (step <= first) return step < last ? 0 : 1;
  return step >= last ? 1 : static_cast<double>(step - first) / static_cast<double>(last - first);
}

}  // namespace

double warmup_constant(int64_t step, int64_t warmup, double peak) {
  return step < warmup ? peak * static_cast<double>(step + 1) / static_cast<double>(warmup + 1) : peak;
}

double warmup_linear(int64_t step, int64_t warmup, int64_t total, double peak, double floor) {
  if (step < warmup) return warmup_constant(step, warmup, peak);
  return peak + (floor - peak) * progress(step, warmup, total);
}

double warmup_cosine(int64_t step, int64_t warmup, int64_t total, double peak, double floor) {
  if (step < warmup) return warmup_constant(step, warmup, peak);
  if (step >= total) return floor;
  return floor + (peak - floor) * (1 + std::cos(std::numbers::pi * progress(step, warmup, total))) / 2;
}

double warmup_stable_decay(int64_t step, int64_t warmup, int64_t decay, int64_t total, double peak,
                           double floor) {
  check(warmup >= 0 && decay >= 0 && warmup + decay <= total, Error::Kind::Value,
        "[warmup_stable_decay] expected warmup + decay <= total, got ", warmup, " + ", decay, " > ", total);
  if (step < warmup) return warmup_constant(step, warmup, peak);
  return peak + (floor - peak) * progress(step, total - decay, total);
}

}  // namespace torus
