// Random numbers by counter: the same on every device and for any thread count.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "torus/core/tensor.h"

namespace torus {

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): four 32-bit words from
/// a 128-bit counter and a 64-bit key.
constexpr std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, uint64_t key) {
  auto low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0], b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ low, static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ high, static_cast<uint32_t>(a)};
    low += 0x9E3779B9;
    high += 0xBB67AE85;
  }
  return counter;
}

/// A stream of random numbers: a seed and how many draws were taken. A draw is a function of (seed, position)
/// alone. Not safe to share between threads.
class Generator {
 public:
  struct State {
    uint64_t seed = 0, position = 0;
    bool operator==(const State&) const = default;
  };

  explicit Generator(uint64_t seed = 0) : state_{seed, 0} {}
  Generator(const Generator&) = default;
  Generator& operator=(const Generator&) = default;
  ~Generator();

  /// Takes `count` positions and returns the first.
  uint64_t reserve(uint64_t count);
  uint64_t seed() const { return state_.seed; }
  State state() const { return state_; }
  void set_state(State state) { state_ = state; }

  /// 64 random bits.
  uint64_t bits();
  /// An integer in [0, bound), without bias. bound > 0.
  int64_t below(int64_t bound);
  /// A double in [0, 1).
  double uniform();

 private:
  State state_;
};

namespace detail {
/// The draws of a step that is being captured: its only generator, where that was, and how many it took.
struct CapturedDraws {
  Generator* generator = nullptr;
  Generator::State before = {};
  uint64_t count = 0;
  void (*end_capture)(const char* why) = nullptr;
};
extern thread_local CapturedDraws* captured_draws;  // null: no step is being captured on this thread

/// While alive, notes which generators this thread draws from, and where they stood.
class DrawObserver {
 public:
  struct Draws {
    Generator* generator;
    Generator::State first, last;  // before the first draw and after the last
    bool operator==(const Draws&) const = default;
  };

  DrawObserver();
  ~DrawObserver();
  DrawObserver(const DrawObserver&) = delete;
  DrawObserver& operator=(const DrawObserver&) = delete;

  /// One entry a generator, in the order of their first draws; none of a generator that is gone.
  const std::vector<Draws>& draws() const { return draws_; }

 private:
  std::vector<Draws> draws_;
  DrawObserver* outer_;  // it sees the same draws
  friend class torus::Generator;
};
}  // namespace detail

/// The generator that is used where none is given. `manual_seed` restarts it.
Generator& default_generator();
void manual_seed(uint64_t seed);

/// Independent draws from [low, high), computed in double and rounded to `dtype`.
Tensor rand(const Shape& shape, double low = 0, double high = 1, DType dtype = f32,
            Generator& generator = default_generator());
/// Independent normal draws (Box-Muller).
Tensor randn(const Shape& shape, double mean = 0, double deviation = 1, DType dtype = f32,
             Generator& generator = default_generator());
/// Independent integers from [low, high), i64.
Tensor randint(const Shape& shape, int64_t low, int64_t high, Generator& generator = default_generator());

}  // namespace torus
