// Layers on grids, and attention from one sequence to another.
#include "torus/layers/grid.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/expect_error.h"
#include "torus/autograd/gradcheck.h"
#include "torus/autograd/tape.h"
#include "torus/core/memory.h"
#include "torus/layers/transformer.h"
#include "torus/ops/attention/attention.h"
#include "torus/ops/ops.h"

namespace torus {
namespace {

double largest_difference(const Tensor& a, const Tensor& b) {
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  EXPECT_EQ(a.shape(), b.shape());
  double most = 0;
  for (size_t i = 0; i < x.size(); ++i) most = std::max(most, std::abs(x[i] - y[i]));
  return most;
}

Tensor rolled(const Tensor& x, int axis, int64_t by) {
  Tensor result = Tensor::empty(x.shape(), x.dtype());
  const int64_t n = x.size(axis);
  result.slice(axis, by, n).copy_(x.slice(axis, 0, n - by));
  result.slice(axis, 0, by).copy_(x.slice(axis, n - by, n));
  return result;
}

// The output, and the gradients of x and of all parameters, of sum(model(x) * weights).
template <class Model>
std::vector<Tensor> output_and_gradients(Model& model, const Tensor& x0, const Tensor& weights) {
  Tape tape;
  const Variable x(x0, true), y = model(x);
  tape.backward({y}, {weights});
  std::vector<Tensor> result{y.value(), x.grad()};
  for (Parameter& parameter : std::vector<Parameter>(model.parameters())) {
    result.push_back(parameter.grad().clone());
    parameter.zero_grad();
  }
  return result;
}

// The gradient of each element of each parameter against a central difference.
template <class Model>
void expect_gradients_of_parameters(Model& model, const Tensor& x, Generator& g) {
  const Tensor weights = randn(model(Variable(x)).shape(), 0, 1, f64, g);
  const auto value = [&] { return sum(model(Variable(x)) * Variable(weights)).item(); };
  const auto gradients = output_and_gradients(model, x, weights);
  size_t next = 2;
  for (const auto& [name, handle] : model.named_parameters()) {
    Parameter parameter = handle;
    const auto analytic = gradients[next++].template to_vector<double>();
    for (size_t i = 0; i < analytic.size(); ++i) {
      const double at = parameter.value().template data<double>()[i], eps = 1e-6;
      const auto moved = [&](double to) {
        parameter.mutable_value().template mutable_data<double>()[i] = to;
        return value();
      };
      const double numeric = (moved(at + eps) - moved(at - eps)) / (2 * eps);
      moved(at);
      ASSERT_NEAR(analytic[i], numeric, 1e-6 * (1 + std::abs(numeric))) << name << " " << i;
    }
  }
}

TEST(GridTransformerBlock, CommutesWithRollingWrappedAxesAlone) {
  Generator g(3);
  for (bool rotary : {false, true})
    for (bool relative : {false, true}) {
      GridTransformerBlock block({.attention = {.channels = 24,
                                                .heads = 2,
                                                .window = {3, 4, 5},
                                                .dilation = {1, 2, 1},
                                                .boundary = {wrap, wrap, shift},
                                                .rotary = rotary,
                                                .relative_bias = relative,
                                                .dtype = f64}},
                                 g);
      if (relative)
        block.attention.table.mutable_value().copy_(randn(block.attention.table.shape(), 0, 1, f64, g));
      const Tensor x = randn({2, 6, 8, 7, 24}, 0, 1, f64, g);
      const Tensor y = block(Variable(x)).value(), weights = randn(x.shape(), 0, 1, f64, g);
      const auto still = output_and_gradients(block, x, weights);
      for (int axis : {1, 2}) {
        // Output and gradient of x roll along; the gradients of parameters, the table's too, stay.
        const auto moved = output_and_gradients(block, rolled(x, axis, 3), rolled(weights, axis, 3));
        for (size_t i = 0; i < still.size(); ++i)
          EXPECT_LT(largest_difference(moved[i], i < 2 ? rolled(still[i], axis, 3) : still[i]),
                    i < 2 ? 1e-12 : 1e-9)
              << axis << rotary << relative << " " << i;
      }
      EXPECT_GT(largest_difference(block(Variable(rolled(x, 3, 3))).value(), rolled(y, 3, 3)), 1e-3);
    }
}

TEST(GridTransformerBlock, GradientsOfAllItsParameters) {
  Generator g(4);
  GridTransformerBlock block({.attention = {.channels = 8,
                                            .heads = 2,
                                            .window = {3, 3},
                                            .boundary = {wrap, Boundary::shrink},
                                            .relative_bias = true,
                                            .dtype = f64},
                              .hidden = 6},
                             g);
  EXPECT_EQ(block.named_parameters()[6].name, "attention.table");
  block.attention.table.mutable_value().copy_(randn(block.attention.table.shape(), 0, 1, f64, g));
  const Tensor x = randn({1, 3, 4, 8}, 0, 1, f64, g);
  expect_gradients_of_parameters(block, x, g);
  const auto report =
      gradcheck([&](const std::vector<Variable>& y) { return std::vector<Variable>{block(y[0])}; }, {x});
  EXPECT_TRUE(report) << report;
}

TEST(NeighborhoodAttention, TakesGridsOfAnySizeAndRefusesOthers) {
  NeighborhoodAttention layer({.channels = 8, .heads = 2, .window = {3, 3}});
  for (const Shape& shape : {Shape{1, 4, 5, 8}, Shape{2, 3, 3, 8}, Shape{1, 1, 9, 8}})
    EXPECT_EQ(layer(Variable(randn(shape))).shape(), shape);
  try {
    layer(Variable(randn({1, 4, 8})));
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "[neighborhood_attention] expected x [B, 2 grid axes, 8], got [1, 4, 8]");
  }
  try {
    NeighborhoodAttention wrong({.channels = 8, .window = {3, 3, 3}, .boundary = {wrap, shift}});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "[neighborhood] expected 3 entries in boundary, one an axis, got 2");
  }
  EXPECT_EQ(
      message_of([] {
        NeighborhoodAttention({.channels = 8,
                               .window = {3, 3},
                               .dilation = {1, std::numeric_limits<int64_t>::max()},
                               .relative_bias = true});
      }),
      "[neighborhood_attention] axis 1: a relative bias reaches at most 2147483647 tokens, got window 3 and "
      "dilation 9223372036854775807");
}

// What a layer keeps for the grids that it has met is bounded, and those of equal windows share it.
TEST(NeighborhoodAttention, ForgetsGrids) {
  NeighborhoodAttention layer({.channels = 8, .heads = 2, .window = {3}, .boundary = {wrap}});
  const auto bytes_after = [&](int64_t from, int64_t to) {
    for (int64_t n = from; n < to; ++n) layer(Variable(Tensor::zeros({1, n, 8})));
    return memory_stats().live_bytes;
  };
  const int64_t after_20 = bytes_after(100, 120);
  EXPECT_LE(bytes_after(120, 200) - after_20, 8 * 80 * 8 * 4) << "80 tokens more on each of 8 grids";
  const Variable x(randn({1, 130, 8}));
  const auto first = layer(x).value().to_vector<float>();
  bytes_after(140, 160);
  EXPECT_EQ(layer(x).value().to_vector<float>(), first);
}

TEST(GridTransformer, CommutesWithRollingByWholePatches) {
  Generator g(7);
  GridTransformer model({.inputs = 2,
                         .outputs = 3,
                         .patch = {1, 2, 4},
                         .layers = 2,
                         .block = {.attention = {.channels = 12,
                                                 .heads = 2,
                                                 .window = {3, 3, 3},
                                                 .boundary = {shift, wrap, wrap},
                                                 .dtype = f64}}},
                        g);
  const Tensor x = randn({2, 3, 8, 20, 2}, 0, 1, f64, g);
  const Tensor y = model(Variable(x)).value();
  EXPECT_EQ(y.shape(), (Shape{2, 3, 8, 20, 3}));
  for (const auto& [axis, by] : {std::pair{2, 2}, {2, 6}, {3, 4}, {3, 12}})
    EXPECT_LT(largest_difference(model(Variable(rolled(x, axis, by))).value(), rolled(y, axis, by)), 1e-12);
  for (const auto& [axis, by] : {std::pair{1, 1}, {2, 1}, {3, 2}})  // no whole patch, or no axis that wraps
    EXPECT_GT(largest_difference(model(Variable(rolled(x, axis, by))).value(), rolled(y, axis, by)), 1e-3);
}

TEST(GridTransformer, GradientsOfAllItsParameters) {
  Generator g(9);
  GridTransformer model({.inputs = 1,
                         .outputs = 2,
                         .patch = {1, 2},
                         .layers = 1,
                         .block = {.attention = {.channels = 8,
                                                 .heads = 2,
                                                 .window = {2, 2},
                                                 .boundary = {wrap, shift},
                                                 .relative_bias = true,
                                                 .dtype = f64},
                                   .hidden = 5}},
                        g);
  expect_gradients_of_parameters(model, randn({2, 3, 4, 1}, 0, 1, f64, g), g);
}

TEST(GridTransformer, GradientsAndSizes) {
  Generator g(8);
  GridTransformer model(
      {.inputs = 1,
       .outputs = 2,
       .patch = {2, 1},
       .layers = 1,
       .block = {.attention = {.channels = 4, .window = {2, 2}, .dtype = f64}, .hidden = 5}},
      g);
  EXPECT_EQ(model.named_parameters()[0].name, "embed.weight");
  EXPECT_EQ(model.named_parameters()[2].name, "blocks.0.norm1.weight");
  EXPECT_EQ(model.named_parameters().back().name, "head.bias");
  const auto report =
      gradcheck([&](const std::vector<Variable>& x) { return std::vector<Variable>{model(x[0])}; },
                {randn({1, 4, 3, 1}, 0, 1, f64, g)});
  EXPECT_TRUE(report) << report;
  EXPECT_EQ(model(Variable(Tensor::zeros({2, 6, 5, 1}, f64))).shape(), (Shape{2, 6, 5, 2}));
  for (const Shape& shape : {Shape{1, 3, 3, 1}, Shape{1, 4, 3, 2}, Shape{4, 3, 1}}) try {
      model(Variable(Tensor::zeros(shape, f64)));
      ADD_FAILURE() << shape;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), Error::Kind::Shape);
      EXPECT_EQ(std::string(error.what())
                    .rfind("[grid_transformer] expected x [B, 2 axes of whole patches [2, 1], 1]", 0),
                0u)
          << error.what();
    }
  EXPECT_THROW(GridTransformer({.patch = {2}, .block = {.attention = {.channels = 4, .window = {2, 2}}}}),
               Error);
}

// One voxel is felt in its windows, and nowhere else.
TEST(NeighborhoodAttention, IsLocal) {
  Generator g(5);
  NeighborhoodAttention layer({.channels = 8, .heads = 2, .window = {3, 3}, .boundary = {wrap, wrap}}, g);
  const Tensor x = randn({1, 6, 7, 8}, 0, 1, f32, g);
  Tensor changed = x.clone();
  changed.select(0, 0).select(0, 0).select(0, 0).fill_(9);
  const Tensor a = layer(Variable(x)).value(), b = layer(Variable(changed)).value();
  for (int64_t r = 0; r < 6; ++r)
    for (int64_t c = 0; c < 7; ++c) {
      const bool near = (r <= 1 || r == 5) && (c <= 1 || c == 6);
      const auto at = [&](const Tensor& t) { return t.select(0, 0).select(0, r).select(0, c); };
      EXPECT_EQ(largest_difference(at(a), at(b)) > 0, near) << r << ", " << c;
    }
}

TEST(CrossAttention, EqualsItsComposition) {
  Generator g(6);
  CrossAttention layer({.query_dim = 10, .context_dim = 6, .heads = 3, .head_dim = 4, .dtype = f64}, g);
  const Variable x(randn({2, 5, 10}, 0, 1, f64, g)), context(randn({2, 7, 6}, 0, 1, f64, g));
  const auto heads = [](const Variable& y) {
    return permute(reshape(y, {2, y.size(1), 3, 4}), {0, 2, 1, 3});
  };
  const Variable q = heads(linear(x, layer.to_q.weight)), k = heads(linear(context, layer.to_k.weight)),
                 v = heads(linear(context, layer.to_v.weight));
  const Variable p = softmax(matmul(q, transpose(k, 2, 3)) * 0.5);
  const Variable mixed = reshape(permute(matmul(p, v), {0, 2, 1, 3}), {2, 5, 12});
  const Variable expected = linear(mixed, layer.to_out.weight, layer.to_out.bias);
  EXPECT_LT(largest_difference(layer(x, context).value(), expected.value()), 1e-13);
  EXPECT_EQ(layer.parameter_count(), 10 * 12 + 2 * 6 * 12 + 12 * 10 + 10);
  const auto message = [&](const Shape& of_x, const Shape& of_context) {
    return message_of(
        [&] { layer(Variable(Tensor::zeros(of_x, f64)), Variable(Tensor::zeros(of_context, f64))); });
  };
  EXPECT_EQ(message({2, 5, 10}, {2, 7, 10}),
            "[cross_attention] expected context [2, M, context_dim = 6], got [2, 7, 10]");
  EXPECT_EQ(message({2, 5, 10}, {3, 7, 6}),
            "[cross_attention] expected context [2, M, context_dim = 6], got [3, 7, 6]");
  EXPECT_EQ(message({2, 5, 6}, {2, 7, 6}),
            "[cross_attention] expected x [B, N, query_dim = 10], got [2, 5, 6]");
  CrossAttention self({.query_dim = 10});
  EXPECT_EQ(self(Variable(randn({1, 3, 10}))).shape(), Shape({1, 3, 10}));
}

TEST(CrossAttention, Trains) {
  manual_seed(1);
  CrossAttention layer({.query_dim = 8, .context_dim = 4, .heads = 2, .head_dim = 8, .dropout = 0.1});
  const Variable x(randn({4, 6, 8})), context(randn({4, 9, 4}));
  const Tensor wanted = randn({4, 6, 8});
  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    Tape tape;
    const Variable error = layer(x, context) - Variable(wanted), loss = mean(error * error);
    if (step == 0) first = loss.item();
    last = loss.item();
    tape.backward(loss);
    for (Parameter& p : std::vector<Parameter>(layer.parameters())) {
      add_into(p.mutable_value(), (Variable(p.grad()) * -0.5).value());
      p.zero_grad();
    }
  }
  EXPECT_LT(last, 0.8 * first);
}

}  // namespace
}  // namespace torus
