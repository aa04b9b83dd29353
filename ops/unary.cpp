#include <cmath>

#include "torus/autograd/gradcheck.h"
#include "torus/core/vector_math.h"
#include "torus/ops/elementwise.h"
#include "torus/ops/gelu.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// y = f(x), and dx from dy and one saved tensor: x or y, in which the derivative is shorter.
enum class Saves { x, y };
struct Function {
  const char* name;
  UnaryKernel forward;
  Saves saves;
  BinaryKernel backward;
};

Variable apply(const Function& f, const Variable& x) {
  const ProfileScope scope(f.name, ScopeKind::forward);
  check_floating(f.name, x);
  const Tensor y = mapped(f.forward, x.value());
  // Saved: x or y, as the function says.
  return record(f.name, {x}, y,
                [&f, saved = Saved(f.saves == Saves::x ? x.value() : y)](const OutputGrads& grads)
                    -> std::vector<Tensor> { return {mapped(f.backward, grads[0], saved.get())}; });
}

const Function exp_function{"exp",
                            {"exp", map<[](auto x) { return vmath::exp(x); }>},
                            Saves::y,
                            {"exp.backward", map<[](auto dy, auto y) { return dy * y; }>}};

const Function log_function{"log",
                            {"log", map<[](auto x) { return vmath::log(x); }>},
                            Saves::x,
                            {"log.backward", map<[](auto dy, auto x) { return dy / x; }>}};

const Function sqrt_function{"sqrt",
                             {"sqrt", map<[](auto x) { return std::sqrt(x); }>},
                             Saves::y,
                             {"sqrt.backward", map<[](auto dy, auto y) { return dy / (y + y); }>}};

const Function tanh_function{"tanh",
                             {"tanh", map<[](auto x) { return vmath::tanh(x); }>},
                             Saves::y,
                             {"tanh.backward", map<[](auto dy, auto y) { return dy * (1 - y * y); }>}};

const Function abs_function{
    "abs",
    {"abs", map<[](auto x) { return std::abs(x); }>},
    Saves::x,
    {"abs.backward", map<[](auto dy, auto x) { return x == 0 ? decltype(x)(0) : (x < 0 ? -dy : dy); }>}};

const Function sigmoid_function{
    "sigmoid",
    {"sigmoid", map<[](auto x) { return vmath::sigmoid(x); }>},
    Saves::x,
    {"sigmoid.backward", map<[](auto dy, auto x) { return dy * vmath::sigmoid_and_slope(x).slope; }>}};

// The comparisons keep a NaN.
const Function relu_function{
    "relu",
    {"relu", map<[](auto x) { return x < 0 ? decltype(x)(0) : x; }>},
    Saves::y,
    {"relu.backward", map<[](auto dy, auto y) { return y <= 0 ? decltype(y)(0) : dy; }>}};

const Function gelu_exact_function{"gelu",
                                   {"gelu.exact", map<[](auto x) { return x * vmath::normal(x).cdf; }>},
                                   Saves::x,
                                   {"gelu.exact_backward", map<[](auto dy, auto x) {
                                      const auto [cdf, density] = vmath::normal(x);
                                      return dy * (cdf + x * density);
                                    }>}};

// (1 + tanh(u)) / 2 is sigmoid(2 u), which keeps its relative accuracy where tanh is near -1. `gelu_slope` is
// the derivative of 2 u.
template <class C>
C gelu_argument(C x) {
  return C(1.5957691216057307) * (x + C(0.044715) * (x * x * x));
}
template <class C>
C gelu_slope(C x) {
  return C(1.5957691216057307) * (1 + C(3 * 0.044715) * (x * x));
}

const Function gelu_tanh_function{
    "gelu",
    {"gelu.tanh", map<[](auto x) { return x * vmath::sigmoid(gelu_argument(x)); }>},
    Saves::x,
    {"gelu.tanh_backward", map<[](auto dy, auto x) {
       using C = decltype(x);
       // Far out the sigmoid is flat, but its derivative times an infinite slope would be NaN.
       const C near = x < C(-64) ? C(-64) : (x > C(64) ? C(64) : x);
       const auto [value, slope] = vmath::sigmoid_and_slope(gelu_argument(near));
       return dy * (value + near * slope * gelu_slope(near));
     }>}};

const Function silu_function{"silu",
                             {"silu", map<[](auto x) { return x * vmath::sigmoid(x); }>},
                             Saves::x,
                             {"silu.backward", map<[](auto dy, auto x) {
                                const auto [value, slope] = vmath::sigmoid_and_slope(x);
                                return dy * (value + x * slope);
                              }>}};

}  // namespace

Variable exp(const Variable& x) { return apply(exp_function, x); }
Variable log(const Variable& x) { return apply(log_function, x); }
Variable sqrt(const Variable& x) { return apply(sqrt_function, x); }
Variable tanh(const Variable& x) { return apply(tanh_function, x); }
Variable sigmoid(const Variable& x) { return apply(sigmoid_function, x); }

Variable abs(const Variable& x) {
  check_defined("abs", "x", x);
  note_kink(x.value());
  return apply(abs_function, x);
}

Variable relu(const Variable& x) {
  check_defined("relu", "x", x);
  note_kink(x.value());
  return apply(relu_function, x);
}

namespace {
const Function& function_of(Gelu form) {
  return form == Gelu::exact ? gelu_exact_function : gelu_tanh_function;
}

// In one kernel, where it can do that and says that it is done.
using BackwardAndSums = Kernel<void(Tensor&, Tensor&, const Tensor&, const Tensor&, bool&)>;
constexpr auto not_on_cpu = [](Tensor&, Tensor&, const Tensor&, const Tensor&, bool&) {};
const BackwardAndSums gelu_exact_sums{"gelu.exact_backward_and_sums", not_on_cpu},
    gelu_tanh_sums{"gelu.tanh_backward_and_sums", not_on_cpu};
}  // namespace

Variable gelu(const Variable& x, Gelu form) { return apply(function_of(form), x); }

void gelu_forward(Tensor& y, const Tensor& x, Gelu form) { function_of(form).forward(x.device(), y, x); }

void gelu_backward(Tensor& dx, const Tensor& dy, const Tensor& x, Gelu form) {
  function_of(form).backward(x.device(), dx, dy, x);
}

Tensor gelu_backward_and_sums(Tensor& dx, const Tensor& dy, const Tensor& x, Gelu form) {
  if (x.device() != cpu) {
    Tensor sums = Tensor::empty({x.size(1)}, x.dtype(), x.device());
    bool done = false;
    (form == Gelu::exact ? gelu_exact_sums : gelu_tanh_sums)(x.device(), dx, sums, dy, x, done);
    if (done) return sums;
  }
  gelu_backward(dx, dy, x, form);
  return sum_to(dx, {dx.size(1)});
}

Variable silu(const Variable& x) { return apply(silu_function, x); }

}  // namespace torus
