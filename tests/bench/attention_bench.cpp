// Attention forward and backward, and a matrix product to compare with. Sizes as in compare_pytorch.py.
#include <benchmark/benchmark.h>
#include <torus/torus.h>

namespace {

using namespace torus;

struct Problem {
  int64_t batch, heads, tokens, width;
  Mask mask;
};

const Mask window = neighborhood({.grid = {16, 16, 16}, .window = {5}, .boundary = {wrap}});
// The same as a predicate: maps are equal, so times must be.
const Mask tried_window = Mask::from(
    [](Query q, Key k) {
      for (size_t a = 0; a < 3; ++a)
        if ((k.coord[a] - q.coord[a] + 18) % 16 > 4) return false;
      return true;
    },
    {.grid = {16, 16, 16}});

void attend(benchmark::State& state, const Problem& p, bool backward) {
  const auto make = [&] { return Variable(randn({p.batch, p.heads, p.tokens, p.width}), true); };
  const Variable q = make(), k = make(), v = make();
  const Tensor d_out = randn({p.batch, p.heads, p.tokens, p.width});
  const MaskCosts costs = mask_costs(p.mask, p.tokens, p.tokens);  // builds the map
  for (auto _ : state) {
    if (backward) state.PauseTiming();
    {
      Tape tape;
      const Variable out = attention(q, k, v, {.mask = p.mask}).out;
      if (backward) {
        state.ResumeTiming();
        tape.backward({out}, {d_out});
        state.PauseTiming();
      }
      for (Variable x : {q, k, v}) x.zero_grad();
    }
    if (backward) state.ResumeTiming();
  }
  const double products = (backward ? 10.0 : 4.0) * static_cast<double>(p.batch * p.heads * p.width);
  const auto rate = benchmark::Counter::kIsIterationInvariantRate;
  state.counters["GFLOP/s"] = benchmark::Counter(products * static_cast<double>(costs.needed) * 1e-9, rate);
  state.counters["visited/needed"] = static_cast<double>(costs.visited) / static_cast<double>(costs.needed);
}

void multiply(benchmark::State& state, int64_t n) {
  const Variable a(randn({n, n})), b(randn({n, n}));
  for (auto _ : state) benchmark::DoNotOptimize(matmul(a, b));
  state.counters["GFLOP/s"] = benchmark::Counter(2e-9 * static_cast<double>(n * n * n),
                                                 benchmark::Counter::kIsIterationInvariantRate);
}

void both(const std::string& name, const Problem& p) {
  for (bool backward : {false, true})
    benchmark::RegisterBenchmark((name + (backward ? "/backward" : "/forward")).c_str(), attend, p, backward)
        ->Unit(benchmark::kMillisecond)
        ->UseRealTime();
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::RegisterBenchmark("product/2048", multiply, 2048)->Unit(benchmark::kMillisecond)->UseRealTime();
  both("full/2048", {1, 8, 2048, 64, full()});
  both("causal/2048", {1, 8, 2048, 64, causal()});
  both("full/4096", {1, 8, 4096, 64, full()});
  both("wrapped/16x16x16", {1, 4, 4096, 32, window});
  both("wrapped_lambda/16x16x16", {1, 4, 4096, 32, tried_window});
  both("full/8192", {1, 4, 8192, 64, full()});
  both("sliding_window/8192", {1, 4, 8192, 64, sliding_window(256, 0)});
  both("document/8192", {1, 4, 8192, 64, document(std::vector<int64_t>(16, 512))});
  for (int64_t side : {15, 18, 20})
    both("wrapped/" + std::to_string(side) + "x" + std::to_string(side) + "x" + std::to_string(side),
         {1, 4, side * side * side, 32,
          neighborhood({.grid = {side, side, side}, .window = {5}, .boundary = {wrap}})});
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
