// Training steps of small GPTs: forward, backward, clipping, AdamW, and what share of a step each op takes.
// Sizes as in compare_pytorch.py.
#include <benchmark/benchmark.h>
#include <torus/torus.h>

#include <cstdio>
#include <string>

namespace {

using namespace torus;

// Of a step's matrix products: 6 for each token and each weight that multiplies it, and 6 T C for each
// layer's causal attention, of which nothing is counted twice that backward computes again.
double step_flops(const GPT& model, int64_t batch) {
  const GPTConfig& config = model.config();
  int64_t weights = 0;
  for (const auto& [name, parameter] : model.named_parameters())
    if (parameter.dim() == 2 && name != "tokens.weight" && name != "positions.weight")
      weights += parameter.value().numel();
  return 6.0 * static_cast<double>(batch * config.context) *
         static_cast<double>(weights + config.layers * config.context * config.width);
}

// "mlp backward 31.2 %, product 12.0 %, ...", most first.
std::string shares(const ProfileSummary& summary) {
  std::string text;
  for (const auto& row : summary.rows) {
    if (!row.op.empty() || row.share < 0.005) continue;
    char share[32];
    std::snprintf(share, sizeof share, " %.1f %%", 100 * row.share);
    const bool is_op = row.kind == ScopeKind::forward || row.kind == ScopeKind::backward;
    text += (text.empty() ? "" : ", ") + row.name + (is_op ? std::string(" ") + name(row.kind) : "") + share;
  }
  return text;
}

void train(benchmark::State& state, const GPTConfig& config, int64_t batch) {
  manual_seed(1);
  GPT model(config);
  AdamW optimizer(model.named_parameters(), {.lr = 3e-4});
  const Tensor tokens = randint({batch, config.context}, 0, config.vocab_size),
               targets = randint({batch, config.context}, 0, config.vocab_size);
  const auto step = [&] {
    Tape tape;
    tape.backward(model.loss(tokens, targets));
    clip_grad_norm(model.parameters(), 1);
    optimizer.step();
    optimizer.zero_grad();
  };
  reset_peak_memory();
  for (auto _ : state) step();
  state.counters["tok/s"] = benchmark::Counter(
      static_cast<double>(state.iterations() * batch * config.context), benchmark::Counter::kIsRate);
  state.counters["GFLOP/s"] =
      benchmark::Counter(step_flops(model, batch) * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["MiB"] = static_cast<double>(memory_stats().peak_bytes) / (1 << 20);
  Profiler profiler;
  for (int i = 0; i < 5; ++i) step();
  profiler.stop();
  state.SetLabel(shares(profiler.summary()));
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
