// Runs `train_mri` as a user does, and what it is made of.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <regex>
#include <sstream>

#include "../../examples/wrap_study.h"
#include "core/temporary_folder.h"
#include "data/foreign.h"
#include "examples/program.h"

namespace torus {
namespace {

// A network so small that a step takes no time.
const std::string tiny =
    " --layers 1 --heads 2 --width 12 --window 1,3,3 --threads 1 --eval-every 2 --lr 0.003 --slices 2";

class TrainMri : public testing::Test {
 protected:
  ProgramOutcome run(const std::string& flags) {
    FILE* pipe = popen(
        ("cd '" + folder / "" + "' && '" TORUS_EXAMPLES_DIR "/train_mri' " + flags + " 2>&1").c_str(), "r");
    std::string text;
    char buffer[4096];
    for (size_t count; (count = fread(buffer, 1, sizeof buffer, pipe)) > 0;) text.append(buffer, count);
    const int status = pclose(pipe);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text};
  }

  void expect_refused(const std::string& flags, const std::string& line) {
    const ProgramOutcome result = run(flags);
    EXPECT_EQ(result.status, 1) << flags << "\n" << result.text;
    EXPECT_TRUE(has(result, line)) << result.text;
    const std::string last = result.text.substr(result.text.rfind('\n', result.text.size() - 2) + 1);
    EXPECT_EQ(last.rfind("train_mri: ", 0), 0u) << result.text;
  }

  // The losses of a log, as written.
  std::vector<std::string> losses(const std::string& name) {
    std::vector<std::string> result;
    std::istringstream lines(read_file(folder / name));
    std::smatch match;
    for (std::string line; std::getline(lines, line);)
      if (std::regex_match(line, match, std::regex("\\{\"step\": [0-9]+, \"loss\": (.*)\\}")))
        result.push_back(match[1]);
    return result;
  }

  /// Width and height.
  std::pair<int, int> size_of_png(const std::string& name) {
    const std::string bytes = read_file(folder / name);
    if (bytes.size() < 24 || bytes.substr(1, 3) != "PNG") return {0, 0};
    const auto number = [&](size_t at) {
      int result = 0;
      for (size_t i = 0; i < 4; ++i) result = result * 256 + static_cast<unsigned char>(bytes[at + i]);
      return result;
    };
    return {number(16), number(20)};
  }

  /// Grey pixels, and the width.
  std::pair<std::vector<unsigned char>, int64_t> read_png(const std::string& path) {
    png_image image = {};
    image.version = PNG_IMAGE_VERSION;
    EXPECT_TRUE(png_image_begin_read_from_file(&image, path.c_str()));
    image.format = PNG_FORMAT_GRAY;
    std::vector<unsigned char> pixels(PNG_IMAGE_SIZE(image));
    EXPECT_TRUE(png_image_finish_read(&image, nullptr, pixels.data(), 0, nullptr));
    return {pixels, image.width};
  }

  void write_images(const std::string& name, const Shape& shape, uint64_t seed) {
    const Tensor image = phantom(shape, seed);
    const Tensor magnitude = sqrt(sum(Variable(image) * Variable(image), {3})).value();
    auto file = Hdf5File::create(folder / name);
    file.write("image", magnitude);
    file.close();
  }

  // k-space of [slices, coils, height, width]; a mask makes it a file to test on.
  void write_fastmri(const std::string& name, uint64_t seed, bool is_test = false) {
    const int64_t slices = 3, coils = 2, height = 24, width = 18;
    const Tensor image = phantom({slices, height, width}, seed);
    std::vector<Variable> of_coils;
    for (int64_t c = 0; c < coils; ++c)
      of_coils.push_back(Variable(image) * (0.5 + 0.25 * static_cast<double>(c)));
    const Tensor kspace = fft(stack(of_coils, 1), {2, 3}).value();
    Foreign file(folder / name);
    file.write_complex("kspace", kspace.to_vector<float>(), {3, 2, 24, 18});
    file.write_text(
        "ismrmrd_header",
        "<ismrmrdHeader><encoding><encodedSpace><matrixSize><x>24</x><y>18</y><z>1</z></matrixSize>"
        "</encodedSpace><reconSpace><matrixSize><x>12</x><y>12</y><z>1</z></matrixSize></reconSpace>"
        "</encoding></ismrmrdHeader>");
    file.attribute("/", "acquisition", "AXT2");
    if (is_test)
      file.write("mask", std::vector<double>(18, 1), {18});
    else
      file.write("reconstruction_rss", std::vector<double>(3 * 12 * 12, 1), {3, 12, 12}, H5T_IEEE_F32LE);
  }

  const TemporaryFolder folder;
};

TEST_F(TrainMri, HelpNamesTheFlagsAndWhatTheStudyExpects) {
  const ProgramOutcome result = run("--help");
  EXPECT_EQ(result.status, 0);
  for (const char* part : {"--undersample", "--wrap", "--save", "--resume", "--device", "--study", "fastMRI",
                           "Expected, before it was run", "5 seeds", "a demonstration"})
    EXPECT_TRUE(has(result, part)) << part;
}

TEST_F(TrainMri, TrainsOnPhantomsAndDraws) {
  const ProgramOutcome result = run("--phantom --patch 2,1,1 --steps 5 --log log.jsonl --png out.png" + tiny);
  EXPECT_EQ(result.status, 0) << result.text;
  for (const char* part : {"test on   phantom 1017: 16 x 24 x 24 (z, y, x)\n",
                           "undersampled along x: random, one frequency of 4, 8 % in the middle\n",
                           "window    y: 3 tokens, shifts inward at the ends: nothing is sampled on it\n",
                           "window    x: 3 tokens, wraps around: its sampling is simulated\n",
                           "step 5/5  loss", "step 4: a slab to test on has ", "trained to step 5\n",
                           "waited for data: ", "mean of 2", "wrote out.png: slice 8 of"})
    EXPECT_TRUE(has(result, part)) << part << "\n" << result.text;
  EXPECT_EQ(losses("log.jsonl").size(), 5u);
  EXPECT_EQ(size_of_png("out.png"), (std::pair{3 * 240 + 4 * 8, 2 * (240 + 18) + 3 * 8}));
}

TEST_F(TrainMri, ResumesBitForBit) {
  const std::string flags =
      "--phantom --patch 2,2,1 --steps 6 --seed 3 --cascades 2 --sampling equispaced --wrap y,x --log ";
  ASSERT_EQ(run(flags + "whole.jsonl" + tiny).status, 0);
  ASSERT_EQ(run(flags + "parts.jsonl --minutes 1e-9 --save a.h5" + tiny).status, 0);
  EXPECT_EQ(losses("parts.jsonl").size(), 1u);
  const ProgramOutcome rest = run("--resume a.h5 --log parts.jsonl --save a.h5");
  ASSERT_EQ(rest.status, 0) << rest.text;
  EXPECT_TRUE(has(rest, "window    y: 3 tokens, wraps around: as --wrap says\n")) << rest.text;
  EXPECT_EQ(losses("parts.jsonl"), losses("whole.jsonl"));
  expect_refused("--resume a.h5 --width 16", "--width 16 is at odds with a.h5, which was made with 12");
  expect_refused("--resume none.h5", "none.h5");
  const ProgramOutcome again = run("--resume a.h5");  // only tests
  EXPECT_EQ(again.status, 0) << again.text;
  EXPECT_FALSE(has(again, "waited"));
}

TEST_F(TrainMri, ReadsImagesOfAnySize) {
  write_images("a.h5", {4, 17, 22}, 1);
  write_images("b.h5", {3, 20, 19}, 2);
  write_images("c.h5", {5, 18, 18}, 3);
  const ProgramOutcome result =
      run("a.h5 b.h5 c.h5 --patch 1,4,4 --steps 4 --batch 2 --sampling equispaced "
          "--center-fraction 0.1 --undersample y" +
          tiny);
  EXPECT_EQ(result.status, 0) << result.text;
  EXPECT_TRUE(has(result, "train on  a.h5: 4 x 17 x 22 (axis 0, axis 1, axis 2), restored as 4 x 20 x 24\n"))
      << result.text;
  EXPECT_TRUE(has(result, "test on   c.h5: 5 x 18 x 18")) << result.text;
  const ProgramOutcome alone = run("a.h5 --patch 1,4,4 --steps 1" + tiny);
  EXPECT_EQ(alone.status, 0) << alone.text;
  EXPECT_TRUE(has(alone, "note: one file only; it is trained and tested on")) << alone.text;
}

// All is measured, so that data consistency alone gives the truth, whatever the network says: through
// reading, transforms, coils, crop and metrics.
TEST_F(TrainMri, OfKspaceTheAxesThatAreEncodedWrap) {
  write_fastmri("a.h5", 1);
  write_fastmri("b.h5", 2);
  write_fastmri("test.h5", 3, true);
  const std::string flags =
      " --layers 1 --heads 2 --width 12 --window 1,3,3 --threads 1 --patch 1,4,4 --center-fraction 1 "
      "--acceleration 1 ";
  const ProgramOutcome result = run("a.h5 b.h5 --steps 2" + flags);
  EXPECT_EQ(result.status, 0) << result.text;
  for (const char* part :
       {"test on   b.h5: 3 x 12 x 12 (slice, height, width), 2 coils, restored one by one and joined",
        "restored as 3 x 24 x 16\n", "window    z (slice): 1 token, shifts inward at the ends: slices of",
        "window    y (height): 3 tokens, wraps around: it is encoded\n",
        "window    x (width): 3 tokens, wraps around: it is encoded\n"})
    EXPECT_TRUE(has(result, part)) << part << "\n" << result.text;
  std::smatch match;
  ASSERT_TRUE(std::regex_search(result.text, match, std::regex("\n +restored +0.0000 +([0-9.]+) +1.0000\n")))
      << result.text;
  EXPECT_GT(std::stod(match[1]), 100);
  expect_refused("a.h5 test.h5" + flags, "test.h5: is undersampled itself (a fastMRI file to test on)");
  write_images("image.h5", {3, 24, 16}, 4);
  expect_refused("a.h5 image.h5" + flags,
                 "--wrap: say which axes wrap, because a.h5 and image.h5 are not both");
  const ProgramOutcome target = run("a.h5 b.h5 --dataset reconstruction_rss --steps 1 --patch 1,4,4" + tiny);
  EXPECT_EQ(target.status, 0) << target.text;
  EXPECT_TRUE(has(target, "wraps around: its sampling is simulated")) << target.text;
}

TEST_F(TrainMri, ReadsIsmrmrd) {
  const std::string make =
      "cd '" + folder / "" + "' && ismrmrd_generate_cartesian_shepp_logan -m 32 -c 2 -n 0.01 ";
  if (std::system((make + "-r 2 -o a.h5 > /dev/null 2>&1").c_str()) != 0)
    GTEST_SKIP() << "no ismrmrd_generate_cartesian_shepp_logan (Debian's ismrmrd-tools)";
  ASSERT_EQ(std::system((make + "-a 2 -w 8 -o gaps.h5 > /dev/null 2>&1").c_str()), 0);
  const std::string flags =
      " --layers 1 --heads 2 --width 12 --window 1,3,3 --threads 1 --patch 1,4,4 --steps 2";
  const ProgramOutcome result = run("a.h5" + flags);
  EXPECT_EQ(result.status, 0) << result.text;
  EXPECT_TRUE(has(result, "2 frames, 2 coils")) << result.text;
  EXPECT_TRUE(has(result, "undersampled along y")) << result.text;
  EXPECT_TRUE(has(result, "mean of 2")) << result.text;
  expect_refused("gaps.h5" + flags, "is undersampled itself (k-space has gaps along ky)");
  // Readouts that follow another trajectory are no lines of a grid.
  std::string bytes = read_file(folder / "a.h5");
  const std::string word = "<trajectory>cartesian</trajectory>";
  for (size_t at = bytes.find(word); at != bytes.npos; at = bytes.find(word, at))
    bytes.replace(at, word.size(), "<trajectory>radial</trajectory>   ");
  write_file(folder / "radial.h5", bytes);
  expect_refused("radial.h5" + flags, "radial.h5: its trajectory is 'radial'; only of cartesian k-space");
  // How the file is read is a part of what was trained.
  ASSERT_EQ(run("a.h5 --leave-out 19,20 --save a.ckpt" + flags).status, 0);
  expect_refused("--resume a.ckpt --leave-out none", "--leave-out none is at odds with a.ckpt");
  EXPECT_EQ(run("--resume a.ckpt").status, 0);
  expect_refused("a.h5 --encoding 1" + flags, "has no readouts to make a volume of");
  expect_refused("a.h5 --group other" + flags, "no acquisitions in 'other'");
}

TEST_F(TrainMri, SaysWhatIsWrongInOneLine) {
  write_images("a.h5", {4, 16, 16}, 1);
  for (const auto& [flags, line] :
       {std::pair<const char*, const char*>{"none.h5", "none.h5: No such file"},
        {"--bogus", "--bogus"},
        {"--steps 0", "--steps: expected a number above 0, got 0"},
        {"--lr nan", "--lr: expected a number above 0, got nan"},
        {"--minutes inf", "--minutes: expected a number of at least 0, finite, got inf"},
        {"--acceleration nan", "--acceleration: expected a number of at least 1, got nan"},
        {"--study moon", "--study"},
        {"--phantom --wrap q", "--wrap: expected axes of z,y,x, got q"},
        {"--phantom --undersample none", "--undersample: expected at least one axis"},
        {"--phantom --patch 2,4", "--patch: expected three numbers above 0, as 2,4,4, got 2,4"},
        {"--phantom --window 1,2,3,4", "--window: expected three numbers, got 1,2,3,4"},
        {"--phantom --slices 3 --patch 2,1,1", "--slices: expected a multiple of the patch's 2, got 3"},
        {"a.h5 --slices 8", "--slices: expected at most the 4 of a.h5, got 8"},
        {"a.h5 --slices 2 --wrap z,x", "--wrap z: slabs of 2 slices are a part of the 4 of a.h5"},
        {"a.h5 --slices 2 --undersample z", "--slices must be 4 for a.h5"},
        {"a.h5 --slices 2 --width 10 --heads 4", "10 channels do not divide into 4 heads"},
        {"--phantom --save no/such/a.h5", "cannot save to no/such/a.h5"},
        {"--phantom --png no/such/a.png", "cannot save to no/such/a.png"},
        {"--phantom --test a.h5", "--test: expected FILES to train on, too"},
        {"--phantom a.h5", "--phantom: expected no FILES to train on, got a.h5"},
        {"--phantom --group dataset", "--group: expected FILES to read"},
        {"--phantom --trust", "--trust: expected FILES to read"},
        {"--study wrap --layers 3", "--study wrap does not take --layers"},
        {"--study wrap --save x --steps 3", "--study wrap does not take --save"},
        {"--study wrap --resume x", "--study wrap does not take --resume"},
        {"--study wrap --minutes 1", "--study wrap does not take --minutes"},
        {"--study wrap --seed 1", "--study wrap does not take --seed"},
        {"--study wrap --trust", "--study wrap does not take --trust"},
        {"--study wrap a.h5", "--study wrap does not take FILES"},
        {"--phantom --center-fraction 2", "--center-fraction: expected a number from 0 to 1, got 2"},
        {"--phantom --acceleration 0.5", "--acceleration: expected a number of at least 1, got 0.5"},
        {"--phantom --sampling equispaced --center-fraction 0.5", "[sampling_mask] equispaced: the middle"}})
    expect_refused(flags, line);
}

TEST_F(TrainMri, SaysWhatVolumesHold) {
  const auto write = [&](const std::string& name, float value) {
    std::vector<float> values(4 * 16 * 16, 0);
    values[700] = value;
    auto file = Hdf5File::create(folder / name);
    file.write("image", Tensor::from(values, {4, 16, 16}));
    file.close();
  };
  write("nan.h5", NAN);
  write("inf.h5", INFINITY);
  write("zero.h5", 0);
  const std::string flags = " --patch 1,4,4 --steps 2" + tiny;
  for (const std::string name : {"nan.h5", "inf.h5"})
    expect_refused(name + flags, name + ": holds NaN or infinity, in one of the slices from ");
  const ProgramOutcome result = run("zero.h5" + flags);
  EXPECT_EQ(result.status, 0) << result.text;
  EXPECT_TRUE(has(result, "zero.h5                            is all zero: there is nothing to measure\n"))
      << result.text;
  EXPECT_FALSE(has(result, "nan")) << result.text;
}

// A picture of a volume that knows where it lies is turned as `volume` turns its own.
TEST_F(TrainMri, DrawsAsRadiologistsSee) {
  const int64_t n = 16;
  std::vector<double> values(static_cast<size_t>(2 * n * n), 0);
  for (int64_t z = 0; z < 2; ++z) values[static_cast<size_t>((z * n + 2) * n + 3)] = 1;  // low in y and in x
  for (const double step : {1., -1.}) {
    {
      Foreign file(folder / "x.mnc");
      for (const char* group : {"/minc-2.0", "/minc-2.0/dimensions", "/minc-2.0/image", "/minc-2.0/image/0"})
        file.group(group);
      file.write("/minc-2.0/image/0/image", values, {2, n, n});
      file.attribute("/minc-2.0/image/0/image", "dimorder", std::string("zspace,yspace,xspace"));
      for (const std::string axis : {"zspace", "yspace", "xspace"}) {
        file.write("/minc-2.0/dimensions/" + axis, std::vector<double>{0}, {}, H5T_STD_I32LE);
        file.attribute("/minc-2.0/dimensions/" + axis, "step", std::vector<double>{step});
      }
    }
    const ProgramOutcome result = run("x.mnc --patch 1,4,4 --steps 1 --png x.png" + tiny);
    EXPECT_EQ(result.status, 0) << result.text;
    EXPECT_TRUE(has(result, "radiological: the patient's right is on the left, anterior and superior are up"))
        << result.text;
    // The truth is the panel at the left above, 16 pixels a voxel.
    const auto [pixels, width] = read_png(folder / "x.png");
    const auto lit = [&](int64_t y, int64_t x) {
      return pixels[static_cast<size_t>((8 + 18 + 16 * y + 8) * width + 8 + 16 * x + 8)] > 128;
    };
    EXPECT_EQ(lit(2, 3), step < 0);
    EXPECT_EQ(lit(n - 1 - 2, n - 1 - 3), step > 0);
  }
  write_images("image.h5", {4, 16, 16}, 1);
  EXPECT_TRUE(has(run("image.h5 --patch 1,4,4 --steps 1" + tiny), "rows and columns as stored"));
}

TEST(Picture, ResizedKeepsEveryColumn) {
  std::vector<double> line(97, 0);
  for (size_t i = 0; i < line.size(); i += 5) line[i] = 1;  // alone between others
  for (const int64_t width : {13, 50, 96, 97, 98, 300}) {
    const auto image = resized(line, 1, 97, 3, width);
    ASSERT_EQ(image.size(), static_cast<size_t>(3 * width));
    for (size_t i = 0; i < line.size(); i += 5) {
      bool seen = false;
      for (int64_t x = 0; x < width; ++x)
        seen |= x * 97 / width <= static_cast<int64_t>(i) && image[static_cast<size_t>(x)] > 0 &&
                static_cast<int64_t>(i) < std::max(x * 97 / width + 1, (x + 1) * 97 / width);
      EXPECT_TRUE(seen) << "column " << i << " of 97 in " << width << " pixels";
    }
  }
}

// ----------------------------------------------------------------------------------------------- its parts

TEST(Restorer, KeepsWhatWasMeasuredAndScales) {
  const Problem problem{{false, false, true}, {Sampling::random, 2, 0.2}, 2, {1, 2, 2}};
  manual_seed(1);
  const Restorer model(
      {.cascades = 2,
       .network = network_options(problem, {.channels = 12, .heads = 2, .window = {1, 3, 3}}, 1),
       .axes = problem.axes()});
  const PhantomScan scan({2, 8, 16}, 1);
  const Tensor frequencies = fft(Variable(scan.slab(0, 0, 0, 2).unsqueeze(0)), {3}).value(),
               mask = problem.mask(scan, {5}).unsqueeze(0);
  const Tensor restored = model({frequencies, mask}).value();
  const auto a = fft(Variable(restored), {3}).value().to_vector<float>(), b = frequencies.to_vector<float>(),
             measured = mask.expand(frequencies.shape()).to_vector<float>();
  for (size_t i = 0; i < a.size(); ++i) {
    if (measured[i] != 0) {
      EXPECT_NEAR(a[i], b[i], 1e-5);
    }
  }
  const auto scaled = model({(Variable(frequencies) * 1000).value(), mask}).value().to_vector<float>(),
             plain = restored.to_vector<float>();
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_NEAR(scaled[i], 1000 * plain[i], 0.02);
}

TEST(SlabSource, IsAFunctionOfSeedAndIndex) {
  const Problem problem{{false, false, true}, {}, 2, {1, 2, 4}};
  const std::vector<std::shared_ptr<const Scan>> scans = {std::make_shared<PhantomScan>(Shape{4, 8, 16}, 1),
                                                          std::make_shared<PhantomScan>(Shape{6, 8, 12}, 2)};
  const SlabSource source(scans, problem, 3, 7), other(scans, problem, 3, 8),
      rolled(scans, problem, 3, 7, true);
  std::set<int64_t> widths;
  for (int64_t i = 0; i < 20; ++i) {
    const Slabs slabs = source(i), again = source(i);
    EXPECT_EQ(slabs.frequencies.to_vector<float>(), again.frequencies.to_vector<float>());
    EXPECT_EQ(slabs.masks.to_vector<float>(), again.masks.to_vector<float>());
    const int64_t width = slabs.frequencies.size(3);
    EXPECT_EQ(slabs.frequencies.shape(), (Shape{3, 2, 8, width, 2}));
    EXPECT_EQ(slabs.masks.shape(), (Shape{3, 1, 1, width, 1}));
    widths.insert(width);
    EXPECT_EQ(rolled(i).frequencies.shape().dim(), 5);
  }
  EXPECT_EQ(widths, (std::set<int64_t>{12, 16}));
  EXPECT_NE(source(0).masks.to_vector<float>(), other(0).masks.to_vector<float>());
}

TEST(WrapStudy, RunsInSmall) {
  const TemporaryFolder folder;
  const StudySize size{{2, 16, 64}, {1, 4, 4}, {1, 3, 3}, 2, 2, 1, 1, 2, 12, 1, 2, 0.01};
  testing::internal::CaptureStdout();
  run_wrap_study(size, cpu, folder / "study.png", folder / "log.jsonl");
  const std::string text = testing::internal::GetCapturedStdout();
  // Wrapped, a roll by patches changes nothing; shifted it does; and the control sees no difference.
  std::smatch match;
  ASSERT_TRUE(std::regex_search(text, match, std::regex("\nwrap +([0-9.e+-]+) [^]*\nshift +([0-9.e+-]+) ")))
      << text;
  EXPECT_LT(std::stod(match[1]), 1e-5) << text;
  EXPECT_GT(std::stod(match[2]), 1e-3) << text;
  EXPECT_TRUE(std::regex_search(text, std::regex("\ncontrol, wrap - shift +[+-]0.00 \\(0.00\\)"))) << text;
  EXPECT_EQ(read_file(folder / "study.png").substr(1, 3), "PNG");
  const std::string log = read_file(folder / "log.jsonl");
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 5 * 5 * 16);
}

}  // namespace
}  // namespace torus
