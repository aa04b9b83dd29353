// attention: one node, fused forward and backward for any mask; it saves only the output and the log-sum-exp.
#pragma once

#include <initializer_list>
#include <optional>
#include <vector>

#include "torus/autograd/variable.h"
#include "torus/core/random.h"
#include "torus/ops/attention/bias.h"
#include "torus/ops/attention/mask.h"

namespace torus {

/// Implementations, from the slowest to the fastest of a device. `automatic` takes the fastest that can run
/// the problem.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wshadow"  // GCC takes Backend::cpu for a shadow of torus::cpu
enum class Backend { automatic, reference, cpu, cuda_simt, cuda_mma, hopper };
#pragma GCC diagnostic pop
const char* name(Backend backend);

struct AttentionOptions {
  Mask mask = full();
  std::optional<double> scale = {};      // any number finite in f32 (f64 for f64); 1 / sqrt(D) if not given
  std::vector<AttentionBias> bias = {};  // added to the scores, one after another
  double softcap = 0;         // c > 0: scores become c * tanh(scale * q.k / c) before the bias; 0: they stay
  double dropout = 0;         // probability that an attention weight is dropped; 0 <= p <= 1
  bool deterministic = true;  // same inputs, same bits, for any thread count
  Backend backend = Backend::automatic;
  Generator* generator = nullptr;  // of the dropout; default_generator() if null
};

struct AttentionOutput {
  Variable out;  // [B, H, Nq, Dv], the dtype of q
  Variable
      lse;  // [B, H, Nq], natural logarithm of the sum of exponentials, f32 (f64 for f64); differentiable
};

/// softmax(softcap(scale * q k^T) + bias, over the keys that the mask allows) v, row by row (Vaswani et al.,
/// 2017), without a tensor of Nq x Nk (Dao et al., "FlashAttention", 2022). q [B, H, Nq, D], k [B, Hk, Nk,
/// D], v [B, Hk, Nk, Dv], of one floating dtype; H a multiple of Hk: query head h reads key head h / (H /
/// Hk). Strides are free where the last is 1; other operands are copied. `out` is laid out so that
/// transpose(out, 1, 2) is contiguous. A row with no key, or with scores of -inf alone, gives out 0, lse -inf
/// and zero gradients. Throws Error{Shape, DType, Value}, and Error{Device} listing each refusal if no
/// backend can run.
AttentionOutput attention(const Variable& q, const Variable& k, const Variable& v,
                          const AttentionOptions& options = {});

/// x [B, N, H * D] as [B, H, N, D], which attention takes, and an output of it back: views.
Variable split_heads(const Variable& x, int64_t heads);
Variable join_heads(const Variable& x);

/// While alive, `automatic` chooses among these backends only, on this thread.
class BackendScope {
 public:
  BackendScope(std::initializer_list<Backend> allowed);
  ~BackendScope();
  BackendScope(const BackendScope&) = delete;
  BackendScope& operator=(const BackendScope&) = delete;

 private:
  std::vector<Backend> outer_;
};

}  // namespace torus
