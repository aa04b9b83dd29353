// Maps of masks in device memory: all those of a problem in one block, copied at once.
#include <algorithm>
#include <cstring>

#include "torus/core/parallel.h"
#include "torus/ops/attention/cuda_map.h"

namespace torus::gpu {

namespace {

using torus::detail::Atom;
using torus::detail::MaskMap;
using torus::detail::MaskRule;
using torus::detail::SideMap;
using torus::detail::tile_size;
using torus::detail::Visit;

constexpr size_t words_an_atom = 128;
static_assert(sizeof(Atom) == 64 * sizeof(uint64_t) && std::is_trivially_copyable_v<Visit>);

// The words of one atom in the order of accumulators.
void to_fragment(const Atom& atom, uint32_t* words) {
  for (uint32_t t = 0; t < words_an_atom; ++t) {
    uint32_t word = 0;
    for (uint32_t bit = 0; bit < 32; ++bit) {
      const uint32_t j = bit / 4, h = bit / 2 % 2, c = bit % 2;
      const uint32_t row = 16 * (t / 32) + t % 32 / 4 + 8 * h, column = 8 * j + 2 * (t % 4) + c;
      word |= static_cast<uint32_t>(atom[column] >> row & 1) << bit;
    }
    words[t] = word;
  }
}

// Arrays one after another in device memory, made up on the host. One without memory only measures.
class Block {
 public:
  Block() = default;
  Block(std::byte* device, size_t bytes) : device_(device), host_(bytes) {}

  template <class T>
  struct Place {
    T* host;  // null while measuring
    const T* device;
  };
  template <class T>
  Place<T> reserve(size_t count) {
    constexpr size_t alignment = 128;  // packs of any type may be read from each array
    const size_t first = bytes_;
    bytes_ += (count * sizeof(T) + alignment - 1) / alignment * alignment;
    return {host_.empty() ? nullptr : reinterpret_cast<T*>(host_.data() + first),
            reinterpret_cast<const T*>(device_ + first)};
  }
  template <class T>
  const T* add(const std::vector<T>& values) {
    const Place<T> place = reserve<T>(values.size());
    if (place.host && !values.empty()) std::memcpy(place.host, values.data(), values.size() * sizeof(T));
    return place.device;
  }
  size_t bytes() const { return bytes_; }
  const std::byte* host() const { return host_.data(); }

 private:
  std::byte* device_ = nullptr;
  std::vector<std::byte> host_;
  size_t bytes_ = 0;
};

SideView add_side(Block& block, const SideMap& side, int64_t owners, int64_t others) {
  SideView view{};
  view.tiles = side.tiles, view.owners = owners, view.others = others;
  view.first_visit = block.add(side.first_visit);
  view.visits = block.add(side.visits);
  view.atom_ids = block.add(side.atom_ids);
  view.lists = block.add(side.lists);
  if (!side.order.linear()) {
    view.order_tokens = block.add(side.order.tokens);
    view.order_first = block.add(side.order.first);
  }
  if (!side.colour.empty()) view.colour = block.add(side.colour);
  return view;
}

MapView add_map(Block& block, const MaskMap& map, int64_t queries, int64_t keys) {
  MapView view{};
  view.query = add_side(block, map.query, queries, keys);
  view.key = add_side(block, map.key, keys, queries);
  view.atoms = reinterpret_cast<const uint64_t*>(block.add(map.atoms));
  const auto fragments = block.reserve<uint32_t>(map.atoms.size() * words_an_atom);
  view.fragments = fragments.device;
  if (fragments.host)
    parallel_for(0, static_cast<int64_t>(map.atoms.size()), 16, [&](int64_t from, int64_t to) {
      for (auto i = static_cast<size_t>(from); i < static_cast<size_t>(to); ++i)
        to_fragment(map.atoms[i], fragments.host + i * words_an_atom);
    });
  return view;
}

// The maps of all batches and heads, then the table of them.
const MapView* add_all(Block& block, const std::vector<std::shared_ptr<const MaskMap>>& maps, int64_t queries,
                       int64_t keys) {
  std::vector<MapView> views;
  for (const auto& map : maps) views.push_back(add_map(block, *map, queries, keys));
  return block.add(views);
}

bool gathers(const SideMap& side) {
  return std::any_of(side.visits.begin(), side.visits.end(),
                     [](const Visit& visit) { return visit.kind == Visit::Kind::gather; });
}

// The maps of a problem, and the memory that they lie in.
struct DeviceMaps {
  Tensor memory;
  MapTable table = {};
};

std::shared_ptr<const DeviceMaps> build(const torus::detail::AttentionProblem& problem) {
  const MaskRule& rule = problem.mask.rule();
  const int64_t batches = rule.per_batch() ? problem.batch() : 1,
                heads = rule.per_head() ? problem.heads() : 1;
  auto made = std::make_shared<DeviceMaps>();
  MapTable& table = made->table;
  table.batch_step = rule.per_batch() ? heads : 0;
  table.head_step = rule.per_head() ? 1 : 0;
  std::vector<std::shared_ptr<const MaskMap>> maps;
  for (int64_t b = 0; b < batches; ++b)
    for (int64_t h = 0; h < heads; ++h) {
      maps.push_back(rule.map({problem.queries(), problem.keys(), problem.batch(), b, h}));
      const MaskMap& map = *maps.back();
      table.query_tiles = std::max(table.query_tiles, map.query.tiles);
      table.key_tiles = std::max(table.key_tiles, map.key.tiles);
      table.gathers = table.gathers || gathers(map.query) || gathers(map.key);
    }
  Block measured;
  add_all(measured, maps, problem.queries(), problem.keys());
  made->memory = Tensor::empty({static_cast<int64_t>(measured.bytes())}, u8, problem.q.device());
  auto* const first = reinterpret_cast<std::byte*>(made->memory.mutable_data<uint8_t>());
  Block block(first, measured.bytes());
  table.views = add_all(block, maps, problem.queries(), problem.keys());
  copy_from_host(first, block.host(), block.bytes(), problem.q.device());
  return made;
}

}  // namespace

MapTable map_table(const torus::detail::AttentionProblem& problem) {
  const MaskRule& rule = problem.mask.rule();
  const std::array<int64_t, 5> key{problem.queries(), problem.keys(), rule.per_batch() ? problem.batch() : 0,
                                   rule.per_head() ? problem.heads() : 0, problem.q.device().index};
  const auto found = rule.device_maps(key, [&] {
    const auto made = build(problem);
    return MaskRule::DeviceMaps{made, made->memory.numel()};
  });
  keep_for_replays(found);
  return static_cast<const DeviceMaps*>(found.get())->table;
}

}  // namespace torus::gpu
