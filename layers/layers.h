// The small layers. Letters: I inputs, O outputs, C channels, V vocabulary; "..." any axes.
#pragma once

#include "torus/core/random.h"
#include "torus/layers/module.h"
#include "torus/ops/ops.h"

namespace torus {

struct LinearOptions {
  bool bias = true;
  DType dtype = f32;
};

/// x [..., I] times weight [O, I] transposed, plus bias [O] and, if given, residual [..., O]: [..., O]. The
/// weight starts uniform in +-1/sqrt(I), the bias at 0.
class Linear : public Module {
 public:
  Linear(int64_t inputs, int64_t outputs, const LinearOptions& options = {},
         Generator& generator = default_generator());
  Variable operator()(const Variable& x, const Variable& residual = {}) const;

  Parameter weight, bias;
};

/// Rows of weight [V, C] by indices [...] (i64): [..., C]. The weight starts normal with deviation 0.02.
class Embedding : public Module {
 public:
  Embedding(int64_t count, int64_t channels, DType dtype = f32, Generator& generator = default_generator());
  Variable operator()(const Tensor& indices) const;

  Parameter weight;
};

struct LayerNormOptions {
  bool bias = true;
  double eps = 1e-5;
  DType dtype = f32;
};

/// (x - mean) / sqrt(variance + eps) * weight + bias over the last axis, of C channels (Ba et al., 2016).
class LayerNorm : public Module {
 public:
  explicit LayerNorm(int64_t channels, const LayerNormOptions& options = {});
  Variable operator()(const Variable& x) const;

  Parameter weight, bias;

 private:
  double eps_;
};

struct RMSNormOptions {
  double eps = 1e-6;
  DType dtype = f32;
};

/// x / sqrt(mean(x^2) + eps) * weight over the last axis, of C channels (Zhang and Sennrich, 2019).
class RMSNorm : public Module {
 public:
  explicit RMSNorm(int64_t channels, const RMSNormOptions& options = {});
  Variable operator()(const Variable& x) const;

  Parameter weight;

 private:
  double eps_;
};

enum class NormKind { layer, rms };

struct NormOptions {
  NormKind kind = NormKind::layer;
  bool bias = true;  // of a layer norm; an RMS norm has none
  DType dtype = f32;
};

/// LayerNorm or RMSNorm with their usual eps, whichever a transformer is built with.
class Norm : public Module {
 public:
  explicit Norm(int64_t channels, const NormOptions& options = {});
  Variable operator()(const Variable& x) const;

  Parameter weight, bias;

 private:
  NormKind kind_;
};

/// While training, zeroes each element with probability p and scales the others by 1 / (1 - p); x otherwise.
/// Plus residual, if given. Draws from the default generator.
class Dropout : public Module {
 public:
  explicit Dropout(double p);
  Variable operator()(const Variable& x, const Variable& residual = {}) const;
  /// The same of `layer`(x, residual), a function of Variables that adds the residual itself where nothing is
  /// dropped.
  template <class Layer>
  Variable after(const Layer& layer, const Variable& x, const Variable& residual) const {
    return drops() ? (*this)(layer(x, Variable()), residual) : layer(x, residual);
  }

 private:
  bool drops() const { return training() && p_ > 0; }

  double p_;
};

struct MLPOptions {
  double dropout = 0;  // of the output
  bool bias = true;
  bool swiglu = false;
  Gelu gelu = Gelu::exact;
  DType dtype = f32;
};

/// down(gelu(up(x))), x [..., C], with `hidden` channels in between. With `swiglu` (Shazeer, 2020) `up` has
/// 2 hidden rows, and down(silu(a) * b) is of its two halves a and b. Plus residual [..., C], if given.
class MLP : public Module {
 public:
  MLP(int64_t channels, int64_t hidden, const MLPOptions& options = {},
      Generator& generator = default_generator());
  Variable operator()(const Variable& x, const Variable& residual = {}) const;

  Linear up, down;

 private:
  bool swiglu_;
  Gelu gelu_;
  Dropout dropout_;
};

}  // namespace torus
