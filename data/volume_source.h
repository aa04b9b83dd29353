// What each layout of volumes implements. Not installed.
#pragma once

#include "torus/data/volume.h"
#include "torus/data/xml.h"

namespace torus {

struct Volume::Source {
  VolumeInfo info;
  Hdf5File file;

  explicit Source(Hdf5File opened) : file(std::move(opened)) {}
  virtual ~Source() = default;
  /// Reads a box that lies inside, into a contiguous tensor that fits, f32 or f64.
  virtual void read(Tensor& into, const Shape& first, const Shape& count, const Shape& step) const = 0;

  /// Adds a field unless its value is empty.
  void add(const std::string& field, const std::string& value);
};

/// A source whose elements are those of a dataset, as they are stored.
struct StoredVolume : Volume::Source {
  Hdf5Dataset stored;

  StoredVolume(Hdf5File opened, const std::string& name, const VolumeOptions& options);
  void read(Tensor& into, const Shape& first, const Shape& count, const Shape& step) const override;
};

/// The sources, for a file that `is_...` recognised.
bool is_fastmri(const Hdf5File& file);
std::shared_ptr<const Volume::Source> open_fastmri(Hdf5File file, const VolumeOptions& options);
bool is_minc2(const Hdf5File& file);
std::shared_ptr<const Volume::Source> open_minc2(Hdf5File file, const VolumeOptions& options);
/// The groups that hold acquisitions.
std::vector<std::string> ismrmrd_groups(const Hdf5File& file);
std::shared_ptr<const Volume::Source> open_ismrmrd(Hdf5File file, const VolumeOptions& options);

/// The fields that headers of ISMRMRD and fastMRI share.
void add_ismrmrd_fields(Volume::Source& source, const XmlElement& header, const XmlElement* encoding);
/// A number of at most 9 digits, from text; `otherwise` if it is none.
int64_t to_integer(const std::string& text, int64_t otherwise);
std::optional<double> to_number(const std::string& text);
/// A value of an attribute, in words.
std::string to_text(const Hdf5Value& value);
/// The shortest decimal that reads back as this number.
std::string to_text(double value);

}  // namespace torus
