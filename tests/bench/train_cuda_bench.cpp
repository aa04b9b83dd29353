// Times training steps of GPTs on a CUDA device, in bf16 and captured, on random tokens that stay there.
//     train_cuda_bench [NAME]...
// One line a model: milliseconds a step, tokens a second, MiB that tensors held at most.
#include <torus/torus.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "cuda_bench.h"

namespace {

using namespace torus;

struct Case {
  std::string name;
  int64_t vocabulary, context, layers, heads, width, batch;
  int steps;
};
const std::vector<Case> cases = {{"gpt2", 50304, 1024, 12, 12, 768, 32, 30},
                                 {"char", 65, 256, 6, 6, 384, 64, 200},
                                 {"toy", 65, 128, 4, 4, 128, 32, 1000}};

void measure(const Case& c) {
  release_cached_memory(cuda);
  reset_peak_memory(cuda);
  GPT model({.vocab_size = c.vocabulary,
             .context = c.context,
             .layers = c.layers,
             .heads = c.heads,
             .width = c.width,
             .dtype = bf16});
  model.to(cuda);
  AdamW optimizer(model.named_parameters(), {.lr = 3e-4});
  const Tensor tokens = randint({c.batch, c.context}, 0, c.vocabulary).to(cuda),
               targets = randint({c.batch, c.context}, 0, c.vocabulary).to(cuda);
  int64_t peak = 0;
  CapturedStep step(cuda, [&] {
    Tape tape;
    tape.backward(model.loss(tokens, targets));
    optimizer.step({.grad_norm = grad_norm(model.parameters()), .max_norm = 1});
    optimizer.zero_grad();
  });
  for (int i = 0; i < 8; ++i) {
    step();
    peak = std::max(peak, memory_stats(cuda).peak_bytes);
  }
  const double best = bench::least_time(3, c.steps, step) / 1e3;
  std::printf("%-8s %10.3f ms %12.0f tok/s %9.0f MiB%s%s\n", c.name.c_str(), best,
              1e3 * static_cast<double>(c.batch * c.context) / best, static_cast<double>(peak) / (1 << 20),
              step.captured() ? "" : ", not captured: ", step.why_not().c_str());
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) { return torus::bench::run_cases(argc, argv, cases, measure); }
