// Comparisons by relative norm, for tests of layers.
#pragma once

#include <cmath>
#include <functional>
#include <vector>

#include "torus/autograd/tape.h"
#include "torus/core/random.h"
#include "torus/layers/module.h"
#include "torus/ops/ops.h"

namespace torus {

inline double relative_error(const std::vector<double>& got, const std::vector<double>& expected) {
  if (got.size() != expected.size()) return INFINITY;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return difference == 0 ? 0 : std::sqrt(difference / norm);
}

inline double relative_error(const Tensor& got, const Tensor& expected) {
  if (got.shape() != expected.shape()) return INFINITY;
  return relative_error(got.to_vector<double>(), expected.to_vector<double>());
}

/// Values (or gradients) of parameters, one after another.
inline std::vector<double> flat_values(const Module& module) {
  std::vector<double> result;
  for (const auto& parameter : module.parameters())
    for (double value : parameter.value().to_vector<double>()) result.push_back(value);
  return result;
}

inline std::vector<double> flat_gradients(const Module& module) {
  std::vector<double> result;
  for (const auto& parameter : module.parameters())
    for (double value : parameter.grad().to_vector<double>()) result.push_back(value);
  return result;
}

/// Sets the parameters of a module to normal draws, so that none is 0 or 1 by its initial value.
inline void randomize(Module& module, double deviation, Generator& generator) {
  for (Parameter& parameter : module.parameters())
    parameter.mutable_value().copy_(randn(parameter.shape(), 0, deviation, parameter.dtype(), generator));
}

/// How far the gradients of an f64 module are from the change of a random projection of `function()` along
/// one random direction of all its parameters, relative to it.
inline double parameter_gradient_error(Module& module, const std::function<Variable()>& function) {
  Generator generator(7);
  std::vector<Tensor> start, direction;
  for (Parameter& parameter : module.parameters()) {
    start.push_back(parameter.value().clone());
    direction.push_back(randn(parameter.shape(), 0, 1, f64, generator));
  }
  const Tensor weights = randn(function().shape(), 0, 1, f64, generator);
  const auto projected = [&] { return sum(function() * Variable(weights)); };
  module.zero_grad();
  double analytic = 0;
  {
    Tape tape;
    tape.backward(projected());
  }
  for (size_t i = 0; i < start.size(); ++i)
    analytic += sum(Variable(module.parameters()[i].grad()) * Variable(direction[i])).item();
  const auto at = [&](double step) {
    for (size_t i = 0; i < start.size(); ++i)
      module.parameters()[i].mutable_value().copy_(
          (Variable(start[i]) + Variable(direction[i]) * step).value());
    return projected().item();
  };
  const double step = 1e-5, numeric = (at(step) - at(-step)) / (2 * step);
  at(0);
  return std::abs(analytic - numeric) / std::abs(numeric);
}

}  // namespace torus
