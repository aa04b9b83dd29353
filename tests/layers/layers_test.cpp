#include "torus/layers/layers.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/expect_error.h"
#include "layers/compare.h"

namespace torus {
namespace {

TEST(Linear, StartsUniformAndComputesItsFormula) {
  Generator generator(1);
  const Linear layer(16, 50, {.dtype = f64}, generator);
  const auto weights = layer.weight.value().to_vector<double>();
  const auto [low, high] = std::minmax_element(weights.begin(), weights.end());
  EXPECT_GE(*low, -0.25);
  EXPECT_LE(*high, 0.25);
  EXPECT_LT(*low, -0.24);
  EXPECT_GT(*high, 0.24);
  EXPECT_EQ(layer.bias.value().to_vector<double>(), std::vector<double>(50, 0));

  Linear small(2, 3, {.dtype = f64});
  small.weight.mutable_value().copy_(Tensor::from<double>({1, 2, 3, 4, 5, 6}).reshape({3, 2}));
  small.bias.mutable_value().copy_(Tensor::from<double>({100, 200, 300}));
  const Variable y = small(Variable(Tensor::from<double>({1, 10}).reshape({1, 1, 2})));
  EXPECT_EQ(y.shape(), (Shape{1, 1, 3}));
  EXPECT_EQ(y.value().to_vector<double>(), (std::vector<double>{121, 243, 365}));

  EXPECT_FALSE(Linear(2, 3, {.bias = false}).bias.defined());
  EXPECT_ERROR(Linear(0, 3), Shape, "[linear] inputs and outputs must be positive, got 0 and 3");
  EXPECT_ERROR(Embedding(-1, 3), Shape,
               "[embedding] expected count and channels of at least 0, got -1 and 3");
}

TEST(Embedding, TakesRows) {
  Embedding layer(4, 2, f64);
  layer.weight.mutable_value().copy_(Tensor::from<double>({0, 1, 2, 3, 4, 5, 6, 7}).reshape({4, 2}));
  const Variable y = layer(Tensor::from<int64_t>({3, 0, 3}).reshape({3, 1}));
  EXPECT_EQ(y.shape(), (Shape{3, 1, 2}));
  EXPECT_EQ(y.value().to_vector<double>(), (std::vector<double>{6, 7, 0, 1, 6, 7}));
}

TEST(Norms, FollowTheirFormulas) {
  Generator generator(2);
  constexpr int64_t channels = 5;
  const Tensor x = randn({3, channels}, 1, 0.01, f64, generator);  // small, so that eps counts
  LayerNorm layer(channels, {.dtype = f64});
  RMSNorm rms(channels, {.dtype = f64});
  EXPECT_EQ(flat_values(layer), (std::vector<double>{1, 1, 1, 1, 1, 0, 0, 0, 0, 0}));
  randomize(layer, 1, generator);
  randomize(rms, 1, generator);
  const auto w = layer.weight.value().to_vector<double>(), b = layer.bias.value().to_vector<double>(),
             r = rms.weight.value().to_vector<double>(), in = x.to_vector<double>();
  std::vector<double> normed, scaled;
  for (size_t row = 0; row < 3; ++row) {
    double mean = 0, square = 0, variance = 0;
    for (size_t c = 0; c < channels; ++c) {
      mean += in[row * channels + c] / channels;
      square += in[row * channels + c] * in[row * channels + c] / channels;
    }
    for (size_t c = 0; c < channels; ++c)
      variance += (in[row * channels + c] - mean) * (in[row * channels + c] - mean) / channels;
    for (size_t c = 0; c < channels; ++c) {
      normed.push_back((in[row * channels + c] - mean) / std::sqrt(variance + 1e-5) * w[c] + b[c]);
      scaled.push_back(in[row * channels + c] / std::sqrt(square + 1e-6) * r[c]);
    }
  }
  EXPECT_LT(relative_error(layer(Variable(x)).value().to_vector<double>(), normed), 1e-12);
  EXPECT_LT(relative_error(rms(Variable(x)).value().to_vector<double>(), scaled), 1e-12);
  EXPECT_EQ(LayerNorm(3, {.bias = false}).parameter_count(), 3);
}

TEST(DropoutLayer, DropsOnlyWhileTraining) {
  manual_seed(3);
  Dropout layer(0.25);
  const Variable x(Tensor::full({100, 100}, 1));
  const auto y = layer(x).value().to_vector<double>();
  const auto zeros = std::count(y.begin(), y.end(), 0.0);
  EXPECT_NEAR(static_cast<double>(zeros), 2500, 5 * std::sqrt(10000 * 0.25 * 0.75));
  for (double value : y) ASSERT_TRUE(value == 0 || value == 1 / 0.75f) << value;
  layer.train(false);
  const auto before = default_generator().state();
  EXPECT_EQ(layer(x).value().to_vector<double>(), std::vector<double>(10000, 1));
  EXPECT_EQ(default_generator().state(), before);
  EXPECT_ERROR(Dropout(1.5), Value, "[dropout] expected 0 <= p <= 1, got 1.5");
}

TEST(MLP, IsDownOfGeluOfUp) {
  Generator generator(4);
  MLP layer(3, 7, {.dtype = f64}, generator);
  randomize(layer, 0.5, generator);
  const Tensor x = randn({2, 3}, 0, 1, f64, generator);
  const auto up_w = layer.up.weight.value().to_vector<double>(),
             up_b = layer.up.bias.value().to_vector<double>(),
             down_w = layer.down.weight.value().to_vector<double>(),
             down_b = layer.down.bias.value().to_vector<double>(), in = x.to_vector<double>();
  std::vector<double> expected;
  for (size_t row = 0; row < 2; ++row)
    for (size_t o = 0; o < 3; ++o) {
      double y = down_b[o];
      for (size_t h = 0; h < 7; ++h) {
        double u = up_b[h];
        for (size_t i = 0; i < 3; ++i) u += up_w[h * 3 + i] * in[row * 3 + i];
        y += down_w[o * 7 + h] * u * std::erfc(-u / std::sqrt(2.0)) / 2;
      }
      expected.push_back(y);
    }
  EXPECT_LT(relative_error(layer(Variable(x)).value().to_vector<double>(), expected), 1e-12);
  EXPECT_LT(parameter_gradient_error(layer, [&] { return layer(Variable(x)); }), 1e-7);
}

}  // namespace
}  // namespace torus
