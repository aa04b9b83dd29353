#include "torus/data/loader.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "core/expect_error.h"
#include "torus/core/memory.h"
#include "torus/data/text.h"

namespace torus {
namespace {

Batch numbered(int64_t index) { return {Tensor::full({1, 1}, static_cast<double>(index), i64), Tensor()}; }

TEST(Prefetcher, GivesBatchesInOrder) {
  Prefetcher loader(numbered, 5, 3);
  EXPECT_EQ(loader.position(), 5);
  for (int64_t i = 5; i < 200; ++i) {
    EXPECT_EQ(loader.next().inputs.item(), i);
    EXPECT_EQ(loader.position(), i + 1);
  }
}

TEST(Prefetcher, RunsAheadButNotTooFar) {
  std::atomic<int64_t> made{0};
  const auto source = [&](int64_t index) {
    ++made;
    return numbered(index);
  };
  Prefetcher loader(source, 0, 4);
  while (made < 4) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(made, 4);
  loader.next();
  while (made < 5) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(made, 5);
}

TEST(Prefetcher, StopsWheneverItIsDropped) {
  const int64_t before = memory_stats().live_blocks;
  for (int taken = 0; taken < 20; ++taken) {
    Prefetcher loader(numbered, 0, 1 + taken % 3);
    for (int i = 0; i < taken % 5; ++i) loader.next();
  }
  {  // while the source is at work
    std::atomic<bool> working{false};
    Prefetcher loader([&](int64_t index) {
      working = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      return numbered(index);
    });
    while (!working) std::this_thread::yield();
  }
  EXPECT_EQ(memory_stats().live_blocks, before);
}

TEST(Prefetcher, RethrowsAfterTheGoodBatches) {
  Prefetcher loader(
      [](int64_t index) {
        if (index == 3) throw std::out_of_range("three");
        return numbered(index);
      },
      0, 10);
  for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(loader.next().inputs.item(), i);
  EXPECT_THROW(loader.next(), std::out_of_range);
  EXPECT_THROW(loader.next(), std::out_of_range);
  EXPECT_EQ(loader.position(), 3);
  Prefetcher never_asked([](int64_t) -> Batch { throw std::out_of_range("zero"); });
}

TEST(Prefetcher, ResumesBitForBit) {
  const TextWindows windows(Tensor::arange(500, i32), 4, 8, 7);
  const auto source = [&](int64_t index) { return windows.batch(index); };
  std::vector<std::vector<int64_t>> whole, parts;
  Prefetcher once(source);
  for (int i = 0; i < 40; ++i) whole.push_back(once.next().inputs.to_vector<int64_t>());
  for (int64_t position = 0; position < 40;) {
    Prefetcher again(source, position, 1 + position % 4);
    for (int i = 0; i < 7 && again.position() < 40; ++i)
      parts.push_back(again.next().inputs.to_vector<int64_t>());
    position = again.position();
  }
  EXPECT_EQ(parts, whole);
}

TEST(Prefetcher, Errors) {
  EXPECT_ERROR(Prefetcher(numbered, -1), Value, "[prefetcher]");
  EXPECT_ERROR(Prefetcher(numbered, 0, 0), Value, "[prefetcher]");
}

}  // namespace
}  // namespace torus
