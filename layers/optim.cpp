#include "torus/layers/optim.h"

#include <cmath>
#include <numbers>

#include "torus/core/kernel.h"
#include "torus/core/strided.h"

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
const Kernel<void(double&, const Tensor&)> add_squares_kernel{"clip_grad_norm.squares", add_squares_cpu};
const Kernel<void(Tensor&, double)> scale_kernel{"clip_grad_norm.scale", scale_cpu};

}  // namespace

AdamW::AdamW(std::vector<NamedParameter> parameters, const AdamWOptions& options)
    : parameters_(std::move(parameters)), options_(options) {
  for (const auto& [name, parameter] : parameters_) {
    check(parameter.dtype() == f32 || parameter.dtype() == f64, Error::Kind::DType,
          "[adamw] expected f32 or f64, got ", parameter.dtype(), " for ", name);
    const auto zeros = [&] {
      return Tensor::zeros(parameter.shape(), parameter.dtype(), parameter.device());
    };
    states_.push_back({zeros(), zeros(), 0});
  }
}

void AdamW::step() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i].parameter;
    State& state = states_[i];
    const Tensor& grad = parameter.grad();
    if (!grad.defined()) continue;
    check(grad.shape() == parameter.shape() && grad.dtype() == parameter.dtype(), Error::Kind::Shape,
          "[adamw] the gradient of ", parameters_[i].name, " must be ", parameter.dtype(), " ",
          parameter.shape(), ", got ", grad.dtype(), " ", grad.shape());
    const auto t = static_cast<double>(++state.steps);
    const double decay = options_.decays(parameters_[i]) ? options_.weight_decay : 0;
    const AdamWFactors factors{.keep = 1 - options_.lr * decay,
                               .beta1 = options_.beta1,
                               .beta2 = options_.beta2,
                               .rate = options_.lr / (1 - std::pow(options_.beta1, t)),
                               .root_scale = 1 / std::sqrt(1 - std::pow(options_.beta2, t)),
                               .eps = options_.eps};
    adamw_kernel(parameter.device(), parameter.mutable_value(), state.first, state.second, grad, factors);
  }
}

void AdamW::zero_grad() {
  for (auto& entry : parameters_) entry.parameter.zero_grad();
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

double warmup_cosine(int64_t step, int64_t warmup, int64_t total, double peak, double floor) {
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup + 1);
  if (step >= total) return floor;
  const double progress = static_cast<double>(step - warmup) / static_cast<double>(total - warmup);
  return floor + (peak - floor) * (1 + std::cos(std::numbers::pi * progress)) / 2;
}

}  // namespace torus
