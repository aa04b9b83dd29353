#include "torus/data/permutation.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <vector>

#include "core/expect_error.h"

namespace torus {
namespace {

TEST(Permutation, IsABijection) {
  for (int64_t count : {1, 2, 3, 4, 5, 16, 17, 63, 1000, 4097, 65537})
    for (uint64_t seed : {0, 1}) {
      const Permutation order(count, seed, 5);
      std::vector<int> seen(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = order(i);
        ASSERT_TRUE(at >= 0 && at < count);
        ++seen[static_cast<size_t>(at)];
      }
      EXPECT_EQ(seen, std::vector<int>(static_cast<size_t>(count), 1)) << count;
    }
}

TEST(Permutation, DependsOnSeedAndStream) {
  const auto first = [](uint64_t seed, uint64_t stream) {
    std::vector<int64_t> values;
    for (int64_t i = 0; i < 20; ++i) values.push_back(Permutation(100000, seed, stream)(i));
    return values;
  };
  EXPECT_EQ(first(1, 2), first(1, 2));
  EXPECT_NE(first(1, 2), first(2, 2));
  EXPECT_NE(first(1, 2), first(1, 3));
  EXPECT_NE(first(1, 2), first(1, 2 + (uint64_t{1} << 32)));
}

// Over many streams each place gets each element equally often, and the six orders of three come about
// equally.
TEST(Permutation, IsFair) {
  constexpr int streams = 6000;
  std::vector<int> places(49);
  std::map<std::vector<int64_t>, int> orders;
  for (uint64_t stream = 0; stream < streams; ++stream) {
    const Permutation seven(7, 9, stream), three(3, 9, stream);
    for (int64_t i = 0; i < 7; ++i) ++places[static_cast<size_t>(i * 7 + seven(i))];
    ++orders[{three(0), three(1), three(2)}];
  }
  for (int count : places) EXPECT_NEAR(count, streams / 7., 5 * std::sqrt(streams * 6 / 49.));
  EXPECT_EQ(orders.size(), 6u);
  for (const auto& [order, count] : orders)
    EXPECT_NEAR(count, streams / 6., 5 * std::sqrt(streams * 5 / 36.));
}

TEST(Permutation, HugeCountsAndErrors) {
  const int64_t huge = (int64_t{1} << 62) - 5;
  const Permutation order(huge, 3);
  EXPECT_NE(order(0), order(huge - 1));
  EXPECT_ERROR(Permutation(0, 0), Value, "[permutation]");
  EXPECT_ERROR(Permutation(INT64_MAX, 0), Value, "2^62");
  EXPECT_ERROR(order(huge), Value, "index must be in");
  EXPECT_ERROR(order(-1), Value, "index must be in");
}

}  // namespace
}  // namespace torus
