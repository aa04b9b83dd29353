// Transformers on grids of any number of axes: each token sees a window around it.
#pragma once

#include <deque>
#include <utility>
#include <vector>

#include "torus/layers/layers.h"
#include "torus/ops/attention/mask.h"

namespace torus {

struct NeighborhoodAttentionOptions {
  int64_t channels = 0, heads = 1;
  std::vector<int64_t> window = {};  // one entry an axis of the grid; also below, or one for all
  std::vector<int64_t> dilation = {};
  std::vector<Boundary> boundary = {};  // wrap, shift, shrink or causal
  bool rotary = true;                   // rotary codes for each axis, periodic on those that wrap
  bool relative_bias = false;           // a learned number for each head and offset of the window, at first 0
  double dropout = 0;                   // of the attention weights, and of the output
  bool bias = true;
  DType dtype = f32;
};

/// Self-attention of tokens on a grid, between two projections. If all axes wrap, it commutes with rolling
/// the grid.
class NeighborhoodAttention : public Module {
 public:
  explicit NeighborhoodAttention(const NeighborhoodAttentionOptions& options,
                                 Generator& generator = default_generator());
  /// x [B, X, Y, ..., C], with as many grid axes as windows, of any sizes: the same shape. Plus `residual`,
  /// shaped as x, if given.
  Variable operator()(const Variable& x, const Variable& residual = {}) const;

  Linear qkv, out;
  Parameter table;  // [heads, 2 r + 1, ...], r the reach of the window; undefined without relative_bias

 private:
  /// What depends on the sizes of the grid alone.
  struct Place {
    Mask mask;
    Tensor codes;
  };
  Place place(const std::vector<int64_t>& grid, Device device) const;

  NeighborhoodAttentionOptions options_;
  std::vector<bool> wrapped_;
  Dropout dropout_;
  mutable std::deque<std::pair<std::vector<int64_t>, Place>> places_;  // of the last few grids, newest first
};

struct GridTransformerBlockOptions {
  NeighborhoodAttentionOptions attention = {};
  int64_t hidden = 0;  // channels inside the MLP; 0: 4 C
};

/// x + attention(norm1(x)), then x + mlp(norm2(x)), on x [B, X, Y, ..., C].
class GridTransformerBlock : public Module {
 public:
  explicit GridTransformerBlock(const GridTransformerBlockOptions& options,
                                Generator& generator = default_generator());
  Variable operator()(const Variable& x) const;

  LayerNorm norm1;
  NeighborhoodAttention attention;
  LayerNorm norm2;
  MLP mlp;
};

struct GridTransformerOptions {
  int64_t inputs = 1, outputs = 1;    // channels of a point of the grid
  std::vector<int64_t> patch = {};    // points that make a token, one entry an axis
  int64_t layers = 2;                 // blocks
  GridTransformerBlockOptions block;  // its windows count tokens
};

/// Patches of x [B, X, Y, ..., inputs] become tokens; blocks, a norm, and back: [B, X, Y, ..., outputs]. For
/// grids of 1 to 3 axes whose sizes are multiples of the patch's. If all axes wrap, it commutes with rolling
/// by whole patches. The output layer starts normal with deviation 0.02.
class GridTransformer : public Module {
 public:
  explicit GridTransformer(const GridTransformerOptions& options, Generator& generator = default_generator());
  Variable operator()(const Variable& x) const;

  Linear embed;
  std::deque<GridTransformerBlock> blocks;
  LayerNorm norm;
  Linear head;

 private:
  GridTransformerOptions options_;
};

}  // namespace torus
