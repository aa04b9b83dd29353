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
  // As in TransformerBlockOptions. With `rotary`, in place of learned positions.
  int64_t kv_heads = 0;
  NormKind norm = NormKind::layer;
  bool post_norm = false, swiglu = false, rotary = false;
  Gelu gelu = Gelu::exact;  // Radford et al. take the other, tanh
  DType dtype = f32;
  bool operator==(const GPTConfig&) const = default;
};

/// What a GPT has seen of the beginning of a sequence, or of a batch of them.
struct GPTCache {
  std::vector<KeyValueCache> blocks = {};  // made at first use
  int64_t length = 0;                      // tokens seen
};

/// Token and learned position embeddings, pre-norm blocks under a causal mask, a last norm and an output
/// layer without bias (Radford et al., 2019). Weights start normal with deviation 0.02, divided by sqrt(2
/// layers) in the two projections of each block that join the residual stream; biases at 0, norms at 1. The
/// last norm is left out with `post_norm`: the stream is normed already.
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
  /// The features of tokens [B, T] that follow those of the cache, `context` at most in all, computed from
  /// them alone; the cache then holds these, too. While no tape records.
  Variable features(const Tensor& tokens, GPTCache& cache) const;

  const GPTConfig& config() const { return config_; }

  Embedding tokens, positions;  // with `rotary`, positions has no rows and is not a member of the lists
  std::deque<TransformerBlock> blocks;
  Norm norm;
  Parameter head;  // [V, C]: a handle of tokens.weight if tied

 private:
  /// Tokens as they enter the blocks, the first of them at place `first`.
  Variable embedded(const Tensor& tokens, int64_t first) const;

  GPTConfig config_;
  Dropout dropout_;
};

}  // namespace torus
