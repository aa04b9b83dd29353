#include "torus/ops/attention/map.h"

#include <algorithm>
#include <bit>
#include <unordered_map>

namespace torus::detail {

namespace {

uint64_t hash(const Atom& atom) {
  uint64_t value = 0xcbf29ce484222325;  // FNV-1a by words
  for (uint64_t word : atom) value = (value ^ word ^ word >> 32) * 0x100000001b3;
  return value;
}

class Builder {
 public:
  Builder(const MaskRule& rule, int64_t queries, int64_t keys)
      : rule_(rule), queries_(queries), keys_(keys) {}

  std::shared_ptr<const MaskMap> build() {
    build_side(Side::query, map_->query);
    build_side(Side::key, map_->key);
    return map_;
  }

 private:
  void build_side(Side side, SideMap& into) {
    const int64_t owners = side == Side::query ? queries_ : keys_;
    into.first_visit.push_back(0);
    for (int64_t first = 0; first < owners; first += tile_size) {
      const int64_t last = std::min(owners, first + tile_size);
      for (const auto& range : rule_.candidates(side, first, last, queries_, keys_)) {
        if (range.all)
          add_interval(into, first, last, range.first, range.last, side);
        else
          add_tried(into, first, last, range.first, range.last, side);
      }
      into.first_visit.push_back(static_cast<int64_t>(into.visits.size()));
    }
  }

  void add_interval(SideMap& into, int64_t first, int64_t last, int64_t from, int64_t to, Side side) {
    if (from >= to) return;
    if (side == Side::query) {
      map_->visited += (last - first) * (to - from);
      map_->needed += (last - first) * (to - from);
    }
    const bool fresh = static_cast<int64_t>(into.visits.size()) == into.first_visit.back();
    if (!fresh && into.visits.back().whole() && into.visits.back().first + into.visits.back().count == from)
      into.visits.back().count += to - from;
    else
      into.visits.push_back({from, to - from, -1});
  }

  // Atoms that turn out full become intervals, and empty ones are dropped.
  void add_tried(SideMap& into, int64_t first, int64_t last, int64_t from, int64_t to, Side side) {
    bool extends = false;  // the last visit is a run that ends at this atom
    for (int64_t other = from; other < to; other += tile_size) {
      const int64_t count = std::min(tile_size, to - other);
      Atom atom = rule_.bits(side, first, other, queries_, keys_);
      for (int64_t j = count; j < tile_size; ++j) atom[static_cast<size_t>(j)] = 0;
      int64_t set = 0;
      for (uint64_t word : atom) set += std::popcount(word);
      if (set == 0) {
        extends = false;
      } else if (set == count * (last - first)) {
        add_interval(into, first, last, other, other + count, side);
        extends = false;
      } else {
        if (extends)
          into.visits.back().count += count;
        else
          into.visits.push_back({other, count, static_cast<int64_t>(into.atom_ids.size())});
        into.atom_ids.push_back(id_of(atom));
        extends = true;
        if (side == Side::query) {
          map_->visited += count * (last - first);
          map_->needed += set;
        }
      }
    }
  }

  int32_t id_of(const Atom& atom) {
    auto& same_hash = ids_[hash(atom)];
    for (int32_t id : same_hash)
      if (map_->atoms[static_cast<size_t>(id)] == atom) return id;
    const auto id = static_cast<int32_t>(map_->atoms.size());
    map_->atoms.push_back(atom);
    same_hash.push_back(id);
    return id;
  }

  const MaskRule& rule_;
  int64_t queries_, keys_;
  std::shared_ptr<MaskMap> map_ = std::make_shared<MaskMap>();
  std::unordered_map<uint64_t, std::vector<int32_t>> ids_;
};

}  // namespace

int64_t MaskMap::bytes() const {
  size_t total = atoms.size() * sizeof(Atom);
  for (const SideMap* side : {&query, &key})
    total += side->first_visit.size() * sizeof(int64_t) + side->visits.size() * sizeof(Visit) +
             side->atom_ids.size() * sizeof(int32_t);
  return static_cast<int64_t>(total);
}

std::shared_ptr<const MaskMap> MaskRule::map(int64_t queries, int64_t keys) const {
  check_lengths(queries, keys);
  std::lock_guard lock(mutex_);
  constexpr size_t most = 64;  // a program that asks for ever new lengths must not grow
  if (maps_.size() >= most && !maps_.contains({queries, keys})) maps_.clear();
  auto& found = maps_[{queries, keys}];
  if (!found) found = Builder(*this, queries, keys).build();
  return found;
}

}  // namespace torus::detail
