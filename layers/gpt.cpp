#include "torus/layers/gpt.h"

#include <cmath>

#include "torus/ops/ops.h"

namespace torus {

GPT::GPT(const GPTConfig& config, Generator& generator)
    : tokens(config.vocab_size, config.width, config.dtype, generator),
      positions(config.context, config.width, config.dtype, generator),
      norm(config.width, {.bias = config.bias, .dtype = config.dtype}),
      config_(config),
      dropout_(config.dropout) {
  check(config.vocab_size > 0 && config.context > 0 && config.layers > 0, Error::Kind::Value,
        "[gpt] vocab_size, context and layers must be positive, got ", config.vocab_size, ", ",
        config.context, " and ", config.layers);
  add("tokens", tokens);
  add("positions", positions);
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks.emplace_back(
        config.width, config.heads,
        TransformerBlockOptions{.dropout = config.dropout, .bias = config.bias, .dtype = config.dtype},
        generator);
    add("blocks." + std::to_string(i), blocks.back());
  }
  add("norm", norm);
  head = config.tied_head ? tokens.weight : Parameter(tokens.weight.value().clone());
  add("head.weight", head);
  add("dropout", dropout_);

  for (auto& [name, parameter] : named_parameters()) {
    if (parameter.dim() < 2) continue;
    const bool joins_residual = name.ends_with("attention.out.weight") || name.ends_with("mlp.down.weight");
    const double deviation =
        joins_residual ? 0.02 / std::sqrt(2.0 * static_cast<double>(config.layers)) : 0.02;
    parameter.mutable_value() = randn(parameter.shape(), 0, deviation, config.dtype, generator);
  }
}

Variable GPT::features(const Tensor& indices) const {
  check(indices.dim() == 2, Error::Kind::Shape, "[gpt] expected tokens [B, T], got ", indices.shape());
  check(indices.size(1) <= config_.context, Error::Kind::Shape, "[gpt] expected at most ", config_.context,
        " tokens (the context), got ", indices.size(1));
  Variable x = dropout_(tokens(indices) + slice(positions.weight, 0, 0, indices.size(1)));
  for (const TransformerBlock& block : blocks) x = block(x, causal());
  return norm(x);
}

Variable GPT::logits(const Variable& features) const { return linear(features, head); }

Variable GPT::operator()(const Tensor& indices) const { return logits(features(indices)); }

Variable GPT::loss(const Tensor& indices, const Tensor& targets) const {
  return cross_entropy((*this)(indices), targets);
}

}  // namespace torus
