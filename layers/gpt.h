// GPT: a decoder-only transformer over tokens. Letters: B batch, T tokens, V vocabulary.
#pragma once

#include <deque>

#include "torus/layers/transformer.h"

namespace torus {

struct GPTConfig {
  int64_t vocab_size = 256;
  int64_t context = 64;  // the most tokens it sees at once
  int64_t layers = 4, heads = 4, width = 128;
  double dropout = 0;
  bool tied_head = true;  // the output layer is the token embedding
  bool bias = true;       // of projections and norms
  DType dtype = f32;
  bool operator==(const GPTConfig&) const = default;
};

/// Token and learned position embeddings, pre-norm blocks under a causal mask, a last norm and an output
/// layer without bias (Radford et al., 2019). Weights start normal with deviation 0.02, divided by sqrt(2
/// layers) in the two projections of each block that join the residual stream; biases at 0, norms at 1.
class GPT : public Module {
 public:
  explicit GPT(const GPTConfig& config, Generator& generator = default_generator());

  /// tokens [B, T] (i64, each in [0, V), T <= context) give logits [B, T, V] of the token that follows each.
  Variable operator()(const Tensor& tokens) const;
  /// Mean cross-entropy of targets [B, T] in nats a token; targets of `ignore_none` do not count.
  Variable loss(const Tensor& tokens, const Tensor& targets) const;
  /// The two halves of operator(): the normed residual stream [B, T, C], and logits of any [..., C] of it.
  Variable features(const Tensor& tokens) const;
  Variable logits(const Variable& features) const;

  const GPTConfig& config() const { return config_; }

  Embedding tokens, positions;
  std::deque<TransformerBlock> blocks;
  LayerNorm norm;
  Parameter head;  // [V, C]: a handle of tokens.weight if tied

 private:
  GPTConfig config_;
  Dropout dropout_;
};

}  // namespace torus
