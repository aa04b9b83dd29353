#include "torus/layers/optim.h"

#include <gtest/gtest.h>

#include <numbers>

#include "core/expect_error.h"
#include "layers/compare.h"
#include "torus/core/parallel.h"

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
  EXPECT_ERROR(AdamW({{"half", Parameter(Tensor::zeros({2}, bf16))}}), DType,
               "expected f32 or f64, got bf16 for half");
  a.mutable_grad() = Tensor::zeros({4}, f64);
  EXPECT_ERROR(optimizer.step(), Shape, "[adamw] the gradient of a must be f64 [2, 2], got f64 [4]");
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

}  // namespace
}  // namespace torus
