#include "torus/layers/optim.h"

#include <gtest/gtest.h>

#include <memory>
#include <numbers>

#include "core/expect_error.h"
#include "layers/compare.h"
#include "torus/core/hdf5.h"
#include "torus/core/parallel.h"
#include "torus/core/profiler.h"

namespace torus {
namespace {

// AdamW by its formula, one parameter element in double.
struct PlainAdamW {
  double p, m = 0, v = 0;
  int t = 0;

  void step(double g, double lr, double decay, double beta1, double beta2, double eps) {
    ++t;
    p -= lr * decay * p;
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
    p -= lr * (m / (1 - std::pow(beta1, t))) / (std::sqrt(v / (1 - std::pow(beta2, t))) + eps);
  }
};

TEST(AdamW, FollowsItsFormula) {
  Generator generator(1);
  const std::vector<Shape> shapes = {{}, {1}, {5}, {3, 4}, {2, 0}, {2, 3, 2}};
  std::vector<NamedParameter> parameters;
  std::vector<std::vector<PlainAdamW>> plain;
  for (const Shape& shape : shapes) {
    parameters.push_back({std::to_string(plain.size()), Parameter(randn(shape, 0, 1, f64, generator))});
    auto& elements = plain.emplace_back();
    for (double value : parameters.back().parameter.value().to_vector<double>()) elements.push_back({value});
  }
  // A parameter and a gradient that are not row-major.
  parameters[3].parameter.mutable_value() =
      parameters[3].parameter.value().transpose(0, 1).contiguous().transpose(0, 1);
  AdamW optimizer(parameters, {.beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.3});
  for (int step = 0; step < 7; ++step) {
    const double lr = 0.1 / (step + 1);
    optimizer.set_lr(lr);
    for (size_t i = 0; i < shapes.size(); ++i) {
      Parameter& parameter = parameters[i].parameter;
      parameter.zero_grad();
      if (i == 2 && step % 2 == 1) continue;  // no gradient: it stays, and its steps do not count on
      Tensor grad = randn(shapes[i], 0, 1, f64, generator);
      if (i == 3) grad = grad.transpose(0, 1).contiguous().transpose(0, 1);
      parameter.mutable_grad() = grad;
      const auto values = grad.to_vector<double>();
      for (size_t e = 0; e < values.size(); ++e)
        plain[i][e].step(values[e], lr, shapes[i].dim() >= 2 ? 0.3 : 0, 0.8, 0.95, 1e-3);
    }
    optimizer.step();
  }
  for (size_t i = 0; i < shapes.size(); ++i) {
    std::vector<double> expected;
    for (const PlainAdamW& element : plain[i]) expected.push_back(element.p);
    EXPECT_LT(relative_error(parameters[i].parameter.value().to_vector<double>(), expected), 1e-13)
        << shapes[i];
  }
  EXPECT_EQ(optimizer.states()[2].steps, 4);
  EXPECT_EQ(optimizer.states()[3].steps, 7);
  optimizer.zero_grad();
  EXPECT_FALSE(parameters[0].parameter.grad().defined());
}

TEST(AdamW, FloatIsCloseToDoubleAndEqualForAnyThreadCount) {
  const int threads = num_threads();
  std::vector<std::vector<float>> results;
  std::vector<double> exact;
  for (int run = 0; run < 3; ++run) {
    set_num_threads(run + 1);
    Generator generator(2);
    const DType dtype = run == 2 ? f64 : f32;
    Parameter p(randn({300, 211}, 0, 1, f32, generator).to(dtype).clone());
    AdamW optimizer({{"p", p}}, {.lr = 0.01});
    for (int step = 0; step < 5; ++step) {
      p.mutable_grad() = randn(p.shape(), 0, 1, f32, generator).to(dtype);
      optimizer.step();
    }
    if (run == 2)
      exact = p.value().to_vector<double>();
    else
      results.push_back(p.value().to_vector<float>());
  }
  set_num_threads(threads);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_LT(relative_error({results[0].begin(), results[0].end()}, exact), 1e-6);
}

TEST(AdamW, CustomDecayAndErrors) {
  Parameter a(Tensor::full({2, 2}, 1, f64)), b(Tensor::full({2}, 1, f64));
  AdamW optimizer(
      {{"a", a}, {"b", b}},
      {.lr = 0.5, .weight_decay = 0.5, .decays = [](const NamedParameter& p) { return p.name == "b"; }});
  a.mutable_grad() = Tensor::zeros({2, 2}, f64);
  b.mutable_grad() = Tensor::zeros({2}, f64);
  optimizer.step();
  EXPECT_EQ(a.value().to_vector<double>(), std::vector<double>(4, 1));
  EXPECT_EQ(b.value().to_vector<double>(), std::vector<double>(2, 0.75));
  a.mutable_grad() = Tensor::zeros({4}, f64);
  EXPECT_ERROR(optimizer.step(), Shape, "[adamw] the gradient of a must be f64 [2, 2], got f64 [4]");
}

// ------------------------------------------------- against PyTorch and the published formulas in NumPy
// golden_optim.h5 comes from make_golden.py, with the shapes and settings here.

std::vector<NamedParameter> golden_parameters(DType dtype) {
  return {{"w.weight", Parameter(Tensor::zeros({6, 4}, dtype))},
          {"u.weight", Parameter(Tensor::zeros({3, 5}, dtype))},
          {"head.weight", Parameter(Tensor::zeros({4, 2}, dtype))},
          {"b", Parameter(Tensor::zeros({5}, dtype))}};
}

std::unique_ptr<Optimizer> golden_optimizer(const std::string& name, std::vector<NamedParameter> parameters) {
  if (name == "adamw")
    return std::make_unique<AdamW>(parameters, AdamWOptions{.beta2 = 0.95, .weight_decay = 0.1});
  if (name == "lion") return std::make_unique<Lion>(parameters);
  if (name == "muon") return std::make_unique<Muon>(parameters, MuonOptions{.weight_decay = 0.1});
  return std::make_unique<SGD>(parameters, SGDOptions{.momentum = name == "sgd" ? 0 : 0.9,
                                                      .nesterov = name == "sgd_nesterov",
                                                      .weight_decay = 0.1});
}

class GoldenOptimizers : public testing::TestWithParam<std::string> {};

TEST_P(GoldenOptimizers, FollowTheirTrajectories) {
  const auto file = Hdf5File::open(TORUS_SOURCE_DIR "/tests/layers/golden_optim.h5");
  for (const auto& [dtype, tolerance] : {std::pair{f64, 1e-13}, std::pair{f32, 1e-5}}) {
    auto parameters = golden_parameters(dtype);
    // Views that are not row-major take the same steps.
    parameters[0].parameter = Parameter(Tensor::zeros({4, 6}, dtype).transpose(0, 1));
    const auto cut = [&](const Tensor& flat, const auto& use) {
      int64_t at = 0;
      for (auto& [name, parameter] : parameters) {
        use(parameter, flat.slice(0, at, at + parameter.numel()).reshape(parameter.shape()).to(dtype));
        at += parameter.numel();
      }
      EXPECT_EQ(at, flat.numel());
    };
    cut(file.read("initial"), [](Parameter& p, const Tensor& value) { p.mutable_value().copy_(value); });
    const auto optimizer = golden_optimizer(GetParam(), parameters);
    const Tensor grads = file.read("gradients");
    const auto rates = file.read("rates").to_vector<double>();
    for (size_t step = 0; step < rates.size(); ++step) {
      cut(grads.select(0, static_cast<int64_t>(step)),
          [](Parameter& p, const Tensor& value) { p.mutable_grad() = value; });
      optimizer->set_lr(rates[step]);
      optimizer->step();
    }
    std::vector<double> got;
    for (const auto& [name, parameter] : parameters)
      for (double value : parameter.value().to_vector<double>()) got.push_back(value);
    EXPECT_LT(relative_error(got, file.read(GetParam()).to_vector<double>()), tolerance) << dtype;
    EXPECT_GT(relative_error(got, file.read("initial").to_vector<double>()), 0.01);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenOptimizers,
                         testing::Values("sgd", "sgd_momentum", "sgd_nesterov", "adamw", "lion", "muon"));

TEST(Schedules, MatchPyTorch) {
  const auto file = Hdf5File::open(TORUS_SOURCE_DIR "/tests/layers/golden_optim.h5");
  const auto expect = [&](const std::string& name, const std::function<double(int64_t)>& rate) {
    const auto expected = file.read("schedules/" + name).to_vector<double>();
    ASSERT_GT(expected.size(), 20u);
    for (size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(rate(static_cast<int64_t>(i)), expected[i], 1e-14) << name << " " << i;
  };
  expect("constant", [](int64_t step) { return warmup_constant(step, 5, 0.3); });
  expect("linear", [](int64_t step) { return warmup_linear(step, 5, 20, 0.3, 0.03); });
  expect("cosine", [](int64_t step) { return warmup_cosine(step, 5, 20, 0.3, 0.03); });
  expect("stable_decay", [](int64_t step) { return warmup_stable_decay(step, 5, 4, 20, 0.3, 0.03); });
}

TEST(Schedules, WithoutOneOfTheirParts) {
  EXPECT_EQ(warmup_constant(0, 0, 2), 2);
  EXPECT_EQ(warmup_linear(0, 0, 0, 2, 1), 1);
  EXPECT_EQ(warmup_linear(0, 0, 2, 2, 1), 2);
  EXPECT_EQ(warmup_stable_decay(9, 0, 0, 10, 2, 1), 2);
  EXPECT_EQ(warmup_stable_decay(10, 0, 0, 10, 2, 1), 1);
  EXPECT_EQ(warmup_stable_decay(5, 0, 10, 10, 2, 1), 1.5);
  EXPECT_ERROR(warmup_stable_decay(0, 5, 6, 10, 2), Value,
               "expected warmup + decay <= total, got 5 + 6 > 10");
}

TEST(Optimizer, GroupsScaleRateAndDecay) {
  Parameter a(Tensor::full({2, 2}, 1, f64)), b(Tensor::full({2, 2}, 1, f64)), c(Tensor::full({2}, 1, f64));
  const auto named = [](const char* name) {
    return [=](const NamedParameter& entry) { return entry.name == name; };
  };
  // The second group of b is not reached; c does not decay whatever its group says.
  SGD optimizer({{"a", a}, {"b", b}, {"c", c}},
                {.lr = 0.5,
                 .weight_decay = 0.2,
                 .groups = {{named("b"), 0.1, 3},
                            {[](const NamedParameter& entry) { return entry.name != "a"; }, 2, 100}}});
  for (Parameter* p : {&a, &b, &c}) p->mutable_grad() = Tensor::full(p->shape(), 1, f64);
  optimizer.step();
  EXPECT_NEAR(a.value().to_vector<double>()[3], 1 - 0.5 * (1 + 0.2), 1e-15);
  EXPECT_NEAR(b.value().to_vector<double>()[3], 1 - 0.05 * (1 + 0.6), 1e-15);
  EXPECT_NEAR(c.value().to_vector<double>()[1], 1 - 1.0, 1e-15);
  optimizer.set_lr(0);
  optimizer.step();
  EXPECT_NEAR(b.value().to_vector<double>()[0], 1 - 0.05 * (1 + 0.6), 1e-15);
  EXPECT_EQ(optimizer.lr(), 0);
}

TEST(Optimizer, KeepsOnlyTheStateThatItNeeds) {
  const auto kinds = [](const Optimizer& optimizer) {
    std::vector<int> result;
    for (const auto& state : optimizer.states())
      result.push_back(state.first.defined() + state.second.defined());
    return result;
  };
  for (const auto& [name, expected] : {std::pair<std::string, std::vector<int>>{"sgd", {0, 0, 0, 0}},
                                       {"sgd_momentum", {1, 1, 1, 1}},
                                       {"lion", {1, 1, 1, 1}},
                                       {"adamw", {2, 2, 2, 2}},
                                       {"muon", {1, 1, 2, 2}}})
    EXPECT_EQ(kinds(*golden_optimizer(name, golden_parameters(f32))), expected) << name;
  EXPECT_ERROR(SGD({}, {.nesterov = true}), Value, "[sgd] nesterov needs momentum, got 0");
  EXPECT_ERROR(Muon(golden_parameters(f32), {.orthogonalizes = [](const NamedParameter&) { return true; }}),
               Shape, "[muon] b has shape [5]; only matrices can be orthogonalised");
}

TEST(Optimizer, StepsAreProfiledWithTheirBytes) {
  std::vector<NamedParameter> parameters{{"a", Parameter(randn({4, 5}))}, {"b", Parameter(randn({6}))}};
  for (auto& [name, parameter] : parameters) parameter.mutable_grad() = randn(parameter.shape());
  AdamW optimizer(parameters, {});
  Profiler profiler;
  clip_grad_norm({parameters[0].parameter, parameters[1].parameter}, 1);
  optimizer.step();
  const ProfileSummary summary = profiler.summary();
  EXPECT_EQ(summary.row("adamw.step").bytes, 4 * 4 * 26);  // value, gradient, two moments
  EXPECT_GE(summary.row("grad_norm").bytes, 4 * 26);
  EXPECT_GE(summary.row("clip_grad_norm").bytes, 4 * 26);
}

TEST(Lion, TakesNoStepWithoutDirectionAndKeepsNaN) {
  Parameter p(Tensor::from<float>({1, 1, 1, 1}));
  p.mutable_grad() = Tensor::from<float>({0, 1e-30F, -1e30F, NAN});
  Lion({{"p", p}}, {.lr = 0.5}).step();
  const auto values = p.value().to_vector<double>();
  EXPECT_EQ((std::vector<double>{values[0], values[1], values[2]}), (std::vector<double>{1, 0.5, 1.5}));
  EXPECT_TRUE(std::isnan(values[3]));
}

TEST(Muon, OrthogonalizesAnyMatrix) {
  Generator generator(9);
  for (const Shape& shape : {Shape{40, 7}, Shape{7, 40}, Shape{16, 16}, Shape{1, 5}}) {
    const Tensor x = orthogonalized(randn(shape, 0, 3, f64, generator));
    ASSERT_EQ(x.shape(), shape);
    // All singular values near 1, so the root of the mean of their squares is, and no row is long.
    const double squares = sum(Variable(x) * Variable(x)).item();
    const double mean = std::sqrt(squares / static_cast<double>(std::min(shape[0], shape[1])));
    EXPECT_GT(mean, 0.65) << shape;
    EXPECT_LT(mean, 1.25) << shape;
    const Variable product = matmul(Variable(x), transpose(Variable(x), 0, 1));
    EXPECT_LT(max(max(abs(product), 0), 0).item(), 1.5) << shape;
  }
  EXPECT_EQ(orthogonalized(Tensor::zeros({3, 4})).to_vector<double>(), std::vector<double>(12, 0));
}

TEST(Optimizer, EveryOneLowersAQuadratic) {
  for (const char* name : {"sgd", "sgd_momentum", "sgd_nesterov", "adamw", "lion", "muon"}) {
    Generator generator(10);
    auto parameters = golden_parameters(f32);
    for (auto& [label, parameter] : parameters)
      parameter.mutable_value() = randn(parameter.shape(), 0, 1, f32, generator);
    const auto optimizer = golden_optimizer(name, parameters);
    optimizer->set_lr(0.02);
    const auto loss = [&] {
      Variable total(Tensor::scalar(0));
      for (const auto& [label, parameter] : parameters) total = total + sum(parameter * parameter);
      return total;
    };
    const double before = loss().item();
    for (int step = 0; step < 30; ++step) {
      Tape tape;
      tape.backward(loss());
      optimizer->step();
      optimizer->zero_grad();
    }
    EXPECT_LT(loss().item(), before * 0.8) << name;
  }
}

TEST(ClipGradNorm, ScalesAllByOneFactor) {
  Generator generator(3);
  std::vector<Parameter> parameters;
  for (const Shape& shape : {Shape{70, 90}, Shape{5}, Shape{}, Shape{3}}) {
    parameters.emplace_back(Tensor::zeros(shape, f64));
    parameters.back().mutable_grad() = randn(shape, 0, 1, f64, generator);
  }
  parameters[0].mutable_grad() = randn({90, 70}, 0, 1, f64, generator).transpose(0, 1);
  parameters[3].zero_grad();
  double squares = 0;
  std::vector<std::vector<double>> before;
  for (size_t i = 0; i < 3; ++i) {
    before.push_back(parameters[i].grad().to_vector<double>());
    for (double g : before.back()) squares += g * g;
  }
  const double norm = std::sqrt(squares);
  EXPECT_NEAR(clip_grad_norm(parameters, norm * 2), norm, 1e-9);
  EXPECT_EQ(parameters[0].grad().to_vector<double>(), before[0]);
  EXPECT_NEAR(clip_grad_norm(parameters, norm / 4), norm, 1e-9);
  for (size_t i = 0; i < 3; ++i) {
    auto expected = before[i];
    for (double& g : expected) g /= 4;
    EXPECT_LT(relative_error(parameters[i].grad().to_vector<double>(), expected), 1e-13);
  }
  EXPECT_NEAR(clip_grad_norm(parameters, 1e9), norm / 4, 1e-9);
  EXPECT_FALSE(parameters[3].grad().defined());
  EXPECT_ERROR(clip_grad_norm(parameters, 0), Value, "max_norm must be positive, got 0");
}

TEST(ClipGradNorm, LeavesWhatIsNotFinite) {
  Parameter p(Tensor::zeros({3}));
  p.mutable_grad() = Tensor::from<float>({1, INFINITY, 2});
  EXPECT_EQ(clip_grad_norm({p}, 1), INFINITY);
  EXPECT_EQ(p.grad().to_vector<double>(), (std::vector<double>{1, INFINITY, 2}));
  p.mutable_grad() = Tensor::from<float>({1, NAN, 2});
  EXPECT_TRUE(std::isnan(clip_grad_norm({p}, 1)));
  EXPECT_EQ(p.grad().to_vector<double>()[2], 2);
}

TEST(Optimizer, ClipsAndSkipsByTheNorm) {
  for (const char* name : {"sgd", "sgd_momentum", "sgd_nesterov", "adamw", "lion", "muon"}) {
    Generator generator(11);
    auto clipped = golden_parameters(f64), stepped = golden_parameters(f64);
    const auto by_hand = golden_optimizer(name, clipped), at_once = golden_optimizer(name, stepped);
    const auto list = [](const std::vector<NamedParameter>& named) {
      std::vector<Parameter> result;
      for (const auto& [label, parameter] : named) result.push_back(parameter);
      return result;
    };
    for (int step = 0; step < 4; ++step) {
      for (size_t i = 0; i < clipped.size(); ++i) {
        const Tensor grad = randn(clipped[i].parameter.shape(), 0, 1, f64, generator);
        clipped[i].parameter.mutable_grad() = (Variable(grad) * 0.25).value();
        stepped[i].parameter.mutable_grad() = grad;
      }
      const double norm = clip_grad_norm(list(clipped), 0.5);
      by_hand->step();
      const Tensor full = grad_norm(list(stepped));
      EXPECT_EQ(full.dtype(), f64);
      EXPECT_NEAR(full.item() / 4, norm, 1e-13);
      at_once->step({.grad_norm = full, .max_norm = 0.5, .grad_scale = 0.25});
      // Nothing that is not finite is stepped or counted.
      stepped[1].parameter.mutable_grad() = Tensor::full({3, 5}, step % 2 ? INFINITY : NAN, f64);
      at_once->step({.grad_norm = grad_norm(list(stepped)), .max_norm = 0.5});
    }
    for (size_t i = 0; i < clipped.size(); ++i) {
      EXPECT_LT(relative_error(stepped[i].parameter.value(), clipped[i].parameter.value()), 1e-13) << name;
      EXPECT_EQ(at_once->states()[i].steps, by_hand->states()[i].steps);
    }
    EXPECT_ERROR(at_once->step({.max_norm = 1}), Value, "max_norm needs grad_norm");
    EXPECT_ERROR(at_once->step({.grad_scale = 0}), Value, "must be positive, got inf and 0");
    EXPECT_ERROR(at_once->step({.grad_norm = Tensor::scalar(1)}), Value, "expected grad_norm as of");
  }
  EXPECT_EQ(grad_norm({}).item(), 0);
}

// What a 16-bit weight of 1 would lose: changes of less than its rounding.
TEST(Optimizer, KeepsMastersOf16Bits) {
  for (DType dtype : {bf16, f16}) {
    Parameter p(Tensor::full({3}, 1, dtype)), q(Tensor::full({3}, 1, f32));
    SGD optimizer({{"p", p}, {"q", q}}, {.lr = 1});
    for (int i = 0; i < 64; ++i) {
      p.mutable_grad() = Tensor::full({3}, 1, dtype);
      q.mutable_grad() = Tensor::full({3}, 1);
      optimizer.step({.grad_scale = 1.0 / 8192});
    }
    EXPECT_EQ(p.value().to_vector<double>(), std::vector<double>(3, 1 - 64.0 / 8192)) << dtype;
    EXPECT_EQ(p.dtype(), dtype);
    EXPECT_EQ(optimizer.states()[0].master.dtype(), f32);
    EXPECT_FALSE(optimizer.states()[1].master.defined());
    // A parameter that someone else has set is where it goes on from.
    p.mutable_value().fill_(2);
    optimizer.step();
    EXPECT_EQ(p.value().to_vector<double>(), std::vector<double>(3, 1)) << dtype;
    p.mutable_value() = Tensor::full({3}, 4, dtype);
    optimizer.step();
    EXPECT_EQ(optimizer.states()[0].master.to_vector<double>(), std::vector<double>(3, 3)) << dtype;
  }
}

TEST(Optimizer, ParametersAndGradientsOfOneDtype) {
  Parameter p(Tensor::zeros({2}, bf16));
  AdamW optimizer({{"p", p}});
  p.mutable_grad() = Tensor::zeros({2});
  EXPECT_ERROR(optimizer.step(), Shape, "[adamw] the gradient of p must be bf16 [2], got f32 [2]");
}

TEST(WarmupCosine, RisesThenFalls) {
  EXPECT_DOUBLE_EQ(warmup_cosine(0, 3, 11, 4), 1);
  EXPECT_DOUBLE_EQ(warmup_cosine(2, 3, 11, 4), 3);
  EXPECT_DOUBLE_EQ(warmup_cosine(3, 3, 11, 4), 4);
  EXPECT_DOUBLE_EQ(warmup_cosine(7, 3, 11, 4, 1), 2.5);
  EXPECT_DOUBLE_EQ(warmup_cosine(5, 3, 11, 4), 2 * (1 + std::cos(std::numbers::pi / 4)));
  EXPECT_DOUBLE_EQ(warmup_cosine(11, 3, 11, 4, 1), 1);
  EXPECT_DOUBLE_EQ(warmup_cosine(1000, 3, 11, 4, 1), 1);
  EXPECT_DOUBLE_EQ(warmup_cosine(0, 0, 2, 4), 4);
  EXPECT_DOUBLE_EQ(warmup_cosine(0, 0, 0, 4), 0);
  for (int64_t step = 3; step < 11; ++step)
    EXPECT_GT(warmup_cosine(step, 3, 11, 4), warmup_cosine(step + 1, 3, 11, 4));
}

// What would only show as NaN, or as a checkpoint that cannot be restored, is refused at once.
TEST(Optimizers, RefuseSettingsAndParametersThatCannotBe) {
  const Parameter p(Tensor::full({2}, 1)), q(Tensor::full({2}, 1));
  const std::vector<NamedParameter> one = {{"p", p}};
  EXPECT_ERROR(AdamW(one, {.lr = -1}), Value, "[adamw] expected 0 <= lr < inf, got -1");
  EXPECT_ERROR(AdamW(one, {.lr = NAN}), Value, "[adamw] expected 0 <= lr < inf, got nan");
  EXPECT_ERROR(AdamW(one, {.beta1 = 1}), Value, "[adamw] expected 0 <= beta1 < 1, got 1");
  EXPECT_ERROR(AdamW(one, {.beta2 = 2}), Value, "[adamw] expected 0 <= beta2 < 1, got 2");
  EXPECT_ERROR(AdamW(one, {.eps = -1}), Value, "[adamw] expected 0 <= eps < inf, got -1");
  EXPECT_ERROR(AdamW(one, {.weight_decay = -1}), Value, "[adamw] expected 0 <= weight_decay < inf, got -1");
  const auto all = [](const NamedParameter&) { return true; };
  EXPECT_ERROR(AdamW(one, {.groups = {{.contains = all, .lr_scale = -1}}}), Value, "0 <= lr_scale");
  EXPECT_ERROR(AdamW(one, {.groups = {{.contains = all, .decay_scale = INFINITY}}}), Value,
               "0 <= decay_scale < inf, got inf");
  EXPECT_ERROR(SGD(one, {.momentum = -1}), Value, "[sgd] expected 0 <= momentum < 1, got -1");
  EXPECT_ERROR(SGD(one, {.momentum = 1}), Value, "[sgd] expected 0 <= momentum < 1, got 1");
  EXPECT_ERROR(Lion(one, {.beta2 = 1}), Value, "[lion] expected 0 <= beta2 < 1, got 1");
  EXPECT_ERROR(Muon(one, {.momentum = 1}), Value, "[muon] expected 0 <= momentum < 1, got 1");
  EXPECT_ERROR(Muon(one, {.adam_lr_scale = -1}), Value, "[muon] expected 0 <= adam_lr_scale < inf, got -1");
  EXPECT_ERROR(Muon(one, {.adam_beta1 = 1}), Value, "[muon] expected 0 <= adam_beta1 < 1, got 1");
  SGD optimizer(one);
  EXPECT_ERROR(optimizer.set_lr(-1), Value, "[sgd] expected 0 <= lr < inf, got -1");
  optimizer.set_lr(0);

  EXPECT_ERROR(SGD({{"a", p}, {"b", p}}), Value, "[sgd] expected each parameter once, got one as a and as b");
  EXPECT_ERROR(SGD({{"a", p}, {"a", q}}), Value, "[sgd] expected a name a parameter, got two a");
  EXPECT_ERROR(SGD({{"a", p}, {"b", Parameter()}}), Value,
               "[sgd] expected defined parameters, got b undefined");
  EXPECT_ERROR(SGD({{"a/b", p}}), Value, "[sgd] expected names without '/', not empty, got \"a/b\"");
}

}  // namespace
}  // namespace torus
