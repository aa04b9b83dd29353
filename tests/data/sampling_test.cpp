#include "torus/data/sampling.h"

#include <gtest/gtest.h>

#include <numeric>

#include "core/expect_error.h"

namespace torus {
namespace {

// FNV-1a of the columns, so that a table holds many masks.
uint64_t hash_of(const std::vector<float>& mask) {
  uint64_t hash = 1469598103934665603u;
  for (const float column : mask) hash = (hash ^ static_cast<uint64_t>(column)) * 1099511628211u;
  return hash;
}

TEST(Sampling, IsFastMrisToTheBit) {
  struct Case {
    Sampling kind;
    int64_t width;
    double acceleration, center_fraction;
    std::vector<uint32_t> seed;
    int64_t measured;
    uint64_t hash;
  };
  // By NumPy's RandomState and the published formulas.
  const std::vector<Case> cases = {
      {Sampling::random, 368, 4, 0.08, {0}, 95, 1695324114003410328u},
      {Sampling::random, 368, 4, 0.08, {42}, 99, 11182730903469445574u},
      {Sampling::random, 368, 4, 0.08, sampling_seed("file1000031.h5"), 95, 13230358381891584794u},
      {Sampling::random, 372, 8, 0.04, {0}, 47, 6991826819618340498u},
      {Sampling::random, 372, 8, 0.04, {42}, 53, 17526724469261681484u},
      {Sampling::random, 372, 8, 0.04, sampling_seed("file1000031.h5"), 46, 8663074015890417337u},
      {Sampling::random, 181, 4, 0.08, {0}, 47, 14820870689867521368u},
      {Sampling::random, 181, 4, 0.08, {42}, 54, 8012938502056777631u},
      {Sampling::random, 181, 4, 0.08, sampling_seed("file1000031.h5"), 45, 6706959295074356388u},
      {Sampling::random, 30, 4, 0.08, {0}, 5, 7037023894209273492u},
      {Sampling::random, 30, 4, 0.08, {42}, 8, 5080284721097272479u},
      {Sampling::random, 30, 4, 0.08, sampling_seed("file1000031.h5"), 8, 13068320045215397749u},
      {Sampling::equispaced, 368, 4, 0.08, {0}, 91, 3066569954718799322u},
      {Sampling::equispaced, 368, 4, 0.08, {42}, 91, 1200650439706081934u},
      {Sampling::equispaced, 368, 4, 0.08, sampling_seed("file1000031.h5"), 93, 5758747564318538628u},
      {Sampling::equispaced, 372, 8, 0.04, {0}, 47, 363530177277222736u},
      {Sampling::equispaced, 372, 8, 0.04, {42}, 47, 16873210536963940044u},
      {Sampling::equispaced, 372, 8, 0.04, sampling_seed("file1000031.h5"), 47, 8161939714171525756u},
      {Sampling::equispaced, 181, 4, 0.08, {0}, 44, 17056008232254618205u},
      {Sampling::equispaced, 181, 4, 0.08, {42}, 46, 14086139605365117145u},
      {Sampling::equispaced, 181, 4, 0.08, sampling_seed("file1000031.h5"), 45, 17462849476204847230u},
      {Sampling::equispaced, 30, 4, 0.08, {0}, 6, 4246948062699118349u},
      {Sampling::equispaced, 30, 4, 0.08, {42}, 8, 14736036543339611787u},
      {Sampling::equispaced, 30, 4, 0.08, sampling_seed("file1000031.h5"), 7, 14727772260107296928u},
  };
  for (const Case& c : cases) {
    const auto mask =
        sampling_mask(c.width, {c.kind, c.acceleration, c.center_fraction}, c.seed).to_vector<float>();
    EXPECT_EQ(std::accumulate(mask.begin(), mask.end(), 0.f), static_cast<float>(c.measured)) << c.width;
    EXPECT_EQ(hash_of(mask), c.hash) << c.width << " " << static_cast<int>(c.kind);
  }
}

TEST(Sampling, Errors) {
  EXPECT_ERROR(sampling_mask(0, {}, {1}), Value, "[sampling_mask] expected width >= 1");
  EXPECT_ERROR(sampling_mask(10, {}, {}), Value, "and 0 numbers");
  EXPECT_ERROR(sampling_mask(100, {Sampling::equispaced, 4, 0.25}, {1}), Value,
               "the middle of 25 columns takes all");
  const auto all = sampling_mask(9, {Sampling::random, 1, 1}, {1}).to_vector<float>();
  EXPECT_EQ(all, std::vector<float>(9, 1));
}

}  // namespace
}  // namespace torus
