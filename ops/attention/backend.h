// What the attention node and its backends agree on. Not installed.
#pragma once

#include <cstdint>
#include <string>

#include "torus/autograd/variable.h"
#include "torus/core/tensor.h"
#include "torus/ops/attention/attention.h"

namespace torus::detail {

/// Dropout of attention weights: keep or drop is a pure function of (seed, position, b, h, q, k), so any
/// order of tiles gives the same bits on any device. A row draws one word by Philox; each key mixes into it
/// cheaply.
struct AttentionDropout {
  float probability = 0;
  uint64_t seed = 0, position = 0;

  constexpr bool active() const { return probability > 0; }
  /// What kept weights are multiplied by.
  double keep_scale() const { return probability < 1 ? 1 / (1 - static_cast<double>(probability)) : 0; }
  /// A weight is kept where its mixed word is at least this.
  uint32_t threshold() const {
    const double scaled = static_cast<double>(probability) * 0x1p32;
    return scaled >= 0xffffffffp0 ? 0xffffffffu : static_cast<uint32_t>(scaled);
  }
  /// The word of row q of matrix bh = b * H + h.
  constexpr uint32_t row_word(int64_t bh, int64_t q) const {
    const auto head = static_cast<uint64_t>(bh), row = static_cast<uint64_t>(q);
    return philox({static_cast<uint32_t>(row),
                   static_cast<uint32_t>(row >> 32) ^ static_cast<uint32_t>(head >> 32) << 16,
                   static_cast<uint32_t>(head), static_cast<uint32_t>(position)},
                  seed ^ position >> 32 << 32)[0];
  }
  /// Mixes key k into a row's word (the finalizer of MurmurHash3). Works on integers and on vectors of them.
  template <class Word>
  static constexpr Word mix(Word row, Word key) {
    Word h = row ^ key * 0x9E3779B9u;
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    return h ^ h >> 16;
  }
};

struct AttentionProblem {
  Tensor q, k, v;  // unit last stride
  Mask mask;
  double scale = 1;
  std::vector<AttentionBias> bias;  // values of 4 axes (dense), or as their functions say
  double softcap = 0;
  AttentionDropout dropout;
  bool deterministic = true;

  int64_t batch() const { return q.size(0); }
  int64_t heads() const { return q.size(1); }
  int64_t kv_heads() const { return k.size(1); }
  int64_t queries() const { return q.size(2); }
  int64_t keys() const { return k.size(2); }
  int64_t width() const { return q.size(3); }
  int64_t value_width() const { return v.size(3); }
};

/// Gradients in; gradients out (undefined where not wanted).
struct AttentionGradients {
  Tensor out, lse, d_out, d_lse;  // d_out or d_lse may be undefined, not both
  // Filled by the backend: those that are defined are wanted. `d_bias` has one for each term of the problem,
  // contiguous and of the term's shape.
  Tensor dq, dk, dv;
  std::vector<Tensor> d_bias;
};

/// A fused implementation.
struct AttentionBackend {
  Backend id;
  /// Empty if it can run the problem, else why not.
  std::string (*refusal)(const AttentionProblem& problem);
  void (*forward)(const AttentionProblem& problem, Tensor& out, Tensor& lse);
  void (*backward)(const AttentionProblem& problem, AttentionGradients& gradients);
};

/// Registers a backend at start-up: `const RegisteredBackend r{{Backend::cpu, refusal, forward, backward}};`.
struct RegisteredBackend {
  explicit RegisteredBackend(const AttentionBackend& backend);
};
/// The fused backends of this build, fastest first.
const std::vector<AttentionBackend>& attention_backends();

/// The `reference` backend: ordinary ops that record themselves, on tensors of Nq x Nk.
AttentionOutput reference_attention(const Variable& q, const Variable& k, const Variable& v,
                                    const AttentionProblem& problem);

/// True where x is `value`.
Tensor equals(const Tensor& x, double value);

/// A new tensor [B, H, N, D] whose memory is [B, N, H, D], so that joining the heads again is a view.
Tensor empty_heads(int64_t batch, int64_t heads, int64_t tokens, int64_t width, DType dtype, Device device);

}  // namespace torus::detail
