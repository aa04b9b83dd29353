// Forward and backward of each row of the op table, of what a GPT's step is made of, at the sizes that the
// examples train; and plain products.
#include <benchmark/benchmark.h>

#include "ops/op_table.h"
#include "torus/core/gemm.h"
#include "torus/core/profiler.h"
#include "torus/layers/transformer.h"
#include "torus/ops/attention/attention.h"
#include "torus/ops/ops.h"

namespace torus {
namespace {

struct Size {
  const char* name;
  int64_t batch, tokens, channels, heads, vocabulary;
};
constexpr Size sizes[] = {
    {"nano", 16, 64, 128, 4, 65}, {"toy", 8, 256, 256, 4, 65}, {"char", 16, 256, 384, 6, 65}};

using Inputs = std::vector<Variable>;
using Function = std::function<Variable(const Inputs&)>;

Variable leaf(const Shape& shape) { return Variable(randn(shape), true); }

// Forward and backward; `operations` are those of both, for the rate.
void run(benchmark::State& state, const Function& function, Inputs inputs, double operations) {
  const Tensor seed = randn(function(inputs).shape());
  for (auto _ : state) {
    Tape tape;
    tape.backward(function(inputs), {.seed = seed});
    for (Variable& input : inputs) input.zero_grad();
  }
  if (operations > 0)
    state.counters["FLOP/s"] = benchmark::Counter(operations, benchmark::Counter::kIsIterationInvariantRate);
}

void add(const Size& size, const char* op, const Function& function, const std::vector<Shape>& shapes,
         double operations = 0) {
  benchmark::RegisterBenchmark((std::string(op) + "/" + size.name).c_str(),
                               [=](benchmark::State& state) {
                                 manual_seed(0);
                                 Inputs inputs;
                                 for (const Shape& shape : shapes) inputs.push_back(leaf(shape));
                                 run(state, function, inputs, operations);
                               })
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond);
}

void add_ops(const Size& size) {
  const auto [name, b, t, c, h, v] = size;
  const auto rows = static_cast<double>(b * t);
  const auto linear_of = [](const Inputs& x) { return linear(x[0], x[1], x[2]); };
  const auto add_linear = [&](const char* op, int64_t in, int64_t out) {
    add(size, op, linear_of, {{b, t, in}, {out, in}, {out}}, 6 * rows * static_cast<double>(in * out));
  };
  add_linear("linear_qkv", c, 3 * c);
  add_linear("linear_out", c, c);
  add_linear("linear_up", c, 4 * c);
  add_linear("linear_down", 4 * c, c);
  add_linear("linear_head", c, v);
  add(size, "layer_norm", [](const Inputs& x) { return layer_norm(x[0], x[1], x[2]); },
      {{b, t, c}, {c}, {c}});
  add(size, "rms_norm", [](const Inputs& x) { return rms_norm(x[0], x[1]); }, {{b, t, c}, {c}});
  add(size, "gelu", [](const Inputs& x) { return gelu(x[0]); }, {{b, t, 4 * c}});
  add(size, "add", [](const Inputs& x) { return x[0] + x[1]; }, {{b, t, c}, {b, t, c}});
  add(size, "softmax", [](const Inputs& x) { return softmax(x[0]); }, {{b, t, c}});
  const Tensor indices = randint({b, t}, 0, v);
  add(size, "embedding", [=](const Inputs& x) { return embedding(x[0], indices); }, {{v, c}});
  add(size, "cross_entropy", [=](const Inputs& x) { return cross_entropy(x[0], indices); }, {{b, t, v}});
  // Half of the scores are allowed; 2 products forward, 5 backward.
  add(
      size, "attention_causal",
      [](const Inputs& x) { return attention(x[0], x[1], x[2], {.mask = causal()}).out; },
      {{b, h, t, c / h}, {b, h, t, c / h}, {b, h, t, c / h}}, 7 * rows * static_cast<double>(t * c));

  benchmark::RegisterBenchmark(
      (std::string("block/") + name).c_str(),
      [=](benchmark::State& state) {
        manual_seed(0);
        TransformerBlock block(c, h);
        run(
            state, [&](const Inputs& x) { return block(x[0], causal()); }, {leaf({b, t, c})},
            72 * rows * static_cast<double>(c * c) + 7 * rows * static_cast<double>(t * c));
      })
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond);
}

// c [m, n] = a [m, k] @ b [k, n], each stored as it is (N) or transposed (T).
void add_product(int64_t m, int64_t n, int64_t k, const char* form) {
  const std::string name = "product_" + std::string(form) + "/" + std::to_string(m) + "x" +
                           std::to_string(n) + "x" + std::to_string(k);
  benchmark::RegisterBenchmark(
      name.c_str(),
      [=](benchmark::State& state) {
        const Tensor a = form[0] == 'T' ? randn({k, m}).transpose(0, 1) : randn({m, k});
        const Tensor b = form[1] == 'T' ? randn({n, k}).transpose(0, 1) : randn({k, n});
        Tensor result = Tensor::empty({m, n});
        for (auto _ : state) product(result, a, b);
        state.counters["FLOP/s"] = benchmark::Counter(2.0 * static_cast<double>(m * n * k),
                                                      benchmark::Counter::kIsIterationInvariantRate);
      })
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond);
}

// A row of the op table on its large inputs, in f32, with the bytes of its kernels.
void add_row(const testing::Row& row) {
  benchmark::RegisterBenchmark(
      ("table/" + row.name).c_str(),
      [=](benchmark::State& state) {
        Generator generator(0);
        Inputs inputs;
        for (const Shape& shape : row.large)
          inputs.push_back(Variable(rand(shape, row.low, row.high, f32, generator), true));
        std::vector<Tensor> seeds;
        for (const Variable& output : row.op(inputs))
          seeds.push_back(randn(output.shape(), 0, 1, f32, generator));
        const auto step = [&] {
          Tape tape;
          tape.backward(row.op(inputs), seeds);
          for (Variable& input : inputs) input.zero_grad();
        };
        for (auto _ : state) step();
        Profiler profiler;
        step();
        profiler.stop();
        double bytes = 0;
        for (const ProfileEvent& event : profiler.events())
          if (event.kind == ScopeKind::kernel) bytes += event.bytes;
        state.SetBytesProcessed(static_cast<int64_t>(bytes) * state.iterations());
      })
      ->UseRealTime()
      ->Unit(benchmark::kMicrosecond);
}

const bool registered = [] {
  for (const testing::Row& row : testing::op_table()) add_row(row);
  for (const Size& size : sizes) add_ops(size);
  for (const Size& size : sizes) {
    const int64_t rows = size.batch * size.tokens, c = size.channels;
    for (const int64_t out : {c, 3 * c, 4 * c, size.vocabulary}) {
      add_product(rows, out, c, "NT");  // y = x w^T
      add_product(rows, c, out, "NN");  // dx = dy w
      add_product(out, c, rows, "TN");  // dw = dy^T x
    }
  }
  add_product(1024, 1024, 1024, "NN");
  return true;
}();

}  // namespace
}  // namespace torus

BENCHMARK_MAIN();
