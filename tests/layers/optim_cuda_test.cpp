// Optimizers, clipping and master weights on CUDA against the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "core/expect_error.h"
#include "layers/compare.h"
#include "torus/core/memory.h"
#include "torus/core/random.h"
#include "torus/layers/optim.h"
#include "torus/layers/training.h"

namespace torus {
namespace {

class OptimCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_available()) GTEST_SKIP() << "no CUDA device";
  }
};

// More than one table of tensors, sizes around the vectors and chunks, one without elements.
std::vector<Shape> shapes() {
  std::vector<Shape> result = {{1},    {3},    {4}, {64},       {100},   {768},
                               {1000}, {3, 7}, {0}, {130, 129}, {16384}, {3, 16385}};
  for (int i = 0; i < 150; ++i) result.push_back({i % 9 + 1, 5});
  return result;
}

std::vector<NamedParameter> make_parameters(DType dtype, Device device) {
  Generator generator(1);
  std::vector<NamedParameter> result;
  for (const Shape& shape : shapes())
    result.push_back({std::to_string(result.size()) + ".weight",
                      Parameter(randn(shape, 0, 1, dtype, generator).to(device))});
  // A view that is not row-major, and one that does not begin on a multiple of 16 bytes.
  result.push_back({"turned", Parameter(randn({40, 30}, 0, 1, dtype, generator).to(device).transpose(0, 1))});
  result.push_back(
      {"shifted", Parameter(randn({1001}, 0, 1, dtype, generator).to(device).slice(0, 1, 1001))});
  return result;
}

std::vector<Parameter> plain(const std::vector<NamedParameter>& named) {
  std::vector<Parameter> result;
  for (const auto& [name, parameter] : named) result.push_back(parameter);
  return result;
}

// `different` gradients of step `step`; some parameters have none.
void set_gradients(std::vector<NamedParameter>& parameters, int step, Device device) {
  Generator generator(100 + static_cast<uint64_t>(step));
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter& parameter = parameters[i].parameter;
    const Tensor grad = randn(parameter.shape(), 0, 1, parameter.dtype(), generator);
    parameter.zero_grad();
    if (i % 7 == 5 && step % 2 == 1) continue;
    parameter.mutable_grad() = grad.to(device);
  }
}

bool is_matrix(const NamedParameter& entry) {
  return entry.parameter.dim() == 2 && std::min(entry.parameter.size(0), entry.parameter.size(1)) > 2;
}

std::unique_ptr<Optimizer> make_optimizer(const std::string& name,
                                          const std::vector<NamedParameter>& parameters) {
  const std::vector<ParameterGroup> groups = {
      {[](const NamedParameter& entry) { return entry.name.starts_with("2"); }, 0.5, 2}};
  if (name == "adamw")
    return std::make_unique<AdamW>(parameters,
                                   AdamWOptions{.lr = 0.01, .weight_decay = 0.1, .groups = groups});
  if (name == "muon")
    return std::make_unique<Muon>(
        parameters,
        MuonOptions{.lr = 0.01, .weight_decay = 0.1, .groups = groups, .orthogonalizes = is_matrix});
  if (name == "lion") return std::make_unique<Lion>(parameters, LionOptions{.lr = 0.01, .groups = groups});
  return std::make_unique<SGD>(parameters, SGDOptions{.lr = 0.01,
                                                      .momentum = name == "sgd" ? 0 : 0.9,
                                                      .nesterov = name == "nesterov",
                                                      .weight_decay = 0.1,
                                                      .groups = groups});
}

struct Trained {
  std::vector<std::vector<double>> values, states;
  std::vector<int64_t> steps;
};

// Eight steps, clipped, two of which are skipped for a gradient that is not finite.
Trained train(const std::string& name, DType dtype, Device device) {
  auto parameters = make_parameters(dtype, device);
  const auto optimizer = make_optimizer(name, parameters);
  for (int step = 0; step < 8; ++step) {
    set_gradients(parameters, step, device);
    if (step == 0 || step == 4) parameters[3].parameter.mutable_grad().fill_(step == 0 ? INFINITY : NAN);
    optimizer->set_lr(0.01 / (step + 1));
    optimizer->step(
        {.grad_norm = grad_norm(plain(parameters)), .max_norm = step < 6 ? 10.0 : 1e6, .grad_scale = 0.5});
  }
  set_gradients(parameters, 8, device);
  optimizer->step();
  Trained trained;
  for (const auto& [label, parameter] : parameters)
    trained.values.push_back(parameter.value().to_vector<double>());
  for (const auto& state : optimizer->states()) {
    trained.steps.push_back(state.steps);
    for (const Tensor& tensor : {state.first, state.second, state.master})
      trained.states.push_back(tensor.defined() ? tensor.to_vector<double>() : std::vector<double>());
  }
  return trained;
}

TEST_F(OptimCuda, TrajectoriesAreThoseOfTheCpu) {
  for (const char* name : {"adamw", "sgd", "momentum", "nesterov", "lion", "muon"})
    for (DType dtype : {f64, f32, f16, bf16}) {
      const Trained expected = train(name, dtype, cpu), got = train(name, dtype, cuda),
                    again = train(name, dtype, cuda);
      EXPECT_EQ(got.steps, expected.steps) << name << ' ' << dtype;
      EXPECT_EQ(got.values, again.values) << name << ' ' << dtype;
      EXPECT_EQ(got.states, again.states) << name << ' ' << dtype;
      const double bound = dtype == f64 ? 1e-13 : dtype == f32 ? 3e-5 : dtype == f16 ? 1e-3 : 8e-3;
      // A sign of Lion may turn where the direction is nearly 0.
      const double loose = std::string(name) == "lion" && dtype != f64 ? 100 : 1;
      for (size_t i = 0; i < expected.values.size(); ++i)
        EXPECT_LE(relative_error(got.values[i], expected.values[i]), bound * loose)
            << name << ' ' << dtype << ' ' << i;
      for (size_t i = 0; i < expected.states.size(); ++i)
        EXPECT_LE(relative_error(got.states[i], expected.states[i]), (dtype == f64 ? 1e-13 : 5e-5) * loose)
            << name << ' ' << dtype << ' ' << i;
    }
}

TEST_F(OptimCuda, GradNormAndClipping) {
  for (DType dtype : {f64, f32, f16, bf16}) {
    auto here = make_parameters(dtype, cpu), there = make_parameters(dtype, cuda);
    set_gradients(here, 1, cpu);
    set_gradients(there, 1, cuda);
    there.back().parameter.mutable_grad() = randn({1001}, 0, 1, dtype).to(cuda).slice(0, 1, 1001);
    here.back().parameter.mutable_grad() = there.back().parameter.grad().to(cpu).clone();
    const Tensor norm = grad_norm(plain(there));
    EXPECT_EQ(norm.device(), cuda);
    EXPECT_EQ(norm.dtype(), f64);
    EXPECT_NEAR(norm.item(), grad_norm(plain(here)).item(), 1e-11 * norm.item());
    EXPECT_EQ(norm.item(), grad_norm(plain(there)).item());
    for (double max_norm : {1e9, norm.item() / 3}) {
      EXPECT_NEAR(clip_grad_norm(plain(there), max_norm), clip_grad_norm(plain(here), max_norm),
                  1e-11 * norm.item());
      for (size_t i = 0; i < here.size(); ++i) {
        if (!here[i].parameter.grad().defined()) continue;
        EXPECT_LE(relative_error(there[i].parameter.grad(), here[i].parameter.grad()),
                  dtype == f64 ? 1e-14 : 1e-2)
            << dtype << ' ' << i;
      }
    }
    const auto before = there[11].parameter.grad().to_vector<double>();
    there[2].parameter.mutable_grad().fill_(NAN);
    EXPECT_TRUE(std::isnan(clip_grad_norm(plain(there), 0.1)));
    EXPECT_EQ(there[11].parameter.grad().to_vector<double>(), before);
  }
  EXPECT_EQ(grad_norm({Parameter(Tensor::zeros({3}, f32, cuda))}).item(), 0);
}

TEST_F(OptimCuda, StatesMoveBetweenDevices) {
  auto here = make_parameters(bf16, cpu), there = make_parameters(bf16, cuda);
  const auto first = make_optimizer("adamw", here), second = make_optimizer("adamw", there);
  for (int step = 0; step < 3; ++step) {
    set_gradients(here, step, cpu);
    first->step();
  }
  for (size_t i = 0; i < here.size(); ++i)
    there[i].parameter.mutable_value().copy_(here[i].parameter.value());
  second->set_states(first->states());
  set_gradients(here, 3, cpu);
  set_gradients(there, 3, cuda);
  first->step();
  second->step();
  for (size_t i = 0; i < here.size(); ++i) {
    EXPECT_EQ(first->states()[i].steps, second->states()[i].steps);
    EXPECT_LE(relative_error(second->states()[i].master, first->states()[i].master), 1e-6);
  }
  // A parameter that was set has its master made anew.
  there[0].parameter.mutable_value().fill_(2);
  for (auto& [name, parameter] : there)
    parameter.mutable_grad() = Tensor::zeros(parameter.shape(), bf16, cuda);
  second->set_lr(0);
  second->step();
  EXPECT_EQ(second->states()[0].master.item(), 2);
}

// A captured step takes the learning rate, t and the skipping from each replay.
TEST_F(OptimCuda, CapturedStepsAreTheSteps) {
  for (const char* name : {"adamw", "momentum", "lion", "muon"}) {
    auto eager = make_parameters(bf16, cuda), replayed = make_parameters(bf16, cuda);
    const auto first = make_optimizer(name, eager), second = make_optimizer(name, replayed);
    set_gradients(eager, 0, cuda);
    set_gradients(replayed, 0, cuda);
    const auto step = [](Optimizer& optimizer, const std::vector<NamedParameter>& parameters) {
      optimizer.step({.grad_norm = grad_norm(plain(parameters)), .max_norm = 5});
    };
    step(*first, eager);
    std::string why_not;
    const auto graph = capture(
        cuda, 1 << 20, [&] { step(*second, replayed); }, why_not);  // the first step
    ASSERT_TRUE(graph) << why_not;
    for (int i = 1; i < 5; ++i) {
      set_gradients(eager, 2 * i, cuda);
      if (i == 2) eager[4].parameter.mutable_grad().fill_(NAN);
      for (size_t k = 0; k < eager.size(); ++k)
        replayed[k].parameter.mutable_grad().copy_(eager[k].parameter.grad());
      first->set_lr(0.01 * (i + 1));
      second->set_lr(0.01 * (i + 1));
      step(*first, eager);
      graph->launch();
    }
    for (size_t k = 0; k < eager.size(); ++k) {
      EXPECT_EQ(replayed[k].parameter.value().to_vector<double>(),
                eager[k].parameter.value().to_vector<double>());
      EXPECT_EQ(first->states()[k].steps, 4);
      EXPECT_EQ(second->states()[k].steps, 4);
    }
  }
}

TEST_F(OptimCuda, MasterWeights) {
  for (DType dtype : {f64, f32, f16, bf16}) {
    std::vector<std::vector<std::vector<double>>> results;
    for (Device device : {cpu, cuda}) {
      auto parameters = make_parameters(dtype, device);
      MasterWeights weights(parameters);
      SGD optimizer(weights.masters(), {.lr = 0.1});
      for (int step = 0; step < 3; ++step) {
        for (int part = 0; part < 2; ++part) {
          set_gradients(parameters, 2 * step + part, device);
          weights.take_gradients(0.5);
        }
        optimizer.step();
        optimizer.zero_grad();
        weights.publish();
      }
      auto& values = results.emplace_back();
      for (const auto& [name, parameter] : parameters)
        values.push_back(parameter.value().to_vector<double>());
      for (const auto& [name, master] : weights.masters())
        values.push_back(master.value().to_vector<double>());
    }
    for (size_t i = 0; i < results[0].size(); ++i)
      EXPECT_LE(relative_error(results[1][i], results[0][i]), dtype == f64   ? 1e-14
                                                              : dtype == f32 ? 1e-6
                                                                             : 4e-3)
          << dtype << ' ' << i;
  }
}

TEST_F(OptimCuda, LossScale) {
  std::vector<std::vector<double>> scales, masters;
  for (Device device : {cpu, cuda}) {
    Parameter p(Tensor::full({5}, 1, f16).to(device));
    SGD optimizer({{"p", p}}, {.lr = 1});
    LossScale scale({.initial = 1024, .interval = 2}, device);
    scales.emplace_back();
    for (double grad : std::vector<double>{1, INFINITY, 2, 3, 4, NAN, 5}) {
      p.mutable_grad() = Tensor::full({5}, grad, f16, device);
      const Tensor norm = grad_norm({p});
      optimizer.step({.grad_norm = norm, .max_norm = 0.005, .grad_scale = 0.5, .loss_scale = scale.tensor()});
      scale.update(norm);
      scales.back().push_back(scale.value());
    }
    EXPECT_TRUE(scale.update(true));
    EXPECT_FALSE(scale.update(false));
    scales.back().push_back(scale.value());
    masters.push_back(optimizer.states()[0].master.to_vector<double>());
  }
  EXPECT_EQ(scales[0], (std::vector<double>{1024, 512, 512, 1024, 1024, 512, 512, 512}));
  EXPECT_EQ(scales[1], scales[0]);
  EXPECT_LE(relative_error(masters[1], masters[0]), 1e-7);
}

TEST_F(OptimCuda, OneDevice) {
  const Parameter here(Tensor::zeros({2})), there(Tensor::zeros({2}, f32, cuda));
  EXPECT_ERROR(AdamW({{"here", here}, {"there", there}}), Device,
               "[adamw] expected all parameters on cpu, got there on cuda:0");
}

}  // namespace
}  // namespace torus
