#include "torus/autograd/gradcheck.h"

#include <gtest/gtest.h>

#include <limits>
#include <sstream>

#include "autograd/test_ops.h"
#include "core/expect_error.h"

namespace torus {
namespace {

using namespace torus::test;
using Mode = GradcheckOptions::Mode;
using List = std::vector<Variable>;

const Mode modes[] = {Mode::full, Mode::projection};

TEST(Gradcheck, Passes) {
  const auto function = [](const List& in) {
    const auto both = powers(mul(in[0], in[1]));
    return List{sum(mul(both[0], both[1])), add(in[1], both[1])};
  };
  const std::vector<Tensor> inputs = {randn({2, 3}, 0, 1, f64), randn({3}, 0, 1, f64)};
  const auto full = gradcheck(function, inputs);
  EXPECT_TRUE(full) << full;
  EXPECT_EQ(full.checked, (1 + 6) * (6 + 3));
  EXPECT_EQ(full.skipped, 0);
  const auto projected = gradcheck(function, inputs, {.mode = Mode::projection});
  EXPECT_TRUE(projected) << projected;
  EXPECT_EQ(projected.checked, 1);
  // Strided and empty inputs, size 1.
  for (Mode mode : modes) {
    EXPECT_TRUE(gradcheck(function,
                          {randn({3, 2}, 0, 1, f64).transpose(0, 1), randn({6}, 0, 1, f64).slice(0, 0, 6, 2)},
                          {.mode = mode}));
    EXPECT_TRUE(gradcheck(function, {randn({2, 1}, 0, 1, f64), Tensor::scalar(2, f64)}, {.mode = mode}));
    EXPECT_TRUE(gradcheck(function, {Tensor::zeros({0, 3}, f64), randn({3}, 0, 1, f64)}, {.mode = mode}));
  }
}

TEST(Gradcheck, FailsOnPlantedErrors) {
  for (Mode mode : modes)
    for (double planted : {1.01, 0.99, -1., 0.})
      for (uint64_t seed : {0, 1, 2}) {
        const auto report =
            gradcheck([=](const List& in) { return List{mul(in[0], in[1], planted)}; },
                      {randn({4, 5}, 0, 1, f64), randn({4, 5}, 0, 1, f64)}, {.mode = mode, .seed = seed});
        EXPECT_FALSE(report) << report;
      }
}

// One wrong element of many: the full mode names it, the projection sees it.
TEST(Gradcheck, FindsOneWrongElement) {
  const Tensor input = randn({6, 7}, 0, 1, f64);
  const auto function = [](const List& in) {
    return List{record("mostly", std::span(&in[0], 1), times(in[0].value(), in[0].value()),
                       [x = Saved(in[0].value())](const OutputGrads& grads) -> std::vector<Tensor> {
                         Tensor result = times(grads[0], times(x.get(), Tensor::scalar(2, f64)));
                         result.mutable_data<double>()[17] *= 1.5;
                         return {result};
                       })};
  };
  const auto report = gradcheck(function, {input});
  EXPECT_FALSE(report);
  EXPECT_EQ(report.input, 0);
  EXPECT_EQ(report.input_index, 17);
  EXPECT_EQ(report.output, 0);
  EXPECT_EQ(report.output_index, 17);
  EXPECT_NEAR(report.numeric, 2 * input.to_vector<double>()[17], 1e-6);
  EXPECT_NEAR(report.analytic, 3 * input.to_vector<double>()[17], 1e-6);
  std::ostringstream text;
  text << report;
  EXPECT_NE(text.str().find("FAILED"), std::string::npos);
  EXPECT_NE(text.str().find("d output 0[17] / d input 0[17]"), std::string::npos) << text.str();
  EXPECT_NE(text.str().find("{.mode = full, .eps = 1e-06, .tolerance = 1e-05, .seed = 0}"), std::string::npos)
      << text.str();
  EXPECT_FALSE(gradcheck(function, {input}, {.mode = Mode::projection}));
}

TEST(Gradcheck, FailsWithoutInputsOrOutputs) {
  const auto nothing = [](const List&) { return List(); };
  const auto itself = [](const List& in) { return in; };
  for (Mode mode : modes) {
    EXPECT_FALSE(gradcheck(nothing, {randn({3}, 0, 1, f64)}, {.mode = mode}));
    EXPECT_FALSE(gradcheck(itself, {}, {.mode = mode}));
    EXPECT_TRUE(gradcheck(itself, {Tensor::zeros({0, 2}, f64)}, {.mode = mode}));
  }
}

TEST(Gradcheck, FindsGradientsThatAreMisplacedOrNaN) {
  const Tensor input = randn({3, 3}, 0, 1, f64);
  const auto with_backward = [&](auto backward) {
    return [=](const List& in) {
      return List{
          record("op", std::span(&in[0], 1), in[0].value().clone(),
                 [=](const OutputGrads& grads) -> std::vector<Tensor> { return {backward(grads[0])}; })};
    };
  };
  for (Mode mode : modes) {
    EXPECT_TRUE(gradcheck(with_backward([](const Tensor& g) { return g; }), {input}, {.mode = mode}));
    EXPECT_FALSE(
        gradcheck(with_backward([](const Tensor& g) { return g.transpose(0, 1); }), {input}, {.mode = mode}));
    EXPECT_FALSE(gradcheck(with_backward([](const Tensor&) { return Tensor(); }), {input}, {.mode = mode}));
    EXPECT_FALSE(gradcheck(with_backward([](const Tensor& g) { return Tensor::full(g.shape(), NAN, f64); }),
                           {input}, {.mode = mode}));
  }
}

TEST(Gradcheck, RefusesLessThanDouble) {
  const auto same = [](const List& in) { return List{sum(in[0])}; };
  for (Mode mode : modes) {
    EXPECT_ERROR(gradcheck(same, {randn({2})}, {.mode = mode}), DType,
                 "[gradcheck] input 0 must be f64, got f32");
    EXPECT_ERROR(gradcheck([](const List& in) { return List{Variable(in[0].value().to(f32))}; },
                           {randn({2}, 0, 1, f64)}, {.mode = mode}),
                 DType, "the function must stay in f64, got an output of f32");
  }
}

TEST(Gradcheck, SkipsDeclaredKinks) {
  const Tensor input = Tensor::from({-1., 1e-8, 2., 0., -1e-8});
  const auto report = gradcheck([](const List& in) { return List{relu(in[0])}; }, {input});
  EXPECT_TRUE(report) << report;
  EXPECT_EQ(report.skipped, 3 * 5);  // the columns of the three inputs whose step crosses zero
  EXPECT_EQ(report.checked, 2 * 5);
  EXPECT_FALSE(gradcheck([](const List& in) { return List{relu(in[0], false)}; }, {input}));
  // Every direction crosses a kink here; a shorter step does not help.
  EXPECT_ERROR(gradcheck([](const List& in) { return List{relu(in[0])}; }, {Tensor::zeros({20}, f64)},
                         {.mode = Mode::projection}),
               Value, "crossed a kink; use the full mode");
  // Far from the kink nothing is skipped, and an error in the backward is still found.
  for (Mode mode : modes) {
    const Tensor far = Tensor::from({-1., 3., 2.});
    const auto good =
        gradcheck([](const List& in) { return List{relu(mul(in[0], in[0]))}; }, {far}, {.mode = mode});
    EXPECT_TRUE(good) << good;
    EXPECT_EQ(good.skipped, 0);
    EXPECT_FALSE(
        gradcheck([](const List& in) { return List{relu(mul(in[0], in[0], 1.01))}; }, {far}, {.mode = mode}));
  }
  EXPECT_FALSE(kinks_wanted());
}

TEST(Gradcheck, SkipsInfiniteOutputs) {
  const auto function = [](const List& in) {
    Tensor value = in[0].value().clone();
    value.mutable_data<double>()[1] = -std::numeric_limits<double>::infinity();
    return List{
        record("partly", std::span(&in[0], 1), value, [](const OutputGrads& grads) -> std::vector<Tensor> {
          Tensor result = grads[0].clone();
          result.mutable_data<double>()[1] = 0;
          return {result};
        })};
  };
  for (Mode mode : modes) {
    const auto report = gradcheck(function, {randn({3}, 0, 1, f64)}, {.mode = mode});
    EXPECT_TRUE(report) << report;
    EXPECT_GT(report.skipped, 0);
  }
}

TEST(Gradcheck, RandomFunctionsRepeatAndTheGeneratorStays) {
  manual_seed(77);
  rand({5});
  const Generator::State before = default_generator().state();
  const auto noisy = [](const List& in) { return List{mul(in[0], Variable(rand({4}, 0, 1, f64)))}; };
  for (Mode mode : modes) {
    EXPECT_TRUE(gradcheck(noisy, {Tensor::from({1., 2., 3., 4.})}, {.mode = mode, .seed = 9}));
    EXPECT_EQ(default_generator().state(), before);
    EXPECT_ERROR(gradcheck([](const List&) -> List { fail(Error::Kind::Value, "broken"); },
                           {Tensor::from({1.})}, {.mode = mode}),
                 Value, "broken");
    EXPECT_EQ(default_generator().state(), before);
    EXPECT_FALSE(kinks_wanted());
  }
}

TEST(Gradcheck, LeavesItsInputsAloneAndTakesConstants) {
  const Tensor input = randn({3}, 0, 1, f64);
  const std::vector<double> before = input.to_vector<double>();
  for (Mode mode : modes) {
    // Outputs that are views of the input, the input itself, or do not depend on it.
    const auto report = gradcheck(
        [](const List& in) {
          return List{in[0], Variable(Tensor::from({1., 2.})),
                      record("view", std::span(&in[0], 1), in[0].value().reshape({1, 3}),
                             [](const OutputGrads& grads) -> std::vector<Tensor> {
                               return {grads[0].reshape({3})};
                             })};
        },
        {input}, {.mode = mode});
    EXPECT_TRUE(report) << report;
    EXPECT_EQ(input.to_vector<double>(), before);
  }
}

// The cost of the projection does not grow with the input.
TEST(Gradcheck, ProjectionCallsTheFunctionFourTimes) {
  int calls = 0;
  const auto report = gradcheck(
      [&](const List& in) {
        ++calls;
        return List{sum(mul(in[0], in[0]))};
      },
      {randn({50, 40}, 0, 1, f64)}, {.mode = Mode::projection});
  EXPECT_TRUE(report) << report;
  EXPECT_EQ(calls, 4);  // the values, their gradients, a step up and a step down
}

}  // namespace
}  // namespace torus
