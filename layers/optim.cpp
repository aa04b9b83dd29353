#include "torus/layers/optim.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "torus/core/kernel.h"
#include "torus/core/strided.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

struct AdamWFactors {
  double keep;                   // of the parameter: 1 - lr * weight_decay
  double beta1, beta2;           // of the moments
  double rate, root_scale, eps;  // p -= rate * m / (root_scale * sqrt(v) + eps)
};

void adamw_cpu(Tensor& parameter, Tensor& first, Tensor& second, const Tensor& grad,
               const AdamWFactors& factors) {
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    T* p_data = parameter.mutable_data<T>();
    T* m_data = first.mutable_data<T>();
    T* v_data = second.mutable_data<T>();
    const T* g_data = grad.data<T>();
    const T keep = T(factors.keep), beta1 = T(factors.beta1), beta2 = T(factors.beta2),
            rate = T(factors.rate), new1 = T(1 - factors.beta1), new2 = T(1 - factors.beta2),
            root_scale = T(factors.root_scale), eps = T(factors.eps);
    for_each_run<4>(parameter.shape(),
                    {parameter.strides(), first.strides(), second.strides(), grad.strides()},
                    elementwise_grain, [&](auto offset, auto step, int64_t count) {
                      T* p = p_data + offset[0];
                      T* m = m_data + offset[1];
                      T* v = v_data + offset[2];
                      const T* g = g_data + offset[3];
                      const auto update = [=](T& p_i, T& m_i, T& v_i, T g_i) {
                        m_i = beta1 * m_i + new1 * g_i;
                        v_i = beta2 * v_i + new2 * g_i * g_i;
                        p_i = keep * p_i - rate * m_i / (root_scale * std::sqrt(v_i) + eps);
                      };
                      if (step == decltype(step){1, 1, 1, 1}) {
#pragma GCC ivdep
                        for (int64_t i = 0; i < count; ++i) update(p[i], m[i], v[i], g[i]);
                      } else {
                        for (int64_t i = 0; i < count; ++i)
                          update(p[i * step[0]], m[i * step[1]], v[i * step[2]], g[i * step[3]]);
                      }
                    });
  };
  parameter.dtype() == f64 ? run(double{}) : run(float{});
}

// Calls update(p, m, g) for each element of tensors of one shape.
template <class F>
void update_elements(Tensor& parameter, Tensor& moment, const Tensor& grad, F update) {
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    T* p_data = parameter.mutable_data<T>();
    T* m_data = moment.mutable_data<T>();
    const T* g_data = grad.data<T>();
    for_each_run<3>(parameter.shape(), {parameter.strides(), moment.strides(), grad.strides()},
                    elementwise_grain, [&](auto offset, auto step, int64_t count) {
                      T* p = p_data + offset[0];
                      T* m = m_data + offset[1];
                      const T* g = g_data + offset[2];
                      for (int64_t i = 0; i < count; ++i)
                        update(p[i * step[0]], m[i * step[1]], g[i * step[2]]);
                    });
  };
  parameter.dtype() == f64 ? run(double{}) : run(float{});
}

void sgd_cpu(Tensor& parameter, const Tensor& grad, double lr, double decay) {
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    T* p_data = parameter.mutable_data<T>();
    const T* g_data = grad.data<T>();
    for_each_run<2>(parameter.shape(), {parameter.strides(), grad.strides()}, elementwise_grain,
                    [&](auto offset, auto step, int64_t count) {
                      T* p = p_data + offset[0];
                      const T* g = g_data + offset[1];
                      for (int64_t i = 0; i < count; ++i) {
                        T& p_i = p[i * step[0]];
                        p_i -= T(lr) * (g[i * step[1]] + T(decay) * p_i);
                      }
                    });
  };
  parameter.dtype() == f64 ? run(double{}) : run(float{});
}

struct MomentumFactors {
  double lr, decay, momentum;
  bool nesterov;
};

void sgd_momentum_cpu(Tensor& parameter, Tensor& moment, const Tensor& grad, const MomentumFactors& factors) {
  update_elements(parameter, moment, grad, [&]<class T>(T& p, T& m, T g) {
    g += T(factors.decay) * p;
    m = T(factors.momentum) * m + g;
    p -= T(factors.lr) * (factors.nesterov ? g + T(factors.momentum) * m : m);
  });
}

struct LionFactors {
  double lr, keep, beta1, beta2;  // keep: of the parameter, 1 - lr * weight_decay
};

void lion_cpu(Tensor& parameter, Tensor& moment, const Tensor& grad, const LionFactors& factors) {
  update_elements(parameter, moment, grad, [&]<class T>(T& p, T& m, T g) {
    const T direction = T(factors.beta1) * m + T(1 - factors.beta1) * g;
    // A NaN stays one.
    const T sign = direction > 0 ? T(1) : direction < 0 ? T(-1) : direction;
    p = T(factors.keep) * p - T(factors.lr) * sign;
    m = T(factors.beta2) * m + T(1 - factors.beta2) * g;
  });
}

// Blocks of a fixed length, then their sums in order.
void add_squares_cpu(double& sum, const Tensor& tensor) {
  constexpr int64_t block = 4096;
  const Tensor flat = tensor.contiguous();
  const int64_t count = flat.numel(), blocks = (count + block - 1) / block;
  std::vector<double> partial(static_cast<size_t>(blocks));
  dispatch_floating(flat.dtype(), "clip_grad_norm", [&](auto zero) {
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

void scale_cpu(Tensor& tensor, double factor) {
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

const Kernel<void(Tensor&, Tensor&, Tensor&, const Tensor&, const AdamWFactors&)> adamw_kernel{"adamw.step",
                                                                                               adamw_cpu};
const Kernel<void(Tensor&, const Tensor&, double, double)> sgd_kernel{"sgd.step", sgd_cpu};
const Kernel<void(Tensor&, Tensor&, const Tensor&, const MomentumFactors&)> sgd_momentum_kernel{
    "sgd.momentum_step", sgd_momentum_cpu};
const Kernel<void(Tensor&, Tensor&, const Tensor&, const LionFactors&)> lion_kernel{"lion.step", lion_cpu};
const Kernel<void(double&, const Tensor&)> add_squares_kernel{"clip_grad_norm.squares", add_squares_cpu};
const Kernel<void(Tensor&, double)> scale_kernel{"clip_grad_norm.scale", scale_cpu};

struct AdamFactors {
  double beta1, beta2, eps;
};

void adamw_update(Tensor& value, Optimizer::State& state, const Tensor& grad, double lr, double decay,
                  const AdamFactors& adam) {
  const auto t = static_cast<double>(state.steps);
  const AdamWFactors factors{.keep = 1 - lr * decay,
                             .beta1 = adam.beta1,
                             .beta2 = adam.beta2,
                             .rate = lr / (1 - std::pow(adam.beta1, t)),
                             .root_scale = 1 / std::sqrt(1 - std::pow(adam.beta2, t)),
                             .eps = adam.eps};
  adamw_kernel(value.device(), value, state.first, state.second, grad, factors);
}

}  // namespace

Optimizer::Optimizer(std::string name, std::vector<NamedParameter> parameters, const Settings& settings,
                     const std::function<int(const NamedParameter&)>& moments)
    : name_(std::move(name)), parameters_(std::move(parameters)), lr_(settings.lr) {
  for (const NamedParameter& entry : parameters_) {
    const Parameter& parameter = entry.parameter;
    check(parameter.dtype() == f32 || parameter.dtype() == f64, Error::Kind::DType, "[", name_,
          "] expected f32 or f64, got ", parameter.dtype(), " for ", entry.name);
    Scales scales{1, settings.decays(entry) ? settings.weight_decay : 0};
    for (const ParameterGroup& group : settings.groups)
      if (group.contains(entry)) {
        scales = {group.lr_scale, group.decay_scale * scales.decay};
        break;
      }
    scales_.push_back(scales);
    const auto zeros = [&](int moment) {
      return moment < moments(entry) ? Tensor::zeros(parameter.shape(), parameter.dtype(), parameter.device())
                                     : Tensor();
    };
    states_.push_back({zeros(0), zeros(1), 0});
  }
}

void Optimizer::step() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i].parameter;
    const Tensor& grad = parameter.grad();
    if (!grad.defined()) continue;
    check(grad.shape() == parameter.shape() && grad.dtype() == parameter.dtype(), Error::Kind::Shape, "[",
          name_, "] the gradient of ", parameters_[i].name, " must be ", parameter.dtype(), " ",
          parameter.shape(), ", got ", grad.dtype(), " ", grad.shape());
    ++states_[i].steps;
    update(parameter.mutable_value(), states_[i], grad, lr_ * scales_[i].lr, scales_[i].decay);
  }
}

void Optimizer::zero_grad() {
  for (auto& entry : parameters_) entry.parameter.zero_grad();
}

AdamW::AdamW(std::vector<NamedParameter> parameters, const AdamWOptions& o)
    : Optimizer("adamw", std::move(parameters), {o.lr, o.weight_decay, o.decays, o.groups},
                [](const NamedParameter&) { return 2; }),
      options_(o) {}

void AdamW::update(Tensor& value, State& state, const Tensor& grad, double lr, double decay) {
  adamw_update(value, state, grad, lr, decay, {options_.beta1, options_.beta2, options_.eps});
}

SGD::SGD(std::vector<NamedParameter> parameters, const SGDOptions& o)
    : Optimizer("sgd", std::move(parameters), {o.lr, o.weight_decay, o.decays, o.groups},
                [&](const NamedParameter&) { return o.momentum == 0 ? 0 : 1; }),
      options_(o) {
  check(!o.nesterov || o.momentum > 0, Error::Kind::Value, "[sgd] nesterov needs momentum, got ", o.momentum);
}

void SGD::update(Tensor& value, State& state, const Tensor& grad, double lr, double decay) {
  if (state.first.defined())
    sgd_momentum_kernel(value.device(), value, state.first, grad,
                        {lr, decay, options_.momentum, options_.nesterov});
  else
    sgd_kernel(value.device(), value, grad, lr, decay);
}

Lion::Lion(std::vector<NamedParameter> parameters, const LionOptions& o)
    : Optimizer("lion", std::move(parameters), {o.lr, o.weight_decay, o.decays, o.groups},
                [](const NamedParameter&) { return 1; }),
      options_(o) {}

void Lion::update(Tensor& value, State& state, const Tensor& grad, double lr, double decay) {
  lion_kernel(value.device(), value, state.first, grad, {lr, 1 - lr * decay, options_.beta1, options_.beta2});
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
    : Optimizer("muon", std::move(parameters), {o.lr, o.weight_decay, o.decays, o.groups},
                [&](const NamedParameter& entry) { return o.orthogonalizes(entry) ? 1 : 2; }),
      options_(o) {
  for (const NamedParameter& entry : this->parameters())
    check(!o.orthogonalizes(entry) || entry.parameter.dim() == 2, Error::Kind::Shape, "[muon] ", entry.name,
          " has shape ", entry.parameter.shape(), "; only matrices can be orthogonalised");
}

void Muon::update(Tensor& value, State& state, const Tensor& grad, double lr, double decay) {
  if (state.second.defined()) {
    adamw_update(value, state, grad, lr * options_.adam_lr_scale, decay,
                 {options_.adam_beta1, options_.adam_beta2, options_.adam_eps});
    return;
  }
  const NoGrad only_values;
  const Variable g(grad);
  const Variable moment = Variable(state.first) * options_.momentum + g;
  state.first.copy_(moment.value());
  const Variable direction(
      orthogonalized((options_.nesterov ? g + moment * options_.momentum : moment).value()));
  const auto rows = static_cast<double>(value.size(0)), columns = static_cast<double>(value.size(1));
  const double scale = lr * std::sqrt(std::max(1.0, rows / columns));
  value.copy_((Variable(value) * (1 - lr * decay) - direction * scale).value());
}

double clip_grad_norm(const std::vector<Parameter>& parameters, double max_norm) {
  check(max_norm > 0, Error::Kind::Value, "[clip_grad_norm] max_norm must be positive, got ", max_norm);
  double squares = 0;
  for (const Parameter& parameter : parameters)
    if (parameter.grad().defined()) add_squares_kernel(parameter.device(), squares, parameter.grad());
  const double norm = std::sqrt(squares);
  if (norm > max_norm && std::isfinite(norm))
    for (Parameter parameter : parameters)
      if (parameter.grad().defined())
        scale_kernel(parameter.device(), parameter.mutable_grad(), max_norm / norm);
  return norm;
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
