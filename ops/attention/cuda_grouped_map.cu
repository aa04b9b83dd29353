// Grouped sides of the maps of masks in device memory.
#include <algorithm>
#include <array>
#include <vector>

#include "torus/ops/attention/cuda_map.h"
#include "torus/ops/attention/grouped_map.h"

namespace torus::gpu {

using torus::detail::AttentionProblem;
using torus::detail::GroupedSide;
using torus::detail::MaskRule;
using torus::detail::Side;
using torus::detail::SideMap;

namespace {

GroupedView add_view(DeviceBlock& block, const GroupedSide& side, const std::vector<int32_t>& owners) {
  GroupedView view{};
  view.owners = block.add(owners);
  view.first = block.add(side.first);
  view.entries = block.add(side.entries);
  view.lists = block.add(side.lists);
  view.last_visitor = block.add(side.last_visitor);
  view.fragments = add_fragments(block, side.atoms);
  return view;
}

// GroupedView::owners, of `count` tokens.
std::vector<int32_t> owners_of(const GroupedSide& side, const SideMap& map, int64_t count) {
  std::vector<int32_t> tokens(side.tiles.size() * 64, -1);
  std::array<int64_t, torus::detail::tile_size> space;
  for (size_t i = 0; i < side.tiles.size(); ++i)
    if (side.tiles[i] >= 0)
      std::ranges::copy(map.owners(side.tiles[i], count, space),
                        tokens.begin() + static_cast<int64_t>(i) * 64);
  return tokens;
}

struct DeviceSides {
  Tensor memory;
  GroupedTable table = {};
};

std::shared_ptr<const DeviceSides> build(const AttentionProblem& p, Side which, int group, int width) {
  const MaskRule& rule = p.mask.rule();
  const int64_t batches = rule.per_batch() ? p.batch() : 1, heads = rule.per_head() ? p.heads() : 1;
  auto made = std::make_shared<DeviceSides>();
  GroupedTable& table = made->table;
  table.batch_step = rule.per_batch() ? heads : 0;
  table.head_step = rule.per_head() ? 1 : 0;
  table.contiguous = table.uniform = true, table.density = 1;
  std::vector<GroupedSide> sides;
  std::vector<std::vector<int32_t>> owners;
  for (int64_t b = 0; b < batches; ++b)
    for (int64_t h = 0; h < heads; ++h) {
      const auto map = rule.map({p.queries(), p.keys(), p.batch(), b, h});
      const bool of_queries = which == Side::query;
      const int64_t count = of_queries ? p.queries() : p.keys();
      sides.push_back(group_side(*map, which, count, of_queries ? p.keys() : p.queries(), group, width));
      owners.push_back(owners_of(sides.back(), map->side(which), count));
      table.groups = std::max(table.groups, sides.back().groups());
      table.gathers = table.gathers || sides.back().gathers;
      table.contiguous = table.contiguous && sides.back().contiguous;
      table.uniform = table.uniform && sides.back().uniform;
      table.density = std::min(table.density, sides.back().density);
    }
  const auto add_all = [&](DeviceBlock& block) {
    std::vector<GroupedView> views;
    for (size_t i = 0; i < sides.size(); ++i) views.push_back(add_view(block, sides[i], owners[i]));
    return block.add(views);
  };
  made->memory = DeviceBlock::fill(p.q.device(), [&](DeviceBlock& block) { table.views = add_all(block); });
  return made;
}

}  // namespace

GroupedTable grouped_table(const AttentionProblem& p, Side side, int group, int width) {
  const MaskRule& rule = p.mask.rule();
  // A problem's maps differ by the plan too: its number takes the place of the device's (of which there are
  // few).
  const int64_t plan = ((side == Side::query ? 0 : 1) * 8 + group) * 8 + width;
  const std::array<int64_t, 5> key{p.queries(), p.keys(), rule.per_batch() ? p.batch() : 0,
                                   rule.per_head() ? p.heads() : 0, plan * 1024 + p.q.device().index};
  const auto found = rule.device_maps(key, [&] {
    const auto made = build(p, side, group, width);
    return MaskRule::DeviceMaps{made, made->memory.numel()};
  });
  keep_for_replays(found);
  return static_cast<const DeviceSides*>(found.get())->table;
}

}  // namespace torus::gpu
