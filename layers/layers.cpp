#include "torus/layers/layers.h"

#include <cmath>

#include "torus/ops/ops.h"

namespace torus {

Linear::Linear(int64_t inputs, int64_t outputs, const LinearOptions& options, Generator& generator) {
  check(inputs > 0 && outputs > 0, Error::Kind::Shape, "[linear] inputs and outputs must be positive, got ",
        inputs, " and ", outputs);
  const double bound = 1 / std::sqrt(static_cast<double>(inputs));
  weight = Parameter(rand({outputs, inputs}, -bound, bound, options.dtype, generator));
  if (options.bias) bias = Parameter(Tensor::zeros({outputs}, options.dtype));
  add("weight", weight);
  add("bias", bias);
}

Variable Linear::operator()(const Variable& x, const Variable& residual) const {
  return linear(x, weight, bias, residual);
}

Embedding::Embedding(int64_t count, int64_t channels, DType dtype, Generator& generator) {
  check(count >= 0 && channels >= 0, Error::Kind::Shape,
        "[embedding] expected count and channels of at least 0, got ", count, " and ", channels);
  weight = Parameter(randn({count, channels}, 0, 0.02, dtype, generator));
  add("weight", weight);
}

Variable Embedding::operator()(const Tensor& indices) const { return embedding(weight, indices); }

LayerNorm::LayerNorm(int64_t channels, const LayerNormOptions& options)
    : weight(Tensor::full({channels}, 1, options.dtype)), eps_(options.eps) {
  if (options.bias) bias = Parameter(Tensor::zeros({channels}, options.dtype));
  add("weight", weight);
  add("bias", bias);
}

Variable LayerNorm::operator()(const Variable& x) const { return layer_norm(x, weight, bias, eps_); }

RMSNorm::RMSNorm(int64_t channels, const RMSNormOptions& options)
    : weight(Tensor::full({channels}, 1, options.dtype)), eps_(options.eps) {
  add("weight", weight);
}

Variable RMSNorm::operator()(const Variable& x) const { return rms_norm(x, weight, eps_); }

Norm::Norm(int64_t channels, const NormOptions& options)
    : weight(Tensor::full({channels}, 1, options.dtype)), kind_(options.kind) {
  if (options.bias && kind_ == NormKind::layer) bias = Parameter(Tensor::zeros({channels}, options.dtype));
  add("weight", weight);
  add("bias", bias);
}

Variable Norm::operator()(const Variable& x) const {
  return kind_ == NormKind::rms ? rms_norm(x, weight) : layer_norm(x, weight, bias);
}

Dropout::Dropout(double p) : p_(p) {
  check(p >= 0 && p <= 1, Error::Kind::Value, "[dropout] expected 0 <= p <= 1, got ", p);
}

Variable Dropout::operator()(const Variable& x, const Variable& residual) const {
  return dropout(x, drops() ? p_ : 0, default_generator(), residual);
}

MLP::MLP(int64_t channels, int64_t hidden, const MLPOptions& options, Generator& generator)
    : up(channels, options.swiglu ? 2 * hidden : hidden, {options.bias, options.dtype}, generator),
      down(hidden, channels, {options.bias, options.dtype}, generator),
      swiglu_(options.swiglu),
      gelu_(options.gelu),
      dropout_(options.dropout) {
  add("up", up);
  add("down", down);
  add("dropout", dropout_);
}

Variable MLP::operator()(const Variable& x, const Variable& residual) const {
  if (!swiglu_)
    return dropout_.after(
        [this](const Variable& y, const Variable& added) {
          return mlp(y, up.weight, up.bias, down.weight, down.bias, added, gelu_);
        },
        x, residual);
  const Variable both = up(x);
  const auto parts = split(both, {both.size(-1) / 2, both.size(-1) / 2}, -1);
  return dropout_.after(down, silu(parts[0]) * parts[1], residual);
}

}  // namespace torus
