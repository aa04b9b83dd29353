#include "torus/layers/gpt.h"

#include <cmath>

#include "torus/ops/ops.h"

namespace torus {

GPT::GPT(const GPTConfig& config, Generator& generator)
    : tokens(config.vocab_size, config.width, config.dtype, generator),
      positions(config.rotary ? 0 : config.context, config.width, config.dtype, generator),
      norm(config.width, {.kind = config.norm, .bias = config.bias, .dtype = config.dtype}),
      config_(config),
      dropout_(config.dropout) {
  check(config.vocab_size > 0 && config.context > 0 && config.layers > 0, Error::Kind::Value,
        "[gpt] vocab_size, context and layers must be positive, got ", config.vocab_size, ", ",
        config.context, " and ", config.layers);
  add("tokens", tokens);
  if (!config.rotary) add("positions", positions);
  for (int64_t i = 0; i < config.layers; ++i) {
    blocks.emplace_back(config.width, config.heads,
                        TransformerBlockOptions{.kv_heads = config.kv_heads,
                                                .dropout = config.dropout,
                                                .bias = config.bias,
                                                .norm = config.norm,
                                                .post_norm = config.post_norm,
                                                .swiglu = config.swiglu,
                                                .gelu = config.gelu,
                                                .rotary = config.rotary,
                                                .dtype = config.dtype},
                        generator);
    add("blocks." + std::to_string(i), blocks.back());
  }
  if (!config.post_norm) add("norm", norm);
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

Variable GPT::embedded(const Tensor& indices, int64_t first) const {
  check(indices.dim() == 2, Error::Kind::Shape, "[gpt] expected tokens [B, T], got ", indices.shape());
  const int64_t last = first + indices.size(1);
  check(last <= config_.context, Error::Kind::Shape, "[gpt] expected at most ", config_.context,
        " tokens (the context), got ", last);
  const Variable x = tokens(indices.to(tokens.weight.device()));
  return dropout_(config_.rotary ? x : x + slice(positions.weight, 0, first, last));
}

Variable GPT::features(const Tensor& indices) const {
  Variable x = embedded(indices, 0);
  for (const TransformerBlock& block : blocks) x = block(x, causal());
  return config_.post_norm ? x : norm(x);
}

Variable GPT::features(const Tensor& indices, GPTCache& cache) const {
  Variable x = embedded(indices, cache.length);
  cache.blocks.resize(blocks.size(), {.capacity = config_.context});
  for (size_t i = 0; i < blocks.size(); ++i) x = blocks[i](x, cache.blocks[i]);
  cache.length += indices.size(1);
  return config_.post_norm ? x : norm(x);
}

Variable GPT::logits(const Variable& features) const { return linear(features, head); }

Variable GPT::operator()(const Tensor& indices) const { return logits(features(indices)); }

Variable GPT::loss(const Tensor& indices, const Tensor& targets) const {
  return cross_entropy((*this)(indices), targets.to(tokens.weight.device()));
}

}  // namespace torus
