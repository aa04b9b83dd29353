// Runs `mask` and `new_mask` as a user does.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "core/temporary_folder.h"
#include "examples/program.h"
#include "torus/core/device.h"

namespace torus {
namespace {

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

TEST(MaskProgram, SaysWhatIsWrongInOneLine) {
  for (const auto& [flags, line] :
       {std::pair<const char*, const char*>{
            "--grid 5x5 --window 0",
            "[neighborhood] axis 0: window and dilation must be at least 1, got 0 and 1\n"},
        {"--grid 5xa", "--grid: expected numbers separated by 'x', got 5xa\n"},
        {"--grid 4 --boundary round",
         "--boundary: expected wrap, shift, shrink, causal or valid, got round\n"},
        {"--grid 4x4 --tokens 5 --documents 3,4", "[document] the documents have 7 queries, got 16\n"},
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
  EXPECT_TRUE(has(result, "gradient of k, reference")) << result.text;
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
