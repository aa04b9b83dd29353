#include "torus/data/sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

namespace torus {

namespace {

// The state that Matsumoto and Nishimura's init_by_array makes of a key, which std::mt19937 takes from a
// sequence.
struct InitByArray {
  using result_type = uint32_t;
  const std::vector<uint32_t>& key;

  template <class Iterator>
  void generate(Iterator first, Iterator last) const {
    const auto size = static_cast<size_t>(last - first);
    std::vector<uint32_t> state(size);
    state[0] = 19650218;
    for (size_t i = 1; i < size; ++i)
      state[i] = 1812433253 * (state[i - 1] ^ state[i - 1] >> 30) + static_cast<uint32_t>(i);
    size_t i = 1, j = 0;
    const auto step = [&](uint32_t factor, uint32_t add) {
      state[i] = (state[i] ^ (state[i - 1] ^ state[i - 1] >> 30) * factor) + add;
      if (++i == size) state[0] = state[size - 1], i = 1;
    };
    for (size_t k = std::max(size, key.size()); k > 0; --k) {
      step(1664525, key[j] + static_cast<uint32_t>(j));
      j = (j + 1) % key.size();
    }
    for (size_t k = size - 1; k > 0; --k) step(1566083941, 0 - static_cast<uint32_t>(i));
    state[0] = 0x80000000;
    std::copy(state.begin(), state.end(), first);
  }
};

// NumPy's RandomState, what of it masks use.
class RandomState {
 public:
  explicit RandomState(const std::vector<uint32_t>& seed) {
    if (seed.size() == 1) {
      engine_.seed(seed[0]);
    } else {
      InitByArray sequence{seed};
      engine_.seed(sequence);
    }
  }
  double uniform() {
    const uint32_t high = draw() >> 5, low = draw() >> 6;
    return (high * 67108864. + low) / 9007199254740992.;
  }
  // In [0, count), by rejection.
  uint32_t below(uint32_t count) {
    if (count <= 1) return 0;
    const uint32_t mask = std::bit_ceil(count) - 1;
    uint32_t value;
    do value = draw() & mask;
    while (value >= count);
    return value;
  }

 private:
  uint32_t draw() { return static_cast<uint32_t>(engine_()); }

  std::mt19937 engine_;
};

}  // namespace

Tensor sampling_mask(int64_t width, const SamplingOptions& options, const std::vector<uint32_t>& seed) {
  const auto [kind, acceleration, fraction] = options;
  check(width >= 1 && width < 1 << 30 && acceleration >= 1 && fraction >= 0 && fraction <= 1 && !seed.empty(),
        Error::Kind::Value,
        "[sampling_mask] expected width >= 1, acceleration >= 1, center_fraction from 0 to 1 and a "
        "seed, got ",
        width, ", ", acceleration, ", ", fraction, " and ", seed.size(), " numbers");
  const double columns = static_cast<double>(width), low = std::nearbyint(columns * fraction);
  RandomState random(seed);
  Tensor result = Tensor::zeros({width});
  float* mask = result.mutable_data<float>();
  if (kind == Sampling::random) {
    const double probability = (columns / acceleration - low) / (columns - low);
    for (int64_t i = 0; i < width; ++i) mask[i] = random.uniform() < probability ? 1.f : 0.f;
  } else {
    check(low * acceleration < columns, Error::Kind::Value, "[sampling_mask] equispaced: the middle of ", low,
          " columns takes all of ", width, " / ", acceleration, " that may be measured");
    const double step = acceleration * (low - columns) / (low * acceleration - columns);
    const double start = random.below(static_cast<uint32_t>(std::nearbyint(step)));
    // As numpy.arange counts and adds.
    const double count = std::ceil((columns - 1 - start) / step), rounded_step = start + step - start;
    for (double i = 0; i < count; ++i) {
      const auto at = static_cast<int64_t>(std::nearbyint(start + i * rounded_step));
      if (at < width) mask[at] = 1;
    }
  }
  const auto middle = static_cast<int64_t>(low), pad = (width - middle + 1) / 2;
  std::fill(mask + pad, mask + std::min(width, pad + middle), 1.f);
  return result;
}

std::vector<uint32_t> sampling_seed(const std::string& file_name) {
  std::vector<uint32_t> seed;
  for (const char c : file_name) seed.push_back(static_cast<unsigned char>(c));
  return seed;
}

}  // namespace torus
