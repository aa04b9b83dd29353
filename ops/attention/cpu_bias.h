// What is added to scores on the CPU, and the way back. For cpu.cpp; not installed.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "torus/core/vector_math.h"
#include "torus/ops/attention/cpu_tiles.h"

namespace torus::detail {

/// Tokens of a panel: those of its rows and those of its lanes.
struct Pairs {
  const Block& block;
  const Panel& panel;
  Tokens owners;
  Side side;  // of the owners
  int64_t row_token(int64_t r) const { return block.tokens[panel.rows[r]]; }
  /// 0 for a lane without a token.
  int64_t lane_token(int64_t lane) const {
    const auto i = static_cast<size_t>(panel.lane + lane);
    return i < owners.size() ? owners[i] : owners[0];
  }
};

/// All terms of one problem. What is added to a score, and the way back, is found pair by pair: simple, and
/// cheap beside the products.
template <class S>
class Bias {
 public:
  using T = Compute<S>;

  explicit Bias(const AttentionProblem& problem) : p_(problem) {
    for (const AttentionBias& term : problem.bias) {
      Term t{term.kind(), term.value().value(), {}, {}};
      if (t.kind == AttentionBias::Kind::relative) {
        int64_t stride = 1;
        t.axes.resize(term.grid().size());
        for (size_t a = term.grid().size(); a-- > 0;) {
          Axis& axis = t.axes[a];
          axis.length = term.grid()[a];
          const int64_t size = t.value.shape()[static_cast<int>(a) + 1], length = axis.length;
          for (int64_t offset = -(length - 1); offset < length; ++offset) {
            int64_t o = offset;
            if (term.wrapped()[a]) {
              o = (o % length + length) % length;
              if (o > (length - 1) / 2) o -= length;
            }
            axis.place.push_back(
                static_cast<int32_t>((std::clamp(o, -(size / 2), size / 2) + size / 2) * stride));
          }
          stride *= size;
        }
        t.table = t.value.contiguous();
      } else if (t.kind == AttentionBias::Kind::dense) {
        t.value = t.value.expand({problem.batch(), problem.heads(), problem.queries(), problem.keys()});
      } else {
        t.table = t.value.to(f64).contiguous();
      }
      terms_.push_back(std::move(t));
    }
  }

  bool any() const { return !terms_.empty(); }

  /// scores[r][lane] += the bias of the pair.
  void add(T* scores, const Pairs& pairs, int64_t b, int64_t h) const {
    for (const Term& term : terms_) {
      if (term.kind == AttentionBias::Kind::alibi) {
        const double slope = term.table.template data<double>()[h];
        for_each_pair(term, {}, pairs, b, h, [&](int64_t r, int64_t lane, int64_t distance) {
          scores[r * tile_size + lane] -= static_cast<T>(slope * static_cast<double>(distance));
        });
        continue;
      }
      const bool dense = term.kind == AttentionBias::Kind::dense;
      const S* from = (dense ? term.value : term.table).template data<S>();
      for_each_pair(term, term.value.strides(), pairs, b, h, [&](int64_t r, int64_t lane, int64_t index) {
        scores[r * tile_size + lane] += static_cast<T>(from[index]);
      });
    }
  }

  /// Adds d_scores to the gradient of term i. `strides`: of the gradient of a dense term.
  void add_gradient(size_t i, T* grad, const Shape& strides, const T* d_scores, const Pairs& pairs, int64_t b,
                    int64_t h) const {
    const auto lanes =
        std::min(pairs.panel.lanes, static_cast<int64_t>(pairs.owners.size()) - pairs.panel.lane);
    for_each_pair(terms_[i], strides, pairs, b, h, [&](int64_t r, int64_t lane, int64_t index) {
      if (lane < lanes) grad[index] += d_scores[r * tile_size + lane];
    });
  }

 private:
  struct Axis {
    int64_t length = 1;
    std::vector<int32_t> place;  // of offset o at o + length - 1
  };
  struct Term {
    AttentionBias::Kind kind;
    Tensor value, table;
    std::vector<Axis> axes;
  };

  // f(r, lane, index of the element), by `strides` if the term is dense; for alibi the distance of the pair.
  template <class F>
  void for_each_pair(const Term& term, const Shape& strides, const Pairs& pairs, int64_t b, int64_t h,
                     F&& f) const {
    const bool queries_own = pairs.side == Side::query;
    const int64_t lanes = pairs.panel.lanes;
    int64_t lane_tokens[tile_size];
    for (int64_t lane = 0; lane < lanes; ++lane) lane_tokens[lane] = pairs.lane_token(lane);
    if (term.kind == AttentionBias::Kind::dense) {
      const int64_t first = b * strides[0] + h * strides[1];
      const int64_t row_stride = strides[queries_own ? 3 : 2], lane_stride = strides[queries_own ? 2 : 3];
      for (int64_t r = 0; r < pairs.panel.count; ++r)
        for (int64_t lane = 0; lane < lanes; ++lane)
          f(r, lane, first + pairs.row_token(r) * row_stride + lane_tokens[lane] * lane_stride);
    } else if (term.kind == AttentionBias::Kind::alibi) {
      const int64_t shift = p_.keys() - p_.queries();
      for (int64_t r = 0; r < pairs.panel.count; ++r)
        for (int64_t lane = 0; lane < lanes; ++lane) {
          const int64_t q = queries_own ? lane_tokens[lane] : pairs.row_token(r);
          const int64_t k = queries_own ? pairs.row_token(r) : lane_tokens[lane];
          f(r, lane, std::abs(k - q - shift));
        }
    } else {
      const int64_t head_size = term.value.numel() / std::max<int64_t>(term.value.size(0), 1);
      const int64_t first = term.value.size(0) == 1 ? 0 : h * head_size;
      const size_t axes = term.axes.size();
      std::array<std::array<int32_t, tile_size>, max_grid_axes> lane_coord;
      for (int64_t lane = 0; lane < lanes; ++lane)
        for (size_t a = axes, rest = static_cast<size_t>(lane_tokens[lane]); a-- > 0;) {
          const auto length = static_cast<size_t>(term.axes[a].length);
          lane_coord[a][static_cast<size_t>(lane)] = static_cast<int32_t>(rest % length);
          rest /= length;
        }
      int32_t index[tile_size];
      for (int64_t r = 0; r < pairs.panel.count; ++r) {
        std::fill(index, index + lanes, 0);
        auto rest = pairs.row_token(r);
        for (size_t a = axes; a-- > 0;) {
          const int64_t length = term.axes[a].length;
          const auto coord = static_cast<int32_t>(rest % length);
          rest /= length;
          const int32_t* place = term.axes[a].place.data() + length - 1;
          for (int64_t lane = 0; lane < lanes; ++lane) {
            const int32_t other = lane_coord[a][static_cast<size_t>(lane)];
            index[lane] += place[queries_own ? coord - other : other - coord];
          }
        }
        for (int64_t lane = 0; lane < lanes; ++lane) f(r, lane, first + index[lane]);
      }
    }
  }

  const AttentionProblem& p_;
  std::vector<Term> terms_;
};

/// What softcap and bias make of q.k. Plain scores are left to be scaled where they are used.
template <class S>
class Scores {
 public:
  using T = Compute<S>;
  explicit Scores(const AttentionProblem& p) : bias(p), p_(p) {}

  /// Whether `finish` must be called, and then scores need no more scaling.
  bool finishes() const { return bias.any() || p_.softcap > 0; }
  T scale() const { return finishes() ? T(1) : static_cast<T>(p_.scale); }

  /// scores = softcap(scale * scores) + bias. `slope`, if given, gets the derivative by q.k.
  void finish(T* scores, T* slope, const Pairs& pairs, int64_t b, int64_t h) const {
    const T scale = static_cast<T>(p_.scale), cap = static_cast<T>(p_.softcap);
    for (int64_t r = 0; r < pairs.panel.count; ++r) {
      T* s = scores + r * tile_size;
      T* d = slope ? slope + r * tile_size : nullptr;
      if (p_.softcap > 0) {
        for (int64_t lane = 0; lane < pairs.panel.lanes; ++lane) {
          const T t = vmath::tanh(s[lane] * scale / cap);
          s[lane] = cap * t;
          if (d) d[lane] = (1 - t * t) * scale;
        }
      } else {
        for (int64_t lane = 0; lane < pairs.panel.lanes; ++lane) s[lane] *= scale;
        if (d) std::fill(d, d + pairs.panel.lanes, scale);
      }
    }
    bias.add(scores, pairs, b, h);
  }

  const Bias<S> bias;

 private:
  const AttentionProblem& p_;
};

}  // namespace torus::detail
