// Every differentiable op but attention. Letters: B batch, N tokens, C channels, V vocabulary; "..." any
// axes.
//
// Ops take and return Variables. They record on the innermost tape of the thread if an input wants a
// gradient, and throw Error{Shape, DType, Device, Value} with a line "[op] expected ..., got ..." otherwise.
// Floating operands of one op share a dtype and a device. Gradients are of first order.
#pragma once

#include <cstdint>
#include <string>
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
/// x to the power `exponent`, NaN where std::pow is. The derivative by x is 0 where the exponent is 0; that
/// by a tensor of exponents is 0 where x is 0 and the exponent is not negative.
Variable pow(const Variable& x, double exponent);
Variable pow(const Variable& x, const Variable& exponent);

// Elementwise functions.
Variable exp(const Variable& x);
Variable log(const Variable& x);   // natural
Variable sqrt(const Variable& x);  // derivative infinite at 0
Variable tanh(const Variable& x);
Variable abs(const Variable& x);      // derivative 0 at 0; a kink
Variable sigmoid(const Variable& x);  // 1 / (1 + exp(-x))
Variable relu(const Variable& x);     // derivative 0 at 0; a kink
/// x * Phi(x), Phi the normal distribution's; `tanh` is the approximation of Hendrycks and Gimpel (2016) that
/// GPT-2 uses.
enum class Gelu { exact, tanh };
Variable gelu(const Variable& x, Gelu form = Gelu::exact);
Variable silu(const Variable& x);  // x * sigmoid(x)

/// x, not below `low` nor above `high`, which may be infinite. The derivative is 1 at the bounds, which are
/// kinks.
Variable clamp(const Variable& x, double low, double high);

/// a where `condition` (bool) is true, b elsewhere; all three broadcast. Any dtype.
Variable where(const Tensor& condition, const Variable& a, const Variable& b);
/// `value` where `mask` (bool, broadcast to x) is true, x elsewhere; no gradient flows where it is true,
/// whatever x is.
Variable masked_fill(const Variable& x, const Tensor& mask, double value);
/// The same in the memory of x, returned. A write to what a tape has saved is caught by backward.
Tensor& masked_fill_(Tensor& x, const Tensor& mask, double value);
/// Refused for a Variable whose gradient would then be wrong: one recorded on a tape, or one to be recorded
/// now.
Variable& masked_fill_(Variable& x, const Tensor& mask, double value);

/// a [..., M, K] times b [..., K, N] gives [..., M, N]; leading axes broadcast. Transposed views are used
/// without a copy. Sums in f32 for 16-bit operands.
Variable matmul(const Variable& a, const Variable& b);
/// Einstein's sum over two operands, one letter an axis: einsum("bhqd,bhkd->bhqk", q, k). Letters of both
/// operands and the result are batch axes, letters missing from the result are summed. A letter comes once in
/// each term. One matmul of permuted views; operands are copied only where letters that must be merged do not
/// lie in one line.
Variable einsum(const std::string& equation, const Variable& a, const Variable& b);
/// x [..., I] times weight [O, I] transposed, plus bias [O] and residual [..., O] (both optional), gives
/// [..., O].
Variable linear(const Variable& x, const Variable& weight, const Variable& bias = {},
                const Variable& residual = {});
/// linear(gelu(linear(x, up, up_bias)), down, down_bias, residual) as one op: up [H, I], down [O, H], the
/// biases and the residual optional. On CUDA the products of 16 bits compute GELU's tanh form and its
/// derivative on the way.
Variable mlp(const Variable& x, const Variable& up, const Variable& up_bias, const Variable& down,
             const Variable& down_bias, const Variable& residual = {}, Gelu form = Gelu::exact);

// Reductions. No axes means all. `keep` leaves reduced axes with size 1. 16-bit floats sum in f32; the bits
// do not depend on the thread count. The mean or maximum of nothing throws.
Variable sum(const Variable& x, const std::vector<int>& axes = {}, bool keep = false);
Variable mean(const Variable& x, const std::vector<int>& axes = {}, bool keep = false);
/// The largest (smallest) along one axis; the gradient goes to the first place that holds it. A kink where
/// two are equal.
Variable max(const Variable& x, int axis, bool keep = false);
Variable min(const Variable& x, int axis, bool keep = false);
/// Where the largest first is, i64. A NaN is larger than any number.
Tensor argmax(const Variable& x, int axis, bool keep = false);
/// sum((x - mean)^2) / (n - correction) over the n elements reduced, of which there must be more than
/// `correction`.
Variable var(const Variable& x, const std::vector<int>& axes = {}, bool keep = false, int64_t correction = 1);

// Along one axis. A slice that is -inf throughout gives NaN, as its definition does.
Variable softmax(const Variable& x, int axis = -1);
/// x = softmax(x), in place, of a contiguous tensor that no tape has saved. Returns x.
Tensor& softmax_(Tensor& x, int axis = -1);
Variable log_softmax(const Variable& x, int axis = -1);
/// log(sum(exp(x))). A slice that is -inf throughout gives -inf and zero gradients.
Variable logsumexp(const Variable& x, int axis = -1, bool keep = false);
/// y[i] = x[0] + ... + x[i] along the axis, summed in f64.
Variable cumsum(const Variable& x, int axis);

/// (x - mean) / sqrt(variance + eps) * weight + bias over the last axis (Ba et al., 2016), variance without
/// Bessel's correction. weight, bias [C], bias optional.
Variable layer_norm(const Variable& x, const Variable& weight, const Variable& bias = {}, double eps = 1e-5);
/// x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019). weight [C].
Variable rms_norm(const Variable& x, const Variable& weight, double eps = 1e-6);

/// Rows of weight [V, C] by indices [...] (i64, each in [0, V)): [..., C].
Variable embedding(const Variable& weight, const Tensor& indices);
/// Mean over the targets that are not `ignore_index` of log(sum(exp(logits))) - logits[target]. logits [N, V]
/// and targets [N], or more leading axes; targets i64. Never stores probabilities beside the logits. No
/// target at all gives 0 and zero gradients. With `smoothing` e in [0, 1), the weight 1 of the target becomes
/// 1 - e, and e / V goes to each of the V classes (Szegedy et al., 2016). The loss of 16-bit
/// logits is f32.
inline constexpr int64_t ignore_none = -100;
Variable cross_entropy(const Variable& logits, const Tensor& targets, int64_t ignore_index = ignore_none,
                       double smoothing = 0);

// By index: i64, each in [0, size of `axis`). Any dtype; sums in at least f32, bits independent of the thread
// count.
/// y = x at [..., index, ...]: `index` has the axes of x, any size along `axis`, and sizes of x or 1
/// elsewhere.
Variable gather(const Variable& x, int axis, const Tensor& index);
/// The slices of x along `axis` that `index` [K] names, in its order.
Variable index_select(const Variable& x, int axis, const Tensor& index);
/// x plus `source`, whose element [..., i, ...] is added at [..., index, ...]. `source` has the sizes of x
/// but along `axis`; `index` has the axes of `source`, its size along `axis`, and sizes of it or 1 elsewhere.
Variable scatter_add(const Variable& x, int axis, const Tensor& index, const Variable& source);
/// [..., classes]: 1 at the place that `indices` [...] (i64, in [0, classes)) names, 0 elsewhere.
Tensor one_hot(const Tensor& indices, int64_t classes, DType dtype = f32);

/// Each element is 0 with probability p, and x / (1 - p) otherwise. 0 <= p <= 1 (1 gives zeros); p = 0 is x.
/// `residual`, shaped as x, is added to the result if given.
Variable dropout(const Variable& x, double p, Generator& generator = default_generator(),
                 const Variable& residual = {});

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
/// Joins along a new axis; all shapes agree.
Variable stack(const std::vector<Variable>& parts, int axis);
/// Converts the dtype; the gradient converts back. From or to a dtype without gradients, none flows.
Variable cast(const Variable& x, DType dtype);

/// Elements to add on the two sides of an axis.
struct Margin {
  int64_t before = 0, after = 0;
};
enum class Padding { constant, circular };
/// Lengthens axes[i] by margins[i]: with `value`, or by going around the axis as often as needed.
Variable pad(const Variable& x, const std::vector<Margin>& margins, const std::vector<int>& axes,
             Padding padding = Padding::constant, double value = 0);
/// Element j along axes[i] moves to j + shifts[i], around the end.
Variable roll(const Variable& x, const std::vector<int64_t>& shifts, const std::vector<int>& axes);

/// Patches of a grid of 1 to 3 axes as tokens: x [B, C, X, Y, Z] gives [B, N, C * prod(patch)], N row-major
/// over the patches, `stride` apart (`patch` if empty) and reaching the end of each axis exactly.
Variable unfold(const Variable& x, const std::vector<int64_t>& patch,
                const std::vector<int64_t>& stride = {});
/// Its transpose: adds tokens [B, N, C * prod(patch)] into a grid [B, C, X, Y, Z]. Without overlaps, the
/// inverse.
Variable fold(const Variable& tokens, const std::vector<int64_t>& grid, const std::vector<int64_t>& patch,
              const std::vector<int64_t>& stride = {});

/// The discrete Fourier transform of complex numbers x [..., 2] along axes before the last (all if none is
/// named), centred and orthonormal: y[k] = sum_n x[n] exp(-2 pi i (k - c) (n - c) / N) / sqrt(N) for any
/// length N, c = N / 2 rounded down; + for the inverse. On CUDA by a matrix, O(N^2) a line: see README.
Variable fft(const Variable& x, const std::vector<int>& axes = {}, bool inverse = false);
/// x with the frequencies that were measured put in: the inverse of fft(x) * (1 - mask) + measured * mask. x and
/// measured [..., 2] alike; mask, of zeros and ones, broadcasts to them. The step of Schlemper et al. (2018) without
/// noise; along axes on which the mask does not vary it may be left out.
Variable data_consistency(const Variable& x, const Variable& measured, const Tensor& mask,
                          const std::vector<int>& axes = {});

// Rotary position codes (Su et al., 2021).
/// Turns the pair of channels (j, j + D / 2) of x [..., N, D] by the angle whose cosine is codes[0, n, j] and
/// whose sine is codes[1, n, j]; codes [2, N, D / 2], floating. The product of two rows so turned depends on
/// the difference of their angles.
Variable rotary(const Variable& x, const Tensor& codes);
struct RotaryOptions {
  double base = 10000;
  int64_t offset = 0;  // position of the first token: the length of a KV cache
  DType dtype = f32;
};
/// Codes of a sequence: position p turns pair j by p * base^(-2 j / D). D even.
Tensor rotary_codes(int64_t tokens, int64_t width, const RotaryOptions& options = {});
/// Codes of a grid, its tokens row-major. Each axis has an equal share of the D / 2 pairs, the first ones
/// taking the rest, with the frequencies of a sequence. Those of a periodic axis of length L are 2 pi / L
/// times integers from 1 to L / 2, evenly spread in the logarithm, so that going around changes nothing and
/// attention commutes with rolling. `offset` is unused.
Tensor rotary_grid_codes(const Shape& grid, int64_t width, const std::vector<bool>& periodic,
                         const RotaryOptions& options = {});

}  // namespace torus
