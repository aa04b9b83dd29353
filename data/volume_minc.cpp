// MINC2: https://en.wikibooks.org/wiki/MINC/Reference/MINC2.0_File_Format_Reference
#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "torus/data/volume_source.h"

namespace torus {

namespace {

const std::string image_path = "/minc-2.0/image/0/image";

// Stored integers v mean (v - low) / (high - low) * (max - min) + min, where min and max belong to the
// leading axes.
struct Scaling {
  bool applies = false;
  double low = 0, high = 1;
  int axes = 0;  // how many lead
  std::vector<double> min, max;
};

// "i16" and so on: the least and the largest number of the type.
std::pair<double, double> range_of(const Hdf5Info& info) {
  const std::string type = info.type.substr(info.type.find_last_of(' ') + 1);
  const double bits = 8 * static_cast<double>(info.element_bytes);
  return type.starts_with('i') ? std::pair{-std::exp2(bits - 1), std::exp2(bits - 1) - 1}
                               : std::pair{0., std::exp2(bits) - 1};
}

std::optional<double> number(const Hdf5File& file, const std::string& object, const std::string& name) {
  const auto value = file.find_attribute(object, name);
  if (!value) return std::nullopt;
  if (const auto* real = std::get_if<double>(&*value)) return *real;
  if (const auto* integer = std::get_if<int64_t>(&*value)) return static_cast<double>(*integer);
  return std::nullopt;
}

std::vector<double> numbers(const Hdf5File& file, const std::string& object, const std::string& name) {
  const auto value = file.find_attribute(object, name);
  if (value)
    if (const auto* reals = std::get_if<std::vector<double>>(&*value)) return *reals;
  if (value)
    if (const auto* integers = std::get_if<std::vector<int64_t>>(&*value))
      return {integers->begin(), integers->end()};
  return {};
}

std::string text(const Hdf5File& file, const std::string& object, const std::string& name) {
  const auto value = file.find_attribute(object, name);
  const auto* found = value ? std::get_if<std::string>(&*value) : nullptr;
  return found ? *found : "";
}

struct Minc : StoredVolume {
  Scaling scaling;

  using StoredVolume::StoredVolume;

  void read(Tensor& into, const Shape& first, const Shape& count, const Shape& step) const override {
    if (!scaling.applies) return StoredVolume::read(into, first, count, step);
    // Where f32 would round the stored integers, they are read as f64, a slice at a time.
    const bool is_exact = into.dtype() == f64 || info.stored.element_bytes <= 2;
    if (is_exact) {
      StoredVolume::read(into, first, count, step);
      scale(into, into, first, count, step);
    } else if (count.dim() == 0) {
      Tensor wide = Tensor::empty({}, f64);
      StoredVolume::read(wide, first, count, step);
      scale(wide, into, first, count, step);
    } else {
      Shape from = first, one = count;
      one[0] = 1;
      Tensor wide = Tensor::empty(one, f64), rows = into.reshape({count[0], one.numel()});
      for (int64_t i = 0; i < count[0]; ++i) {
        from[0] = first[0] + i * (step.dim() > 0 ? step[0] : 1);
        StoredVolume::read(wide, from, one, step);
        Tensor row = rows.select(0, i);
        scale(wide, row, from, one, step);
      }
    }
  }

 private:
  // `from`, as stored, and `real` may be the same.
  void scale(const Tensor& from, Tensor& real, const Shape& first, const Shape& count,
             const Shape& step) const {
    const Shape leading = count.slice(0, scaling.axes);
    const int64_t blocks = leading.numel(), block = count.numel() / std::max<int64_t>(1, blocks);
    dispatch_floating(from.dtype(), "volume", [&](auto from_zero) {
      dispatch_floating(real.dtype(), "volume", [&](auto real_zero) {
        using Real = decltype(real_zero);
        const auto* in = from.data<decltype(from_zero)>();
        auto* out = real.mutable_data<Real>();
        for (int64_t b = 0; b < blocks; ++b) {
          int64_t at = 0, rest = b;  // the block's place in the tables of all
          int64_t stride = 1;
          for (int axis = scaling.axes - 1; axis >= 0; --axis) {
            const int64_t index = first[axis] + rest % leading[axis] * (step.dim() > 0 ? step[axis] : 1);
            rest /= leading[axis];
            at += index * stride;
            stride *= info.shape[axis];
          }
          const double min = scaling.min[static_cast<size_t>(at)], max = scaling.max[static_cast<size_t>(at)];
          const double range = scaling.high - scaling.low;
          for (int64_t i = b * block; i < (b + 1) * block; ++i) {
            const double share = range == 0 ? 0 : (static_cast<double>(in[i]) - scaling.low) / range;
            out[i] = static_cast<Real>(share * (max - min) + min);
          }
        }
      });
    });
  }
};

// The least or the largest real values: a number, or one for each index of the leading axes. What counts is
// the shape of the dataset; its attribute dimorder may be a left-over.
std::vector<double> read_limits(const Minc& volume, const std::string& name, double otherwise, int& axes) {
  axes = 0;
  const std::string path = "/minc-2.0/image/0/" + name;
  if (!volume.file.contains(path)) return {otherwise};
  const Hdf5Dataset dataset = volume.file.open_dataset(path);
  const Shape& shape = dataset.info().shape;
  axes = shape.dim();
  bool fits = !dataset.info().empty && dataset.info().kind == Hdf5Info::Kind::number &&
              axes <= volume.info.shape.dim();
  for (int axis = 0; fits && axis < axes; ++axis) fits = shape[axis] == volume.info.shape[axis];
  // One element stands for all.
  const bool is_scalar = !fits && shape.numel() == 1 && dataset.info().kind == Hdf5Info::Kind::number;
  check(fits || is_scalar, Error::Kind::File, "[volume] ", volume.file.path(), ": '", path,
        "' must be a number or have the leading axes of ", volume.info.shape, ", got ", dataset.info().type,
        " ", shape);
  Shape first = shape;
  std::fill_n(&first[0], first.dim(), 0);
  auto values = dataset.read(first, shape, f64).to_vector<double>();
  if (is_scalar) axes = 0;
  return values;
}

void find_scaling(Minc& volume) {
  const Hdf5Info& stored = volume.info.stored;
  Scaling& scaling = volume.scaling;
  if (stored.kind != Hdf5Info::Kind::number || is_floating(stored.dtype) || stored.dtype == boolean) return;
  scaling.applies = true;
  std::tie(scaling.low, scaling.high) = range_of(stored);
  const auto range = numbers(volume.file, image_path, "valid_range");
  if (range.size() == 2) {
    scaling.low = std::min(range[0], range[1]);
    scaling.high = std::max(range[0], range[1]);
  } else {
    scaling.low = number(volume.file, image_path, "valid_min").value_or(scaling.low);
    scaling.high = number(volume.file, image_path, "valid_max").value_or(scaling.high);
  }
  int min_axes = 0, max_axes = 0;
  scaling.min = read_limits(volume, "image-min", 0, min_axes);
  scaling.max = read_limits(volume, "image-max", 1, max_axes);
  scaling.axes = std::max(min_axes, max_axes);
  // A single number beside a table holds for all of it.
  const size_t entries = std::max(scaling.min.size(), scaling.max.size());
  if (scaling.min.size() == 1) scaling.min.resize(entries, scaling.min[0]);
  if (scaling.max.size() == 1) scaling.max.resize(entries, scaling.max[0]);
  check(scaling.min.size() == scaling.max.size(), Error::Kind::File, "[volume] ", volume.file.path(),
        ": image-min and image-max must have one shape, got ", scaling.min.size(), " and ",
        scaling.max.size(), " numbers");
  volume.add("scaling", "stored " + to_text(scaling.low) + " to " + to_text(scaling.high) + " are " +
                            (entries == 1 ? to_text(scaling.min[0]) + " to " + to_text(scaling.max[0])
                                          : std::to_string(entries) + " ranges, an own one for each slice"));
}

void find_axes(Minc& volume) {
  VolumeInfo& info = volume.info;
  std::vector<std::string> names;
  std::istringstream order(text(volume.file, image_path, "dimorder"));
  for (std::string name; std::getline(order, name, ',');) names.push_back(name);
  if (names.empty()) return;
  check(names.size() == info.axes.size(), Error::Kind::File, "[volume] ", volume.file.path(), ": '",
        image_path, "' has ", info.axes.size(), " axes, but its dimorder names ", names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    VolumeAxis& axis = info.axes[i];
    axis.name = printable(names[i]);
    const std::string path = "/minc-2.0/dimensions/" + names[i];
    if (axis.name.find('/') != std::string::npos || !volume.file.contains(path)) continue;
    axis.unit = printable(text(volume.file, path, "units"));
    axis.start = number(volume.file, path, "start").value_or(0);
    if (!text(volume.file, path, "spacing").starts_with("irregular"))
      axis.step = number(volume.file, path, "step").value_or(1);
    const size_t space = std::string("xyz").find(axis.name[0]);
    if (space == std::string::npos || axis.name.substr(1) != "space") continue;
    std::array<double, 3> direction = {};
    direction[space] = 1;
    const auto cosines = numbers(volume.file, path, "direction_cosines");
    if (cosines.size() == 3) std::copy(cosines.begin(), cosines.end(), direction.begin());
    axis.direction = direction;
  }
}

}  // namespace

bool is_minc2(const Hdf5File& file) { return file.contains("minc-2.0"); }

std::shared_ptr<const Volume::Source> open_minc2(Hdf5File file, const VolumeOptions& options) {
  check(file.contains(image_path), Error::Kind::File, "[volume] ", file.path(), ": a MINC2 file without '",
        image_path, "'");
  auto volume = std::make_shared<Minc>(std::move(file), image_path, options);
  volume->info.layout = VolumeLayout::minc2;
  volume->info.description = options.raw ? "MINC2, as stored" : "MINC2, real values";
  find_axes(*volume);
  if (!options.raw) find_scaling(*volume);
  for (const char* field : {"minc_version", "ident", "history"})
    volume->add(field, text(volume->file, "/minc-2.0", field));
  constexpr std::pair<const char*, const char*> known[] = {{"patient", "full_name"},
                                                           {"patient", "identification"},
                                                           {"study", "study_id"},
                                                           {"study", "modality"},
                                                           {"study", "manufacturer"},
                                                           {"study", "device_model"},
                                                           {"acquisition", "scanning_sequence"},
                                                           {"acquisition", "repetition_time"},
                                                           {"acquisition", "echo_time"},
                                                           {"acquisition", "flip_angle"}};
  for (const auto& [group, field] : known) {
    const std::string path = std::string("/minc-2.0/info/") + group;
    if (!volume->file.contains(path)) continue;
    if (const auto value = volume->file.find_attribute(path, field))
      volume->add(std::string(group) + " " + field, to_text(*value));
  }
  return volume;
}

}  // namespace torus
