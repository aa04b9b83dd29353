// Batches of boxes (slices, patches) out of volumes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "torus/data/loader.h"
#include "torus/data/volume.h"

namespace torus {

struct VolumeBoxOptions {
  /// Elements an axis, the same for all volumes; 0: all of that axis. {1, 0, 0} are slices.
  Shape box = {};
  int64_t batch = 1;
  uint64_t seed = 1;
  DType dtype = f32;  // or f64
  /// Volumes that stay open, with their caches of chunks; those used longest ago are released.
  int64_t most_open = 8;
};

/// Boxes in random order. In each epoch boxes that share no element tile each volume from a random start;
/// what a grid of whole boxes leaves over falls on other sides each time. A batch is a function of (seed,
/// index) alone, and runs on across epochs; its boxes are read in the order of the files, so that a chunk
/// that several need is unpacked once. With a Prefetcher, one thread reads ahead: Prefetcher
/// loader([&](int64_t i) { return boxes.batch(i); });
class VolumeBoxes {
 public:
  /// Throws Error{Shape} where a box does not fit, or where sizes that it takes whole differ between volumes.
  VolumeBoxes(std::vector<Volume> volumes, const VolumeBoxOptions& options);

  /// inputs [B, box...], and for complex numbers a last axis of 2; no targets.
  Batch batch(int64_t index) const;
  int64_t boxes_per_epoch() const { return boxes_; }

 private:
  struct Open;
  std::vector<Volume> volumes_;
  VolumeBoxOptions options_;
  std::vector<int64_t> first_box_;  // of each volume
  int64_t boxes_ = 0;
  std::shared_ptr<Open> open_;
};

}  // namespace torus
