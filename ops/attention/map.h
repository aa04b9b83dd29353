// The map of a mask: for each tile of owners (queries in forward, keys in backward) the others that it
// visits.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "torus/ops/attention/mask_rule.h"

namespace torus::detail {

/// Others that a tile visits.
struct Visit {
  enum class Kind : uint8_t {
    interval,  // contiguous tokens; every pair is allowed
    run,       // contiguous tokens, by bits
    gather     // tokens of a list, by bits
  };
  Kind kind;
  int64_t first;  // first token; for a gather, where its tokens start in `SideMap::lists`
  int64_t count;
  int64_t atoms;  // where its atom ids start in `SideMap::atom_ids`, one for 64 others; interval: -1
};

/// One side of a map. Each owner belongs to one tile, and each tile sees an other at most once.
struct SideMap {
  OwnerOrder order;
  int64_t tiles = 0;
  std::vector<int64_t> first_visit;  // tile t visits [first_visit[t], first_visit[t + 1])
  std::vector<Visit> visits;
  std::vector<int32_t> lists;     // tokens of gathers
  std::vector<int32_t> atom_ids;  // -1: every pair of the atom is allowed
  // Key side: tiles of one colour share no query, so they may add to it in any order; colours ascend. Never
  // empty if a tile gathers, else only where few colours suffice.
  std::vector<int32_t> colour;

  std::span<const Visit> of_tile(int64_t tile) const {
    const auto t = static_cast<size_t>(tile);
    return {visits.data() + first_visit[t], visits.data() + first_visit[t + 1]};
  }
  /// The owners of a tile, given how many there are in all. Puts tokens of a linear order into `space`.
  std::span<const int64_t> owners(int64_t tile, int64_t total, std::array<int64_t, tile_size>& space) const;
};

/// A dictionary of atoms: each has one place.
class AtomPlaces {
 public:
  /// `atoms`, which must outlive this, may hold some already.
  explicit AtomPlaces(std::vector<Atom>& atoms);
  /// The place of an atom, which is added if it is new.
  int32_t of(const Atom& atom);

 private:
  std::vector<Atom>& atoms_;
  std::unordered_map<uint64_t, std::vector<int32_t>> same_hash_;
};

struct MaskMap {
  SideMap query, key;
  std::vector<Atom> atoms;  // distinct
  int64_t visited = 0;      // scores in what the query side visits
  int64_t needed = 0;       // allowed pairs

  const SideMap& side(Side which) const { return which == Side::query ? query : key; }
  int64_t bytes() const;
};

}  // namespace torus::detail
