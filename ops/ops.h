// Every differentiable op but attention. Letters: B batch, N tokens, C channels, V vocabulary; "..." any axes.
//
// Ops take and return Variables. They record on the innermost tape of the thread if an input wants a gradient, and
// throw Error{Shape, DType, Device, Value} with a line "[op] expected ..., got ..." otherwise. Floating operands of
// one op share a dtype and a device. Gradients are of first order.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "torus/autograd/tape.h"
#include "torus/autograd/variable.h"
#include "torus/core/random.h"

namespace torus {

// Arithmetic, broadcast by NumPy's rule.
Variable add(const Variable& a, const Variable& b);
Variable sub(const Variable& a, const Variable& b);
Variable mul(const Variable& a, const Variable& b);
Variable div(const Variable& a, const Variable& b);
Variable neg(const Variable& x);
inline Variable operator+(const Variable& a, const Variable& b) { return add(a, b); }
inline Variable operator-(const Variable& a, const Variable& b) { return sub(a, b); }
inline Variable operator*(const Variable& a, const Variable& b) { return mul(a, b); }
inline Variable operator/(const Variable& a, const Variable& b) { return div(a, b); }
inline Variable operator-(const Variable& x) { return neg(x); }
Variable operator+(const Variable& a, double b);
Variable operator-(const Variable& a, double b);
Variable operator*(const Variable& a, double b);
Variable operator/(const Variable& a, double b);
Variable operator+(double a, const Variable& b);
Variable operator-(double a, const Variable& b);
Variable operator*(double a, const Variable& b);
Variable operator/(double a, const Variable& b);

// Elementwise functions.
Variable exp(const Variable& x);
Variable log(const Variable& x);   // natural
Variable sqrt(const Variable& x);  // derivative infinite at 0
Variable tanh(const Variable& x);
Variable relu(const Variable& x);  // derivative 0 at 0; a kink
/// x * Phi(x), Phi the normal distribution's; `tanh` is the approximation of Hendrycks and Gimpel (2016) that
/// GPT-2 uses.
enum class Gelu { exact, tanh };
Variable gelu(const Variable& x, Gelu form = Gelu::exact);
Variable silu(const Variable& x);  // x * sigmoid(x)

/// `value` where `mask` (bool, broadcast to x) is true, x elsewhere; no gradient flows where it is true, whatever x is.
Variable masked_fill(const Variable& x, const Tensor& mask, double value);

/// a [..., M, K] times b [..., K, N] gives [..., M, N]; leading axes broadcast. Transposed views are used without
/// a copy. Sums in f32 for 16-bit operands.
Variable matmul(const Variable& a, const Variable& b);
/// x [..., I] times weight [O, I] transposed, plus bias [O] (optional), gives [..., O].
Variable linear(const Variable& x, const Variable& weight, const Variable& bias = {});

// Reductions. No axes means all. `keep` leaves reduced axes with size 1. 16-bit floats sum in f32; the bits do not
// depend on the thread count. The mean or maximum of nothing throws.
Variable sum(const Variable& x, const std::vector<int>& axes = {}, bool keep = false);
Variable mean(const Variable& x, const std::vector<int>& axes = {}, bool keep = false);
/// The largest along one axis; the gradient goes to the first place that holds it. A kink where two are equal.
Variable max(const Variable& x, int axis, bool keep = false);

// Along one axis. A slice that is -inf throughout gives NaN, as its definition does.
Variable softmax(const Variable& x, int axis = -1);
Variable log_softmax(const Variable& x, int axis = -1);

/// (x - mean) / sqrt(variance + eps) * weight + bias over the last axis (Ba et al., 2016), variance without Bessel's
/// correction. weight, bias [C], bias optional.
Variable layer_norm(const Variable& x, const Variable& weight, const Variable& bias = {}, double eps = 1e-5);
/// x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019). weight [C].
Variable rms_norm(const Variable& x, const Variable& weight, double eps = 1e-6);

/// Rows of weight [V, C] by indices [...] (i64, each in [0, V)): [..., C].
Variable embedding(const Variable& weight, const Tensor& indices);
/// Mean over the targets that are not `ignore_index` of log(sum(exp(logits))) - logits[target]. logits [..., V],
/// targets [...] i64. Never stores probabilities beside the logits. No target at all gives 0 and zero gradients.
inline constexpr int64_t ignore_none = -100;
Variable cross_entropy(const Variable& logits, const Tensor& targets, int64_t ignore_index = ignore_none);

/// Each element is 0 with probability p, and x / (1 - p) otherwise. 0 <= p <= 1 (1 gives zeros); p = 0 is x.
Variable dropout(const Variable& x, double p, Generator& generator = default_generator());

// Shapes: as the members of Tensor, recorded. Views share memory with x.
Variable reshape(const Variable& x, const Shape& shape);
Variable transpose(const Variable& x, int a, int b);
Variable permute(const Variable& x, const std::vector<int>& order);
Variable slice(const Variable& x, int axis, int64_t first, int64_t last, int64_t step = 1);
Variable expand(const Variable& x, const Shape& shape);
/// Joins along an axis; all other sizes agree.
Variable cat(const std::vector<Variable>& parts, int axis);
/// Views of `sizes[i]` along an axis; the sizes add up to its length. One node with several outputs.
std::vector<Variable> split(const Variable& x, const std::vector<int64_t>& sizes, int axis);
/// Converts the dtype; the gradient converts back. From or to a dtype without gradients, none flows.
Variable cast(const Variable& x, DType dtype);

}  // namespace torus
