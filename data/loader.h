// Batches, and a thread that prepares them ahead.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "torus/core/tensor.h"

namespace torus {

/// A target that does not count; cross_entropy's default.
inline constexpr int64_t no_target = -100;

/// One step's data: tokens and, for each, the token to predict. Both [B, T], i64.
struct Batch {
  Tensor inputs, targets;
};

/// Prepares the batches that `source` gives for first, first + 1, ... on a thread of its own, up to `depth`
/// ahead of the one handed out.
class Prefetcher {
 public:
  explicit Prefetcher(std::function<Batch(int64_t)> source, int64_t first = 0, int64_t depth = 2);
  /// Stops at once: at most the batch in the making is finished, and dropped.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  /// The next batch. What `source` threw for it is rethrown here, now and at every later call.
  Batch next();
  /// The index of the batch that next() gives next: what a checkpoint stores.
  int64_t position() const { return position_; }
  /// How long next() has waited for batches that were not ready, in seconds.
  double waited() const { return waited_; }

 private:
  struct Shared;
  std::unique_ptr<Shared> shared_;
  int64_t position_;
  double waited_ = 0;
};

}  // namespace torus
