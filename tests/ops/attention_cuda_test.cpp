// Attention on a CUDA device against the CPU. Skipped without a device.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <optional>

#include "core/expect_error.h"
#include "ops/attention_cases.h"
#include "torus/autograd/gradcheck.h"
#include "torus/core/memory.h"
#include "torus/layers/captured_step.h"
#include "torus/ops/attention/backend.h"

namespace torus {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

class CudaAttention : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
  }
};

// Results and gradients of leaves q, k, v and biases, on the host.
struct Outcome {
  std::vector<Tensor> of;
};

struct Leaves {
  Tensor q, k, v, d_out, d_lse;  // d_out or d_lse may be undefined
};

Leaves random_leaves(const Case& c, DType dtype, uint64_t seed) {
  Generator g(seed);
  const auto make = [&](int64_t h, int64_t n, int64_t d) {
    return randn({c.batch, h, n, d}, 0, 1, f64, g).to(dtype);
  };
  return {make(c.heads, c.queries, c.width), make(c.kv_heads, c.keys, c.width),
          make(c.kv_heads, c.keys, c.value_width), make(c.heads, c.queries, c.value_width),
          randn({c.batch, c.heads, c.queries}, 0, 1, f64, g).to(dtype == f64 ? f64 : f32)};
}

Outcome run(const Case& c, const Leaves& l, Backend backend, Device device) {
  const auto there = [&](const Tensor& x) { return x.defined() ? x.to(device) : x; };
  Tape tape;
  std::vector<Variable> leaves;
  for (const Tensor* x : {&l.q, &l.k, &l.v}) leaves.emplace_back(there(*x), true);
  AttentionOptions options = c.options;
  Generator generator(3);
  options.generator = &generator;
  options.backend = backend;
  for (AttentionBias& term : options.bias)
    if (term.kind() != AttentionBias::Kind::alibi) {
      leaves.emplace_back(there(term.value().value()), true);
      term = term.with(leaves.back());
    }
  const auto [out, lse] = attention(leaves[0], leaves[1], leaves[2], options);
  if (out.requires_grad()) tape.backward({out, lse}, {there(l.d_out), there(l.d_lse)});
  Outcome result{{out.value().to(cpu), lse.value().to(cpu)}};
  for (const Variable& leaf : leaves)
    result.of.push_back(leaf.grad().defined() ? leaf.grad().to(cpu) : Tensor());
  return result;
}

void expect_near(const Outcome& got, const Outcome& expected, double tolerance) {
  ASSERT_EQ(got.of.size(), expected.of.size());
  for (size_t i = 0; i < got.of.size(); ++i) {
    if (!expected.of[i].defined()) {  // no gradient is a gradient of zero
      EXPECT_TRUE(!got.of[i].defined() || norm(got.of[i]) == 0) << i;
      continue;
    }
    ASSERT_EQ(got.of[i].shape(), expected.of[i].shape()) << i;
    EXPECT_LE(distance(got.of[i], expected.of[i]), tolerance * (norm(expected.of[i]) + 1e-6)) << i;
  }
}

void expect_same_bits(const Outcome& a, const Outcome& b) {
  ASSERT_EQ(a.of.size(), b.of.size());
  for (size_t i = 0; i < a.of.size(); ++i)
    EXPECT_EQ(a.of[i].to_vector<double>(), b.of[i].to_vector<double>()) << i;
}

TEST_F(CudaAttention, SmallUnderEveryFeature) {
  Generator g(1);
  Case c{.batch = 2, .heads = 4, .kv_heads = 2, .queries = 20, .keys = 20, .width = 5, .value_width = 3};
  c.options.mask = neighborhood({.grid = {4, 5}, .window = {3, 3}, .boundary = {wrap, shift}});
  expect_fused_equals_reference(c, 1, Backend::cuda_simt, cuda);
  c.options.softcap = 3, c.options.dropout = 0.3, c.options.scale = -0.4;
  c.options.bias = {AttentionBias(Variable(randn({4, 20, 20}, 0, 1, f64, g))),
                    relative_bias(Variable(randn({4, 3, 5}, 0, 1, f64, g)), {4, 5}, {true, false}),
                    alibi(alibi_slopes(4, f64))};
  expect_fused_equals_reference(c, 2, Backend::cuda_simt, cuda);
}

TEST_F(CudaAttention, RandomMasksAgainstTheReference) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    MaskMaker maker(20000 + seed);
    std::string text;
    const Case c = random_case(maker, text);
    SCOPED_TRACE(text + " seed " + std::to_string(seed));
    expect_fused_equals_reference(c, seed, Backend::cuda_simt, cuda);
    if (HasFailure()) return;
  }
}

TEST_F(CudaAttention, RelativeBiasesAgainstTheReference) {
  for (uint64_t seed = 100; seed < 140; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_fused_equals_reference(random_relative_case(seed), seed, Backend::cuda_simt, cuda);
    if (HasFailure()) return;
  }
}

TEST_F(CudaAttention, AnyWidth) {
  for (int64_t width : {1, 31, 32, 33, 63, 64, 65, 128, 129, 256, 300})
    for (int64_t value_width : {int64_t{7}, width}) {
      Case c{
          .heads = 2, .kv_heads = 1, .queries = 70, .keys = 90, .width = width, .value_width = value_width};
      c.options.mask = causal(Align::bottom_right);
      SCOPED_TRACE(width);
      expect_fused_equals_reference(c, static_cast<uint64_t>(width), Backend::cuda_simt, cuda);
    }
}

// In less than double: no worse than the composed computation in the same precision. In f32 that sums in
// another order.
TEST_F(CudaAttention, ErrorInLowPrecision) {
  for (DType dtype : {f32, f16, bf16})
    for (const Mask& mask : {full(), causal()}) {
      Case c{
          .batch = 2, .heads = 4, .kv_heads = 2, .queries = 200, .keys = 200, .width = 64, .value_width = 64};
      c.options.mask = mask;
      Leaves narrow = random_leaves(c, dtype, 4), wide = narrow;
      for (Tensor* x : {&wide.q, &wide.k, &wide.v, &wide.d_out, &wide.d_lse}) *x = x->to(f64);
      const Outcome exact = run(c, wide, Backend::reference, cpu),
                    composed = run(c, narrow, Backend::reference, cpu),
                    fused = run(c, narrow, Backend::cuda_simt, cuda);
      for (size_t i = 0; i < exact.of.size(); ++i)
        EXPECT_LE(distance(fused.of[i], exact.of[i]),
                  (dtype == f32 ? 2 : 1.5) * distance(composed.of[i], exact.of[i]))
            << i << " in " << dtype;
    }
}

// out holds the weights themselves, so that a dropped one is a zero.
TEST_F(CudaAttention, DropsWhatTheCpuDrops) {
  for (DType dtype : {f64, f32, bf16}) {
    const int64_t n = 200;
    Case c{.batch = 2, .heads = 3, .kv_heads = 3, .queries = n, .keys = n, .width = 4, .value_width = n};
    c.options.dropout = 0.3;
    c.options.mask = neighborhood({.grid = {10, 20}, .window = {7, 7}, .boundary = {wrap}});
    Leaves l = random_leaves(c, dtype, 5);
    Tensor identity = Tensor::zeros({n, n});
    for (int64_t i = 0; i < n; ++i) identity.mutable_data<float>()[i * n + i] = 1;
    l.v = identity.to(dtype).expand({2, 3, n, n}).contiguous();
    const auto here = run(c, l, Backend::cpu, cpu).of[0].to_vector<double>(),
               there = run(c, l, Backend::cuda_simt, cuda).of[0].to_vector<double>();
    int64_t different = 0, kept = 0;
    for (size_t i = 0; i < here.size(); ++i)
      different += (here[i] == 0) != (there[i] == 0), kept += here[i] != 0;
    EXPECT_EQ(different, 0) << dtype;
    EXPECT_GT(kept, 0);
  }
}

TEST_F(CudaAttention, GradientOfOneOutputAlone) {
  Case c{.heads = 4, .kv_heads = 2, .queries = 70, .keys = 70, .width = 19, .value_width = 13};
  c.options.mask = causal();
  for (bool of_lse : {true, false}) {
    Leaves l = random_leaves(c, f64, 6);
    (of_lse ? l.d_out : l.d_lse) = Tensor();
    expect_near(run(c, l, Backend::cuda_simt, cuda), run(c, l, Backend::reference, cpu), 1e-10);
  }
}

// Each way to broadcast, under one map and under a map for each batch element.
TEST_F(CudaAttention, GradientsOfBroadcastBiases) {
  for (DType dtype : {f64, bf16})
    for (const Mask& mask : {sliding_window(30, 9), padding({90, 37, 0})})
      for (int stretched = 0; stretched < 16; ++stretched) {
        Case c{
            .batch = 3, .heads = 4, .kv_heads = 2, .queries = 90, .keys = 90, .width = 8, .value_width = 8};
        c.options.mask = mask;
        Shape shape{3, 4, 90, 90};
        for (int a = 0; a < 4; ++a)
          if (stretched >> a & 1) shape[a] = 1;
        Generator g(7);
        c.options.bias = {AttentionBias(Variable(randn(shape, 0, 1, f64, g).to(dtype)))};
        SCOPED_TRACE(stretched);
        const Leaves l = random_leaves(c, dtype, 8);
        expect_near(run(c, l, Backend::cuda_simt, cuda), run(c, l, Backend::cpu, cpu),
                    dtype == f64 ? 1e-11 : 2e-2);
      }
}

TEST_F(CudaAttention, RowsWithoutKeysAreZero) {
  Case c{.batch = 2, .heads = 2, .kv_heads = 2, .queries = 100, .keys = 30, .width = 19, .value_width = 13};
  c.options.mask = causal(Align::bottom_right);
  const Outcome r = run(c, random_leaves(c, f32, 9), Backend::cuda_simt, cuda);
  EXPECT_EQ(norm(r.of[0].slice(2, 0, 70)), 0);
  EXPECT_EQ(norm(r.of[2].slice(2, 0, 70)), 0);
  for (double value : r.of[1].slice(2, 0, 70).to_vector<double>()) EXPECT_EQ(value, -infinity);
  for (size_t i : {0, 2, 3, 4})
    for (double value : r.of[i].to_vector<double>()) ASSERT_TRUE(std::isfinite(value)) << i;
}

TEST_F(CudaAttention, RowsWhoseBiasForbidsAll) {
  Case c{.queries = 70, .keys = 90, .width = 8, .value_width = 8};
  Tensor bias = Tensor::zeros({1, 1, 70, 90}, f64);
  bias.slice(2, 10, 13).fill_(-infinity);
  c.options.bias = {AttentionBias(Variable(bias))};
  const Outcome r = run(c, random_leaves(c, f64, 10), Backend::cuda_simt, cuda);
  EXPECT_EQ(norm(r.of[0].slice(2, 10, 13)), 0);
  EXPECT_EQ(norm(r.of[2].slice(2, 10, 13)), 0);
  for (size_t i : {0, 2, 3, 4, 5})
    for (double value : r.of[i].to_vector<double>()) ASSERT_TRUE(std::isfinite(value)) << i;
}

// What a query may not see changes nothing of it, though a tile holds both.
TEST_F(CudaAttention, NanInMaskedKeysIsHarmless) {
  const int64_t n = 90, poisoned = 37;
  for (const Mask& mask : {neighborhood({.grid = {9, 10}, .window = {3, 3}, .boundary = {wrap, shift}}),
                           document({30, 40, 20}), sliding_window(5, 2), prefix(7)}) {
    Case c{.queries = n, .keys = n, .width = 6, .value_width = 6};
    c.options.mask = mask;
    const Leaves clean = random_leaves(c, f64, 11);
    Leaves dirty = clean;
    dirty.k = clean.k.clone(), dirty.v = clean.v.clone();
    dirty.k.select(2, poisoned).fill_(std::nan("")), dirty.v.select(2, poisoned).fill_(std::nan(""));
    const Outcome a = run(c, clean, Backend::cuda_simt, cuda), b = run(c, dirty, Backend::cuda_simt, cuda);
    int64_t compared = 0;
    for (int64_t token = 0; token < n; ++token) {
      // A query is untouched if it does not see the key; a key, if all that see it are.
      bool key_untouched = true;
      for (int64_t query = 0; query < n; ++query)
        key_untouched &= !mask.allows(query, token, n, n) || !mask.allows(query, poisoned, n, n);
      for (size_t i = 0; i < 5; ++i) {
        if (i < 3 ? mask.allows(token, poisoned, n, n) : !key_untouched) continue;
        ++compared;
        const Tensor x = a.of[i].select(2, token), y = b.of[i].select(2, token);
        EXPECT_LE(distance(x, y), 1e-13 * (1 + norm(x))) << i << " of token " << token;
      }
    }
    EXPECT_GT(compared, n);
  }
}

TEST_F(CudaAttention, NanInSeenKeysIsSeen) {
  Case c{.queries = 75, .keys = 75, .width = 6, .value_width = 6};
  c.options.mask = causal();
  for (bool in_key : {false, true}) {
    Leaves l = random_leaves(c, f32, 12);
    (in_key ? l.k : l.v).select(2, 10).fill_(std::nan(""));
    const Tensor out = run(c, l, Backend::cuda_simt, cuda).of[0];
    for (int64_t i = 0; i < 75; ++i)
      EXPECT_EQ(std::isnan(out.select(0, 0).select(0, 0).select(0, i).select(0, 0).item()), i >= 10) << i;
  }
}

TEST_F(CudaAttention, EmptySizes) {
  for (Case c : {Case{.batch = 0},
                 {.queries = 0},
                 {.keys = 0},
                 {.width = 0},
                 {.value_width = 0},
                 {.heads = 0, .kv_heads = 0}}) {
    for (int64_t* n : {&c.queries, &c.keys}) *n *= 70;
    c.options.bias = {AttentionBias(Variable(Tensor::zeros({c.queries, c.keys}, f64)))};
    const Outcome r = run(c, random_leaves(c, f64, 13), Backend::cuda_simt, cuda);
    EXPECT_EQ(r.of[0].shape(), Shape({c.batch, c.heads, c.queries, c.value_width}));
    for (size_t i : {0, 2, 3, 4}) {
      if (!r.of[i].defined()) continue;
      for (double value : r.of[i].to_vector<double>()) ASSERT_TRUE(std::isfinite(value)) << i;
    }
    if (c.keys == 0) {
      EXPECT_EQ(norm(r.of[0]), 0);
      for (double value : r.of[1].to_vector<double>()) EXPECT_EQ(value, -infinity);
    }
  }
}

TEST_F(CudaAttention, MoreMatricesThanAGridIsHigh) {
  Case c{.batch = 33000, .heads = 2, .kv_heads = 1, .queries = 3, .keys = 5, .width = 4, .value_width = 4};
  c.options.mask = causal(Align::bottom_right);
  const Leaves l = random_leaves(c, f32, 14);
  expect_near(run(c, l, Backend::cuda_simt, cuda), run(c, l, Backend::cpu, cpu), 1e-5);
}

// More than 2^31 elements an operand. The tokens repeat every 1024, so that heads and periods far apart have
// the same bits.
TEST_F(CudaAttention, PassesTwoToTheThirtyFirstElements) {
  const int64_t heads = 33, tokens = int64_t{1} << 20, width = 64, period = 1024;
  Generator g(22);
  const Tensor small[] = {
      randn({1, 1, period, width}, 0, 1, bf16, g), randn({1, 1, period, width}, 0, 1, bf16, g),
      randn({1, 1, period, width}, 0, 1, bf16, g), randn({1, 1, period, width}, 0, 1, bf16, g)};
  Tensor large[4];
  for (size_t i = 0; i < 4; ++i) {
    large[i] = Tensor::empty({1, heads, tokens / period, period, width}, bf16, cuda);
    large[i].copy_(small[i].to(cuda).unsqueeze(2));
    large[i] = large[i].reshape({1, heads, tokens, width});
  }
  // The last period as the third of a short sequence.
  AttentionOptions options{.mask = sliding_window(63, 0)};
  std::vector<Tensor> expected;
  {
    Tape tape;
    std::vector<Variable> x;
    for (size_t i = 0; i < 3; ++i)
      x.emplace_back(
          small[i].to(f32).unsqueeze(2).expand({1, 1, 3, period, width}).reshape({1, 1, 3 * period, width}),
          true);
    const Variable out = attention(x[0], x[1], x[2], options).out;
    tape.backward({out},
                  {small[3].to(f32).unsqueeze(2).expand({1, 1, 3, period, width}).reshape(out.shape())});
    for (const Tensor& of : {out.value(), x[0].grad(), x[1].grad(), x[2].grad()})
      expected.push_back(of.slice(2, 2 * period, 3 * period));
  }
  for (const auto& backend : detail::attention_backends()) {
    options.backend = backend.id;
    std::vector<Tensor> got;
    {
      Tape tape;
      std::vector<Variable> x;
      for (size_t i = 0; i < 3; ++i) x.emplace_back(large[i], true);
      detail::AttentionProblem problem;
      problem.q = large[0], problem.k = large[1], problem.v = large[2];
      problem.mask = options.mask;
      if (!backend.refusal(problem).empty()) continue;
      const Variable out = attention(x[0], x[1], x[2], options).out;
      tape.backward({out}, {large[3]});
      got = {out.value(), x[0].grad(), x[1].grad(), x[2].grad()};
    }
    for (size_t i = 0; i < 4; ++i) {
      SCOPED_TRACE(std::string(name(backend.id)) + ' ' + std::to_string(i));
      const Tensor end = got[i].select(1, heads - 1).slice(1, tokens - period, tokens).to(cpu);
      EXPECT_EQ(end.to_vector<float>(),
                got[i].select(1, 0).slice(1, tokens - period, tokens).to_vector<float>());
      EXPECT_LE(distance(end.to(f32), expected[i]), 1e-2 * norm(expected[i]));
    }
    got.clear();
    release_cached_memory(cuda);
  }
}

TEST_F(CudaAttention, StridedOperands) {
  Case c{.batch = 2, .heads = 4, .kv_heads = 2, .queries = 70, .keys = 70, .width = 20, .value_width = 20};
  c.options.mask = causal();
  const Leaves l = random_leaves(c, f32, 15);
  const Outcome plain = run(c, l, Backend::cuda_simt, cuda);
  // As one projection of q, k and v lays them out; and every second channel of something.
  const auto every_second = [](const Tensor& x) {
    Tensor wide = Tensor::zeros({x.size(0), x.size(1), x.size(2), 2 * x.size(3)}, x.dtype(), cuda);
    Tensor view = wide.slice(3, 1, 2 * x.size(3), 2);
    view.copy_(x.to(cuda));
    return view;
  };
  const auto heads_inside = [](const Tensor& x) {
    Tensor wide = Tensor::zeros({x.size(0), x.size(2), x.size(1), 3 * x.size(3)}, x.dtype(), cuda);
    Tensor view = wide.slice(3, x.size(3), 2 * x.size(3)).transpose(1, 2);
    view.copy_(x.to(cuda));
    return view;
  };
  for (const auto& layout : {std::function<Tensor(const Tensor&)>(every_second), {heads_inside}})
    expect_same_bits(
        run(c, {layout(l.q), layout(l.k), layout(l.v), layout(l.d_out), l.d_lse}, Backend::cuda_simt, cuda),
        plain);
}

TEST_F(CudaAttention, SameBitsEachTime) {
  const std::vector<int64_t> grid{8, 9, 10};
  Generator g(2);
  Case c{.batch = 2, .heads = 2, .kv_heads = 1, .queries = 720, .keys = 720, .width = 16, .value_width = 16};
  c.options.mask = neighborhood({.grid = grid, .window = {5}, .boundary = {wrap}});
  c.options.dropout = 0.1;
  c.options.bias = {relative_bias(Variable(randn({2, 5, 5, 5}, 0, 1, f32, g)), grid, {true, true, true}),
                    AttentionBias(Variable(randn({720, 720}, 0, 1, f32, g))),
                    AttentionBias(Variable(randn({2, 1, 720}, 0, 1, f32, g)))};
  const Leaves l = random_leaves(c, f32, 16);
  const Outcome first = run(c, l, Backend::cuda_simt, cuda);
  for (int round = 0; round < 3; ++round) expect_same_bits(run(c, l, Backend::cuda_simt, cuda), first);
  expect_near(first, run(c, l, Backend::cpu, cpu), 1e-5);
}

TEST_F(CudaAttention, Gradcheck) {
  Generator g(17);
  for (const Mask& mask :
       {causal(), neighborhood({.grid = {2, 3}, .window = {2, 2}, .boundary = {wrap, shift}})}) {
    const auto make = [&](const Shape& shape) { return randn(shape, 0, 1, f64, g).to(cuda); };
    const std::vector<Tensor> inputs{make({1, 2, 6, 3}), make({1, 1, 6, 3}), make({1, 1, 6, 2}),
                                     make({2, 3, 3}), make({1, 6, 6})};
    const auto report = gradcheck(
        [&](const std::vector<Variable>& x) {
          const auto [out, lse] = attention(x[0], x[1], x[2],
                                            {.mask = mask,
                                             .bias = {relative_bias(x[3], {2, 3}, {true, false}), x[4]},
                                             .softcap = 2,
                                             .dropout = 0.3,
                                             .backend = Backend::cuda_simt});
          return std::vector<Variable>{out, lse};
        },
        inputs);
    EXPECT_TRUE(report) << report;
  }
}

// Replays of a captured step draw as runs of the step do, in backward as in forward; what they use outlives
// the mask.
TEST_F(CudaAttention, CapturedStepsDrawAnew) {
  Case c{.heads = 2, .kv_heads = 2, .queries = 100, .keys = 100, .width = 16, .value_width = 16};
  const Leaves l = random_leaves(c, f32, 18);
  const Tensor q0 = l.q.to(cuda), k0 = l.k.to(cuda), v0 = l.v.to(cuda), d_out = l.d_out.to(cuda);
  const auto results = [&](bool captured) {
    Generator generator(9);
    std::optional<Mask> mask = Mask::from([](Query q, Key k) { return (q.token * k.token) % 3 != 1; });
    Tensor out = Tensor::zeros(d_out.shape(), f32, cuda), dq = Tensor::zeros(q0.shape(), f32, cuda),
           dv = Tensor::zeros(v0.shape(), f32, cuda);
    const std::function<void()> step = [&] {
      Tape tape;
      const Variable q(q0, true), k(k0, true), v(v0, true);
      const Variable y =
          attention(q, k, v,
                    {.mask = *mask, .dropout = 0.5, .backend = Backend::cuda_simt, .generator = &generator})
              .out;
      tape.backward({y}, {d_out});
      out.copy_(y.value());
      dq.copy_(q.grad());
      dv.copy_(v.grad());
    };
    CapturedStep replayed(cuda, step);
    Outcome all;
    for (int i = 0; i < 6; ++i) {
      captured ? replayed() : step();
      for (const Tensor* x : {&out, &dq, &dv}) all.of.push_back(x->to(cpu));
      if (captured && i == 3) {
        EXPECT_TRUE(replayed.captured()) << replayed.why_not();
        mask.reset();
        for (int n = 0; n < 20; ++n) Tensor::full({1 << n}, -1, f32, cuda);
      }
    }
    return all;
  };
  const Outcome ran = results(false), replayed = results(true);
  expect_same_bits(replayed, ran);
  EXPECT_NE(ran.of[0].to_vector<float>(), ran.of[3].to_vector<float>());
}

// Their map is made on the device, in ordinary runs and in replays, of lengths that change before each.
TEST_F(CudaAttention, DocumentsOfChangingLengths) {
  for (const Backend backend : {Backend::cuda_simt, Backend::cuda_mma})
    for (const bool per_batch : {false, true})
      for (const bool is_causal : {false, true}) {
        const DType dtype = backend == Backend::cuda_simt ? f32 : bf16;
        Case c{.batch = 2,
               .heads = 2,
               .kv_heads = 1,
               .queries = 300,
               .keys = 300,
               .width = 32,
               .value_width = 32};
        const Leaves l = random_leaves(c, dtype, 20);
        const Leaves wide{l.q.to(f32), l.k.to(f32), l.v.to(f32), l.d_out.to(f32), l.d_lse};
        Tensor lengths = Tensor::zeros(per_batch ? Shape{2, 6} : Shape{6}, per_batch ? i64 : i32, cuda);
        const auto masked = [&](const Tensor& of) {
          return is_causal ? document(of) & causal() : document(of);
        };
        const Mask mask = masked(lengths);
        const Tensor operands[] = {l.q.to(cuda), l.k.to(cuda), l.v.to(cuda), l.d_out.to(cuda),
                                   l.d_lse.to(cuda)};
        std::vector<Tensor> kept;
        for (int i : {3, 4, 0, 1, 2})
          kept.push_back(Tensor::zeros(operands[i].shape(), operands[i].dtype(), cuda));
        CapturedStep step(cuda, [&] {
          Tape tape;
          std::vector<Variable> leaves;
          for (int i = 0; i < 3; ++i) leaves.emplace_back(operands[i], true);
          const auto [out, lse] =
              attention(leaves[0], leaves[1], leaves[2], {.mask = mask, .backend = backend});
          tape.backward({out, lse}, {operands[3], operands[4]});
          kept[0].copy_(out.value());
          kept[1].copy_(lse.value());
          for (size_t i = 0; i < 3; ++i) kept[2 + i].copy_(leaves[i].grad());
        });
        MaskMaker random(4);
        for (int i = 0; i < 8; ++i) {
          std::vector<int64_t> values;
          while (values.size() < static_cast<size_t>(lengths.numel())) {
            int64_t left = c.queries;
            for (int64_t n = 0; n < 6; ++n) {
              values.push_back(i == 0                 ? 50
                               : random.below(5) == 0 ? 0
                                                      : std::min(left, 1 + random.below(160)));
              left -= values.back();
            }
          }
          lengths.copy_(Tensor::from(values, lengths.shape()));
          step();
          Outcome got;
          for (const Tensor& x : kept) got.of.push_back(x.to(cpu).to(f32));
          c.options.mask = masked(lengths.to(cpu));
          const Outcome expected = run(c, wide, Backend::cpu, cpu);
          SCOPED_TRACE(std::string(name(backend)) + (per_batch ? " each" : " all") +
                       (is_causal ? " causal " : " ") + std::to_string(i));
          expect_near(got, expected, dtype == f32 ? 1e-5 : 2e-2);
        }
        EXPECT_TRUE(step.captured()) << step.why_not();
      }
}

TEST_F(CudaAttention, DocumentsWhoseLengthsCannotBe) {
  Case c{.queries = 100, .keys = 100, .width = 8, .value_width = 8};
  const Leaves l = random_leaves(c, f32, 21);
  Tensor lengths = Tensor::from<int64_t>({60, 60}).to(cuda);
  c.options.mask = document(lengths);
  EXPECT_ERROR(run(c, l, Backend::cuda_simt, cuda), Value,
               "[document] the sum of lengths 120 is outside [0, 101)");
  lengths.copy_(Tensor::from<int64_t>({60, -2}));
  EXPECT_ERROR(run(c, l, Backend::cuda_simt, cuda), Value, "[document] a length of -2 is outside [0, 101)");
  lengths.copy_(Tensor::from<int64_t>({60, 40}));
  run(c, l, Backend::cuda_simt, cuda);
  // Backward needs them as they were.
  Tape tape;
  const Variable q(l.q.to(cuda), true), k(l.k.to(cuda)), v(l.v.to(cuda));
  const Variable out = attention(q, k, v, {.mask = c.options.mask}).out;
  lengths.fill_(50);
  EXPECT_ERROR(tape.backward({out}, {l.d_out.to(cuda)}), Version, "attention");
}

TEST_F(CudaAttention, ReferenceRunsOnTheDevice) {
  MaskMaker maker(77);
  std::string text;
  for (int i = 0; i < 5; ++i) {
    const Case c = random_case(maker, text);
    SCOPED_TRACE(text);
    const Leaves l = random_leaves(c, f64, 19);
    expect_near(run(c, l, Backend::reference, cuda), run(c, l, Backend::reference, cpu), 1e-9);
  }
}

TEST_F(CudaAttention, SaysWhyItCannotRun) {
  const Variable there(Tensor::zeros({1, 1, 4, 4}, f32, cuda)), here(Tensor::zeros({1, 1, 4, 4}));
  EXPECT_EQ(message_of([&] { attention(there, there, there, {.backend = Backend::cpu}); }),
            "[attention] no backend can run this: cpu: the tensors are not in host memory");
  EXPECT_EQ(message_of([&] { attention(here, here, here, {.backend = Backend::cuda_simt}); }),
            "[attention] no backend can run this: cuda_simt: the tensors are not on a CUDA device");
  EXPECT_EQ(message_of([&] { attention(there, there, there, {.bias = {AttentionBias(here)}}); }),
            "[attention] a bias must be on cuda:0 as q, got cpu");
}

}  // namespace
}  // namespace torus
