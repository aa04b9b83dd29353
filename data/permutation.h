// A random order of many things that is computed, not stored.
#pragma once

#include <cstdint>

namespace torus {

/// A pseudorandom bijection of [0, count), a function of the seed and the stream: element i costs a few calls
/// of Philox and no memory. It is a Feistel network on the next even number of bits, walked until it lands
/// inside.
class Permutation {
 public:
  /// count >= 1.
  Permutation(int64_t count, uint64_t seed, uint64_t stream = 0);
  int64_t size() const { return count_; }
  /// 0 <= index < count.
  int64_t operator()(int64_t index) const;

 private:
  int64_t count_;
  uint64_t seed_, stream_;
  int half_bits_ = 1;
};

}  // namespace torus
