// What every op must do, for each row of the op table.
#include "ops/op_table.h"

#include <gtest/gtest.h>

#include <limits>

#include "torus/autograd/gradcheck.h"
#include "torus/core/parallel.h"
#include "torus/core/profiler.h"

namespace torus::testing {
namespace {

using Tensors = std::vector<Tensor>;

// How far `got` is from `expected` by relative norm, allowing for a norm of nearly zero.
double distance(const std::vector<double>& got, const std::vector<double>& expected) {
  if (got.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double error = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += (got[i] - expected[i]) * (got[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  // Results that are zero but for rounding are not divided by it.
  return std::sqrt(error / (size + 1e-6 * static_cast<double>(got.size() + 1)));
}
double distance(const Tensor& got, const Tensor& expected) {
  return distance(got.to_vector<double>(), expected.to_vector<double>());
}

// What rounding to `dtype` and a few operations in it may cost.
double tolerance(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 1e-13;
    case DType::f32:
      return 2e-6;
    case DType::f16:
      return 1e-3;
    default:
      return 8e-3;
  }
}

Tensors random_inputs(const Row& row, const std::vector<Shape>& shapes, DType dtype, uint64_t seed = 1) {
  Generator generator(seed);
  Tensors inputs;
  for (const Shape& shape : shapes)
    inputs.push_back(rand(shape, row.low, row.high, f64, generator).to(dtype));
  return inputs;
}

Tensors random_seeds(const Tensors& outputs) {
  Generator generator(2);
  Tensors seeds;
  for (const Tensor& output : outputs)
    seeds.push_back(randn(output.shape(), 0, 1, f64, generator).to(output.dtype()));
  return seeds;
}

Tensors values(const Variables& variables) {
  Tensors result;
  for (const Variable& variable : variables) result.push_back(variable.value());
  return result;
}

struct Outcome {
  Tensors outputs, grads;
};

// Outputs, and the gradients of <seeds, outputs>.
Outcome run(const Row& row, const Tensors& inputs, const std::function<Tensors(const Tensors&)>& seeds_for) {
  Tape tape;
  Variables leaves;
  for (const Tensor& input : inputs) leaves.emplace_back(input, true);
  const Variables outputs = row.op(leaves);
  Outcome result{values(outputs), {}};
  tape.backward(outputs, seeds_for(result.outputs));
  for (const Variable& leaf : leaves) result.grads.push_back(leaf.grad());
  return result;
}

// The same values in other strides.
Tensor reversed_axes(const Tensor& x) {
  std::vector<int> order;
  for (int axis = x.dim() - 1; axis >= 0; --axis) order.push_back(axis);
  return x.permute(order).clone().permute(order);
}
// Every second place of larger memory, NaN in between.
Tensor with_gaps(const Tensor& x) {
  Shape shape = x.shape();
  for (int axis = 0; axis < x.dim(); ++axis) shape[axis] = 2 * shape[axis] + 1;
  Tensor view = Tensor::full(shape, std::numeric_limits<double>::quiet_NaN(), x.dtype(), x.device());
  for (int axis = 0; axis < x.dim(); ++axis) view = view.slice(axis, 1, shape[axis], 2);
  return view.copy_(x);
}
// Stride 0: the first slice in the place of all.
Tensor repeated_first(const Tensor& x) {
  if (x.dim() == 0 || x.size(0) == 0) return x;
  return x.slice(0, 0, 1).expand(x.shape());
}
// Stride 0 along the last axis.
Tensor repeated_last(const Tensor& x) {
  if (x.dim() == 0 || x.size(-1) == 0) return x;
  return x.slice(-1, 0, 1).expand(x.shape());
}
const auto layouts = {reversed_axes, with_gaps, repeated_first, repeated_last};

Tensors mapped(const Tensors& tensors, Tensor (*f)(const Tensor&)) {
  Tensors result;
  for (const Tensor& tensor : tensors) result.push_back(f(tensor));
  return result;
}
Tensor cloned(const Tensor& x) { return x.clone(); }
Tensor on_cuda(const Tensor& x) { return x.to(cuda); }

std::string describe(const std::vector<Shape>& shapes) {
  std::ostringstream text;
  for (const Shape& shape : shapes) text << shape << ' ';
  return text.str();
}

class ThreadCount {
 public:
  explicit ThreadCount(int count) : before_(num_threads()) { set_num_threads(count); }
  ~ThreadCount() { set_num_threads(before_); }

 private:
  int before_;
};

class OpTable : public ::testing::TestWithParam<Row> {};

TEST_P(OpTable, ForwardIsTheDefinition) {
  const Row& row = GetParam();
  auto cases = row.cases;
  cases.push_back(row.large);
  for (const auto& shapes : cases)
    for (DType dtype : {f64, f32, f16, bf16}) {
      SCOPED_TRACE(describe(shapes) + name(dtype));
      Arrays arrays;
      Variables inputs;
      for (const Tensor& input : random_inputs(row, shapes, dtype)) {
        arrays.emplace_back(input);
        inputs.emplace_back(input);
      }
      const Arrays expected = row.reference(arrays);
      const Variables outputs = row.op(inputs);
      ASSERT_EQ(outputs.size(), expected.size());
      for (size_t i = 0; i < outputs.size(); ++i) {
        ASSERT_EQ(outputs[i].shape(), expected[i].shape);
        EXPECT_LE(distance(outputs[i].value().to_vector<double>(), expected[i].values), tolerance(dtype));
      }
    }
}

TEST_P(OpTable, BackwardIsTheDerivative) {
  const Row& row = GetParam();
  for (const auto& shapes : row.cases) {
    SCOPED_TRACE(describe(shapes));
    int64_t elements = 0;
    for (const Shape& shape : shapes) elements += shape.numel();
    for (auto mode : {GradcheckOptions::Mode::full, GradcheckOptions::Mode::projection}) {
      if (mode == GradcheckOptions::Mode::full && elements > 100) continue;
      const GradcheckReport report = gradcheck(row.op, random_inputs(row, shapes, f64), {.mode = mode});
      EXPECT_TRUE(report) << report;
      // Relu and max declare kinks, which random inputs do not meet.
      EXPECT_EQ(report.skipped, 0) << report;
    }
  }
}

// A backward that is 1 % wrong in one input must not pass the test above.
TEST_P(OpTable, GradcheckSeesAnErrorOfOnePercent) {
  const Row& row = GetParam();
  const Tensors inputs = random_inputs(row, row.cases[0], f64);
  for (size_t wrong = 0; wrong < inputs.size(); ++wrong)
    for (auto mode : {GradcheckOptions::Mode::full, GradcheckOptions::Mode::projection}) {
      const auto planted = [&](const Variables& x) {
        Variables with_error = x;
        with_error[wrong] = record("planted", {x[wrong]}, x[wrong].value(),
                                   [](const OutputGrads& grads) -> std::vector<Tensor> {
                                     return {(Variable(grads[0]) * 1.01).value()};
                                   });
        return row.op(with_error);
      };
      const GradcheckReport report = gradcheck(planted, inputs, {.mode = mode});
      EXPECT_FALSE(report) << "input " << wrong << ": " << report;
    }
}

TEST_P(OpTable, AnyStridesOfInputsAndGradients) {
  const Row& row = GetParam();
  for (const auto& shapes : row.cases)
    for (const auto layout : layouts) {
      SCOPED_TRACE(describe(shapes));
      const Tensors strided = mapped(random_inputs(row, shapes, f64), layout);
      const auto seeds = [&](const Tensors& outputs) { return mapped(random_seeds(outputs), layout); };
      const Outcome expected = run(row, mapped(strided, cloned),
                                   [&](const Tensors& outputs) { return mapped(seeds(outputs), cloned); });
      const Outcome got = run(row, strided, seeds);
      for (size_t i = 0; i < got.outputs.size(); ++i)
        EXPECT_LE(distance(got.outputs[i], expected.outputs[i]), tolerance(f64)) << "output " << i;
      for (size_t i = 0; i < got.grads.size(); ++i) {
        ASSERT_EQ(got.grads[i].shape(), shapes[i]);
        EXPECT_LE(distance(got.grads[i], expected.grads[i]), tolerance(f64)) << "gradient " << i;
      }
    }
}

TEST_P(OpTable, GradientsInLowerPrecision) {
  const Row& row = GetParam();
  for (const auto& shapes : {row.cases[0], row.cases[1], row.large})
    for (DType dtype : {f32, f16, bf16}) {
      SCOPED_TRACE(describe(shapes) + name(dtype));
      const Tensors inputs = random_inputs(row, shapes, dtype);
      Tensors seeds, wide_inputs;
      const Outcome got =
          run(row, inputs, [&](const Tensors& outputs) { return seeds = random_seeds(outputs); });
      for (const Tensor& input : inputs) wide_inputs.push_back(input.to(f64));
      const Outcome expected = run(row, wide_inputs, [&](const Tensors&) {
        Tensors wide;
        for (const Tensor& seed : seeds) wide.push_back(seed.to(f64));
        return wide;
      });
      for (size_t i = 0; i < got.grads.size(); ++i) {
        EXPECT_EQ(got.grads[i].dtype(), dtype);
        EXPECT_LE(distance(got.grads[i], expected.grads[i]), 2 * tolerance(dtype)) << "gradient " << i;
      }
    }
}

TEST_P(OpTable, BitsDoNotDependOnThreads) {
  const Row& row = GetParam();
  const Tensors inputs = random_inputs(row, row.large, f32);
  std::vector<Outcome> outcomes;
  for (int threads : {1, 2, 3}) {
    const ThreadCount scope(threads);
    outcomes.push_back(run(row, inputs, random_seeds));
  }
  for (size_t k = 1; k < outcomes.size(); ++k) {
    for (size_t i = 0; i < outcomes[0].outputs.size(); ++i)
      EXPECT_EQ(outcomes[k].outputs[i].to_vector<float>(), outcomes[0].outputs[i].to_vector<float>());
    for (size_t i = 0; i < outcomes[0].grads.size(); ++i)
      EXPECT_EQ(outcomes[k].grads[i].to_vector<float>(), outcomes[0].grads[i].to_vector<float>());
  }
}

// Without a tape nothing records, and an input that wants no gradient gets none.
TEST_P(OpTable, OnlyWantedGradients) {
  const Row& row = GetParam();
  const Tensors inputs = random_inputs(row, row.cases[0], f64);
  const Outcome all = run(row, inputs, random_seeds);
  Variables untaped;
  for (const Tensor& input : inputs) untaped.emplace_back(input, true);
  for (const Variable& output : row.op(untaped)) EXPECT_EQ(output.tape_id(), 0u);
  for (size_t wanted = 0; wanted < inputs.size(); ++wanted) {
    Tape tape;
    Variables leaves;
    for (size_t i = 0; i < inputs.size(); ++i) leaves.emplace_back(inputs[i], i == wanted);
    const Variables outputs = row.op(leaves);
    tape.backward(outputs, random_seeds(values(outputs)));
    for (size_t i = 0; i < inputs.size(); ++i) EXPECT_EQ(leaves[i].grad().defined(), i == wanted);
    EXPECT_EQ(distance(leaves[wanted].grad(), all.grads[wanted]), 0);
  }
}

// The same computation on both devices: each case in f64 and f32, the first and the largest in 16 bits too.
// Each node on the tape was made by an op that a profiler shows by the same name, with its shapes.
TEST_P(OpTable, IsProfiled) {
  const Row& row = GetParam();
  Tape tape;
  Variables leaves;
  for (const Tensor& input : random_inputs(row, row.cases[0], f32)) leaves.emplace_back(input, true);
  Profiler profiler;
  row.op(leaves);
  profiler.stop();
  const ProfileSummary summary = profiler.summary();
  const TapeSummary recorded = tape.summary();
  EXPECT_GT(recorded.nodes, 0);
  for (const TapeSummary::Row& node : recorded.rows)
    EXPECT_GE(summary.row(node.op, ScopeKind::forward).calls, node.nodes) << node.op;
  for (const ProfileEvent& event : profiler.events())
    if (event.kind == ScopeKind::forward) {
      EXPECT_NE(event.shapes, "") << event.name;
    }
}

TEST_P(OpTable, CudaAgreesWithTheCpu) {
  if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
  const Row& row = GetParam();
  auto cases = row.cases;
  cases.push_back(row.large);
  for (const auto& shapes : cases)
    for (DType dtype : {f64, f32, f16, bf16}) {
      if (size_of(dtype) == 2 && shapes != row.cases[0] && shapes != row.large) continue;
      SCOPED_TRACE(describe(shapes) + name(dtype));
      const Tensors inputs = random_inputs(row, shapes, dtype);
      Tensors seeds;
      const Outcome expected =
          run(row, inputs, [&](const Tensors& outputs) { return seeds = random_seeds(outputs); });
      const Outcome got =
          run(row, mapped(inputs, on_cuda), [&](const Tensors&) { return mapped(seeds, on_cuda); });
      ASSERT_EQ(got.outputs.size(), expected.outputs.size());
      for (size_t i = 0; i < got.outputs.size(); ++i) {
        EXPECT_EQ(got.outputs[i].device(), cuda);
        ASSERT_EQ(got.outputs[i].shape(), expected.outputs[i].shape());
        EXPECT_EQ(got.outputs[i].dtype(), expected.outputs[i].dtype());
        EXPECT_LE(distance(got.outputs[i], expected.outputs[i]), 2 * tolerance(dtype)) << "output " << i;
      }
      for (size_t i = 0; i < got.grads.size(); ++i) {
        EXPECT_EQ(got.grads[i].device(), cuda);
        ASSERT_EQ(got.grads[i].shape(), shapes[i]);
        EXPECT_EQ(got.grads[i].dtype(), dtype);
        EXPECT_LE(distance(got.grads[i], expected.grads[i]), 2 * tolerance(dtype)) << "gradient " << i;
      }
    }
}

TEST_P(OpTable, CudaTakesAnyStrides) {
  if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
  const Row& row = GetParam();
  auto cases = row.cases;
  cases.push_back(row.large);
  for (const auto& shapes : cases)
    for (const auto layout : layouts) {
      SCOPED_TRACE(describe(shapes));
      const Tensors strided = mapped(mapped(random_inputs(row, shapes, f64), on_cuda), layout);
      const auto seeds = [&](const Tensors& outputs) {
        return mapped(mapped(random_seeds(outputs), on_cuda), layout);
      };
      const Outcome expected = run(row, mapped(strided, cloned),
                                   [&](const Tensors& outputs) { return mapped(seeds(outputs), cloned); });
      const Outcome got = run(row, strided, seeds);
      for (size_t i = 0; i < got.outputs.size(); ++i)
        EXPECT_LE(distance(got.outputs[i], expected.outputs[i]), tolerance(f64)) << "output " << i;
      for (size_t i = 0; i < got.grads.size(); ++i)
        EXPECT_LE(distance(got.grads[i], expected.grads[i]), tolerance(f64)) << "gradient " << i;
    }
}

TEST_P(OpTable, CudaBitsAreTheSameEachTime) {
  if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
  const Row& row = GetParam();
  const Tensors inputs = mapped(random_inputs(row, row.large, f32), on_cuda);
  const auto seeds = [](const Tensors& outputs) { return mapped(random_seeds(outputs), on_cuda); };
  const Outcome first = run(row, inputs, seeds), second = run(row, inputs, seeds);
  for (size_t i = 0; i < first.outputs.size(); ++i)
    EXPECT_EQ(first.outputs[i].to_vector<float>(), second.outputs[i].to_vector<float>());
  for (size_t i = 0; i < first.grads.size(); ++i)
    EXPECT_EQ(first.grads[i].to_vector<float>(), second.grads[i].to_vector<float>());
}

INSTANTIATE_TEST_SUITE_P(Ops, OpTable, ::testing::ValuesIn(op_table()),
                         [](const auto& parameter) { return parameter.param.name; });

}  // namespace
}  // namespace torus::testing
