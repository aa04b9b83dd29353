// What the kernels of optimizers are given: all parameters of a step at once. For kernels; not installed.
#pragma once

#include <array>
#include <functional>
#include <span>

#include "torus/core/tensor.h"

namespace torus::optim {

/// One parameter. `value` is what is stepped, f32 or f64; a 16-bit parameter is then rounded from it.
struct StepItem {
  Tensor value, narrow;  // narrow: the 16-bit parameter, undefined where value is the parameter
  Tensor grad;           // of the parameter's dtype
  Tensor first, second;  // moments, undefined where the rule has none
  double lr_scale, decay;
  int64_t steps;  // t, this step counted; on CUDA unset: see StepNumbers::steps
  int64_t index;  // into StepNumbers::steps

  std::array<Tensor, 5> tensors() const { return {value, narrow, grad, first, second}; }
};

/// What all parameters of a step share.
struct StepNumbers {
  std::function<double()> lr;  // asked when the step runs, and each time that it is replayed
  Tensor grad_norm;            // undefined: none
  double max_norm, grad_scale;
  Tensor loss_scale;  // f64; undefined: 1
  Tensor steps;       // CUDA: t of each parameter, f64, counted by the kernels unless grad_norm is not finite
};

// How a parameter p moves by its gradient g; the formulas are those of the optimizers' declarations.
struct AdamWRule {
  double beta1, beta2, eps;
};
struct SGDRule {
  double momentum;
  bool nesterov;
};
struct LionRule {
  double beta1, beta2;
};

/// to = factor * from, or to += factor * from, rounded to the dtype of `to`.
struct Combination {
  Tensor to, from;
  bool add;

  std::array<Tensor, 2> tensors() const { return {to, from}; }
};

/// state [2] of a LossScale: its value, and the good steps since that changed.
using ScaleFunction = void(Tensor& state, const Tensor& grad_norm, double growth, int64_t interval);
template <class Rule>
using StepFunction = void(std::span<StepItem>, const StepNumbers&, Rule);
using NormFunction = void(Tensor& norm, std::span<const Tensor> grads);
using ClipFunction = void(std::span<Tensor> grads, const Tensor& norm, double max_norm);
using CombineFunction = void(std::span<Combination>, double factor);

}  // namespace torus::optim
