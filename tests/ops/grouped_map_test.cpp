// A grouped side, spread out again, is the mask: every pair once, whatever the groups and the widths of
// blocks.
#include "torus/ops/attention/grouped_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "torus/ops/attention/mask.h"

namespace torus {
namespace {

using detail::GroupedSide;
using detail::Side;
using detail::tile_size;

struct Case {
  const char* name;
  Mask mask;
  int64_t queries, keys;
};

std::vector<Case> cases() {
  const auto grid = [](std::vector<int64_t> sides, std::vector<int64_t> window, Boundary boundary) {
    return neighborhood({.grid = std::move(sides), .window = std::move(window), .boundary = {boundary}});
  };
  return {
      {"full", full(), 300, 200},
      {"one", full(), 1, 1},
      {"causal", causal(), 1000, 1000},
      {"causal, fewer queries", causal(Align::bottom_right), 130, 515},
      {"rows without keys", causal(Align::bottom_right), 515, 130},
      {"window", sliding_window(70, 3), 700, 700},
      {"documents", document({1, 100, 62, 64, 93, 130, 30}), 480, 480},
      {"prefix", prefix(70), 300, 300},
      {"nothing", Mask::from([](Query, Key) { return false; }), 200, 200},
      {"stripes", Mask::from([](Query q, Key k) { return (q.token / 64 + k.token / 32) % 3 == 0; }), 600,
       400},
      {"scattered", Mask::from([](Query q, Key k) { return (q.token * 7 + k.token * 13) % 31 == 0; }), 300,
       300},
      {"not", !sliding_window(20, 20), 500, 500},
      {"wrap", grid({8, 8, 8}, {5, 5, 5}, wrap), 512, 512},
      {"shift", grid({7, 6, 9}, {3, 5, 3}, shift), 378, 378},
      {"wrap 2-D", grid({13, 17}, {5, 4}, wrap), 221, 221},
  };
}

void check(const Case& c, Side which, int group, int width) {
  SCOPED_TRACE(std::string(c.name) + (which == Side::query ? ", queries" : ", keys") + " own, groups of " +
               std::to_string(group) + ", width " + std::to_string(width));
  const auto map = c.mask.rule().map({c.queries, c.keys, 1});
  const int64_t owners = which == Side::query ? c.queries : c.keys,
                others = which == Side::query ? c.keys : c.queries;
  const GroupedSide side = detail::group_side(*map, which, owners, others, group, width);
  const detail::SideMap& tiles = map->side(which);
  const int64_t unit = tile_size * width;
  std::vector<std::vector<int>> seen(static_cast<size_t>(owners),
                                     std::vector<int>(static_cast<size_t>(others), 0));
  std::vector<std::set<int32_t>> visitors(static_cast<size_t>((others + unit - 1) / unit));
  std::set<int32_t> tiles_there;
  std::set<int64_t> blocks_of_groups;
  int64_t blocks_of_all = 0;
  for (int64_t g = 0; g < side.groups(); ++g) {
    ASSERT_LT(side.first[static_cast<size_t>(g)], side.first[static_cast<size_t>(g) + 1]);
    int64_t blocks_here = 0;
    for (int32_t e = side.first[static_cast<size_t>(g)]; e < side.first[static_cast<size_t>(g) + 1]; ++e) {
      const int32_t* const entry =
          side.entries.data() + static_cast<size_t>(e) * static_cast<size_t>(side.stride);
      const int64_t blocks = std::max(entry[1], 1);
      blocks_here += blocks;
      bool anyone = false;
      for (int i = 0; i < group * width; ++i) anyone |= entry[3 + i] != GroupedSide::none;
      for (int64_t n = 0; n < blocks; ++n) {
        const int64_t count = n == blocks - 1 ? entry[2] : unit;
        ASSERT_LE(count, unit);
        if (entry[1] > 0) {
          ASSERT_EQ(entry[0] % unit, 0);
        }
        if (entry[1] > 0 && anyone)
          visitors[static_cast<size_t>(entry[0] / unit + n)].insert(static_cast<int32_t>(g));
        for (int i = 0; i < group; ++i)
          for (int64_t x = 0; x < unit; ++x) {
            const int32_t id = entry[3 + i * width + x / tile_size];
            const int32_t tile = side.tiles[static_cast<size_t>(g * group + i)];
            if (tile < 0 || id == GroupedSide::none || x >= count) continue;
            const int64_t other =
                entry[1] == 0 ? side.lists[static_cast<size_t>(entry[0] + x)] : entry[0] + n * unit + x;
            std::array<int64_t, tile_size> space;
            const auto own = tiles.owners(tile, owners, space);
            for (size_t o = 0; o < own.size(); ++o)
              if (id == GroupedSide::full ||
                  side.atoms[static_cast<size_t>(id)][static_cast<size_t>(x % tile_size)] >> o & 1)
                ++seen[static_cast<size_t>(own[o])][static_cast<size_t>(other)];
          }
      }
    }
    blocks_of_groups.insert(blocks_here), blocks_of_all += blocks_here;
    for (int i = 0; i < group; ++i)
      if (const int32_t tile = side.tiles[static_cast<size_t>(g * group + i)]; tile >= 0) {
        EXPECT_TRUE(tiles_there.insert(tile).second);
      }
  }
  EXPECT_EQ(static_cast<int64_t>(tiles_there.size()), tiles.tiles);
  EXPECT_EQ(side.uniform, blocks_of_groups.size() == 1);
  EXPECT_NEAR(side.density,
              static_cast<double>(blocks_of_all) /
                  static_cast<double>(std::max<int64_t>(1, side.groups() * ((others + unit - 1) / unit))),
              1e-12);
  std::vector<int64_t> all(static_cast<size_t>(others));
  for (int64_t i = 0; i < others; ++i) all[static_cast<size_t>(i)] = i;
  int64_t wrong = 0;
  for (int64_t first = 0; first < owners; first += tile_size)
    for (int64_t from = 0; from < others; from += tile_size) {
      std::vector<int64_t> own;
      for (int64_t o = first; o < std::min(owners, first + tile_size); ++o) own.push_back(o);
      const std::span span(all.data() + from, static_cast<size_t>(std::min(tile_size, others - from)));
      const detail::Atom bits = c.mask.rule().bits(which, own, span, {c.queries, c.keys, 1});
      for (size_t j = 0; j < span.size(); ++j)
        for (size_t i = 0; i < own.size(); ++i)
          wrong += seen[static_cast<size_t>(own[i])][static_cast<size_t>(span[j])] !=
                   static_cast<int>(bits[j] >> i & 1);
    }
  EXPECT_EQ(wrong, 0);
  if (side.gathers) return;
  bool contiguous = true;
  for (size_t b = 0; b < visitors.size(); ++b) {
    EXPECT_EQ(side.last_visitor[b], visitors[b].empty() ? -1 : *visitors[b].rbegin()) << b;
    contiguous &= visitors[b].empty() || *visitors[b].rbegin() - *visitors[b].begin() + 1 ==
                                             static_cast<int32_t>(visitors[b].size());
  }
  EXPECT_EQ(side.contiguous, contiguous);
}

TEST(GroupedMap, IsTheMask) {
  for (const Case& c : cases())
    for (Side which : {Side::query, Side::key})
      for (int group : {1, 2, 3})
        for (int width : {1, 2}) check(c, which, group, width);
}

// Entries of intervals do not grow with their length.
TEST(GroupedMap, IsSmallForCausal) {
  const int64_t n = int64_t{1} << 20;
  const auto map = causal().rule().map({n, n, 1});
  const GroupedSide side = detail::group_side(*map, Side::query, n, n, 2, 2);
  EXPECT_LT(side.bytes(), 8 << 20);
  EXPECT_TRUE(side.contiguous);
}

}  // namespace
}  // namespace torus
