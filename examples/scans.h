// What train_mri learns on: slabs of complex images, from files of images or k-space, or phantoms.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "torus/torus.h"

/// One volume, or several that its counters tell apart (frames), perhaps of several coils. Its images have
/// axes z, y and x (z of size 1 where there are but two).
class Scan {
 public:
  virtual ~Scan() = default;

  std::string name;
  std::array<std::string, 3> axes{"z", "y", "x"};  // as the file calls them
  std::array<int64_t, 3> grid{};                   // of its images
  std::array<bool, 3> encoded{};   // axes that the scanner encoded: images are periodic along them
  std::array<int64_t, 3> shown{};  // what metrics see, in the middle of the grid: without padding
  int64_t frames = 1, coils = 1;
  /// Whether the file says where the axes point; then pictures are radiological: those of `flipped` are drawn
  /// from their last element to their first.
  bool is_world = false;
  std::array<bool, 3> flipped{};
  /// Of k-space: columns before the first and from the second on were never measured; 0, 0: all were.
  std::array<int64_t, 2> measured_columns{};

  /// Slices first, first + 1, ... of one coil's image, [count, y, x, 2], f32.
  virtual torus::Tensor slab(int64_t frame, int64_t coil, int64_t first, int64_t count) const = 0;
};

class PhantomScan : public Scan {
 public:
  PhantomScan(const torus::Shape& shape, uint64_t seed) : image_(torus::phantom(shape, seed)) {
    name = "phantom " + std::to_string(seed);
    grid = shown = {shape[0], shape[1], shape[2]};
  }
  torus::Tensor slab(int64_t, int64_t, int64_t first, int64_t count) const override {
    return image_.slice(0, first, first + count);
  }

 private:
  torus::Tensor image_;
};

/// A scan in a file. Images get a margin of zeros, and k-space loses its outermost frequencies, where sizes
/// in y and x are no multiples of the patch.
class FileScan : public Scan {
 public:
  FileScan(const std::string& path, const torus::VolumeOptions& options, const std::array<int64_t, 3>& patch)
      : volume_(torus::open_volume(path, options)) {
    using namespace torus;
    const VolumeInfo& info = volume_.info();
    const Shape& shape = info.shape;
    name = path;
    is_kspace_ = options.dataset.empty() &&
                 (info.layout == VolumeLayout::fastmri || info.layout == VolumeLayout::ismrmrd);
    check(!is_kspace_ || info.trajectory.empty() || info.trajectory == "cartesian", Error::Kind::Value, path,
          ": its trajectory is '", info.trajectory, "'; only of cartesian k-space images are made here");
    find_axes();
    for (size_t k = 0; k < 3; ++k) {
      if (at_[k] < 0) continue;
      stored_[k] = shape[at_[k]];
      axes[k] = info.axes[static_cast<size_t>(at_[k])].name;
      encoded[k] = is_kspace_ && axes[k] != "slice";
      const VolumeAxis& axis = info.axes[static_cast<size_t>(at_[k])];
      is_world = (k == 0 || is_world) && axis.direction.has_value();
      flipped[k] = axis.step.value_or(1) > 0;
    }
    if (!is_world) flipped = {};
    for (int axis = 0; axis < shape.dim(); ++axis)
      if (axis != coil_ && axis != at_[0] && axis != at_[1] && axis != at_[2]) frames *= shape[axis];
    if (coil_ >= 0) coils = shape[coil_];
    check(shape.numel() > 0, Error::Kind::Value, path, ": '", info.dataset, "' is empty");
    for (size_t k = 0; k < 3; ++k) {
      const int64_t step = k == 0 ? 1 : patch[k], low = stored_[k] / step * step;
      grid[k] = encoded[k] || low == stored_[k] ? low : low + step;
      check(grid[k] > 0, Error::Kind::Value, path, ": expected at least --patch ", step, " elements along ",
            axes[k], ", got ", stored_[k]);
      shown[k] = std::min(grid[k], stored_[k]);
    }
    if (info.fastmri) {
      const FastMri& header = *info.fastmri;
      check(!is_kspace_ || (!header.is_test && !header.mask.defined()), Error::Kind::Value, path,
            ": is undersampled itself (a fastMRI file to test on): there is no truth to learn from");
      if (is_kspace_)
        for (size_t k = 1; k < 3; ++k)
          if (const int64_t size = header.recon[k == 1 ? 0 : 1]; size > 0)
            shown[k] = std::min(shown[k], size);
      const int64_t cut = stored_[2] / 2 - grid[2] / 2;
      if (is_kspace_ && header.pad_right > 0)
        measured_columns = {std::max<int64_t>(0, header.pad_left - cut),
                            std::min(grid[2], header.pad_right - cut)};
    }
    if (info.layout == VolumeLayout::ismrmrd && is_kspace_) check_filled();
    volume_.release();
  }

  torus::Tensor slab(int64_t frame, int64_t coil, int64_t first, int64_t count) const override {
    using namespace torus;
    Tensor image;
    if (encoded[0]) {  // the whole stack is transformed, and kept
      const std::lock_guard lock(mutex_);
      Tensor& kept = stacks_[{frame, coil}];
      image = kept.defined() ? kept : read(frame, coil, 0, stored_[0]);
      constexpr int64_t most = int64_t{1} << 31;
      if (static_cast<int64_t>(stacks_.size()) * image.numel() * 4 <= most)
        kept = image;
      else
        stacks_.erase({frame, coil});
      return image.slice(0, first, first + count);
    }
    return read(frame, coil, first, count);
  }
  /// Its file is opened again when it is needed.
  void release() const { volume_.release(); }

 private:
  // Which axes of the file are z, y and x, and which the coils.
  void find_axes() {
    using namespace torus;
    const auto& list = volume_.info().axes;
    std::vector<int> with_direction, all;
    const auto find = [&](const std::string& wanted) {
      for (size_t i = 0; i < list.size(); ++i)
        if (list[i].name == wanted) return static_cast<int>(i);
      return -1;
    };
    coil_ = find("coil");
    for (int i = 0; i < static_cast<int>(list.size()); ++i) {
      if (i == coil_) continue;
      all.push_back(i);
      if (list[static_cast<size_t>(i)].direction) with_direction.push_back(i);
    }
    if (const int kz = find("kz"); kz >= 0 && list[static_cast<size_t>(kz)].size == 1) {
      std::erase(all, kz);
      if (const int slice = find("slice"); slice >= 0) {  // the last of the counters counts as z
        std::erase(all, slice);
        all.insert(all.end() - 2, slice);
      } else if (all.size() > 2) {
        all.insert(all.end() - 2, kz);
      }
    }
    const std::vector<int>& space = with_direction.size() == 3 ? with_direction : all;
    check(space.size() >= 2, Error::Kind::Value, name, ": '", volume_.info().dataset,
          "' has fewer than two axes, shape ", volume_.shape());
    for (size_t k = 0; k < 3 && k < space.size(); ++k) at_[2 - k] = space[space.size() - 1 - k];
  }

  // [count, y, x, 2], transformed to an image of the grid's size in y and x.
  torus::Tensor read(int64_t frame, int64_t coil, int64_t first, int64_t count) const {
    using namespace torus;
    const Shape& shape = volume_.shape();
    Shape begin = shape, size = shape;
    for (int axis = shape.dim() - 1; axis >= 0; --axis) {
      begin[axis] = 0;
      if (axis == at_[1] || axis == at_[2]) continue;
      size[axis] = 1;
      if (axis == at_[0]) {
        begin[axis] = first;
        size[axis] = count;
      } else if (axis == coil_) {
        begin[axis] = coil;
      } else {
        begin[axis] = frame % shape[axis];
        frame /= shape[axis];
      }
    }
    const bool is_complex = volume_.info().is_complex;
    const Tensor values =
        volume_.read(begin, size).reshape({count, stored_[1], stored_[2], is_complex ? 2 : 1});
    const float* number = values.data<float>();
    check(std::all_of(number, number + values.numel(), [](float v) { return std::isfinite(v); }),
          Error::Kind::Value, name, ": holds NaN or infinity, in one of the slices from ", first, " to ",
          first + count - 1, " of ", axes[0]);
    Tensor result = Tensor::zeros({count, grid[1], grid[2], 2});
    Tensor from = values, into = result.slice(3, 0, is_complex ? 2 : 1);
    for (int k = 1; k < 3; ++k) {  // middle on middle
      const int64_t have = stored_[static_cast<size_t>(k)], want = grid[static_cast<size_t>(k)];
      const int64_t cut = std::max<int64_t>(0, have / 2 - want / 2),
                    gap = std::max<int64_t>(0, want / 2 - have / 2);
      from = from.slice(k, cut, cut + std::min(have, want));
      into = into.slice(k, gap, gap + std::min(have, want));
    }
    into.copy_(from);
    std::vector<int> transformed;
    for (int k = 0; k < 3; ++k)
      if (encoded[static_cast<size_t>(k)]) transformed.push_back(k);
    return transformed.empty() ? result : fft(Variable(result), transformed, true).value();
  }

  // Lines that are zero between others that are not were never measured.
  void check_filled() const {
    using namespace torus;
    std::array<int64_t, 3> place{grid[0] / 2, 0, 0};
    const int64_t first = encoded[0] ? 0 : place[0], count = encoded[0] ? stored_[0] : 1;
    std::vector<int> transformed;
    for (int k = 0; k < 3; ++k)
      if (encoded[static_cast<size_t>(k)]) transformed.push_back(k);
    const Tensor kspace = fft(Variable(read(0, 0, first, count)), transformed).value().to(f64);
    const double* k = kspace.data<double>();
    double most = 0;
    std::array<std::vector<double>, 3> energy;
    for (size_t a = 0; a < 3; ++a) energy[a].resize(static_cast<size_t>(kspace.size(static_cast<int>(a))));
    for (int64_t i = 0; i < kspace.numel(); ++i) {
      const int64_t x = i / 2 % grid[2], y = i / 2 / grid[2] % grid[1], z = i / 2 / grid[2] / grid[1];
      energy[0][static_cast<size_t>(z)] += k[i] * k[i];
      energy[1][static_cast<size_t>(y)] += k[i] * k[i];
      energy[2][static_cast<size_t>(x)] += k[i] * k[i];
      most = std::max(most, k[i] * k[i]);
    }
    for (const int a : transformed) {
      const auto& lines = energy[static_cast<size_t>(a)];
      const auto measured = [&](double e) { return e > 1e-10 * most; };  // what rounding leaves is less
      const auto begin = std::find_if(lines.begin(), lines.end(), measured);
      const auto end = std::find_if(lines.rbegin(), lines.rend(), measured).base();
      check(std::all_of(begin, std::max(begin, end), measured), Error::Kind::Value, name,
            ": is undersampled itself (k-space has gaps along ", axes[static_cast<size_t>(a)],
            "): there is no truth to learn from");
    }
  }

  torus::Volume volume_;
  bool is_kspace_ = false;
  std::array<int, 3> at_{-1, -1, -1};  // places of z, y and x among the file's axes; -1: none
  int coil_ = -1;
  std::array<int64_t, 3> stored_{1, 1, 1};
  mutable std::mutex mutex_;
  mutable std::map<std::pair<int64_t, int64_t>, torus::Tensor> stacks_;
};
