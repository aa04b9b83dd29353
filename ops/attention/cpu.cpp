// The fused kernels on the CPU. Up to 64 owners (queries in forward, keys in backward) lie on the lanes of
// vectors; the others pass by in blocks of up to 64 rows, reached through pointers, so any order of tokens
// costs the same. Where bits leave much of a block out, each vector of lanes gets a panel of the rows that it
// needs. 16-bit operands are widened block by block.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <thread>
#include <vector>

#include "torus/core/parallel.h"
#include "torus/core/simd.h"
#include "torus/core/vector_math.h"
#include "torus/ops/attention/backend.h"
#include "torus/ops/attention/map.h"

namespace torus::detail {

namespace {

using simd::load, simd::store, simd::splat, simd::multiply_panel, simd::Vector;

template <class T>
inline constexpr T infinity = std::numeric_limits<T>::infinity();

// Memory for one tile, aligned to a vector.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : data_(static_cast<T*>(
            ::operator new(static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T), alignment))) {}
  ~Scratch() { ::operator delete(data_, alignment); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator T*() { return data_; }

 private:
  static constexpr std::align_val_t alignment{64};
  T* data_;
};

template <class T>
int64_t padded(int64_t count) {
  return (count + simd::lanes<T> - 1) / simd::lanes<T> * simd::lanes<T>;
}

// Calls f(std::true_type or std::false_type), so that its loops do not ask again and again.
template <class F>
void with_bool(bool value, F&& f) {
  if (value)
    f(std::true_type{});
  else
    f(std::false_type{});
}

// One head: a contiguous row for each token.
template <class S>
struct Head {
  S* first;
  int64_t stride;
  S* row(int64_t token) const { return first + token * stride; }
};

template <class S>
Head<const S> read_head(const Tensor& x, int64_t b, int64_t h) {
  return {x.data<S>() + b * x.strides()[0] + h * x.strides()[1], x.strides()[2]};
}

template <class S>
Head<S> write_head(S* data, const Tensor& x, int64_t b, int64_t h) {
  return {data + b * x.strides()[0] + h * x.strides()[1], x.strides()[2]};
}

using Tokens = std::span<const int64_t>;

bool contiguous(Tokens tokens) {
  return tokens.back() - tokens.front() + 1 == static_cast<int64_t>(tokens.size()) &&
         std::is_sorted(tokens.begin(), tokens.end());
}

// to[d][lane] = row of the lane's token, 0 beyond them.
template <class S, class T>
void pack_transposed(T* to, const Head<const S>& head, Tokens tokens, int64_t width) {
  const auto count = static_cast<int64_t>(tokens.size());
  for (int64_t d = 0; count < tile_size && d < width; ++d)
    std::fill(to + d * tile_size + count, to + (d + 1) * tile_size, T(0));
  if (contiguous(tokens))
    return simd::transpose(to, tile_size, head.row(tokens[0]), head.stride, count, width);
  for (int64_t i = 0; i < count; ++i) {
    const S* row = head.row(tokens[static_cast<size_t>(i)]);
    for (int64_t d = 0; d < width; ++d) to[d * tile_size + i] = row[d];
  }
}

// The inverse.
template <class S, class T>
void unpack_transposed(const Head<S>& head, const T* from, Tokens tokens, int64_t width) {
  const auto count = static_cast<int64_t>(tokens.size());
  if (contiguous(tokens))
    return simd::transpose(head.row(tokens[0]), head.stride, from, tile_size, width, count);
  for (int64_t i = 0; i < count; ++i) {
    S* row = head.row(tokens[static_cast<size_t>(i)]);
    for (int64_t d = 0; d < width; ++d) row[d] = static_cast<S>(from[d * tile_size + i]);
  }
}

// Up to 64 others that a tile visits.
struct Block {
  int64_t tokens[tile_size];
  int64_t count;
  const uint64_t* bits;  // one word an other; nullptr: every pair is allowed
};

template <class F>
void for_each_block(const MaskMap& map, Side side, int64_t tile, F&& f) {
  const SideMap& m = map.side(side);
  Block block;
  for (const Visit& visit : m.of_tile(tile))
    for (int64_t at = 0; at < visit.count; at += tile_size) {
      block.count = std::min(tile_size, visit.count - at);
      for (int64_t i = 0; i < block.count; ++i)
        block.tokens[i] = visit.kind == Visit::Kind::gather
                              ? m.lists[static_cast<size_t>(visit.first + at + i)]
                              : visit.first + at + i;
      block.bits = nullptr;
      if (visit.kind != Visit::Kind::interval) {
        const int32_t id = m.atom_ids[static_cast<size_t>(visit.atoms + at / tile_size)];
        if (id >= 0) block.bits = map.atoms[static_cast<size_t>(id)].data();
      }
      f(block);
    }
}

// Rows of a block that some of neighbouring vectors of lanes need.
struct Panel {
  int64_t lane, lanes;  // first lane, and how many
  int64_t count;
  bool masked;  // look at `words`
  int64_t rows[tile_size];
  uint64_t words[tile_size];  // shifted so that bit 0 is lane `lane`
};

template <class T, class F>
void for_each_panel(const Block& block, int64_t used_lanes, F&& f) {
  constexpr int64_t lanes = simd::lanes<T>, most_vectors = tile_size / lanes;
  constexpr uint64_t vector = ~uint64_t{0} >> (64 - lanes);
  constexpr int few_rows = 4;  // products of fewer wait for each sum
  Panel panel;
  const auto send = [&](int64_t first, int64_t last, uint64_t rows, const uint64_t* bits) {
    panel.lane = first * lanes, panel.lanes = (last - first) * lanes, panel.masked = bits;
    panel.count = 0;
    for (; rows; rows &= rows - 1) {
      const int64_t row = std::countr_zero(rows);
      panel.rows[panel.count] = row;
      panel.words[panel.count++] = bits ? bits[row] >> panel.lane : 0;
    }
    f(static_cast<const Panel&>(panel));
  };
  const int64_t vectors = used_lanes / lanes;
  const uint64_t all_rows = ~uint64_t{0} >> (64 - block.count);
  if (!block.bits) return send(0, vectors, all_rows, nullptr);
  // Each row is needed by runs of vectors. The rows of each run [first, last):
  uint64_t rows_of[most_vectors][most_vectors + 1] = {};
  int64_t needed = 0;
  for (int64_t r = 0; r < block.count; ++r) {
    uint64_t wanted = 0;
    for (int64_t v = 0; v < vectors; ++v)
      wanted |= uint64_t{(block.bits[r] >> (v * lanes) & vector) != 0} << v;
    needed += std::popcount(wanted);
    while (wanted) {
      const int first = std::countr_zero(wanted), last = first + std::countr_one(wanted >> first);
      rows_of[first][last] |= uint64_t{1} << r;
      wanted &= ~uint64_t{0} << last;
    }
  }
  // Wide panels are a little faster for each score, so splitting must save something.
  if (8 * needed >= 7 * block.count * vectors) return send(0, vectors, all_rows, block.bits);
  // Runs that few rows need join; bits of other runs of those rows are left out.
  int64_t few_first = vectors, few_last = 0;
  uint64_t few = 0, few_bits[tile_size];
  for (int64_t first = 0; first < vectors; ++first)
    for (int64_t last = first + 1; last <= vectors; ++last) {
      const uint64_t rows = rows_of[first][last];
      if (std::popcount(rows) >= few_rows) {
        send(first, last, rows, block.bits);
        continue;
      }
      for (uint64_t rest = rows; rest; rest &= rest - 1) {
        const int row = std::countr_zero(rest);
        const uint64_t run = ~uint64_t{0} >> (64 - (last - first) * lanes) << (first * lanes);
        few_bits[row] = (few >> row & 1 ? few_bits[row] : 0) | (block.bits[row] & run);
        few |= uint64_t{1} << row;
        few_first = std::min(few_first, first), few_last = std::max(few_last, last);
      }
    }
  if (few) send(few_first, few_last, few, few_bits);
}

// Rows of one block as the arithmetic wants them: in place, or widened.
template <class S>
class Rows {
 public:
  using T = Compute<S>;
  explicit Rows(int64_t width) : width_(width), wide_(std::is_same_v<S, T> ? 0 : tile_size * width) {}

  void set(const Head<const S>& head, const Block& block) {
    for (int64_t i = 0; i < block.count; ++i) {
      const S* row = head.row(block.tokens[i]);
      if constexpr (std::is_same_v<S, T>) {
        rows_[i] = row;
      } else {
        T* to = wide_ + i * width_;
        for (int64_t d = 0; d < width_; ++d) to[d] = row[d];
        rows_[i] = to;
      }
    }
  }
  /// The rows of a panel.
  const T* const* of(const Panel& panel) {
    for (int64_t i = 0; i < panel.count; ++i) chosen_[i] = rows_[panel.rows[i]];
    return chosen_;
  }
  bool finite(int64_t count) const {
    return std::all_of(rows_, rows_ + count, [&](const T* row) { return simd::all_finite(row, width_); });
  }

 private:
  int64_t width_;
  Scratch<T> wide_;
  const T *rows_[tile_size], *chosen_[tile_size];
};

// c[i][lane] += sum over r of rows[r][i] * b[r][lane], over the allowed pairs (r, lane) alone: 0 times NaN is
// NaN, so where values are not finite a masked weight of 0 does not suffice.
template <class T>
void multiply_allowed(const T* const* rows, int64_t count, const Panel& panel, const T* b, T* c) {
  for (int64_t r = 0; r < panel.count; ++r)
    for (int64_t i = 0; i < count; ++i)
      for (int64_t lane = 0; lane < panel.lanes; ++lane)
        if (panel.words[r] >> lane & 1) c[i * tile_size + lane] += rows[r][i] * b[r * tile_size + lane];
}

// factors[lane] = 1 / (1 - p) for a kept weight, 0 for a dropped one.
template <class T, class RowWord, class Key>
void dropout_factors(T* factors, int64_t lanes, uint32_t threshold, T keep_scale, RowWord row_word, Key key) {
  for (int64_t lane = 0; lane < lanes; ++lane)
    factors[lane] = AttentionDropout::mix(row_word(lane), key(lane)) >= threshold ? keep_scale : T(0);
}

// ---------------------------------------------------------------------------------------------------- bias

// Tokens of a panel: those of its rows and those of its lanes.
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

// All terms of one problem. What is added to a score, and the way back, is found pair by pair: simple, and
// cheap beside the products.
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

// The maps of all matrices; most masks have one for all.
class Maps {
 public:
  explicit Maps(const AttentionProblem& p) : heads_(p.heads()) {
    const MaskRule& rule = p.mask.rule();
    per_batch_ = rule.per_batch(), per_head_ = rule.per_head();
    for (int64_t b = 0; b < (per_batch_ ? p.batch() : 1); ++b)
      for (int64_t h = 0; h < (per_head_ ? p.heads() : 1); ++h)
        maps_.push_back(rule.map({p.queries(), p.keys(), p.batch(), b, h}));
  }
  const MaskMap& of(int64_t b, int64_t h) const {
    return *maps_[static_cast<size_t>((per_batch_ ? b * (per_head_ ? heads_ : 1) : 0) + (per_head_ ? h : 0))];
  }
  /// The most tiles that a side has in any map.
  int64_t tiles(Side side) const {
    int64_t most = 0;
    for (const auto& map : maps_) most = std::max(most, map->side(side).tiles);
    return most;
  }

 private:
  bool per_batch_, per_head_;
  int64_t heads_;
  std::vector<std::shared_ptr<const MaskMap>> maps_;
};

// What softcap and bias make of q.k. Plain scores are left to be scaled where they are used.
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

// ------------------------------------------------------------------------------------------------- forward

// What weights of each lane are relative to, about its largest score so far, and their sum.
template <class T>
struct OnlineSums {
  T *base, *total;
};

// N vectors of lanes of a panel: scores become weights relative to the base of their lane; `shrink` is what
// all before must be multiplied by. Returns whether that matters anywhere.
template <class T, bool masked, int N>
bool online_softmax(T* s, const Panel& panel, int64_t lane, T scale, OnlineSums<T> sums, T* shrink) {
  constexpr int lanes = simd::lanes<T>;
  // A base follows the largest score only if that grew by more, which is rare after the first panel.
  constexpr T slack = 8;
  Vector<T> largest[N], base[N], sum[N] = {};
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) largest[j] = splat(-infinity<T>);
  for (int64_t r = 0; r < panel.count; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      T* at = s + r * tile_size + j * lanes;
      Vector<T> score = load(at) * scale;
      if constexpr (masked) {
        score = simd::select(panel.words[r] >> (lane + j * lanes), score, -infinity<T>);
        store(at, score);
      }
      largest[j] = simd::larger(score, largest[j]);
    }
  bool matters = false;
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j) {
    const Vector<T> before = load(sums.base + j * lanes);
    const Vector<T> after = largest[j] > before + slack ? largest[j] : before;
    base[j] = after == -infinity<T> ? Vector<T>{} : after;  // no key yet
    const Vector<T> factor = simd::exp(before - base[j]);
    matters |= simd::any((factor != T(1)) & (before != -infinity<T>));
    store(sums.base + j * lanes, after);
    store(shrink + j * lanes, factor);
  }
  for (int64_t r = 0; r < panel.count; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      T* at = s + r * tile_size + j * lanes;
      // Rounded: fused with the subtraction, the product would be another score.
      const Vector<T> score = masked ? load(at) : simd::rounded(load(at) * scale);
      const Vector<T> weight = simd::exp(score - base[j]);
      store(at, weight);
      sum[j] += weight;
    }
#pragma GCC unroll 4
  for (int j = 0; j < N; ++j)
    store(sums.total + j * lanes, load(sums.total + j * lanes) * load(shrink + j * lanes) + sum[j]);
  return matters;
}

template <class S>
class Forward {
 public:
  using T = Compute<S>;

  Forward(const AttentionProblem& problem, Tensor& out, Tensor& lse)
      : p_(problem),
        maps_(problem),
        scores_(problem),
        out_(out),
        out_data_(out.mutable_data<S>()),
        lse_data_(lse.mutable_data<T>()) {}

  void run() {
    const int64_t tiles = maps_.tiles(Side::query);
    // Backwards: under a causal mask the last tiles take longest, and short tasks at the end balance the
    // threads.
    parallel_tasks(tiles * p_.batch() * p_.heads(),
                   [&](int64_t task) { tile(task / tiles, tiles - 1 - task % tiles); });
  }

 private:
  void tile(int64_t bh, int64_t index) {
    constexpr int lanes = simd::lanes<T>;
    const int64_t b = bh / p_.heads(), h = bh % p_.heads(), kv = h / (p_.heads() / p_.kv_heads());
    const MaskMap& map = maps_.of(b, h);
    if (index >= map.query.tiles) return;
    std::array<int64_t, tile_size> space;
    const Tokens owners = map.query.owners(index, p_.queries(), space);
    const int64_t width = p_.width(), value_width = p_.value_width();
    const int64_t used = padded<T>(static_cast<int64_t>(owners.size()));
    const auto k = read_head<S>(p_.k, b, kv), v = read_head<S>(p_.v, b, kv);

    Scratch<T> q(width * tile_size), acc(value_width * tile_size), s(tile_size * tile_size);
    alignas(64) T base[tile_size], total[tile_size], factor[tile_size];
    uint32_t row_words[tile_size] = {};
    pack_transposed(static_cast<T*>(q), read_head<S>(p_.q, b, h), owners, width);
    std::fill(acc + 0, acc + value_width * tile_size, T(0));
    std::fill(base, base + tile_size, -infinity<T>);
    std::fill(total, total + tile_size, T(0));
    if (p_.dropout.active())
      for (size_t i = 0; i < owners.size(); ++i) row_words[i] = p_.dropout.row_word(bh, owners[i]);
    Rows<S> keys(width), values(value_width);

    for_each_block(map, Side::query, index, [&](const Block& block) {
      keys.set(k, block);
      values.set(v, block);
      const bool guard = block.bits && !values.finite(block.count);
      for_each_panel<T>(block, used, [&](const Panel& panel) {
        const int64_t first = panel.lane;
        multiply_panel<T, simd::Rows::by_output>(keys.of(panel), panel.count, width, q + first, tile_size, s,
                                                 tile_size, panel.lanes, false);
        if (scores_.finishes()) scores_.finish(s, nullptr, {block, panel, owners, Side::query}, b, h);
        bool rescale = false;
        with_bool(panel.masked, [&](auto masked) {
          int64_t lane = 0;
          const auto by_vectors = [&]<int N>(std::integral_constant<int, N>) {
            for (; lane + N * lanes <= panel.lanes; lane += N * lanes)
              rescale |= online_softmax<T, masked, N>(s + lane, panel, lane, scores_.scale(),
                                                      {base + first + lane, total + first + lane},
                                                      factor + first + lane);
          };
          by_vectors(std::integral_constant<int, 4>{});
          by_vectors(std::integral_constant<int, 2>{});
          by_vectors(std::integral_constant<int, 1>{});
        });
        if (p_.dropout.active()) drop(s, row_words + first, block, panel);
        if (rescale)
          for (int64_t d = 0; d < value_width; ++d)
            for (int64_t lane = first; lane < first + panel.lanes; lane += lanes) {
              T* at = acc + d * tile_size + lane;
              store(at, load(at) * load(factor + lane));
            }
        if (guard)
          multiply_allowed<T>(values.of(panel), value_width, panel, s, acc + first);
        else
          multiply_panel<T, simd::Rows::by_sum>(values.of(panel), value_width, panel.count, s, tile_size,
                                                acc + first, tile_size, panel.lanes, true);
      });
    });

    for (int64_t lane = 0; lane < used; lane += lanes) {
      const Vector<T> inverse = 1 / load(total + lane);
      const auto empty = load(base + lane) == -infinity<T>;
      for (int64_t d = 0; d < value_width; ++d) {
        T* at = acc + d * tile_size + lane;
        store(at, empty ? Vector<T>{} : load(at) * inverse);
      }
    }
    unpack_transposed(write_head(out_data_, out_, b, h), static_cast<T*>(acc), owners, value_width);
    for (size_t i = 0; i < owners.size(); ++i)
      lse_data_[bh * p_.queries() + owners[i]] =
          base[i] == -infinity<T> ? base[i] : base[i] + std::log(total[i]);
  }

  void drop(T* weights, const uint32_t* row_words, const Block& block, const Panel& panel) const {
    alignas(64) T factors[tile_size];
    for (int64_t r = 0; r < panel.count; ++r) {
      const auto key = static_cast<uint32_t>(block.tokens[panel.rows[r]]);
      dropout_factors(
          factors, panel.lanes, p_.dropout.threshold(), static_cast<T>(p_.dropout.keep_scale()),
          [&](int64_t lane) { return row_words[lane]; }, [&](int64_t) { return key; });
      for (int64_t lane = 0; lane < panel.lanes; ++lane) weights[r * tile_size + lane] *= factors[lane];
    }
  }

  const AttentionProblem& p_;
  const Maps maps_;
  const Scores<S> scores_;
  const Tensor& out_;
  S* out_data_;
  T* lse_data_;
};

// ------------------------------------------------------------------------------------------------ backward

// Who may add next: tasks add in a fixed order, so that the bits do not depend on the threads. Tasks are
// started in ascending order, so waiting for earlier ones ends.
class Turns {
 public:
  explicit Turns(int64_t tasks) : done_(static_cast<size_t>(tasks)) {}
  static constexpr int64_t finished = std::numeric_limits<int64_t>::max();

  /// Returns once every task before `task` has added all that it adds before `position`.
  void wait(int64_t task, int64_t position) {
    int64_t oldest = oldest_.load(std::memory_order_acquire);  // all tasks before it are finished
    while (oldest < task && done(oldest) == finished) ++oldest;
    for (int64_t known = oldest_.load(); known < oldest && !oldest_.compare_exchange_weak(known, oldest);) {
    }
    for (int64_t t = task - 1; t >= oldest; --t)
      while (done(t) < position) std::this_thread::yield();
  }
  void publish(int64_t task, int64_t position) {
    done_[static_cast<size_t>(task)].store(position, std::memory_order_release);
  }

  /// Publishes that a task is finished, also if an exception leaves: those behind must not wait for ever.
  struct Finish {
    Turns& turns;
    int64_t task;
    ~Finish() { turns.publish(task, finished); }
  };

 private:
  int64_t done(int64_t task) const {
    return done_[static_cast<size_t>(task)].load(std::memory_order_acquire);
  }

  std::vector<std::atomic<int64_t>> done_;
  std::atomic<int64_t> oldest_{0};
};

template <class S>
class Backward {
 public:
  using T = Compute<S>;

  Backward(const AttentionProblem& problem, AttentionGradients& gradients)
      : p_(problem), g_(gradients), maps_(problem), scores_(problem) {}

  void run() {
    if (!g_.d_out.defined())
      g_.d_out =
          empty_heads(p_.batch(), p_.heads(), p_.queries(), p_.value_width(), p_.q.dtype(), cpu).fill_(0);
    lse_data_ = g_.lse.data<T>();
    find_delta();
    if (g_.dq.defined()) {
      // Sums live in f32: in dq itself, or beside it for 16 bits.
      dq_ = dtype_of<S> == dtype_of<T> ? g_.dq : Tensor::empty(g_.dq.shape(), dtype_of<T>);
      dq_.fill_(0);
      dq_data_ = dq_.mutable_data<T>();
    }
    dk_data_ = g_.dk.defined() ? g_.dk.mutable_data<S>() : nullptr;
    dv_data_ = g_.dv.defined() ? g_.dv.mutable_data<S>() : nullptr;
    prepare_bias();

    // A task is one key tile of all matrices that share a gradient of a bias; mostly of one matrix.
    const int64_t matrices = p_.batch() * p_.kv_heads(), tiles = maps_.tiles(Side::key);
    const int64_t over_batch = shares_batch_ ? p_.batch() : 1, over_heads = shares_heads_ ? p_.kv_heads() : 1;
    const int64_t groups = matrices / std::max<int64_t>(1, over_batch * over_heads);
    for (int64_t i = 0; i < matrices; ++i) {
      turns_.push_back(std::make_unique<Turns>(tiles));
      prepare_sequence(i);
    }
    Turns commits(tiles * groups);
    parallel_tasks(tiles * groups, [&](int64_t task) {
      const Turns::Finish finish{commits, task};
      const int64_t position = task / groups, group = task % groups;
      const int64_t first_b = shares_batch_ ? 0 : group / (shares_heads_ ? 1 : p_.kv_heads());
      const int64_t first_h = shares_heads_ ? 0 : group % p_.kv_heads();
      std::vector<std::vector<T>> tables = empty_tables();
      for (int64_t b = first_b; b < first_b + over_batch; ++b)
        for (int64_t kv = first_h; kv < first_h + over_heads; ++kv) tile(b, kv, position, tables);
      if (tables.empty()) return;
      commits.wait(task, Turns::finished);
      for (size_t i = 0; i < tables.size(); ++i)
        for (size_t j = 0; j < tables[i].size(); ++j) d_bias_data_[i][j] += tables[i][j];
    });
    if (g_.dq.defined() && dtype_of<S> != dtype_of<T>) g_.dq.copy_(dq_);
    for (size_t i = 0; i < g_.d_bias.size(); ++i)
      if (g_.d_bias[i].defined() && dtype_of<S> != dtype_of<T>) g_.d_bias[i].copy_(d_bias_[i]);
  }

 private:
  // delta = rowsum(dO * O) - dLSE, and 0 for a row without keys.
  void find_delta() {
    delta_ = Tensor::empty(g_.lse.shape(), dtype_of<T>);
    const int64_t rows = g_.lse.numel(), width = p_.value_width(),
                  queries = std::max<int64_t>(p_.queries(), 1);
    T* delta = delta_.mutable_data<T>();
    const Tensor d_lse = g_.d_lse.defined() ? g_.d_lse.contiguous() : Tensor();
    parallel_for(
        0, rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(width, 1)), [&](int64_t from, int64_t to) {
          for (int64_t i = from; i < to; ++i) {
            const int64_t bh = i / queries, b = bh / p_.heads(), h = bh % p_.heads(), token = i % queries;
            const S* out = read_head<S>(g_.out, b, h).row(token);
            const S* d_out = read_head<S>(g_.d_out, b, h).row(token);
            T sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < width; ++d) sum += static_cast<T>(out[d]) * static_cast<T>(d_out[d]);
            if (d_lse.defined()) sum -= d_lse.data<T>()[i];
            delta[i] = lse_data_[i] == -infinity<T> ? T(0) : sum;
          }
        });
    delta_data_ = delta;
  }

  void prepare_bias() {
    for (size_t i = 0; i < g_.d_bias.size(); ++i) {
      Tensor& grad = g_.d_bias[i];
      d_bias_.push_back({});
      d_bias_data_.push_back(nullptr);
      if (!grad.defined()) continue;
      d_bias_[i] = dtype_of<S> == dtype_of<T> ? grad : Tensor::empty(grad.shape(), dtype_of<T>);
      d_bias_[i].fill_(0);
      d_bias_data_[i] = d_bias_[i].template mutable_data<T>();
      if (p_.bias[i].kind() == AttentionBias::Kind::relative) {
        has_tables_ = true;
      } else {
        shares_batch_ |= grad.size(0) == 1 && p_.batch() > 1;
        shares_heads_ |= grad.size(1) == 1 && p_.heads() > 1;
      }
    }
  }

  // What a task adds to the gradients of tables, before its turn. Empty if none is wanted.
  std::vector<std::vector<T>> empty_tables() const {
    std::vector<std::vector<T>> tables;
    if (!has_tables_) return tables;
    for (size_t i = 0; i < d_bias_.size(); ++i) {
      const bool table = d_bias_[i].defined() && p_.bias[i].kind() == AttentionBias::Kind::relative;
      tables.emplace_back(table ? static_cast<size_t>(d_bias_[i].numel()) : 0, T(0));
    }
    return tables;
  }

  // Tiles in the order of their colours, and where a colour starts.
  void prepare_sequence(int64_t matrix) {
    const SideMap& map = maps_.of(matrix / p_.kv_heads(), first_head(matrix)).key;
    if (static_cast<size_t>(matrix) > 0 && &map == sequence_of_) {
      sequences_.push_back(sequences_.back());
      return;
    }
    sequence_of_ = &map;
    Sequence sequence;
    if (!map.colour.empty()) {
      sequence.tiles.resize(static_cast<size_t>(map.tiles));
      std::iota(sequence.tiles.begin(), sequence.tiles.end(), 0);
      const auto colour = [&](int64_t tile) { return map.colour[static_cast<size_t>(tile)]; };
      std::stable_sort(sequence.tiles.begin(), sequence.tiles.end(),
                       [&](int64_t a, int64_t b) { return colour(a) < colour(b); });
      for (size_t i = 0; i < sequence.tiles.size(); ++i) {
        const bool starts = i == 0 || colour(sequence.tiles[i]) != colour(sequence.tiles[i - 1]);
        sequence.waits_for.push_back(starts ? static_cast<int64_t>(i) : sequence.waits_for.back());
      }
    }
    sequences_.push_back(std::make_shared<Sequence>(std::move(sequence)));
  }

  int64_t first_head(int64_t matrix) const { return matrix % p_.kv_heads() * (p_.heads() / p_.kv_heads()); }

  void tile(int64_t b, int64_t kv, int64_t position, std::vector<std::vector<T>>& tables) {
    const int64_t matrix = b * p_.kv_heads() + kv, group = p_.heads() / p_.kv_heads();
    Turns& turns = *turns_[static_cast<size_t>(matrix)];
    const Turns::Finish finish{turns, position};
    const bool one_map = !p_.mask.rule().per_head() || group == 1;
    const Sequence& sequence = *sequences_[static_cast<size_t>(matrix)];
    // Heads that share keys but not maps own tiles in one order: only their visits differ.
    const MaskMap& any_map = maps_.of(b, kv * group);
    if (position >= any_map.key.tiles) return;
    const int64_t index =
        sequence.tiles.empty() || !one_map ? position : sequence.tiles[static_cast<size_t>(position)];
    std::array<int64_t, tile_size> space;
    const Tokens owners = any_map.key.owners(index, p_.keys(), space);
    const auto count = static_cast<int64_t>(owners.size());
    const int64_t width = p_.width(), value_width = p_.value_width(), used = padded<T>(count);
    const int64_t wide = padded<T>(width);
    const bool wants_q = g_.dq.defined(), wants_k = g_.dk.defined(), wants_v = g_.dv.defined();
    const bool wants_bias =
        std::any_of(d_bias_.begin(), d_bias_.end(), [](const Tensor& x) { return x.defined(); });
    const bool wants_scores = wants_q || wants_k || wants_bias;

    Scratch<T> k(width * tile_size), v(value_width * tile_size), k_rows(tile_size * wide);
    Scratch<T> dk(width * tile_size), dv(value_width * tile_size), dq(tile_size * wide),
        part(tile_size * wide);
    Scratch<T> p(tile_size * tile_size), ds(tile_size * tile_size);
    Scratch<T> slope(scores_.finishes() ? tile_size * tile_size : 0);
    const auto k_head = read_head<S>(p_.k, b, kv);
    pack_transposed(static_cast<T*>(k), k_head, owners, width);
    pack_transposed(static_cast<T*>(v), read_head<S>(p_.v, b, kv), owners, value_width);
    for (int64_t i = 0; i < count; ++i) {
      const S* row = k_head.row(owners[static_cast<size_t>(i)]);
      for (int64_t d = 0; d < wide; ++d) k_rows[i * wide + d] = d < width ? static_cast<T>(row[d]) : T(0);
    }
    const bool finite_keys = simd::all_finite(static_cast<T*>(k_rows), count * wide);
    std::fill(dk + 0, dk + width * tile_size, T(0));
    std::fill(dv + 0, dv + value_width * tile_size, T(0));
    Rows<S> q_rows(width), d_out_rows(value_width);
    const T* ds_rows[tile_size];
    const bool coloured = !any_map.key.colour.empty();
    bool has_turn = false;

    for (int64_t member = 0; member < group; ++member) {
      const int64_t h = kv * group + member, bh = b * p_.heads() + h;
      const auto q_head = read_head<S>(p_.q, b, h), d_out_head = read_head<S>(g_.d_out, b, h);
      for_each_block(maps_.of(b, h), Side::key, index, [&](const Block& block) {
        q_rows.set(q_head, block);
        d_out_rows.set(d_out_head, block);
        const bool guard =
            block.bits && (!finite_keys || !q_rows.finite(block.count) || !d_out_rows.finite(block.count));
        if (wants_q && block.bits) std::fill(dq + 0, dq + block.count * wide, T(0));
        for_each_panel<T>(block, used, [&](const Panel& panel) {
          const Pairs pairs{block, panel, owners, Side::key};
          multiply_panel<T, simd::Rows::by_output>(q_rows.of(panel), panel.count, width, k + panel.lane,
                                                   tile_size, p, tile_size, panel.lanes, false);
          if (wants_scores)
            multiply_panel<T, simd::Rows::by_output>(d_out_rows.of(panel), panel.count, value_width,
                                                     v + panel.lane, tile_size, ds, tile_size, panel.lanes,
                                                     false);
          if (scores_.finishes()) scores_.finish(p, slope, pairs, b, h);
          with_bool(panel.masked, [&](auto masked) {
            with_bool(p_.dropout.active(),
                      [&](auto drops) { weights<masked, drops>(p, ds, bh, pairs, wants_scores); });
          });
          if (scores_.finishes() && wants_scores) {
            if (wants_bias) add_bias_gradients(ds, pairs, b, h, tables);
            for (int64_t r = 0; r < panel.count; ++r)
              for (int64_t lane = 0; lane < panel.lanes; ++lane) {
                T& d = ds[r * tile_size + lane];
                d = panel.masked && !(panel.words[r] >> lane & 1) ? T(0) : d * slope[r * tile_size + lane];
              }
          }
          const auto add = [&](Rows<S>& rows, int64_t channels, T* by, T* into) {
            if (guard)
              multiply_allowed<T>(rows.of(panel), channels, panel, by, into + panel.lane);
            else
              multiply_panel<T, simd::Rows::by_sum>(rows.of(panel), channels, panel.count, by, tile_size,
                                                    into + panel.lane, tile_size, panel.lanes, true);
          };
          if (wants_v) add(d_out_rows, value_width, p, dv);
          if (wants_k) add(q_rows, width, ds, dk);
          if (!wants_q) return;
          // Only over real keys: lanes beyond them hold anything.
          const int64_t depth = std::min(panel.lanes, count - panel.lane);
          if (guard) {
            for (int64_t r = 0; r < panel.count; ++r)
              for (int64_t lane = 0; lane < depth; ++lane)
                if (panel.words[r] >> lane & 1)
                  for (int64_t d = 0; d < width; ++d)
                    dq[panel.rows[r] * wide + d] +=
                        ds[r * tile_size + lane] * k_rows[(panel.lane + lane) * wide + d];
            return;
          }
          for (int64_t r = 0; r < panel.count; ++r) ds_rows[r] = ds + r * tile_size;
          multiply_panel<T, simd::Rows::by_output>(ds_rows, panel.count, depth, k_rows + panel.lane * wide,
                                                   wide, block.bits ? part : dq, wide, wide, false);
          if (block.bits)
            for (int64_t r = 0; r < panel.count; ++r)
              for (int64_t d = 0; d < wide; ++d) dq[panel.rows[r] * wide + d] += part[r * wide + d];
        });
        if (!wants_q) return;
        if (coloured || !one_map) {
          // Others of one colour share no query with this tile; heads with maps of their own go one by one.
          const int64_t before = one_map ? sequence.waits_for[static_cast<size_t>(position)] : position;
          if (!has_turn) turns.wait(before, Turns::finished);
          has_turn = true;
        } else {
          turns.wait(position, member * p_.queries() + block.tokens[0] + block.count);
        }
        const auto dq_head = write_head(dq_data_, dq_, b, h);
        for (int64_t r = 0; r < block.count; ++r) {
          T* to = dq_head.row(block.tokens[r]);
          for (int64_t d = 0; d < width; ++d) to[d] += dq[r * wide + d];
        }
        if (!coloured && one_map)
          turns.publish(position, member * p_.queries() + block.tokens[0] + block.count);
      });
    }
    if (wants_k) unpack_transposed(write_head(dk_data_, g_.dk, b, kv), static_cast<T*>(dk), owners, width);
    if (wants_v)
      unpack_transposed(write_head(dv_data_, g_.dv, b, kv), static_cast<T*>(dv), owners, value_width);
  }

  // From the products q.k (or finished scores) in `p` and dO.v in `ds`: p becomes the dropped weights, ds =
  // P (Z dP - delta), scaled unless the scores were finished.
  template <bool masked, bool drops>
  void weights(T* p, T* ds, int64_t bh, const Pairs& pairs, bool wants_scores) {
    constexpr int lanes = simd::lanes<T>;
    const T scale = scores_.scale();
    alignas(64) T factors[tile_size];
    for (int64_t r = 0; r < pairs.panel.count; ++r) {
      const int64_t query = pairs.row_token(r), row = bh * p_.queries() + query;
      const T lse = lse_data_[row] == -infinity<T> ? infinity<T> : lse_data_[row];
      const T delta = delta_data_[row];
      if constexpr (drops) {
        const uint32_t word = p_.dropout.row_word(bh, query);
        dropout_factors(
            factors, pairs.panel.lanes, p_.dropout.threshold(), static_cast<T>(p_.dropout.keep_scale()),
            [&](int64_t) { return word; },
            [&](int64_t lane) { return static_cast<uint32_t>(pairs.lane_token(lane)); });
      }
      for (int64_t lane = 0; lane < pairs.panel.lanes; lane += lanes) {
        T* p_at = p + r * tile_size + lane;
        T* ds_at = ds + r * tile_size + lane;
        // Rounded as in forward: fusing this product with the subtraction would not give the score that lse
        // is of.
        Vector<T> weight = simd::exp(simd::rounded(load(p_at) * scale) - lse);
        // Selected last: lse is NaN where a key that the query does see is.
        if constexpr (masked) weight = simd::select(pairs.panel.words[r] >> lane, weight, T(0));
        if (wants_scores) {
          Vector<T> d_weight = load(ds_at);
          if constexpr (drops) d_weight *= load(factors + lane);
          Vector<T> d_score = weight * (d_weight - delta) * scale;
          if constexpr (masked) d_score = simd::select(pairs.panel.words[r] >> lane, d_score, T(0));
          store(ds_at, d_score);
        }
        if constexpr (drops) weight *= load(factors + lane);
        store(p_at, weight);
      }
    }
  }

  void add_bias_gradients(const T* ds, const Pairs& pairs, int64_t b, int64_t h,
                          std::vector<std::vector<T>>& tables) {
    for (size_t i = 0; i < d_bias_.size(); ++i) {
      if (!d_bias_[i].defined()) continue;
      if (p_.bias[i].kind() == AttentionBias::Kind::relative) {
        scores_.bias.add_gradient(i, tables[i].data(), {}, ds, pairs, b, h);
      } else {
        // Strides of the gradient, 0 where the term is broadcast.
        Shape strides = d_bias_[i].strides();
        for (int a = 0; a < 4; ++a)
          if (d_bias_[i].size(a) == 1) strides[a] = 0;
        scores_.bias.add_gradient(i, d_bias_data_[i], strides, ds, pairs, b, h);
      }
    }
  }

  struct Sequence {
    std::vector<int64_t> tiles, waits_for;  // empty: in their own order, block by block
  };

  const AttentionProblem& p_;
  AttentionGradients& g_;
  const Maps maps_;
  const Scores<S> scores_;
  Tensor delta_, dq_;
  const T *lse_data_ = nullptr, *delta_data_ = nullptr;
  T* dq_data_ = nullptr;
  S *dk_data_ = nullptr, *dv_data_ = nullptr;
  std::vector<Tensor> d_bias_;
  std::vector<T*> d_bias_data_;
  bool has_tables_ = false, shares_batch_ = false, shares_heads_ = false;
  std::vector<std::unique_ptr<Turns>> turns_;
  std::vector<std::shared_ptr<const Sequence>> sequences_;
  const SideMap* sequence_of_ = nullptr;
};

std::string refusal(const AttentionProblem& problem) {
  return problem.q.device().kind == DeviceKind::cpu ? "" : "the tensors are not in host memory";
}

void forward(const AttentionProblem& problem, Tensor& out, Tensor& lse) {
  dispatch_floating(problem.q.dtype(), "attention",
                    [&](auto zero) { Forward<decltype(zero)>(problem, out, lse).run(); });
}

void backward(const AttentionProblem& problem, AttentionGradients& gradients) {
  dispatch_floating(problem.q.dtype(), "attention",
                    [&](auto zero) { Backward<decltype(zero)>(problem, gradients).run(); });
}

[[maybe_unused]] const RegisteredBackend registered{{Backend::cpu, refusal, forward, backward}};

}  // namespace

}  // namespace torus::detail
