// Runs `mask` and `new_mask` as a user does.
#include "torus/ops/attention/mask.h"

#include <gtest/gtest.h>
#include <png.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/temporary_folder.h"
#include "examples/program.h"
#include "torus/core/device.h"

namespace torus {
namespace {

// The pixels of a grey PNG, and its width.
std::pair<std::vector<unsigned char>, int64_t> read_grey(const std::string& path) {
  png_image image;
  std::memset(&image, 0, sizeof image);
  image.version = PNG_IMAGE_VERSION;
  EXPECT_TRUE(png_image_begin_read_from_file(&image, path.c_str())) << image.message;
  image.format = PNG_FORMAT_GRAY;
  std::vector<unsigned char> pixels(PNG_IMAGE_SIZE(image));
  EXPECT_TRUE(png_image_finish_read(&image, nullptr, pixels.data(), 0, nullptr)) << image.message;
  return {pixels, image.width};
}

TEST(MaskProgram, DrawsCountsAndChecks) {
  const ProgramOutcome result =
      run_program("mask --grid 5x5 --window 3 --boundary wrap,wrap --show --gradcheck");
  EXPECT_EQ(result.status, 0) << result.text;
  EXPECT_TRUE(has(result, "keys a query       9 to 9\n")) << result.text;
  EXPECT_TRUE(has(result, "scores needed      225\n")) << result.text;
  EXPECT_TRUE(has(result, "   0  ##..###..#..........##..#\n")) << result.text;
  EXPECT_TRUE(has(result, "query (0, 0)\n      @#..#\n      ##..#\n      .....\n      .....\n      ##..#\n"))
      << result.text;
  EXPECT_TRUE(has(result, "finite differences, all")) << result.text;
  EXPECT_FALSE(has(result, "WRONG")) << result.text;
}

TEST(MaskProgram, CombinesAndWritesPictures) {
  const TemporaryFolder folder;
  const ProgramOutcome result =
      run_program("mask --tokens 5000 --causal --left 64 --png '" + folder / "mask.png" + "'");
  EXPECT_EQ(result.status, 0) << result.text;
  EXPECT_TRUE(has(result, "keys a query       1 to 65\n")) << result.text;
  std::ifstream file(folder / "mask.png", std::ios::binary);
  char head[4] = {};
  file.read(head, 4);
  EXPECT_EQ(std::string(head + 1, 3), "PNG");
  const ProgramOutcome valid = run_program("mask --grid 6x4 --window 3,2 --boundary valid --gradcheck");
  EXPECT_EQ(valid.status, 0) << valid.text;
  EXPECT_TRUE(has(valid, "keys a query       6 to 6\n")) << valid.text;
}

// Grey by how many of the pairs of a pixel are allowed, from the map alone: all pairs of this grid
// are 6.9e10.
TEST(MaskProgram, DrawsLargeGridsFromTheMap) {
  const TemporaryFolder folder;
  const ProgramOutcome large =
      run_program("mask --grid 64x64x64 --window 5 --boundary wrap --png '" + folder / "large.png" + "'");
  EXPECT_EQ(large.status, 0) << large.text;
  for (const auto& [flags, mask, n] :
       {std::tuple<std::string, Mask, int64_t>{"--tokens 2500 --causal --left 900",
                                               causal() & sliding_window(900, 0), 2500},
        {"--grid 15x16x13 --window 5,4,3 --boundary wrap,shift,causal",
         neighborhood(
             {.grid = {15, 16, 13}, .window = {5, 4, 3}, .boundary = {wrap, shift, Boundary::causal}}),
         15 * 16 * 13},
        {"--documents 100,0,50,3", document({100, 0, 50, 3}), 153}}) {
    const ProgramOutcome result = run_program("mask " + flags + " --png '" + folder / "mask.png" + "'");
    ASSERT_EQ(result.status, 0) << result.text;
    const auto [pixels, width] = read_grey(folder / "mask.png");
    const int64_t step = (n + 2047) / 2048, zoom = std::max<int64_t>(1, 512 / n),
                  side = (n + step - 1) / step * zoom;
    ASSERT_EQ(width, side);
    ASSERT_EQ(static_cast<int64_t>(pixels.size()), side * side);
    for (int64_t y = 0; y < side; y += 3)
      for (int64_t x = y % 2; x < side; x += 5) {
        int64_t allowed = 0, pairs = 0;
        for (int64_t q = y / zoom * step; q < std::min(n, (y / zoom + 1) * step); ++q)
          for (int64_t k = x / zoom * step; k < std::min(n, (x / zoom + 1) * step); ++k)
            ++pairs, allowed += mask.allows(q, k, n, n);
        ASSERT_EQ(int{pixels[static_cast<size_t>(y * side + x)]}, 255 - 255 * allowed / pairs)
            << flags << " at " << y << ", " << x;
      }
  }
}

TEST(MaskProgram, SaysWhatIsWrongInOneLine) {
  for (const auto& [flags, line] :
       {std::pair<const char*, const char*>{
            "--grid 5x5 --window 0",
            "[neighborhood] axis 0: window and dilation must be at least 1, got 0 and 1\n"},
        {"--grid 5xa", "--grid: expected numbers separated by 'x', got 5xa\n"},
        {"--grid 5x", "--grid: expected numbers separated by 'x', got 5x\n"},
        {"--grid ''", "--grid: expected numbers separated by 'x', got \n"},
        {"--grid 5 --window 3,", "--window: expected numbers separated by ',', got 3,\n"},
        {"--grid 5 --dilation ,1", "--dilation: expected numbers separated by ',', got ,1\n"},
        {"--grid 4x4 --window 3,3,3", "--window: expected 1 or 2 entries, one an axis of the grid, got 3\n"},
        {"--grid 4 --boundary round",
         "--boundary: expected wrap, shift, shrink, causal or valid, between commas, got 'round'\n"},
        {"--grid 4 --boundary wrap,",
         "--boundary: expected wrap, shift, shrink, causal or valid, between commas, got 'wrap,'\n"},
        {"--grid 4x4 --boundary ''",
         "--boundary: expected wrap, shift, shrink, causal or valid, between commas, got ''\n"},
        {"--grid 9223372036854775807 --window 9 --boundary valid",
         "--grid: an axis has at most 2147483647 tokens\n"},
        {"--grid 4x4 --documents 3,4", "[document] the documents have 7 queries, got 16\n"},
        {"--tokens 5 --documents ''", "--documents: expected numbers separated by ',', got \n"},
        {"--tokens 5 --documents 3,4", "[document] the documents have 7 queries, got 5\n"},
        {"--tokens 100 --window 5", "mask: --window requires --grid\n"},
        {"--tokens 100 --dilation 2", "mask: --dilation requires --grid\n"},
        {"--tokens 100 --boundary wrap", "mask: --boundary requires --grid\n"},
        {"--grid 4x4 --tokens 5", "mask: --grid excludes --tokens\n"},
        {"--tokens 0", "mask: --tokens: expected a number above 0, got 0\n"},
        {"--tokens 9 --left -3", "mask: --left: expected a number of at least 0, got -3\n"},
        {"--tokens 9 --right -1", "mask: --right: expected a number of at least 0, got -1\n"},
        {"--tokens 9 --prefix -5", "mask: --prefix: expected a number of at least 0, got -5\n"},
        {"", "mask: expected --grid, --tokens or --documents (--help lists all)\n"},
        {"--tokens 8 --png /nowhere/at.png", "[png] cannot write /nowhere/at.png"}}) {
    const ProgramOutcome result = run_program(std::string("mask ") + flags);
    EXPECT_EQ(result.status, 1) << flags;
    EXPECT_TRUE(has(result, line)) << result.text;
  }
  const ProgramOutcome unknown = run_program("mask --bogus");
  EXPECT_EQ(unknown.status, 1);
  EXPECT_EQ(unknown.text, "mask: The following argument was not expected: --bogus\n");
}

TEST(NewMaskProgram, DrawsAndChecks) {
  const ProgramOutcome result = run_program("new_mask");
  EXPECT_EQ(result.status, 0) << result.text;
  for (const char* row : {"output, reference", "lse, reference", "gradient of k, reference"})
    EXPECT_TRUE(has(result, row)) << result.text;
  EXPECT_FALSE(has(result, "WRONG")) << result.text;
}

TEST(NewMaskProgram, TakesFlags) {
  const ProgramOutcome help = run_program("new_mask --help");
  EXPECT_EQ(help.status, 0);
  EXPECT_TRUE(has(help, "--device")) << help.text;
  for (const char* bad : {"--bogus", "--device gpu", "5x5"}) {
    const ProgramOutcome result = run_program("new_mask " + std::string(bad));
    EXPECT_EQ(result.status, 1) << result.text;
    EXPECT_EQ(result.text.rfind("new_mask: ", 0), 0u) << result.text;
    EXPECT_EQ(std::count(result.text.begin(), result.text.end(), '\n'), 1) << result.text;
  }
}

// Whatever it computes, it can compute on a device.
TEST(Programs, ComputeOnADevice) {
  for (const char* command : {"mask --grid 5x5 --gradcheck --device cuda", "new_mask --device cuda"}) {
    const ProgramOutcome result = run_program(command);
    EXPECT_EQ(result.status, cuda_available() ? 0 : 1) << result.text;
    EXPECT_FALSE(has(result, "WRONG")) << result.text;
    EXPECT_TRUE(cuda_available() || has(result, "cuda")) << result.text;
  }
}

}  // namespace
}  // namespace torus
