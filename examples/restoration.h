// Restoring undersampled scans: the network, its batches, and how well it does. For train_mri and its study.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "scans.h"
#include "torus/torus.h"
#include "training.h"

/// How a scan is undersampled, and in which pieces it is restored.
struct Problem {
  std::array<bool, 3> sampled{};  // axes z, y, x of which not all frequencies are measured
  torus::SamplingOptions sampling;
  int64_t slices = 1;  // of a slab
  std::array<int64_t, 3> patch{1, 1, 1};

  /// The axes, among those of [B, z, y, x, 2].
  std::vector<int> axes() const {
    std::vector<int> result;
    for (int k = 0; k < 3; ++k)
      if (sampled[static_cast<size_t>(k)]) result.push_back(k + 1);
    return result;
  }
  /// What is measured of a slab, [z or 1, y or 1, x or 1, 1]: the product of a mask for each axis.
  torus::Tensor mask(const Scan& scan, const std::vector<uint32_t>& seed) const {
    torus::Tensor result = torus::Tensor::full({1, 1, 1, 1}, 1);
    for (size_t k = 0; k < 3; ++k) {
      if (!sampled[k]) continue;
      torus::Shape shape{1, 1, 1, 1};
      shape[static_cast<int>(k)] = scan.grid[k];
      std::vector<uint32_t> own = seed;
      if (k != 2) own.push_back(static_cast<uint32_t>(k));  // that of x is fastMRI's
      torus::Tensor line = torus::sampling_mask(scan.grid[k], sampling, own);
      if (k == 2 && scan.measured_columns[1] > 0) {
        line.slice(0, 0, scan.measured_columns[0]).fill_(0);
        line.slice(0, scan.measured_columns[1], scan.grid[k]).fill_(0);
      }
      result = mul(torus::Variable(result), torus::Variable(line.reshape(shape))).value();
    }
    return result;
  }
};

/// A step of training: images [B, z, y, x, 2] as their frequencies along the sampled axes, and a mask for
/// each.
struct Slabs {
  torus::Tensor frequencies, masks;
};

/// Slabs at random places of random scans. Batch i is a function of (seed, i) alone; its slabs are of one
/// scan, so that scans may differ in size. `moved` rolls each along the sampled axes by a random number of
/// whole patches.
class SlabSource {
 public:
  SlabSource(std::vector<std::shared_ptr<const Scan>> scans, const Problem& problem, int64_t batch,
             uint64_t seed, bool moved = false)
      : scans_(std::move(scans)), problem_(problem), batch_(batch), seed_(seed), moved_(moved) {}

  Slabs operator()(int64_t index) const {
    using namespace torus;
    Generator random(seed_);
    random.set_state({seed_, static_cast<uint64_t>(index) << 20});
    const Scan& scan = *scans_[static_cast<size_t>(random.below(static_cast<int64_t>(scans_.size())))];
    std::vector<Variable> images, masks;
    for (int64_t b = 0; b < batch_; ++b) {
      const int64_t first = random.below(scan.grid[0] - problem_.slices + 1);
      Variable image(scan.slab(random.below(scan.frames), random.below(scan.coils), first, problem_.slices));
      if (moved_)
        for (const int axis : problem_.axes()) {
          const auto k = static_cast<size_t>(axis - 1);
          image =
              roll(image, {random.below(scan.grid[k] / problem_.patch[k]) * problem_.patch[k]}, {axis - 1});
        }
      images.push_back(image);
      masks.push_back(Variable(problem_.mask(scan, {static_cast<uint32_t>(random.bits())})));
    }
    if (scans_.size() > 8)  // of many files few stay open
      if (const auto* file = dynamic_cast<const FileScan*>(&scan)) file->release();
    return {fft(stack(images, 0), problem_.axes()).value(), stack(masks, 0).value()};
  }

 private:
  std::vector<std::shared_ptr<const Scan>> scans_;
  Problem problem_;
  int64_t batch_;
  uint64_t seed_;
  bool moved_;
};

struct RestorerOptions {
  int64_t cascades = 1;
  torus::GridTransformerOptions network;
  std::vector<int> axes = {};  // that are undersampled
};

/// Cascades of a network that adds to the image what it lacks, each followed by data consistency. Each slab
/// is divided by the root mean square of its zero-filled image first: scale changes nothing.
class Restorer : public torus::Module {
 public:
  explicit Restorer(const RestorerOptions& options) : options_(options) {
    for (int64_t i = 0; i < options.cascades; ++i)
      add("cascades." + std::to_string(i), networks_.emplace_back(options.network));
  }

  /// Frequencies as in Slabs; those that the masks leave out are not looked at.
  torus::Variable operator()(const Slabs& slabs) const {
    using namespace torus;
    const Variable measured = Variable(slabs.frequencies) * Variable(slabs.masks);
    const Variable zero_filled = fft(measured, options_.axes, true), scale = scale_of(zero_filled);
    const DType dtype = networks_[0].embed.weight.dtype();
    Variable x = zero_filled;
    for (const GridTransformer& network : networks_)
      x = data_consistency(x + scale * cast(network(cast(x / scale, dtype)), x.dtype()), measured,
                           slabs.masks, options_.axes);
    return x;
  }

  /// The mean of |restored - truth|^2, in units of the mean square of the zero-filled image.
  torus::Variable loss(const Slabs& slabs) const {
    using namespace torus;
    const Variable truth = fft(Variable(slabs.frequencies), options_.axes, true);
    const Variable measured = Variable(slabs.frequencies) * Variable(slabs.masks);
    const Variable error = ((*this)(slabs)-truth) / scale_of(fft(measured, options_.axes, true));
    return mean(error * error);
  }

 private:
  static torus::Variable scale_of(const torus::Variable& image) {  // [B, 1, 1, 1, 1]
    return sqrt(mean(image * image, {1, 2, 3, 4}, true) + 1e-30);
  }

  RestorerOptions options_;
  std::deque<torus::GridTransformer> networks_;
};

/// A network for complex slabs in patches.
inline torus::GridTransformerOptions network_options(const Problem& problem,
                                                     const torus::NeighborhoodAttentionOptions& attention,
                                                     int64_t layers) {
  return {.inputs = 2,
          .outputs = 2,
          .patch = {problem.patch.begin(), problem.patch.end()},
          .layers = layers,
          .block = {.attention = attention}};
}

inline std::vector<torus::Boundary> boundaries(const std::array<bool, 3>& wraps) {
  std::vector<torus::Boundary> result;
  for (const bool wraps_here : wraps) result.push_back(wraps_here ? torus::wrap : torus::shift);
  return result;
}

/// Steps on slabs of any sizes: those of one shape share a captured step.
class SlabTrainer {
 public:
  SlabTrainer(Restorer& model, torus::AdamW& optimizer, torus::Device device)
      : model_(model), optimizer_(optimizer), device_(device) {}

  void step(const Slabs& slabs, double lr) {
    auto& place = places_[{slabs.frequencies.shape().begin(), slabs.frequencies.shape().end()}];
    if (!place) place = std::make_unique<Place>(*this, slabs);
    if (last_ != place.get() && last_) rest_ = losses();  // in their order
    last_ = place.get();
    place->inputs.frequencies.copy_(slabs.frequencies);
    place->inputs.masks.copy_(slabs.masks);
    place->trainer.step(lr);
  }
  /// As Trainer's.
  bool full() const { return last_->trainer.full(); }
  std::vector<double> losses() {
    std::vector<double> result = std::exchange(rest_, {});
    if (last_) {
      const std::vector<double> more = last_->trainer.losses();
      result.insert(result.end(), more.begin(), more.end());
    }
    return result;
  }

 private:
  struct Place {
    Place(SlabTrainer& all, const Slabs& slabs)
        : inputs{slabs.frequencies.to(all.device_).clone(), slabs.masks.to(all.device_).clone()},
          trainer(all.model_, all.optimizer_, all.device_, [this, &all] { return all.model_.loss(inputs); }) {
    }
    Slabs inputs;
    Trainer trainer;
  };

  Restorer& model_;
  torus::AdamW& optimizer_;
  torus::Device device_;
  std::map<std::vector<int64_t>, std::unique_ptr<Place>> places_;
  Place* last_ = nullptr;
  std::vector<double> rest_;
};

/// Magnitudes [z, y, x] of a whole frame, the root of the sum of squares over its coils.
struct Restored {
  torus::Tensor truth, zero_filled, restored;
  torus::Tensor mask;
};

/// Restores all slabs of a frame, after rolling it by `shift` along x (and back). Coils are restored one by
/// one. `slices`: only those {first, count}; they hold whole slabs.
inline Restored restore_frame(const Restorer& model, const Scan& scan, const Problem& problem, int64_t frame,
                              torus::Device device, int64_t shift = 0, std::array<int64_t, 2> slices = {}) {
  using namespace torus;
  const NoGrad no_grad;
  if (slices[1] == 0) slices = {0, scan.grid[0]};
  const std::string file_name = scan.name.substr(scan.name.rfind('/') + 1);
  Restored result;
  result.mask = problem.mask(scan, sampling_seed(file_name));
  const Shape shape{slices[1], scan.grid[1], scan.grid[2]};
  Tensor* sums[] = {&result.truth, &result.zero_filled, &result.restored};
  for (Tensor* sum : sums) *sum = Tensor::zeros(shape);
  const std::vector<int> axes = problem.axes();
  for (int64_t coil = 0; coil < scan.coils; ++coil)
    for (int64_t z = 0; z < slices[1]; z += problem.slices) {
      const int64_t first = std::min(z, slices[1] - problem.slices);  // the last slab may overlap
      const Variable image(scan.slab(frame, coil, slices[0] + first, problem.slices).to(device).unsqueeze(0));
      const Slabs slabs{fft(roll(image, {shift}, {3}), axes).value(), result.mask.to(device).unsqueeze(0)};
      const Variable filled = fft(Variable(slabs.frequencies) * Variable(slabs.masks), axes, true);
      const Variable images[] = {image, roll(filled, {-shift}, {3}), roll(model(slabs), {-shift}, {3})};
      for (size_t i = 0; i < 3; ++i) {
        const Variable power = sum(images[i] * images[i], {0, 4});
        for (int64_t s = std::max<int64_t>(0, z - first); s < problem.slices; ++s) {
          Tensor into = sums[i]->select(0, first + s);
          add_into(into, power.value().select(0, s).to(cpu));
        }
      }
    }
  for (Tensor* sum : sums) *sum = sqrt(Variable(*sum)).value();
  return result;
}

/// The middle of a frame, without padding.
inline torus::Tensor shown_part(const torus::Tensor& volume, const Scan& scan) {
  torus::Tensor result = volume;
  for (int k = 1; k < 3; ++k) {
    const auto a = static_cast<size_t>(k);
    const int64_t first = scan.grid[a] / 2 - scan.shown[a] / 2;
    result = result.slice(k, first, first + scan.shown[a]);
  }
  return result.contiguous();
}
