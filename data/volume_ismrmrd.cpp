// ISMRMRD: https://ismrmrd.readthedocs.io/en/latest/mrd_raw_data.html. Writers pack records differently, so
// members are found by name.
//
// The volume is k-space, [counters that vary ..., coil, kz, ky, kx], zero where nothing was measured:
//  * readouts with a flag of `leave_out`, of another encoding space, or without samples or channels are left
//    out; all others must have as many channels;
//  * counters are repetition, set, phase, contrast, average and slice; segment and user counters are not.
//    Of two readouts in one place the later counts;
//  * ky and kz are as in encodedSpace, the encodingLimits' center in the middle, where all readouts fit into
//    that; otherwise they count from 0 to the largest step;
//  * kx is as wide as the longest readout, or, where center_sample is not the middle (partial echoes), as
//    encodedSpace or what it takes to have center_sample in the middle of all; a center_sample of 0 is not
//    said. Along a trajectory readouts begin at 0;
//  * readouts marked as reversed (22) are turned around; center_sample counts after that.
#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <numeric>

#include "torus/data/volume_source.h"

namespace torus {

namespace {

constexpr int reversed_flag = 22;
constexpr const char* counters[] = {"repetition", "set", "phase", "contrast", "average", "slice"};
constexpr size_t counter_count = std::size(counters);

const char* flag_name(int flag) {
  switch (flag) {
    case 19:
      return "noise";
    case 20:
      return "calibration";
    case 21:
      return "calibration and image";
    case 23:
      return "navigator";
    case 24:
      return "phase correction";
    case 26:
      return "high-performance feedback";
    case 27:
      return "dummy";
    case 28:
      return "real-time feedback";
    case 29:
      return "surface-coil correction";
    default:
      return nullptr;
  }
}

struct Readout {
  int64_t place = 0;  // of its line in the volume without coil and kx, row-major
  int64_t record = 0;
  int64_t samples = 0, start = 0;  // and where the first of them lies in kx
  bool is_reversed = false;
};

struct Ismrmrd : Volume::Source {
  Hdf5Dataset records;
  int64_t channels = 0;
  std::vector<Readout> readouts;  // sorted by place, one a place
  bool is_sparse = false;         // nearly all lines were not measured: a damaged counter?

  Ismrmrd(Hdf5File opened, const std::string& group)
      : Source(std::move(opened)), records(file.open_dataset(group + "/data")) {}

  void read(Tensor& into, const Shape& first, const Shape& count, const Shape& step) const override {
    constexpr int64_t many = int64_t{1} << 24;
    check(!is_sparse || into.numel() < many, Error::Kind::File, "[volume] ", file.path(), ": '", info.dataset,
          "' makes ", info.shape, " of ", readouts.size(),
          " readouts; only a file that is trusted may be so sparse");
    // Not Tensor::fill_, whose threads a child of fork does not have.
    dispatch_floating(into.dtype(), "volume", [&](auto zero) {
      auto* out = into.mutable_data<decltype(zero)>();
      std::fill_n(out, into.numel(), zero);
      read_as<decltype(zero)>(out, first, count, step);
    });
  }

 private:
  template <class Real>
  void read_as(Real* out, const Shape& first, const Shape& count, const Shape& step) const {
    // What is asked for, by record, so that the file is read in its own order; with the place in `out` of
    // coil 0, kx 0.
    struct Line {
      const Readout* readout;
      int64_t out;
    };
    std::vector<Line> lines;
    std::vector<int> line_axes(static_cast<size_t>(count.dim()));  // all but coil and kx, the last one first
    std::iota(line_axes.rbegin(), line_axes.rend(), 0);
    line_axes.erase(line_axes.begin() + 3);
    line_axes.erase(line_axes.begin());
    const Shape out_strides = row_major_strides(count);
    int64_t total = 1;
    for (const int axis : line_axes) total *= count[axis];
    for (int64_t i = 0; i < total; ++i) {
      int64_t rest = i, place = 0, place_stride = 1, at = 0;
      for (const int axis : line_axes) {
        const int64_t index = rest % count[axis];
        rest /= count[axis];
        at += index * out_strides[axis];
        place += (first[axis] + index * (step.dim() > 0 ? step[axis] : 1)) * place_stride;
        place_stride *= info.shape[axis];
      }
      const auto found = std::lower_bound(readouts.begin(), readouts.end(), place,
                                          [](const Readout& r, int64_t p) { return r.place < p; });
      if (found != readouts.end() && found->place == place) lines.push_back({&*found, at});
    }
    std::sort(lines.begin(), lines.end(),
              [](const Line& a, const Line& b) { return a.readout->record < b.readout->record; });

    constexpr int64_t most_numbers = int64_t{4} << 20, most_records = 4096;
    for (size_t begin = 0; begin < lines.size();) {
      // Neighbouring records in one go.
      size_t end = begin;
      int64_t numbers = 0;
      std::vector<int64_t> lengths;
      const int64_t from = lines[begin].readout->record;
      while (end < lines.size() && lines[end].readout->record - from < most_records &&
             (end == begin || lines[end].readout->record == lines[end - 1].readout->record + 1) &&
             numbers <= most_numbers)
        numbers += lengths.emplace_back(2 * channels * lines[end++].readout->samples);
      const std::vector<float> data = records.read_lists("data", from, lengths);
      const float* values = data.data();
      for (size_t i = begin; i < end; values += lengths[i++ - begin])
        place_line(*lines[i].readout, values, out + 2 * lines[i].out, first, count, step);
      begin = end;
    }
  }

  template <class Real>
  void place_line(const Readout& readout, const float* values, Real* out, const Shape& first,
                  const Shape& count, const Shape& step) const {
    const int kx = count.dim() - 1, coil = count.dim() - 4;
    const int64_t coil_stride = row_major_strides(count)[coil];
    const int64_t samples = readout.samples;
    for (int64_t c = 0; c < count[coil]; ++c) {
      const int64_t channel = first[coil] + c * (step.dim() > 0 ? step[coil] : 1);
      const float* in = values + 2 * channel * samples;
      Real* row = out + 2 * c * coil_stride;
      for (int64_t x = 0; x < count[kx]; ++x) {
        int64_t sample = first[kx] + x * (step.dim() > 0 ? step[kx] : 1) - readout.start;
        if (sample < 0 || sample >= samples) continue;
        if (readout.is_reversed) sample = samples - 1 - sample;
        row[2 * x] = static_cast<Real>(in[2 * sample]);
        row[2 * x + 1] = static_cast<Real>(in[2 * sample + 1]);
      }
    }
  }
};

std::string pick_group(const Hdf5File& file, const std::vector<std::string>& groups,
                       const std::string& wanted) {
  std::string list;
  for (const std::string& group : groups) {
    if (group == wanted || group == "/" + wanted) return group;
    list += (list.empty() ? "" : ", ") + group;
  }
  check(wanted.empty(), Error::Kind::File, "[volume] ", file.path(), ": no acquisitions in '", wanted,
        "', but in: ", list.empty() ? "no group" : printable(list));
  return groups.back();
}

// How a phase-encoded axis is laid out: its size, and what is added to a step.
std::pair<int64_t, int64_t> layout_of(const XmlElement* encoding, const std::string& matrix,
                                      const std::string& step, int64_t least, int64_t most) {
  const int64_t size = encoding ? to_integer(encoding->at("encodedSpace/matrixSize/" + matrix), 0) : 0;
  const int64_t center =
      encoding ? to_integer(encoding->at("encodingLimits/" + step + "/center"), size / 2) : 0;
  for (const int64_t shift : {size / 2 - center, int64_t{0}})
    if (least + shift >= 0 && most + shift < size) return {size, shift};
  return {most + 1, 0};
}

}  // namespace

std::vector<std::string> ismrmrd_groups(const Hdf5File& file) {
  std::vector<std::string> groups;
  for (const auto& entry : file.list("/")) {
    if (!entry.is_group) continue;
    const std::string data = "/" + entry.name + "/data";
    if (!file.contains(data)) continue;
    try {
      const Hdf5Info info = file.describe(data);
      if (info.kind != Hdf5Info::Kind::records || info.shape.dim() != 1) continue;
      const auto members = file.open_dataset(data).members();
      if (std::find(members.begin(), members.end(), "head/number_of_samples") != members.end())
        groups.push_back("/" + entry.name);
    } catch (const Error&) {
      // A dataset of this name that cannot be described is none of ours.
    }
  }
  return groups;
}

std::shared_ptr<const Volume::Source> open_ismrmrd(Hdf5File opened, const VolumeOptions& options) {
  const auto groups = ismrmrd_groups(opened);
  const std::string group = pick_group(opened, groups, options.group);
  auto volume = std::make_shared<Ismrmrd>(std::move(opened), group);
  VolumeInfo& info = volume->info;
  info.layout = VolumeLayout::ismrmrd;
  info.dataset = group + "/data";
  info.is_complex = true;
  info.stored = volume->records.info();
  if (groups.size() > 1)
    volume->add("acquisitions in the file", std::accumulate(groups.begin() + 1, groups.end(), groups[0],
                                                            [](auto a, auto& b) { return a + ", " + b; }));
  const auto fail_here = [&](const auto&... parts) {
    fail(Error::Kind::File, "[volume] ", volume->file.path(), ": '", printable(info.dataset), "' ", parts...);
  };

  XmlElement xml;
  if (volume->file.contains(group + "/xml")) xml = parse_xml(volume->file.read_text(group + "/xml"));
  const XmlElement* encoding = nullptr;
  int64_t encodings = 0;
  for (const XmlElement& child : xml.children)
    if (child.name == "encoding" && encodings++ == options.encoding) encoding = &child;
  add_ismrmrd_fields(*volume, xml, encoding);

  std::vector<std::string> members = {"head/flags",
                                      "head/number_of_samples",
                                      "head/active_channels",
                                      "head/center_sample",
                                      "head/encoding_space_ref",
                                      "head/trajectory_dimensions",
                                      "head/idx/kspace_encode_step_1",
                                      "head/idx/kspace_encode_step_2"};
  for (const char* counter : counters) members.push_back(std::string("head/idx/") + counter);
  const int64_t total = info.stored.shape[0];
  const auto columns = volume->records.read_members(members, 0, total);
  for (size_t i = 0; i < columns.size(); ++i)
    if (columns[i].dtype() != i64 || columns[i].dim() != 1)
      fail_here("has '", members[i], "' that is no integer");
  const auto column = [&](size_t i) { return columns[i].data<int64_t>(); };

  uint64_t leave_out = 0;
  for (const int flag : options.leave_out) {
    check(flag >= 1 && flag <= 64, Error::Kind::Value,
          "[volume] leave_out: expected flags from 1 to 64, got ", flag);
    leave_out |= uint64_t{1} << (flag - 1);
  }
  std::map<std::string, int64_t> left_out;
  std::map<int, int64_t> kept_flags;
  std::vector<int64_t> used;
  for (int64_t i = 0; i < total; ++i) {
    const auto flags = static_cast<uint64_t>(column(0)[i]);
    if (const uint64_t hit = flags & leave_out) {
      const int flag = std::countr_zero(hit) + 1;
      const char* known = flag_name(flag);
      ++left_out[known ? known : "flag " + std::to_string(flag)];
    } else if (column(1)[i] <= 0 || column(2)[i] <= 0) {
      ++left_out["without samples"];
    } else if (column(4)[i] != options.encoding) {
      ++left_out["of other encoding spaces"];
    } else {
      used.push_back(i);
      for (const int flag : {20, 21, reversed_flag})
        if (flags >> (flag - 1) & 1) ++kept_flags[flag];
    }
  }
  std::string reasons;
  for (const auto& [why, count] : left_out)
    reasons += (reasons.empty() ? ": " : ", ") + std::to_string(count) + " " + why;
  volume->add("readouts", std::to_string(total) + ", of which " +
                              std::to_string(total - static_cast<int64_t>(used.size())) + " are left out" +
                              reasons);
  if (used.empty()) fail_here("has no readouts to make a volume of: ", total, " are left out", reasons);

  // Extents.
  constexpr int64_t most_samples = 65536;
  volume->channels = column(2)[used[0]];
  int64_t width = 0, least[2], most[2], largest[counter_count] = {}, trajectory = 0;
  std::fill_n(least, 2, std::numeric_limits<int64_t>::max());
  std::fill_n(most, 2, 0);
  for (const int64_t i : used) {
    if (column(2)[i] != volume->channels)
      fail_here("has readouts of ", volume->channels, " and of ", column(2)[i], " channels (readout ", i,
                "); leave some out by their flags");
    for (size_t k = 0; k < 2 + counter_count; ++k)
      if (column(6 + k)[i] < 0 || column(6 + k)[i] > most_samples || column(1)[i] > most_samples)
        fail_here("has a counter or a number of samples above ", most_samples, " in readout ", i);
    width = std::max(width, column(1)[i]);
    trajectory = std::max(trajectory, column(5)[i]);
    for (size_t k = 0; k < 2; ++k) {
      least[k] = std::min(least[k], column(6 + k)[i]);
      most[k] = std::max(most[k], column(6 + k)[i]);
    }
    for (size_t k = 0; k < counter_count; ++k) largest[k] = std::max(largest[k], column(8 + k)[i]);
  }
  const auto [ky, ky_shift] = layout_of(encoding, "y", "kspace_encoding_step_1", least[0], most[0]);
  const auto [kz, kz_shift] = layout_of(encoding, "z", "kspace_encoding_step_2", least[1], most[1]);
  const auto center_of = [&](int64_t i) { return column(3)[i] > 0 ? column(3)[i] : column(1)[i] / 2; };
  int64_t needed = 0;
  for (const int64_t i : used) {
    if (center_of(i) > column(1)[i])
      fail_here("has readout ", i, " of ", column(1)[i], " samples, center ", center_of(i));
    needed = std::max({needed, 2 * center_of(i), 2 * (column(1)[i] - center_of(i)) - 1});
  }
  if (trajectory == 0 && needed > width) {
    const int64_t encoded = encoding ? to_integer(encoding->at("encodedSpace/matrixSize/x"), 0) : 0;
    width = encoded >= needed && encoded <= most_samples ? encoded : needed;
  }

  std::vector<size_t> kept;
  for (size_t k = 0; k < counter_count; ++k)
    if (largest[k] > 0) kept.push_back(k);
  if (kept.size() + 5 > Shape::max_axes) {
    std::string names;
    for (const size_t k : kept) names += std::string(names.empty() ? "" : ", ") + counters[k];
    fail_here("has too many counters that vary for one tensor: ", names);
  }
  for (const size_t k : kept) info.axes.emplace_back(counters[k], largest[k] + 1);
  for (const auto& [axis, size] :
       {std::pair{"coil", volume->channels}, {"kz", kz}, {"ky", ky}, {"kx", width}})
    info.axes.emplace_back(axis, size);
  for (const VolumeAxis& axis : info.axes) info.shape.push_back(axis.size);
  check(info.shape.numel() > 0, Error::Kind::File, "[volume] ", volume->file.path(), ": no elements");

  // The place of each readout.
  for (const int64_t i : used) {
    Readout readout{.place = 0,
                    .record = i,
                    .samples = column(1)[i],
                    .start = trajectory > 0 ? 0 : width / 2 - center_of(i),
                    .is_reversed = (static_cast<uint64_t>(column(0)[i]) >> (reversed_flag - 1) & 1) != 0};
    for (const size_t k : kept) readout.place = readout.place * (largest[k] + 1) + column(8 + k)[i];
    readout.place = (readout.place * kz + column(7)[i] + kz_shift) * ky + column(6)[i] + ky_shift;
    volume->readouts.push_back(readout);
  }
  auto& readouts = volume->readouts;
  std::stable_sort(readouts.begin(), readouts.end(),
                   [](const Readout& a, const Readout& b) { return a.place < b.place; });
  size_t last = 0;  // of equal places the last stays
  for (size_t i = 1; i < readouts.size(); ++i) {
    last += readouts[i].place != readouts[last].place;
    readouts[last] = readouts[i];
  }
  const size_t repeated = readouts.size() - last - 1;
  readouts.resize(last + 1);

  const int64_t lines = info.shape.numel() / volume->channels / width;
  constexpr int64_t sparse = 1100;  // as for datasets
  volume->is_sparse = !options.trust.sparse && lines / sparse > static_cast<int64_t>(readouts.size());
  volume->add("lines", std::to_string(readouts.size()) + " measured of " + std::to_string(lines));
  if (repeated > 0)
    volume->add("measured again", std::to_string(repeated) + " lines; the later readout counts");
  for (const auto& [flag, count] : kept_flags)
    volume->add(flag == reversed_flag ? "turned around" : std::string("kept: ") + flag_name(flag),
                std::to_string(count));
  if (trajectory > 0) volume->add("trajectory axes", std::to_string(trajectory));
  if (trajectory > 0 && info.trajectory.empty()) info.trajectory = "unknown";
  info.description = "ISMRMRD, k-space of " + group;
  return volume;
}

}  // namespace torus
