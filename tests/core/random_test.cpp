#include "torus/core/random.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "core/expect_error.h"
#include "torus/core/parallel.h"

namespace torus {
namespace {

// The vectors of Random123's kat_vectors file for philox4x32-10.
TEST(Random, PhiloxKnownAnswers) {
  EXPECT_EQ(philox({0, 0, 0, 0}, 0),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 0xffffffffffffffff),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, uint64_t{0x299f31d0} << 32 | 0xa4093822),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, DrawsAreAFunctionOfSeedAndPosition) {
  Generator a(7), b(7);
  const std::vector<float> all = randn({1000}, 0, 1, f32, a).to_vector<float>();
  EXPECT_EQ(randn({300}, 0, 1, f32, b).to_vector<float>(),
            std::vector<float>(all.begin(), all.begin() + 300));
  EXPECT_EQ(b.state(), (Generator::State{7, 300}));
  b.set_state({7, 900});
  EXPECT_EQ(randn({100}, 0, 1, f32, b).to_vector<float>(), std::vector<float>(all.begin() + 900, all.end()));
  manual_seed(7);
  EXPECT_EQ(randn({1000}).to_vector<float>(), all);
  Generator other(8);
  EXPECT_NE(randn({1000}, 0, 1, f32, other).to_vector<float>(), all);
}

TEST(Random, BitsDoNotDependOnThreads) {
  const int threads = num_threads();
  std::vector<std::vector<double>> results;
  for (int count : {1, 2, 5}) {
    set_num_threads(count);
    Generator generator(3);
    results.push_back(rand({30001}, -1, 1, f64, generator).to_vector<double>());
  }
  set_num_threads(threads);
  EXPECT_EQ(results[1], results[0]);
  EXPECT_EQ(results[2], results[0]);
}

// Each moment within five standard errors.
TEST(Random, Moments) {
  constexpr int64_t count = 200000;
  const double root = std::sqrt(static_cast<double>(count));
  Generator generator(1);
  const auto moments = [](const Tensor& draws) {
    double mean = 0, square = 0;
    const std::vector<double> values = draws.to_vector<double>();
    for (double value : values) mean += value / count, square += value * value / count;
    return std::pair(mean, square - mean * mean);
  };
  const auto [normal_mean, normal_variance] = moments(randn({count}, 2, 3, f64, generator));
  EXPECT_NEAR(normal_mean, 2, 5 * 3 / root);
  EXPECT_NEAR(normal_variance, 9, 5 * 9 * std::sqrt(2) / root);
  const auto [uniform_mean, uniform_variance] = moments(rand({count}, -1, 3, f64, generator));
  EXPECT_NEAR(uniform_mean, 1, 5 * 4 / std::sqrt(12) / root);
  EXPECT_NEAR(uniform_variance, 16. / 12, 5 * 16 * std::sqrt(1. / 180) / root);
}

TEST(Random, Ranges) {
  Generator generator(5);
  for (double value : rand({10000}, 0, 1, f64, generator).to_vector<double>())
    EXPECT_TRUE(value >= 0 && value < 1);
  std::set<int64_t> seen;
  for (int64_t value : randint({1000}, -2, 3, generator).to_vector<int64_t>()) seen.insert(value);
  EXPECT_EQ(seen, (std::set<int64_t>{-2, -1, 0, 1, 2}));
  std::vector<int> counts(3);
  for (int i = 0; i < 30000; ++i) ++counts[static_cast<size_t>(generator.below(3))];
  for (int count : counts) EXPECT_NEAR(count, 10000, 5 * std::sqrt(30000 * 2. / 9));
  EXPECT_EQ(generator.below(1), 0);
  EXPECT_ERROR(generator.below(0), Value, "[below]");
  EXPECT_ERROR(randint({1}, 2, 2, generator), Value, "[randint]");
  EXPECT_ERROR(randn({1}, 0, 1, i64, generator), DType, "[randn]");
}

}  // namespace
}  // namespace torus
