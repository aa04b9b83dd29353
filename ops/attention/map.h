// The map of a mask: for each tile of owners (queries in forward, keys in backward) the others that it
// visits.
#pragma once

#include <array>
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

/// Calls f(owners, first, count, word) for what each tile of a side visits: the owners whose bits are set in
/// `word` see the others first ... first + count - 1.
template <class F>
void for_each_visit(const MaskMap& map, Side which, int64_t total_owners, F&& f) {
  const SideMap& side = map.side(which);
  std::array<int64_t, tile_size> space;
  for (int64_t tile = 0; tile < side.tiles; ++tile) {
    const auto owners = side.owners(tile, total_owners, space);
    for (const Visit& visit : side.of_tile(tile)) {
      if (visit.kind == Visit::Kind::interval) {
        f(owners, visit.first, visit.count, ~uint64_t{0});
        continue;
      }
      for (int64_t j = 0; j < visit.count; ++j) {
        const int32_t atom = side.atom_ids[static_cast<size_t>(visit.atoms + j / tile_size)];
        const uint64_t word = atom < 0
                                  ? ~uint64_t{0}
                                  : map.atoms[static_cast<size_t>(atom)][static_cast<size_t>(j % tile_size)];
        const int64_t other = visit.kind == Visit::Kind::gather
                                  ? side.lists[static_cast<size_t>(visit.first + j)]
                                  : visit.first + j;
        f(owners, other, int64_t{1}, word);
      }
    }
  }
}

}  // namespace torus::detail
