#include "torus/data/volume.h"

#include <algorithm>
#include <charconv>
#include <sstream>

#include "torus/data/volume_source.h"

namespace torus {

const char* name(VolumeLayout layout) {
  constexpr const char* names[] = {"fastMRI", "ISMRMRD", "MINC2", "a dataset"};
  return names[static_cast<int>(layout)];
}

// --------------------------------------------------------------------------------------------------- volumes

const VolumeInfo& Volume::info() const { return source_->info; }
const std::string& Volume::path() const { return source_->file.path(); }
void Volume::release() const { source_->file.release(); }

Shape Volume::chunk() const {
  Shape result = info().stored.chunk;
  if (result.dim() != shape().dim()) {
    result = shape();
    std::fill_n(&result[0], result.dim(), 1);
  }
  return result;
}

void Volume::read_into(Tensor& into, const Shape& first, const Shape& count, const Shape& step) const {
  const Shape& all = shape();
  bool inside =
      first.dim() == all.dim() && count.dim() == all.dim() && (step.dim() == 0 || step.dim() == all.dim());
  for (int axis = 0; inside && axis < all.dim(); ++axis) {
    const int64_t by = step.dim() == 0 ? 1 : step[axis];
    inside = by >= 1 && first[axis] >= 0 && count[axis] >= 0 && first[axis] <= all[axis] &&
             (count[axis] == 0 ||
              (first[axis] < all[axis] && count[axis] - 1 <= (all[axis] - 1 - first[axis]) / by));
  }
  check(inside, Error::Kind::Shape, "[volume] ", path(), ": '", printable(info().dataset), "' has shape ",
        all, "; no box of ", count, " begins at ", first, " in it");
  check(into.defined(), Error::Kind::Value, "[volume] the tensor to read into is undefined");
  check(into.dtype() == f32 || into.dtype() == f64, Error::Kind::DType, "[volume] reads f32 or f64, not ",
        into.dtype());
  check(into.numel() == count.numel() * (info().is_complex ? 2 : 1), Error::Kind::Shape, "[volume] a box of ",
        count, info().is_complex ? " complex numbers" : "", " does not fit into ", into.shape());
  check(into.is_contiguous() && into.device() == cpu, Error::Kind::Value,
        "[volume] expected a contiguous tensor on the CPU to read into");
  if (into.numel() > 0) source_->read(into, first, count, step);
}

Tensor Volume::read(const Shape& first, const Shape& count, DType dtype, const Shape& step) const {
  // Checked before memory is asked for: a box is no larger than the volume.
  for (int axis = 0; axis < std::min(count.dim(), shape().dim()); ++axis)
    check(count[axis] >= 0 && count[axis] <= shape()[axis], Error::Kind::Shape, "[volume] ", path(), ": '",
          printable(info().dataset), "' has shape ", shape(), "; no box of ", count, " begins at ", first,
          " in it");
  Shape result_shape = count;
  if (info().is_complex) result_shape.push_back(2);
  Tensor result = Tensor::empty(result_shape, dtype);
  read_into(result, first, count, step);
  return result;
}

Tensor Volume::read(DType dtype) const {
  Shape first = shape();
  std::fill_n(&first[0], first.dim(), 0);
  return read(first, shape(), dtype);
}

Tensor Volume::slice(int64_t index, DType dtype) const {
  check(shape().dim() > 0, Error::Kind::Shape, "[volume] ", path(), ": a scalar has no slices");
  Shape first = shape(), count = shape();
  std::fill_n(&first[0], first.dim(), 0);
  first[0] = index;
  count[0] = 1;
  return read(first, count, dtype).select(0, 0);
}

std::array<double, 3> VolumeInfo::world(const std::vector<double>& index) const {
  check(index.size() == axes.size(), Error::Kind::Value, "[volume] world: expected ", axes.size(),
        " indices, got ", index.size());
  std::array<double, 3> result = {};
  bool any = false;
  for (size_t i = 0; i < axes.size(); ++i) {
    const VolumeAxis& axis = axes[i];
    if (!axis.direction) continue;
    check(axis.step.has_value(), Error::Kind::Value, "[volume] world: the axis '", axis.name,
          "' is irregular");
    any = true;
    for (size_t k = 0; k < 3; ++k) result[k] += (*axis.direction)[k] * (axis.start + *axis.step * index[i]);
  }
  check(any, Error::Kind::Value, "[volume] world: '", dataset, "' does not say where it lies in the world");
  return result;
}

// -------------------------------------------------------------------------------------- what layouts share

std::string to_text(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

std::string to_text(const Hdf5Value& value) {
  const auto one = [](const auto& element) -> std::string {
    if constexpr (std::is_same_v<std::decay_t<decltype(element)>, std::string>)
      return element;
    else if constexpr (std::is_integral_v<std::decay_t<decltype(element)>>)
      return std::to_string(element);
    else
      return to_text(element);
  };
  return std::visit(
      [&](const auto& held) -> std::string {
        if constexpr (requires { held.begin(); } &&
                      !std::is_same_v<std::decay_t<decltype(held)>, std::string>) {
          constexpr size_t most = 8;
          std::string text;
          for (size_t i = 0; i < std::min(held.size(), most); ++i) {
            if (i > 0) text += ' ';
            text += one(held[i]);
          }
          return held.size() > most ? text + " ..." : text;
        } else {
          return one(held);
        }
      },
      value);
}

int64_t to_integer(const std::string& text, int64_t otherwise) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  constexpr int64_t most = 999999999;
  return error == std::errc() && end != text.data() && std::abs(value) <= most ? value : otherwise;
}

std::optional<double> to_number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

void Volume::Source::add(const std::string& field, const std::string& value) {
  if (!value.empty()) info.fields.emplace_back(field, value);
}

void add_ismrmrd_fields(Volume::Source& source, const XmlElement& header, const XmlElement* encoding) {
  constexpr std::pair<const char*, const char*> known[] = {
      {"protocol", "measurementInformation/protocolName"},
      {"system", "acquisitionSystemInformation/systemVendor"},
      {"model", "acquisitionSystemInformation/systemModel"},
      {"field strength (T)", "acquisitionSystemInformation/systemFieldStrength_T"},
      {"receiver channels", "acquisitionSystemInformation/receiverChannels"},
      {"institution", "acquisitionSystemInformation/institutionName"},
      {"resonance frequency (Hz)", "experimentalConditions/H1resonanceFrequency_Hz"},
      {"TR (ms)", "sequenceParameters/TR"},
      {"TE (ms)", "sequenceParameters/TE"},
      {"TI (ms)", "sequenceParameters/TI"},
      {"flip angle (degrees)", "sequenceParameters/flipAngle_deg"},
      {"sequence", "sequenceParameters/sequence_type"}};
  for (const auto& [field, path] : known) source.add(field, header.at(path));
  if (!encoding) return;
  source.info.trajectory = encoding->at("trajectory");
  source.add("trajectory", source.info.trajectory);
  for (const char* space : {"encodedSpace", "reconSpace"}) {
    const auto triple = [&](const std::string& what) {
      const std::string start = std::string(space).append("/").append(what).append("/");
      const std::string x = encoding->at(start + "x"), y = encoding->at(start + "y"),
                        z = encoding->at(start + "z");
      return x.empty() && y.empty() && z.empty() ? "" : x + " x " + y + " x " + z;
    };
    const std::string title = std::string(space) == "encodedSpace" ? "encoded" : "reconstructed";
    source.add(title + " matrix (x, y, z)", triple("matrixSize"));
    source.add(title + " field of view (mm)", triple("fieldOfView_mm"));
  }
}

StoredVolume::StoredVolume(Hdf5File opened, const std::string& dataset, const VolumeOptions& options)
    : Source(std::move(opened)), stored(file.open_dataset(dataset, options.cache_bytes)) {
  info.dataset = dataset;
  info.stored = stored.info();
  info.shape = info.stored.shape;
  info.is_complex = info.stored.kind == Hdf5Info::Kind::complex;
  const auto fail_here = [&](const auto&... parts) {
    fail(Error::Kind::File, "[volume] ", file.path(), ": '", printable(dataset), "' ", parts...);
  };
  if (info.stored.empty) fail_here("is empty");
  if (!info.is_complex && info.stored.kind != Hdf5Info::Kind::number)
    fail_here("holds ", printable(info.stored.type), ", not numbers of up to 64 bits");
  if (info.is_complex && info.shape.dim() == Shape::max_axes)
    fail_here("has ", Shape::max_axes, " axes of complex numbers; a tensor has no room for their parts");
  for (int axis = 0; axis < info.shape.dim(); ++axis)
    info.axes.emplace_back("axis " + std::to_string(axis), info.shape[axis]);
}

void StoredVolume::read(Tensor& into, const Shape& first, const Shape& count, const Shape& step) const {
  stored.read_into(into, first, count, step);
}

// ----------------------------------------------------------------------------------------------- recognition

namespace {

std::shared_ptr<const Volume::Source> open_stored(Hdf5File file, const std::string& dataset,
                                                  const VolumeOptions& options) {
  auto source = std::make_shared<StoredVolume>(std::move(file), dataset, options);
  source->info.description = "a dataset";
  if (const auto labels = source->file.find_attribute(dataset, "DIMENSION_LABELS")) {
    std::vector<std::string> names;
    if (const auto* one = std::get_if<std::string>(&*labels)) names = {*one};
    if (const auto* all = std::get_if<std::vector<std::string>>(&*labels)) names = *all;
    for (size_t axis = 0; names.size() == source->info.axes.size() && axis < names.size(); ++axis)
      if (!names[axis].empty()) source->info.axes[axis].name = printable(names[axis]);
  }
  for (const std::string& attribute : source->file.attributes(dataset))
    if (const auto value = source->file.find_attribute(dataset, attribute))
      source->add(attribute, to_text(*value));
  return source;
}

// What a file of no known layout holds, in one line; and in `arrays` the datasets of numbers.
std::string list_content(const Hdf5File& file, std::vector<std::string>& arrays) {
  constexpr size_t most = 12;
  std::string text;
  size_t datasets = 0;
  for (const auto& entry : file.walk()) {
    if (entry.is_group) continue;
    std::string what;
    try {
      const Hdf5Info info = file.describe(entry.name);
      std::ostringstream shape;
      shape << info.shape;
      what = info.type + " " + shape.str();
      if (!info.empty && (info.kind == Hdf5Info::Kind::number || info.kind == Hdf5Info::Kind::complex))
        arrays.push_back(entry.name);
    } catch (const Error&) {
      what = "unreadable";
    }
    if (++datasets <= most)
      text.append(datasets > 1 ? ", " : "").append(entry.name).append(" (").append(what).append(")");
  }
  if (datasets > most) text += " and " + std::to_string(datasets - most) + " more";
  return datasets == 0 ? "nothing" : printable(text);
}

}  // namespace

VolumeLayout layout_of(const Hdf5File& file) {
  return is_minc2(file)                 ? VolumeLayout::minc2
         : is_fastmri(file)             ? VolumeLayout::fastmri
         : ismrmrd_groups(file).empty() ? VolumeLayout::dataset
                                        : VolumeLayout::ismrmrd;
}

Volume open_volume(const std::string& path, const VolumeOptions& options) {
  Hdf5File file = Hdf5File::open(path, options.trust);
  if (!options.dataset.empty()) return Volume(open_stored(std::move(file), options.dataset, options));
  const VolumeLayout layout = layout_of(file);
  check(options.group.empty() || layout == VolumeLayout::ismrmrd || layout == VolumeLayout::dataset,
        Error::Kind::File, "[volume] ", path, ": this is a ", name(layout),
        " file, not ISMRMRD: it has no group '", options.group, "' of acquisitions");
  if (layout == VolumeLayout::minc2) return Volume(open_minc2(std::move(file), options));
  if (layout == VolumeLayout::fastmri) return Volume(open_fastmri(std::move(file), options));
  if (layout == VolumeLayout::ismrmrd || !options.group.empty())
    return Volume(open_ismrmrd(std::move(file), options));
  std::vector<std::string> arrays;
  const std::string content = list_content(file, arrays);
  if (arrays.size() == 1) return Volume(open_stored(std::move(file), arrays[0], options));
  fail(Error::Kind::File, "[volume] ", path, ": neither fastMRI, ISMRMRD nor MINC2; it holds ", content,
       arrays.empty() ? "" : "; name one of its datasets");
}

}  // namespace torus
