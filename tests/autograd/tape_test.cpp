#include "torus/autograd/tape.h"

#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <sstream>
#include <thread>

#include "autograd/test_ops.h"
#include "core/expect_error.h"
#include "torus/core/profiler.h"

namespace torus {
namespace {

using namespace torus::test;

std::vector<double> values(const Tensor& tensor) { return tensor.to_vector<double>(); }

Variable leaf(std::initializer_list<double> numbers) { return Variable(Tensor::from(numbers), true); }

TEST(Tape, Diamonds) {
  const Variable x = leaf({2, -3}), y = leaf({5, 7});
  Tape tape;
  const Variable square = mul(x, x);                            // x twice in one node
  const Variable z = add(add(square, square), mul(square, y));  // 2 x^2 + x^2 y
  tape.backward(sum(z));
  EXPECT_EQ(values(x.grad()), (std::vector<double>{2 * 2 * (2 + 5), 2 * -3 * (2 + 7)}));
  EXPECT_EQ(values(y.grad()), (std::vector<double>{4, 9}));
}

TEST(Tape, SixtyDiamondsAreSixtyNodes) {
  const Variable x = leaf({1});
  Tape tape;
  Variable y = x;
  for (int i = 0; i < 60; ++i) y = add(y, y);
  EXPECT_EQ(tape.live_nodes(), 60);
  tape.backward(y);
  EXPECT_EQ(x.grad().item(), std::pow(2., 60));
}

// Every way to broadcast against [2, 3, 4]: each axis stretched or not, leading axes there or not.
TEST(Tape, UndoesBroadcastOnEveryAxis) {
  const Tensor full = randn({2, 3, 4}, 0, 1, f64), seed = randn({2, 3, 4}, 0, 1, f64);
  for (int leading = 0; leading <= 3; ++leading)
    for (int stretched = 0; stretched < 8; ++stretched)
      for (bool swapped : {false, true}) {
        Shape shape;
        for (int axis = leading; axis < 3; ++axis)
          shape.push_back(stretched >> axis & 1 ? 1 : full.size(axis));
        const Variable a(full, true), b(randn(shape, 0, 1, f64), true);
        Tape tape;
        tape.backward(swapped ? mul(b, a) : mul(a, b), {.seed = seed});
        EXPECT_EQ(a.grad().shape(), full.shape());
        EXPECT_EQ(b.grad().shape(), shape);
        std::vector<double> expected(static_cast<size_t>(shape.numel()), 0.);
        const std::vector<double> x = values(full), s = values(seed),
                                  places = values(
                                      Tensor::arange(shape.numel(), f64).reshape(shape).expand({2, 3, 4}));
        for (size_t i = 0; i < x.size(); ++i) expected[static_cast<size_t>(places[i])] += x[i] * s[i];
        for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(values(b.grad())[i], expected[i], 1e-13);
        EXPECT_EQ(values(a.grad()), values(times(seed, b.value())));
      }
}

TEST(Tape, ChainOf100000Nodes) {
  constexpr int length = 100000;
  for (bool walked : {true, false}) {
    const int64_t before = memory_stats().live_blocks;
    {
      const Variable x = leaf({1}), zero(Tensor::scalar(0, f64));
      Tape tape;
      Variable y = x;
      for (int i = 0; i < length; ++i) y = add(y, zero);
      EXPECT_EQ(tape.live_nodes(), length);
      if (walked) {
        tape.backward(y);
        EXPECT_EQ(x.grad().item(), 1);
        EXPECT_EQ(tape.live_nodes(), 0);
      }
    }
    EXPECT_EQ(memory_stats().live_blocks, before);
  }
}

TEST(Tape, SecondBackwardNamesTheOp) {
  const Variable x = leaf({3});
  Tape tape;
  const Variable loss = mul(x, x);
  tape.backward(loss, {.keep_graph = true});
  EXPECT_EQ(tape.live_nodes(), 1);
  tape.backward(loss);
  EXPECT_EQ(x.grad().item(), 12);  // added up
  EXPECT_EQ(tape.live_nodes(), 0);
  EXPECT_ERROR(tape.backward(loss), Value,
               "[mul] what backward needs was freed by an earlier backward; call backward(loss, {.keep_graph "
               "= true})");
  EXPECT_EQ(x.grad().item(), 12);
}

TEST(Tape, GradientsOutliveTheTapeAndAddUp) {
  Parameter weight(Tensor::from({2.}));
  const Parameter tied = weight;
  for (int step = 1; step <= 3; ++step) {
    Tape tape;
    tape.backward(mul(weight, tied));
    EXPECT_EQ(weight.grad().item(), 4 * step);
  }
  EXPECT_EQ(tied.grad().item(), 12);
  weight.zero_grad();
  EXPECT_FALSE(tied.grad().defined());
}

// A gradient that flows to several places is the memory of each.
TEST(Tape, GradientsShareNoMemory) {
  const Variable x = leaf({1, 2}), y = leaf({3, 4});
  const Tensor seed = Tensor::from({10., 20.});
  {
    Tape tape;
    tape.backward(add(x, y), {.seed = seed});
  }
  EXPECT_NE(x.grad().storage(), y.grad().storage());
  EXPECT_NE(x.grad().storage(), seed.storage());
  {
    Tape tape;
    const Variable z = add(x, x);
    tape.backward({z, z}, {seed, seed});
  }
  EXPECT_EQ(values(seed), (std::vector<double>{10, 20}));
  EXPECT_EQ(values(y.grad()), (std::vector<double>{10, 20}));
  EXPECT_EQ(values(x.grad()), (std::vector<double>{50, 100}));
}

TEST(Tape, WritesToSavedTensorsAreCaught) {
  Variable x(Tensor::from({1., 2., 3.}), true), y = leaf({4, 5, 6});
  Tape tape;
  const Variable loss = sum(mul(x, y));
  const uint64_t version = x.value().version();
  Tensor view = x.value().slice(0, 1, 2);  // any view counts
  view.fill_(9);
  EXPECT_ERROR(tape.backward(loss), Version,
               "[mul] a tensor [3] that backward needs was written to after it was saved: expected version " +
                   std::to_string(version) + ", got " + std::to_string(version + 1));
  // Reading counts for nothing, nor does a write to what no one saved.
  Tape second;
  const Variable other = mul(x, y), shown = add(other, other);
  x.value().data<double>();
  Tensor sum_value = shown.value();
  sum_value.fill_(0);
  second.backward(sum(shown));
  EXPECT_EQ(values(y.grad()), (std::vector<double>{2, 18, 6}));
}

TEST(Tape, ADeadTapesVariablesThrow) {
  const Variable x = leaf({2});
  std::optional<Variable> y;
  {
    Tape tape;
    y = mul(x, x);
  }
  EXPECT_EQ(y->item(), 4);
  EXPECT_ERROR(mul(*y, x), Value, "[mul] an input was recorded on a tape that is gone");
  EXPECT_ERROR(y->grad(), Value, "only leaves keep a gradient");
  Tape tape;
  EXPECT_ERROR(mul(*y, x), Value, "detach()");
  EXPECT_ERROR(tape.backward(*y), Value, "another tape");
  EXPECT_ERROR(recompute([](const Variable& v) { return v; }, *y), Value, "[recompute]");
  const Variable z = mul(y->detach(), x);
  tape.backward(z);
  EXPECT_EQ(x.grad().item(), 4);
}

TEST(Tape, TapesAreOfTheirThread) {
  const Variable x = leaf({2});
  Tape tape;
  const Variable y = mul(x, x);
  std::thread other([&] {
    EXPECT_EQ(Tape::current(), nullptr);
    EXPECT_ERROR(mul(y, y), Value, "lives on another thread");
    const Variable mine = leaf({3});
    Tape inner;
    inner.backward(mul(mine, mine));
    EXPECT_EQ(mine.grad().item(), 6);
  });
  other.join();
  tape.backward(y);
  EXPECT_EQ(x.grad().item(), 4);
  // Many threads, each with its own model.
  std::vector<std::thread> threads;
  std::vector<double> grads(4);
  for (size_t t = 0; t < grads.size(); ++t)
    threads.emplace_back([&, t] {
      const Variable w = leaf({static_cast<double>(t)});
      for (int step = 0; step < 200; ++step) {
        Tape own;
        own.backward(sum(mul(w, w)));
      }
      grads[t] = w.grad().item();
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(grads, (std::vector<double>{0, 400, 800, 1200}));
}

TEST(Tape, RecordsOnlyWhatWantsAGradient) {
  const Variable x = leaf({2}), constant(Tensor::from({3.}));
  EXPECT_FALSE(mul(x, x).requires_grad());  // no tape
  EXPECT_FALSE(recording("op", {x}));
  Tape tape;
  EXPECT_TRUE(recording("op", {constant, x}));
  EXPECT_FALSE(recording("op", {constant}));
  EXPECT_FALSE(mul(constant, constant).requires_grad());
  EXPECT_EQ(tape.live_nodes(), 0);
  {
    const NoGrad no_grad;
    EXPECT_EQ(Tape::current(), nullptr);
    EXPECT_FALSE(mul(x, x).requires_grad());
    Tape inner;  // records all the same
    EXPECT_TRUE(mul(x, x).requires_grad());
    EXPECT_EQ(inner.live_nodes(), 1);
  }
  EXPECT_EQ(Tape::current(), &tape);
  EXPECT_EQ(tape.live_nodes(), 0);
  const Variable y = mul(x, constant);
  EXPECT_TRUE(y.requires_grad());
  EXPECT_FALSE(y.detach().requires_grad());
  tape.backward(y);
  EXPECT_EQ(x.grad().item(), 3);
  EXPECT_FALSE(constant.grad().defined());
  // An input that is not given.
  const Variable z = record("optional", {x, Variable()}, x.value().clone(), [](const OutputGrads& grads) {
    EXPECT_FALSE(grads.wants(1));
    return std::vector<Tensor>{grads[0], Tensor()};
  });
  tape.backward(z);
  EXPECT_EQ(x.grad().item(), 4);
  EXPECT_ERROR(Variable(Tensor::from({1}), true), DType, "only floating tensors have gradients");
}

TEST(Tape, AnInnerTapeTakesOuterValuesAsLeaves) {
  const Variable x = leaf({3});
  Tape outer;
  const Variable y = mul(x, x);
  {
    Tape inner;
    const Variable z = mul(y, y);
    inner.backward(z);
    EXPECT_EQ(y.grad().item(), 18);
    EXPECT_FALSE(x.grad().defined());
    EXPECT_EQ(inner.live_nodes(), 0);
    EXPECT_ERROR(outer.backward(z), Value, "another tape");
  }
  EXPECT_EQ(outer.live_nodes(), 1);
  outer.backward(mul(y, y));
  EXPECT_EQ(x.grad().item(), 2 * 9 * 2 * 3);
  // Scopes that end in another order than they began.
  auto first = std::make_unique<Tape>();
  auto second = std::make_unique<Tape>();
  auto third = std::make_unique<NoGrad>();
  first.reset();
  EXPECT_EQ(Tape::current(), nullptr);
  third.reset();
  EXPECT_EQ(Tape::current(), second.get());
  second.reset();
  EXPECT_EQ(Tape::current(), &outer);
}

TEST(Tape, NodesOfSeveralOutputs) {
  for (const auto& [first, second, expected] :
       {std::tuple{true, true, 1. + 2 * 5}, {true, false, 1.}, {false, true, 2. * 5}}) {
    const Variable x = leaf({5});
    Tape tape;
    const auto outputs = powers(x);
    Variable loss = first ? outputs[0] : outputs[1];
    if (first && second) loss = add(outputs[0], outputs[1]);
    tape.backward(loss);
    EXPECT_EQ(x.grad().item(), expected);
  }
  // An output of integers wants no gradient.
  const Variable x = leaf({5});
  Tape tape;
  const Tensor both[] = {x.value().clone(), Tensor::from({1})};
  const auto outputs = record("pair", std::span(&x, 1), both,
                              [](const OutputGrads& grads) -> std::vector<Tensor> { return {grads[0]}; });
  EXPECT_TRUE(outputs[0].requires_grad());
  EXPECT_FALSE(outputs[1].requires_grad());
}

TEST(Tape, BackwardOfSeveralLossesAndLeaves) {
  const Variable x = leaf({2, 3});
  Tape tape;
  const Variable y = mul(x, x), z = add(y, x);
  tape.backward({z, y, x, y},
                {Tensor::from({1., 0.}), Tensor::from({10., 10.}), Tensor::from({0.5, 0.5}), Tensor()});
  EXPECT_EQ(values(x.grad()), (std::vector<double>{4 + 1 + 40 + 0.5, 60 + 0.5}));
  EXPECT_ERROR(tape.backward(x), Shape, "must have one element unless a seed is given, got shape [2]");
  EXPECT_ERROR(tape.backward(y, {.seed = Tensor::zeros({3}, f64)}), Shape,
               "the seed must be f64 [2], got f64 [3]");
  EXPECT_ERROR(tape.backward(y, {.seed = Tensor::zeros({2})}), Shape, "got f32 [2]");
  EXPECT_ERROR(tape.backward({x, y}, {Tensor()}), Value, "got 2 outputs and 1 seeds");
  EXPECT_ERROR(tape.backward(Variable()), Value, "the loss is undefined");
  EXPECT_ERROR(tape.backward(Variable(Tensor::scalar(1))), Value, "depends on nothing that wants a gradient");
}

TEST(Tape, WrongBackwardsAreNamed) {
  const Variable x = leaf({2, 3});
  const Tensor seed = Tensor::from({1., 1.});
  Tape tape;
  const Variable few = record("few", {x, x}, x.value().clone(),
                              [](const OutputGrads& grads) { return std::vector<Tensor>{grads[0]}; });
  EXPECT_ERROR(tape.backward(few, {.seed = seed}), Value, "[few] backward returned 1 gradients for 2 inputs");
  const Variable narrow = record("narrow", {x}, x.value().clone(), [](const OutputGrads& grads) {
    return std::vector<Tensor>{grads[0].to(f32)};
  });
  EXPECT_ERROR(tape.backward(narrow, {.seed = seed}), DType,
               "[narrow] backward returned f32 for input 0 of f64");
  const Variable other = record("other", {x}, x.value().clone(), [](const OutputGrads&) {
    return std::vector<Tensor>{Tensor::zeros({3}, f64)};
  });
  EXPECT_ERROR(tape.backward(other, {.seed = seed}), Shape, "[sum_to]");
  const Variable zero = record("zero", {x}, x.value().clone(),
                               [](const OutputGrads&) { return std::vector<Tensor>{Tensor()}; });
  tape.backward(zero, {.seed = seed});  // an undefined gradient is zero
  EXPECT_FALSE(x.grad().defined());
}

TEST(Tape, BackwardRecordsNothing) {
  const Variable x = leaf({2});
  Tape tape;
  const Variable y =
      record("op", {x}, x.value().clone(), [x](const OutputGrads& grads) -> std::vector<Tensor> {
        EXPECT_EQ(Tape::current(), nullptr);
        EXPECT_FALSE(mul(x, x).requires_grad());
        return {grads[0]};
      });
  tape.backward(y);
  EXPECT_EQ(tape.live_nodes(), 0);
  EXPECT_EQ(Tape::current(), &tape);
}

TEST(Tape, FreesWhatNodesSavedAsTheWalkPasses) {
  const Variable x = leaf({1});
  Tape tape;
  const int64_t before = memory_stats().live_bytes;
  int64_t seen = -1;
  Variable y = record("probe", {x}, x.value().clone(), [&](const OutputGrads& grads) -> std::vector<Tensor> {
    seen = memory_stats().live_bytes - before;
    return {grads[0]};
  });
  for (int i = 0; i < 10; ++i)
    y = record("hoard", {y}, y.value().clone(),
               [hoard = Tensor::zeros({1000})](const OutputGrads& grads) -> std::vector<Tensor> {
                 return {grads[0]};
               });
  EXPECT_GE(memory_stats().live_bytes - before, 40000);
  tape.backward(y);
  EXPECT_GE(seen, 0);
  EXPECT_LT(seen, 4000);
}

TEST(Tape, StepsLeaveNothingBehind) {
  Parameter weight(randn({20, 30}, 0, 1, f32)), bias(Tensor::zeros({30}));
  const Variable x(randn({20, 30}));
  MemoryStats after_first;
  for (int step = 0; step < 200; ++step) {
    {
      Tape tape;
      Variable y = relu(add(mul(x, weight), bias));
      y = recompute([&](const Variable& v) { return mul(v, weight); }, y);
      tape.backward(sum(mul(y, y)));
      EXPECT_EQ(tape.live_nodes(), 0);
    }
    if (step == 0) after_first = memory_stats();
    EXPECT_EQ(memory_stats().live_bytes, after_first.live_bytes);
    EXPECT_EQ(memory_stats().live_blocks, after_first.live_blocks);
  }
}

TEST(Tape, SummaryCountsNodesAndWhatTheySave) {
  const Variable x(randn({100}, 0, 1, f64), true), y(randn({100}, 0, 1, f64), true);
  Tape tape;
  EXPECT_EQ(tape.summary().nodes, 0);
  const Variable z = mul(x, y), w = mul(z, x);                    // x is saved twice
  const Variable part = mul(x, Variable(randn({1}, 0, 1, f64)));  // keeps x, which is there, and 8 bytes
  const Variable both = add(w, part), first = sum(both), loss = add(first, sum(powers(w)[1]));
  const auto check_rows = [](const TapeSummary& summary, const std::vector<TapeSummary::Row>& expected) {
    ASSERT_EQ(summary.rows.size(), expected.size());
    TapeSummary::Row total{"total", 0, 0};
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(summary.rows[i].op, expected[i].op);
      EXPECT_EQ(summary.rows[i].nodes, expected[i].nodes);
      EXPECT_EQ(summary.rows[i].bytes, expected[i].bytes);
      total.nodes += expected[i].nodes, total.bytes += expected[i].bytes;
    }
    EXPECT_EQ(summary.nodes, total.nodes);
    EXPECT_EQ(summary.bytes, total.bytes);
  };
  check_rows(tape.summary(), {{"mul", 3, 3 * 800 + 8}, {"powers", 1, 800}, {"add", 2, 0}, {"sum", 2, 0}});
  EXPECT_EQ(tape.summary().nodes, tape.live_nodes());
  std::ostringstream text;
  text << tape.summary();
  EXPECT_EQ(text.str(),
            "op         nodes     saved bytes\n"
            "mul            3            2408\n"
            "powers         1             800\n"
            "add            2               0\n"
            "sum            2               0\n"
            "total          8            3208\n");
  tape.backward(part, {.seed = Tensor::zeros({100}, f64)});
  check_rows(tape.summary(), {{"mul", 2, 3 * 800}, {"powers", 1, 800}, {"add", 2, 0}, {"sum", 2, 0}});
  const Variable y2 = recompute([](const Variable& v) { return mul(v, mul(v, v)); }, y);
  EXPECT_EQ(tape.summary().nodes, 8);
  EXPECT_EQ(tape.summary().bytes, 4 * 800);  // recompute keeps y alone
  tape.backward({y2}, {y2.value()});
  EXPECT_THROW(tape.backward(loss), Error);  // part is gone
}

// Counting does not touch what is counted.
TEST(Tape, SummaryLeavesTheTapeAsItWas) {
  const Variable x = leaf({2});
  const int64_t before = memory_stats().live_blocks;
  {
    Tape tape;
    const Variable y = mul(x, x);
    const int64_t blocks = memory_stats().live_blocks;
    EXPECT_EQ(tape.summary().bytes, 8);
    EXPECT_EQ(memory_stats().live_blocks, blocks);
    tape.backward(y);
    EXPECT_EQ(tape.summary().rows.size(), 0u);
    EXPECT_EQ(tape.recorded_nodes(), 1);
  }
  EXPECT_EQ(x.grad().item(), 4);
  Variable(x).zero_grad();
  EXPECT_EQ(memory_stats().live_blocks, before);
}

TEST(Tape, BackwardIsProfiled) {
  const Variable x(randn({3, 4}, 0, 1, f64), true);
  Profiler profiler;
  {
    Tape tape;
    const Variable y = mul(x, x);
    tape.backward(sum(add(y, recompute([](const Variable& v) { return mul(v, v); }, y))));
  }
  const ProfileSummary summary = profiler.summary();
  EXPECT_EQ(summary.row("mul", ScopeKind::backward).calls, 2);
  EXPECT_EQ(summary.row("recompute", ScopeKind::backward).calls, 1);
  EXPECT_EQ(summary.row("sum", ScopeKind::backward).calls, 1);
  EXPECT_EQ(summary.row("backward", ScopeKind::user).calls, 2);  // one inside recompute
  for (const ProfileEvent& event : profiler.events())
    if (event.kind == ScopeKind::backward) {
      EXPECT_EQ(event.shapes, event.name == "sum" ? "f64 []" : "f64 [3, 4]");
    }
  // The kernels that add up gradients run inside.
  EXPECT_GT(summary.row("add_into").bytes, 0);
  EXPECT_GE(summary.row("backward", ScopeKind::user).bytes, summary.row("add_into").bytes);
}

// --------------------------------------------------------------------------------------------- recompute

// Multiplies by random draws, as dropout does.
Variable noise(const Variable& x, Generator& generator = default_generator()) {
  return mul(x, Variable(rand(x.shape(), 0, 1, x.dtype(), generator)));
}

TEST(Recompute, SameGradientsSameRandomBits) {
  const Tensor input = randn({3, 4}, 0, 1, f64), weights = randn({4}, 0, 1, f64);
  std::vector<std::vector<double>> results[2];
  Generator::State after[2];
  for (bool again : {false, true}) {
    const Variable x(input, true);
    const Parameter weight(weights);
    manual_seed(5);
    Tape tape;
    const auto block = [&](const Variable& v) { return noise(mul(noise(v), add(weight, v))); };
    Variable y = noise(x);
    y = again ? recompute(block, y) : block(y);
    y = again ? recompute(block, y) : block(y);
    y = noise(y);
    after[again] = default_generator().state();
    tape.backward(sum(y));
    EXPECT_EQ(default_generator().state(), after[again]);  // backward leaves the generator where it was
    results[again] = {values(y.value()), values(x.grad()), values(weight.grad())};
  }
  EXPECT_EQ(after[0], after[1]);
  EXPECT_EQ(results[0], results[1]);
}

TEST(Recompute, Nests) {
  const Tensor input = randn({5}, 0, 1, f64);
  std::vector<double> grads[2];
  for (bool again : {false, true}) {
    const Variable x(input, true);
    Generator generator(3);
    Tape tape;
    const auto inner = [&](const std::vector<Variable>& v) {
      return std::vector<Variable>{noise(mul(v[0], v[0]), generator)};
    };
    const auto outer = [&](const std::vector<Variable>& v) {
      const Variable y = noise(v[0], generator);
      return again ? recompute_list(inner, {y}) : inner({y});
    };
    tape.backward(sum(again ? recompute_list(outer, {x})[0] : outer({x})[0]));
    grads[again] = values(x.grad());
  }
  EXPECT_EQ(grads[0], grads[1]);
}

// Whichever generators are drawn from: the default one, others, one that the function makes.
TEST(Recompute, EveryGeneratorRepeats) {
  const Tensor input = randn({50}, 0, 1, f64);
  Generator::State first[2];
  std::vector<double> grads[2];
  for (bool again : {false, true}) {
    const Variable x(input, true);
    Generator a(3), b(4);
    rand({7}, 0, 1, f64, b);
    manual_seed(5);
    const auto block = [&](const Variable& v) {
      Generator own(6);
      return noise(noise(noise(noise(noise(v, b)), a), own), b);
    };
    Tape tape;
    const Variable y = again ? recompute(block, x) : block(x);
    noise(x, b);
    b = Generator(8);  // neither draws nor a new seed in between matter, and both are kept
    manual_seed(9);
    const Generator::State before[] = {a.state(), b.state(), default_generator().state()};
    tape.backward(sum(y));
    EXPECT_EQ(a.state(), before[0]);
    EXPECT_EQ(b.state(), before[1]);
    EXPECT_EQ(default_generator().state(), before[2]);
    grads[again] = values(x.grad());
    first[again] = before[0];
  }
  EXPECT_EQ(grads[0], grads[1]);
  EXPECT_EQ(first[0], first[1]);
}

TEST(Recompute, ParametersInsideGetGradients) {
  const Parameter weight(Tensor::from({3.}));
  const Variable constant(Tensor::from({2.}));
  Tape tape;
  const Variable y = recompute([&](const Variable& v) { return mul(v, mul(weight, weight)); }, constant);
  EXPECT_EQ(tape.live_nodes(), 1);
  tape.backward(y);
  EXPECT_EQ(weight.grad().item(), 12);
  EXPECT_FALSE(constant.grad().defined());
  // Without a tape it is a plain call.
  const NoGrad no_grad;
  EXPECT_FALSE(recompute([&](const Variable& v) { return mul(v, weight); }, constant).requires_grad());
}

TEST(Recompute, KeepsOnlyItsInputs) {
  const Variable x(randn({1000}, 0, 1, f64), true);
  const auto block = [](const Variable& v) {
    Variable y = v;
    for (int i = 0; i < 20; ++i) y = mul(y, y);
    return y;
  };
  int64_t held[2];
  for (bool again : {false, true}) {
    Tape tape;
    const int64_t before = memory_stats().live_bytes;
    const Variable y = again ? recompute(block, x) : block(x);
    held[again] = memory_stats().live_bytes - before;
  }
  EXPECT_EQ(held[true], 8000);
  EXPECT_GE(held[false], 20 * 8000);
}

TEST(Recompute, Errors) {
  const Variable x = leaf({2});
  {
    Tape tape;
    const Variable captured = mul(x, x);
    const Variable y = recompute([&](const Variable& v) { return mul(v, captured); }, x);
    EXPECT_ERROR(tape.backward(y), Value, "[mul] inside recompute, a value of the outer tape was captured");
  }
  {
    Tape tape;
    const Variable y = recompute([](const Variable& v) { return mul(v, v); }, x);
    Tensor value = x.value();
    value.fill_(3);
    EXPECT_ERROR(tape.backward(y), Version, "[recompute] a tensor [1] that backward needs was written to");
  }
  {  // a failure the second time leaves tape and generator as they were
    Tape tape;
    int calls = 0;
    const Variable y = recompute(
        [&](const Variable& v) {
          const Variable result = noise(v);
          check(++calls < 2, Error::Kind::Value, "second call");
          return result;
        },
        x);
    rand({1});
    const Generator::State before = default_generator().state();
    EXPECT_ERROR(tape.backward(y), Value, "second call");
    EXPECT_EQ(Tape::current(), &tape);
    EXPECT_EQ(default_generator().state(), before);
  }
}

// What differs the second time is said, never a wrong gradient.
TEST(Recompute, ASecondRunThatDiffersIsCaught) {
  const Variable x = leaf({2, 5});
  using Values = std::vector<Variable>;
  const auto error_of = [&](const auto& first, const auto& second, Error::Kind kind,
                            const std::string& text) {
    int calls = 0;
    Tape tape;
    const Values y =
        recompute_list([&](const Values& v) { return calls++ ? second(v[0]) : first(v[0]); }, {x});
    std::vector<Tensor> seeds;
    for (const Variable& output : y) seeds.push_back(Tensor::full(output.shape(), 1, f64));
    try {
      tape.backward(y, seeds);
      ADD_FAILURE() << "expected: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.what(), text);
      EXPECT_EQ(error.kind(), kind);
    }
  };
  const auto one = [](const Variable& v) { return Values{mul(v, v)}; };
  const auto two = [](const Variable& v) { return Values{mul(v, v), v}; };
  const auto none = [](const Variable&) { return Values(); };
  const auto total = [](const Variable& v) { return Values{sum(v)}; };
  const auto narrow = [](const Variable& v) { return Values{Variable(v.value().to(f32))}; };
  const auto undefined = [](const Variable&) { return Values{Variable()}; };
  const auto random = [](const Variable& v) { return Values{noise(v)}; };
  const auto twice = [](const Variable& v) { return Values{noise(noise(v))}; };
  const auto shape = Error::Kind::Shape, value = Error::Kind::Value;
  error_of(one, two, value, "[recompute] expected as many outputs as in forward, 1, got 2 the second time");
  error_of(two, one, value, "[recompute] expected as many outputs as in forward, 2, got 1 the second time");
  error_of(two, none, value, "[recompute] expected as many outputs as in forward, 2, got 0 the second time");
  error_of(one, total, shape,
           "[recompute] expected output 0 to be f64 [2] as in forward, got f64 [] the second time");
  error_of(one, narrow, shape,
           "[recompute] expected output 0 to be f64 [2] as in forward, got f32 [2] the second time");
  error_of(one, undefined, value,
           "[recompute] expected output 0 as in forward, got an undefined one the second time");
  const std::string draws =
      "[recompute] expected the random draws of forward, got others the second time; was a module set to "
      "train or not in between?";
  error_of(random, one, value, draws);
  error_of(one, random, value, draws);
  error_of(random, twice, value, draws);
  Tape tape;
  EXPECT_ERROR(recompute([](const Variable&) { return Variable(); }, x), Value,
               "[recompute] expected defined outputs, got output 0 undefined");
}

// Leaves that the function uses without being given them, as a module does its parameters.
TEST(Recompute, LeavesWrittenInBetweenAreCaught) {
  const Variable x = leaf({2, 5});
  Parameter p(Tensor::from({3., 4.}));
  const auto block = [&](const Variable& v) { return mul(v, mul(v, p)); };
  {
    Tape tape;
    const Variable y = sum(recompute(block, x));
    p.mutable_value().fill_(100);
    EXPECT_ERROR(tape.backward(y), Version, "[recompute] a tensor [2] that backward needs was written to");
  }
  {
    Tape tape;
    const Variable y = sum(recompute(block, x));
    p.mutable_value() = p.value().clone();
    EXPECT_ERROR(tape.backward(y), Version,
                 "[recompute] expected a leaf [2] as it was in forward, got another [2] in its place");
  }
  Tape tape;  // nested, where only the inner function uses it
  const Variable y = sum(recompute([&](const Variable& v) { return recompute(block, v); }, x));
  p.mutable_value().fill_(7);
  EXPECT_ERROR(tape.backward(y), Version, "was written to");
}

TEST(Recompute, InputsMayBeUndefined) {
  const Variable x = leaf({2, 5});
  Tape tape;
  const auto block = [](const Variable& v, const Variable& optional) {
    return optional.defined() ? mul(v, optional) : mul(v, v);
  };
  tape.backward(sum(recompute(block, x, Variable())));
  EXPECT_EQ(values(x.grad()), (std::vector<double>{4, 10}));
}

}  // namespace
}  // namespace torus
