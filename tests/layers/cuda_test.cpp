// Models on a CUDA device against the same models on the CPU. Skipped without a device.
#include <gtest/gtest.h>

#include <cmath>

#include "layers/compare.h"
#include "torus/autograd/gradcheck.h"
#include "torus/layers/captured_step.h"
#include "torus/layers/checkpoint.h"
#include "torus/layers/generate.h"
#include "torus/layers/gpt.h"
#include "torus/layers/grid.h"
#include "torus/layers/optim.h"
#include "torus/layers/training.h"
#include "torus/ops/attention/attention.h"

namespace torus {
namespace {

class CudaModel : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
    manual_seed(3);
  }
};

GPTConfig config_of(int kind, DType dtype) {
  GPTConfig config{.vocab_size = 37, .context = 50, .layers = 2, .heads = 4, .width = 64, .dtype = dtype};
  if (kind == 1) {
    config.kv_heads = 2, config.norm = NormKind::rms, config.swiglu = true, config.rotary = true;
    config.bias = false, config.tied_head = false;
  }
  if (kind == 2) config.post_norm = true;
  return config;
}

TEST_F(CudaModel, GptHasTheLossAndGradientsOfTheCpu) {
  for (DType dtype : {f64, f32})
    for (int kind = 0; kind < 3; ++kind) {
      const double tolerance = dtype == f64 ? 1e-11 : 1e-4;
      Generator generator(7);
      GPT here(config_of(kind, dtype), generator);
      generator = Generator(7);
      GPT there(config_of(kind, dtype), generator);
      there.to(cuda);
      const Tensor tokens = randint({5, 50}, 0, 37), targets = randint({5, 50}, 0, 37);
      Tape tape;
      const Variable loss = here.loss(tokens, targets), device_loss = there.loss(tokens, targets);
      EXPECT_NEAR(device_loss.item(), loss.item(), tolerance * loss.item());
      tape.backward(loss);
      tape.backward(device_loss);
      EXPECT_LT(relative_error(flat_gradients(there), flat_gradients(here)), tolerance) << dtype << kind;
    }
}

TEST_F(CudaModel, SixteenBitsStayNearF32) {
  for (DType dtype : {bf16, f16}) {
    Generator generator(7);
    GPT exact(config_of(0, f32), generator), narrow(config_of(0, dtype), generator);
    auto wide = exact.named_parameters(), thin = narrow.named_parameters();
    for (size_t i = 0; i < wide.size(); ++i) {
      thin[i].parameter.mutable_value().copy_(wide[i].parameter.value());
      wide[i].parameter.mutable_value().copy_(thin[i].parameter.value());  // rounded alike
    }
    narrow.to(cuda);
    const Tensor tokens = randint({5, 50}, 0, 37), targets = randint({5, 50}, 0, 37);
    Tape tape;
    const Variable loss = exact.loss(tokens, targets), device_loss = narrow.loss(tokens, targets);
    EXPECT_NEAR(device_loss.item(), loss.item(), 0.02 * loss.item());
    tape.backward(loss);
    tape.backward(device_loss);
    EXPECT_LT(relative_error(flat_gradients(narrow), flat_gradients(exact)), dtype == f16 ? 0.02 : 0.06)
        << dtype;
  }
}

// The losses of steps taken by `how`, and the weights after them.
struct Trained {
  std::vector<double> losses, weights;
  bool captured = false;
};

Trained train(Device device, bool capture, double dropout, int steps) {
  manual_seed(11);
  GPTConfig config = config_of(0, f32);
  config.dropout = dropout;
  Generator generator(7);
  GPT model(config, generator);
  model.to(device);
  AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
  Tensor tokens = Tensor::zeros({4, 50}, i64, device), targets = Tensor::zeros({4, 50}, i64, device);
  Tensor last = Tensor::zeros({}, f32, device);
  const auto one = [&] {
    Tape tape;
    const Variable loss = model.loss(tokens, targets);
    tape.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    last.copy_(loss.value());
  };
  CapturedStep step(device, one);
  Trained run;
  Generator batches(5);
  for (int i = 0; i < steps; ++i) {
    tokens.copy_(randint({4, 50}, 0, 37, batches));
    targets.copy_(randint({4, 50}, 0, 37, batches));
    optimizer.set_lr(1e-2 / (1 + i));
    capture ? step() : one();
    run.losses.push_back(last.item());
  }
  run.captured = step.captured();
  if (capture) {
    EXPECT_EQ(step.why_not().empty(), device.kind == DeviceKind::cuda) << step.why_not();
  }
  run.weights = flat_values(model);
  return run;
}

TEST_F(CudaModel, ACapturedStepRepeatsTheOrdinaryOneBitForBit) {
  for (double dropout : {0.0, 0.2}) {
    const Trained ordinary = train(cuda, false, dropout, 8), captured = train(cuda, true, dropout, 8);
    EXPECT_TRUE(captured.captured);
    EXPECT_EQ(captured.losses, ordinary.losses);
    EXPECT_EQ(captured.weights, ordinary.weights);
  }
}

TEST_F(CudaModel, TrainsAsOnTheCpu) {
  const Trained there = train(cuda, true, 0.2, 8), here = train(cpu, true, 0.2, 8);
  for (size_t i = 0; i < here.losses.size(); ++i) EXPECT_NEAR(there.losses[i], here.losses[i], 1e-3);
}

TEST_F(CudaModel, ACapturedStepUpdatesAnAverage) {
  for (DType dtype : {f32, bf16}) {
    std::vector<double> averages[2];
    for (bool capture : {false, true}) {
      manual_seed(11);
      Generator generator(7), batches(5);
      GPT model(config_of(0, dtype), generator);
      model.to(cuda);
      AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
      ExponentialMovingAverage average(model.named_parameters(), 0.75);
      Tensor tokens = Tensor::zeros({4, 50}, i64, cuda);
      const auto one = [&] {
        Tape tape;
        tape.backward(model.loss(tokens, tokens));
        optimizer.step();
        optimizer.zero_grad();
        average.update();
      };
      CapturedStep step(cuda, one);
      for (int i = 0; i < 6; ++i) {
        tokens.copy_(randint({4, 50}, 0, 37, batches));
        capture ? step() : one();
        average.swap_in();  // between replays, as to evaluate
        average.swap_out();
      }
      EXPECT_EQ(step.captured(), capture) << step.why_not();
      for (const Tensor& each : average.averages())
        for (double value : each.to_vector<double>()) averages[capture].push_back(value);
    }
    EXPECT_EQ(averages[true], averages[false]) << dtype;
  }
}

// Each has the results and takes the draws that it would have as an ordinary step.
TEST_F(CudaModel, WhatCannotBeCapturedRunsAsItIsAndSaysWhy) {
  struct Run {
    Tensor sum = Tensor::zeros({2, 3}, f32, cuda);
    Generator first{1}, second{2};
    int steps = 0;
    std::vector<Tensor> kept;  // as long as the next step's

    void add(const Tensor& x) { add_into(sum, x); }
    void drop(Generator& generator) {
      add(dropout(Tensor::full({2, 3}, 1, f32, cuda), 0.5, generator).value());
    }
  };
  struct Kind {
    const char* why;
    std::function<void(Run&)> what;
  };
  const auto attend = [](Run& run, const Mask& mask) {
    const Tensor x = run.sum.clone().reshape({1, 1, 2, 3});
    run.add(attention(x, x, x, {.mask = mask, .backend = Backend::cuda_simt}).out.value().reshape({2, 3}));
  };
  const std::vector<Kind> kinds = {
      {"a copy to the host",
       [](Run& run) {
         run.add(Tensor::full({}, run.sum.to(cpu).select(0, 0).select(0, 1).item(), f32, cuda));
       }},
      {"synchronize", [](Run&) { synchronize(cuda); }},
      {"release_cached_memory", [](Run&) { release_cached_memory(cuda); }},
      {"copies from the host",
       [](Run& run) {
         run.add(Tensor::full({2, 3}, run.steps).to(cuda));
       }},
      {"copies from the host",
       [](Run& run) {
         run.add(randn({2, 3}, 0, 1, f32, run.first).to(cuda));
       }},
      {"copies from the host",
       [&](Run& run) { attend(run, Mask::from([](Query q, Key k) { return q.token >= k.token; })); }},
      {"more than one generator", [](Run& run) { run.drop(run.second); }},
      {"more than 4096 numbers",
       [](Run& run) {
         for (int i = 0; i < 4200; ++i) run.drop(run.first);
       }},
      // In the run to be captured alone.
      {"copies from the host",
       [](Run& run) {
         if (run.steps == 3) run.add(Tensor::full({2, 3}, 5).to(cuda));
       }},
      {"captures another",
       [](Run& run) {
         CapturedStep inner(cuda, [&] { run.add(Tensor::full({2, 3}, 2, f32, cuda)); });
         for (int i = 0; i < 4; ++i) inner();
       }},
  };
  for (const Kind& kind : kinds) {
    SCOPED_TRACE(kind.why);
    const int64_t before = memory_stats(cuda).live_bytes;
    {
      Run ordinary, captured;
      const auto step = [&](Run& run) {
        ++run.steps;
        run.drop(run.first);
        run.kept = {run.sum.clone()};
        kind.what(run);
        run.add(run.kept[0]);
        run.drop(run.first);
        run.kept.push_back(run.sum.clone());
      };
      CapturedStep by_capture(cuda, [&] { step(captured); });
      for (int i = 0; i < 6; ++i) {
        step(ordinary);
        by_capture();
        EXPECT_EQ(captured.sum.to_vector<float>(), ordinary.sum.to_vector<float>()) << i;
        EXPECT_EQ(captured.kept[1].to_vector<float>(), ordinary.kept[1].to_vector<float>()) << i;
      }
      EXPECT_EQ(captured.steps, ordinary.steps);
      EXPECT_EQ(captured.first.state(), ordinary.first.state());
      EXPECT_EQ(captured.second.state(), ordinary.second.state());
      EXPECT_FALSE(by_capture.captured());
      EXPECT_NE(by_capture.why_not().find(kind.why), std::string::npos) << by_capture.why_not();
    }
    EXPECT_EQ(memory_stats(cuda).live_bytes, before);
  }
}

// An error of the step's own is no reason not to capture it, and what comes before it has run.
TEST_F(CudaModel, AStepThatThrowsIsCapturedTheNextTime) {
  Tensor x = Tensor::zeros({3}, f32, cuda);
  int calls = 0;
  CapturedStep step(cuda, [&] {
    add_into(x, Tensor::full({3}, 1, f32, cuda));
    if (++calls == 3) throw std::runtime_error("mine");
  });
  step();
  step();
  EXPECT_THROW(step(), std::runtime_error);
  EXPECT_EQ(x.select(0, 0).item(), 3);
  for (int i = 4; i < 8; ++i) {
    step();
    EXPECT_EQ(x.select(0, 0).item(), i);
  }
  EXPECT_TRUE(step.captured()) << step.why_not();
}

TEST_F(CudaModel, AStepThatWaitsRunsUncapturedAndSaysWhy) {
  Tensor x = Tensor::zeros({3}, f32, cuda);
  double seen = -1;
  CapturedStep step(cuda, [&] {
    add_into(x, Tensor::full({3}, 1, f32, cuda));
    seen = x.select(0, 0).item();
  });
  for (int i = 1; i <= 5; ++i) {
    step();
    EXPECT_EQ(seen, i);
  }
  EXPECT_FALSE(step.captured());
  EXPECT_NE(step.why_not().find("a copy to the host"), std::string::npos) << step.why_not();
}

TEST_F(CudaModel, LeavesNoMemoryBehind) {
  train(cuda, true, 0.1, 5);  // what is kept for good, as counters of kernels, is there now
  const int64_t before = memory_stats(cuda).live_bytes;
  train(cuda, true, 0.1, 5);
  EXPECT_EQ(memory_stats(cuda).live_bytes, before);
}

TEST_F(CudaModel, CheckpointsMoveBetweenDevices) {
  Generator generator(7);
  GPT model(config_of(0, f32), generator), back(config_of(0, f32), generator);
  model.to(cuda);
  AdamW optimizer(model.named_parameters()), other(back.named_parameters());
  Tape tape;
  tape.backward(model.loss(randint({2, 20}, 0, 37), randint({2, 20}, 0, 37)));
  optimizer.step();
  restore(make_checkpoint(model, optimizer), back, other);
  EXPECT_EQ(flat_values(back), flat_values(model));
  EXPECT_EQ(other.states()[0].first.to_vector<double>(), optimizer.states()[0].first.to_vector<double>());
  EXPECT_EQ(other.states()[0].steps, 1);
}

TEST_F(CudaModel, GeneratesWhatTheCpuGenerates) {
  Generator generator(7);
  GPT here(config_of(1, f64), generator);
  generator = Generator(7);
  GPT there(config_of(1, f64), generator);
  there.to(cuda);
  const Tensor prompts = randint({3, 4}, 0, 37);
  const GenerateOptions options{.count = 60, .temperature = 0};
  EXPECT_EQ(generate(there, prompts, options).to_vector<int64_t>(),
            generate(here, prompts, options).to_vector<int64_t>());
}

TEST_F(CudaModel, GridTransformerAgreesWithTheCpu) {
  const GridTransformerBlockOptions options{
      .attention = {.channels = 16, .heads = 2, .window = {3, 3}, .dtype = f64}};
  Generator generator(7);
  GridTransformerBlock here(options, generator);
  generator = Generator(7);
  GridTransformerBlock there(options, generator);
  there.to(cuda);
  const Tensor x = randn({2, 7, 6, 16}, 0, 1, f64), g = randn({2, 7, 6, 16}, 0, 1, f64);
  Tape tape;
  const Variable a(x, true), b(x.to(cuda), true);
  const Variable y = here(a), z = there(b);
  EXPECT_LT(relative_error(z.value(), y.value()), 1e-11);
  tape.backward(y, {.seed = g});
  tape.backward(z, {.seed = g.to(cuda)});
  EXPECT_LT(relative_error(b.grad(), a.grad()), 1e-10);
  EXPECT_LT(relative_error(flat_gradients(there), flat_gradients(here)), 1e-10);
}

TEST_F(CudaModel, GradcheckRunsOnTheDevice) {
  const auto report = gradcheck(
      [](const std::vector<Variable>& x) {
        return std::vector<Variable>{layer_norm(gelu(matmul(x[0], x[1])), x[2])};
      },
      {randn({3, 4}, 0, 1, f64).to(cuda), randn({4, 5}, 0, 1, f64).to(cuda), randn({5}, 0, 1, f64).to(cuda)});
  EXPECT_TRUE(report) << report;
}

}  // namespace
}  // namespace torus
