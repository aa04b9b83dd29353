#include "torus/data/phantom.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/expect_error.h"
#include "torus/core/parallel.h"

namespace torus {
namespace {

std::vector<double> magnitudes(const Tensor& image) {
  const auto parts = image.to_vector<double>();
  std::vector<double> result;
  for (size_t i = 0; i < parts.size(); i += 2) result.push_back(std::hypot(parts[i], parts[i + 1]));
  return result;
}

TEST(Phantom, IsAHeadInAir) {
  const int64_t slices = 6, rows = 40, columns = 48;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Tensor image = phantom({slices, rows, columns}, seed);
    ASSERT_EQ(image.shape(), (Shape{slices, rows, columns, 2}));
    const auto values = magnitudes(image);
    double largest = 0;
    for (int64_t i = 0; i < image.numel() / 2; ++i) {
      const double value = values[static_cast<size_t>(i)];
      ASSERT_TRUE(std::isfinite(value));
      largest = std::max(largest, value);
      const int64_t y = i / columns % rows, x = i % columns;
      if (y == 0 || x == 0 || y == rows - 1 || x == columns - 1) {
        EXPECT_EQ(value, 0) << seed << ": " << y << ", " << x;
      }
    }
    EXPECT_GT(largest, 0.6) << seed;
    EXPECT_LT(largest, 1.4) << seed;
    EXPECT_GT(values[static_cast<size_t>((3 * rows + rows / 2) * columns + columns / 2)], 0.01) << seed;
  }
}

TEST(Phantom, IsAFunctionOfItsSeed) {
  const auto a = phantom({4, 16, 16}, 1).to_vector<float>(), b = phantom({4, 16, 16}, 2).to_vector<float>();
  EXPECT_NE(a, b);
  const int threads = num_threads();
  set_num_threads(1);
  EXPECT_EQ(phantom({4, 16, 16}, 1).to_vector<float>(), a);
  set_num_threads(threads);
  EXPECT_ERROR(phantom({4, 4}, 1), Shape, "[phantom] expected a shape [z, y, x], got [4, 4]");
  EXPECT_ERROR(phantom({0, 4, 4}, 1), Shape, "[phantom] expected a shape");
}

}  // namespace
}  // namespace torus
