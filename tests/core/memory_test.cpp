#include "torus/core/memory.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/expect_error.h"
#include "torus/autograd/tape.h"
#include "torus/core/tensor.h"

#if defined(__SANITIZE_ADDRESS__)
// The sanitizer would end the program where malloc gives a null pointer.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
#endif

namespace torus {
namespace {

TEST(Device, PeakFlopsAreKnownByTheNameOfAChip) {
  EXPECT_EQ(peak_flops("NVIDIA H200", bf16), 989.5e12);
  EXPECT_EQ(peak_flops("NVIDIA H100 PCIe", f16), 756e12);
  EXPECT_EQ(peak_flops("NVIDIA H100 80GB HBM3", f32), 67e12);
  EXPECT_EQ(peak_flops("NVIDIA A100-SXM4-80GB", f64), 19.5e12);
  for (const char* unknown : {"NVIDIA Unheard-of 9000", "cpu", ""}) EXPECT_EQ(peak_flops(unknown, bf16), 0);
  EXPECT_EQ(peak_flops(cpu, f32), 0);
}

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

// Of the op, among what is held.
HeldMemory held_by(const std::string& op) {
  const auto all = held_memory();
  EXPECT_TRUE(
      std::is_sorted(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; }));
  for (const HeldMemory& held : all)
    if (held.op == op) return held;
  return {};
}

TEST(Memory, HeldByTheOpThatMadeIt) {
  const HeldMemory filled = held_by("fill"), nobody = held_by(""), op = held_by("an op");
  {
    const Tensor zeros = Tensor::zeros({1000}), view = zeros.slice(0, 1, 3), untouched = Tensor::empty({500});
    EXPECT_EQ(held_by("fill").bytes, filled.bytes + 4000);
    EXPECT_EQ(held_by("fill").blocks, filled.blocks + 1);
    EXPECT_EQ(held_by("").bytes, nobody.bytes + 2000);
    EXPECT_NE(describe_held_memory(cpu).find("tensors hold " + std::to_string(memory_stats().live_bytes)),
              std::string::npos);
    // What is recorded goes by its op, that of its memory by the first that was recorded.
    Tape tape;
    const auto nothing = [](const OutputGrads&) { return std::vector<Tensor>{Tensor()}; };
    const Variable x(Tensor::zeros({10}), true), y = record("an op", {x}, Tensor::zeros({200}), nothing),
                                                 z = record("a view", {y}, y.value().slice(0, 0, 3), nothing);
    EXPECT_EQ(held_by("an op").bytes, op.bytes + 800);
    EXPECT_EQ(held_by("a view").bytes, 0);
  }
  EXPECT_EQ(held_by("fill").bytes, filled.bytes);
  EXPECT_EQ(held_by("").blocks, nobody.blocks);
  int64_t total = 0;
  for (const HeldMemory& held : held_memory()) total += held.bytes;
  EXPECT_EQ(total, memory_stats().live_bytes);
}

TEST(Memory, ADeviceWithoutGraphsRunsTheStep) {
  int runs = 0;
  std::string why_not;
  const auto step = [&] { ++runs; };
  EXPECT_EQ(capture(cpu, 0, step, why_not), nullptr);
  EXPECT_EQ(runs, 1);
  EXPECT_FALSE(why_not.empty());
}

TEST(Memory, Errors) {
  const Tensor held = Tensor::zeros({1 << 20});
  EXPECT_ERROR(Tensor::empty({int64_t{1} << 50}), Memory, "cannot allocate");
  EXPECT_ERROR(Tensor::empty({int64_t{1} << 50}), Memory, " bytes on cpu; tensors hold ");
}

}  // namespace
}  // namespace torus
