// What dropout's kernels share. For kernels; not installed.
#pragma once

#include <cstdint>

namespace torus {

/// Draws of the generator whose words decide about a block of elements together: four words each.
inline constexpr int64_t dropout_lanes = 64, dropout_block = 4 * dropout_lanes;

/// Which elements stay: a function of the position in the generator, so that backward can draw the same
/// again.
struct DropoutDraws {
  uint64_t seed;
  uint64_t start;  // element b * block + k * lanes + i takes word k of the draw at start + b * lanes + i
  uint32_t limit;  // an element stays where its word is above this
  double scale;    // of what stays
};

}  // namespace torus
