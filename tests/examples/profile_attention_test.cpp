// Runs `profile_attention` as a user does.
#include <gtest/gtest.h>

#include <regex>
#include <string>

#include "core/temporary_folder.h"
#include "examples/program.h"
#include "torus/core/device.h"

namespace torus {
namespace {

// A row of the table: counts of kernels, times and memory, or why there are none.
std::string row(const ProgramOutcome& outcome, const std::string& backend) {
  std::smatch match;
  const std::regex pattern("\n" + backend + " +([^\n]*?) *\n");
  return std::regex_search(outcome.text, match, pattern) ? match[1].str() : "no row";
}

const std::string cost = "[0-9.]+ +[0-9.]+";

TEST(ProfileAttention, ComparesTheBackendsOfTheCpu) {
  const TemporaryFolder folder;
  const ProgramOutcome result = run_program(
      "profile_attention --tokens 70 --causal --heads 4 --kv-heads 2 --width 16 "
      "--repeats 2 --trace '" +
      folder / "trace.json" + "'");
  EXPECT_EQ(result.status, 0) << result.text;
  EXPECT_TRUE(has(result, "1 x 4 heads of 70 queries and 70 keys, width 16, f32 on cpu; 50.7 % of the pairs"))
      << result.text;
  for (const char* backend : {"reference", "cpu"})
    EXPECT_TRUE(std::regex_match(row(result, backend), std::regex("n/a +" + cost + " +n/a +" + cost)))
        << backend << ": " << row(result, backend);
  EXPECT_TRUE(std::regex_match(row(result, "in place"), std::regex("n/a +" + cost + " +- +- +-")))
      << result.text;
  EXPECT_TRUE(has(result, "unless one is asked for: cpu\n")) << result.text;
  const std::string trace = read_file(folder / "trace.json");
  for (const char* name : {"\"reference forward\"", "\"cpu backward\"", "\"attention.forward\""})
    EXPECT_NE(trace.find(name), std::string::npos) << name;
  EXPECT_EQ(trace.find("nan"), std::string::npos);
}

TEST(ProfileAttention, SaysWhyABackendCannotRun) {
  const ProgramOutcome result =
      run_program("profile_attention --grid 4x4 --window 3 --boundary wrap --dropout 0.1 --repeats 1");
  EXPECT_EQ(result.status, 0) << result.text;
  EXPECT_EQ(row(result, "in place"), "it has no dropout and no softcap");
  if (row(result, "cuda_simt") != "no row") {
    EXPECT_EQ(row(result, "cuda_simt"),
              "[attention] no backend can run this: cuda_simt: the tensors are not on a CUDA device");
  }
}

TEST(ProfileAttention, CountsKernelsOfADevice) {
  if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
  const ProgramOutcome result =
      run_program("profile_attention --device cuda --batch 2 --tokens 300 --causal --repeats 3");
  EXPECT_EQ(result.status, 0) << result.text;
  EXPECT_EQ(row(result, "cpu"),
            "[attention] no backend can run this: cpu: the tensors are not in host memory")
      << result.text;
  for (const char* backend : {"reference", "cuda_simt", "cuda_mma"})
    EXPECT_TRUE(std::regex_match(row(result, backend),
                                 std::regex("([0-9]+|n/a) +" + cost + " +([0-9]+|n/a) +" + cost)))
        << backend << ": " << row(result, backend);
}

TEST(ProfileAttention, SaysWhatIsWrongInOneLine) {
  for (const auto& [flags, line] :
       {std::pair<const char*, const char*>{"--heads 4 --kv-heads 3",
                                            "--heads must be a multiple of --kv-heads, got 4 and 3\n"},
        {"--dtype f8", "profile_attention: --dtype"},
        {"--tokens 10 --trace no/such/trace.json --repeats 1",
         "profile_attention: cannot save to no/such/trace.json"}}) {
    const ProgramOutcome result = run_program("profile_attention " + std::string(flags));
    EXPECT_EQ(result.status, 1) << result.text;
    EXPECT_TRUE(has(result, line)) << result.text;
  }
  EXPECT_TRUE(has(run_program("profile_attention --help"), "--any-order"));
}

}  // namespace
}  // namespace torus
