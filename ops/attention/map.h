// The map of a mask: for each tile of owners (queries in forward, keys in backward) the others that it
// visits. Kernels walk it; masks only say which tokens are candidates and which pairs are allowed.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <tuple>
#include <vector>

#include "torus/core/shape.h"

namespace torus::detail {

/// Owners a tile, and others an atom of bits.
inline constexpr int64_t tile_size = 64;

/// Which tokens own tiles: queries (forward) or keys (backward).
enum class Side { query, key };

/// Bits of 64 others x 64 owners: bit i of word j says whether owner i and other j are an allowed pair.
using Atom = std::array<uint64_t, tile_size>;

/// Others that a tile visits, in ascending token order.
struct Visit {
  int64_t first;  // first token
  int64_t count;  // contiguous tokens
  int64_t atoms;  // where the ids of its atoms start in `SideMap::atom_ids`, one an atom of 64 others;
                  // -1: an interval, every pair is allowed
  bool whole() const { return atoms < 0; }
};

/// One side of a map.
struct SideMap {
  std::vector<int64_t> first_visit;  // tile t visits [first_visit[t], first_visit[t + 1])
  std::vector<Visit> visits;
  std::vector<int32_t> atom_ids;

  std::span<const Visit> of_tile(int64_t tile) const {
    const auto t = static_cast<size_t>(tile);
    return {visits.data() + first_visit[t], visits.data() + first_visit[t + 1]};
  }
};

struct MaskMap {
  SideMap query, key;
  std::vector<Atom> atoms;  // distinct
  int64_t visited = 0;      // scores that the query side computes
  int64_t needed = 0;       // allowed pairs

  const SideMap& side(Side which) const { return which == Side::query ? query : key; }
  int64_t bytes() const;
};

/// A mask's predicate, and the arithmetic that finds candidate tiles without trying every pair. Immutable,
/// except for the cache of maps, which dies with it.
class MaskRule {
 public:
  /// Contiguous others; `all` if each of the owners may see each of them, else the pairs are to be tried.
  struct Range {
    int64_t first, last;
    bool all;
  };

  virtual ~MaskRule() = default;
  /// Throws Error{Shape} if the mask cannot serve these lengths.
  virtual void check_lengths(int64_t queries, int64_t keys) const = 0;
  virtual bool allows(int64_t q, int64_t k, int64_t queries, int64_t keys) const = 0;
  /// The others that owners [first, last) might see: disjoint, ascending, inside the other side's length.
  virtual std::vector<Range> candidates(Side side, int64_t first, int64_t last, int64_t queries,
                                        int64_t keys) const = 0;
  /// The bits of owners [first, first + 64) and others [other, other + 64); pairs beyond the lengths are 0.
  virtual Atom bits(Side side, int64_t first, int64_t other, int64_t queries, int64_t keys) const = 0;

  /// The map for these lengths, built on first use.
  std::shared_ptr<const MaskMap> map(int64_t queries, int64_t keys) const;

 private:
  mutable std::mutex mutex_;
  mutable std::map<std::pair<int64_t, int64_t>, std::shared_ptr<const MaskMap>> maps_;
};

/// Derives `bits` from a predicate `Rule::allows`, inlined.
template <class Rule>
class PredicateRule : public MaskRule {
 public:
  Atom bits(Side side, int64_t first, int64_t other, int64_t queries, int64_t keys) const final {
    const auto& rule = static_cast<const Rule&>(*this);
    Atom result{};
    const int64_t owners = std::min(tile_size, (side == Side::query ? queries : keys) - first);
    const int64_t others = std::min(tile_size, (side == Side::query ? keys : queries) - other);
    for (int64_t j = 0; j < others; ++j)
      for (int64_t i = 0; i < owners; ++i) {
        const int64_t q = side == Side::query ? first + i : other + j,
                      k = side == Side::query ? other + j : first + i;
        result[static_cast<size_t>(j)] |= uint64_t{rule.Rule::allows(q, k, queries, keys)} << i;
      }
    return result;
  }
};

}  // namespace torus::detail
