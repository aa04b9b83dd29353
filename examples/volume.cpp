// What is in an HDF5 file of MRI: layout, header, pictures; exports it, and vets it.
#include <CLI/CLI.hpp>
#include <cmath>
#include <iostream>

#include "picture.h"
#include "torus/torus.h"
#include "verify.h"
#include "volume_flags.h"

using namespace torus;

namespace {

std::string in_bytes(double bytes) {
  const char* units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 4; ++unit) bytes /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
  return text;
}

// Headers come from strangers: one line, not too long.
std::string shown(const std::string& text) {
  constexpr size_t most = 160;
  return printable(text.size() > most ? text.substr(0, most) + " ..." : text);
}

void print_info(const Volume& volume) {
  const VolumeInfo& info = volume.info();
  const auto line = [](const char* title, const std::string& text) {
    std::printf("%-12s %s\n", shown(title).c_str(), shown(text).c_str());
  };
  std::ostringstream shape;
  shape << info.shape << (info.is_complex ? " complex:" : ":");
  for (const auto& axis : info.axes) shape << " " << axis.name;
  line("file", volume.path());
  line("layout", info.description);
  line("dataset", info.dataset);
  line("shape", shape.str());
  line("type", info.stored.type);

  const double element = static_cast<double>(info.stored.element_bytes);
  if (info.stored.chunk.dim() == 0) {
    line("chunks", "none");
  } else {
    std::ostringstream text;
    const double chunk = static_cast<double>(info.stored.chunk.numel()) * element;
    text << info.stored.chunk << ", " << in_bytes(chunk);
    const Shape &whole = info.stored.shape, &part = info.stored.chunk;
    if (whole.dim() > 1 && whole.numel() > 0) {
      int64_t met = 1, slice = 1;
      for (int axis = 1; axis < whole.dim(); ++axis) {
        met *= (whole[axis] + part[axis] - 1) / part[axis];
        slice *= whole[axis];
      }
      const double times = static_cast<double>(met) * chunk / (static_cast<double>(slice) * element);
      text << "; a slice of the first axis meets " << met << " of them";
      if (times > 2) {
        text << ", ";
        text.precision(3);
        text << times << " times its own bytes: read slices that are near each other together";
      }
    }
    line("chunks", text.str());
  }
  std::string filters;
  for (const auto& filter : info.stored.filters)
    filters +=
        (filters.empty() ? "" : ", ") + filter.name + (filter.available ? "" : " (not available here)");
  line("filters", filters.empty() ? "none" : filters);
  line("stored", in_bytes(static_cast<double>(info.stored.stored_bytes)) + " for " +
                     in_bytes(static_cast<double>(info.stored.shape.numel()) * element));
  for (const auto& axis : info.axes) {
    if (axis.unit.empty() && !axis.direction) continue;
    std::ostringstream text;
    text << axis.size;
    if (axis.step)
      text << ", step " << *axis.step << " " << axis.unit << ", from " << axis.start;
    else
      text << ", irregular";
    if (axis.direction)
      text << ", towards (" << (*axis.direction)[0] << ", " << (*axis.direction)[1] << ", "
           << (*axis.direction)[2] << ")";
    line(axis.name.c_str(), text.str());
  }
  for (const auto& [field, value] : info.fields)
    std::printf("  %s: %s\n", shown(field).c_str(), shown(value).c_str());
}

// -------------------------------------------------------------------------------------------------- pictures

struct Image {
  int64_t height = 0, width = 0;
  std::vector<double> values;
};

// The axes that pictures show, and where the others stand.
class Pictures {
 public:
  explicit Pictures(const Volume& volume) : volume_(volume), at_(volume.info().axes.size(), 0) {
    const auto& axes = volume.info().axes;
    for (size_t i = 0; i < axes.size(); ++i)
      if (axes[i].direction) shown_.push_back(static_cast<int>(i));
    // Images as radiologists see them; z, y, x whatever the order in the file.
    is_world_ = shown_.size() == 3;
    if (is_world_) {
      std::sort(shown_.begin(), shown_.end(),
                [&](int a, int b) { return axes[size_t(a)].name > axes[size_t(b)].name; });
    } else {
      // The last three that are no coils and longer than 1; fewer axes make one picture.
      shown_.clear();
      for (size_t i = axes.size(); i-- > 0 && shown_.size() < 3;)
        if (axes[i].name == "coil")
          coil_ = static_cast<int>(i);
        else if (axes[i].size > 1)
          shown_.insert(shown_.begin(), static_cast<int>(i));
    }
    check(shown_.size() >= 2 && volume.shape().numel() > 0, Error::Kind::Value, "--png: ", volume.path(),
          ": no two axes longer than 1 to draw");
    for (const int axis : shown_) at_[size_t(axis)] = axes[size_t(axis)].size / 2;
    is_kspace_ =
        volume.info().layout == VolumeLayout::ismrmrd || volume.info().layout == VolumeLayout::fastmri;
  }

  // "90" or "axis=90"; returns the axis.
  int place(const std::string& text) {
    const size_t equals = text.find('=');
    const std::string axis_name = equals == std::string::npos ? "" : text.substr(0, equals);
    const std::string digits = equals == std::string::npos ? text : text.substr(equals + 1);
    int axis = shown_[0];
    const auto& axes = volume_.info().axes;
    if (!axis_name.empty()) {
      const auto found =
          std::find_if(axes.begin(), axes.end(), [&](const VolumeAxis& a) { return a.name == axis_name; });
      check(found != axes.end(), Error::Kind::Value, "--slice: no axis '", axis_name, "' in ",
            volume_.path());
      axis = static_cast<int>(found - axes.begin());
    }
    const int64_t size = axes[size_t(axis)].size;
    check(!digits.empty() && digits.size() < 10 &&
              digits.find_first_not_of("0123456789") == std::string::npos && std::stoll(digits) < size,
          Error::Kind::Value, "--slice: expected AXIS=INDEX with an index from 0 to ", size - 1, " for '",
          axes[size_t(axis)].name, "', got ", text);
    at_[size_t(axis)] = std::stoll(digits);
    return axis;
  }

  bool shows(int axis) const { return std::find(shown_.begin(), shown_.end(), axis) != shown_.end(); }

  // All planes through the place, side by side.
  std::vector<Image> planes() const {
    if (shown_.size() == 2) return {plane(shown_[0], shown_[1])};
    return {plane(shown_[1], shown_[2]), plane(shown_[0], shown_[2]), plane(shown_[0], shown_[1])};
  }
  // The one across an axis.
  Image across(int axis) const {
    std::vector<int> rest;
    for (const int other : shown_)
      if (other != axis) rest.push_back(other);
    return plane(rest[rest.size() - 2], rest.back());
  }

  void write(const std::vector<Image>& images, const std::string& path) const {
    std::vector<double> all;
    for (const Image& image : images)
      for (const double v : image.values)
        if (std::isfinite(v)) all.push_back(v);
    double low = 0, high = 1;
    if (!all.empty()) {
      const auto nth = all.begin() + static_cast<int64_t>(0.995 * static_cast<double>(all.size() - 1));
      std::nth_element(all.begin(), nth, all.end());
      high = *nth;
      low = std::min(0., *std::min_element(all.begin(), all.end()));
    }
    const auto grey = [&](double value) {
      if (!std::isfinite(value)) return 0.;
      double share = high > low ? (value - low) / (high - low) : 0;
      if (is_kspace_) share = std::log1p(1000 * std::max(0., share)) / std::log1p(1000);
      return std::clamp(share, 0., 1.) * 255;
    };
    constexpr int64_t gap = 4;
    int64_t height = 0, width = -gap;
    for (const Image& image : images) {
      height = std::max(height, image.height);
      width += image.width + gap;
    }
    std::vector<unsigned char> pixels(static_cast<size_t>(height * width), 0);
    int64_t left = 0;
    for (const Image& image : images) {
      for (int64_t y = 0; y < image.height; ++y)
        for (int64_t x = 0; x < image.width; ++x)
          pixels[static_cast<size_t>((y + (height - image.height) / 2) * width + left + x)] =
              static_cast<unsigned char>(
                  std::lround(grey(image.values[static_cast<size_t>(y * image.width + x)])));
      left += image.width + gap;
    }
    write_png(path, pixels, static_cast<int>(width), static_cast<int>(height));
    std::printf("wrote %s: %lld x %lld, %s%s, white is %g\n", printable(path).c_str(),
                static_cast<long long>(width), static_cast<long long>(height),
                is_kspace_                  ? "logarithm of k-space"
                : volume_.info().is_complex ? "magnitude"
                                            : "values",
                is_world_ ? (std::string(", ") + radiological).c_str() : "", high);
  }

 private:
  // Rows along one axis, columns along another, both thinned out to at most 1024; pixels are square.
  Image plane(int row_axis, int column_axis) const {
    constexpr int64_t most = 1024, least = 256;
    const auto& axes = volume_.info().axes;
    const int rank = volume_.shape().dim();
    Shape first, count, step;
    for (int axis = 0; axis < rank; ++axis) {
      const bool is_shown = axis == row_axis || axis == column_axis;
      const int64_t size = volume_.shape()[axis], by = is_shown ? (size + most - 1) / most : 1;
      first.push_back(is_shown || axis == coil_ ? 0 : at_[size_t(axis)]);
      step.push_back(by);
      count.push_back(is_shown ? (size + by - 1) / by : axis == coil_ ? size : 1);
    }
    Tensor values = volume_.read(first, count, f64, step);
    // [coils, rows, columns, parts]: the root of the sum of squares over coils and parts.
    const int64_t coils = coil_ >= 0 ? count[coil_] : 1, parts = volume_.info().is_complex ? 2 : 1;
    std::vector<int> order;
    if (coil_ >= 0) order.push_back(coil_);
    order.push_back(row_axis);
    order.push_back(column_axis);
    if (parts == 2) order.push_back(rank);
    for (int axis = 0; axis < rank; ++axis)
      if (axis != coil_ && axis != row_axis && axis != column_axis) order.insert(order.begin(), axis);
    values = values.permute(order).contiguous();
    const double* in = values.data<double>();
    const int64_t rows = count[row_axis], columns = count[column_axis];
    std::vector<double> plane(static_cast<size_t>(rows * columns));
    for (int64_t c = 0; c < coils; ++c)
      for (int64_t i = 0; i < rows * columns; ++i)
        for (int64_t p = 0; p < parts; ++p) {
          const double v = in[(c * rows * columns + i) * parts + p];
          plane[static_cast<size_t>(i)] = coils * parts == 1 ? v : plane[static_cast<size_t>(i)] + v * v;
        }
    if (coils * parts > 1)
      for (double& v : plane) v = std::sqrt(v);

    const auto pixel = [&](int axis) {
      const double by = static_cast<double>(step[axis]);
      return is_world_ ? std::abs(axes[size_t(axis)].step.value_or(1)) * by : by;
    };
    const double high = pixel(row_axis), wide = pixel(column_axis), unit = std::min(high, wide);
    const auto scaled = [&](int64_t size, double by) {
      const double ratio = unit > 0 && std::isfinite(by / unit) ? std::min(by / unit, 16.) : 1;
      return std::max<int64_t>(1, std::lround(static_cast<double>(size) * ratio));
    };
    Image image{scaled(rows, high), scaled(columns, wide), {}};
    const int64_t zoom = std::max<int64_t>(1, least / std::max(image.height, image.width));
    image.height *= zoom;
    image.width *= zoom;
    const auto flips = [&](int axis) { return is_world_ && axes[size_t(axis)].step.value_or(1) > 0; };
    for (int64_t y = 0; y < image.height; ++y)
      for (int64_t x = 0; x < image.width; ++x) {
        int64_t row = y * rows / image.height, column = x * columns / image.width;
        if (flips(row_axis)) row = rows - 1 - row;
        if (flips(column_axis)) column = columns - 1 - column;
        image.values.push_back(plane[static_cast<size_t>(row * columns + column)]);
      }
    return image;
  }

  const Volume& volume_;
  std::vector<int> shown_;
  std::vector<int64_t> at_;
  int coil_ = -1;
  bool is_world_ = false, is_kspace_ = false;
};

// ---------------------------------------------------------------------------------------------------- export

// Writes "volume" and what its header says, in pieces of about 64 MiB.
void export_volume(const Volume& volume, const std::string& path, DType dtype) {
  const VolumeInfo& info = volume.info();
  write_atomically(path, [&](const std::string& temporary) {
    Hdf5File file = Hdf5File::create(temporary);
    Shape shape = info.shape;
    if (info.is_complex) shape.push_back(2);
    file.create_dataset("volume", shape, dtype);
    if (shape.dim() == 0) {
      file.write_box("volume", {}, volume.read(dtype));
    } else if (shape.numel() > 0) {
      Shape first = info.shape, count = info.shape, at = shape;
      std::fill_n(&first[0], first.dim(), 0);
      std::fill_n(&at[0], at.dim(), 0);
      const int64_t slice = shape.numel() / shape[0] * static_cast<int64_t>(size_of(dtype));
      const int64_t chunk = volume.chunk()[0];  // whole chunks, so that none is unpacked twice
      const int64_t rows = std::max<int64_t>(1, (int64_t{64} << 20) / std::max<int64_t>(1, slice));
      const int64_t step = rows > chunk ? rows / chunk * chunk : rows;
      for (; first[0] < shape[0]; first[0] += step) {
        count[0] = std::min(step, shape[0] - first[0]);
        at[0] = first[0];
        file.write_box("volume", at, volume.read(first, count, dtype));
      }
    }
    std::vector<std::string> names, units;
    std::vector<double> steps, starts, directions;
    for (const auto& axis : info.axes) {
      names.push_back(axis.name);
      units.push_back(axis.unit);
      steps.push_back(axis.step.value_or(NAN));
      starts.push_back(axis.start);
      for (size_t k = 0; k < 3; ++k) directions.push_back(axis.direction ? (*axis.direction)[k] : NAN);
    }
    file.set_attribute("volume", "layout", info.description);
    file.set_attribute("volume", "source", volume.path() + ":" + info.dataset);
    if (!names.empty()) {
      file.set_attribute("volume", "axes", names);
      file.set_attribute("volume", "units", units);
      file.set_attribute("volume", "steps", steps);
      file.set_attribute("volume", "starts", starts);
      file.set_attribute("volume", "directions", directions);
    }
    for (const auto& [field, value] : info.fields)
      file.set_attribute("volume", "header: " + field, value.substr(0, 4096));
    file.close();
  });
  std::printf("wrote %s: 'volume', %s\n", printable(path).c_str(), name(dtype));
}

int run(int argc, char** argv) {
  CLI::App app{
      "Says what is in an HDF5 file: fastMRI, ISMRMRD, MINC2, or any dataset of numbers. Never writes to "
      "it.\n"
      "It reads and draws; nothing is computed on a device, so that there is no --device.\n"
      "Examples:\n"
      "  volume brain.mnc --png brain.png\n"
      "  volume brain.mnc --slice yspace=90 --png slice.png\n"
      "  volume scan.h5 --dataset /dataset/image_0/data --export image.h5\n"
      "  volume stranger.h5 --verify"};
  std::string path, png, exported, dtype = "f32";
  std::vector<std::string> slices;
  VolumeFlags reading;
  bool verify = false;
  int64_t memory = 4096, seconds = 600;
  app.add_option("FILE", path, "the file")->required();
  for (Flag& flag : reading.flags()) flag.add_to(app);
  reading.add_switches(app);
  auto* draw = app.add_option("--png", png, "draw the three planes through the middle into a PNG file");
  app.add_option("--slice", slices, "INDEX or AXIS=INDEX: draw this slice; may be repeated for further axes");
  auto* write = app.add_option("--export", exported, "write the volume into a plain HDF5 file");
  app.add_option("--dtype", dtype, "f32 or f64, of what is exported")->capture_default_str()->needs(write);
  auto* all = app.add_flag("--verify", verify,
                           "read all of the file in a process with limits; says what cannot be read")
                  ->excludes(draw)
                  ->excludes(write)
                  ->excludes(app.get_option("--dataset"));
  app.add_option("--memory", memory, "MiB that --verify may take")->capture_default_str()->needs(all);
  app.add_option("--seconds", seconds, "that --verify may take")->capture_default_str()->needs(all);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    fail(Error::Kind::Value, "volume: ", error.what());
  }
  check(dtype == "f32" || dtype == "f64", Error::Kind::Value, "--dtype: expected f32 or f64, got ", dtype);
  check(slices.empty() || !png.empty(), Error::Kind::Value, "--slice: expected --png FILE to draw it into");
  check(memory >= 64 && memory <= 1 << 20 && seconds >= 1 && seconds <= 1 << 20, Error::Kind::Value,
        "--memory, --seconds: expected at least 64 MiB and 1 s, got ", memory, " and ", seconds);

  const VolumeOptions options = reading.options();
  if (verify) return verify_file(path, options, {memory << 20, seconds}) == 0 ? 0 : 1;
  const Volume volume = open_volume(path, options);
  print_info(volume);
  if (!png.empty()) {
    // Of fastMRI the target shows more than k-space.
    const auto& fastmri = volume.info().fastmri;
    const Volume drawn = fastmri && !fastmri->target.empty()
                             ? open_volume(path, {.dataset = fastmri->target, .trust = options.trust})
                             : volume;
    Pictures pictures(drawn);
    int across = -1;
    for (const std::string& slice : slices) {
      const int axis = pictures.place(slice);
      if (across < 0 || pictures.shows(axis)) across = axis;
    }
    pictures.write(slices.empty() ? pictures.planes() : std::vector<Image>{pictures.across(across)}, png);
  }
  if (!exported.empty()) export_volume(volume, exported, dtype == "f32" ? f32 : f64);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::cout << std::flush;
    std::cerr << printable(error.what()) << "\n";
    return 1;
  }
}
