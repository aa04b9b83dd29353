// cuda_mma and hopper by the rule for 16 bits: against f64, no more than 1.5 times the error of the composed
// computation in the same precision, for the output and each gradient, with random output gradients of full
// size.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "ops/attention_cases.h"
#include "torus/autograd/tape.h"
#include "torus/ops/attention/attention.h"
#include "torus/ops/ops.h"

namespace torus {
namespace {

class CudaMma : public testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
    if (GetParam() == Backend::hopper && !has_hopper()) GTEST_SKIP() << "no device of sm_90";
  }
  static bool has_hopper() {
    const Variable x(Tensor::zeros({1, 1, 1, 8}, f16, cuda));
    try {
      attention(x, x, x, {.backend = Backend::hopper});
    } catch (const Error&) {
      return false;
    }
    return true;
  }
};
INSTANTIATE_TEST_SUITE_P(Backends, CudaMma, testing::Values(Backend::cuda_mma, Backend::hopper),
                         [](const auto& backend) { return std::string(name(backend.param)); });

enum class Layout { heads_first, tokens_first, unaligned, expanded };

// Biases from a source of random numbers, on no device yet.
using Biases = std::function<std::vector<AttentionBias>(DType, Device)>;

struct Problem {
  std::string name;
  int64_t batch = 1, heads = 2, kv_heads = 2, queries = 100, keys = 100, width = 64, value_width = 64;
  Mask mask = full();
  std::optional<double> scale = {};
  double softcap = 0, dropout = 0;
  double size = 1;  // of q and k
  Biases biases = {};
  Layout layout = Layout::heads_first;
  bool with_out = true, with_lse = true, deterministic = true;
  std::function<Tensor(const Tensor&)> of_q = {}, of_k = {};  // made of random values, in f64
};

struct Operands {
  Tensor q, k, v, d_out, d_lse;
};

// f64 values that `dtype` can hold, others each time.
Operands random_operands(const Problem& c, DType dtype) {
  static uint64_t seed = 17;
  Generator g(seed++);
  const auto make = [&](int64_t h, int64_t n, int64_t d, double size,
                        const std::function<Tensor(const Tensor&)>& change = {}) {
    const Tensor x = randn({c.batch, h, n, d}, 0, size, f64, g);
    return (change ? change(x) : x).to(dtype).to(f64);
  };
  return {make(c.heads, c.queries, c.width, c.size, c.of_q),
          make(c.kv_heads, c.keys, c.width, c.size, c.of_k), make(c.kv_heads, c.keys, c.value_width, 1),
          make(c.heads, c.queries, c.value_width, 1),
          randn({c.batch, c.heads, c.queries}, 0, 1, f32, g).to(f64)};
}

struct Results {
  Tensor out, lse, dq, dk, dv;
  std::vector<Tensor> d_bias;
};

Tensor laid_out(const Tensor& x, Layout layout) {
  if (layout == Layout::heads_first) return x;
  if (layout == Layout::tokens_first) return x.transpose(1, 2).contiguous().transpose(1, 2);
  if (layout == Layout::expanded) return x.slice(1, 0, 1).expand(x.shape());
  Tensor wide = Tensor::zeros({x.size(0), x.size(1), x.size(2), x.size(3) + 3}, x.dtype(), x.device());
  Tensor view = wide.slice(3, 1, 1 + x.size(3));
  view.copy_(x);
  return view;
}

// Leaves NaN in the memory that results will be given.
void poison(const Problem& c, DType dtype, Device device) {
  std::vector<Tensor> held;
  for (const auto& [heads, tokens, width] : {std::tuple{c.heads, c.queries, c.width},
                                             {c.heads, c.queries, c.value_width},
                                             {c.kv_heads, c.keys, c.width},
                                             {c.kv_heads, c.keys, c.value_width}})
    held.push_back(Tensor::full({c.batch, heads, tokens, width}, std::numeric_limits<double>::quiet_NaN(),
                                dtype, device));
}

Results run(const Problem& c, const Operands& o, DType dtype, Device device, Backend backend) {
  const auto there = [&](const Tensor& x) { return laid_out(x.to(dtype).to(device), c.layout); };
  Tape tape;
  const Variable q(there(o.q), true), k(there(o.k), true), v(there(o.v), true);
  poison(c, dtype, device);
  Generator generator(5);
  const std::vector<AttentionBias> biases = c.biases ? c.biases(dtype, device) : std::vector<AttentionBias>{};
  const auto [out, lse] = attention(q, k, v,
                                    {.mask = c.mask,
                                     .scale = c.scale,
                                     .bias = biases,
                                     .softcap = c.softcap,
                                     .dropout = c.dropout,
                                     .deterministic = c.deterministic,
                                     .backend = backend,
                                     .generator = &generator});
  Results r{out.value().to(cpu), lse.value().to(cpu), {}, {}, {}, {}};
  if (out.requires_grad())
    tape.backward({out, lse}, {c.with_out ? there(o.d_out) : Tensor(),
                               c.with_lse ? o.d_lse.to(lse.dtype()).to(device) : Tensor()});
  r.dq = q.grad(), r.dk = k.grad(), r.dv = v.grad();
  for (const AttentionBias& bias : biases)
    if (bias.value().requires_grad()) r.d_bias.push_back(bias.value().grad());
  return r;
}

// What hopper leaves to others.
bool hopper_runs(const Problem& c) {
  return c.width % 8 == 0 && c.value_width % 8 == 0 && c.layout != Layout::unaligned;
}

void check_case(const Problem& c, DType dtype) {
  SCOPED_TRACE(c.name + " in " + name(dtype));
  const Backend backend = CudaMma::GetParam();
  if (backend == Backend::hopper && !hopper_runs(c)) {
    EXPECT_THROW(run(c, random_operands(c, dtype), dtype, cuda, backend), Error);
    return;
  }
  const Operands o = random_operands(c, dtype);
  const Results exact = run(c, o, f64, cpu, Backend::reference),
                composed = run(c, o, dtype, cpu, Backend::reference);
  const Results fused = run(c, o, dtype, cuda, backend), again = run(c, o, dtype, cuda, backend);
  const double scale =
      std::abs(c.scale.value_or(1 / std::sqrt(static_cast<double>(std::max<int64_t>(c.width, 1)))));
  // Where a gradient is truly zero, what is left is the noise of sums in f32.
  const double noise = 64 * 0x1p-24 * norm(o.d_out) * norm(o.v) * scale;
  const auto near = [&](const char* what, const Tensor& x, const Tensor& y, const Tensor& z, const Tensor& w,
                        double floor) {
    if (!z.defined()) {  // nothing depends on it
      EXPECT_TRUE(!x.defined() || norm(x) == 0) << what;
      return;
    }
    ASSERT_TRUE(x.defined()) << what;
    ASSERT_EQ(x.shape(), z.shape()) << what;
    if (c.deterministic) {
      EXPECT_EQ(x.to_vector<double>(), w.to_vector<double>()) << what << " differs from run to run";
    }
    const double ours = distance(x, z), theirs = distance(y, z);
    // Few numbers may be rounded luckily.
    const double luck = x.numel() < 4096 ? (dtype == f16 ? 0x1p-11 : 0x1p-8) * norm(z) : 0;
    // The composed products may overflow where the fused ones cannot.
    EXPECT_LE(ours, std::isfinite(theirs) ? 1.5 * theirs + luck + floor : 4e-3 * norm(z))
        << what << ", of norm " << norm(z) << ", composed " << theirs;
  };
  near("out", fused.out, composed.out, exact.out, again.out, 0);
  near("dq", fused.dq, composed.dq, exact.dq, again.dq, noise * norm(o.k));
  near("dk", fused.dk, composed.dk, exact.dk, again.dk, noise * norm(o.q));
  near("dv", fused.dv, composed.dv, exact.dv, again.dv, 64 * 0x1p-24 * norm(o.d_out));
  ASSERT_EQ(fused.d_bias.size(), exact.d_bias.size());
  for (size_t i = 0; i < exact.d_bias.size(); ++i)
    near("d_bias", fused.d_bias[i], composed.d_bias[i], exact.d_bias[i], again.d_bias[i], noise);
  // lse is f32, so it is held to more than the rule.
  EXPECT_LE(distance(fused.lse, exact.lse), 3e-6 * norm(exact.lse) + 1e-5 * std::sqrt(exact.lse.numel()))
      << "lse";
}

void check_both(const Problem& c) {
  check_case(c, f16);
  check_case(c, bf16);
}

TEST_P(CudaMma, Lengths) {
  for (int64_t n : {1, 63, 64, 65, 127, 129})
    check_both({.name = std::to_string(n), .queries = n, .keys = n});
  check_both({.name = "1000 causal", .queries = 1000, .keys = 1000, .mask = causal()});
  check_both({.name = "1 x 257", .queries = 1, .keys = 257});
  check_both({.name = "257 x 1", .queries = 257, .keys = 1});
  check_both({.name = "200 x 77", .queries = 200, .keys = 77});
}

TEST_P(CudaMma, Widths) {
  for (int64_t d = 8; d <= 256; d += 8)
    check_case({.name = "D " + std::to_string(d), .width = d, .value_width = d, .mask = causal()},
               d % 16 ? f16 : bf16);
  for (int64_t d : {1, 33, 64, 128, 256})
    check_both({.name = "D " + std::to_string(d), .width = d, .value_width = d, .mask = causal()});
  check_both({.name = "D 64, Dv 128", .width = 64, .value_width = 128});
  check_both({.name = "D 192, Dv 128", .width = 192, .value_width = 128});
  check_both({.name = "D 40, Dv 7", .width = 40, .value_width = 7});
  check_both({.name = "D 5, Dv 200", .width = 5, .value_width = 200});
}

TEST_P(CudaMma, Layouts) {
  for (Layout layout : {Layout::tokens_first, Layout::unaligned, Layout::expanded})
    for (int64_t d : {64, 72, 130})
      check_both({.name = "D " + std::to_string(d), .width = d, .value_width = d, .layout = layout});
}

TEST_P(CudaMma, OneOutputAlone) {
  for (const Mask& mask : {causal(), neighborhood({.grid = {5, 4, 5}, .window = {3}, .boundary = {wrap}})}) {
    check_both({.name = "out", .mask = mask, .with_lse = false});
    check_both({.name = "lse", .mask = mask, .with_out = false});
  }
}

// Enough matrices that two tiles of queries share a block of threads.
TEST_P(CudaMma, PairsOfTiles) {
  const auto make = [](const char* name, const Mask& mask, int64_t queries = 320, int64_t width = 64) {
    return Problem{.name = name,
                   .batch = 4,
                   .heads = 24,
                   .kv_heads = 24,
                   .queries = queries,
                   .keys = 320,
                   .width = width,
                   .value_width = width,
                   .mask = mask};
  };
  check_case(make("full", full()), bf16);
  check_case(make("full, d 128", full(), 193, 128), bf16);
  check_case(make("causal", causal()), bf16);
  check_case(make("causal, bottom right", causal(Align::bottom_right), 200), f16);
  check_case(make("window", sliding_window(70, 3)), bf16);
  check_case(make("documents", document({1, 100, 62, 64, 93})), f16);
  check_case(
      make("stripes", Mask::from([](Query q, Key k) { return (q.token / 64 + k.token / 32) % 3 == 0; })),
      bf16);
}

// At width 64, hopper takes two or three warp groups by the length and the number of tiles; tiles that differ
// in length are counted off, or are shared out where there are many matrices.
TEST_P(CudaMma, ShortSequences) {
  const auto many = [](const std::string& name, const Mask& mask, int64_t n) {
    return Problem{.name = name + ", " + std::to_string(n),
                   .batch = 6,
                   .heads = 22,
                   .kv_heads = 22,
                   .queries = n,
                   .keys = n,
                   .mask = mask};
  };
  for (const auto& [name, mask] : {std::pair<std::string, Mask>{"full", full()},
                                   {"causal", causal()},
                                   {"window", sliding_window(70, 3)}}) {
    check_case(many(name, mask, 256), bf16);  // two
    check_case(many(name, mask, 320), f16);   // three
    check_both({.name = name + ", few", .queries = 500, .keys = 500, .mask = mask});
  }
  check_case({.name = "rows without keys",
              .batch = 6,
              .heads = 22,
              .kv_heads = 11,
              .queries = 256,
              .keys = 100,
              .mask = causal(Align::bottom_right)},
             bf16);
}

TEST_P(CudaMma, Masks) {
  const auto make = [](const char* name, const Mask& mask, int64_t queries = 200, int64_t keys = 200) {
    return Problem{.name = name,
                   .batch = 2,
                   .queries = queries,
                   .keys = keys,
                   .width = 32,
                   .value_width = 32,
                   .mask = mask};
  };
  check_both(make("causal", causal()));
  check_both(make("causal, top left, more queries", causal(Align::top_left), 130, 65));
  check_both(make("causal, top left, more keys", causal(Align::top_left), 65, 130));
  check_both(make("causal, bottom right, rows without keys", causal(Align::bottom_right), 130, 65));
  check_both(make("causal, bottom right, blocks without keys", causal(Align::bottom_right), 400, 65));
  check_both(make("causal, bottom right, more keys", causal(Align::bottom_right), 33, 200));
  check_both(make("window", sliding_window(17, 5)));
  check_both(make("window of one", sliding_window(0, 0)));
  check_both(make("documents", document({1, 63, 64, 0, 65, 7})));
  check_both(make("padding", padding({0, 131})));
  check_both(make("prefix", prefix(70)));
  check_both(make("lambda", Mask::from([](Query q, Key k) { return (q.token + k.token) % 3 != 0; })));
  check_both(make(
      "lambda by head",
      Mask::from([](Query q, Key k) { return (q.token + q.head + k.token) % 3 == 0; }, {.per_head = true})));
  check_both(make("nothing", Mask::from([](Query, Key) { return false; })));
  check_both(make("both", causal() & sliding_window(40, 40)));
  check_both(make("either", causal() | document({100, 100})));
  check_both(make("not", !sliding_window(20, 20)));
  // Keys that nobody sees wait for no turn at queries: those between them and keys of others do not take it.
  check_both(make("some keys alone", Mask::from([](Query q, Key k) {
                    return q.token / 128 == 0 ? k.token / 128 == 4 : q.token / 128 == 2 && k.token / 128 == 3;
                  }),
                  300, 640));
}

TEST_P(CudaMma, Neighborhoods) {
  const auto make = [](const std::string& name, std::vector<int64_t> grid, std::vector<int64_t> window,
                       std::vector<Boundary> boundary, std::vector<int64_t> dilation = {}) {
    int64_t n = 1;
    for (int64_t side : grid) n *= side;
    return Problem{
        .name = name,
        .queries = n,
        .keys = n,
        .width = 32,
        .value_width = 32,
        .mask = neighborhood({.grid = grid, .window = window, .dilation = dilation, .boundary = boundary})};
  };
  for (const auto& [name, boundary] : {std::pair<std::string, Boundary>{"wrap", wrap},
                                       {"shift", shift},
                                       {"shrink", shrink},
                                       {"causal", Boundary::causal}}) {
    check_both(make(name + " 1-D", {200}, {9}, {boundary}));
    check_both(make(name + " 2-D", {13, 17}, {5, 4}, {boundary}));
    check_both(make(name + " 3-D", {7, 6, 8}, {3, 5, 3}, {boundary}));
    check_both(make(name + " dilated", {12, 15}, {3, 3}, {boundary}, {2, 3}));
  }
  check_both(make("mixed", {6, 7, 5}, {3, 3, 3}, {wrap, shift, shrink}));
  // More blocks than are copied ahead, and more tiles than multiprocessors.
  Problem wide = make("wide", {12, 10, 12}, {7, 7, 7}, {wrap});
  wide.batch = 3, wide.heads = wide.kv_heads = 8;
  wide.width = wide.value_width = 64;
  check_case(wide, bf16);
  wide.width = wide.value_width = 128;
  check_case(wide, f16);
  Problem valid_case = make("valid", {6, 6, 6}, {3, 3, 3}, {shift});
  valid_case.mask =
      neighborhood({.grid = {6, 6, 6}, .window = {3}, .boundary = {valid}, .key_grid = {8, 8, 8}});
  valid_case.keys = 512;
  check_both(valid_case);
  Problem lambda = make("lambda on a grid", {8, 8, 4}, {3}, {shift});
  lambda.mask = Mask::from(
      [](Query q, Key k) {
        return std::abs(q.coord[0] - k.coord[0]) + std::abs(q.coord[1] - k.coord[1]) < 3;
      },
      {.grid = {8, 8, 4}});
  check_both(lambda);
}

// A random tensor that every call makes anew with the same values.
Variable random_bias(const Shape& shape, DType dtype, Device device, bool differentiable) {
  Generator g(23);
  return Variable(randn(shape, 0, 1, f64, g).to(bf16).to(f16).to(dtype).to(device), differentiable);
}

// Combinations of masks (tiles that list tokens beside runs, a map for each head or batch element) and of
// what scores are made of.
TEST_P(CudaMma, RandomProblems) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    MaskMaker maker(seed);
    Problem c;
    c.batch = 1 + maker.below(2);
    const auto made = maker.any(c.batch);
    c.name = std::to_string(seed) + ": " + made.text, c.mask = made.mask, c.queries = made.queries,
    c.keys = made.keys;
    c.kv_heads = 1 + maker.below(2), c.heads = c.kv_heads * (1 + maker.below(2));
    c.width = 8 * (1 + maker.below(16)), c.value_width = maker.below(2) ? c.width : 8 * (1 + maker.below(16));
    c.deterministic = maker.below(3) > 0;
    if (maker.below(3) == 0) c.softcap = 1 + 3 * maker.uniform();
    if (maker.below(3) == 0) c.dropout = 0.6 * maker.uniform();
    if (maker.below(4) == 0) c.scale = 2 * maker.uniform() - 1;
    if (maker.below(3) == 0)
      c.biases = [shape = Shape{c.batch, c.heads, c.queries, c.keys}](DType dtype, Device device) {
        return std::vector{AttentionBias(random_bias(shape, dtype, device, true)),
                           alibi(alibi_slopes(shape[1]).to(device))};
      };
    check_case(c, seed % 2 ? f16 : bf16);
  }
}

TEST_P(CudaMma, GroupedHeads) {
  check_both({.name = "4 to 2", .batch = 2, .heads = 4, .kv_heads = 2, .mask = causal()});
  check_both({.name = "6 to 1", .heads = 6, .kv_heads = 1, .queries = 130, .keys = 70});
  check_both({.name = "a mask a head",
              .heads = 4,
              .kv_heads = 2,
              .mask = Mask::from([](Query q, Key k) { return k.token <= q.token + 10 * q.head; },
                                 {.per_head = true})});
  check_both({.name = "gathers",
              .heads = 4,
              .kv_heads = 2,
              .queries = 216,
              .keys = 216,
              .mask = neighborhood({.grid = {6, 6, 6}, .window = {3}, .boundary = {wrap}})});
}

TEST_P(CudaMma, Scales) {
  check_both({.name = "negative", .mask = causal(), .scale = -0.3});
  check_both({.name = "zero", .mask = causal(), .scale = 0.0});
  check_both({.name = "large", .mask = causal(), .scale = 3.0});
  check_both({.name = "tiny", .scale = 1e-36});
  check_both({.name = "logits of 1e4", .size = 100});
}

// Weights are made against the largest scores of the blocks before, until one is much larger.
TEST_P(CudaMma, ScoresThatGrow) {
  const auto by_token = [](const std::function<double(double)>& factor) {
    return [factor](const Tensor& x) {
      Tensor y = x.contiguous().clone();
      auto* const at = y.mutable_data<double>();
      const int64_t tokens = x.size(2), width = x.size(3);
      for (int64_t i = 0; i < y.numel(); ++i)
        at[i] *= factor(static_cast<double>(i / width % tokens) / static_cast<double>(tokens));
      return y;
    };
  };
  const auto sign = [](double by) {
    return [by](const Tensor& x) {
      Tensor y = x.contiguous().clone();
      auto* const at = y.mutable_data<double>();
      for (int64_t i = 0; i < y.numel(); ++i) at[i] = by * (std::abs(at[i]) + 1);
      return y;
    };
  };
  const Mask late = Mask::from([](Query q, Key k) { return k.token >= q.token * 7 % 290; });
  const Mask window = neighborhood({.grid = {5, 8, 8}, .window = {3}, .boundary = {wrap}});
  for (int64_t width : {64, 128}) {
    Problem c{.name = {}, .queries = 320, .keys = 320, .width = width, .value_width = width, .size = 2};
    const auto check = [&](const std::string& what, DType dtype) {
      for (const auto& [mask_name, mask] :
           {std::pair<std::string, Mask>{"full", full()}, {"late keys", late}, {"window", window}}) {
        c.name = what + ", " + mask_name + ", d " + std::to_string(width);
        c.mask = mask;
        check_case(c, dtype);
      }
    };
    c.of_k = by_token([](double x) { return 41 - 40 * x; });
    check("shrinking", bf16);
    c.of_k = by_token([](double x) { return x < 0.5 ? 0 : 30; });
    check("a jump", f16);
    c.of_q = sign(1), c.of_k = sign(-1);
    check("none positive", bf16);
    c.of_q = {}, c.of_k = by_token([](double x) { return 1 + 40 * x; });
    check("growing", f16);
    c.heads = c.kv_heads = 44, c.mask = late;  // two tiles of queries share a block of threads
    check_case(c, f16);
  }
}

TEST_P(CudaMma, SoftcapAndDropout) {
  check_both({.name = "softcap", .mask = causal(), .scale = 1.0, .softcap = 5});
  check_both({.name = "dropout", .queries = 150, .keys = 150, .mask = causal(), .dropout = 0.3});
  check_both({.name = "dropout of all", .dropout = 1.0});
  check_both({.name = "both, gathers",
              .queries = 216,
              .keys = 216,
              .width = 128,
              .value_width = 128,
              .mask = neighborhood({.grid = {6, 6, 6}, .window = {3}, .boundary = {wrap}}),
              .softcap = 3,
              .dropout = 0.2});
}

TEST_P(CudaMma, Biases) {
  const int64_t n = 120;  // a grid of 4 x 5 x 6
  const auto with = [&](const char* name, Biases biases) {
    return Problem{
        .name = name, .batch = 2, .queries = n, .keys = n, .mask = causal(), .biases = std::move(biases)};
  };
  check_both(with("dense, of all scores", [](DType dtype, Device device) {
    return std::vector{AttentionBias(random_bias({2, 2, n, n}, dtype, device, true))};
  }));
  check_both(with("dense, broadcast", [](DType dtype, Device device) {
    return std::vector{AttentionBias(random_bias({1, n}, dtype, device, true)),
                       AttentionBias(random_bias({2, 1, n, 1}, dtype, device, true))};
  }));
  check_both(with("relative", [](DType dtype, Device device) {
    return std::vector{
        relative_bias(random_bias({2, 5, 3, 7}, dtype, device, true), {4, 5, 6}, {true, false, true})};
  }));
  check_both(with("alibi and dense", [](DType dtype, Device device) {
    return std::vector{alibi(alibi_slopes(2).to(device)),
                       AttentionBias(random_bias({2, 2, n, n}, dtype, device, true))};
  }));
  Problem capped = with("softcap below a bias", [](DType dtype, Device device) {
    return std::vector{AttentionBias(random_bias({2, 2, n, n}, dtype, device, true))};
  });
  capped.softcap = 2, capped.dropout = 0.1;
  check_both(capped);
}

// NaN in keys and values of a whole tile that a tile of queries does not see changes nothing for it.
TEST_P(CudaMma, NaNInMaskedTiles) {
  for (int64_t width : {64, 128, 256})
    for (const auto& [name, mask] :
         {std::pair<std::string, Mask>{"documents", document({64, 128, 64, 64, 64})},
          {"padding", padding({64, 64})},
          {"lambda", Mask::from([](Query q, Key k) {
             return q.token / 64 != 1 && k.token / 64 != 1 && (q.token + k.token) % 3 != 0;
           })}}) {
      const bool padded = name == "padding";
      const Problem c{.name = name,
                      .batch = 2,
                      .queries = 384,
                      .keys = 384,
                      .width = width,
                      .value_width = width,
                      .mask = mask};
      Operands o = random_operands(c, bf16);
      const Results clean = run(c, o, bf16, cuda, GetParam());
      const int64_t first = 64, last = padded ? 384 : name == "documents" ? 192 : 128;
      for (Tensor* x : {&o.k, &o.v}) x->slice(2, first, last).fill_(std::numeric_limits<double>::quiet_NaN());
      const Results dirty = run(c, o, bf16, cuda, GetParam());
      for (const auto& [what, x, y] : {std::tuple{"out", &clean.out, &dirty.out},
                                       {"dq", &clean.dq, &dirty.dq},
                                       {"dk", &clean.dk, &dirty.dk},
                                       {"dv", &clean.dv, &dirty.dv}}) {
        SCOPED_TRACE(name + " " + what + " D " + std::to_string(width));
        const auto rows = [&](const Tensor& t, int64_t from, int64_t to) {
          return t.slice(2, from, to).to_vector<double>();
        };
        EXPECT_EQ(rows(*x, 0, first), rows(*y, 0, first));
        EXPECT_EQ(rows(*x, last, 384), rows(*y, last, 384));
      }
    }
}

// Keys may add to dQ in any order.
TEST_P(CudaMma, Unordered) {
  for (int64_t d : {64, 37, 128})
    check_both({.name = "D " + std::to_string(d),
                .heads = 4,
                .queries = 150,
                .keys = 130,
                .width = d,
                .value_width = d,
                .mask = causal(Align::bottom_right),
                .deterministic = false});
  // Where order costs nothing it is kept: not for wide heads and many queries, and not for keys whose
  // visitors do not follow one another.
  for (int64_t d : {64, 128}) {
    check_both({.name = "many queries, D " + std::to_string(d),
                .heads = 2,
                .queries = 1100,
                .keys = 400,
                .width = d,
                .value_width = d,
                .deterministic = false});
    check_both({.name = "stripes, D " + std::to_string(d),
                .heads = 2,
                .queries = 700,
                .keys = 600,
                .width = d,
                .value_width = d,
                .mask = Mask::from([](Query q, Key k) { return (q.token / 128 + k.token / 128) % 3 == 0; }),
                .deterministic = false});
  }
  check_both({.name = "gathers",
              .queries = 210,
              .keys = 210,
              .mask = neighborhood({.grid = {5, 6, 7}, .window = {3}, .boundary = {wrap}}),
              .deterministic = false});
}

TEST_P(CudaMma, RepeatsHaveTheSameBits) {
  for (const auto& [name, mask] :
       {std::pair<std::string, Mask>{"causal", causal()},
        {"documents", document({100, 300, 600}) & causal()},
        {"window", neighborhood({.grid = {10, 10, 10}, .window = {5}, .boundary = {wrap}})}})
    for (int64_t width : {64, 128}) {
      const Problem c{.name = name,
                      .batch = 2,
                      .heads = 8,
                      .kv_heads = 4,
                      .queries = 1000,
                      .keys = 1000,
                      .width = width,
                      .value_width = width,
                      .mask = mask};
      const Operands o = random_operands(c, bf16);
      const Results first = run(c, o, bf16, cuda, GetParam());
      for (int again = 1; again < 100; ++again) {
        const Results r = run(c, o, bf16, cuda, GetParam());
        for (const auto& [what, x, y] : {std::tuple{"out", &first.out, &r.out},
                                         {"lse", &first.lse, &r.lse},
                                         {"dq", &first.dq, &r.dq},
                                         {"dk", &first.dk, &r.dk},
                                         {"dv", &first.dv, &r.dv}})
          ASSERT_TRUE(x->to_vector<double>() == y->to_vector<double>())
              << name << " D " << width << ": " << what << " of run " << again;
      }
    }
}

TEST_P(CudaMma, ManyMatrices) {
  check_case({.name = "70000 heads",
              .batch = 350,
              .heads = 200,
              .kv_heads = 200,
              .queries = 3,
              .keys = 2,
              .width = 8,
              .value_width = 8},
             bf16);
}

// Of heads that are all the same: some of `all` have the same bits, and are near the first of `few`.
void check_alike(const Results& all, const Results& few) {
  for (const auto& [what, x, y] : {std::tuple{"out", &all.out, &few.out},
                                   {"dq", &all.dq, &few.dq},
                                   {"dk", &all.dk, &few.dk},
                                   {"dv", &all.dv, &few.dv}}) {
    const auto head = [](const Tensor& of, int64_t h) { return of.slice(1, h, h + 1).to(cpu).contiguous(); };
    const Tensor first = head(*x, 0), one = head(*y, 0);
    EXPECT_LT(distance(first, one), 1e-2 * norm(one)) << what;
    const int64_t last = x->size(1) - 1;
    for (int64_t h = last; h > 0; h -= std::max<int64_t>(1, last / 6))
      EXPECT_TRUE(head(*x, h).to_vector<double>() == first.to_vector<double>()) << what << " of matrix " << h;
  }
}

// More matrices than the cache holds are gone through in sections, of which some are of one less: every
// matrix is done, and alike where all are the same.
TEST_P(CudaMma, SectionsOfMatrices) {
  Problem c{.name = "seven of 16384",
            .heads = 7,
            .kv_heads = 7,
            .queries = 16384,
            .keys = 16384,
            .mask = sliding_window(60, 60),
            .layout = Layout::expanded,
            .with_lse = false};
  Operands o = random_operands(c, bf16);
  const Results all = run(c, o, bf16, cuda, GetParam());
  c.heads = c.kv_heads = 1;
  for (Tensor* x : {&o.q, &o.k, &o.v, &o.d_out}) *x = x->slice(1, 0, 1);
  const Results one = run(c, o, bf16, cuda, GetParam());
  check_alike(all, one);
}

// In order, turns are taken less often where there are many blocks of threads and most queries see most keys:
// the order is the same.
TEST_P(CudaMma, TurnsOfManyMatrices) {
  for (int64_t width : {64, 128})
    for (const auto& [name, mask] : {std::pair<std::string, Mask>{"full", full()},
                                     {"causal", causal()},
                                     {"documents", document({449, 151})},
                                     {"a band is left out", Mask::from([](Query q, Key k) {
                                        return k.token - q.token < 100 || k.token - q.token > 260;
                                      })}}) {
      SCOPED_TRACE(name + ", d " + std::to_string(width));
      Problem c{.name = name,
                .heads = 528,
                .kv_heads = 264,
                .queries = 600,
                .keys = 600,
                .width = width,
                .value_width = width,
                .mask = mask,
                .layout = Layout::expanded,
                .with_lse = false};
      Operands o = random_operands(c, bf16);
      const Results all = run(c, o, bf16, cuda, GetParam());
      c.heads = 2, c.kv_heads = 1;
      for (Tensor* x : {&o.q, &o.d_out}) *x = x->slice(1, 0, 2);
      for (Tensor* x : {&o.k, &o.v}) *x = x->slice(1, 0, 1);
      const Results few = run(c, o, bf16, cuda, GetParam());
      check_alike(all, few);
    }
}

TEST_P(CudaMma, NoTokens) {
  for (const auto& [queries, keys] : {std::pair<int64_t, int64_t>{0, 5}, {5, 0}, {0, 0}}) {
    Tape tape;
    const auto make = [](int64_t n) { return Variable(Tensor::full({1, 2, n, 16}, 1, f16, cuda), true); };
    const Variable q = make(queries), k = make(keys), v = make(keys);
    const auto [out, lse] = attention(q, k, v, {.backend = GetParam()});
    EXPECT_EQ(norm(out.value()), 0);
    for (double x : lse.value().to_vector<double>()) EXPECT_EQ(x, -std::numeric_limits<double>::infinity());
    tape.backward({out}, {Tensor::full(out.shape(), 1, f16, cuda)});
    for (const Variable& x : {q, k, v})
      if (x.grad().defined()) {
        EXPECT_EQ(norm(x.grad()), 0);
      }
  }
}

// One gradient alone takes other kernels than all together; the values must not change.
TEST_P(CudaMma, EachGradientAlone) {
  for (int64_t width : {64, 256}) {
    const Problem c{.name = "", .width = width, .value_width = width, .mask = causal()};
    const Operands o = random_operands(c, bf16);
    const Results all = run(c, o, bf16, cuda, GetParam());
    for (int wanted = 0; wanted < 3; ++wanted) {
      Tape tape;
      const Variable q(o.q.to(bf16).to(cuda), wanted == 0), k(o.k.to(bf16).to(cuda), wanted == 1),
          v(o.v.to(bf16).to(cuda), wanted == 2);
      const auto [out, lse] = attention(q, k, v, {.mask = c.mask, .backend = GetParam()});
      tape.backward({out, lse}, {o.d_out.to(bf16).to(cuda), o.d_lse.to(f32).to(cuda)});
      const Variable& x = wanted == 0 ? q : wanted == 1 ? k : v;
      const Tensor& expected = wanted == 0 ? all.dq : wanted == 1 ? all.dk : all.dv;
      EXPECT_EQ(x.grad().to_vector<double>(), expected.to_vector<double>()) << wanted;
    }
  }
}

}  // namespace
}  // namespace torus
