#include "torus/layers/transformer.h"

#include <gtest/gtest.h>

#include "core/expect_error.h"
#include "layers/compare.h"

namespace torus {
namespace {

using Matrix = std::vector<std::vector<double>>;  // rows

Matrix rows_of(const Tensor& x) {
  Matrix result;
  for (int64_t row = 0; row < x.size(0); ++row) result.push_back(x.select(0, row).to_vector<double>());
  return result;
}

// x times rows [first, first + count) of a layer's weight, transposed, plus bias.
Matrix project(const Matrix& x, const Linear& layer, int64_t first, int64_t count) {
  const Matrix weight = rows_of(layer.weight.value());
  const auto bias =
      layer.bias.defined() ? layer.bias.value().to_vector<double>() : std::vector<double>(weight.size(), 0.0);
  Matrix result;
  for (const auto& row : x) {
    auto& out = result.emplace_back();
    for (auto o = static_cast<size_t>(first); o < static_cast<size_t>(first + count); ++o) {
      out.push_back(bias[o]);
      for (size_t i = 0; i < row.size(); ++i) out.back() += weight[o][i] * row[i];
    }
  }
  return result;
}

// Attention of one sequence by its definition, with loops.
Matrix attend(const MultiHeadAttention& layer, const Matrix& x, const Matrix& context, int64_t heads,
              int64_t kv_heads, bool causal_mask) {
  const auto channels = static_cast<int64_t>(x[0].size()), d = channels / heads, kv = kv_heads * d;
  const Matrix q = project(x, layer.qkv, 0, channels), k = project(context, layer.qkv, channels, kv),
               v = project(context, layer.qkv, channels + kv, kv);
  Matrix mixed(x.size(), std::vector<double>(static_cast<size_t>(channels), 0.0));
  for (int64_t h = 0; h < heads; ++h)
    for (size_t i = 0; i < x.size(); ++i) {
      const auto q0 = static_cast<size_t>(h * d), k0 = static_cast<size_t>(h / (heads / kv_heads) * d);
      const size_t keys = causal_mask ? i + 1 : context.size();
      std::vector<double> p(keys);
      double total = 0;
      for (size_t j = 0; j < keys; ++j) {
        double score = 0;
        for (size_t c = 0; c < static_cast<size_t>(d); ++c) score += q[i][q0 + c] * k[j][k0 + c];
        total += p[j] = std::exp(score / std::sqrt(static_cast<double>(d)));
      }
      for (size_t j = 0; j < keys; ++j)
        for (size_t c = 0; c < static_cast<size_t>(d); ++c) mixed[i][q0 + c] += p[j] / total * v[j][k0 + c];
    }
  return project(mixed, layer.out, 0, channels);
}

struct Case {
  int64_t channels, heads, kv_heads;
  bool bias;
};

class MultiHeadAttentionCases : public testing::TestWithParam<Case> {};

TEST_P(MultiHeadAttentionCases, MatchesLoops) {
  const auto [channels, heads, kv_heads, bias] = GetParam();
  Generator generator(1);
  MultiHeadAttention layer(channels, heads, {.kv_heads = kv_heads, .bias = bias, .dtype = f64}, generator);
  randomize(layer, 0.5, generator);
  const int64_t shared = kv_heads == 0 ? heads : kv_heads;
  const Tensor x = randn({2, 5, channels}, 0, 1, f64, generator),
               context = randn({2, 7, channels}, 0, 1, f64, generator);
  const Tensor self = layer(Variable(x)).value(), masked = layer(Variable(x), causal()).value(),
               cross = layer(Variable(x), Variable(context)).value();
  for (int64_t b = 0; b < 2; ++b) {
    const Matrix rows = rows_of(x.select(0, b)), other = rows_of(context.select(0, b));
    const auto expect_rows = [&](const Tensor& got, const Matrix& expected) {
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_LT(relative_error(got.select(0, b).select(0, static_cast<int64_t>(i)).to_vector<double>(),
                                 expected[i]),
                  1e-10);
    };
    expect_rows(self, attend(layer, rows, rows, heads, shared, false));
    expect_rows(masked, attend(layer, rows, rows, heads, shared, true));
    expect_rows(cross, attend(layer, rows, other, heads, shared, false));
  }
  EXPECT_LT(parameter_gradient_error(layer, [&] { return layer(Variable(x), causal()); }), 1e-6);
  EXPECT_LT(parameter_gradient_error(layer, [&] { return layer(Variable(x), Variable(context)); }), 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Sizes, MultiHeadAttentionCases,
                         testing::Values(Case{12, 3, 0, true}, Case{12, 4, 2, true}, Case{8, 4, 1, false},
                                         Case{3, 3, 3, true}, Case{5, 1, 1, false}));

TEST(MultiHeadAttention, RefusesWhatDoesNotDivide) {
  EXPECT_ERROR(MultiHeadAttention(10, 4), Shape, "[attention] 10 channels do not divide into 4 heads");
  EXPECT_ERROR(MultiHeadAttention(10, 0), Shape, "10 channels do not divide into 0 heads");
  EXPECT_ERROR(MultiHeadAttention(6, 2, {.rotary = true}), Shape,
               "[attention] expected heads of even width for rotary, got 6 channels in 2 heads");
  EXPECT_ERROR(MultiHeadAttention(12, 4, {.kv_heads = 3}), Shape,
               "4 query heads do not share 3 key heads evenly");
  const MultiHeadAttention layer(8, 2);
  EXPECT_ERROR(layer(Variable(Tensor::zeros({5, 8}))), Shape, "expected x [B, N, 8], got [5, 8]");
  EXPECT_ERROR(layer(Variable(Tensor::zeros({1, 5, 8})), Variable(Tensor::zeros({5, 8}))), Shape,
               "context [B, M, 8]");
}

TEST(MultiHeadAttention, DropsOnlyWhileTraining) {
  manual_seed(5);
  MultiHeadAttention layer(8, 2, {.dropout = 0.5});
  const Variable x(randn({2, 6, 8}));
  const Tensor first = layer(x).value(), second = layer(x).value();
  EXPECT_GT(relative_error(first, second), 0.01);
  layer.train(false);
  EXPECT_EQ(layer(x).value().to_vector<double>(), layer(x).value().to_vector<double>());
}

TEST(TransformerBlock, AddsAttentionAndMlpOfNorms) {
  Generator generator(6);
  TransformerBlock block(8, 2, {.kv_heads = 1, .hidden = 11, .dtype = f64}, generator);
  randomize(block, 0.4, generator);
  EXPECT_EQ(block.mlp.up.weight.shape(), (Shape{11, 8}));
  EXPECT_EQ(block.attention.qkv.weight.shape(), (Shape{16, 8}));
  const Variable x(randn({2, 5, 8}, 0, 1, f64, generator));
  const Tensor y = (x + block.attention(block.norm1(x), causal())).value();
  const Tensor expected = (Variable(y) + block.mlp(block.norm2(Variable(y)))).value();
  EXPECT_LT(relative_error(block(x, causal()).value(), expected), 1e-12);
  EXPECT_LT(parameter_gradient_error(block, [&] { return block(x, causal()); }), 1e-6);
}

TEST(TransformerBlock, PostNormSwigluRotaryHaveGradients) {
  Generator generator(8);
  TransformerBlock block(
      8, 2,
      {.kv_heads = 1, .norm = NormKind::rms, .post_norm = true, .swiglu = true, .rotary = true, .dtype = f64},
      generator);
  randomize(block, 0.4, generator);
  EXPECT_EQ(block.mlp.up.weight.shape(), (Shape{48, 8}));
  EXPECT_EQ(block.mlp.down.weight.shape(), (Shape{8, 24}));
  EXPECT_FALSE(block.norm1.bias.defined());
  const Variable x(randn({2, 5, 8}, 0, 1, f64, generator));
  const Tensor y = block.norm1(x + block.attention(x, causal())).value();
  const Tensor expected = block.norm2(Variable(y) + block.mlp(Variable(y))).value();
  EXPECT_LT(relative_error(block(x, causal()).value(), expected), 1e-12);
  EXPECT_LT(parameter_gradient_error(block, [&] { return block(x, causal()); }), 1e-6);
}

TEST(TransformerBlock, CausalMeansThatLaterTokensChangeNothing) {
  Generator generator(7);
  const TransformerBlock block(8, 2, {}, generator);
  Tensor x = randn({1, 9, 8}, 0, 1, f32, generator);
  const Tensor before = block(Variable(x), causal()).value().slice(1, 0, 6);
  x.slice(1, 6, 9).fill_(5);
  EXPECT_EQ(block(Variable(x), causal()).value().slice(1, 0, 6).to_vector<float>(),
            before.to_vector<float>());
}

}  // namespace
}  // namespace torus
