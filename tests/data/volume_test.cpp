#include "torus/data/volume.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <complex>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <numeric>
#include <sstream>
#include <thread>

#include "core/expect_error.h"
#include "core/temporary_folder.h"
#include "data/foreign.h"
#include "torus/core/random.h"

namespace torus {
namespace {

namespace fs = std::filesystem;

std::vector<float> random_numbers(int64_t count, uint64_t seed = 1) {
  Generator generator(seed);
  return randn({count}, 0, 1, f32, generator).to_vector<float>();
}

std::string field(const Volume& volume, const std::string& name) {
  for (const auto& [key, value] : volume.info().fields)
    if (key == name) return value;
  return "none";
}

// Where real files lie beside the source tree, if they do.
std::string shared_file(const std::string& name) {
  const fs::path path = fs::path(TORUS_SOURCE_DIR) / ".." / "shared" / "data" / "mri" / name;
  return fs::exists(path) ? path.string() : "";
}

bool runs(const std::string& command) { return std::system((command + " > /dev/null 2>&1").c_str()) == 0; }

// ----------------------------------------------------------------------------------------------------------
// fastMRI

const char* fastmri_header =
    "<?xml version=\"1.0\"?>\n<ismrmrdHeader xmlns=\"http://www.ismrm.org/ISMRMRD\"><!-- > "
    "--><encoding><encodedSpace>"
    "<matrixSize><x>6</x><y>8</y><z>1</z></matrixSize></encodedSpace><reconSpace><matrixSize><x>4</x><y>4</"
    "y><z>1</z>"
    "</matrixSize></reconSpace><encodingLimits><kspace_encoding_step_1><minimum>0</minimum><maximum>5</"
    "maximum>"
    "<center>3</center></kspace_encoding_step_1></encodingLimits></encoding><sequenceParameters><TR>2.5</TR>"
    "</sequenceParameters></ismrmrdHeader>";

TEST(Volume, FastMri) {
  const TemporaryFolder folder;
  for (const bool multicoil : {false, true})
    for (const bool test : {false, true}) {
      const std::string path = folder / "x.h5";
      const std::vector<hsize_t> shape =
          multicoil ? std::vector<hsize_t>{3, 2, 6, 8} : std::vector<hsize_t>{3, 6, 8};
      const auto parts = random_numbers(multicoil ? 3 * 2 * 6 * 8 * 2 : 3 * 6 * 8 * 2);
      {
        Foreign file(path);
        file.write_complex("kspace", parts, shape);
        file.write_text("ismrmrd_header", fastmri_header, multicoil ? 0 : 1000);
        file.attribute("/", "acquisition", "AXT2");
        if (test) {
          const std::vector<double> mask = {1, 0, 0, 1, 1, 0, 0, 1};
          file.write("mask", mask, {8}, multicoil ? H5T_STD_U8LE : H5T_IEEE_F32LE);
          file.attribute("/", "acceleration", std::vector<double>{4}, H5T_STD_I64LE);
        } else {
          file.write("reconstruction_rss", std::vector<double>(3 * 4 * 4, 1), {3, 4, 4}, H5T_IEEE_F32LE);
          if (!multicoil) file.write("reconstruction_esc", std::vector<double>(3 * 4 * 4, 1), {3, 4, 4});
          if (multicoil)
            file.attribute("/", "max", std::vector<double>{0.25});
          else
            file.attribute("/", "max", "0.25");
        }
      }
      const Volume volume = open_volume(path);
      const VolumeInfo& info = volume.info();
      EXPECT_EQ(info.layout, VolumeLayout::fastmri);
      EXPECT_EQ(info.dataset, "kspace");
      EXPECT_TRUE(info.is_complex);
      EXPECT_EQ(info.stored.type, "complex f32 {r, i}");
      EXPECT_EQ(info.axes.back().name, "width");
      EXPECT_EQ(volume.read().to_vector<float>(), parts);
      EXPECT_EQ(volume.shape().dim(), multicoil ? 4 : 3);
      EXPECT_EQ(volume.slice(1, f64).shape(), multicoil ? (Shape{2, 6, 8, 2}) : (Shape{6, 8, 2}));
      EXPECT_EQ(volume.slice(1).to_vector<float>(),
                std::vector<float>(parts.begin() + static_cast<int64_t>(parts.size()) / 3,
                                   parts.begin() + static_cast<int64_t>(parts.size()) / 3 * 2));
      const FastMri& header = info.fastmri.value();
      EXPECT_EQ(header.is_multicoil, multicoil);
      EXPECT_EQ(header.is_test, test);
      EXPECT_EQ(header.target, test ? "" : multicoil ? "reconstruction_rss" : "reconstruction_esc");
      EXPECT_EQ(header.encoded, (std::array<int64_t, 3>{6, 8, 1}));
      EXPECT_EQ(header.recon, (std::array<int64_t, 3>{4, 4, 1}));
      EXPECT_EQ(header.pad_left, 1);
      EXPECT_EQ(header.pad_right, 7);
      EXPECT_EQ(field(volume, "acquisition"), "AXT2");
      EXPECT_EQ(field(volume, "TR (ms)"), "2.5");
      if (test) {
        EXPECT_EQ(header.mask.to_vector<float>(), (std::vector<float>{1, 0, 0, 1, 1, 0, 0, 1}));
        EXPECT_EQ(header.acceleration.value(), 4);
        EXPECT_FALSE(header.max.has_value());
      } else {
        EXPECT_EQ(header.max.value(), 0.25);
        EXPECT_EQ(open_volume(path, {.dataset = header.target}).shape(), (Shape{3, 4, 4}));
      }
      EXPECT_ERROR(open_volume(path, {.group = "dataset"}), File, "this is a fastMRI file, not ISMRMRD");
    }
}

// ----------------------------------------------------------------------------------------------------------
// ISMRMRD

struct Idx {
  uint16_t kspace_encode_step_1 = 0, kspace_encode_step_2 = 0, average = 0, slice = 0, contrast = 0,
           phase = 0, repetition = 0, set = 0, segment = 0, user[8] = {};
};

struct Head {
  uint16_t version = 1;
  uint64_t flags = 0;
  uint32_t scan_counter = 0;
  uint16_t number_of_samples = 0, active_channels = 0, center_sample = 0, encoding_space_ref = 0,
           trajectory_dimensions = 0;
  float sample_time_us = 5;
  Idx idx;
};

struct Acquisition {
  Head head;
  std::vector<float> data;  // [channel][sample][2]
};

// `packed`: without the gaps of natural alignment.
void write_ismrmrd(Foreign& file, const std::string& group, const std::vector<Acquisition>& acquisitions,
                   bool packed, const std::string& xml) {
  struct Record {
    Head head;
    hvl_t traj, data;
  };
  const hid_t idx = H5Tcreate(H5T_COMPOUND, sizeof(Idx)), head = H5Tcreate(H5T_COMPOUND, sizeof(Head)),
              record = H5Tcreate(H5T_COMPOUND, sizeof(Record)), list = H5Tvlen_create(H5T_NATIVE_FLOAT);
  const hsize_t eight = 8;
  const hid_t users = H5Tarray_create2(H5T_NATIVE_UINT16, 1, &eight);
  const auto u16 = [](hid_t into, const char* name, size_t offset) {
    H5Tinsert(into, name, offset, H5T_NATIVE_UINT16);
  };
  u16(idx, "kspace_encode_step_1", HOFFSET(Idx, kspace_encode_step_1));
  u16(idx, "kspace_encode_step_2", HOFFSET(Idx, kspace_encode_step_2));
  u16(idx, "average", HOFFSET(Idx, average));
  u16(idx, "slice", HOFFSET(Idx, slice));
  u16(idx, "contrast", HOFFSET(Idx, contrast));
  u16(idx, "phase", HOFFSET(Idx, phase));
  u16(idx, "repetition", HOFFSET(Idx, repetition));
  u16(idx, "set", HOFFSET(Idx, set));
  u16(idx, "segment", HOFFSET(Idx, segment));
  H5Tinsert(idx, "user", HOFFSET(Idx, user), users);
  u16(head, "version", HOFFSET(Head, version));
  H5Tinsert(head, "flags", HOFFSET(Head, flags), H5T_NATIVE_UINT64);
  H5Tinsert(head, "scan_counter", HOFFSET(Head, scan_counter), H5T_NATIVE_UINT32);
  u16(head, "number_of_samples", HOFFSET(Head, number_of_samples));
  u16(head, "active_channels", HOFFSET(Head, active_channels));
  u16(head, "center_sample", HOFFSET(Head, center_sample));
  u16(head, "encoding_space_ref", HOFFSET(Head, encoding_space_ref));
  u16(head, "trajectory_dimensions", HOFFSET(Head, trajectory_dimensions));
  H5Tinsert(head, "sample_time_us", HOFFSET(Head, sample_time_us), H5T_NATIVE_FLOAT);
  H5Tinsert(head, "idx", HOFFSET(Head, idx), idx);
  H5Tinsert(record, "head", HOFFSET(Record, head), head);
  H5Tinsert(record, "traj", HOFFSET(Record, traj), list);
  H5Tinsert(record, "data", HOFFSET(Record, data), list);
  std::vector<Record> records;
  for (const Acquisition& a : acquisitions)
    records.push_back({a.head, {0, nullptr}, {a.data.size(), const_cast<float*>(a.data.data())}});
  const hid_t file_type = H5Tcopy(record);
  if (packed) H5Tpack(file_type);
  file.group(group);
  file.write(group + "/data", file_type, record, {records.size()}, records.data(), Foreign::chunked({1}));
  if (!xml.empty()) file.write_text(group + "/xml", xml, packed ? 0 : xml.size() + 5, {1});
  for (const hid_t type : {idx, head, record, list, users, file_type}) H5Tclose(type);
}

Acquisition readout(int64_t step, int64_t repetition, int64_t channels, int64_t samples, uint64_t seed,
                    std::vector<int> flags = {}) {
  Acquisition result;
  result.head.idx.kspace_encode_step_1 = static_cast<uint16_t>(step);
  result.head.idx.repetition = static_cast<uint16_t>(repetition);
  result.head.number_of_samples = static_cast<uint16_t>(samples);
  result.head.active_channels = static_cast<uint16_t>(channels);
  result.head.center_sample = static_cast<uint16_t>(samples / 2);
  for (const int flag : flags) result.head.flags |= uint64_t{1} << (flag - 1);
  result.data = random_numbers(2 * channels * samples, seed);
  return result;
}

std::string header_of(int64_t x, int64_t y, int64_t center) {
  return "<ismrmrdHeader><encoding><encodedSpace><matrixSize><x>" + std::to_string(x) + "</x><y>" +
         std::to_string(y) +
         "</y><z>1</z></matrixSize></encodedSpace><encodingLimits><kspace_encoding_step_1><center>" +
         std::to_string(center) +
         "</center></kspace_encoding_step_1></encodingLimits></encoding></ismrmrdHeader>";
}

std::vector<float> line_of(const Volume& volume, const Shape& at, int64_t coil, int64_t ky) {
  // at: the outer counters
  Shape first = at, count = at;
  std::fill_n(&count[0], count.dim(), 1);
  for (const int64_t index : {coil, int64_t{0}, ky, int64_t{0}}) first.push_back(index);
  for (const int64_t size : {int64_t{1}, int64_t{1}, int64_t{1}, volume.shape().back()})
    count.push_back(size);
  return volume.read(first, count).to_vector<float>();
}

std::vector<float> channel_of(const Acquisition& a, int64_t channel) {
  const int64_t length = 2 * a.head.number_of_samples;
  return {a.data.begin() + channel * length, a.data.begin() + (channel + 1) * length};
}

TEST(Volume, IsmrmrdOfAnyWriter) {
  const TemporaryFolder folder;
  for (const bool packed : {false, true}) {
    std::vector<Acquisition> all;
    all.push_back(readout(0, 0, 3, 50, 100, {19}));  // noise, of other sizes
    all.push_back(readout(0, 0, 2, 16, 101, {27}));  // dummy
    for (int64_t repetition = 0; repetition < 2; ++repetition)
      for (int64_t step = 5; step-- > 0;)  // in reverse
        all.push_back(readout(step, repetition, 2, 16, static_cast<uint64_t>(10 * repetition + step)));
    all.push_back(readout(3, 1, 2, 16, 200, {20}));  // measured again
    all.push_back(readout(4, 1, 2, 16, 201, {22}));  // turned around
    all.push_back({});                               // of 0 samples
    all.push_back(readout(1, 0, 2, 8, 202));
    all.back().head.encoding_space_ref = 1;
    const std::string path = folder / "x.h5";
    {
      Foreign file(path);
      // Of 8 lines the middle is 4; the center of what was measured is 2.
      write_ismrmrd(file, "dataset", all, packed, header_of(16, 8, 2));
    }
    const Volume volume = open_volume(path);
    EXPECT_EQ(volume.info().layout, VolumeLayout::ismrmrd);
    EXPECT_EQ(volume.shape(), (Shape{2, 2, 1, 8, 16}));
    EXPECT_EQ(volume.info().axes[0].name, "repetition");
    EXPECT_EQ(field(volume, "readouts"),
              "16, of which 4 are left out: 1 dummy, 1 noise, 1 of other encoding spaces, 1 without samples");
    EXPECT_EQ(field(volume, "lines"), "10 measured of 16");
    EXPECT_EQ(field(volume, "measured again"), "2 lines; the later readout counts");
    for (int64_t coil = 0; coil < 2; ++coil) {
      EXPECT_EQ(line_of(volume, {0}, coil, 2 + 4), channel_of(all[2], coil));
      EXPECT_EQ(line_of(volume, {0}, coil, 2 + 0), channel_of(all[6], coil));
      EXPECT_EQ(line_of(volume, {1}, coil, 2 + 3), channel_of(all[12], coil));
      EXPECT_EQ(line_of(volume, {1}, coil, 0), std::vector<float>(32, 0));
      std::vector<float> turned, straight = channel_of(all[13], coil);
      for (size_t i = 16; i-- > 0;) turned.insert(turned.end(), {straight[2 * i], straight[2 * i + 1]});
      EXPECT_EQ(line_of(volume, {1}, coil, 2 + 4), turned);
    }
    // Any box is that of the whole.
    const Tensor whole = volume.read(f64);
    EXPECT_EQ(volume.read({0, 1, 0, 1, 3}, {2, 1, 1, 3, 5}, f64, {1, 1, 1, 2, 2}).to_vector<double>(),
              whole.slice(1, 1, 2).slice(3, 1, 6, 2).slice(4, 3, 13, 2).to_vector<double>());
    // The user's own rule.
    EXPECT_ERROR(open_volume(path, {.leave_out = {}}), File,
                 "has readouts of 3 and of 2 channels (readout 1)");
    EXPECT_EQ(field(open_volume(path, {.leave_out = {19, 20, 22, 27}}), "lines"), "10 measured of 16");
    EXPECT_EQ(open_volume(path, {.encoding = 1}).shape(), (Shape{2, 1, 2, 8}));
    EXPECT_ERROR(open_volume(path, {.encoding = 2}), File,
                 "no readouts to make a volume of: 16 are left out");
    EXPECT_ERROR(open_volume(path, {.group = "other"}), File, "no acquisitions in 'other', but in: /dataset");
  }
}

TEST(Volume, IsmrmrdPlacesPartialEchoesAndChecksLengths) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  Acquisition echo = readout(1, 0, 1, 10, 1);
  echo.head.center_sample = 2;
  Acquisition wrong = readout(0, 0, 1, 10, 2);
  wrong.head.center_sample = 2;
  wrong.data.resize(18);
  {
    Foreign file(path);
    write_ismrmrd(file, "first", {echo}, true, header_of(16, 2, 1));
    write_ismrmrd(file, "second", {echo, wrong}, true, "no <xml");
    write_ismrmrd(file, "third", {readout(0, 0, 1, 4, 3)}, true, "");
  }
  EXPECT_EQ(open_volume(path).shape(), (Shape{1, 1, 1, 4}));
  EXPECT_EQ(field(open_volume(path), "acquisitions in the file"), "/first, /second, /third");
  const Volume volume = open_volume(path, {.group = "first"});
  EXPECT_EQ(volume.shape(), (Shape{1, 1, 2, 16}));
  std::vector<float> expected(12, 0);
  expected.insert(expected.end(), echo.data.begin(), echo.data.end());
  EXPECT_EQ(line_of(volume, {}, 0, 1), expected);
  const Volume second = open_volume(path, {.group = "second"});
  EXPECT_EQ(second.shape(), (Shape{1, 1, 2, 15}));
  EXPECT_ERROR(second.read(), File, "'/second/data' must have 20 numbers in 'data' of record 1, got 18");
}

// Whether a readout has too few numbers or too many, it is the one that is named.
TEST(Volume, IsmrmrdNamesTheReadoutOfAnotherLength) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  for (const size_t length : {size_t{2}, size_t{30}, size_t{34}, size_t{100000}}) {
    std::vector<Acquisition> all;
    for (int64_t i = 0; i < 9; ++i) all.push_back(readout(i, 0, 1, 16, static_cast<uint64_t>(i)));
    all[7].data.resize(length);
    {
      Foreign file(path);
      write_ismrmrd(file, "dataset", all, true, "");
    }
    const Volume volume = open_volume(path);
    EXPECT_ERROR(volume.read(), File,
                 "must have 32 numbers in 'data' of record 7, got " + std::to_string(length));
    EXPECT_EQ(volume.read({0, 0, 0, 0}, {1, 1, 7, 16}).numel(), 7 * 16 * 2);
  }
}

TEST(Volume, SaysWhichTrajectoryReadoutsFollow) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  for (const std::string word : {"cartesian", "radial", ""}) {
    Acquisition one = readout(0, 0, 1, 16, 1);
    one.head.trajectory_dimensions = word == "cartesian" ? 0 : 2;
    {
      Foreign file(path);
      write_ismrmrd(
          file, "dataset", {one}, true,
          "<ismrmrdHeader><encoding><trajectory>" + word + "</trajectory></encoding></ismrmrdHeader>");
    }
    EXPECT_EQ(open_volume(path).info().trajectory, word.empty() ? "unknown" : word);
  }
}

TEST(Volume, NamesOfStrangersAreOnePrintableLine) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5", evil =
                                                "a\x1b[2J\nb\r\x7f\xc2\x9b"
                                                "c\xc3\xa9";
  {
    Foreign file(path);
    file.write(evil, std::vector<double>{1, 2, 3, 4}, {2, 2});
    file.write("long " + evil, std::vector<double>{1, 2, 3, 4}, {2, 2}, H5T_NATIVE_LDOUBLE);
    file.write_complex("records", {1, 2}, {1}, evil.c_str(), "i");
    file.write_text(std::string("text ") + evil, evil);
  }
  EXPECT_EQ(printable(evil), "a [2J b    c\xc3\xa9");
  const auto is_clean = [](const std::string& text) { return text == printable(text); };
  for (const std::string& name :
       {evil, "long " + evil, "text " + evil, std::string("records"), "no " + evil}) {
    std::string text;
    try {
      const Volume volume = open_volume(path, {.dataset = name});
      volume.read({0, 1}, {2, 2});
    } catch (const Error& error) {
      text = error.what();
    }
    EXPECT_NE(text, "") << printable(name);
    EXPECT_TRUE(is_clean(text) || name.find("no ") == 0) << text;
  }
  {
    Foreign file(path);
    file.write(evil, std::vector<double>{1, 2, 3, 4}, {2, 2});
    file.write("other", std::vector<double>{1, 2, 3, 4}, {2, 2});
  }
  EXPECT_ERROR(open_volume(path), File, "it holds /a [2J b ");
  {
    Foreign file(path);
    file.write("x", std::vector<double>{1, 2, 3, 4}, {4});
    file.variable_attribute("x", "DIMENSION_LABELS", evil);
  }
  EXPECT_EQ(open_volume(path).info().axes[0].name, printable(evil));
}

TEST(Volume, IsmrmrdWithADamagedCounter) {
  const TemporaryFolder folder;
  Acquisition lost = readout(1, 0, 1, 64, 1);
  lost.head.idx.slice = 40000;
  {
    Foreign file(folder / "x.h5");
    write_ismrmrd(file, "dataset", {readout(0, 0, 1, 64, 2), lost}, true, "");
  }
  EXPECT_EQ(open_volume(folder / "x.h5").read({40000, 0, 0, 1, 0}, {1, 1, 1, 1, 64}).to_vector<float>(),
            lost.data);
  {
    lost.head.idx.repetition = 40000;
    Foreign file(folder / "x.h5");
    write_ismrmrd(file, "dataset", {readout(0, 0, 1, 64, 2), lost}, true, "");
  }
  const Volume volume = open_volume(folder / "x.h5");
  EXPECT_EQ(volume.shape(), (Shape{40001, 40001, 1, 1, 2, 64}));
  EXPECT_ERROR(volume.read({0, 0, 0, 0, 0, 0}, {5, 40001, 1, 1, 2, 64}), File,
               "of 2 readouts; only a file that is trusted");
}

TEST(Volume, IsmrmrdOfARealWriter) {
  const std::string path = shared_file("acqDataBrainSim100.h5");
  if (path.empty()) GTEST_SKIP() << "acqDataBrainSim100.h5 is not here";
  const Volume volume = open_volume(path);
  EXPECT_EQ(volume.shape(), (Shape{1, 1, 256, 256}));
  EXPECT_EQ(field(volume, "trajectory axes"), "2");
  const auto parts = volume.read(f64).to_vector<double>();
  double energy = 0;
  for (const double part : parts) energy += part * part;
  EXPECT_NEAR(energy / 1979009912.9367876, 1, 1e-12);  // as h5py reads it
  const auto middle = volume.read({0, 0, 128, 128}, {1, 1, 1, 1}).to_vector<float>();
  EXPECT_EQ(middle, (std::vector<float>{36143.890625f, 2.2131749558007563e-12f}));
}

TEST(Volume, IsmrmrdOfTheDebianGenerator) {
  const TemporaryFolder folder;
  const std::string path = folder / "shepp.h5";
  if (!runs("ismrmrd_generate_cartesian_shepp_logan -m 64 -c 4 -r 2 -C -n 0.001 -o '" + path + "'"))
    GTEST_SKIP() << "no ismrmrd_generate_cartesian_shepp_logan (Debian's ismrmrd-tools)";
  const Volume volume = open_volume(path);
  EXPECT_EQ(volume.shape(), (Shape{2, 4, 1, 64, 128}));
  EXPECT_EQ(field(volume, "readouts"), "129, of which 1 are left out: 1 noise");
  // The centred, orthonormal inverse transform of k-space is the generator's own image.
  const Tensor kspace = volume.slice(1, f64);
  const Tensor images =
      open_volume(path, {.dataset = "/dataset/coil_images"}).read(f64).reshape({4, 64, 128, 2});
  const double* k = kspace.data<double>();
  const double* image = images.data<double>();
  const auto wave = [](int64_t n, int64_t f, int64_t x) {
    const double phase = 2 * M_PI * double(f - n / 2) * double(x - n / 2) / double(n);
    return std::polar(1 / std::sqrt(double(n)), phase);
  };
  double error = 0, norm = 0;
  for (int64_t coil = 0; coil < 4; ++coil) {
    std::vector<std::complex<double>> half(64 * 128);
    for (int64_t y = 0; y < 64; ++y)
      for (int64_t fx = 0; fx < 128; ++fx)
        for (int64_t fy = 0; fy < 64; ++fy) {
          const double* at = k + ((coil * 64 + fy) * 128 + fx) * 2;
          half[size_t(y * 128 + fx)] += wave(64, fy, y) * std::complex(at[0], at[1]);
        }
    for (int64_t y = 0; y < 64; ++y)
      for (int64_t x = 0; x < 128; x += 8) {
        std::complex<double> sum = 0;
        for (int64_t fx = 0; fx < 128; ++fx) sum += wave(128, fx, x) * half[size_t(y * 128 + fx)];
        const double* at = image + ((coil * 64 + y) * 128 + x) * 2;
        error += std::norm(sum - std::complex(at[0], at[1]));
        norm += std::norm(std::complex(at[0], at[1]));
      }
  }
  EXPECT_LT(std::sqrt(error / norm), 0.03);
}

// ------------------------------------------------------------------------------------------------------------
// MINC2

struct MincFile {
  hid_t type = H5T_STD_I16LE;
  std::vector<double> stored;
  std::vector<hsize_t> shape = {2, 3, 4};
  std::string order = "zspace,yspace,xspace";
  std::vector<double> valid_range;
  std::vector<hsize_t> limit_shape;  // of image-min and image-max
  std::vector<double> min, max;      // none: no such datasets
  std::string limit_order;

  void write(const std::string& path) const {
    Foreign file(path);
    for (const char* group : {"/minc-2.0", "/minc-2.0/dimensions", "/minc-2.0/image", "/minc-2.0/image/0"})
      file.group(group);
    const std::string image = "/minc-2.0/image/0/image";
    file.write(image, stored, shape, type);
    file.attribute(image, "dimorder", order);
    if (!valid_range.empty()) file.attribute(image, "valid_range", valid_range);
    for (const auto& [name, values] : {std::pair{"image-min", min}, {"image-max", max}}) {
      if (values.empty()) continue;
      file.write("/minc-2.0/image/0/" + std::string(name), values, limit_shape);
      if (!limit_order.empty())
        file.attribute("/minc-2.0/image/0/" + std::string(name), "dimorder", limit_order);
    }
    std::istringstream names(order);
    const std::vector<double> zero = {0};
    for (std::string name; std::getline(names, name, ',');)
      file.write("/minc-2.0/dimensions/" + name, zero, {}, H5T_STD_I32LE);
  }
};

std::vector<double> ramp(int64_t count, double from, double step) {
  std::vector<double> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = from + step * static_cast<double>(i);
  return values;
}

TEST(Volume, MincScalesAsItsRuleSays) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.mnc";
  const auto check_against = [&](const MincFile& file, double low, double high, const auto& limits) {
    file.write(path);
    const Volume volume = open_volume(path);
    EXPECT_EQ(volume.info().layout, VolumeLayout::minc2);
    std::vector<double> expected;
    for (size_t i = 0; i < file.stored.size(); ++i) {
      const auto [min, max] = limits(static_cast<int64_t>(i));
      expected.push_back((file.stored[i] - low) / (high - low) * (max - min) + min);
    }
    const auto read = volume.read(f64).to_vector<double>();
    const auto narrow = volume.read(f32).to_vector<float>();
    for (size_t i = 0; i < expected.size(); ++i) {
      const double size = std::max(1., std::abs(expected[i]));
      EXPECT_NEAR(read[i], expected[i], 1e-12 * size);
      EXPECT_NEAR(narrow[i], expected[i], 1e-6 * size);
    }
    // A box scales as the whole does.
    Shape first = volume.shape(), count = first, step = first;
    for (int axis = 0; axis < first.dim(); ++axis) {
      step[axis] = 2;
      first[axis] = axis == 0 ? first[0] - 1 : 1;
      count[axis] = axis == 0 ? 1 : (volume.shape()[axis] - first[axis] + 1) / 2;
    }
    Tensor part = volume.read(f64);
    for (int axis = 0; axis < first.dim(); ++axis)
      part = part.slice(axis, first[axis], volume.shape()[axis], 2);
    EXPECT_EQ(volume.read(first, count, f64, step).to_vector<double>(), part.to_vector<double>());
    EXPECT_EQ(open_volume(path, {.raw = true}).read(f64).to_vector<double>(), file.stored);
  };
  const auto one = [](double min, double max) { return [=](int64_t) { return std::pair{min, max}; }; };
  const auto none = one(0, 1);

  MincFile file;
  file.stored = ramp(24, -1200, 100);
  check_against(file, -32768, 32767, none);
  file.min = {-3};
  file.max = {5};
  check_against(file, -32768, 32767, one(-3, 5));  // one number, and a dimorder that is left over
  file.limit_order = "zspace";
  check_against(file, -32768, 32767, one(-3, 5));
  file.valid_range = {1000, -1000};  // in any order; values outside are not clipped
  check_against(file, -1000, 1000, one(-3, 5));
  file.limit_shape = {2};
  file.min = {-3, 7};
  file.max = {5, 70};
  const auto slices = [&](int64_t i) {
    return std::pair{file.min[size_t(i / 12)], file.max[size_t(i / 12)]};
  };
  check_against(file, -1000, 1000, slices);
  for (const auto& [type, low, high] :
       std::vector<std::tuple<hid_t, double, double>>{{H5T_STD_I16BE, -32768, 32767},
                                                      {H5T_STD_I32LE, -2147483648., 2147483647},
                                                      {H5T_STD_I32BE, -2147483648., 2147483647}}) {
    file.type = type;
    file.valid_range.clear();
    check_against(file, low, high, slices);
  }
  file.stored = ramp(24, 3, 9);
  for (const auto& [type, high] : std::vector<std::pair<hid_t, double>>{
           {H5T_STD_U8LE, 255}, {H5T_STD_U16LE, 65535}, {H5T_STD_U32BE, 4294967295}}) {
    file.type = type;
    check_against(file, 0, high, slices);
  }
  // Time first, a range for each of its slices.
  file.shape = {3, 2, 2, 2};
  file.order = "time,zspace,yspace,xspace";
  file.limit_shape = {3, 2};
  file.min = ramp(6, 0, 10);
  file.max = ramp(6, 5, 11);
  file.type = H5T_STD_U32LE;
  check_against(file, 0, 4294967295, [&](int64_t i) {
    return std::pair{file.min[size_t(i / 4)], file.max[size_t(i / 4)]};
  });
  // Floats are what they are.
  file.type = H5T_IEEE_F32BE;
  file.valid_range = {0, 10};
  file.write(path);
  EXPECT_EQ(open_volume(path).read(f64).to_vector<double>(), file.stored);
  // What does not fit together.
  file.type = H5T_STD_I16LE;
  file.limit_shape = {2, 3};
  file.write(path);
  EXPECT_ERROR(open_volume(path), File,
               "must be a number or have the leading axes of [3, 2, 2, 2], got f64 [2, 3]");
  file.limit_shape = {3, 2};
  file.order = "zspace,yspace,xspace";
  file.write(path);
  EXPECT_ERROR(open_volume(path), File, "has 4 axes, but its dimorder names 3");
}

TEST(Volume, MincKnowsWhereItLies) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.mnc";
  MincFile file;
  file.order = "time,yspace,xspace";
  file.stored = ramp(24, 0, 1);
  file.write(path);
  {
    const hid_t id = H5Fopen(path.c_str(), H5F_ACC_RDWR, H5P_DEFAULT);
    const auto number = [&](const char* axis, const char* name, std::vector<double> values) {
      const hid_t object = H5Oopen(id, (std::string("/minc-2.0/dimensions/") + axis).c_str(), H5P_DEFAULT);
      const hsize_t size = values.size();
      const hid_t space = size == 1 ? H5Screate(H5S_SCALAR) : H5Screate_simple(1, &size, nullptr);
      const hid_t attribute = H5Acreate2(object, name, H5T_IEEE_F64LE, space, H5P_DEFAULT, H5P_DEFAULT);
      H5Awrite(attribute, H5T_NATIVE_DOUBLE, values.data());
      H5Aclose(attribute);
      H5Sclose(space);
      H5Oclose(object);
    };
    number("yspace", "step", {-2});
    number("yspace", "start", {100});
    number("yspace", "direction_cosines", {0, 0.6, 0.8});
    number("time", "step", {1.5});
    H5Fclose(id);
  }
  const Volume volume = open_volume(path);
  const auto world = volume.info().world({7, 10, 3});
  EXPECT_DOUBLE_EQ(world[0], 3);  // nothing said: step 1 along x from 0
  EXPECT_DOUBLE_EQ(world[1], 0.6 * 80);
  EXPECT_DOUBLE_EQ(world[2], 0.8 * 80);
  EXPECT_EQ(volume.info().axes[0].step.value(), 1.5);
  EXPECT_FALSE(volume.info().axes[0].direction.has_value());
  EXPECT_ERROR(volume.info().world({1, 2}), Value, "expected 3 indices, got 2");
}

// All values are those that minctoraw gives.
void expect_as_minctoraw(const std::string& path, const TemporaryFolder& folder) {
  const std::string raw = folder / "raw";
  ASSERT_EQ(std::system(("minctoraw -double -normalize '" + path + "' > '" + raw + "'").c_str()), 0) << path;
  const std::string bytes = read_file(raw);
  std::vector<double> expected(bytes.size() / sizeof(double));
  std::memcpy(expected.data(), bytes.data(), bytes.size());
  const auto values = open_volume(path).read(f64).to_vector<double>();
  ASSERT_EQ(values.size(), expected.size()) << path;
  for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], expected[i], 1e-12) << path;
}

// Integers with a range for each slice, of each type and sign; floating numbers as they are; volumes in time;
// compressed; and what arithmetic writes, which leaves the valid range out.
TEST(Volume, MincOfItsOwnTools) {
  if (!runs("which rawtominc mincmath mincconvert minctoraw")) GTEST_SKIP() << "no Debian's minc-tools";
  const TemporaryFolder folder;
  const auto numbers = random_numbers(2 * 5 * 6 * 7);
  write_file(folder / "in", std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * 4));
  const std::string make = "cd '" + folder / "" + "' && rawtominc -2 -clobber -float -scan_range -input in ";
  for (const char* type : {"-obyte -ounsigned", "-obyte -osigned", "-oshort -osigned", "-oshort -ounsigned",
                           "-oint -osigned", "-oint -ounsigned", "-ofloat", "-odouble"})
    for (const char* shape : {"x.mnc 5 6 7", "-frame_times 1,2 x.mnc 2 5 6 7"}) {
      ASSERT_TRUE(runs(make + type + " " + shape)) << type << " " << shape;
      expect_as_minctoraw(folder / "x.mnc", folder);
    }
  ASSERT_TRUE(runs(make + "-oshort -osigned x.mnc 5 6 7"));
  ASSERT_TRUE(runs("mincconvert -2 -clobber -compress 4 -chunk 4 '" + folder / "x.mnc" + "' '" +
                   folder / "y.mnc" + "'"));
  expect_as_minctoraw(folder / "y.mnc", folder);
  ASSERT_TRUE(runs("MINC_FORCE_V2=1 mincmath -clobber -quiet -short -signed -mult -const 0.37 '" +
                   folder / "x.mnc" + "' '" + folder / "y.mnc" + "'"));
  expect_as_minctoraw(folder / "y.mnc", folder);
}

TEST(Volume, MincOfRealWriters) {
  const std::string shared = shared_file("nibabel_small.mnc");
  if (!shared.empty()) {  // as minctoraw reads it
    const Volume volume = open_volume(shared);
    const Tensor values = volume.read(f64);
    EXPECT_EQ(values.shape(), (Shape{18, 28, 29}));
    EXPECT_NEAR(values.select(0, 9).select(0, 14).select(0, 14).item(), 34.62414792535969, 1e-12);
    const auto all = values.to_vector<double>();
    EXPECT_NEAR(std::accumulate(all.begin(), all.end(), 0.) / double(all.size()), 31.212795196619673, 1e-12);
    EXPECT_EQ(volume.info().axes[0].step.value(), 9);
    EXPECT_EQ(volume.info().world({1, 0, 0}), (std::array<double, 3>{-98, -134, -63}));
  }
  const fs::path samples = "/usr/lib/python3/dist-packages/nibabel/tests/data";
  if (!runs("which minctoraw") || !fs::exists(samples))
    GTEST_SKIP() << "no minctoraw (Debian's minc-tools) or no files of python3-nibabel";
  const TemporaryFolder folder;
  for (const char* name :
       {"small.mnc", "minc2_1_scale.mnc", "minc2_4d.mnc", "minc2-4d-d.mnc", "minc2-no-att.mnc"})
    expect_as_minctoraw((samples / name).string(), folder);
  const auto minc1 = (samples / "minc1_1_scale.mnc").string();
  EXPECT_ERROR(open_volume(minc1), File, "it is a NetCDF-3 file; if it is MINC1, run: mincconvert -2");
}

// ---------------------------------------------------------------------------------------------------------
// datasets

TEST(Volume, AnyDatasetOfNumbers) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  const std::vector<double> numbers = {1, 0, 2, 100, 7, 5};
  const hid_t half_type = H5Tcopy(H5T_IEEE_F32BE);
  H5Tset_fields(half_type, 15, 10, 5, 0, 10);
  H5Tset_size(half_type, 2);
  H5Tset_ebias(half_type, 15);
  const std::vector<std::pair<std::string, hid_t>> types = {{"i8", H5T_STD_I8LE},
                                                            {"u8", H5T_STD_U8LE},
                                                            {"big-endian i16", H5T_STD_I16BE},
                                                            {"u16", H5T_STD_U16LE},
                                                            {"i32", H5T_STD_I32LE},
                                                            {"big-endian u32", H5T_STD_U32BE},
                                                            {"i64", H5T_STD_I64LE},
                                                            {"big-endian u64", H5T_STD_U64BE},
                                                            {"big-endian f16", half_type},
                                                            {"f32", H5T_IEEE_F32LE},
                                                            {"big-endian f64", H5T_IEEE_F64BE}};
  const std::vector<float> parts = random_numbers(12);
  {
    Foreign file(path);
    file.group("deep");
    for (const auto& [name, type] : types) file.write("deep/" + name, numbers, {2, 3}, type);
    file.write_complex("ri", parts, {2, 3});
    file.write_complex("real imag", parts, {2, 3}, "real", "imag", H5T_IEEE_F64BE);
    file.write_complex("re im", parts, {2, 3}, "re", "im");
    file.write_complex("a b", parts, {2, 3}, "a", "b");
    file.write("scalar", std::vector<double>{3.5}, {});
    file.write("nothing", std::vector<double>{}, {0, 4});
    file.write_text("text", "hello");
    file.write("long", numbers, {2, 3}, H5T_NATIVE_LDOUBLE);
    const hid_t null = H5Screate(H5S_NULL);
    H5Dclose(H5Dcreate2(file, "null", H5T_IEEE_F64LE, null, 0, 0, 0));
    H5Sclose(null);
  }
  H5Tclose(half_type);
  for (const auto& [name, type] : types) {
    const Volume volume = open_volume(path, {.dataset = "deep/" + name});
    EXPECT_EQ(volume.info().stored.type, name);
    EXPECT_EQ(volume.read(f64).to_vector<double>(), numbers) << name;
    EXPECT_EQ(volume.read({0, 1}, {2, 2}).to_vector<double>(), (std::vector<double>{0, 2, 7, 5})) << name;
    EXPECT_EQ(volume.read({0, 0}, {2, 2}, f64, {1, 2}).to_vector<double>(),
              (std::vector<double>{1, 2, 100, 5}))
        << name;
  }
  for (const char* name : {"ri", "real imag", "re im"}) {
    const Volume volume = open_volume(path, {.dataset = name});
    EXPECT_TRUE(volume.info().is_complex);
    EXPECT_EQ(volume.read().to_vector<float>(), parts);
    EXPECT_EQ(volume.read().shape(), (Shape{2, 3, 2}));
  }
  EXPECT_EQ(open_volume(path, {.dataset = "scalar"}).read().item(), 3.5);
  EXPECT_EQ(open_volume(path, {.dataset = "nothing"}).read().shape(), (Shape{0, 4}));
  EXPECT_ERROR(open_volume(path, {.dataset = "a b"}), File,
               "'a b' holds records {a, b}, not numbers of up to 64 bits");
  EXPECT_ERROR(open_volume(path, {.dataset = "text"}), File,
               "'text' holds text of variable length, not numbers of up to 64 bits");
  EXPECT_ERROR(open_volume(path, {.dataset = "long"}), File,
               "'long' holds f128, not numbers of up to 64 bits");
  EXPECT_ERROR(open_volume(path, {.dataset = "null"}), File, "'null' is empty");
  EXPECT_ERROR(open_volume(path, {.dataset = "none"}), File, "has no 'none'");
  EXPECT_ERROR(open_volume(path), File,
               "neither fastMRI, ISMRMRD nor MINC2; it holds /a b (records {a, b} [2, 3]), ");
  const Volume volume = open_volume(path, {.dataset = "deep/i8"});
  EXPECT_ERROR(volume.read({0, 2}, {2, 2}), Shape,
               "has shape [2, 3]; no box of [2, 2] begins at [0, 2] in it");
  EXPECT_ERROR(volume.read({0}, {2}), Shape, "no box of");
  EXPECT_ERROR(volume.read(i32), DType, "reads f32 or f64, not i32");
  Tensor narrow = Tensor::zeros({2, 2}), turned = Tensor::zeros({3, 2}).permute({1, 0}), none;
  EXPECT_ERROR(volume.read_into(narrow, {0, 0}, {2, 3}), Shape, "a box of [2, 3] does not fit into [2, 2]");
  EXPECT_ERROR(volume.read_into(turned, {0, 0}, {2, 3}), Value, "expected a contiguous tensor on the CPU");
  EXPECT_ERROR(volume.read_into(none, {0, 0}, {2, 3}), Value, "the tensor to read into is undefined");
  const auto stored = Hdf5File::open(path).open_dataset("deep/i8");
  EXPECT_ERROR(stored.read_into(turned, {0, 0}, {2, 3}), Value, "expected a contiguous tensor on the CPU");
  EXPECT_ERROR(stored.read_into(none, {0, 0}, {2, 3}), Value, "the tensor to read into is undefined");
}

// What may become of a child besides its exit status.
constexpr int crashed_in_library = 100, crashed = 101, hung = 102;

// Exits with whose code crashed, the innermost on the stack that is no C library's: that of HDF5, or ours.
void tell_whose(int) {
  void* frames[64];
  const int count = ::backtrace(frames, 64);
  for (int i = 1; i < count; ++i) {
    Dl_info info;
    if (::dladdr(frames[i], &info) == 0 || !info.dli_fname) continue;
    const std::string_view where = info.dli_fname;
    if (where.find("libhdf5") != where.npos) ::_exit(crashed_in_library);
    if (where.find("libtorus") != where.npos) ::_exit(crashed);
  }
  ::_exit(crashed);
}

// Runs `act` in a child with limits; returns its exit status, or one of those above.
template <class Act>
int in_child(const Act& act, int seconds = 20) {
  void* frame = nullptr;
  ::backtrace(&frame, 1);  // loads what it needs
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit memory{rlim_t{4} << 30, rlim_t{4} << 30}, core{0, 0};
#if !defined(__SANITIZE_ADDRESS__)
    setrlimit(RLIMIT_AS, &memory);
#else
    static_cast<void>(memory);
#endif
    setrlimit(RLIMIT_CORE, &core);
    const int nowhere = ::open("/dev/null", O_WRONLY);
    ::dup2(nowhere, STDERR_FILENO);
    static char stack[1 << 16];  // of its own: the other may be used up
    const stack_t other{stack, 0, sizeof stack};
    ::sigaltstack(&other, nullptr);
    struct sigaction action = {};
    action.sa_handler = tell_whose;
    action.sa_flags = SA_ONSTACK;
    for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) ::sigaction(signal, &action, nullptr);
    ::alarm(static_cast<unsigned>(seconds));
    int status = 2;
    try {
      status = act();
    } catch (...) {
    }
    ::_exit(status);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  // The C library aborts where it finds its heap overwritten, whoever did it: ours is not known to.
  return WTERMSIG(status) == SIGALRM ? hung : WTERMSIG(status) == SIGABRT ? crashed_in_library : crashed;
}

TEST(Volume, ChildrenThatCrashAndHangAreTold) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer has handlers of its own";
#endif
  volatile int* nowhere = nullptr;
  EXPECT_EQ(in_child([&] { return *nowhere; }), crashed);
  EXPECT_EQ(in_child(
                [] {
                  for (volatile bool forever = true; forever;) {
                  }
                  return 0;
                },
                1),
            hung);
  EXPECT_EQ(in_child([] { return 7; }), 7);
}

TEST(Volume, Filters) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  std::vector<double> values(50 * 40);
  for (size_t i = 0; i < values.size(); ++i) values[i] = double(i % 97) - 20;
  // What LZF makes of 32 bytes 0..7 four times: 8 literals, then copies of what is 8 back.
  const std::vector<uint8_t> packed = {7, 0, 1, 2, 3, 4, 5, 6, 7, 0xe0, 24 - 9, 7};
  // In a process that may forget the reader of lzf, which the library would not write with.
  ASSERT_EQ(in_child([&] {
              H5Zunregister(32000);
              Foreign file(path);
              const auto chunks = [] { return Foreign::chunked({16, 16}); };
              hid_t options = chunks();
              H5Pset_shuffle(options);
              H5Pset_deflate(options, 6);
              H5Pset_fletcher32(options);
              file.write("deflate", H5T_STD_I32LE, H5T_NATIVE_DOUBLE, {50, 40}, values.data(), options);
              if (H5Zfilter_avail(H5Z_FILTER_SZIP) > 0) {
                options = chunks();
                H5Pset_szip(options, H5_SZIP_NN_OPTION_MASK, 16);
                file.write("szip", H5T_STD_I16LE, H5T_NATIVE_DOUBLE, {50, 40}, values.data(), options);
              }
              options = chunks();
              H5Pset_nbit(options);
              file.write("nbit", H5T_STD_I16LE, H5T_NATIVE_DOUBLE, {50, 40}, values.data(), options);
              options = chunks();
              H5Pset_scaleoffset(options, H5Z_SO_INT, 0);
              file.write("scaleoffset", H5T_STD_I16LE, H5T_NATIVE_DOUBLE, {50, 40}, values.data(), options);
              for (const auto& [name, id] : {std::pair{"lzf", 32000}, {"lz4", 32004}, {"odd", 31999}}) {
                options = Foreign::chunked({32});
                const unsigned about[3] = {4, 261, 32};
                H5Pset_filter(options, id, H5Z_FLAG_OPTIONAL, 3, about);
                file.write(name, H5T_STD_U8LE, H5T_NATIVE_UINT8, {32}, nullptr, options);
                const hid_t dataset = H5Dopen2(file, name, H5P_DEFAULT);
                const hsize_t at = 0;
                H5Dwrite_chunk(dataset, H5P_DEFAULT, 0, &at, packed.size(), packed.data());
                H5Dclose(dataset);
              }
              return 0;
            }),
            0);
  for (const char* name : {"deflate", "szip", "nbit", "scaleoffset"}) {
    if (name == std::string("szip") && H5Zfilter_avail(H5Z_FILTER_SZIP) <= 0) continue;
    const Volume volume = open_volume(path, {.dataset = name});
    EXPECT_EQ(volume.read(f64).to_vector<double>(), values) << name;
    EXPECT_EQ(volume.chunk(), (Shape{16, 16}));
  }
  const auto filters = open_volume(path, {.dataset = "deflate"}).info().stored.filters;
  ASSERT_EQ(filters.size(), 3u);
  EXPECT_EQ(filters[0].name + filters[1].name + filters[2].name, "shuffledeflatefletcher32");
  std::vector<float> repeated;
  for (int i = 0; i < 32; ++i) repeated.push_back(static_cast<float>(i % 8));
  EXPECT_EQ(open_volume(path, {.dataset = "lzf"}).read().to_vector<float>(), repeated);
  EXPECT_ERROR(open_volume(path, {.dataset = "lz4"}).read(), File,
               "'lz4' is packed with lz4 (filter 32004), which is not available; install hdf5-filter-plugin");
  EXPECT_ERROR(open_volume(path, {.dataset = "odd"}).read(), File,
               "is packed with filter 31999 (filter 31999), which");
}

TEST(Volume, WhatH5pyPacks) {
  const TemporaryFolder folder;
  const std::string script =
      "import h5py, numpy as np\n"
      "x = np.random.default_rng(0).integers(0, 9, (70, 50, 30)) * 1.5 + np.arange(30)\n"
      "with h5py.File('" +
      folder / "x.h5" +
      "', 'w') as f:\n"
      "  for name, how in dict(lzf=dict(compression='lzf'), shuffled=dict(compression='lzf', shuffle=True, "
      "fletcher32=True),"
      " gzip=dict(compression='gzip'), plain={}).items():\n"
      "    f.create_dataset(name, data=x.astype('f4'), **({} if name == 'plain' else dict(chunks=(20, 20, "
      "20))), **how)\n"
      "  f['complex'] = (x + 1j * x[::-1]).astype('c16')\n"
      "  f['half'] = x.astype('>f2')\n"
      "  f['bool'] = x > 4\n"
      "x.astype('f4').tofile('" +
      folder / "x.f32" + "')\n";
  write_file(folder / "x.py", script);
  if (!runs("/usr/bin/python3 '" + folder / "x.py" + "'")) GTEST_SKIP() << "no h5py (Debian's python3-h5py)";
  const std::string bytes = read_file(folder / "x.f32");
  std::vector<float> expected(bytes.size() / 4);
  std::memcpy(expected.data(), bytes.data(), bytes.size());
  for (const char* name : {"lzf", "shuffled", "gzip", "plain", "half"})
    EXPECT_EQ(open_volume(folder / "x.h5", {.dataset = name}).read().to_vector<float>(), expected) << name;
  const Tensor pairs = open_volume(folder / "x.h5", {.dataset = "complex"}).read();
  EXPECT_EQ(pairs.select(3, 0).to_vector<float>(), expected);
  const auto flags = open_volume(folder / "x.h5", {.dataset = "bool"}).read().to_vector<float>();
  for (size_t i = 0; i < flags.size(); ++i) ASSERT_EQ(flags[i], expected[i] > 4 ? 1.f : 0.f);
}

// ------------------------------------------------------------------------------------------- what files may
// not do

TEST(Volume, RefusesWhatLeavesTheFile) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5", other = folder / "other.h5";
  const std::vector<double> numbers = {1, 2, 3};
  {
    Foreign file(other);
    file.group("g");
    file.write("g/x", numbers, {3});
  }
  write_file(folder / "secret", std::string(24, 's'));
  {
    Foreign file(path);
    file.group("a");
    file.write("a/x", numbers, {3});
    file.write("a/y", numbers, {3});
    H5Lcreate_external(other.c_str(), "/g/x", file, "direct", 0, 0);
    H5Lcreate_external(other.c_str(), "/g", file, "a/group", 0, 0);
    H5Lcreate_soft("/a/group/x", file, "soft out", 0, 0);
    H5Lcreate_soft("a/./x", file, "soft", 0, 0);
    H5Lcreate_soft("/round", file, "about", 0, 0);
    H5Lcreate_soft("/about", file, "round", 0, 0);
    H5Lcreate_soft("/nowhere", file, "dangling", 0, 0);
    H5Lcreate_hard(file, "/", file, "a/up", 0, 0);
    hid_t options = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_external(options, (folder / "secret").c_str(), 0, 24);
    file.write("stored outside", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, {3}, nullptr, options);
    options = H5Pcreate(H5P_DATASET_CREATE);
    const hsize_t three = 3;
    const hid_t space = H5Screate_simple(1, &three, nullptr);
    H5Pset_virtual(options, space, other.c_str(), "/g/x", space);
    H5Sclose(space);
    file.write("virtual", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, {3}, nullptr, options);
    file.write("sparse", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, {1 << 20, 1 << 20}, nullptr,
               Foreign::chunked({64, 64}));
    file.write("huge chunks", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, {1 << 14, 1 << 15}, nullptr,
               Foreign::chunked({1 << 14, 1 << 14}));
  }
  const auto read = [&](const std::string& name, bool trusted = false) {
    return open_volume(path, {.dataset = name, .trust = {trusted, trusted}})
        .read({0}, {3}, f64)
        .to_vector<double>();
  };
  for (const char* name : {"direct", "a/group/x", "soft out"})
    EXPECT_ERROR(read(name), File, "is a link to another file; only a file that is trusted may name others");
  for (const char* name : {"stored outside", "virtual"})
    EXPECT_ERROR(read(name), File, "keeps its elements in other files");
  for (const char* name : {"about", "round"})
    EXPECT_ERROR(read(name), File, "goes through more than 32 links: a cycle?");
  EXPECT_ERROR(read("dangling"), File, "has no 'dangling'");
  for (const char* name : {"soft", "a/up/a/x", "/a/up/soft"}) EXPECT_EQ(read(name), numbers);
  for (const char* name : {"direct", "a/group/x", "soft out", "virtual"})
    EXPECT_EQ(read(name, true), numbers) << name;
  EXPECT_ERROR(open_volume(path, {.dataset = "sparse"}).read({5, 5}, {2, 2}), File,
               "declares 8796093022208 bytes but stores 0");
  EXPECT_EQ(open_volume(path, {.dataset = "sparse", .trust = {false, true}})
                .read({5, 5}, {2, 2})
                .to_vector<float>(),
            std::vector<float>(4, 0));
  EXPECT_ERROR(open_volume(path, {.dataset = "huge chunks"}).read({0, 0}, {1, 1}), File,
               "at most 1 GiB are read");
  // The walk goes round no cycle.
  std::string names;
  for (const auto& entry : Hdf5File::open(path).walk()) names += entry.name + " ";
  EXPECT_NE(names.find("/a/x"), std::string::npos) << names;
  EXPECT_LT(names.size(), 200u) << names;
}

TEST(Volume, NeverWritesAndExplainsLocks) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  {
    Foreign file(path);
    file.write("x", ramp(1000, 0, 1), {10, 100});
  }
  fs::permissions(path, fs::perms::owner_read);
  const std::string before = read_file(path);
  struct stat then, now;
  ::stat(path.c_str(), &then);
  open_volume(path).read();
  ::stat(path.c_str(), &now);
  EXPECT_EQ(read_file(path), before);
  EXPECT_EQ(then.st_mtim.tv_nsec, now.st_mtim.tv_nsec);
  const int writer = ::open(path.c_str(), O_RDONLY);
  ASSERT_EQ(::flock(writer, LOCK_EX), 0);
  if (!std::getenv("HDF5_USE_FILE_LOCKING"))
    EXPECT_ERROR(open_volume(path), File, "another program has the file locked to write to it");
  ::close(writer);
  EXPECT_EQ(open_volume(path).read({9, 99}, {1, 1}).item(), 999);
  EXPECT_ERROR(open_volume(folder / "none.h5"), File, "none.h5: No such file or directory");
  EXPECT_ERROR(open_volume("/dev/null"), File, "/dev/null: is not a regular file");
}

TEST(Volume, SurvivesFork) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer's allocator does not survive a fork among threads that allocate";
#endif
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  {
    Foreign file(path);
    file.write("x", ramp(200 * 500, 0, 1), {200, 500}, H5T_IEEE_F64BE);
  }
  const Volume volume = open_volume(path);
  const auto reads_right = [&](int64_t seed) {
    Generator generator(static_cast<uint64_t>(seed));
    for (int i = 0; i < 300; ++i) {
      const int64_t row = generator.below(200), column = generator.below(500);
      if (volume.read({row, column}, {1, 1}, f64).item() != double(row * 500 + column)) return false;
    }
    return true;
  };
  ASSERT_TRUE(reads_right(0));
  // Threads of the parent read, and make tensors, all the while.
  std::atomic<bool> stop = false, good = true;
  std::thread maker([&] {
    while (!stop)
      for (const int64_t size : {1, 1000, 10000}) Tensor::empty({size});
  });
  std::thread reader([&] {
    for (int64_t seed = 1; !stop; ++seed) good = good && reads_right(seed);
  });
  for (int i = 0; i < 10; ++i) EXPECT_EQ(in_child([&] { return reads_right(100 + i) ? 0 : 1; }), 0);
  stop = true;
  reader.join();
  maker.join();
  EXPECT_TRUE(good);
}

// What a user does with a file: 0, or 1 for an error of one line.
int use(const std::string& path) {
  try {
    const Volume volume = open_volume(path);
    if (volume.shape().numel() < int64_t{1} << 24) volume.read();
  } catch (const Error& error) {
    return std::string(error.what()).find('\n') == std::string::npos ? 1 : 3;
  }
  return 0;
}

// The same for all datasets and attributes.
int vet(const std::string& path) {
  int result = 0;
  const auto attempt = [&](const auto& act) {
    try {
      act();
    } catch (const Error& error) {
      result = std::max(result, std::string(error.what()).find('\n') == std::string::npos ? 1 : 3);
    }
  };
  std::vector<Hdf5File::Entry> entries;
  attempt([&] { entries = Hdf5File::open(path).walk(); });
  entries.push_back({"/", true});
  for (const auto& entry : entries)
    attempt([&] {
      const auto file = Hdf5File::open(path);
      for (const auto& attribute : file.attributes(entry.name)) file.find_attribute(entry.name, attribute);
      if (!entry.is_group) file.open_dataset(entry.name).verify();
    });
  return result;
}

// Small files of each layout.
std::vector<std::string> samples(const TemporaryFolder& folder) {
  std::vector<std::string> paths;
  {
    Foreign file(paths.emplace_back(folder / "fastmri.h5"));
    const hid_t options = Foreign::chunked({1, 6, 8});
    H5Pset_deflate(options, 4);
    file.write_complex("kspace", random_numbers(3 * 6 * 8 * 2), {3, 6, 8}, "r", "i", H5T_IEEE_F32LE, options);
    file.write_text("ismrmrd_header", fastmri_header);
    file.write("reconstruction_esc", std::vector<double>(48, 1), {3, 4, 4}, H5T_IEEE_F32LE);
    file.attribute("/", "acquisition", "AXT2");
    file.variable_attribute("/", "patient_id", "0123456789");
  }
  {
    Foreign file(paths.emplace_back(folder / "ismrmrd.h5"));
    std::vector<Acquisition> all;
    for (int64_t i = 0; i < 8; ++i) all.push_back(readout(i, 0, 2, 16, uint64_t(i)));
    write_ismrmrd(file, "dataset", all, true, header_of(16, 8, 4));
  }
  MincFile minc;
  minc.stored = ramp(24, 0, 1);
  minc.limit_shape = {2};
  minc.min = {0, 1};
  minc.max = {5, 6};
  minc.write(paths.emplace_back(folder / "minc.mnc"));
  return paths;
}

TEST(Volume, NamesWhatIsNoHdf5) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.mnc", zeros(1000, '\0');
  std::string nifti = zeros;
  nifti.replace(344, 3, "n+1");
  for (const auto& [content, line] : std::vector<std::pair<std::string, std::string>>{
           {"CDF\x01" + zeros, "it is a NetCDF-3 file; if it is MINC1, run: mincconvert -2 OLD.mnc NEW.mnc"},
           {"\x1f\x8b" + zeros, "it is a gzip file"},
           {"\x93NUMPY" + zeros, "it is a NumPy file"},
           {nifti, "it is a NIfTI file"},
           {"", "it is empty"},
           {"\x89HDF\r\n\x1a", "no signature of HDF5 in its 7 bytes; a download that was cut short"},
           {"\x89HDF\r\n\x1a\n" + zeros, "not an HDF5 file, or damaged: "}}) {
    write_file(path, content);
    EXPECT_ERROR(open_volume(path), File, line);
  }
}

TEST(Volume, CutAnywhere) {
  const TemporaryFolder folder;
  auto paths = samples(folder);
  if (const auto real = shared_file("nibabel_small.mnc"); !real.empty()) paths.push_back(real);
  const std::string cut = folder / "cut.h5";
  for (const std::string& path : paths) {
    const std::string good = read_file(path);
    ASSERT_EQ(in_child([&] { return use(path); }), 0) << path;
    for (size_t percent = 0; percent < 100; ++percent) {
      write_file(cut, good.substr(0, good.size() * percent / 100));
      EXPECT_EQ(in_child([&] { return use(cut); }), 1) << path << " cut at " << percent << " %";
    }
  }
}

// Where the heaps of a file have objects of lists and free space, and what a damaged one may say of their
// sizes: the library goes through them without end, or leaves the heap.
TEST(Volume, DamagedHeaps) {
  const TemporaryFolder folder;
  const std::string bad = folder / "bad.h5";
  int64_t objects = 0;
  for (const std::string& path : samples(folder)) {
    const std::string good = read_file(path);
    const auto number = [&](size_t at, size_t bytes) {
      uint64_t value = 0;
      std::memcpy(&value, good.data() + at, bytes);
      return value;
    };
    for (size_t heap = good.find("GCOL"); heap != good.npos; heap = good.find("GCOL", heap + 4)) {
      const size_t end = heap + number(heap + 8, 8);
      for (size_t at = heap + 16; at + 16 <= end; ++objects) {
        const uint64_t index = number(at, 2), size = number(at + 8, 8);
        for (const uint64_t wrong : {uint64_t{0}, uint64_t{1}, size - 1, size + 1, uint64_t{1} << 40,
                                     ~uint64_t{0}, ~uint64_t{15}, ~uint64_t{15} - 8}) {
          std::string bytes = good;
          std::memcpy(bytes.data() + at + 8, &wrong, 8);
          write_file(bad, bytes);
          EXPECT_LE(in_child([&] { return use(bad); }, 5), 1)
              << path << ": object " << index << " of " << size << " bytes has " << wrong;
          EXPECT_LE(in_child([&] { return vet(bad); }, 5), 1)
              << path << ": object " << index << " of " << size << " bytes has " << wrong;
        }
        at += index == 0 ? size : 16 + (size + 7) / 8 * 8;
        if (index == 0) break;
      }
    }
  }
  EXPECT_GT(objects, 10);
}

// The library itself does not survive every flipped bit; what is ours must not crash, hang, grow or say more
// than a line, nor let the library hang. A crash of the library's is counted, and rare.
TEST(Volume, FlippedBits) {
  const char* asked = std::getenv("TORUS_FLIPS");
  const int64_t flips = asked ? std::atoll(asked) : 300;  // of each file; 3334 are 10 000 in all
  const TemporaryFolder folder;
  const std::string bad = folder / "bad.h5";
  for (const std::string& path : samples(folder)) {
    const std::string good = read_file(path);
    Generator generator(7);
    std::map<int, int64_t> counts;
    for (int64_t i = 0; i < flips; ++i) {
      std::string bytes = good;
      const auto at = static_cast<size_t>(generator.below(static_cast<int64_t>(good.size())));
      const int bit = static_cast<int>(generator.below(8));
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << bit));
      write_file(bad, bytes);
      const int status = in_child([&] { return use(bad); });
      ++counts[status];
      if (status > 1) std::printf("%s: byte %zu, bit %d: status %d\n", path.c_str(), at, bit, status);
    }
    std::printf("%s: %ld flips: %ld read, %ld errors, %ld crashes of the library, %ld of ours, %ld hang\n",
                fs::path(path).filename().c_str(), long(flips), long(counts[0]), long(counts[1]),
                long(counts[crashed_in_library]), long(counts[crashed]), long(counts[hung]));
    EXPECT_LE(counts[crashed_in_library], std::max<int64_t>(1, flips / 500));
    EXPECT_EQ(counts[0] + counts[1] + counts[crashed_in_library], flips);
  }
}

}  // namespace
}  // namespace torus
