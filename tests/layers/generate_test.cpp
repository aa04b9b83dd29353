#include "torus/layers/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "core/expect_error.h"
#include "layers/compare.h"
#include "torus/core/profiler.h"

namespace torus {
namespace {

const GPTConfig small{.vocab_size = 9, .context = 5, .layers = 2, .heads = 2, .width = 8};

GPT random_model(uint64_t seed) {
  Generator generator(seed);
  return GPT(small, generator);
}

// A model whose logits are the logarithms of these, whatever the tokens are.
std::unique_ptr<GPT> constant_model(const std::vector<double>& p) {
  auto model = std::make_unique<GPT>(GPTConfig{.vocab_size = static_cast<int64_t>(p.size()),
                                               .context = 5,
                                               .layers = 1,
                                               .heads = 1,
                                               .width = 2,
                                               .tied_head = false});
  // The last norm gives a constant, so the logits are the head's first column.
  model->norm.weight.mutable_value().fill_(0);
  model->norm.bias.mutable_value().copy_(Tensor::from<float>({1, 0}));
  for (size_t v = 0; v < p.size(); ++v)
    model->head.mutable_value().select(0, static_cast<int64_t>(v)).fill_(std::log(p[v]));
  return model;
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
  const std::vector<double> p = {0.1, 0.2, 0.3, 0.4};
  const auto model = constant_model(p);
  for (double temperature : {1.0, 0.5, 2.0}) {
    Generator generator(3);
    constexpr int64_t rows = 20000;
    const auto tokens = generate(*model, Tensor::zeros({rows, 1}, i64),
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

TEST(Generate, TopKAndTopPDrawOnlyTheLikeliest) {
  const auto model = constant_model({0.1, 0.2, 0.3, 0.3, 0.1});
  struct Case {
    int64_t top_k;
    double top_p, temperature;
    std::vector<double> expected;  // not normalised
  };
  for (const Case& c : {Case{1, 1, 1, {0, 0, 1, 0, 0}},  // the first of equals
                        Case{3, 1, 1, {0, 2, 3, 3, 0}}, Case{99, 1, 1, {1, 2, 3, 3, 1}},
                        Case{0, 0.1, 1, {0, 0, 1, 0, 0}}, Case{0, 0.55, 1, {0, 0, 1, 1, 0}},
                        Case{0, 0.75, 1, {0, 2, 3, 3, 0}}, Case{3, 0.7, 1, {0, 0, 1, 1, 0}},
                        Case{0, 0.75, 0.5, {0, 0, 1, 1, 0}}, Case{4, 1, 0.5, {1, 4, 9, 9, 0}}}) {
    Generator generator(8);
    constexpr int64_t rows = 5000;
    const auto tokens = generate(*model, Tensor::zeros({rows, 1}, i64),
                                 {.count = 1,
                                  .temperature = c.temperature,
                                  .generator = &generator,
                                  .top_k = c.top_k,
                                  .top_p = c.top_p})
                            .select(1, 1)
                            .to_vector<int64_t>();
    const double total = std::accumulate(c.expected.begin(), c.expected.end(), 0.0);
    for (size_t v = 0; v < 5; ++v) {
      const double p = c.expected[v] / total;
      const auto count =
          static_cast<double>(std::count(tokens.begin(), tokens.end(), static_cast<int64_t>(v)));
      // Four deviations; none at all where p is 0 or 1.
      EXPECT_LE(std::abs(count - rows * p), 4 * std::sqrt(rows * p * (1 - p)) + 1e-9)
          << c.top_k << " " << c.top_p << " " << v;
    }
  }
}

TEST(Generate, ComputesOneTokenAStepUntilTheContextIsFull) {
  GPTConfig config = small;
  config.context = 16;
  for (const bool rotary : {false, true}) {
    config.rotary = rotary;
    Generator generator(9);
    const GPT model(config, generator);
    const Tensor prompts = randint({3, 4}, 0, 9, generator);
    Profiler profiler;
    const Tensor result = generate(model, prompts, {.count = 14, .temperature = 0});
    profiler.stop();
    // Tokens that went into the model, by what was looked up.
    std::vector<std::string> shapes;
    for (const ProfileEvent& event : profiler.events())
      if (event.name == "embedding.forward") shapes.push_back(event.shapes);
    ASSERT_EQ(shapes.size(), 14u);
    for (size_t step = 0; step < 14; ++step) {
      const int64_t count = step == 0 ? 4 : step <= 12 ? 1 : 16;
      EXPECT_NE(shapes[step].find("i64 [3, " + std::to_string(count) + "]"), std::string::npos)
          << step << shapes[step];
    }
    // Uncached, it is the same.
    for (int64_t at = 4; at < 18; ++at) {
      const Tensor logits = model(result.slice(1, std::max<int64_t>(0, at - 16), at)).value();
      for (int64_t row = 0; row < 3; ++row) {
        const auto last = logits.select(0, row).select(0, -1).to_vector<double>();
        const auto got =
            static_cast<size_t>(result.select(0, row).to_vector<int64_t>()[static_cast<size_t>(at)]);
        EXPECT_NEAR(last[got], *std::max_element(last.begin(), last.end()), 1e-6);
      }
    }
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
  EXPECT_ERROR(generate(model, Tensor::zeros({1, 1}, f32)), DType,
               "[generate] expected prompts of i64, got f32");
  EXPECT_ERROR(generate(model, Tensor::zeros({1, 1}, i64), {.temperature = -1}), Value, "must be at least 0");
  EXPECT_ERROR(generate(model, Tensor::zeros({1, 1}, i64), {.count = -1}), Value, "must be at least 0");
  EXPECT_ERROR(generate(model, Tensor::zeros({1, 1}, i64), {.top_k = -1}), Value, "top_k >= 0");
  EXPECT_ERROR(generate(model, Tensor::zeros({1, 1}, i64), {.top_p = 0}), Value, "0 < top_p <= 1");
  EXPECT_ERROR(generate(model, Tensor::full({1, 1}, 9, i64)), Value, "9");
  model.norm.bias.mutable_value().fill_(NAN);
  EXPECT_ERROR(generate(model, Tensor::zeros({1, 1}, i64)), Value, "[generate] the logits are not finite");
}

}  // namespace
}  // namespace torus
