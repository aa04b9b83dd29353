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
  for (uint32_t t = 0; t < words_an_atom; ++t) words[t] = fragment_word(atom.data(), t);
}

SideView add_side(DeviceBlock& block, const SideMap& side, int64_t owners, int64_t others) {
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

MapView add_map(DeviceBlock& block, const MaskMap& map, int64_t queries, int64_t keys) {
  MapView view{};
  view.query = add_side(block, map.query, queries, keys);
  view.key = add_side(block, map.key, keys, queries);
  view.atoms = reinterpret_cast<const uint64_t*>(block.add(map.atoms));
  view.fragments = add_fragments(block, map.atoms);
  return view;
}

// The maps of all batches and heads, then the table of them.
const MapView* add_all(DeviceBlock& block, const std::vector<std::shared_ptr<const MaskMap>>& maps,
                       int64_t queries, int64_t keys) {
  std::vector<MapView> views;
  for (const auto& map : maps) views.push_back(add_map(block, *map, queries, keys));
  return block.add(views);
}

bool gathers(const SideMap& side) {
  return !side.order.linear() || std::any_of(side.visits.begin(), side.visits.end(), [](const Visit& visit) {
    return visit.kind == Visit::Kind::gather;
  });
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
  made->memory = DeviceBlock::fill(problem.q.device(), [&](DeviceBlock& block) {
    table.views = add_all(block, maps, problem.queries(), problem.keys());
  });
  return made;
}

}  // namespace

Tensor DeviceBlock::fill(Device device, const std::function<void(DeviceBlock&)>& add) {
  DeviceBlock measured;
  add(measured);
  Tensor memory = Tensor::empty({static_cast<int64_t>(measured.bytes_)}, u8, device);
  auto* const first = reinterpret_cast<std::byte*>(memory.mutable_data<uint8_t>());
  DeviceBlock block(first, measured.bytes_);
  add(block);
  copy_from_host(first, block.host_.data(), block.bytes_, device);
  return memory;
}

const uint32_t* add_fragments(DeviceBlock& block, const std::vector<Atom>& atoms) {
  const auto fragments = block.reserve<uint32_t>(atoms.size() * words_an_atom);
  if (fragments.host)
    parallel_for(0, static_cast<int64_t>(atoms.size()), 16, [&](int64_t from, int64_t to) {
      for (auto i = static_cast<size_t>(from); i < static_cast<size_t>(to); ++i)
        to_fragment(atoms[i], fragments.host + i * words_an_atom);
    });
  return fragments.device;
}

MapTable map_table(const torus::detail::AttentionProblem& problem) {
  const MaskRule& rule = problem.mask.rule();
  if (rule.packed()) return document_table(problem);
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
