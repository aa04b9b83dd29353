// The map of a mask in device memory. For kernels; not installed.
#pragma once

#include <cstring>
#include <functional>
#include <vector>

#include "torus/core/cuda.h"
#include "torus/ops/attention/backend.h"
#include "torus/ops/attention/map.h"

namespace torus::gpu {

/// One side of a map; device pointers, as the vectors of detail::SideMap.
struct SideView {
  int64_t tiles, owners, others;
  const int64_t* first_visit;
  const torus::detail::Visit* visits;
  const int32_t* atom_ids;
  const int32_t* lists;
  const int64_t* order_tokens;  // null: a linear order, tile t owns [64 t, 64 t + 64)
  const int64_t* order_first;
  const int32_t* colour;  // null: no tile gathers; else as in map.h
};

/// The map of one (batch, head).
struct MapView {
  SideView query, key;
  // Atom a: row j of 64 is a word of 64 bits, bit i set where owner i sees other j (owners of the side that
  // holds its id).
  const uint64_t* atoms;
  // The same bits in the order of accumulators, 128 words of 32 bits an atom: bit 4 j + 2 h + c of word t is
  // row (owner) 16 (t / 32) + (t % 32) / 4 + 8 h and column (other) 8 j + 2 (t % 4) + c.
  const uint32_t* fragments;
};

/// Maps of all batches and heads, in device memory: that of (b, h) is views[b * batch_step + h * head_step].
struct MapTable {
  const MapView* views;
  int64_t batch_step, head_step;
  int64_t query_tiles, key_tiles;  // the most of any map
  bool gathers;                    // any map gathers, or has an order of its own
  __device__ const MapView& of(int64_t b, int64_t h) const { return views[b * batch_step + h * head_step]; }
};

/// Word t of an atom among `fragments`.
__host__ __device__ inline uint32_t fragment_word(const uint64_t* atom, uint32_t t) {
  uint32_t word = 0;
  for (uint32_t bit = 0; bit < 32; ++bit) {
    const uint32_t j = bit / 4, h = bit / 2 % 2, c = bit % 2;
    const uint32_t row = 16 * (t / 32) + t % 32 / 4 + 8 * h, column = 8 * j + 2 * (t % 4) + c;
    word |= static_cast<uint32_t>(atom[column] >> row & 1) << bit;
  }
  return word;
}

/// The map of a problem on its device: built and copied once, and kept with the mask. What a captured graph
/// uses stays alive with the graph.
MapTable map_table(const torus::detail::AttentionProblem& problem);

/// The same for documents whose lengths are in a tensor on the device: made there, from what the tensor
/// holds.
MapTable document_table(const torus::detail::AttentionProblem& problem);

/// What kernels need of a grouped side of a map, in device memory: see GroupedSide.
struct GroupedView {
  const int32_t* owners;  // tokens of the tiles of a group, 64 each, and of the next; -1: none
  const int32_t *first, *entries, *lists, *last_visitor;
  const uint32_t* fragments;  // atoms, as MapView::fragments
};

/// The sides of all batches and heads: that of (b, h) is views[b * batch_step + h * head_step].
struct GroupedTable {
  const GroupedView* views;
  int64_t batch_step, head_step, groups;  // groups: the most of any
  bool gathers, contiguous, uniform;
  double density;  // the least of any
  __device__ const GroupedView& of(int64_t b, int64_t h) const {
    return views[b * batch_step + h * head_step];
  }
};

/// One side of the maps of a problem on its device, `group` tiles of owners by `width` 64s of others; made
/// once and kept with the mask.
GroupedTable grouped_table(const torus::detail::AttentionProblem& problem, torus::detail::Side side,
                           int group, int width);

/// Arrays one after another in device memory, made up on the host and copied at once.
class DeviceBlock {
 public:
  /// The memory of what `add` adds: it is called twice, first only to measure.
  static Tensor fill(Device device, const std::function<void(DeviceBlock&)>& add);

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

 private:
  DeviceBlock() = default;
  DeviceBlock(std::byte* device, size_t bytes) : device_(device), host_(bytes) {}
  std::byte* device_ = nullptr;
  std::vector<std::byte> host_;
  size_t bytes_ = 0;
};

/// The words of atoms in the order of accumulators: see MapView::fragments.
const uint32_t* add_fragments(DeviceBlock& block, const std::vector<torus::detail::Atom>& atoms);

/// Fills those gradients of biases that are wanted: what a backend whose kernels do not make them calls last.
/// Any dtype, kind and broadcast, in ordinary arithmetic; the same bits each time.
void bias_gradients(const torus::detail::AttentionProblem& problem,
                    torus::detail::AttentionGradients& gradients);

}  // namespace torus::gpu
