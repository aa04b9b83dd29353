#include "torus/data/volume_boxes.h"

#include <unistd.h>

#include <fstream>
#include <set>

#include "core/expect_error.h"
#include "core/temporary_folder.h"
#include "data/foreign.h"
#include "torus/core/random.h"

namespace torus {
namespace {

// Element [z, y, x] of file f is 1000 f + its place.
std::string write_ramp(const TemporaryFolder& folder, int64_t f, std::vector<hsize_t> shape) {
  const std::string path = folder / (std::to_string(f) + ".h5");
  Foreign file(path);
  std::vector<double> values(shape[0] * shape[1] * shape[2]);
  for (size_t i = 0; i < values.size(); ++i) values[i] = 1000 * double(f) + double(i);
  const hid_t options = Foreign::chunked({2, 3, 4});
  H5Pset_deflate(options, 1);
  file.write("x", H5T_STD_I32LE, H5T_NATIVE_DOUBLE, shape, values.data(), options);
  return path;
}

TEST(VolumeBoxes, SlicesComeOnceAnEpoch) {
  const TemporaryFolder folder;
  const std::vector<Volume> volumes = {open_volume(write_ramp(folder, 1, {5, 3, 4})),
                                       open_volume(write_ramp(folder, 2, {7, 3, 4}))};
  const VolumeBoxes boxes(volumes, {.box = {1, 0, 0}, .batch = 4, .seed = 3, .most_open = 1});
  EXPECT_EQ(boxes.boxes_per_epoch(), 12);
  std::vector<std::set<double>> epochs(3);
  for (int64_t i = 0; i < 9; ++i) {
    const Tensor batch = boxes.batch(i).inputs;
    ASSERT_EQ(batch.shape(), (Shape{4, 1, 3, 4}));
    for (int64_t b = 0; b < 4; ++b) {
      const auto values = batch.select(0, b).to_vector<double>();
      for (size_t k = 0; k < values.size(); ++k) EXPECT_EQ(values[k], values[0] + double(k));
      epochs[size_t(i / 3)].insert(values[0]);
    }
    EXPECT_EQ(boxes.batch(i).inputs.to_vector<float>(), batch.to_vector<float>());  // of (seed, index) alone
  }
  for (const auto& epoch : epochs) EXPECT_EQ(epoch.size(), 12u);
  EXPECT_NE(boxes.batch(0).inputs.to_vector<float>(), boxes.batch(3).inputs.to_vector<float>());
}

TEST(VolumeBoxes, TilesFromARandomStart) {
  const TemporaryFolder folder;
  const Volume volume = open_volume(write_ramp(folder, 0, {7, 8, 9}));
  const VolumeBoxes boxes({volume}, {.box = {3, 4, 2}, .batch = 16});
  EXPECT_EQ(boxes.boxes_per_epoch(), 2 * 2 * 4);
  std::set<double> all;
  for (int64_t epoch = 0; epoch < 20; ++epoch) {
    const auto values = boxes.batch(epoch).inputs.to_vector<double>();
    const std::set<double> distinct(values.begin(), values.end());
    EXPECT_EQ(distinct.size(), values.size());  // no element twice
    all.insert(distinct.begin(), distinct.end());
  }
  EXPECT_EQ(all.size(), 7u * 8 * 9);  // and none left out for good
  Prefetcher loader([&](int64_t i) { return boxes.batch(i); }, 2);
  for (int64_t i = 2; i < 6; ++i)
    EXPECT_EQ(loader.next().inputs.to_vector<float>(), boxes.batch(i).inputs.to_vector<float>());
  EXPECT_GE(loader.waited(), 0);
}

TEST(VolumeBoxes, Errors) {
  const TemporaryFolder folder;
  const Volume a = open_volume(write_ramp(folder, 0, {7, 8, 9})),
               b = open_volume(write_ramp(folder, 1, {7, 8, 10}));
  EXPECT_ERROR(VolumeBoxes({a}, {.box = {8, 1, 1}}), Shape,
               "a box of [8, 1, 1] must fit into its shape, got [7, 8, 9]");
  EXPECT_ERROR(VolumeBoxes({a}, {.box = {1, 1}}), Shape, "must fit into its shape");
  EXPECT_ERROR(VolumeBoxes({a, b}, {.box = {1, 0, 0}}), Shape, "1.h5: a box of [1, 8, 9] must fit");
  EXPECT_ERROR(VolumeBoxes({}, {.box = {1}}), Value, "expected volumes");
  EXPECT_EQ(VolumeBoxes({a, b}, {.box = {1, 0, 9}}).boxes_per_epoch(), 14);
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

TEST(VolumeBoxes, MemoryStaysFlat) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer keeps freed memory for a while";
#endif
  const TemporaryFolder folder;
  const std::string path = folder / "large.h5";
  {
    Foreign file(path);
    Generator generator(1);
    const auto values = randn({256, 64, 64}, 0, 100, f32, generator).to_vector<float>();
    const hid_t options = Foreign::chunked({4, 32, 32});
    H5Pset_shuffle(options);
    H5Pset_deflate(options, 1);
    file.write("x", H5T_STD_I16LE, H5T_NATIVE_FLOAT, {256, 64, 64}, values.data(), options);
  }
  const Volume volume = open_volume(path, {.cache_bytes = 1 << 18});  // of 2 MiB
  Generator generator(2);
  Tensor slice = Tensor::empty({1, 64, 64});
  int64_t settled = 0;
  for (int64_t i = 0; i < 10000; ++i) {
    if (i == 500) settled = resident_bytes();
    volume.read_into(slice, {generator.below(256), 0, 0}, {1, 64, 64});
  }
  EXPECT_LT(resident_bytes() - settled, 2 << 20);
}

}  // namespace
}  // namespace torus
