#include "torus/core/memory.h"

#include <gtest/gtest.h>

#include "core/expect_error.h"
#include "torus/core/tensor.h"

#if defined(__SANITIZE_ADDRESS__)
// The sanitizer would end the program where malloc gives a null pointer.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
#endif

namespace torus {
namespace {

TEST(Memory, CountsLiveAndPeakBytes) {
  const MemoryStats before = memory_stats();
  reset_peak_memory();
  {
    const Tensor a = Tensor::empty({1000});
    const Tensor view = a.slice(0, 10, 20), same = a;
    EXPECT_EQ(memory_stats().live_bytes, before.live_bytes + 4000);
    EXPECT_EQ(memory_stats().live_blocks, before.live_blocks + 1);
    { const Tensor b = Tensor::empty({500}, f64); }
    EXPECT_EQ(memory_stats().live_bytes, before.live_bytes + 4000);
    EXPECT_EQ(memory_stats().peak_bytes, before.live_bytes + 8000);
    reset_peak_memory();
    EXPECT_EQ(memory_stats().peak_bytes, before.live_bytes + 4000);
    const Tensor none = Tensor::empty({0});
    EXPECT_EQ(memory_stats().live_bytes, before.live_bytes + 4000);
  }
  EXPECT_EQ(memory_stats().live_bytes, before.live_bytes);
  EXPECT_EQ(memory_stats().live_blocks, before.live_blocks);
}

TEST(Memory, CacheIsReusedAndReleased) {
  release_cached_memory();
  EXPECT_EQ(memory_stats().cached_bytes, 0);
  const void* first = nullptr;
  {
    const Tensor a = Tensor::empty({100000});
    first = a.data<float>();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0u);
  }
  const int64_t cached = memory_stats().cached_bytes;
  if (cached > 0) {  // not under a sanitizer, which must see each free
    EXPECT_GE(cached, 400000);
    EXPECT_EQ(Tensor::empty({100000}).data<float>(), first);
  }
  release_cached_memory();
  EXPECT_EQ(memory_stats().cached_bytes, 0);
}

TEST(Memory, Errors) {
  EXPECT_ERROR(Tensor::empty({int64_t{1} << 50}), Memory, "cannot allocate");
}

}  // namespace
}  // namespace torus
