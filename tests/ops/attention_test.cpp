// The fused attention against the composed one, and against its own definition.
#include "torus/ops/attention/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ops/measure.h"
#include "torus/autograd/anomaly.h"
#include "torus/autograd/gradcheck.h"
#include "torus/autograd/tape.h"
#include "torus/core/parallel.h"
#include "torus/core/profiler.h"
#include "torus/ops/ops.h"

namespace torus {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

bool same_bits(const Tensor& a, const Tensor& b) {
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  return x == y;
}

struct Problem {
  int64_t batch = 2, heads = 4, kv_heads = 2, queries = 70, keys = 70, width = 19, value_width = 13;
  Mask mask = full();
  std::optional<double> scale = {};
  double dropout = 0;

  friend std::ostream& operator<<(std::ostream& out, const Problem& p) {
    return out << "B " << p.batch << " H " << p.heads << " Hk " << p.kv_heads << " Nq " << p.queries << " Nk "
               << p.keys << " D " << p.width << " Dv " << p.value_width << " scale " << p.scale.value_or(-0.0)
               << " dropout " << p.dropout;
  }
};

struct Operands {
  Tensor q, k, v, d_out, d_lse;
};

Operands random_operands(const Problem& p, uint64_t seed) {
  Generator g(seed);
  const auto make = [&](int64_t h, int64_t n, int64_t d) { return randn({p.batch, h, n, d}, 0, 1, f64, g); };
  Operands o;
  o.q = make(p.heads, p.queries, p.width);
  o.k = make(p.kv_heads, p.keys, p.width);
  o.v = make(p.kv_heads, p.keys, p.value_width);
  o.d_out = make(p.heads, p.queries, p.value_width);
  o.d_lse = randn({p.batch, p.heads, p.queries}, 0, 1, f64, g);
  return o;
}

struct Results {
  Tensor out, lse, dq, dk, dv;
};

Results run(const Problem& p, const Operands& o, DType dtype, Backend backend, bool with_lse = true) {
  Tape tape;
  const Variable q(o.q.to(dtype), true), k(o.k.to(dtype), true), v(o.v.to(dtype), true);
  Generator generator(5);
  const auto [out, lse] = attention(
      q, k, v,
      {.mask = p.mask, .scale = p.scale, .dropout = p.dropout, .backend = backend, .generator = &generator});
  const Results values{out.value(), lse.value(), {}, {}, {}};
  // A row without keys has lse -inf, through which no gradient is asked.
  if (out.requires_grad())
    tape.backward({out, lse}, {o.d_out.to(dtype), with_lse ? o.d_lse.to(lse.dtype()) : Tensor()});
  return {values.out, values.lse, q.grad(), k.grad(), v.grad()};
}

void expect_close(const Problem& p, const Results& a, const Results& b, const Operands& o) {
  const auto near = [&](const char* what, const Tensor& x, const Tensor& y, double floor) {
    ASSERT_EQ(x.defined(), y.defined()) << what << ": " << p;
    if (!x.defined()) return;
    EXPECT_EQ(x.shape(), y.shape()) << what;
    EXPECT_LE(distance(x, y), 1e-10 * norm(y) + floor) << what << ": " << p;
  };
  const double eps = std::numeric_limits<double>::epsilon();
  const double scale = std::abs(p.scale.value_or(1 / std::sqrt(static_cast<double>(p.width))));
  const double common = 64 * eps * norm(o.d_out) * norm(o.v) * scale;
  near("out", a.out, b.out, 0);
  near("lse", a.lse, b.lse, 0);
  near("dq", a.dq, b.dq, common * norm(o.k));
  near("dk", a.dk, b.dk, common * norm(o.q));
  near("dv", a.dv, b.dv, 64 * eps * norm(o.d_out));
}

std::vector<Problem> problems() {
  return {
      {},
      {.mask = causal()},
      {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 1, .keys = 1, .width = 1, .value_width = 1},
      {.heads = 3, .kv_heads = 1, .queries = 130, .keys = 65, .mask = causal(Align::top_left)},
      {.heads = 3,
       .kv_heads = 3,
       .queries = 130,
       .keys = 65,
       .mask = causal(Align::bottom_right)},  // empty rows
      {.queries = 33, .keys = 200, .mask = causal(Align::bottom_right)},
      {.queries = 33, .keys = 200, .mask = causal(Align::top_left)},  // keys that nobody sees
      {.queries = 1, .keys = 257, .width = 64, .value_width = 64},
      {.queries = 257, .keys = 1},
      {.queries = 256, .keys = 256, .width = 32, .value_width = 32, .mask = causal(), .dropout = 0.3},
      {.scale = -0.7},
      {.scale = 0.0},
      {.mask = causal(), .scale = 30.0},
      {.dropout = 0.5},
      {.dropout = 1.0},
      {.queries = 128, .keys = 64, .width = 130, .value_width = 1, .mask = full()},
      {.width = 1, .value_width = 100},
  };
}

TEST(Attention, FusedEqualsReferenceInDouble) {
  uint64_t seed = 1;
  for (const Problem& p : problems()) {
    const Operands o = random_operands(p, seed++);
    expect_close(p, run(p, o, f64, Backend::cpu), run(p, o, f64, Backend::reference), o);
  }
}

TEST(Attention, RandomProblems) {
  Generator g(11);
  for (int round = 0; round < 60; ++round) {
    Problem p;
    p.batch = 1 + g.below(2);
    p.kv_heads = 1 + g.below(3);
    p.heads = p.kv_heads * (1 + g.below(3));
    p.queries = 1 + g.below(150);
    p.keys = g.below(3) == 0 ? p.queries : 1 + g.below(150);
    p.width = 1 + g.below(70);
    p.value_width = 1 + g.below(70);
    const Mask masks[] = {full(), causal(Align::top_left), causal(Align::bottom_right)};
    p.mask = masks[g.below(3)];
    if (g.below(3) == 0) p.dropout = g.uniform();
    if (g.below(3) == 0) p.scale = 2 * g.uniform() - 1;
    const Operands o = random_operands(p, 100 + static_cast<uint64_t>(round));
    expect_close(p, run(p, o, f64, Backend::cpu), run(p, o, f64, Backend::reference), o);
  }
}

// The definition written out, without any code of the library behind it.
TEST(Attention, ForwardIsItsDefinition) {
  const int64_t n = 67, m = 90, d = 5, dv = 3;
  const Problem p{.batch = 1,
                  .heads = 1,
                  .kv_heads = 1,
                  .queries = n,
                  .keys = m,
                  .width = d,
                  .value_width = dv,
                  .mask = causal(Align::bottom_right)};
  const Operands o = random_operands(p, 3);
  const auto q = o.q.to_vector<double>(), k = o.k.to_vector<double>(), v = o.v.to_vector<double>();
  for (Backend backend : {Backend::cpu, Backend::reference}) {
    const Results r = run(p, o, f64, backend);
    const auto out = r.out.to_vector<double>(), lse = r.lse.to_vector<double>();
    for (int64_t i = 0; i < n; ++i) {
      double total = 0;
      std::vector<double> sum(dv, 0.0);
      for (int64_t j = 0; j <= i + m - n; ++j) {
        double dot = 0;
        for (int64_t c = 0; c < d; ++c) dot += q[i * d + c] * k[j * d + c];
        const double weight = std::exp(dot / std::sqrt(static_cast<double>(d)));
        total += weight;
        for (int64_t c = 0; c < dv; ++c) sum[c] += weight * v[j * dv + c];
      }
      EXPECT_NEAR(lse[i], std::log(total), 1e-12);
      for (int64_t c = 0; c < dv; ++c) EXPECT_NEAR(out[i * dv + c], sum[c] / total, 1e-12);
    }
  }
}

// In less than double: no worse than the composed computation in the same precision.
TEST(Attention, ErrorInLowPrecision) {
  for (DType dtype : {f32, f16, bf16}) {
    for (const Mask& mask : {full(), causal()}) {
      Problem p{.queries = 200, .keys = 200, .width = 64, .value_width = 64, .mask = mask};
      Operands o = random_operands(p, 4);
      for (Tensor* x : {&o.q, &o.k, &o.v, &o.d_out}) *x = x->to(dtype).to(f64);  // the same inputs for all
      o.d_lse = o.d_lse.to(f32).to(f64);
      const Results exact = run(p, o, f64, Backend::reference), fused = run(p, o, dtype, Backend::cpu),
                    composed = run(p, o, dtype, Backend::reference);
      const auto compare = [&](const char* what, const Tensor& x, const Tensor& y, const Tensor& z) {
        const double ours = distance(x, z) / norm(z), theirs = distance(y, z) / norm(z);
        EXPECT_LE(ours, 1.5 * theirs) << what << " in " << dtype;
      };
      compare("out", fused.out, composed.out, exact.out);
      compare("dq", fused.dq, composed.dq, exact.dq);
      compare("dk", fused.dk, composed.dk, exact.dk);
      compare("dv", fused.dv, composed.dv, exact.dv);
      EXPECT_EQ(fused.out.dtype(), dtype);
      EXPECT_EQ(fused.lse.dtype(), f32);
    }
  }
}

TEST(Attention, Gradcheck) {
  for (double dropout : {0.0, 0.4}) {
    for (const Mask& mask : {full(), causal(Align::top_left), causal(Align::bottom_right)}) {
      const Problem p{
          .batch = 1, .heads = 2, .kv_heads = 1, .queries = 6, .keys = 8, .width = 3, .value_width = 2};
      const Operands o = random_operands(p, 8);
      const auto function = [&](const std::vector<Variable>& x) {
        const auto [out, lse] =
            attention(x[0], x[1], x[2], {.mask = mask, .dropout = dropout, .backend = Backend::cpu});
        return std::vector<Variable>{out, lse};
      };
      const auto report = gradcheck(function, {o.q, o.k, o.v});
      EXPECT_TRUE(report) << report;
      EXPECT_GT(report.checked, 500);
    }
  }
  // One direction through every tile of a larger one.
  const Problem p{.batch = 1, .queries = 150, .keys = 150, .mask = causal()};
  const Operands o = random_operands(p, 9);
  const auto report = gradcheck(
      [&](const std::vector<Variable>& x) {
        const auto [out, lse] = attention(x[0], x[1], x[2], {.mask = causal()});
        return std::vector<Variable>{out, lse};
      },
      {o.q, o.k, o.v}, {.mode = GradcheckOptions::Mode::projection});
  EXPECT_TRUE(report) << report;
}

TEST(Attention, OnlyWantedGradients) {
  const Problem p{.mask = causal()};
  const Operands o = random_operands(p, 10);
  const Results all = run(p, o, f64, Backend::cpu, false);
  for (int wanted = 1; wanted < 8; ++wanted) {
    Tape tape;
    const Variable q(o.q, wanted & 1), k(o.k, wanted & 2), v(o.v, wanted & 4);
    const Variable out = attention(q, k, v, {.mask = causal()}).out;
    tape.backward({out}, {o.d_out});
    EXPECT_EQ(q.grad().defined(), bool(wanted & 1));
    if (wanted & 1) {
      EXPECT_TRUE(same_bits(q.grad(), all.dq));
    }
    if (wanted & 2) {
      EXPECT_TRUE(same_bits(k.grad(), all.dk));
    }
    if (wanted & 4) {
      EXPECT_TRUE(same_bits(v.grad(), all.dv));
    }
  }
}

TEST(Attention, GradientOfLseAlone) {
  const Problem p{.mask = causal()};
  const Operands o = random_operands(p, 12);
  const auto gradients = [&](Backend backend) {
    Tape tape;
    const Variable q(o.q, true), k(o.k, true), v(o.v, true);
    const auto result = attention(q, k, v, {.mask = causal(), .backend = backend});
    tape.backward({result.lse}, {o.d_lse});
    return std::pair(q.grad(), k.grad());
  };
  const auto fused = gradients(Backend::cpu), composed = gradients(Backend::reference);
  EXPECT_LE(distance(fused.first, composed.first), 1e-10 * norm(composed.first));
  EXPECT_LE(distance(fused.second, composed.second), 1e-10 * norm(composed.second));
}

TEST(Attention, StridedOperandsAndGradients) {
  const Problem p{.mask = causal()};
  const Operands o = random_operands(p, 13);
  // The same numbers as [B, N, H, D] in memory, as every second channel, and as an expanded batch.
  const auto heads_inside = [](const Tensor& x) { return x.transpose(1, 2).contiguous().transpose(1, 2); };
  const auto every_second = [](const Tensor& x) {
    Tensor wide = Tensor::zeros({x.size(0), x.size(1), x.size(2), 2 * x.size(3)}, x.dtype());
    Tensor view = wide.slice(3, 0, 2 * x.size(3), 2);
    view.copy_(x);
    return view;
  };
  const Results plain = run(p, o, f64, Backend::cpu);
  for (const auto& layout : {std::function<Tensor(const Tensor&)>(heads_inside), {every_second}}) {
    const Results same =
        run(p, {layout(o.q), layout(o.k), layout(o.v), layout(o.d_out), o.d_lse}, f64, Backend::cpu);
    EXPECT_TRUE(same_bits(plain.out, same.out));
    EXPECT_TRUE(same_bits(plain.dq, same.dq));
    EXPECT_TRUE(same_bits(plain.dk, same.dk));
    EXPECT_TRUE(same_bits(plain.dv, same.dv));
  }
  Operands shared = o;
  for (Tensor* x : {&shared.q, &shared.k, &shared.v, &shared.d_out, &shared.d_lse})
    *x = x->slice(0, 0, 1).expand(x->shape());
  expect_close(p, run(p, shared, f64, Backend::cpu), run(p, shared, f64, Backend::reference), shared);
  // Joining the heads of the output again is a view.
  EXPECT_TRUE(plain.out.transpose(1, 2).is_contiguous());
}

TEST(Attention, HeadsAreSplitAndJoinedAsViews) {
  const Variable x(randn({2, 5, 12}));
  const Variable heads = split_heads(x, 3), back = join_heads(heads);
  EXPECT_EQ(heads.shape(), Shape({2, 3, 5, 4}));
  EXPECT_EQ(heads.value().storage(), x.value().storage());
  EXPECT_EQ(back.value().storage(), x.value().storage());
  EXPECT_TRUE(same_bits(back.value(), x.value()));
  try {
    split_heads(x, 5);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "[split_heads] expected x [B, N, C], C a multiple of 5 heads, got [2, 5, 12]");
  }
}

TEST(Attention, EmptySizes) {
  for (const Problem& p :
       {Problem{.batch = 0}, Problem{.queries = 0}, Problem{.keys = 0}, Problem{.width = 0},
        Problem{.value_width = 0}, Problem{.heads = 0, .kv_heads = 0}}) {
    const Operands o = random_operands(p, 14);
    const Results fused = run(p, o, f64, Backend::cpu);
    EXPECT_EQ(fused.out.shape(), Shape({p.batch, p.heads, p.queries, p.value_width}));
    EXPECT_EQ(fused.dq.shape(), o.q.shape()) << p;
    for (const Tensor& x : {fused.out, fused.dq, fused.dk, fused.dv})
      for (double value : x.to_vector<double>()) ASSERT_TRUE(std::isfinite(value)) << p;
    if (p.keys == 0) {
      EXPECT_EQ(norm(fused.out), 0);
      for (double value : fused.lse.to_vector<double>()) EXPECT_EQ(value, -infinity);
    }
  }
}

// Every mask, with a bias: as the reference, gradients included.
TEST(Attention, EmptySizesUnderMasks) {
  const Mask by_batch = Mask::from([](Query q, Key) { return q.batch == 0; }, {.per_batch = true});
  for (Problem p : {Problem{.batch = 0, .queries = 12, .keys = 12}, Problem{.queries = 0, .keys = 12},
                    Problem{.queries = 12, .keys = 0}, Problem{.queries = 0, .keys = 0},
                    Problem{.heads = 0, .kv_heads = 0, .queries = 12, .keys = 12},
                    Problem{.heads = 0, .kv_heads = 2, .queries = 12, .keys = 12}}) {
    std::vector<Mask> masks{full(),
                            causal(Align::top_left),
                            !causal(Align::bottom_right),
                            sliding_window(3, 1, Align::bottom_right),
                            document({p.queries}, {p.keys}),
                            padding(std::vector<int64_t>(static_cast<size_t>(p.batch), p.keys)),
                            causal(Align::top_left) & by_batch,
                            Mask::from([](Query, Key) { return true; }) | by_batch};
    if (p.queries == p.keys) {
      masks.push_back(prefix(3));
      masks.push_back(document(Tensor::zeros({p.batch, 2}, i64)));
    }
    if (p.queries == 12 && p.keys == 12) masks.push_back(neighborhood({.grid = {3, 4}, .window = {3}}));
    for (const Mask& mask : masks) {
      p.mask = mask;
      SCOPED_TRACE(std::to_string(&mask - masks.data()));
      const Operands o = random_operands(p, 14);
      const Profiler profiler;  // which counts what the mask allows
      std::vector<std::vector<Tensor>> results;
      for (const Backend backend : {Backend::cpu, Backend::reference}) {
        Tape tape;
        const Variable q(o.q, true), k(o.k, true), v(o.v, true),
            bias(Tensor::zeros({p.queries, p.keys}, f64), true);
        const auto [out, lse] =
            attention(q, k, v, {.mask = mask, .bias = {bias}, .dropout = 0.1, .backend = backend});
        tape.backward({out, lse}, {o.d_out, o.d_lse});
        results.push_back({out.value(), lse.value(), q.grad(), k.grad(), v.grad(), bias.grad()});
      }
      for (size_t i = 0; i < results[0].size(); ++i) {
        ASSERT_TRUE(results[0][i].defined() && results[1][i].defined()) << i << ": " << p;
        EXPECT_EQ(results[0][i].shape(), results[1][i].shape()) << i << ": " << p;
        EXPECT_TRUE(same_bits(results[0][i], results[1][i])) << i << ": " << p;
      }
    }
  }
}

TEST(Attention, RowsWithoutKeysAreZero) {
  const Problem p{.queries = 100, .keys = 30, .mask = causal(Align::bottom_right)};
  const Operands o = random_operands(p, 15);
  const Results r = run(p, o, f32, Backend::cpu);
  EXPECT_EQ(norm(r.out.slice(2, 0, 70)), 0);
  EXPECT_EQ(norm(r.dq.slice(2, 0, 70)), 0);
  for (double value : r.lse.slice(2, 0, 70).to_vector<double>()) EXPECT_EQ(value, -infinity);
  for (const Tensor& x : {r.out, r.dq, r.dk, r.dv})
    for (double value : x.to_vector<double>()) ASSERT_TRUE(std::isfinite(value));
}

// All scores of a row may be -inf though keys are allowed.
TEST(Attention, ScoresOfMinusInfinity) {
  Operands o = random_operands({.queries = 40, .keys = 40, .width = 1, .value_width = 2}, 16);
  o.q.fill_(1);
  o.k.fill_(-infinity);
  for (Backend backend : {Backend::cpu, Backend::reference}) {
    const auto [out, lse] =
        attention(Variable(o.q), Variable(o.k), Variable(o.v), {.scale = 1, .backend = backend});
    EXPECT_EQ(norm(out.value()), 0);
    for (double value : lse.value().to_vector<double>()) EXPECT_EQ(value, -infinity);
  }
}

TEST(Attention, NanInMaskedKeysIsHarmless) {
  // Top left: nobody sees keys from 75 on, of which some share a tile with keys that are seen.
  const Problem p{.queries = 75, .keys = 200, .mask = causal(Align::top_left)};
  const Operands clean = random_operands(p, 17);
  for (double poison : {std::nan(""), infinity}) {
    Operands o = clean;
    o.k = o.k.clone(), o.v = o.v.clone();
    o.k.slice(2, 75, 200).fill_(poison);
    o.v.slice(2, 75, 200).fill_(poison);
    const Results a = run(p, clean, f64, Backend::cpu), b = run(p, o, f64, Backend::cpu);
    EXPECT_TRUE(same_bits(a.lse, b.lse));
    EXPECT_LE(distance(a.out, b.out), 1e-14 * norm(a.out));
    EXPECT_LE(distance(a.dq, b.dq), 1e-14 * norm(a.dq));
    EXPECT_LE(distance(a.dk, b.dk), 1e-14 * norm(a.dk));
    EXPECT_LE(distance(a.dv, b.dv), 1e-14 * norm(a.dv));
  }
}

TEST(Attention, NanInSeenKeysIsSeen) {
  const Problem p{.queries = 75, .keys = 75, .mask = causal()};
  Operands o = random_operands(p, 18);
  o.v.select(2, 10).fill_(std::nan(""));
  const Tensor out = run(p, o, f64, Backend::cpu).out;
  for (int64_t i = 0; i < 75; ++i)
    EXPECT_EQ(std::isnan(out.select(0, 0).select(0, 0).select(0, i).select(0, 0).item()), i >= 10) << i;
}

TEST(Attention, SameBitsForAnyThreadsAndRuns) {
  const int before = num_threads();
  for (const Problem& p :
       {Problem{.batch = 1, .heads = 1, .kv_heads = 1, .queries = 700, .keys = 700, .mask = causal()},
        Problem{.queries = 300, .keys = 300, .dropout = 0.2}}) {
    const Operands o = random_operands(p, 19);
    set_num_threads(1);
    const Results one = run(p, o, f32, Backend::cpu);
    for (int threads : {1, 2, 3, 8}) {
      set_num_threads(threads);
      const Results many = run(p, o, f32, Backend::cpu);
      EXPECT_TRUE(same_bits(one.out, many.out) && same_bits(one.lse, many.lse)) << threads;
      EXPECT_TRUE(same_bits(one.dq, many.dq)) << threads;
      EXPECT_TRUE(same_bits(one.dk, many.dk) && same_bits(one.dv, many.dv)) << threads;
    }
  }
  set_num_threads(before);
}

TEST(Attention, DropoutKeepsTheExpectedShare) {
  const int64_t n = 256;
  Tensor v = Tensor::zeros({1, 1, n, n});
  for (int64_t i = 0; i < n; ++i) v.mutable_data<float>()[i * n + i] = 1;  // out holds the weights themselves
  const Variable q(Tensor::zeros({1, 1, n, 4})), k(Tensor::zeros({1, 1, n, 4}));
  Generator g(1);
  const auto weights = [&] {
    return attention(q, k, Variable(v), {.dropout = 0.25, .generator = &g}).out.value().to_vector<float>();
  };
  const auto first = weights(), second = weights();
  EXPECT_NE(first, second);  // the generator moves on
  int64_t kept = 0;
  for (float w : first) {
    EXPECT_TRUE(w == 0 || std::abs(w - 1 / 0.75f / n) < 1e-6f);
    kept += w != 0;
  }
  EXPECT_NEAR(static_cast<double>(kept) / (n * n), 0.75, 0.01);
}

TEST(Attention, NeverHoldsAllScores) {
  const int64_t n = 16384, d = 16, bytes = n * d * 4;
  const Variable q(randn({1, 1, n, d}), true), k(randn({1, 1, n, d}), true), v(randn({1, 1, n, d}), true);
  const int64_t resident = status_kilobytes("VmRSS:");
  reset_peak_memory();
  const int64_t before = memory_stats().live_bytes;
  {
    Tape tape;
    const auto [out, lse] = attention(q, k, v, {.mask = causal()});
    EXPECT_LE(memory_stats().peak_bytes - before, bytes + n * 4 + 4096);
    tape.backward({out}, {Tensor::full(out.shape(), 1)});
  }
  // out, lse, delta, the gradient of out, and three gradients.
  EXPECT_LE(memory_stats().peak_bytes - before, 5 * bytes + 2 * n * 4 + 4096);
  EXPECT_LE(status_kilobytes("VmHWM:") - resident, 400 * 1024) << "N x N scores would be 1 GiB";
}

// Rows without keys have lse -inf by definition: no anomaly. Both passes show in a profile, with their
// operations.
TEST(Attention, IsProfiledAndPassesAnomalyMode) {
  const Problem p{.queries = 100, .keys = 30, .mask = causal(Align::bottom_right)};
  const Operands o = random_operands(p, 20);
  const AnomalyMode anomaly;
  Profiler profiler;
  for (Backend backend : {Backend::cpu, Backend::reference}) run(p, o, f64, backend, false);
  profiler.stop();
  double forward = 0, backward = 0;
  for (const ProfileEvent& event : profiler.events()) {
    if (std::string(event.name) == "attention.forward") forward += event.flops;
    if (std::string(event.name) == "attention.backward") backward += event.flops;
  }
  const double pairs = 30 * 31 / 2 * p.batch * p.heads;
  EXPECT_EQ(forward, 2 * pairs * (p.width + p.value_width));
  EXPECT_EQ(backward, 2 * pairs * (3 * p.width + 2 * p.value_width));
}

TEST(Attention, RefusesWhatDoesNotFit) {
  const auto x = [](const Shape& shape, DType dtype = f32) { return Variable(Tensor::zeros(shape, dtype)); };
  const auto message = [&](const Variable& q, const Variable& k, const Variable& v,
                           const AttentionOptions& options = {}) {
    try {
      attention(q, k, v, options);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(message(x({2, 3, 4}), x({1, 2, 3, 4}), x({1, 2, 3, 4})),
            "[attention] q must be [B, H, N, D], got [2, 3, 4]");
  EXPECT_EQ(message(x({1, 3, 5, 4}), x({1, 2, 5, 4}), x({1, 2, 5, 4})),
            "[attention] the heads of q must be a multiple of those of k, got 3 and 2");
  EXPECT_EQ(message(x({1, 2, 5, 4}), x({1, 2, 5, 3}), x({1, 2, 5, 4})),
            "[attention] q and k must have one width, got [1, 2, 5, 4] and [1, 2, 5, 3]");
  EXPECT_EQ(message(x({1, 2, 5, 4}), x({1, 2, 5, 4}, f64), x({1, 2, 5, 4})),
            "[attention] q, k and v must share a floating dtype, got f32, f64 and f32");
  EXPECT_EQ(message(x({1, 2, 5, 4}), x({1, 2, 6, 4}), x({1, 2, 6, 4}), {.mask = causal()}),
            "[causal] 5 queries and 6 keys need an alignment: Align::top_left or "
            "Align::bottom_right");
  EXPECT_EQ(message(x({1, 2, 5, 4}), x({1, 2, 5, 4}), x({1, 2, 5, 4}), {.dropout = 1.5}),
            "[attention] dropout must be in [0, 1], got 1.5");
  // Any number that the scores can hold.
  for (DType dtype : {f32, f16, bf16}) {
    const Variable small = x({1, 2, 5, 4}, dtype);
    EXPECT_EQ(message(small, small, small, {.scale = 1e300}),
              "[attention] scale must be finite in f32, got 1e+300");
    for (double softcap : {1e300, 1e-300})
      EXPECT_NE(message(small, small, small, {.softcap = softcap})
                    .find("[attention] softcap must be 0 or a positive number of f32, got 1e"),
                std::string::npos);
  }
  const Variable wide = x({1, 2, 5, 4}, f64);
  EXPECT_EQ(message(wide, wide, wide, {.scale = 1e300, .softcap = 1e-300}), "no error");
  EXPECT_EQ(message(wide, wide, wide, {.scale = infinity}),
            "[attention] scale must be finite in f64, got inf");
  const BackendScope only{Backend::reference};
  EXPECT_EQ(message(x({1, 2, 5, 4}), x({1, 2, 5, 4}), x({1, 2, 5, 4})), "no error");
}

}  // namespace
}  // namespace torus
