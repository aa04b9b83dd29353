// What a mask must answer so that its map of tiles can be built. A new kind of mask derives from MaskRule
// here; most need only a predicate (Mask::from).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "torus/core/error.h"

namespace torus {

/// A number that a predicate may read only if its mask declared it: anything else would share one map between
/// batches or heads that differ.
class Declared {
 public:
  Declared() = default;
  Declared(const char* what, int64_t value) : what_(what), value_(value) {}
  operator int64_t() const {
    if (value_ < 0) [[unlikely]]
      fail(Error::Kind::Value, "[mask] the predicate reads ", what_, " without declaring .per_", what_,
           " = true");
    return value_;
  }

 private:
  const char* what_ = "batch";
  int64_t value_ = -1;
};

inline constexpr int max_grid_axes = 6;

/// A token as a predicate sees it.
struct MaskToken {
  int64_t token = 0;                              // its place in the sequence
  std::array<int64_t, max_grid_axes> coord = {};  // its place on the grid; 0 on axes that the mask names not
  Declared batch, head;
};
struct Query : MaskToken {};
struct Key : MaskToken {};

namespace detail {

/// Tokens of a side at most: maps keep them in 32 bits.
inline constexpr int64_t max_tokens = std::numeric_limits<int32_t>::max();

/// Owners of a tile at most, and others an atom of bits.
inline constexpr int64_t tile_size = 64;

/// Which tokens own tiles: queries (forward) or keys (backward).
enum class Side { query, key };

/// Bits of up to 64 others x 64 owners: bit i of word j says whether owner i and other j are an allowed pair.
using Atom = std::array<uint64_t, tile_size>;

/// The problem that a map is for. `batch` and `head` are 0 where the rule does not depend on them;
/// `batches`, how many elements there are, is -1 where that is not known.
struct MaskShape {
  int64_t queries = 0, keys = 0;
  int64_t batches = -1;
  int64_t batch = 0, head = 0;

  int64_t owners(Side side) const { return side == Side::query ? queries : keys; }
  int64_t others(Side side) const { return side == Side::query ? keys : queries; }
};

/// The order in which tokens own tiles: tile t owns tokens[first[t]] ... tokens[first[t + 1] - 1]. Empty: 64
/// at a time in their own order.
struct OwnerOrder {
  std::vector<int64_t> tokens, first;
  bool linear() const { return first.empty(); }
};

/// Others that the owners of a tile might see.
struct Candidates {
  /// Contiguous tokens; `all` if every owner sees every one of them, else the pairs are to be tried.
  struct Range {
    int64_t first, last;
    bool all;
  };
  std::vector<Range> ranges;  // ascending, disjoint
  std::vector<int64_t> list;  // further tokens to be tried: ascending, each once, outside the ranges
};

struct MaskMap;
struct PackedDocuments;

/// A mask's predicate, and the arithmetic that finds candidates without trying every pair. Immutable, except
/// for the cache of maps, which dies with it.
class MaskRule {
 public:
  MaskRule(bool per_batch = false, bool per_head = false) : per_batch_(per_batch), per_head_(per_head) {}
  virtual ~MaskRule() = default;
  MaskRule(const MaskRule&) = delete;
  MaskRule& operator=(const MaskRule&) = delete;

  /// Throws Error{Shape} if the mask cannot serve this problem.
  virtual void check_shape(const MaskShape& shape) const = 0;
  virtual bool allows(const MaskShape& shape, int64_t query, int64_t key) const = 0;
  virtual OwnerOrder order(Side, const MaskShape&) const { return {}; }
  virtual Candidates candidates(Side side, std::span<const int64_t> owners, const MaskShape& shape) const = 0;
  /// At most 64 owners and 64 others; bits beyond them are 0.
  virtual Atom bits(Side side, std::span<const int64_t> owners, std::span<const int64_t> others,
                    const MaskShape& shape) const = 0;

  /// Documents whose lengths are in a tensor, if this is a mask of such: its map is made when it is used.
  virtual const PackedDocuments* packed() const { return nullptr; }

  /// Whether batch elements, heads, have maps of their own.
  bool per_batch() const { return per_batch_; }
  bool per_head() const { return per_head_; }
  /// The map for this problem, built on first use.
  std::shared_ptr<const MaskMap> map(MaskShape shape) const;

  /// The form in which a device keeps maps, and the memory that it holds.
  struct DeviceMaps {
    std::shared_ptr<const void> maps;
    int64_t bytes;
  };
  /// What `make` made for this key on first use. Dropped as maps are.
  std::shared_ptr<const void> device_maps(const std::array<int64_t, 5>& key,
                                          const std::function<DeviceMaps()>& make) const;

 private:
  bool per_batch_, per_head_;
  mutable std::mutex mutex_;
  mutable std::map<std::array<int64_t, 5>, DeviceMaps> device_maps_;
  mutable std::map<std::tuple<int64_t, int64_t, int64_t, int64_t>, std::shared_ptr<const MaskMap>> maps_;
};

/// Sizes of a grid whose tokens are numbered in row-major order.
class Grid {
 public:
  Grid() = default;
  /// Throws Error{Value} on a size below 1, too many axes, or too many tokens.
  Grid(const char* op, std::vector<int64_t> sizes);

  int axes() const { return static_cast<int>(sizes_.size()); }
  int64_t size(int axis) const { return sizes_[static_cast<size_t>(axis)]; }
  int64_t tokens() const;
  const std::vector<int64_t>& sizes() const { return sizes_; }
  std::array<int64_t, max_grid_axes> coord(int64_t token) const;
  /// "4 x 5".
  std::string text() const;
  /// Throws Error{Shape} unless the grid has `tokens` tokens; `what` names them.
  void check_tokens(const char* op, int64_t tokens, const char* what) const;
  /// Owners in boxes of at most 64 tokens, whose sides keep box + reach (the window) small.
  OwnerOrder boxes(const std::vector<int64_t>& reach) const;

 private:
  void append_box(std::vector<int64_t>& tokens, std::vector<int64_t> from, std::vector<int64_t> to,
                  bool backwards) const;

  std::vector<int64_t> sizes_;
};

/// Derives evaluation from a predicate `bool Rule::sees(const Query&, const Key&, const MaskShape&) const`,
/// inlined.
template <class Rule>
class PredicateRule : public MaskRule {
 public:
  using MaskRule::MaskRule;

  bool allows(const MaskShape& shape, int64_t query, int64_t key) const final {
    return self().sees(describe<Query>(Side::query, query, shape), describe<Key>(Side::key, key, shape),
                       shape);
  }

  Atom bits(Side side, std::span<const int64_t> owners, std::span<const int64_t> others,
            const MaskShape& shape) const final {
    return side == Side::query ? evaluate<Query, Key>(side, owners, others, shape)
                               : evaluate<Key, Query>(side, owners, others, shape);
  }

 protected:
  /// The grid on which tokens of a side have coordinates; nullptr for none.
  virtual const Grid* grid(Side) const { return nullptr; }

 private:
  const Rule& self() const { return static_cast<const Rule&>(*this); }

  template <class Token>
  Token describe(Side side, int64_t token, const MaskShape& shape) const {
    Token result;
    result.token = token;
    if (const Grid* g = grid(side)) result.coord = g->coord(token);
    result.batch = Declared("batch", per_batch() ? shape.batch : -1);
    result.head = Declared("head", per_head() ? shape.head : -1);
    return result;
  }

  template <class Owner, class Other>
  Atom evaluate(Side side, std::span<const int64_t> owners, std::span<const int64_t> others,
                const MaskShape& shape) const {
    const Side opposite = side == Side::query ? Side::key : Side::query;
    std::array<Owner, tile_size> mine;
    for (size_t i = 0; i < owners.size(); ++i) mine[i] = describe<Owner>(side, owners[i], shape);
    Atom result{};
    for (size_t j = 0; j < others.size(); ++j) {
      const Other other = describe<Other>(opposite, others[j], shape);
      for (size_t i = 0; i < owners.size(); ++i) {
        bool sees;
        if constexpr (std::is_same_v<Owner, Query>)
          sees = self().sees(mine[i], other, shape);
        else
          sees = self().sees(other, mine[i], shape);
        result[j] |= uint64_t{sees} << i;
      }
    }
    return result;
  }
};

/// The grids that a predicate names, if any. Whom it sees is found by trying every pair.
class NamedGrids {
 public:
  NamedGrids(std::vector<int64_t> grid, std::vector<int64_t> key_grid);
  void check_shape(const MaskShape& shape) const;
  OwnerOrder order(Side side) const;
  Candidates candidates(Side side, const MaskShape& shape) const;
  const Grid* of(Side side) const;

 private:
  Grid query_grid_, key_grid_;  // no axes: none was named
};

}  // namespace detail
}  // namespace torus
