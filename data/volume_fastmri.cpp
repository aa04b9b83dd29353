// fastMRI: https://github.com/facebookresearch/fastMRI, fastmri/data/README.md. Relatives with the same keys,
// such as M4Raw, are read too: no field of the header is required.
#include <algorithm>

#include "torus/data/volume_source.h"

namespace torus {

bool is_fastmri(const Hdf5File& file) {
  if (!file.contains("kspace")) return false;
  const auto entries = file.list("/");
  const auto found =
      std::find_if(entries.begin(), entries.end(), [](const auto& e) { return e.name == "kspace"; });
  if (found == entries.end() || found->is_group) return false;
  const Hdf5Info info = file.describe("kspace");
  return info.kind == Hdf5Info::Kind::complex && (info.shape.dim() == 3 || info.shape.dim() == 4);
}

std::shared_ptr<const Volume::Source> open_fastmri(Hdf5File opened, const VolumeOptions& options) {
  auto source = std::make_shared<StoredVolume>(std::move(opened), "kspace", options);
  const Hdf5File& file = source->file;
  VolumeInfo& info = source->info;
  FastMri header;
  header.is_multicoil = info.shape.dim() == 4;
  // The published code takes the emulated single coil's own reconstruction where there is one.
  for (const char* target : {"reconstruction_rss", "reconstruction_esc"})
    if (file.contains(target)) header.target = target;
  if (header.is_multicoil && file.contains("reconstruction_rss")) header.target = "reconstruction_rss";
  header.is_test = header.target.empty();

  info.layout = VolumeLayout::fastmri;
  info.description = std::string("fastMRI, ") + (header.is_multicoil ? "multi-coil" : "single-coil") +
                     (header.is_test ? ", to test: no target" : ", to train on: target " + header.target);
  const std::vector<std::string> names = header.is_multicoil
                                             ? std::vector<std::string>{"slice", "coil", "height", "width"}
                                             : std::vector<std::string>{"slice", "height", "width"};
  for (size_t axis = 0; axis < names.size(); ++axis) info.axes[axis].name = names[axis];

  const auto attribute = [&](const char* field) -> std::optional<double> {
    const auto value = file.find_attribute("/", field);
    if (!value) return std::nullopt;
    if (const auto* number = std::get_if<double>(&*value)) return *number;
    if (const auto* number = std::get_if<int64_t>(&*value)) return static_cast<double>(*number);
    if (const auto* text = std::get_if<std::string>(&*value)) return to_number(*text);
    return std::nullopt;
  };
  const auto count = [&](const char* field) -> std::optional<int64_t> {
    const auto value = attribute(field);
    if (!value || !(*value >= 0 && *value < 1e9)) return std::nullopt;
    return static_cast<int64_t>(*value);
  };
  header.max = attribute("max");
  header.norm = attribute("norm");
  header.acceleration = count("acceleration");
  header.num_low_frequencies = count("num_low_frequency");
  for (const std::string& field : file.attributes("/"))
    if (const auto value = file.find_attribute("/", field)) source->add(field, to_text(*value));

  if (file.contains("ismrmrd_header")) {
    const XmlElement xml = parse_xml(file.read_text("ismrmrd_header"));
    const XmlElement* encoding = xml.child("encoding");
    add_ismrmrd_fields(*source, xml, encoding);
    if (encoding) {
      for (size_t i = 0; i < 3; ++i) {
        const std::string axis(1, "xyz"[i]);
        header.encoded[i] = to_integer(encoding->at("encodedSpace/matrixSize/" + axis), 0);
        header.recon[i] = to_integer(encoding->at("reconSpace/matrixSize/" + axis), 0);
      }
      const std::string limits = "encodingLimits/kspace_encoding_step_1/";
      const int64_t center = to_integer(encoding->at(limits + "center"), -1),
                    maximum = to_integer(encoding->at(limits + "maximum"), -1);
      if (center >= 0 && maximum >= 0 && header.encoded[1] > 0) {
        header.pad_left = header.encoded[1] / 2 - center;
        header.pad_right = header.pad_left + maximum + 1;
        source->add("columns that were encoded",
                    std::to_string(header.pad_left) + " to " + std::to_string(header.pad_right - 1));
      }
    }
  }
  if (file.contains("mask")) {
    const Hdf5Dataset mask = file.open_dataset("mask");
    const int64_t width = info.shape.back();
    check(mask.info().kind == Hdf5Info::Kind::number && !mask.info().empty &&
              mask.info().shape.numel() == width,
          Error::Kind::File, "[volume] ", file.path(), ": 'mask' must have ", width,
          " numbers, the width of kspace, got ", mask.info().type, " ", mask.info().shape);
    Shape first = mask.info().shape;
    std::fill_n(&first[0], first.dim(), 0);
    header.mask = mask.read(first, mask.info().shape, mask.info().dtype == boolean ? boolean : f64)
                      .to(f32)
                      .reshape({width});
    const auto values = header.mask.to_vector<float>();
    source->add("columns sampled",
                std::to_string(std::count_if(values.begin(), values.end(), [](float v) { return v != 0; })) +
                    " of " + std::to_string(width));
  }
  info.fastmri = std::move(header);
  return source;
}

}  // namespace torus
