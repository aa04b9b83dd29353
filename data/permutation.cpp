#include "torus/data/permutation.h"

#include "torus/core/random.h"

namespace torus {

Permutation::Permutation(int64_t count, uint64_t seed, uint64_t stream)
    : count_(count), seed_(seed), stream_(stream) {
  check(count >= 1, Error::Kind::Value, "[permutation] expected count >= 1, got ", count);
  while (half_bits_ < 31 && int64_t{1} << (2 * half_bits_) < count) ++half_bits_;
  check(count <= int64_t{1} << 62, Error::Kind::Value, "[permutation] expected count <= 2^62, got ", count);
}

int64_t Permutation::operator()(int64_t index) const {
  check(index >= 0 && index < count_, Error::Kind::Value, "[permutation] index must be in [0, ", count_,
        "), got ", index);
  constexpr uint32_t rounds = 8;
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  auto value = static_cast<uint64_t>(index);
  do {  // a cycle that leaves [0, count) comes back to it
    uint64_t left = value >> half_bits_, right = value & mask;
    for (uint32_t round = 0; round < rounds; ++round) {
      const auto words = philox({static_cast<uint32_t>(right), round, static_cast<uint32_t>(stream_),
                                 static_cast<uint32_t>(stream_ >> 32)},
                                seed_);
      left ^= words[0] & mask;
      std::swap(left, right);
    }
    value = left << half_bits_ | right;
  } while (value >= static_cast<uint64_t>(count_));
  return static_cast<int64_t>(value);
}

}  // namespace torus
