#include "torus/core/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

#include "core/expect_error.h"

namespace torus {
namespace {

class Threads {
 public:
  explicit Threads(int count) : before_(num_threads()) { set_num_threads(count); }
  ~Threads() { set_num_threads(before_); }

 private:
  int before_;
};

TEST(Parallel, CoversEachIndexOnce) {
  for (int threads : {1, 2, 5}) {
    const Threads scope(threads);
    for (int64_t length : {0, 1, 2, 7, 1000})
      for (int64_t grain : {0, 1, 3, 5000}) {
        std::vector<std::atomic<int>> seen(static_cast<size_t>(length)), tasks(static_cast<size_t>(length));
        std::atomic<int> parts{0};
        parallel_for(10, 10 + length, grain, [&](int64_t first, int64_t last) {
          ++parts;
          EXPECT_LT(first, last);
          for (int64_t i = first; i < last; ++i) ++seen[static_cast<size_t>(i - 10)];
        });
        EXPECT_LE(parts, threads);
        parallel_tasks(length, [&](int64_t i) { ++tasks[static_cast<size_t>(i)]; });
        for (size_t i = 0; i < seen.size(); ++i) {
          EXPECT_EQ(seen[i], 1);
          EXPECT_EQ(tasks[i], 1);
        }
      }
  }
}

TEST(Parallel, RethrowsAfterAllPartsEnded) {
  for (int threads : {1, 4}) {
    const Threads scope(threads);
    EXPECT_THROW(parallel_for(0, 100, 1,
                              [](int64_t first, int64_t last) {
                                for (int64_t i = first; i < last; ++i)
                                  if (i == 57) throw std::out_of_range("57");
                              }),
                 std::out_of_range);
    EXPECT_THROW(parallel_tasks(100,
                                [](int64_t i) {
                                  if (i % 2) throw std::out_of_range("odd");
                                }),
                 std::out_of_range);
    EXPECT_THROW(parallel_for(0, 100, 1, [](int64_t, int64_t) { throw std::out_of_range("all"); }),
                 std::out_of_range);
    // A nested loop runs on its thread, and its exception crosses both.
    EXPECT_ERROR(parallel_for(0, 4, 1,
                              [](int64_t, int64_t) {
                                parallel_tasks(3,
                                               [](int64_t i) { check(i < 2, Error::Kind::Value, "nested"); });
                              }),
                 Value, "nested");
    std::atomic<int64_t> sum{0};
    parallel_tasks(100, [&](int64_t i) { sum += i; });
    EXPECT_EQ(sum, 4950);
  }
  EXPECT_ERROR(set_num_threads(0), Value, "[set_num_threads]");
}

}  // namespace
}  // namespace torus
