// A head made of formulas, for when there are no volumes.
#pragma once

#include <cstdint>

#include "torus/core/tensor.h"

namespace torus {

/// A complex image [z, y, x, 2], f32: soft-edged ellipsoids (a scalp, a skull, a brain with fluid and about a
/// dozen lesions) in air, with a fine texture and a smooth phase, different for each seed. Magnitudes up to
/// about 1; the head is centred, and air surrounds it in y and x. `shape` has three axes.
Tensor phantom(const Shape& shape, uint64_t seed);

}  // namespace torus
