// The map of a mask in device memory. For kernels; not installed.
#pragma once

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
  const int32_t* colour;  // null: no tile gathers
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
  bool gathers;                    // any map gathers
  __device__ const MapView& of(int64_t b, int64_t h) const { return views[b * batch_step + h * head_step]; }
};

/// The map of a problem on its device: built and copied once, and kept with the mask. What a captured graph
/// uses stays alive with the graph.
MapTable map_table(const torus::detail::AttentionProblem& problem);

/// Fills those gradients of biases that are wanted: what a backend whose kernels do not make them calls last.
/// Any dtype, kind and broadcast, in ordinary arithmetic; the same bits each time.
void bias_gradients(const torus::detail::AttentionProblem& problem,
                    torus::detail::AttentionGradients& gradients);

}  // namespace torus::gpu
