// The backend `hopper`: what it can run, tensor maps, and grouped maps of masks in device memory.
#include <algorithm>
#include <array>
#include <vector>

#include "torus/ops/attention/grouped_map.h"
#include "torus/ops/attention/hopper.h"

namespace torus::gpu::hopper {

using torus::detail::AttentionProblem;
using torus::detail::GroupedSide;
using torus::detail::MaskMap;
using torus::detail::MaskRule;
using torus::detail::Side;
using torus::detail::SideMap;

namespace {

// ------------------------------------------------------------------------------------------- tensor maps

// The driver's function, without linking to the driver: a machine may have none.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? function : nullptr;
  }();
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

}  // namespace

CUtensorMap tensor_map(const Tensor& x, int rows) {
  const mma::Operand from = mma::operand(x);
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(x.size(3)), static_cast<cuuint64_t>(x.size(2)),
                               static_cast<cuuint64_t>(x.size(1)), static_cast<cuuint64_t>(x.size(0))};
  // Strides in bytes; that of an axis of one element is never used but must be valid.
  const auto stride = [&](int axis) {
    return static_cast<cuuint64_t>(x.size(axis) == 1 ? 16 : x.strides()[axis] * 2);
  };
  const cuuint64_t strides[3] = {stride(2), stride(1), stride(0)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encoder()(
      &map, x.dtype() == f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
      from.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, Error::Kind::Device, "[attention] the driver made no tensor map of ",
        x.shape(), ", error ", static_cast<int>(result));
  return map;
}

// ------------------------------------------------------------------------------------------ grouped maps

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
  std::array<int64_t, mma::tile_size> space;
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
  table.contiguous = table.uniform = true;
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

unsigned blocks_at_once(const mma::Schedule& schedule, Device device) {
  return std::min(schedule.blocks(), static_cast<unsigned>(properties(device).multiProcessorCount));
}

// --------------------------------------------------------------------------------------------- the backend

std::string refusal(const AttentionProblem& p) {
  if (p.q.device().kind != DeviceKind::cuda) return "the tensors are not in device memory";
  if (p.q.dtype() != f16 && p.q.dtype() != bf16) return "it takes f16 and bf16 alone";
  if (std::min(p.width(), p.value_width()) == 0 || std::max(p.width(), p.value_width()) > 256)
    return "it takes widths from 1 to 256";
  const cudaDeviceProp& device = properties(p.q.device());
  if (device.major != 9) return "the device is not of sm_90";
  if (!encoder()) return "the driver knows no tensor maps";
  if (p.bias.size() > mma::max_terms) return "it takes at most 4 biases";
  if (!mma::packs(p.q) || !mma::packs(p.k) || !mma::packs(p.v))
    return "rows of q, k and v must start at multiples of 16 bytes";
  if (p.mask.rule().packed()) return "lengths of documents are known to the device alone";
  return "";
}

namespace {
[[maybe_unused]] const torus::detail::RegisteredBackend registered{
    {Backend::hopper, refusal, run_forward, run_backward}};
}  // namespace

}  // namespace torus::gpu::hopper
