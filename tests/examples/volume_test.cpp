// Runs `volume` as a user does.
#include <gtest/gtest.h>

#include <string>

#include "core/temporary_folder.h"
#include "examples/program.h"
#include "torus/core/hdf5.h"
#include "torus/core/random.h"

namespace torus {
namespace {

ProgramOutcome run(const std::string& arguments) { return run_program("volume " + arguments); }

TEST(VolumeProgram, SaysDrawsAndExports) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  const Tensor values = randn({20, 300, 40});
  {
    auto file = Hdf5File::create(path);
    file.write("deep/x", values);
    file.set_attribute("deep/x", "note", "two\nlines");
    file.close();
  }
  ProgramOutcome result = run(path + " --png " + folder / "x.png" + " --export " + folder / "out.h5");
  EXPECT_EQ(result.status, 0) << result.text;
  for (const char* line : {"layout       a dataset\n", "dataset      /deep/x\n",
                           "shape        [20, 300, 40]: axis 0 axis 1 axis 2\n", "type         f32\n",
                           "filters      fletcher32\n", "  note: two lines\n", "wrote "})
    EXPECT_TRUE(has(result, line)) << line << result.text;
  EXPECT_EQ(read_file(folder / "x.png").substr(1, 3), "PNG");
  EXPECT_EQ(Hdf5File::open(folder / "out.h5").read("volume").to_vector<float>(), values.to_vector<float>());
  result = run("'" + path + "' --slice 'axis 1=7' --png '" + folder / "y.png" + "' --export '" +
               folder / "d.h5" + "' --dtype f64");
  EXPECT_TRUE(has(result, "y.png: 240 x 120, values, white is")) << result.text;
  EXPECT_EQ(Hdf5File::open(folder / "d.h5").dataset("volume").dtype, f64);
  EXPECT_EQ(run("--help").status, 0);
}

TEST(VolumeProgram, SaysWhatIsWrongInOneLine) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  {
    auto file = Hdf5File::create(path);
    file.write("x", Tensor::zeros({4, 4}));
    file.close();
  }
  write_file(folder / "text", "some text");
  for (const auto& [arguments, line] :
       {std::pair<std::string, std::string>{"", "volume: FILE is required\n"},
        {folder / "none", "none: No such file or directory\n"},
        {folder / "text", "text: not an HDF5 file, or damaged: no signature of HDF5 in its 9 bytes"},
        {path + " --slice 1", "--slice: expected --png FILE to draw it into\n"},
        {path + " --slice 4 --png /tmp/none.png",
         "--slice: expected AXIS=INDEX with an index from 0 to 3 for 'axis 0', got 4\n"},
        {path + " --slice q=1 --png /tmp/none.png", "--slice: no axis 'q' in "},
        {path + " --dataset y", ": has no 'y'\n"},
        {path + " --dtype i8", "--dtype: expected f32 or f64, got i8\n"},
        {path + " --png /nowhere/x.png", "[png] cannot write /nowhere/x.png"},
        {path + " --export /nowhere/x.h5", "[write] /nowhere/x.h5: there is no folder /nowhere\n"}}) {
    const ProgramOutcome result = run(arguments);
    EXPECT_EQ(result.status, 1) << arguments;
    EXPECT_TRUE(has(result, line)) << result.text;
  }
}

TEST(VolumeProgram, Verifies) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer takes more addresses than the child may have";
#endif
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  {
    auto file = Hdf5File::create(path);
    for (const char* name : {"a", "b", "c"}) file.write(name, randn({50, 60}));
    file.close();
  }
  ProgramOutcome result = run(path + " --verify");
  EXPECT_EQ(result.status, 1);  // three arrays are no volume
  EXPECT_TRUE(has(result, "neither fastMRI, ISMRMRD nor MINC2")) << result.text;
  {
    auto file = Hdf5File::create(path);
    file.write("a", randn({50, 60}));
    file.close();
  }
  result = run(path + " --verify");
  EXPECT_EQ(result.status, 0) << result.text;
  EXPECT_TRUE(has(result, "x.h5: all of 3 parts can be read\n")) << result.text;
  // A byte of the elements is changed: the checksum finds it.
  std::string bytes = read_file(path);
  bytes[bytes.size() - 500] = static_cast<char>(bytes[bytes.size() - 500] ^ 1);
  write_file(path, bytes);
  result = run(path + " --verify");
  EXPECT_EQ(result.status, 1);
  EXPECT_TRUE(has(result, "cannot read '/a' at [0, 0]: ")) << result.text;
  write_file(path, bytes.substr(0, 1000));
  result = run(path + " --verify");
  EXPECT_EQ(result.status, 1);
  EXPECT_TRUE(has(result, "truncated file")) << result.text;
}

}  // namespace
}  // namespace torus
