#include "torus/ops/attention/map.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "torus/core/parallel.h"
#include "torus/ops/attention/mask.h"

namespace torus::detail {

namespace {

uint64_t hash(const Atom& atom) {
  uint64_t value = 0xcbf29ce484222325;  // FNV-1a by words
  for (uint64_t word : atom) value = (value ^ word ^ word >> 32) * 0x100000001b3;
  return value;
}

// What one tile visits, before its atoms have found their place in the dictionary.
struct TileVisits {
  struct Block {
    Visit::Kind kind;
    int64_t first, count;  // for a gather, `first` counts in `list`
    bool full;
    Atom atom;
  };
  std::vector<Block> blocks;
  std::vector<int64_t> list;
  int64_t visited = 0, needed = 0;
};

class Builder {
 public:
  Builder(const MaskRule& rule, const MaskShape& shape) : rule_(rule), shape_(shape) {}

  std::shared_ptr<const MaskMap> build() {
    build_side(Side::query, map_->query);
    build_side(Side::key, map_->key);
    colour(map_->key);
    return map_;
  }

 private:
  void build_side(Side side, SideMap& into) {
    const int64_t owners = shape_.owners(side);
    into.order = rule_.order(side, shape_);
    into.tiles = into.order.linear() ? (owners + tile_size - 1) / tile_size
                                     : static_cast<int64_t>(into.order.first.size()) - 1;
    into.first_visit.push_back(0);
    // Some tiles at a time, so that what is not yet in the dictionary stays small.
    constexpr int64_t at_once = 256;
    std::vector<TileVisits> results;
    for (int64_t begin = 0; begin < into.tiles; begin += at_once) {
      const int64_t end = std::min(into.tiles, begin + at_once);
      results.assign(static_cast<size_t>(end - begin), {});
      parallel_tasks(end - begin,
                     [&](int64_t i) { results[static_cast<size_t>(i)] = visit(side, into, begin + i); });
      for (const TileVisits& result : results) {
        append(into, result);
        if (side == Side::query) map_->visited += result.visited, map_->needed += result.needed;
      }
    }
  }

  TileVisits visit(Side side, const SideMap& map, int64_t tile) const {
    std::array<int64_t, tile_size> space;
    const auto owners = map.owners(tile, shape_.owners(side), space);
    const Candidates candidates = rule_.candidates(side, owners, shape_);
    TileVisits result;
    // Where some ranges are whole and others are not, all are cut at multiples of 64: an odd end of a whole
    // range joins the block that must be tried anyway.
    const auto is_whole = [](const Candidates::Range& range) { return range.all; };
    const auto& ranges = candidates.ranges;
    const bool cut = std::any_of(ranges.begin(), ranges.end(), is_whole) &&
                     !std::all_of(ranges.begin(), ranges.end(), is_whole);
    const int64_t length = shape_.others(side);
    Tried tried{*this, side, owners, cut, result, 0, 0};
    for (const auto& range : ranges) {
      int64_t first = range.first, last = range.last;
      if (range.all && cut) {
        first = (first + tile_size - 1) / tile_size * tile_size;
        last = last == length ? length : last / tile_size * tile_size;
      }
      if (!range.all || first >= last) {
        tried.add(range.first, range.last);
        continue;
      }
      tried.add(range.first, first);
      tried.flush();
      add(result, {Visit::Kind::interval, first, last - first, true, {}}, owners.size(),
          static_cast<int64_t>(owners.size()) * (last - first));
      tried.add(last, range.last);
    }
    tried.flush();
    gather(side, owners, candidates.list, result);
    return result;
  }

  // Blocks of contiguous tokens whose pairs are tried: from multiples of 64 on, or from the first token on.
  struct Tried {
    const Builder& builder;
    Side side;
    std::span<const int64_t> owners;
    bool aligned;
    TileVisits& result;
    int64_t first;
    uint64_t wanted;  // bit j: token first + j

    void add(int64_t from, int64_t to) {
      if (!aligned) flush();
      for (int64_t token = from; token < to; ++token) {
        if (wanted == 0 || token >= first + tile_size) {
          flush();
          first = aligned ? token / tile_size * tile_size : token;
        }
        wanted |= uint64_t{1} << (token - first);
      }
    }
    void flush() {
      if (wanted == 0) return;
      const auto count = aligned ? std::min(tile_size, builder.shape_.others(side) - first)
                                 : static_cast<int64_t>(std::bit_width(wanted));
      std::array<int64_t, tile_size> others;
      std::iota(others.begin(), others.begin() + count, first);
      Atom atom =
          builder.rule_.bits(side, owners, {others.data(), static_cast<size_t>(count)}, builder.shape_);
      for (size_t j = 0; j < atom.size(); ++j)
        if (!(wanted >> j & 1)) atom[j] = 0;
      const int64_t set = bits_set(atom);
      const bool full = set == count * static_cast<int64_t>(owners.size());
      if (set > 0)
        Builder::add(result, {full ? Visit::Kind::interval : Visit::Kind::run, first, count, full, atom},
                     owners.size(), set);
      wanted = 0;
    }
  };

  // Only the tokens that an owner sees stay in the list.
  void gather(Side side, std::span<const int64_t> owners, const std::vector<int64_t>& list,
              TileVisits& result) const {
    Atom packed{};
    size_t filled = 0;
    const auto flush = [&] {
      if (filled == 0) return;
      const int64_t set = bits_set(packed), count = static_cast<int64_t>(filled);
      add(result,
          {Visit::Kind::gather, static_cast<int64_t>(result.list.size()) - count, count,
           set == count * static_cast<int64_t>(owners.size()), packed},
          owners.size(), set);
      packed = {};
      filled = 0;
    };
    for (size_t from = 0; from < list.size(); from += tile_size) {
      const std::span others(list.data() + from, std::min<size_t>(tile_size, list.size() - from));
      const Atom atom = rule_.bits(side, owners, others, shape_);
      for (size_t j = 0; j < others.size(); ++j) {
        if (atom[j] == 0) continue;
        packed[filled++] = atom[j];
        result.list.push_back(others[j]);
        if (filled == tile_size) flush();
      }
    }
    flush();
  }

  static int64_t bits_set(const Atom& atom) {
    int64_t set = 0;
    for (uint64_t word : atom) set += std::popcount(word);
    return set;
  }

  static void add(TileVisits& result, const TileVisits::Block& block, size_t owners, int64_t needed) {
    result.visited += static_cast<int64_t>(owners) * block.count;
    result.needed += needed;
    result.blocks.push_back(block);
  }

  // Neighbouring blocks of a kind become one visit.
  void append(SideMap& into, const TileVisits& result) {
    const auto first_list = static_cast<int64_t>(into.lists.size());
    for (int64_t token : result.list) into.lists.push_back(static_cast<int32_t>(token));
    for (const auto& block : result.blocks) {
      const int64_t first = block.first + (block.kind == Visit::Kind::gather ? first_list : 0);
      const bool fresh = static_cast<int64_t>(into.visits.size()) == into.first_visit.back();
      Visit* last = fresh ? nullptr : &into.visits.back();
      // Only whole atoms can be continued: an atom is of 64 others.
      const bool joins = last && last->kind == block.kind && last->first + last->count == first &&
                         (block.kind == Visit::Kind::interval || last->count % tile_size == 0);
      if (joins)
        last->count += block.count;
      else
        into.visits.push_back(
            {block.kind, first, block.count,
             block.kind == Visit::Kind::interval ? -1 : static_cast<int64_t>(into.atom_ids.size())});
      if (block.kind != Visit::Kind::interval)
        into.atom_ids.push_back(block.full ? -1 : places_.of(block.atom));
    }
    into.first_visit.push_back(static_cast<int64_t>(into.visits.size()));
  }

  // Greedy: a tile takes the first colour that no tile before it with a common query has. Beyond 64 colours
  // each tile has its own. Tiles that gather nothing can also take turns block by block, which is better
  // where most of them share queries.
  void colour(SideMap& map) const {
    constexpr int64_t most_visits = 64, fewest_tiles = 4;  // of a query, of a colour
    bool gathers = false;
    int64_t total = 0;
    for (const Visit& visit : map.visits) gathers |= visit.kind == Visit::Kind::gather, total += visit.count;
    if (!gathers && total > most_visits * shape_.queries) return;
    std::vector<uint64_t> taken(static_cast<size_t>(shape_.queries), 0);
    int32_t beyond = 64;
    for (int64_t tile = 0; tile < map.tiles; ++tile) {
      const auto each = [&](auto&& f) {
        for (const Visit& visit : map.of_tile(tile))
          for (int64_t i = 0; i < visit.count; ++i)
            f(taken[static_cast<size_t>(visit.kind == Visit::Kind::gather
                                            ? map.lists[static_cast<size_t>(visit.first + i)]
                                            : visit.first + i)]);
      };
      uint64_t seen = 0;
      each([&](uint64_t colours) { seen |= colours; });
      const int32_t mine = std::countr_one(seen);
      if (mine < 64) each([&](uint64_t& colours) { colours |= uint64_t{1} << mine; });
      map.colour.push_back(mine < 64 ? mine : beyond++);
    }
    const auto most = std::max_element(map.colour.begin(), map.colour.end());
    if (!gathers && (map.tiles == 0 || fewest_tiles * (*most + 1) > map.tiles)) map.colour.clear();
  }

  const MaskRule& rule_;
  MaskShape shape_;
  std::shared_ptr<MaskMap> map_ = std::make_shared<MaskMap>();
  AtomPlaces places_{map_->atoms};
};

}  // namespace

AtomPlaces::AtomPlaces(std::vector<Atom>& atoms) : atoms_(atoms) {
  for (size_t i = 0; i < atoms.size(); ++i) same_hash_[hash(atoms[i])].push_back(static_cast<int32_t>(i));
}

int32_t AtomPlaces::of(const Atom& atom) {
  auto& same_hash = same_hash_[hash(atom)];
  for (int32_t place : same_hash)
    if (atoms_[static_cast<size_t>(place)] == atom) return place;
  const auto place = static_cast<int32_t>(atoms_.size());
  atoms_.push_back(atom);
  same_hash.push_back(place);
  return place;
}

std::span<const int64_t> SideMap::owners(int64_t tile, int64_t total,
                                         std::array<int64_t, tile_size>& space) const {
  if (!order.linear()) {
    const auto t = static_cast<size_t>(tile);
    return {order.tokens.data() + order.first[t], order.tokens.data() + order.first[t + 1]};
  }
  const int64_t first = tile * tile_size, count = std::min(tile_size, total - first);
  std::iota(space.begin(), space.begin() + count, first);
  return {space.data(), static_cast<size_t>(count)};
}

int64_t MaskMap::bytes() const {
  size_t total = atoms.size() * sizeof(Atom);
  for (const SideMap* side : {&query, &key})
    total +=
        (side->first_visit.size() + side->order.tokens.size() + side->order.first.size()) * sizeof(int64_t) +
        side->visits.size() * sizeof(Visit) +
        (side->atom_ids.size() + side->lists.size() + side->colour.size()) * sizeof(int32_t);
  return static_cast<int64_t>(total);
}

// A program that asks for ever new lengths must not grow: maps that no kernel uses are dropped when many are
// kept.
static constexpr int64_t most_bytes = int64_t{256} << 20;

std::shared_ptr<const MaskMap> MaskRule::map(MaskShape shape) const {
  check(shape.queries >= 0 && shape.queries <= max_tokens && shape.keys >= 0 && shape.keys <= max_tokens,
        Error::Kind::Shape, "[mask] expected 0 to ", max_tokens, " tokens a side, got ", shape.queries,
        " queries and ", shape.keys, " keys");
  check(shape.batch >= 0 && shape.head >= 0, Error::Kind::Shape,
        "[mask] batch and head must be at least 0, got ", shape.batch, " and ", shape.head);
  check_shape(shape);
  if (const PackedDocuments* documents = packed()) return documents->settled().rule().map(shape);
  if (!per_batch()) shape.batch = 0;
  if (!per_head()) shape.head = 0;
  std::lock_guard lock(mutex_);
  auto& found = maps_[{shape.queries, shape.keys, shape.batch, shape.head}];
  if (found) return found;
  const auto made = Builder(*this, shape).build();
  int64_t total = made->bytes();
  for (const auto& [key, map] : maps_) total += map ? map->bytes() : 0;
  if (total > most_bytes) {
    maps_.clear();
    maps_[{shape.queries, shape.keys, shape.batch, shape.head}] = made;
  } else {
    found = made;
  }
  return made;
}

std::shared_ptr<const void> MaskRule::device_maps(const std::array<int64_t, 5>& key,
                                                  const std::function<DeviceMaps()>& make) const {
  {
    std::lock_guard lock(mutex_);
    if (const auto found = device_maps_.find(key); found != device_maps_.end()) return found->second.maps;
  }
  DeviceMaps made = make();  // asks for maps, so without the lock
  std::lock_guard lock(mutex_);
  int64_t total = made.bytes;
  for (const auto& [other, maps] : device_maps_) total += maps.bytes;
  if (total > most_bytes) device_maps_.clear();
  return device_maps_.insert({key, std::move(made)}).first->second.maps;
}

}  // namespace torus::detail

namespace torus {

MaskCosts mask_costs(const Mask& mask, int64_t queries, int64_t keys, int64_t batch, int64_t head) {
  const auto map = mask.rule().map({.queries = queries, .keys = keys, .batch = batch, .head = head});
  MaskCosts costs;
  costs.needed = map->needed, costs.visited = map->visited, costs.bytes = map->bytes();
  costs.atoms = static_cast<int64_t>(map->atoms.size());
  std::vector<int64_t> seen(static_cast<size_t>(queries), 0);
  for (const detail::Visit& visit : map->query.visits) {
    using Kind = detail::Visit::Kind;
    (visit.kind == Kind::interval ? costs.intervals
     : visit.kind == Kind::run    ? costs.runs
                                  : costs.gathers) += 1;
  }
  detail::for_each_visit(*map, detail::Side::query, queries,
                         [&](std::span<const int64_t> owners, int64_t, int64_t count, uint64_t word) {
                           for (size_t i = 0; i < owners.size(); ++i)
                             if (word >> i & 1) seen[static_cast<size_t>(owners[i])] += count;
                         });
  if (queries > 0) {
    const auto [fewest, most] = std::minmax_element(seen.begin(), seen.end());
    costs.fewest_keys = *fewest, costs.most_keys = *most;
  }
  return costs;
}

}  // namespace torus
