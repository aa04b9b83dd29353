// Tiles of attention on the CPU: memory, rows of tokens, and the panels into which masks cut their products.
// For cpu.cpp; not installed.
#pragma once

#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <span>
#include <vector>

#include "torus/core/parallel.h"
#include "torus/core/simd.h"
#include "torus/ops/attention/backend.h"
#include "torus/ops/attention/map.h"

namespace torus::detail {

using simd::load, simd::store, simd::splat, simd::multiply_panel, simd::Vector;

template <class T>
inline constexpr T infinity = std::numeric_limits<T>::infinity();

/// What a thread keeps for the tiles that it works on, one after the other. Taken and given back in the order
/// of a stack.
class ThreadMemory {
 public:
  static ThreadMemory& mine() {
    static thread_local ThreadMemory instance;
    return instance;
  }
  ~ThreadMemory() { ::operator delete(block_, alignment); }

  void* take(size_t bytes) {
    if (used_ == 0 && most_ > size_ && keeps) {
      ::operator delete(std::exchange(block_, nullptr), alignment);
      size_ = 0;
      block_ = static_cast<std::byte*>(::operator new(most_, alignment));
      size_ = most_;
    }
    void* taken = used_ + bytes <= size_ ? block_ + used_ : ::operator new(bytes, alignment);
    used_ += bytes;
    most_ = std::max(most_, used_);
    return taken;
  }
  void give(void* taken, size_t bytes) {
    used_ -= bytes;
    if (used_ + bytes > size_) ::operator delete(taken, alignment);
  }

 private:
#if defined(__SANITIZE_ADDRESS__)
  static constexpr bool keeps = false;  // so that the sanitizer knows where each piece ends
#else
  static constexpr bool keeps = true;
#endif
  static constexpr std::align_val_t alignment{64};
  std::byte* block_ = nullptr;
  size_t size_ = 0, used_ = 0, most_ = 0;
};

/// Memory for one tile, aligned to a vector.
template <class T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : bytes_((static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T) + 63) / 64 * 64),
        data_(static_cast<T*>(ThreadMemory::mine().take(bytes_))) {}
  ~Scratch() { ThreadMemory::mine().give(data_, bytes_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  operator T*() { return data_; }

 private:
  size_t bytes_;
  T* data_;
};

template <class T>
int64_t padded(int64_t count) {
  return (count + simd::lanes<T> - 1) / simd::lanes<T> * simd::lanes<T>;
}

/// Calls f(std::true_type or std::false_type), so that its loops do not ask again and again.
template <class F>
void with_bool(bool value, F&& f) {
  if (value)
    f(std::true_type{});
  else
    f(std::false_type{});
}

/// One head: a contiguous row for each token.
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

/// Whether each head of x [B, H, N, D] is free of infinity and NaN.
template <class S>
std::vector<char> finite_heads(const Tensor& x) {
  using T = Compute<S>;
  constexpr int64_t lanes = simd::lanes<T>;
  const int64_t heads = x.size(1), tokens = x.size(2), width = x.size(3);
  std::vector<char> finite(static_cast<size_t>(x.size(0) * heads), 1);
  parallel_for(0, x.size(0) * heads, 16384 / (tokens * width + 1) + 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const auto head = read_head<S>(x, i / heads, i % heads);
      Vector<T> zeros{};  // 0 times infinity or NaN is NaN
      T zero = 0;
      for (int64_t token = 0; token < tokens; ++token) {
        const S* row = head.row(token);
        int64_t d = 0;
        if constexpr (std::is_same_v<S, T>)
          for (; d + lanes <= width; d += lanes) zeros += load(row + d) * T(0);
        for (; d < width; ++d) zero += static_cast<T>(row[d]) * T(0);
      }
      finite[static_cast<size_t>(i)] = zero == 0 && !simd::any(zeros != T(0));
    }
  });
  return finite;
}

using Tokens = std::span<const int64_t>;

/// to[d][lane] = row of the lane's token, 0 beyond them.
template <class S, class T>
void pack_transposed(T* to, const Head<const S>& head, Tokens tokens, int64_t width) {
  const auto count = static_cast<int64_t>(tokens.size());
  for (int64_t d = 0; count < tile_size && d < width; ++d)
    std::fill(to + d * tile_size + count, to + (d + 1) * tile_size, T(0));
  const S* rows[tile_size];
  for (int64_t i = 0; i < count; ++i) rows[i] = head.row(tokens[static_cast<size_t>(i)]);
  int64_t i = 0;
  if constexpr (std::is_same_v<S, T>)
    for (; i + 4 <= count; i += 4) {
      int64_t d = 0;
      for (; d + 4 <= width; d += 4) {
        T* at = to + d * tile_size + i;
        simd::transpose_quads<T>({rows[i] + d, rows[i + 1] + d, rows[i + 2] + d, rows[i + 3] + d},
                                 {at, at + tile_size, at + 2 * tile_size, at + 3 * tile_size});
      }
      for (; d < width; ++d)
        for (int64_t l = 0; l < 4; ++l) to[d * tile_size + i + l] = rows[i + l][d];
    }
  for (; i < count; ++i)
    for (int64_t d = 0; d < width; ++d) to[d * tile_size + i] = rows[i][d];
}

/// The inverse.
template <class S, class T>
void unpack_transposed(const Head<S>& head, const T* from, Tokens tokens, int64_t width) {
  const auto count = static_cast<int64_t>(tokens.size());
  S* rows[tile_size];
  for (int64_t i = 0; i < count; ++i) rows[i] = head.row(tokens[static_cast<size_t>(i)]);
  int64_t i = 0;
  if constexpr (std::is_same_v<S, T>)
    for (; i + 4 <= count; i += 4) {
      int64_t d = 0;
      for (; d + 4 <= width; d += 4) {
        const T* at = from + d * tile_size + i;
        simd::transpose_quads<T>({at, at + tile_size, at + 2 * tile_size, at + 3 * tile_size},
                                 {rows[i] + d, rows[i + 1] + d, rows[i + 2] + d, rows[i + 3] + d});
      }
      for (; d < width; ++d)
        for (int64_t l = 0; l < 4; ++l) rows[i + l][d] = from[d * tile_size + i + l];
    }
  for (; i < count; ++i)
    for (int64_t d = 0; d < width; ++d) rows[i][d] = static_cast<S>(from[d * tile_size + i]);
}

/// How the scores of an atom are cut: each part is the rows (of others) that a run [first, last) of
/// neighbouring vectors of lanes needs. Runs that few rows need are joined in the last part.
struct PanelPlan {
  struct Part {
    int64_t first, last;
    uint64_t rows;
  };
  std::vector<Part> parts;
  int64_t needed = 0;   // vectors
  bool joined = false;  // the last part takes its bits from `joined_bits`
  Atom joined_bits;     // without those of other parts

  template <class T>
  void set(const Atom& atom) {
    constexpr int64_t lanes = simd::lanes<T>, vectors = tile_size / lanes;
    constexpr uint64_t vector = ~uint64_t{0} >> (64 - lanes);
    constexpr int few_rows = 4;  // products of fewer wait for each sum
    uint64_t rows_of[vectors][vectors + 1] = {};
    parts.clear();
    needed = 0;
    for (size_t r = 0; r < atom.size(); ++r) {
      uint64_t wanted = 0;
      for (int64_t v = 0; v < vectors; ++v) wanted |= uint64_t{(atom[r] >> (v * lanes) & vector) != 0} << v;
      needed += std::popcount(wanted);
      while (wanted) {
        const int first = std::countr_zero(wanted), last = first + std::countr_one(wanted >> first);
        rows_of[first][last] |= uint64_t{1} << r;
        wanted &= ~uint64_t{0} << last;
      }
    }
    Part few{vectors, 0, 0};
    for (int64_t first = 0; first < vectors; ++first)
      for (int64_t last = first + 1; last <= vectors; ++last) {
        const uint64_t rows = rows_of[first][last];
        if (std::popcount(rows) >= few_rows) {
          parts.push_back({first, last, rows});
          continue;
        }
        const uint64_t run = ~uint64_t{0} >> (64 - (last - first) * lanes) << (first * lanes);
        for (uint64_t rest = rows; rest; rest &= rest - 1) {
          const auto row = static_cast<size_t>(std::countr_zero(rest));
          joined_bits[row] = (few.rows >> row & 1 ? joined_bits[row] : 0) | (atom[row] & run);
          few = {std::min(few.first, first), std::max(few.last, last), few.rows | uint64_t{1} << row};
        }
      }
    joined = few.rows != 0;
    if (joined) parts.push_back(few);
  }
};

/// The map of one matrix, and the plans of its atoms unless there are very many.
struct PlannedMap {
  std::shared_ptr<const MaskMap> map;
  std::vector<PanelPlan> plans;
};

/// The maps of all matrices; most masks have one for all.
template <class T>
class Maps {
 public:
  explicit Maps(const AttentionProblem& p) : heads_(p.heads()) {
    constexpr size_t most_plans = 4096;  // then most atoms are met once
    const MaskRule& rule = p.mask.rule();
    per_batch_ = rule.per_batch(), per_head_ = rule.per_head();
    for (int64_t b = 0; b < (per_batch_ ? p.batch() : 1); ++b)
      for (int64_t h = 0; h < (per_head_ ? p.heads() : 1); ++h) {
        PlannedMap& made = maps_.emplace_back();
        made.map = rule.map({p.queries(), p.keys(), p.batch(), b, h});
        const auto& atoms = made.map->atoms;
        any_bits_ |= !atoms.empty();
        if (atoms.size() > most_plans) continue;
        made.plans.resize(atoms.size());
        parallel_for(0, static_cast<int64_t>(atoms.size()), 256, [&](int64_t first, int64_t last) {
          for (auto i = static_cast<size_t>(first); i < static_cast<size_t>(last); ++i)
            made.plans[i].template set<T>(atoms[i]);
        });
      }
  }
  const PlannedMap& of(int64_t b, int64_t h) const {
    return maps_[static_cast<size_t>((per_batch_ ? b * (per_head_ ? heads_ : 1) : 0) + (per_head_ ? h : 0))];
  }
  /// The most tiles that a side has in any map.
  int64_t tiles(Side side) const {
    int64_t most = 0;
    for (const auto& planned : maps_) most = std::max(most, planned.map->side(side).tiles);
    return most;
  }
  /// Whether any map leaves out a pair of a block that it visits.
  bool any_bits() const { return any_bits_; }

 private:
  bool per_batch_, per_head_, any_bits_ = false;
  int64_t heads_;
  std::vector<PlannedMap> maps_;
};

/// Up to 64 others that a tile visits.
struct Block {
  int64_t tokens[tile_size];
  int64_t count;
  const Atom* bits;  // one word an other; nullptr: every pair is allowed
  const PanelPlan* plan;
};

template <class T, class F>
void for_each_block(const PlannedMap& planned, Side side, int64_t tile, F&& f) {
  const SideMap& m = planned.map->side(side);
  Block block;
  PanelPlan own;
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
        if (id >= 0) {
          block.bits = &planned.map->atoms[static_cast<size_t>(id)];
          block.plan = planned.plans.empty() ? &own : &planned.plans[static_cast<size_t>(id)];
          if (planned.plans.empty()) own.template set<T>(*block.bits);
        }
      }
      f(block);
    }
}

/// Rows of a block that some of neighbouring vectors of lanes need.
struct Panel {
  int64_t lane, lanes;  // first lane, and how many
  int64_t count;
  bool masked;  // look at `words`
  int64_t rows[tile_size];
  uint64_t words[tile_size];  // shifted so that bit 0 is lane `lane`

  bool allows(int64_t row, int64_t lane_of_panel) const { return !masked || words[row] >> lane_of_panel & 1; }
};

template <class T, class F>
void for_each_panel(const Block& block, int64_t used_lanes, F&& f) {
  constexpr int64_t lanes = simd::lanes<T>;
  Panel panel;
  const auto send = [&](const PanelPlan::Part& part, const Atom* bits) {
    panel.lane = part.first * lanes, panel.lanes = (part.last - part.first) * lanes, panel.masked = bits;
    panel.count = 0;
    for (uint64_t rest = part.rows; rest; rest &= rest - 1) {
      const int64_t row = std::countr_zero(rest);
      panel.rows[panel.count] = row;
      panel.words[panel.count++] = bits ? (*bits)[static_cast<size_t>(row)] >> panel.lane : 0;
    }
    f(static_cast<const Panel&>(panel));
  };
  const int64_t vectors = used_lanes / lanes;
  const PanelPlan::Part all{0, vectors, ~uint64_t{0} >> (64 - block.count)};
  if (!block.bits) return send(all, nullptr);
  // Wide panels are a little faster for each score, so splitting must save something.
  if (8 * block.plan->needed >= 7 * block.count * vectors) return send(all, block.bits);
  for (const PanelPlan::Part& part : block.plan->parts) {
    const bool joined = block.plan->joined && &part == &block.plan->parts.back();
    send(part, joined ? &block.plan->joined_bits : block.bits);
  }
}

/// Rows of one block as the arithmetic wants them: in place, or widened.
template <class S>
class Rows {
 public:
  using T = Compute<S>;
  explicit Rows(int64_t width)
      : width_(width), wide_(std::is_same_v<S, T> ? 0 : tile_size * width), zeros_(width) {
    std::fill(zeros_ + 0, zeros_ + width, T(0));
  }

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
  const T* row(int64_t i) const { return rows_[i]; }
  /// The rows of a panel; those in `zeroed` as if they were 0.
  const T* const* of(const Panel& panel, uint64_t zeroed = 0) {
    for (int64_t i = 0; i < panel.count; ++i)
      chosen_[i] = zeroed >> panel.rows[i] & 1 ? static_cast<T*>(zeros_) : rows_[panel.rows[i]];
    return chosen_;
  }
  /// Bit i: row i holds infinity or NaN.
  uint64_t not_finite(int64_t count) const {
    uint64_t bits = 0;
    for (int64_t i = 0; i < count; ++i) bits |= uint64_t{!simd::all_finite(rows_[i], width_)} << i;
    return bits;
  }

 private:
  int64_t width_;
  Scratch<T> wide_, zeros_;
  const T *rows_[tile_size], *chosen_[tile_size];
};

/// c[i][lane] += sum over r of row r [i] * b[r][lane], for `count` channels i. 0 times NaN is NaN, so a
/// masked weight of 0 does not suffice for rows that are not finite: these are added to the lanes that see
/// them alone, so that all others add the same numbers in the same order as ever.
template <class S>
void add_rows(Rows<S>& rows, uint64_t not_finite, int64_t count, const Panel& panel, const Compute<S>* b,
              Compute<S>* c) {
  multiply_panel<Compute<S>, simd::Rows::by_sum>(rows.of(panel, not_finite), count, panel.count, b, tile_size,
                                                 c, tile_size, panel.lanes, true);
  if (not_finite == 0) return;
  for (int64_t r = 0; r < panel.count; ++r) {
    if (!(not_finite >> panel.rows[r] & 1)) continue;
    const Compute<S>* row = rows.row(panel.rows[r]);
    for (int64_t lane = 0; lane < panel.lanes; ++lane)
      if (panel.allows(r, lane))
        for (int64_t i = 0; i < count; ++i) c[i * tile_size + lane] += row[i] * b[r * tile_size + lane];
  }
}

/// factors[lane] = 1 / (1 - p) for a kept weight, 0 for a dropped one.
template <class T, class RowWord, class Key>
void dropout_factors(T* factors, int64_t lanes, uint32_t threshold, T keep_scale, RowWord row_word, Key key) {
  for (int64_t lane = 0; lane < lanes; ++lane)
    factors[lane] = AttentionDropout::mix(row_word(lane), key(lane)) >= threshold ? keep_scale : T(0);
}

}  // namespace torus::detail
