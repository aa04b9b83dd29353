// One side of a map for kernels that take several tiles of owners and several 64s of others at a time: what
// the tiles of a group visit, merged, so that each other is read once for all of them. Not installed.
#pragma once

#include <cstdint>
#include <vector>

#include "torus/ops/attention/map.h"

namespace torus::detail {

/// Group g is the tiles `tiles[g * group]` and on; it visits the entries `first[g]` up to `first[g + 1]`, of
/// `stride` words each:
///   [0] the first other: a token (a multiple of 64 * width), or a place in `lists` if word 1 is 0;
///   [1] how many blocks of 64 * width others follow one another, all alike; 0: one block of listed tokens;
///   [2] how many others of the (last) block there are;
///   [3 + width * i + j] what tile i sees of the j-th 64 of a block: the id of an atom, `full` or `none`.
/// Each group has at least one entry, each tile sees an other at most once.
struct GroupedSide {
  static constexpr int32_t full = -1, none = -2;

  int group, width, stride;
  std::vector<int32_t> tiles;  // -1: no tile
  std::vector<int32_t> first, entries, lists;
  std::vector<Atom> atoms;  // those of the map, then further ones
  bool gathers = false;     // some entry lists tokens, or tiles do not own 64 tokens in a row
  // If no entry lists tokens: the last group that visits block b of 64 * width others, -1 if none does; and
  // whether those that visit a block follow one another.
  std::vector<int32_t> last_visitor;
  bool contiguous = true;
  bool uniform = true;  // every group visits as many blocks
  double density = 0;   // of all blocks, the share that a group visits on average

  int64_t groups() const { return static_cast<int64_t>(first.size()) - 1; }
  int64_t bytes() const;
};

/// `side` is a side of `map`, of `owners` and `others` tokens.
GroupedSide group_side(const MaskMap& map, Side side, int64_t owners, int64_t others, int group, int width);

}  // namespace torus::detail
