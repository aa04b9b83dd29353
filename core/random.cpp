#include "torus/core/random.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "torus/core/parallel.h"
#include "torus/core/strided.h"

namespace torus {

namespace {

std::array<uint32_t, 4> words_at(uint64_t seed, uint64_t position) {
  return philox({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0}, seed);
}

// 53 bits in [0, 1).
double unit(uint32_t high, uint32_t low) {
  return static_cast<double>((uint64_t{high} << 32 | low) >> 11) * 0x1p-53;
}

// Fills a new tensor with f(words) of one draw a position.
template <class F>
Tensor draw(const Shape& shape, DType dtype, Generator& generator, F f) {
  Tensor result = Tensor::empty(shape, dtype);
  const uint64_t seed = generator.seed(), start = generator.reserve(static_cast<uint64_t>(shape.numel()));
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    T* data = result.mutable_data<T>();
    parallel_for(0, result.numel(), elementwise_grain / 8, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        data[i] = static_cast<T>(f(words_at(seed, start + static_cast<uint64_t>(i))));
    });
  });
  return result;
}

// Uniform in [0, bound) from 64 bits by a 128-bit product; the bias is below bound / 2^64.
int64_t scaled(uint64_t bits, int64_t bound) {
  return static_cast<int64_t>(static_cast<unsigned __int128>(bits) * static_cast<uint64_t>(bound) >> 64);
}

}  // namespace

thread_local detail::CapturedDraws* detail::captured_draws = nullptr;

namespace {
thread_local detail::DrawObserver* draw_observer = nullptr;  // the innermost
}  // namespace

detail::DrawObserver::DrawObserver() : outer_(std::exchange(draw_observer, this)) {}

detail::DrawObserver::~DrawObserver() { draw_observer = outer_; }

Generator::~Generator() {
  for (auto* observer = draw_observer; observer; observer = observer->outer_)
    std::erase_if(observer->draws_, [this](const auto& draws) { return draws.generator == this; });
}

uint64_t Generator::reserve(uint64_t count) {
  if (auto* draws = detail::captured_draws) {
    if (!draws->generator) draws->generator = this, draws->before = state_;
    if (draws->generator == this)
      draws->count += count;
    else
      draws->end_capture("the step draws from more than one generator");
  }
  const State before = state_;
  state_.position += count;
  for (auto* observer = draw_observer; observer; observer = observer->outer_) {
    auto& all = observer->draws_;
    const auto found =
        std::find_if(all.begin(), all.end(), [this](const auto& draws) { return draws.generator == this; });
    if (found == all.end())
      all.push_back({this, before, state_});
    else
      found->last = state_;
  }
  return before.position;
}

uint64_t Generator::bits() {
  const auto words = words_at(state_.seed, reserve(1));
  return uint64_t{words[0]} << 32 | words[1];
}

int64_t Generator::below(int64_t bound) {
  check(bound > 0, Error::Kind::Value, "[below] bound must be positive, got ", bound);
  // Lemire's rejection: draws whose low product falls in the short last interval are taken again.
  const auto range = static_cast<uint64_t>(bound);
  const uint64_t rejected = (0 - range) % range;
  while (true) {
    const auto product = static_cast<unsigned __int128>(bits()) * range;
    if (static_cast<uint64_t>(product) >= rejected) return static_cast<int64_t>(product >> 64);
  }
}

double Generator::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

Generator& default_generator() {
  static Generator generator;
  return generator;
}

void manual_seed(uint64_t seed) { default_generator() = Generator(seed); }

Tensor rand(const Shape& shape, double low, double high, DType dtype, Generator& generator) {
  check(is_floating(dtype), Error::Kind::DType, "[rand] expected a floating dtype, got ", dtype);
  return draw(shape, dtype, generator, [=](const auto& w) { return low + (high - low) * unit(w[0], w[1]); });
}

Tensor randn(const Shape& shape, double mean, double deviation, DType dtype, Generator& generator) {
  check(is_floating(dtype), Error::Kind::DType, "[randn] expected a floating dtype, got ", dtype);
  return draw(shape, dtype, generator, [=](const auto& w) {
    const double radius = std::sqrt(-2 * std::log(1 - unit(w[0], w[1])));
    return mean + deviation * radius * std::cos(2 * std::numbers::pi * unit(w[2], w[3]));
  });
}

Tensor randint(const Shape& shape, int64_t low, int64_t high, Generator& generator) {
  check(low < high, Error::Kind::Value, "[randint] expected low < high, got ", low, " and ", high);
  return draw(shape, i64, generator,
              [=](const auto& w) { return low + scaled(uint64_t{w[0]} << 32 | w[1], high - low); });
}

}  // namespace torus
