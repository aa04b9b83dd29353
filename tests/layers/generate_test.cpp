#include "torus/layers/generate.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/expect_error.h"
#include "layers/compare.h"

namespace torus {
namespace {

const GPTConfig small{.vocab_size = 9, .context = 5, .layers = 2, .heads = 2, .width = 8};

GPT random_model(uint64_t seed) {
  Generator generator(seed);
  return GPT(small, generator);
}

TEST(Generate, GreedyTakesTheLikeliestOfTheLastContext) {
  GPT model = random_model(1);
  Generator generator(2);
  randomize(model, 0.5, generator);
  const Tensor prompts = randint({3, 2}, 0, 9, generator);
  const Tensor result = generate(model, prompts, {.count = 8, .temperature = 0});
  ASSERT_EQ(result.shape(), (Shape{3, 10}));
  EXPECT_EQ(result.slice(1, 0, 2).to_vector<int64_t>(), prompts.to_vector<int64_t>());
  for (int64_t at = 2; at < 10; ++at) {
    const Tensor logits = model(result.slice(1, std::max<int64_t>(0, at - 5), at)).value();
    for (int64_t row = 0; row < 3; ++row) {
      const auto last = logits.select(0, row).select(0, -1).to_vector<double>();
      EXPECT_EQ(result.select(0, row).to_vector<int64_t>()[static_cast<size_t>(at)],
                std::max_element(last.begin(), last.end()) - last.begin());
    }
  }
}

TEST(Generate, SamplesFromTheSoftmaxOfItsLogits) {
  // The last norm gives a constant, so the logits are the head's first column whatever the tokens are.
  GPT model({.vocab_size = 4, .context = 5, .layers = 1, .heads = 1, .width = 2, .tied_head = false});
  const std::vector<double> p = {0.1, 0.2, 0.3, 0.4};
  model.norm.weight.mutable_value().fill_(0);
  model.norm.bias.mutable_value().copy_(Tensor::from<float>({1, 0}));
  for (int64_t v = 0; v < 4; ++v)
    model.head.mutable_value().select(0, v).fill_(std::log(p[static_cast<size_t>(v)]));
  for (double temperature : {1.0, 0.5, 2.0}) {
    Generator generator(3);
    constexpr int64_t rows = 20000;
    const auto tokens = generate(model, Tensor::zeros({rows, 1}, i64),
                                 {.count = 1, .temperature = temperature, .generator = &generator})
                            .select(1, 1)
                            .to_vector<int64_t>();
    double total = 0, chi = 0;
    for (double value : p) total += std::pow(value, 1 / temperature);
    for (int64_t v = 0; v < 4; ++v) {
      const double expected = rows * std::pow(p[static_cast<size_t>(v)], 1 / temperature) / total;
      const auto count = static_cast<double>(std::count(tokens.begin(), tokens.end(), v));
      chi += (count - expected) * (count - expected) / expected;
    }
    EXPECT_LT(chi, 16.3) << temperature;  // 0.1 % of 3 degrees of freedom
    EXPECT_EQ(generator.state().position, static_cast<uint64_t>(rows));
  }
}

TEST(Generate, IsReproducibleAndDoesNotRecord) {
  const GPT model = random_model(4);
  const Tensor prompt = Tensor::zeros({2, 7}, i64);  // longer than the context
  Generator a(5), b(5), c(6);
  const Tape tape;
  const auto first = generate(model, prompt, {.count = 30, .generator = &a}).to_vector<int64_t>();
  EXPECT_EQ(tape.live_nodes(), 0);
  EXPECT_EQ(first, generate(model, prompt, {.count = 30, .generator = &b}).to_vector<int64_t>());
  EXPECT_NE(first, generate(model, prompt, {.count = 30, .generator = &c}).to_vector<int64_t>());
  EXPECT_EQ(generate(model, prompt, {.count = 0}).to_vector<int64_t>(), prompt.to_vector<int64_t>());
}

TEST(Generate, Refuses) {
  GPT model = random_model(7);
  EXPECT_ERROR(generate(model, Tensor::zeros({2, 0}, i64)), Shape, "at least one token, got [2, 0]");
  EXPECT_ERROR(generate(model, Tensor::zeros({2}, i64)), Shape, "expected prompts [B, T]");
  EXPECT_ERROR(generate(model, Tensor::zeros({1, 1}, i64), {.temperature = -1}), Value, "must be at least 0");
  EXPECT_ERROR(generate(model, Tensor::zeros({1, 1}, i64), {.count = -1}), Value, "must be at least 0");
  EXPECT_ERROR(generate(model, Tensor::full({1, 1}, 9, i64)), Value, "9");
  model.norm.bias.mutable_value().fill_(NAN);
  EXPECT_ERROR(generate(model, Tensor::zeros({1, 1}, i64)), Value, "[generate] the logits are not finite");
}

}  // namespace
}  // namespace torus
