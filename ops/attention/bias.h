// What is added to the scores of attention.
#pragma once

#include <cstdint>
#include <vector>

#include "torus/autograd/variable.h"

namespace torus {

/// One term added to scale * q.k, before the mask. Of the dtype of q where it has a gradient.
class AttentionBias {
 public:
  /// A tensor that broadcasts to [B, H, Nq, Nk]; differentiable.
  AttentionBias(Variable tensor);

  enum class Kind { dense, relative, alibi };
  Kind kind() const { return kind_; }
  const Variable& value() const { return value_; }
  const std::vector<int64_t>& grid() const { return grid_; }
  const std::vector<bool>& wrapped() const { return wrapped_; }
  /// The same term of another value.
  AttentionBias with(Variable value) const {
    AttentionBias copy = *this;
    copy.value_ = std::move(value);
    return copy;
  }

 private:
  AttentionBias(Kind kind, Variable value) : kind_(kind), value_(std::move(value)) {}
  friend AttentionBias relative_bias(Variable, std::vector<int64_t>, std::vector<bool>);
  friend AttentionBias alibi(Tensor);

  Kind kind_;
  Variable value_;
  std::vector<int64_t> grid_;
  std::vector<bool> wrapped_;
};

/// table [H or 1, R1, R2, ...], every R odd, holds one number for each offset k - q on the grid of the
/// tokens: R/2 stands for 0, and offsets beyond the table take its edge. On a wrapped axis of length L the
/// offset is taken modulo L, in [-(L/2), (L-1)/2]. Queries and keys lie on the same grid. Differentiable
/// (Shaw et al., 2018; Swin, 2021).
AttentionBias relative_bias(Variable table, std::vector<int64_t> grid, std::vector<bool> wrapped = {});

/// -slopes[h] * |k - q|, counted from the last query and key (Press et al., 2022). slopes [H], on any device
/// (a step that is captured needs them on its own); no gradient.
AttentionBias alibi(Tensor slopes);
/// The slopes of that paper for H heads: 2^(-8 i / H), i = 1 ... H, where H is a power of two; else those of
/// the next power below, and every second of the next above.
Tensor alibi_slopes(int64_t heads, DType dtype = f32);

}  // namespace torus
