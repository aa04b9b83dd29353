#include "torus/layers/gpt.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/expect_error.h"
#include "layers/compare.h"
#include "torus/core/hdf5.h"
#include "torus/layers/optim.h"

namespace torus {
namespace {

// ------------------------------------------------------------------------------------------- against PyTorch
// golden_gpt.h5 and the numbers here come from make_golden.py.

class GoldenGPT : public testing::TestWithParam<std::string> {};

TEST_P(GoldenGPT, LogitsLossGradientsAndFiveStepsMatch) {
  const auto file = Hdf5File::open(TORUS_SOURCE_DIR "/tests/layers/golden_gpt.h5");
  const auto golden = [&](const std::string& name) { return file.read(GetParam() + "/" + name); };
  const bool modern = GetParam() == "modern", bare = modern || GetParam() == "untied";
  GPT model({.vocab_size = 11,
             .context = 7,
             .layers = 2,
             .heads = 2,
             .width = 8,
             .tied_head = !bare,
             .bias = !bare,
             .kv_heads = modern ? 1 : 2,
             .norm = modern ? NormKind::rms : NormKind::layer,
             .post_norm = GetParam() == "post_norm",
             .swiglu = modern,
             .rotary = modern,
             .dtype = f64});
  const Tensor initial = golden("initial");
  ASSERT_EQ(initial.numel(), model.parameter_count());
  int64_t at = 0;
  for (Parameter& parameter : model.parameters()) {
    parameter.mutable_value().copy_(initial.slice(0, at, at + parameter.numel()).reshape(parameter.shape()));
    at += parameter.numel();
  }

  const std::vector<double> rates = {0.004, 0.01, 0.008, 0.005, 0.001};
  AdamW optimizer(model.named_parameters(), {.beta2 = 0.95, .weight_decay = 0.1});
  const Tensor tokens = golden("tokens"), targets = golden("targets");
  const auto losses = golden("losses").to_vector<double>(), norms = golden("norms").to_vector<double>();
  EXPECT_LT(relative_error(model(tokens.select(0, 0)).value(), golden("logits")), 1e-12);
  for (int64_t step = 0; step < 5; ++step) {
    const auto i = static_cast<size_t>(step);
    Tape tape;
    const Variable loss = model.loss(tokens.select(0, step), targets.select(0, step));
    EXPECT_NEAR(loss.item(), losses[i], 1e-11 * losses[i]);
    tape.backward(loss);
    if (step == 0) {
      EXPECT_LT(relative_error(flat_gradients(model), golden("gradients").to_vector<double>()), 1e-11);
    }
    // Each step is clipped, so that the factor is part of the trajectory.
    EXPECT_GT(norms[i], 0.5);
    EXPECT_NEAR(clip_grad_norm(model.parameters(), 0.5), norms[i], 1e-11 * norms[i]);
    optimizer.set_lr(rates[i]);
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_LT(relative_error(flat_values(model), golden("final").to_vector<double>()), 1e-11);
  EXPECT_GT(relative_error(flat_values(model), initial.to_vector<double>()), 0.01);
}

INSTANTIATE_TEST_SUITE_P(Kinds, GoldenGPT, testing::Values("tied", "untied", "modern", "post_norm"));

// -------------------------------------------------------------------------------------------------- the rest

const GPTConfig small{.vocab_size = 7, .context = 6, .layers = 2, .heads = 2, .width = 8, .dtype = f64};

TEST(GPT, GradientsAreThoseOfItsLoss) {
  Generator generator(1);
  GPT model(small, generator);
  randomize(model, 0.3, generator);
  const Tensor tokens = randint({2, 6}, 0, 7, generator), targets = randint({2, 6}, 0, 7, generator);
  EXPECT_LT(parameter_gradient_error(model, [&] { return model.loss(tokens, targets); }), 1e-6);
}

TEST(GPT, StartsWithItsDeviations) {
  Generator generator(2);
  const GPT model(
      {.vocab_size = 200, .context = 50, .layers = 8, .heads = 4, .width = 64, .tied_head = false},
      generator);
  for (const auto& [name, parameter] : model.named_parameters()) {
    const auto values = parameter.value().to_vector<double>();
    double squares = 0;
    for (double value : values) squares += value * value;
    const double deviation = std::sqrt(squares / static_cast<double>(values.size()));
    const bool joins = name.find("attention.out.weight") != std::string::npos ||
                       name.find("mlp.down.weight") != std::string::npos;
    const bool is_norm = name.find("norm") != std::string::npos;
    const double expected = name.ends_with("bias") ? 0 : is_norm ? 1 : joins ? 0.02 / 4 : 0.02;
    EXPECT_NEAR(deviation, expected, 0.05 * expected) << name;
  }
  // Head and embedding are drawn apart.
  EXPECT_GT(relative_error(model.head.value(), model.tokens.weight.value()), 0.5);
}

TEST(GPT, TiedHeadIsTheEmbedding) {
  GPT tied(small),
      free({.vocab_size = 7, .context = 6, .layers = 2, .heads = 2, .width = 8, .tied_head = false});
  EXPECT_EQ(&tied.head.value(), &tied.tokens.weight.value());
  EXPECT_EQ(free.parameter_count(), tied.parameter_count() + 7 * 8);
  EXPECT_EQ(free.named_parameters().back().name, "head.weight");
  EXPECT_EQ(tied.named_parameters().back().name, "norm.bias");
  EXPECT_EQ(tied.named_parameters()[4].name, "blocks.0.attention.qkv.weight");
}

TEST(GPT, LaterTokensChangeNothing) {
  Generator generator(3);
  const GPT model({.vocab_size = 7, .context = 6, .layers = 2, .heads = 2, .width = 8}, generator);
  Tensor tokens = randint({2, 6}, 0, 7, generator);
  const auto before = model(tokens).value().slice(1, 0, 4).to_vector<float>();
  tokens.slice(1, 4, 6).fill_(0);
  EXPECT_EQ(model(tokens).value().slice(1, 0, 4).to_vector<float>(), before);
  // Shorter inputs give the same as the beginning of longer ones, up to rounding.
  EXPECT_LT(relative_error(model(tokens.slice(1, 0, 4)).value(), model(tokens).value().slice(1, 0, 4)), 1e-5);
}

// Rotary codes alone tell places apart: without them a causal model of one layer would not see the order of
// what came before.
TEST(GPT, RotaryPlacesAreRelative) {
  Generator generator(6);
  GPTConfig config = small;
  config.rotary = true;
  config.layers = 1;
  GPT model(config, generator);
  randomize(model, 0.5, generator);
  const auto names = model.named_parameters();
  EXPECT_TRUE(std::none_of(names.begin(), names.end(),
                           [](const NamedParameter& entry) { return entry.name.starts_with("positions"); }));
  const Tensor tokens = Tensor::from<int64_t>({1, 2, 3, 4}, {1, 4}),
               swapped = Tensor::from<int64_t>({2, 1, 3, 4}, {1, 4});
  EXPECT_GT(relative_error(model(tokens).value().select(1, 3), model(swapped).value().select(1, 3)), 1e-3);
  // A place itself is not seen: among equal tokens, all get the same.
  const Tensor same = model(Tensor::full({1, 6}, 5, i64)).value();
  EXPECT_LT(relative_error(same.select(1, 5), same.select(1, 0)), 1e-12);
}

TEST(GPT, CachedFeaturesEqualThoseOfTheWhole) {
  for (const bool modern : {false, true}) {
    Generator generator(7);
    GPTConfig config = small;
    config.context = 9;
    config.rotary = config.swiglu = config.post_norm = modern;
    config.kv_heads = modern ? 1 : 0;
    if (modern) config.norm = NormKind::rms;
    GPT model(config, generator);
    randomize(model, 0.5, generator);
    const Tensor tokens = randint({2, 9}, 0, 7, generator);
    const Tensor whole = model.features(tokens).value();
    GPTCache cache;
    int64_t at = 0;
    for (int64_t count : {3, 1, 2, 1, 2}) {
      const Tensor part = model.features(tokens.slice(1, at, at + count), cache).value();
      EXPECT_EQ(part.shape(), (Shape{2, count, 8}));
      EXPECT_LT(relative_error(part, whole.slice(1, at, at + count)), 1e-13) << at;
      at += count;
    }
    EXPECT_EQ(cache.length, 9);
    EXPECT_ERROR(model.features(tokens.slice(1, 0, 1), cache), Shape,
                 "at most 9 tokens (the context), got 10");
    GPTCache other;
    model.features(tokens.slice(1, 0, 2), other);
    EXPECT_ERROR(model.features(tokens.slice(0, 0, 1).slice(1, 0, 1), other), Shape,
                 "batch 2 as in the cache");
    const Tape tape;
    EXPECT_ERROR(model.features(tokens.slice(1, 0, 1), other), Value, "a cache passes no gradients");
  }
}

TEST(GPT, LossCountsOnlyTargetsThatAreThere) {
  Generator generator(4);
  const GPT model(small, generator);
  const Tensor tokens = randint({2, 6}, 0, 7, generator);
  Tensor targets = randint({2, 6}, 0, 7, generator);
  targets.select(0, 1).fill_(ignore_none);
  const double half = model.loss(tokens, targets).item();
  EXPECT_NEAR(half, model.loss(tokens.slice(0, 0, 1), targets.slice(0, 0, 1)).item(), 1e-12);
}

TEST(GPT, DropoutFollowsTrain) {
  manual_seed(5);
  GPTConfig config = small;
  config.dropout = 0.3;
  GPT model(config);
  const Tensor tokens = randint({2, 6}, 0, 7);
  EXPECT_NE(model(tokens).value().to_vector<double>(), model(tokens).value().to_vector<double>());
  model.train(false);
  EXPECT_EQ(model(tokens).value().to_vector<double>(), model(tokens).value().to_vector<double>());
}

TEST(GPT, RefusesWhatDoesNotFit) {
  const GPT model(small);
  EXPECT_ERROR(model(Tensor::zeros({1, 7}, i64)), Shape,
               "[gpt] expected at most 6 tokens (the context), got 7");
  EXPECT_ERROR(model(Tensor::zeros({6}, i64)), Shape, "[gpt] expected tokens [B, T], got [6]");
  EXPECT_ERROR(model(Tensor::full({1, 6}, 7, i64)), Value, "7");
  EXPECT_ERROR(model(Tensor::full({1, 6}, -1, i64)), Value, "-1");
  EXPECT_ERROR(model.loss(Tensor::zeros({1, 6}, i64), Tensor::full({1, 6}, 7, i64)), Value, "7");
  EXPECT_ERROR(GPT({.layers = 0}), Value, "[gpt] vocab_size, context and layers must be positive");
  EXPECT_ERROR(GPT({.heads = 3}), Shape, "128 channels do not divide into 3 heads");
}

}  // namespace
}  // namespace torus
