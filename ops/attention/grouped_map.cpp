#include "torus/ops/attention/grouped_map.h"

#include <algorithm>
#include <limits>
#include <map>

namespace torus::detail {

namespace {

constexpr int64_t no_more = std::numeric_limits<int64_t>::max();

// Consecutive 64s of others that a tile sees alike.
struct Piece {
  int64_t first, last;  // in units of 64 tokens
  int32_t id;
};

struct TilePieces {
  std::vector<Piece> linear;                         // ascending, disjoint
  std::vector<std::pair<int32_t, uint64_t>> listed;  // tokens, and which owners see them
};

class Grouping {
 public:
  Grouping(const MaskMap& map, const SideMap& side, int64_t owners, int64_t others, GroupedSide& to)
      : map_(map),
        side_(side),
        owners_(owners),
        others_(others),
        to_(to),
        places_((to.atoms = map.atoms, to.atoms)) {}

  void run() {
    const int64_t groups = (side_.tiles + to_.group - 1) / to_.group;
    const int64_t blocks = (others_ + unit() - 1) / unit();
    to_.gathers = !side_.order.linear();
    to_.last_visitor.assign(static_cast<size_t>(blocks), -1);
    visitors_.assign(static_cast<size_t>(blocks) + 1, 0);
    lowest_.assign(static_cast<size_t>(blocks), -1);
    to_.first.push_back(0);
    for (int64_t g = 0; g < groups; ++g) {
      std::vector<TilePieces> tiles(static_cast<size_t>(to_.group));
      for (int i = 0; i < to_.group; ++i) {
        const int64_t tile = g * to_.group + i;
        to_.tiles.push_back(tile < side_.tiles ? static_cast<int32_t>(tile) : -1);
        if (tile < side_.tiles) tiles[static_cast<size_t>(i)] = pieces(tile);
      }
      const size_t before = to_.entries.size();
      add_linear(g, tiles);
      add_listed(tiles);
      if (to_.entries.size() == before)
        add_entry(0, 1, std::min(unit(), others_), std::vector<int32_t>(words(), GroupedSide::none));
      to_.first.push_back(static_cast<int32_t>(to_.entries.size() / static_cast<size_t>(to_.stride)));
    }
    int64_t most = 0, number = 0, all = 0;
    for (int64_t g = 0; g < groups; ++g) {
      int64_t visited = 0;
      for (int32_t e = to_.first[static_cast<size_t>(g)]; e < to_.first[static_cast<size_t>(g) + 1]; ++e)
        visited += std::max(1, to_.entries[static_cast<size_t>(e) * static_cast<size_t>(to_.stride) + 1]);
      to_.uniform = to_.uniform && (g == 0 || visited == most);
      most = visited, all += visited;
    }
    to_.density = static_cast<double>(all) / static_cast<double>(std::max<int64_t>(groups * blocks, 1));
    for (size_t b = 0; b < static_cast<size_t>(blocks); ++b) {
      number += visitors_[b];
      to_.contiguous =
          to_.contiguous && number == (to_.last_visitor[b] < 0 ? 0 : to_.last_visitor[b] - lowest_[b] + 1);
    }
  }

 private:
  int64_t unit() const { return tile_size * to_.width; }
  size_t words() const { return static_cast<size_t>(to_.group * to_.width); }

  TilePieces pieces(int64_t tile) {
    TilePieces result;
    std::map<int64_t, Atom> edges;  // 64s that several visits share, or that one fills in part
    const auto add_column = [&](int64_t token, uint64_t seen) {
      edges.try_emplace(token / tile_size, Atom{}).first->second[static_cast<size_t>(token % tile_size)] |=
          seen;
    };
    for (const Visit& visit : side_.of_tile(tile)) {
      if (visit.kind == Visit::Kind::interval) {
        const int64_t end = visit.first + visit.count;
        const int64_t from = (visit.first + tile_size - 1) / tile_size,
                      to = end == others_ ? (end + tile_size - 1) / tile_size : end / tile_size;
        if (from < to) {
          result.linear.push_back({from, to, GroupedSide::full});
          for (int64_t t = visit.first; t < from * tile_size; ++t) add_column(t, ~uint64_t{0});
          for (int64_t t = to * tile_size; t < end; ++t) add_column(t, ~uint64_t{0});
        } else {
          for (int64_t t = visit.first; t < end; ++t) add_column(t, ~uint64_t{0});
        }
        continue;
      }
      for (int64_t i = 0; i < visit.count; i += tile_size) {
        const int32_t id = side_.atom_ids[static_cast<size_t>(visit.atoms + i / tile_size)];
        const int64_t first = visit.first + i, count = std::min(tile_size, visit.count - i);
        const auto seen = [&](int64_t j) {
          return id < 0 ? ~uint64_t{0} : map_.atoms[static_cast<size_t>(id)][static_cast<size_t>(j)];
        };
        if (visit.kind == Visit::Kind::gather) {
          for (int64_t j = 0; j < count; ++j)
            result.listed.emplace_back(side_.lists[static_cast<size_t>(first + j)], seen(j));
        } else if (first % tile_size == 0 && (count == tile_size || first + count == others_)) {
          result.linear.push_back(
              {first / tile_size, first / tile_size + 1, id < 0 ? GroupedSide::full : id});
        } else {
          for (int64_t j = 0; j < count; ++j) add_column(first + j, seen(j));
        }
      }
    }
    for (const auto& [place, atom] : edges) {
      const int64_t there = std::min(tile_size, others_ - place * tile_size);
      const bool whole = std::all_of(atom.begin(), atom.begin() + there,
                                     [](uint64_t column) { return column == ~uint64_t{0}; });
      result.linear.push_back({place, place + 1, whole ? GroupedSide::full : places_.of(atom)});
    }
    std::sort(result.linear.begin(), result.linear.end(),
              [](const Piece& a, const Piece& b) { return a.first < b.first; });
    return result;
  }

  // `visited` others of the last block there are.
  void add_entry(int64_t first, int64_t blocks, int64_t visited, const std::vector<int32_t>& ids) {
    for (int64_t word : {first, blocks, visited}) to_.entries.push_back(static_cast<int32_t>(word));
    to_.entries.insert(to_.entries.end(), ids.begin(), ids.end());
  }

  void add_linear(int64_t group, const std::vector<TilePieces>& tiles) {
    std::vector<size_t> next(tiles.size(), 0);
    const int64_t width = to_.width;
    for (int64_t at = 0;;) {  // in units of 64
      int64_t from = no_more;
      for (size_t i = 0; i < tiles.size(); ++i) {
        const auto& linear = tiles[i].linear;
        while (next[i] < linear.size() && linear[next[i]].last <= at) ++next[i];
        if (next[i] < linear.size()) from = std::min(from, std::max(linear[next[i]].first, at));
      }
      if (from == no_more) return;
      at = from / width * width;
      // How far each tile sees the same in every 64: from `at` up to the next change.
      std::vector<int32_t> ids(words(), GroupedSide::none);
      int64_t alike = no_more;
      for (size_t i = 0; i < tiles.size(); ++i) {
        const auto& linear = tiles[i].linear;
        size_t n = next[i];
        for (int64_t j = 0; j < width; ++j) {
          while (n < linear.size() && linear[n].last <= at + j) ++n;
          if (n < linear.size() && linear[n].first <= at + j)
            ids[i * static_cast<size_t>(width) + static_cast<size_t>(j)] = linear[n].id;
        }
        n = next[i];
        while (n < linear.size() && linear[n].last <= at) ++n;
        int64_t until = no_more;
        if (n < linear.size())
          until = linear[n].first > at                ? linear[n].first
                  : linear[n].id == GroupedSide::full ? linear[n].last
                                                      : at + 1;
        alike = std::min(alike, until);
      }
      const int64_t blocks = std::max<int64_t>(1, (alike - at) / width);
      const int64_t end = std::min((at + blocks * width) * tile_size, others_);
      add_entry(at * tile_size, blocks, end - (at + (blocks - 1) * width) * tile_size, ids);
      for (int64_t b = at / width; b < at / width + blocks; ++b) {
        const auto place = static_cast<size_t>(b);
        if (lowest_[place] < 0) lowest_[place] = group;
        to_.last_visitor[place] = static_cast<int32_t>(group);
      }
      ++visitors_[static_cast<size_t>(at / width)];
      --visitors_[static_cast<size_t>(at / width + blocks)];
      at += blocks * width;
    }
  }

  // Tokens that the same tiles see stand together, so that a tile may leave out whole blocks.
  void add_listed(const std::vector<TilePieces>& tiles) {
    std::map<int32_t, std::vector<uint64_t>> seen;
    for (size_t i = 0; i < tiles.size(); ++i)
      for (const auto& [token, owners] : tiles[i].listed)
        seen.try_emplace(token, tiles.size(), 0).first->second[i] |= owners;
    if (seen.empty()) return;
    to_.gathers = true;
    std::vector<std::pair<uint32_t, int32_t>> order;
    for (const auto& [token, columns] : seen) {
      uint32_t who = 0;
      for (size_t i = 0; i < columns.size(); ++i) who |= columns[i] ? 1u << i : 0;
      order.emplace_back(who ^ who >> 1 ^ who >> 2, token);  // a Gray code: 1, 3, 2 of two tiles
    }
    std::sort(order.begin(), order.end());
    for (size_t from = 0; from < order.size(); from += static_cast<size_t>(unit())) {
      const size_t count = std::min(order.size() - from, static_cast<size_t>(unit()));
      std::vector<int32_t> ids;
      for (size_t i = 0; i < tiles.size(); ++i)
        for (size_t j = 0; j < static_cast<size_t>(to_.width); ++j) {
          Atom atom{};
          bool any = false;
          for (size_t n = j * tile_size; n < std::min<size_t>(count, (j + 1) * tile_size); ++n) {
            const uint64_t column = seen.at(order[from + n].second)[i];
            atom[n % tile_size] = column;
            any = any || column;
          }
          ids.push_back(any ? places_.of(atom) : GroupedSide::none);
        }
      add_entry(static_cast<int64_t>(to_.lists.size()), 0, static_cast<int64_t>(count), ids);
      for (size_t n = 0; n < count; ++n) to_.lists.push_back(order[from + n].second);
    }
  }

  const MaskMap& map_;
  const SideMap& side_;
  const int64_t owners_, others_;
  GroupedSide& to_;
  AtomPlaces places_;
  std::vector<int64_t> visitors_, lowest_;  // of blocks: how many more than of the one before; the first
};

}  // namespace

int64_t GroupedSide::bytes() const {
  return static_cast<int64_t>(
      (tiles.size() + first.size() + entries.size() + lists.size() + last_visitor.size()) * sizeof(int32_t) +
      atoms.size() * sizeof(Atom));
}

GroupedSide group_side(const MaskMap& map, Side side, int64_t owners, int64_t others, int group, int width) {
  GroupedSide result{};
  result.group = group, result.width = width, result.stride = 3 + group * width;
  Grouping(map, map.side(side), owners, others, result).run();
  return result;
}

}  // namespace torus::detail
