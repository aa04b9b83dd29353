// Training steps of small GPTs: forward, backward, clipping, AdamW. Sizes as in compare_pytorch.py.
#include <benchmark/benchmark.h>
#include <torus/torus.h>

namespace {

using namespace torus;

void train(benchmark::State& state, const GPTConfig& config, int64_t batch) {
  manual_seed(1);
  GPT model(config);
  AdamW optimizer(model.named_parameters(), {.lr = 3e-4});
  const Tensor tokens = randint({batch, config.context}, 0, config.vocab_size),
               targets = randint({batch, config.context}, 0, config.vocab_size);
  reset_peak_memory();
  for (auto _ : state) {
    Tape tape;
    tape.backward(model.loss(tokens, targets));
    clip_grad_norm(model.parameters(), 1);
    optimizer.step();
    optimizer.zero_grad();
  }
  state.counters["tok/s"] = benchmark::Counter(
      static_cast<double>(state.iterations() * batch * config.context), benchmark::Counter::kIsRate);
  state.counters["MiB"] = static_cast<double>(memory_stats().peak_bytes) / (1 << 20);
}

const auto setting = benchmark::kMillisecond;
BENCHMARK_CAPTURE(train, nano, GPTConfig{.vocab_size = 65, .context = 64, .tied_head = false}, 12)
    ->Unit(setting)
    ->UseRealTime();
BENCHMARK_CAPTURE(train, toy, GPTConfig{.vocab_size = 65, .context = 128, .tied_head = false}, 32)
    ->Unit(setting)
    ->UseRealTime();
BENCHMARK_CAPTURE(
    train, char,
    GPTConfig{.vocab_size = 65, .context = 256, .layers = 6, .heads = 6, .width = 384, .tied_head = false}, 8)
    ->Unit(setting)
    ->UseRealTime();

}  // namespace

BENCHMARK_MAIN();
