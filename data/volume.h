// Volumes of MRI in HDF5: fastMRI, ISMRMRD, MINC2, or any dataset of numbers.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torus/core/hdf5.h"
#include "torus/core/tensor.h"

namespace torus {

enum class VolumeLayout { fastmri, ismrmrd, minc2, dataset };

struct VolumeOptions {
  /// The path of a dataset: values as they are stored, whatever the layout. Empty: what the layout calls the
  /// volume, or the only array of numbers in a file of no known layout.
  std::string dataset = {};
  /// MINC2: stored numbers, not scaled to real values, as for volumes of labels.
  bool raw = false;
  /// ISMRMRD: the group of the acquisition. Empty: the last of those there are.
  std::string group = {};
  /// ISMRMRD: readouts with any of these flags (from 1, as ISMRMRD counts them) are left out. By default
  /// noise (19), navigator (23), phase correction (24), high-performance feedback (26), dummy (27), real-time
  /// feedback (28) and surface-coil correction (29); calibration is kept: alone 20, as part of the image 21.
  std::vector<int> leave_out = {19, 23, 24, 26, 27, 28, 29};
  /// ISMRMRD: the encoding space whose readouts make the volume.
  int64_t encoding = 0;
  /// Chunks that are kept in memory, in bytes; 0: as Hdf5File::open_dataset says.
  int64_t cache_bytes = 0;
  Hdf5Trust trust = {};
};

/// One axis of a volume.
struct VolumeAxis {
  VolumeAxis(std::string axis_name, int64_t axis_size) : name(std::move(axis_name)), size(axis_size) {}

  std::string name;  // "zspace", "coil"
  int64_t size = 0;
  std::optional<double> step;  // between elements, with its sign; none: not said, or irregular
  double start = 0;            // of element 0
  std::string unit;            // "mm"
  /// Where the axis points in the world; only for axes of space.
  std::optional<std::array<double, 3>> direction;
};

/// What the header of a fastMRI file says; absent where it does not.
struct FastMri {
  bool is_multicoil = false;
  bool is_test = false;             // no target
  std::string target;               // "reconstruction_rss", "reconstruction_esc", or empty
  std::optional<double> max, norm;  // of the target
  std::optional<int64_t> acceleration, num_low_frequencies;
  std::array<int64_t, 3> encoded = {}, recon = {};  // matrix sizes x, y, z; 0: not said
  /// Columns of k-space before the first and from the second on hold zeros; 0, 0: not said.
  int64_t pad_left = 0, pad_right = 0;
  Tensor mask;  // [width], f32: columns that were sampled; undefined in files to train on
};

/// What a file says before its volume is read.
struct VolumeInfo {
  VolumeLayout layout = VolumeLayout::dataset;
  std::string description;  // "fastMRI, multi-coil, to train on"
  std::string dataset;      // whose elements these are
  Shape shape;              // a complex number is one element
  bool is_complex = false;  // reads with a last axis of 2
  std::vector<VolumeAxis> axes;
  Hdf5Info stored;  // type, chunks, filters
  /// What the header says, in words and numbers, in its order.
  std::vector<std::pair<std::string, std::string>> fields;
  std::optional<FastMri> fastmri;
  /// Of k-space: "cartesian", "radial" or what else the header says; "unknown" where only the readouts have
  /// one, and empty where nothing is said.
  std::string trajectory;

  /// The world coordinates of an element, in the units of the axes, by those that have a direction; `index`
  /// has an entry an axis. Throws Error{Value} without such axes, or where one is irregular.
  std::array<double, 3> world(const std::vector<double>& index) const;
};

/// A volume in an open file. Nothing is read before it is asked for. Any thread may read; one at a time does,
/// because the HDF5 library is not safe for threads. Copies share the file.
class Volume {
 public:
  const VolumeInfo& info() const;
  const Shape& shape() const { return info().shape; }
  const std::string& path() const;

  /// Elements first, first + step, ..., `count` of them an axis, as f32 or f64; step {} is 1 everywhere. The
  /// result has the shape `count`, and for complex numbers a last axis of 2. Throws Error{File}, naming the
  /// file and the box.
  Tensor read(const Shape& first, const Shape& count, DType dtype = f32, const Shape& step = {}) const;
  /// All of it.
  Tensor read(DType dtype = f32) const;
  /// The index-th slice of the first axis, which goes.
  Tensor slice(int64_t index, DType dtype = f32) const;
  /// The same as `read`, into a contiguous tensor of as many elements, f32 or f64.
  void read_into(Tensor& into, const Shape& first, const Shape& count, const Shape& step = {}) const;

  /// The size of the pieces in which the elements lie in the file; 1 where it knows none.
  Shape chunk() const;
  /// Gives back the file and all memory but the header; the next read opens it again.
  void release() const;

  struct Source;
  explicit Volume(std::shared_ptr<const Source> source) : source_(std::move(source)) {}

 private:
  std::shared_ptr<const Source> source_;
};

/// Recognises the layout of a file, and reads its header. Never writes, and needs no permission to. Throws
/// Error{File}, one printable line, on what is no such file, or damaged, or too suspicious for
/// `options.trust`.
Volume open_volume(const std::string& path, const VolumeOptions& options = {});

const char* name(VolumeLayout layout);
/// The layout of a file; `dataset` where it is none of the others.
VolumeLayout layout_of(const Hdf5File& file);

}  // namespace torus
