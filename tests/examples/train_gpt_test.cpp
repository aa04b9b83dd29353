// Runs the program as a user does.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <fstream>
#include <regex>
#include <sstream>
#include <thread>

#include "core/temporary_folder.h"
#include "torus/core/device.h"

namespace torus {
namespace {

// A model so small that a step takes no time.
const std::string tiny = " --layers 1 --heads 2 --width 16 --context 16 --batch 4 --sample 20 --threads 1";

struct Outcome {
  int status = -1;
  std::string out, error;
};

class TrainGpt : public testing::Test {
 protected:
  TrainGpt() {
    std::string text;
    for (int i = 0; i < 60; ++i)
      text += "the quick brown fox jumps over the lazy dog, " + std::to_string(i * 7) + "\n";
    write_file(folder / "text.txt", text);
  }

  /// Starts `train_gpt FLAGS` in the folder; `shell` comes before it.
  pid_t start(const std::string& flags, const std::string& shell = "") {
    const std::string command = "cd '" + folder / "" + "'; " + shell +
                                " exec '" TORUS_EXAMPLES_DIR "/train_gpt' " + flags + " > out 2> error";
    const pid_t child = fork();
    if (child == 0) {
      execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      _exit(127);
    }
    return child;
  }

  Outcome finish(pid_t child) {
    int status = 0;
    waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(folder / "out"),
            read_file(folder / "error")};
  }

  Outcome run(const std::string& flags, const std::string& shell = "") { return finish(start(flags, shell)); }

  /// It fails with one line that holds the text.
  void expect_refused(const std::string& flags, const std::string& text, const std::string& shell = "") {
    const Outcome result = run(flags, shell);
    EXPECT_EQ(result.status, 1) << flags;
    EXPECT_EQ(result.error.rfind("train_gpt: ", 0), 0u) << result.error;
    EXPECT_EQ(std::count(result.error.begin(), result.error.end(), '\n'), 1) << result.error;
    EXPECT_NE(result.error.find(text), std::string::npos) << result.error;
  }

  /// The losses of a log, as written.
  std::vector<std::string> losses(const std::string& name) {
    std::vector<std::string> result;
    std::istringstream lines(read_file(folder / name));
    const std::regex pattern("\\{\"step\": [0-9]+, \"loss\": ([^,]+),.*\\}");
    std::smatch match;
    for (std::string line; std::getline(lines, line);)
      if (std::regex_match(line, match, pattern)) result.push_back(match[1]);
    return result;
  }

  /// Waits until a log has a line.
  void wait_for(const std::string& name) {
    for (int i = 0; i < 600 && losses(name).empty(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    ASSERT_FALSE(losses(name).empty()) << read_file(folder / "error");
  }

  const TemporaryFolder folder;
};

TEST_F(TrainGpt, HelpNamesTheFlags) {
  const Outcome result = run("--help");
  EXPECT_EQ(result.status, 0);
  for (const char* flag :
       {"--preset", "--task", "--text", "--save", "--resume", "--minutes", "--log", "--dtype"})
    EXPECT_NE(result.out.find(flag), std::string::npos) << flag;
}

TEST_F(TrainGpt, LearnsATextAndShowsIt) {
  const Outcome result = run("--text text.txt --steps 150 --lr 0.01 --log log.jsonl --eval-every 50" + tiny);
  EXPECT_EQ(result.status, 0) << result.error;
  EXPECT_EQ(result.error, "");
  std::smatch match;
  ASSERT_TRUE(std::regex_search(
      result.out, match,
      std::regex(
          "a sample:\n[^]*\nvalidation loss: ([0-9.]+) nats a character \\(untrained: ([0-9.]+)\\)\n$")))
      << result.out;
  EXPECT_LT(std::stod(match[1]), 0.7 * std::stod(match[2])) << result.out;
  EXPECT_NE(result.out.find("step 150/150  loss"), std::string::npos);
  EXPECT_EQ(result.out.find('\r'), std::string::npos);  // not a terminal: plain lines
  const auto logged = losses("log.jsonl");
  ASSERT_EQ(logged.size(), 150u);
  EXPECT_LT(std::stod(logged.back()), 0.7 * std::stod(logged.front()));
  EXPECT_NE(read_file(folder / "log.jsonl").find("{\"step\": 50, \"validation_loss\": "), std::string::npos);
}

TEST_F(TrainGpt, TrainsOnItsOwnSources) {
  const Outcome result = run("--steps 2" + tiny);
  EXPECT_EQ(result.status, 0) << result.error;
  EXPECT_NE(result.out.find("validation loss: "), std::string::npos) << result.out;
}

TEST_F(TrainGpt, ResumesBitForBit) {
  const std::vector<std::string> kinds = {"--text text.txt --dropout 0.1 --vocabulary bytes",
                                          "--text text.txt --context 8 --dtype f64",
                                          "--text text.txt --context 8 --dtype f16 --optimizer muon",
                                          "--text text.txt --context 8 --optimizer lion"};
  for (const std::string& kind : kinds) {
    const std::string flags = kind + " --steps 40 --seed 3 --eval-every 10 --log ";
    const std::string size = " --layers 1 --heads 2 --width 8 --batch 4 --threads 2";
    ASSERT_EQ(run(flags + "whole.jsonl" + size).status, 0) << read_file(folder / "error");
    // The same in pieces, each ended by the clock, at whatever step.
    ASSERT_EQ(run(flags + "parts.jsonl --minutes 1e-9 --save a.h5" + size).status, 0);
    EXPECT_EQ(losses("parts.jsonl").size(), 1u);
    ASSERT_EQ(run("--resume a.h5 --minutes 1e-4 --save a.h5 --threads 1 --log parts.jsonl").status, 0)
        << read_file(folder / "error");
    const Outcome last = run("--resume a.h5 --save b.h5 --log parts.jsonl" + (" " + kind));
    ASSERT_EQ(last.status, 0) << last.error;
    EXPECT_EQ(losses("parts.jsonl"), losses("whole.jsonl"));
    // A finished run only evaluates, and saves where it is asked to.
    ASSERT_EQ(run("--resume b.h5 --save c.h5").status, 0);
    std::filesystem::remove(folder / "b.h5");
    const Outcome again = run("--resume c.h5");
    EXPECT_EQ(again.status, 0) << again.error;
    EXPECT_EQ(again.out.substr(again.out.rfind('\n', again.out.size() - 2)),
              last.out.substr(last.out.rfind('\n', last.out.size() - 2)));
    std::filesystem::remove(folder / "c.h5");
  }
}

TEST_F(TrainGpt, LearnsByAnyOptimizer) {
  for (const char* optimizer : {"adamw", "lion", "muon", "sgd"}) {
    const Outcome result =
        run("--text text.txt --steps 100 --log log.jsonl --optimizer " + (optimizer + tiny));
    EXPECT_EQ(result.status, 0) << result.error;
    const auto logged = losses("log.jsonl");
    ASSERT_EQ(logged.size(), 100u);
    EXPECT_LT(std::stod(logged.back()), 0.97 * std::stod(logged.front())) << optimizer;
  }
}

TEST_F(TrainGpt, TrainsOnADevice) {
  if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
  for (const char* flags : {" --dtype f16", " --dtype bf16 --optimizer muon", " --optimizer lion",
                            " --optimizer sgd --dtype f16"}) {
    const Outcome result = run("--device cuda --text text.txt --steps 100 --log log.jsonl" + (flags + tiny));
    EXPECT_EQ(result.status, 0) << result.error;
    const auto logged = losses("log.jsonl");
    ASSERT_EQ(logged.size(), 100u);
    EXPECT_LT(std::stod(logged.back()), 0.97 * std::stod(logged.front())) << flags;
    EXPECT_NE(result.out.find(", the first 16 steps left out; "), std::string::npos) << result.out;
  }
  const Outcome profiled = run("--device cuda --text text.txt --steps 60 --profile trace.json" + tiny);
  EXPECT_EQ(profiled.status, 0) << profiled.error;
  if (profiled.error.find("no libcupti") == std::string::npos) {
    EXPECT_TRUE(std::regex_search(
        profiled.out, std::regex("\na step: [1-9][0-9.]* kernels, [0-9.]+ ms of the device's time\n")))
        << profiled.out;
  }
}

// What one device saved another goes on with, to about the same losses.
TEST_F(TrainGpt, ResumesOnAnotherDevice) {
  if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
  const std::string flags = "--text text.txt --steps 60 --eval-every 20 --log ";
  ASSERT_EQ(run(flags + "whole.jsonl" + tiny).status, 0) << read_file(folder / "error");
  std::string from = flags + "parts.jsonl" + tiny + " --device cuda --minutes 1e-9";
  for (const char* to : {"--device cpu --minutes 1e-9", "--device cuda"}) {
    ASSERT_EQ(run(from + " --save a.h5").status, 0) << read_file(folder / "error");
    from = std::string("--resume a.h5 --log parts.jsonl ") + to;
  }
  ASSERT_EQ(run(from + " --save a.h5").status, 0) << read_file(folder / "error");
  const auto whole = losses("whole.jsonl"), parts = losses("parts.jsonl");
  ASSERT_EQ(parts.size(), whole.size());
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(std::stod(parts[i]), std::stod(whole[i]), 2e-2) << i;
}

// f32 to bf16 to f64 to f16 and back; the last checkpoint is of the last dtype.
TEST_F(TrainGpt, ResumesInAnotherDtype) {
  const std::string flags = "--text text.txt --steps 50 --eval-every 10 --log ";
  ASSERT_EQ(run(flags + "whole.jsonl" + tiny).status, 0) << read_file(folder / "error");
  ASSERT_EQ(run(flags + "parts.jsonl --minutes 1e-9 --save a.h5" + tiny).status, 0);
  for (const char* dtype : {"bf16", "f64", "f16", "f32"}) {
    const std::string to = dtype;
    const std::string end = to == "f32" ? "" : " --minutes 1e-9";
    const Outcome result = run("--resume a.h5 --log parts.jsonl --save a.h5 --dtype " + to + end);
    ASSERT_EQ(result.status, 0) << dtype << result.error;
  }
  const auto whole = losses("whole.jsonl"), parts = losses("parts.jsonl");
  ASSERT_EQ(parts.size(), whole.size());
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_NEAR(std::stod(parts[i]), std::stod(whole[i]), 5e-2) << i;
  EXPECT_EQ(run("--resume a.h5").status, 0) << read_file(folder / "error");
}

// A short run's profile has the steps that there were.
TEST_F(TrainGpt, ProfilesRunsOfAnyLength) {
  for (const char* steps : {"40", "25", "9", "1"}) {
    std::filesystem::remove(folder / "trace.json");
    const Outcome result = run(std::string("--text text.txt --profile trace.json --steps ") + steps + tiny);
    EXPECT_EQ(result.status, 0) << result.error;
    // Each op's share, forward and backward, with its kernels.
    for (const char* row :
         {"\nmlp +forward +", "\nmlp +backward +", "\n  product +kernel +", "\nattention +forward +",
          "\n  attention.backward +kernel +", "\nadamw.step +kernel +"})
      EXPECT_TRUE(std::regex_search(result.out, std::regex(row))) << row << " in " << result.out;
    EXPECT_NE(read_file(folder / "trace.json").find("\"mlp backward\""), std::string::npos) << steps;
  }
  std::filesystem::remove(folder / "trace.json");
  const Outcome early = run("--text text.txt --profile trace.json --minutes 1e-9" + tiny);
  EXPECT_EQ(early.status, 0) << early.error;
  EXPECT_NE(early.out.find("nothing was profiled"), std::string::npos) << early.out;
  expect_refused("--text text.txt --profile no/such/trace.json", "cannot save to no/such/trace.json");
}

TEST_F(TrainGpt, AnomalyNamesTheOp) {
  expect_refused("--text text.txt --steps 50 --lr 1e30 --anomaly" + tiny, "] forward made ");
}

TEST_F(TrainGpt, InterruptFinishesTheStepAndSaves) {
  const std::string flags = "--text text.txt --steps 100000000" + tiny;
  for (int number : {SIGINT, SIGTERM}) {
    std::filesystem::remove(folder / "log.jsonl");
    const pid_t child = start(flags + " --save a.h5 --log log.jsonl");
    wait_for("log.jsonl");
    kill(child, number);
    const Outcome result = finish(child);
    EXPECT_EQ(result.status, 130);
    const auto steps = losses("log.jsonl").size();
    EXPECT_NE(result.out.find("interrupted at step " + std::to_string(steps) + ", saved to a.h5\n"),
              std::string::npos)
        << result.out;
  }
  // It resumes from there.
  EXPECT_EQ(run("--resume a.h5 --minutes 1e-9").status, 0) << read_file(folder / "error");
  // Without --save it says only where it stopped.
  const pid_t child = start(flags + " --log other.jsonl");
  wait_for("other.jsonl");
  kill(child, SIGINT);
  const Outcome result = finish(child);
  EXPECT_EQ(result.status, 130);
  EXPECT_EQ(result.out.find("saved"), std::string::npos);
}

TEST_F(TrainGpt, ASecondInterruptLeavesAtOnce) {
  // Steps so long that the first does not end in between.
  const pid_t child = start(
      "--text text.txt --steps 5 --layers 2 --width 512 --context 512 --batch 16 --heads 1 --log log.jsonl");
  for (int i = 0; i < 600 && !std::filesystem::exists(folder / "log.jsonl"); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  kill(child, SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  ASSERT_EQ(waitpid(child, nullptr, WNOHANG), 0);
  const auto begin = std::chrono::steady_clock::now();
  kill(child, SIGINT);
  const Outcome result = finish(child);
  EXPECT_EQ(result.status, 128 + SIGINT);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
}

TEST_F(TrainGpt, LearnsToAdd) {
  const Outcome result = run(
      "--task addition --steps 30 --layers 1 --heads 2 --width 16 --batch 16 --threads 1 --log log.jsonl");
  EXPECT_EQ(result.status, 0) << result.error;
  EXPECT_TRUE(
      std::regex_search(result.out, std::regex("\nexact match: [0-9]+\\.[0-9] % \\(10000 unseen sums\\)\n$")))
      << result.out;
  const auto logged = losses("log.jsonl");
  ASSERT_EQ(logged.size(), 30u);
  EXPECT_LT(std::stod(logged.back()), std::stod(logged.front()));
}

TEST_F(TrainGpt, RefusesBadFlags) {
  expect_refused("--stepps 3", "--stepps");
  expect_refused("--steps three", "--steps");
  expect_refused("--steps 0", "--steps: expected a number above 0, got 0");
  for (const char* flag : {"lr", "minutes", "temperature", "dropout", "top-p"})
    for (const char* value : {"nan", "inf", "-inf", "-1", "1e999", "0x"})
      expect_refused(std::string("--") + flag + "=" + value,
                     std::string("--") + flag + ": expected a number");
  expect_refused("--batch -4", "--batch");
  expect_refused("--preset huge", "--preset");
  expect_refused("--dtype f8", "--dtype");
  expect_refused("--optimizer adam", "--optimizer");
  expect_refused("--dropout 2", "--dropout");
  expect_refused("--text text.txt --width 10 --heads 4", "10 channels do not divide into 4 heads");
  expect_refused("--task addition --text text.txt", "--text is not for --task addition");
  expect_refused("--task addition --context 10", "a --context of at least 11, got 10");
  expect_refused("--text text.txt --save no/such/a.h5", "cannot save to no/such/a.h5");
  expect_refused("--text text.txt --save .", "cannot save to .");
  expect_refused("--text text.txt --log no/such.jsonl" + tiny, "cannot write no/such.jsonl");
}

TEST_F(TrainGpt, RefusesBadTexts) {
  expect_refused("--text none.txt", "none.txt");
  expect_refused("--text .", "is a folder");
  write_file(folder / "empty.txt", "");
  expect_refused("--text empty.txt", "is empty");
  write_file(folder / "short.txt", "too short for a window");
  expect_refused("--text short.txt", "needs at least 65");
  write_file(folder / "odd.txt", std::string(4000, '\xff'));
  expect_refused("--text odd.txt", "is not UTF-8");
  EXPECT_EQ(run("--text odd.txt --vocabulary bytes --steps 2" + tiny).status, 0);
}

TEST_F(TrainGpt, RefusesBadCheckpoints) {
  ASSERT_EQ(run("--text text.txt --steps 3 --save a.h5" + tiny).status, 0) << read_file(folder / "error");
  const std::string content = read_file(folder / "a.h5");
  expect_refused("--resume none.h5", "none.h5");
  write_file(folder / "cut.h5", content.substr(0, content.size() / 2));
  expect_refused("--resume cut.h5", "cut.h5");
  expect_refused("--resume text.txt", "text.txt");
  expect_refused("--resume '" TORUS_SOURCE_DIR "/tests/layers/golden_gpt.h5'", "not a checkpoint of Torus");
  expect_refused("--resume a.h5 --width 32", "--width 32 is at odds with a.h5, which was made with 16");
  expect_refused("--resume a.h5 --steps 4", "--steps 4 is at odds");
  expect_refused("--resume a.h5 --preset toy", "--preset toy is at odds with a.h5, which was made with nano");
  expect_refused("--resume a.h5 --task addition", "--task addition is at odds");
  expect_refused("--resume a.h5 --optimizer muon", "--optimizer muon is at odds with a.h5");
  write_file(folder / "other.txt", read_file(folder / "text.txt") + "x");
  expect_refused("--resume a.h5 --text other.txt", "the text is not the one that a.h5 was trained on");
  EXPECT_EQ(run("--resume a.h5 --text text.txt --width 16 --preset nano --lr 3e-3").status, 0)
      << read_file(folder / "error");
}

TEST_F(TrainGpt, AFullDiskLeavesTheLastCheckpoint) {
  ASSERT_EQ(run("--text text.txt --steps 3 --minutes 1e-9 --save a.h5" + tiny).status, 0);
  const std::string content = read_file(folder / "a.h5");
  expect_refused("--resume a.h5 --save a.h5", "a.h5", "trap '' XFSZ; ulimit -f 8;");
  EXPECT_EQ(read_file(folder / "a.h5"), content);
  EXPECT_EQ(folder.entries(), 4);  // the text, the checkpoint, out and error
  EXPECT_EQ(run("--resume a.h5").status, 0);
}

}  // namespace
}  // namespace torus
