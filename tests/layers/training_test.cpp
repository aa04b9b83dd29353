// Properties of whole training steps.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "layers/compare.h"
#include "torus/core/memory.h"
#include "torus/core/parallel.h"
#include "torus/layers/gpt.h"
#include "torus/layers/optim.h"

namespace torus {
namespace {

struct Trainer {
  explicit Trainer(double dropout)
      : model({.vocab_size = 19, .context = 24, .layers = 2, .heads = 4, .width = 48, .dropout = dropout},
              generator),
        optimizer(model.named_parameters(), {.lr = 3e-3}) {}

  double step() {
    // A pattern to learn: each token is the one before plus one.
    const Tensor start = randint({8, 1}, 0, 19, data);
    Tensor tokens = Tensor::empty({8, 25}, i64);
    const auto first = start.to_vector<int64_t>();
    int64_t* to = tokens.mutable_data<int64_t>();
    for (int64_t i = 0; i < 8 * 25; ++i) to[i] = (first[static_cast<size_t>(i / 25)] + i % 25) % 19;
    Tape tape;
    const Variable loss = model.loss(tokens.slice(1, 0, 24), tokens.slice(1, 1, 25));
    tape.backward(loss);
    clip_grad_norm(model.parameters(), 1);
    optimizer.step();
    optimizer.zero_grad();
    return loss.item();
  }

  Generator generator{1}, data{2};
  GPT model;
  AdamW optimizer;
};

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(Training, LearnsAndHoldsNoMoreAfter200Steps) {
  manual_seed(3);
  Trainer run(0.1);
  const double first = run.step();
  double last = 0;
  for (int i = 1; i < 20; ++i) run.step();
  const MemoryStats before = memory_stats();
  const int64_t resident = resident_bytes();
  for (int i = 0; i < 200; ++i) last = run.step();
  const MemoryStats after = memory_stats();
  EXPECT_NEAR(first, std::log(19), 0.2);
  EXPECT_LT(last, 1);
  EXPECT_EQ(after.live_bytes, before.live_bytes);
  EXPECT_EQ(after.live_blocks, before.live_blocks);
  EXPECT_LE(after.peak_bytes, before.peak_bytes);
  // Sanitizers keep freed memory aside for a while.
#ifndef __SANITIZE_ADDRESS__
  EXPECT_LT(resident_bytes() - resident, 2 << 20);
#else
  (void)resident;
#endif
}

TEST(Training, GivesEqualBitsForAnyThreadCount) {
  const int threads = num_threads();
  std::vector<std::vector<double>> results;
  for (int count : {1, 2, 3}) {
    set_num_threads(count);
    manual_seed(4);
    Trainer run(0.2);
    std::vector<double> losses;
    for (int i = 0; i < 10; ++i) losses.push_back(run.step());
    const auto values = flat_values(run.model);
    losses.insert(losses.end(), values.begin(), values.end());
    results.push_back(losses);
  }
  set_num_threads(threads);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

}  // namespace
}  // namespace torus
