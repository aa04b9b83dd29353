// Properties of whole training steps.
#include "torus/layers/training.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <map>

#include "core/expect_error.h"
#include "layers/compare.h"
#include "torus/core/memory.h"
#include "torus/core/parallel.h"
#include "torus/layers/gpt.h"
#include "torus/layers/optim.h"

namespace torus {
namespace {

// A pattern to learn: each token is the one before plus one.
Tensor counting_tokens(Generator& generator) {
  const auto first = randint({8, 1}, 0, 19, generator).to_vector<int64_t>();
  Tensor tokens = Tensor::empty({8, 25}, i64);
  int64_t* to = tokens.mutable_data<int64_t>();
  for (int64_t i = 0; i < 8 * 25; ++i) to[i] = (first[static_cast<size_t>(i / 25)] + i % 25) % 19;
  return tokens;
}

struct Trainer {
  explicit Trainer(double dropout)
      : model({.vocab_size = 19, .context = 24, .layers = 2, .heads = 4, .width = 48, .dropout = dropout},
              generator),
        optimizer(model.named_parameters(), {.lr = 3e-3}) {}

  double step() {
    const Tensor tokens = counting_tokens(data);
    Tape tape;
    const Variable loss = model.loss(tokens.slice(1, 0, 24), tokens.slice(1, 1, 25));
    tape.backward(loss);
    clip_grad_norm(model.parameters(), 1);
    optimizer.step();
    optimizer.zero_grad();
    return loss.item();
  }

  Generator generator{1}, data{2};
  GPT model;
  AdamW optimizer;
};

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(Training, LearnsAndHoldsNoMoreAfter200Steps) {
  manual_seed(3);
  Trainer run(0.1);
  const double first = run.step();
  double last = 0;
  for (int i = 1; i < 20; ++i) run.step();
  const MemoryStats before = memory_stats();
  const int64_t resident = resident_bytes();
  for (int i = 0; i < 200; ++i) last = run.step();
  const MemoryStats after = memory_stats();
  EXPECT_NEAR(first, std::log(19), 0.2);
  EXPECT_LT(last, 1);
  EXPECT_EQ(after.live_bytes, before.live_bytes);
  EXPECT_EQ(after.live_blocks, before.live_blocks);
  EXPECT_LE(after.peak_bytes, before.peak_bytes);
  // Sanitizers keep freed memory aside for a while.
#ifndef __SANITIZE_ADDRESS__
  EXPECT_LT(resident_bytes() - resident, 2 << 20);
#else
  (void)resident;
#endif
}

TEST(Training, GivesEqualBitsForAnyThreadCount) {
  const int threads = num_threads();
  std::vector<std::vector<double>> results;
  for (int count : {1, 2, 3}) {
    set_num_threads(count);
    manual_seed(4);
    Trainer run(0.2);
    std::vector<double> losses;
    for (int i = 0; i < 10; ++i) losses.push_back(run.step());
    const auto values = flat_values(run.model);
    losses.insert(losses.end(), values.begin(), values.end());
    results.push_back(losses);
  }
  set_num_threads(threads);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(BackwardMean, OneBatchEqualsItsParts) {
  Generator generator(5);
  GPT model({.vocab_size = 7, .context = 6, .layers = 2, .heads = 2, .width = 8, .dtype = f64}, generator);
  randomize(model, 0.4, generator);
  const Tensor tokens = randint({12, 6}, 0, 7, generator), targets = randint({12, 6}, 0, 7, generator);
  std::vector<double> losses;
  std::vector<std::vector<double>> gradients;
  for (int64_t parts : {1, 2, 3, 12}) {
    const int64_t rows = 12 / parts;
    model.zero_grad();
    losses.push_back(backward_mean(parts, [&](int64_t i) {
      return model.loss(tokens.slice(0, i * rows, (i + 1) * rows),
                        targets.slice(0, i * rows, (i + 1) * rows));
    }));
    gradients.push_back(flat_gradients(model));
    EXPECT_NEAR(losses.back(), losses[0], 1e-12 * losses[0]) << parts;
    EXPECT_LT(relative_error(gradients.back(), gradients[0]), 1e-12) << parts;
  }
  // The same once more, scaled, on top.
  backward_mean(
      1, [&](int64_t) { return model.loss(tokens, targets); }, 3);
  auto expected = gradients[0];
  for (double& value : expected) value *= 4;
  EXPECT_LT(relative_error(flat_gradients(model), expected), 1e-12);
  EXPECT_ERROR(backward_mean(0, [&](int64_t) { return Variable(); }), Value, "at least one loss, got 0");
}

// Where some targets do not count, parts weigh by those that do.
TEST(BackwardMean, OneBatchEqualsItsPartsOfUnequalCounts) {
  Generator generator(6);
  GPT model({.vocab_size = 7, .context = 6, .layers = 1, .heads = 2, .width = 8, .dtype = f64}, generator);
  randomize(model, 0.4, generator);
  const Tensor tokens = randint({6, 6}, 0, 7, generator);
  Tensor targets = randint({6, 6}, 0, 7, generator);
  targets.slice(0, 1, 2).fill_(ignore_none);                 // one part has none
  targets.slice(0, 2, 4).slice(1, 0, 5).fill_(ignore_none);  // few
  targets.slice(0, 4, 5).slice(1, 0, 6, 2).fill_(ignore_none);
  EXPECT_EQ(counted_targets(targets), 6 + 2 + 3 + 6);
  EXPECT_ERROR(counted_targets(Tensor::zeros({2})), DType, "expected targets of i64, got f32");
  std::vector<double> losses;
  std::vector<std::vector<double>> gradients;
  for (int64_t parts : {1, 2, 3, 6}) {
    const auto part = [&](const Tensor& all, int64_t i) {
      return all.slice(0, i * 6 / parts, (i + 1) * 6 / parts);
    };
    std::vector<double> counts;
    for (int64_t i = 0; i < parts; ++i)
      counts.push_back(static_cast<double>(counted_targets(part(targets, i))));
    model.zero_grad();
    losses.push_back(
        backward_mean(counts, [&](int64_t i) { return model.loss(part(tokens, i), part(targets, i)); }));
    gradients.push_back(flat_gradients(model));
    EXPECT_NEAR(losses.back(), losses[0], 1e-12 * losses[0]) << parts;
    EXPECT_LT(relative_error(gradients.back(), gradients[0]), 1e-12) << parts;
  }
  const auto never = [](int64_t) -> Variable { fail(Error::Kind::Value, "called"); };
  EXPECT_EQ(backward_mean({0., 0.}, never), 0);
  EXPECT_ERROR(backward_mean({1., -1.}, never), Value, "expected finite weights of at least 0, got -1");
  EXPECT_ERROR(backward_mean(std::vector<double>(), never), Value, "expected at least one loss, got 0");
}

TEST(ExponentialMovingAverage, AveragesAndSwaps) {
  Parameter a(Tensor::from<double>({1, 2})), b(Tensor::full({2}, 3, bf16));
  ExponentialMovingAverage average({{"a", a}, {"b", b}}, 0.75);
  std::vector<double> expected_a = {1, 2};
  double expected_b = 3;
  for (int step = 1; step <= 4; ++step) {
    a.mutable_value().copy_(Tensor::from<double>({1.0 * step, -2.0 * step}));
    b.mutable_value().fill_(step);
    average.update();
    expected_a = {0.75 * expected_a[0] + 0.25 * step, 0.75 * expected_a[1] - 0.5 * step};
    expected_b = 0.75 * expected_b + 0.25 * step;
  }
  EXPECT_LT(relative_error(average.averages()[0].to_vector<double>(), expected_a), 1e-14);
  EXPECT_EQ(average.averages()[1].dtype(), f32);
  EXPECT_NEAR(average.averages()[1].to_vector<double>()[0], expected_b, 1e-6);
  EXPECT_ERROR(average.swap_out(), Value, "[ema] the averages are not swapped in");
  average.swap_in();
  EXPECT_LT(relative_error(a.value().to_vector<double>(), expected_a), 1e-14);
  EXPECT_EQ(b.dtype(), bf16);
  EXPECT_NEAR(b.value().to_vector<double>()[1], expected_b, 0.01);
  EXPECT_ERROR(average.swap_in(), Value, "swapped in already");
  EXPECT_ERROR(average.update(), Value, "swap them out to update them");
  average.swap_out();
  EXPECT_EQ(a.value().to_vector<double>(), (std::vector<double>{4, -8}));
  EXPECT_EQ(b.value().to_vector<double>(), (std::vector<double>{4, 4}));
  EXPECT_LT(relative_error(average.averages()[0].to_vector<double>(), expected_a), 1e-14);
  EXPECT_ERROR(ExponentialMovingAverage({}, 1), Value, "[ema] expected 0 <= decay < 1, got 1");
  EXPECT_ERROR(ExponentialMovingAverage({{"a", a}, {"a", b}}, 0.9), Value,
               "[ema] expected a name a parameter, got two a");
}

TEST(ExponentialMovingAverage, UpdatesInPlace) {
  Parameter p(Tensor::full({1}, 1));
  ExponentialMovingAverage average({{"p", p}}, 0.5);
  const Tensor held = average.averages()[0];
  p.mutable_value().fill_(3);
  average.update();
  EXPECT_EQ(held.item(), 2);
  EXPECT_EQ(p.item(), 3);
}

// A step while the averages are in is said, and changes neither the average nor the parameter.
TEST(ExponentialMovingAverage, WritesWhileSwappedAreCaught) {
  for (DType dtype : {f32, bf16})
    for (bool replaced : {false, true}) {
      Parameter p(Tensor::full({1}, 1, dtype));
      ExponentialMovingAverage average({{"p", p}}, 0.5);
      average.swap_in();
      if (replaced)
        p.mutable_value() = Tensor::full({1}, 9, dtype);
      else
        p.mutable_value().fill_(9);
      EXPECT_ERROR(average.swap_out(), Version, "[ema] expected nothing to write to the parameters");
      EXPECT_EQ(p.item(), 1);
      EXPECT_EQ(average.averages()[0].item(), 1);
      average.update();  // and is usable
      average.swap_in();
      average.swap_out();
    }
}

TEST(ExponentialMovingAverage, Restores) {
  Parameter a(Tensor::from<double>({1, 2})), b(Tensor::full({2}, 3, bf16));
  ExponentialMovingAverage first({{"a", a}, {"b", b}}, 0.75), second({{"b", b}, {"a", a}}, 0.75);
  a.mutable_value().fill_(5);
  b.mutable_value().fill_(7);
  first.update();
  second.restore(first.named_averages());
  for (const auto& [name, average] : second.named_averages())
    EXPECT_EQ(average.to_vector<double>(), first.named_averages().at(name).to_vector<double>());
  second.update();  // of its own memory
  EXPECT_EQ(first.averages()[0].to_vector<double>(), (std::vector<double>{2, 2.75}));
  EXPECT_ERROR(second.restore({}), Value, "[ema] expected the averages of 2 parameters, got 0");
  EXPECT_ERROR(second.restore({{"a", a.value()}, {"c", b.value()}}), Value,
               "[ema] expected the average of b, got none");
  EXPECT_ERROR(second.restore({{"a", Tensor::zeros({3})}, {"b", b.value()}}), Value,
               "[ema] expected the average of a to be floating [2], got f32 [3]");
}

TEST(MeanLoss, EvaluatesWithoutDropoutOrTape) {
  Trainer run(0.5);
  std::vector<Tensor> batches;
  for (int i = 0; i < 3; ++i) batches.push_back(counting_tokens(run.data));
  const auto loss = [&](const Tensor& tokens) {
    return run.model.loss(tokens.slice(1, 0, 24), tokens.slice(1, 1, 25));
  };
  const Tape tape;
  const double mean = mean_loss(run.model, batches, loss);
  EXPECT_EQ(tape.recorded_nodes(), 0);
  EXPECT_TRUE(run.model.training());
  EXPECT_EQ(mean, mean_loss(run.model, batches, loss));
  run.model.train(false);
  double total = 0;
  for (const Tensor& tokens : batches) total += loss(tokens).item();
  EXPECT_EQ(mean, total / 3);
  mean_loss(run.model, batches, loss);
  EXPECT_FALSE(run.model.training());
  // Each module has its own mode back.
  run.model.train();
  run.model.blocks[0].train(false);
  mean_loss(run.model, batches, loss);
  for (Module* module : run.model.blocks[0].modules()) EXPECT_FALSE(module->training());
  EXPECT_TRUE(run.model.training() && run.model.blocks[1].mlp.training());
  EXPECT_ERROR(mean_loss(run.model, std::vector<Tensor>(), loss), Value, "at least one batch, got none");
}

// ------------------------------------------------------------------------------------------- mixed precision

struct MixedTrainer {
  explicit MixedTrainer(DType dtype)
      : model({.vocab_size = 19, .context = 24, .layers = 2, .heads = 4, .width = 48, .dtype = dtype},
              generator),
        weights(model.named_parameters()),
        optimizer(weights.masters(), {.lr = 3e-3}) {}

  // The loss; NaN where the step was skipped.
  double step() {
    const Tensor tokens = counting_tokens(data);
    const double loss = backward_mean(
        2,
        [&](int64_t i) {
          const Tensor part = tokens.slice(0, 4 * i, 4 * i + 4);
          return model.loss(part.slice(1, 0, 24), part.slice(1, 1, 25));
        },
        scale.value());
    weights.take_gradients(1 / scale.value());
    std::vector<Parameter> masters;
    for (const auto& [name, parameter] : weights.masters()) masters.push_back(parameter);
    const bool good = scale.update(std::isfinite(clip_grad_norm(masters, 1)));
    if (good) optimizer.step();
    optimizer.zero_grad();
    weights.publish();
    return good ? loss : NAN;
  }

  Generator generator{1}, data{2};
  GPT model;
  MasterWeights weights;
  AdamW optimizer;
  LossScale scale{{.interval = 50}};
};

TEST(MixedPrecision, LossFollowsThatOfF32) {
  std::map<DType, std::vector<double>> curves;
  for (DType dtype : {f32, bf16, f16}) {
    MixedTrainer run(dtype);
    for (int i = 0; i < 120; ++i) curves[dtype].push_back(run.step());
    EXPECT_EQ(run.model.tokens.weight.dtype(), dtype);
    for (const auto& [name, master] : run.weights.masters()) EXPECT_EQ(master.dtype(), f32);
  }
  EXPECT_LT(curves[f32].back(), 1);
  for (DType dtype : {bf16, f16}) {
    double difference = 0;
    int counted = 0;
    for (size_t i = 0; i < 120; ++i) {
      if (std::isnan(curves[dtype][i])) continue;
      difference += std::abs(curves[dtype][i] - curves[f32][i]);
      ++counted;
    }
    EXPECT_LT(difference / counted, 0.06) << dtype;
    EXPECT_NEAR(curves[dtype].back(), curves[f32].back(), 0.1) << dtype;
    EXPECT_NE(curves[dtype], curves[f32]);
    EXPECT_GE(counted, dtype == bf16 ? 120 : 110);
  }
}

// What a 16-bit weight of 1 would lose: changes of less than its rounding.
TEST(MasterWeights, KeepSmallChanges) {
  Parameter narrow(Tensor::full({3}, 1, bf16)), wide(Tensor::full({3}, 1, f64));
  MasterWeights weights({{"narrow", narrow}, {"wide", wide}});
  SGD optimizer(weights.masters(), {.lr = 1});
  for (int i = 0; i < 64; ++i) {
    narrow.mutable_grad() = Tensor::full({3}, 1, bf16);
    wide.mutable_grad() = Tensor::full({3}, 1, f64);
    weights.take_gradients(0.5 / 1024);
    // A second micro-batch adds to the first.
    narrow.mutable_grad() = Tensor::full({3}, 1, bf16);
    wide.mutable_grad() = Tensor::full({3}, 1, f64);
    weights.take_gradients(0.5 / 1024);
    EXPECT_FALSE(narrow.grad().defined() || wide.grad().defined());
    optimizer.step();
    optimizer.zero_grad();
    weights.publish();
  }
  EXPECT_EQ(narrow.value().to_vector<double>(), std::vector<double>(3, 1 - 64.0 / 1024));
  EXPECT_EQ(narrow.dtype(), bf16);
  EXPECT_EQ(wide.value().to_vector<double>(), std::vector<double>(3, 1 - 64.0 / 1024));
  EXPECT_EQ(wide.value().storage(), weights.masters()[1].parameter.value().storage());
}

TEST(LossScale, HalvesAndDoubles) {
  LossScale scale({.initial = 8, .interval = 3});
  const auto after = [&](const std::vector<bool>& steps) {
    for (bool finite : steps) EXPECT_EQ(scale.update(finite), finite);
    return scale.value();
  };
  EXPECT_EQ(after({true, true}), 8);
  EXPECT_EQ(after({true}), 16);
  EXPECT_EQ(after({true, true, false}), 8);  // the count starts again
  EXPECT_EQ(after({true, true}), 8);
  EXPECT_EQ(after({true}), 16);
  EXPECT_EQ(after({false, false, false, false, false}), 0.5);
  EXPECT_ERROR(LossScale({.growth = 1}), Value, "growth > 1");
}

// Gradients that f16 rounds to 0 survive with a scale; those that it makes infinite skip the step.
TEST(LossScale, SavesSmallGradientsAndSkipsInfinite) {
  Parameter p(Tensor::zeros({2}, f16));
  MasterWeights weights({{"p", p}});
  SGD optimizer(weights.masters(), {.lr = 1});
  const auto step = [&](LossScale& scale, double factor) {
    backward_mean(
        1, [&](int64_t) { return mean(p * factor * factor); }, scale.value());
    weights.take_gradients(1 / scale.value());
    const Parameter master = weights.masters()[0].parameter;
    const bool good = scale.update(std::isfinite(clip_grad_norm({master}, INFINITY)));
    if (good) optimizer.step();
    optimizer.zero_grad();
    weights.publish();
    return good;
  };
  const auto master = [&] { return weights.masters()[0].parameter.value().to_vector<double>()[0]; };
  LossScale none({.initial = 1}), scale({.initial = 32768});
  EXPECT_TRUE(step(none, 1e-4));
  EXPECT_EQ(master(), 0);
  EXPECT_TRUE(step(scale, 1e-4));
  EXPECT_NEAR(master(), -0.5e-8, 1e-11);
  const double before = master();
  EXPECT_FALSE(step(scale, 4));
  EXPECT_EQ(scale.value(), 16384);
  EXPECT_EQ(master(), before);
  // 8 times the scale has to be below 65504.
  for (bool good : {false, false, true, true}) EXPECT_EQ(step(scale, 4), good);
  EXPECT_NEAR(master(), -16, 1e-5);
  EXPECT_EQ(p.value().to_vector<double>()[0], -16);
}

// The same without a master outside of the optimizer.
TEST(LossScale, TheOptimizerDividesByIt) {
  Parameter p(Tensor::zeros({2}, f16));
  SGD optimizer({{"p", p}}, {.lr = 1});
  const auto step = [&](LossScale& scale, double factor) {
    const double before = scale.value();
    Tape tape;
    const Variable loss = mean(p * factor * factor);
    tape.backward(loss, {.seed = scale.tensor().to(loss.dtype())});
    const Tensor norm = grad_norm({p});
    optimizer.step({.grad_norm = norm, .loss_scale = scale.tensor()});
    scale.update(norm);
    optimizer.zero_grad();
    return scale.value() >= before;
  };
  const auto master = [&] { return optimizer.states()[0].master.to_vector<double>()[0]; };
  LossScale none({.initial = 1}), scale({.initial = 32768, .interval = 3});
  EXPECT_TRUE(step(none, 1e-4));
  EXPECT_EQ(master(), 0);
  EXPECT_TRUE(step(scale, 1e-4));
  EXPECT_NEAR(master(), -0.5e-8, 1e-11);
  const double before = master();
  for (bool good : {false, false, false, true, true}) EXPECT_EQ(step(scale, 4), good);
  EXPECT_NEAR(master(), before - 16, 1e-5);
  EXPECT_EQ(scale.value(), 4096);
  EXPECT_TRUE(step(scale, 1));
  EXPECT_EQ(scale.value(), 8192);
  EXPECT_EQ(optimizer.states()[0].steps, 5);
  EXPECT_ERROR(scale.update(Tensor::scalar(1)), Value, "expected one element of f64");
}

}  // namespace
}  // namespace torus
