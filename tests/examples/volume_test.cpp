// Runs `volume` as a user does.
#include <gtest/gtest.h>
#include <signal.h>

#include <string>

#include "../../examples/verify.h"
#include "core/temporary_folder.h"
#include "data/foreign.h"
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
        {path + " --export x.h5 --dtype i8", "--dtype: expected f32 or f64, got i8\n"},
        {path + " --dtype f32", "--dtype requires --export"},
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
  // Three arrays are no volume, but no fault.
  ProgramOutcome result = run(path + " --verify");
  EXPECT_EQ(result.status, 0) << result.text;
  EXPECT_TRUE(has(result, "x.h5: all of 5 parts can be read\n")) << result.text;
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

// What ends a child, or holds it up, is a line about what it read at that time; what follows is read all the
// same.
TEST(VerifyParts, TellsWhatCrashesHangsAndTakesMemory) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer has handlers of its own";
#endif
  const auto verify = [](const VerifyLimits& limits, const std::vector<std::function<void()>>& acts) {
    testing::internal::CaptureStdout();
    const int64_t faults = verify_parts("x\n.h5", limits, [&](size_t skip, const VerifyReport& report) {
      report.part("list", [] {});
      for (size_t i = skip; i < acts.size(); ++i) report.part("part\x1b " + std::to_string(i), acts[i]);
    });
    return std::to_string(faults) + "\n" + testing::internal::GetCapturedStdout();
  };
  const auto nothing = [] {};
  const std::string why = "' crashes the HDF5 library, or takes more memory than --memory allows (";
  EXPECT_EQ(verify({}, {nothing, nothing}), "0\nx .h5: all of 3 parts can be read\n");
  EXPECT_EQ(verify({}, {nothing, [] { ::raise(SIGSEGV); }, nothing, [] { ::raise(SIGABRT); },
                        [] { ::_exit(3); }, [] { fail(Error::Kind::File, "[hdf5] two\nlines"); }, nothing}),
            "4\n[verify] x .h5: 'part  1" + why + "Segmentation fault)\n[verify] x .h5: 'part  3" + why +
                "Aborted)\n[verify] x .h5: 'part  4" + why + "it ended the process)\n[hdf5] two lines\n");
  const auto forever = [] { ::pause(); };
  EXPECT_EQ(verify({.seconds = 1}, {nothing, forever, nothing}),
            "1\n[verify] x .h5: 'part  1' was not read within 1 s\n");
  const auto large = [] { std::vector<char>(size_t{200} << 20, 1); };
  EXPECT_EQ(verify({.memory = int64_t{100} << 20}, {large, nothing}),
            "1\n[verify] x .h5: 'part  0' takes more memory than --memory allows\n");
  EXPECT_EQ(verify({.memory = int64_t{400} << 20}, {large}), "0\nx .h5: all of 2 parts can be read\n");
}

// The library goes through a heap whose last object, free space, is of no bytes for ever.
TEST(VolumeProgram, IsNotHungByADamagedHeap) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  {
    Foreign file(path);
    file.write_complex("kspace", std::vector<float>(3 * 6 * 8 * 2, 1), {3, 6, 8});
    file.write("reconstruction_esc", std::vector<double>(48, 1), {3, 4, 4});
    file.variable_attribute("/", "max", "0.5");
    file.variable_attribute("/", "patient_id", "0123");
  }
  std::string bytes = read_file(path);
  const size_t heap = bytes.find("GCOL");
  ASSERT_NE(heap, bytes.npos);
  const auto number = [&](size_t at) {
    uint64_t value = 0;
    std::memcpy(&value, bytes.data() + at, 8);
    return value;
  };
  size_t at = heap + 16;
  while ((number(at) & 0xffff) != 0) at += 16 + (number(at + 8) + 7) / 8 * 8;
  bytes.replace(at + 8, 8, 8, '\0');
  write_file(path, bytes);
  const ProgramOutcome shown = run(path), verified = run(path + " --verify --seconds 20");
  EXPECT_EQ(shown.status, 0) << shown.text;
  EXPECT_TRUE(has(shown, "  patient_id: 0123\n")) << shown.text;
  EXPECT_EQ(verified.status, 0) << verified.text;
  EXPECT_TRUE(has(verified, "x.h5: all of 5 parts can be read\n")) << verified.text;
}

TEST(VolumeProgram, VerifiesWithinTheMemoryThatItIsGiven) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the sanitizer takes memory of its own";
#endif
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  {
    Foreign file(path);
    const std::vector<uint8_t> zeros(size_t{100} << 20);
    const hid_t options = Foreign::chunked({zeros.size()});
    H5Pset_deflate(options, 1);
    file.write("small", std::vector<double>{1, 2}, {2});
    file.write("large", H5T_STD_U8LE, H5T_NATIVE_UINT8, {zeros.size()}, zeros.data(), options);
  }
  ProgramOutcome result = run(path + " --verify --memory 64");
  EXPECT_EQ(result.status, 1) << result.text;
  EXPECT_TRUE(has(result, "/large")) << result.text;
  EXPECT_FALSE(has(result, "/small")) << result.text;
  result = run(path + " --verify --memory 512");
  EXPECT_EQ(result.status, 0) << result.text;
}

TEST(VolumeProgram, VerifiesAsFarAsItTrusts) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  {
    Foreign file(path);
    file.write("sparse", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, {1 << 10, 1 << 10}, nullptr,
               Foreign::chunked({64, 64}));
  }
  ProgramOutcome result = run(path + " --verify");
  EXPECT_EQ(result.status, 1) << result.text;
  EXPECT_TRUE(has(result, "only a file that is trusted may be so sparse")) << result.text;
  result = run(path + " --verify --trust");
  EXPECT_EQ(result.status, 0) << result.text;
  for (const std::string flag : {"--dataset sparse", "--png x.png", "--export x.h5"}) {
    result = run(path + " --verify " + flag);
    EXPECT_EQ(result.status, 1) << flag;
    EXPECT_TRUE(has(result, flag.substr(0, flag.find(' ')) + " excludes --verify")) << result.text;
  }
  result = run(path + " --memory 100");
  EXPECT_TRUE(has(result, "--memory requires --verify")) << result.text;
  // The target of fastMRI, a virtual dataset here, is drawn if it is trusted.
  const std::string scan = folder / "scan.h5";
  {
    Foreign file(folder / "target.h5");
    file.write("images", std::vector<double>(3 * 4 * 4, 1), {3, 4, 4});
  }
  {
    Foreign file(scan);
    file.write_complex("kspace", std::vector<float>(3 * 6 * 8 * 2, 1), {3, 6, 8});
    const hsize_t shape[] = {3, 4, 4};
    const hid_t options = H5Pcreate(H5P_DATASET_CREATE), space = H5Screate_simple(3, shape, nullptr);
    H5Pset_virtual(options, space, (folder / "target.h5").c_str(), "/images", space);
    H5Sclose(space);
    file.write("reconstruction_esc", H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, {3, 4, 4}, nullptr, options);
  }
  result = run(scan + " --png " + folder / "x.png");
  EXPECT_EQ(result.status, 1) << result.text;
  EXPECT_TRUE(has(result, "only a file that is trusted may name others")) << result.text;
  result = run(scan + " --trust --png " + folder / "x.png");
  EXPECT_EQ(result.status, 0) << result.text;
}

TEST(VolumeProgram, ReadsAsItsFlagsSay) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5";
  if (std::system(("ismrmrd_generate_cartesian_shepp_logan -m 32 -c 2 -C -o '" + path + "' > /dev/null 2>&1")
                      .c_str()) != 0)
    GTEST_SKIP() << "no ismrmrd_generate_cartesian_shepp_logan (Debian's ismrmrd-tools)";
  for (const auto& [flags, line] :
       {std::pair<const char*, const char*>{"", "of which 1 are left out: 1 noise\n"},
        {" --leave-out none", "of which 0 are left out\n"},
        {" --leave-out 19,20", "of which 1 are left out: 1 noise\n"},
        {" --leave-out 19x", "--leave-out: expected flags from 1 to 64, as 19,23, or none"},
        {" --leave-out 65", "--leave-out: expected flags from 1 to 64, as 19,23, or none"},
        {" --leave-out ,", "--leave-out: expected flags from 1 to 64, as 19,23, or none"},
        {" --encoding 1", "are left out: 1 noise, 32 of other encoding spaces"}}) {
    const ProgramOutcome result = run(path + flags);
    EXPECT_TRUE(has(result, line)) << flags << result.text;
  }
}

TEST(VolumeProgram, PrintsNamesOfStrangersOnOneLine) {
  const TemporaryFolder folder;
  const std::string path = folder / "x.h5", evil = "a\x1b[2J\nb";
  {
    Foreign file(path);
    file.write(evil, std::vector<double>{1, 2, 3, 4}, {4});
    file.variable_attribute("/" + evil, "DIMENSION_LABELS", evil);
    file.variable_attribute("/" + evil, evil.c_str(), evil);
  }
  for (const std::string flags : {"", " --verify", " --dataset none", " --slice q=1 --png /tmp/none.png"}) {
    const ProgramOutcome result = run(path + flags);
    EXPECT_EQ(result.text.find('\x1b'), std::string::npos) << flags;
    EXPECT_EQ(result.text.find("\nb"), std::string::npos) << result.text;
  }
}

}  // namespace
}  // namespace torus
