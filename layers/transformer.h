// Attention with its projections, and the block that transformers stack. Letters: B batch, N and M tokens, C
// channels.
#pragma once

#include "torus/layers/layers.h"
#include "torus/ops/attention/mask.h"

namespace torus {

struct MultiHeadAttentionOptions {
  int64_t kv_heads = 0;  // key heads, each shared by heads / kv_heads query heads; 0: as many as query heads
  double dropout = 0;    // of the attention weights, and of the output
  bool bias = true;
  bool rotary = false;  // turns queries and keys of self-attention by their places (Su et al., 2021)
  DType dtype = f32;
};

/// Keys and values of the tokens that causal self-attention has seen: a further token reads them instead of
/// computing them again.
struct KeyValueCache {
  int64_t capacity = 0;           // tokens
  int64_t length = 0;             // tokens held
  Tensor keys = {}, values = {};  // [B, kv_heads, capacity, C / heads], made at first use
};

/// Attention of `heads` heads of C / heads channels between two projections (Vaswani et al., 2017): `qkv`,
/// whose rows are the queries', the keys' and the values', and `out`. The result is added to `residual`,
/// shaped as x, if given.
class MultiHeadAttention : public Module {
 public:
  MultiHeadAttention(int64_t channels, int64_t heads, const MultiHeadAttentionOptions& options = {},
                     Generator& generator = default_generator());
  /// Self-attention: x [B, N, C] gives [B, N, C].
  Variable operator()(const Variable& x, const Mask& mask = full(), const Variable& residual = {}) const;
  /// Causal self-attention of x [B, N, C], the tokens after those of the cache, to which it adds them. Throws
  /// Error{Value} where the cache is full, or while a tape records: gradients do not reach the cache.
  Variable operator()(const Variable& x, KeyValueCache& cache, const Variable& residual = {}) const;
  /// Cross-attention: x [B, N, C] reads context [B, M, C]; the mask is of N queries and M keys.
  Variable operator()(const Variable& x, const Variable& context, const Mask& mask = full()) const;

  Linear qkv, out;

 private:
  /// [B, N, H * D] seen as [B, H, N, D].
  Variable heads(const Variable& x) const;
  /// Turned as tokens first, first + 1, ..., if `rotary`.
  Variable turned(const Variable& x, int64_t first) const;
  Variable attend(const Variable& q, const Variable& k, const Variable& v, const Mask& mask,
                  const Variable& residual) const;

  int64_t channels_, kv_channels_, head_channels_;
  bool rotary_;
  mutable Tensor codes_;  // of as many tokens as were ever met
  double weight_dropout_;
  Dropout dropout_;
};

struct CrossAttentionOptions {
  int64_t query_dim = 0;
  int64_t context_dim = 0;  // 0: as query_dim
  int64_t heads = 8, head_dim = 64;
  double dropout = 0;  // of the output
  DType dtype = f32;
};

/// Attention from one sequence to another, without biases but in the last projection: the layer of latent
/// diffusion and xformers (Rombach et al., 2022). Memory grows with N + M, in training too.
class CrossAttention : public Module {
 public:
  explicit CrossAttention(const CrossAttentionOptions& options, Generator& generator = default_generator());
  /// x [B, N, query_dim] reads context [B, M, context_dim] (x itself if not given): [B, N, query_dim].
  Variable operator()(const Variable& x, const Variable& context = {}, const Mask& mask = full()) const;

  Linear to_q, to_k, to_v, to_out;

 private:
  CrossAttentionOptions options_;
  Dropout dropout_;
};

struct TransformerBlockOptions {
  int64_t kv_heads = 0;  // as in MultiHeadAttention
  int64_t hidden = 0;    // channels inside the MLP; 0: 4 C
  double dropout = 0;    // of the attention weights and of what joins the residual stream
  bool bias = true;      // of the projections and norms
  NormKind norm = NormKind::layer;
  bool post_norm = false;
  bool swiglu = false;      // in the MLP, whose `hidden` is then 8/3 C, rounded up to a multiple of 8, if 0
  Gelu gelu = Gelu::exact;  // of an MLP without swiglu
  bool rotary = false;      // as in MultiHeadAttention
  DType dtype = f32;
};

/// x + attention(norm1(x)), then x + mlp(norm2(x)): norms before, so that the residual stream is never
/// normalised (Xiong et al., 2020). With `post_norm`, norm1(x + attention(x)), then norm2(x + mlp(x)), as in
/// Vaswani et al. (2017).
class TransformerBlock : public Module {
 public:
  TransformerBlock(int64_t channels, int64_t heads, const TransformerBlockOptions& options = {},
                   Generator& generator = default_generator());
  /// x [B, N, C] gives [B, N, C].
  Variable operator()(const Variable& x, const Mask& mask = full()) const;
  Variable operator()(const Variable& x, KeyValueCache& cache) const;

  Norm norm1;
  MultiHeadAttention attention;
  Norm norm2;
  MLP mlp;

 private:
  template <class How>
  Variable run(const Variable& x, How&& how) const;

  bool post_norm_;
};

}  // namespace torus
