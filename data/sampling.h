// Which columns of k-space an accelerated scan measures.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "torus/core/tensor.h"

namespace torus {

enum class Sampling { random, equispaced };

struct SamplingOptions {
  Sampling kind = Sampling::random;
  double acceleration = 4;
  double center_fraction = 0.08;  // of the columns, in the middle, all of which are measured
};

/// A mask [width], f32: 1 for columns that are measured. The same bits as fastMRI's RandomMaskFunc and
/// EquispacedMaskFunc (its EquispacedMaskFractionFunc, later) give for one pair of options and this seed:
/// numbers as NumPy's RandomState.seed takes them. `random` measures the other columns with the probability
/// that makes width / acceleration of all expected; `equispaced` at steps that do so, from a random one.
/// Throws Error{Value} where the middle alone takes all that may be measured equispaced.
Tensor sampling_mask(int64_t width, const SamplingOptions& options, const std::vector<uint32_t>& seed);

/// The seed that fastMRI takes for a volume to validate on: the characters of the file's name, which is
/// ASCII.
std::vector<uint32_t> sampling_seed(const std::string& file_name);

}  // namespace torus
