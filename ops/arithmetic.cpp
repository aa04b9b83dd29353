#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

const BinaryKernel add_kernel{"add", map<[](auto a, auto b) { return a + b; }>};
const BinaryKernel sub_kernel{"sub", map<[](auto a, auto b) { return a - b; }>};
const BinaryKernel mul_kernel{"mul", map<[](auto a, auto b) { return a * b; }>};
const BinaryKernel div_kernel{"div", map<[](auto a, auto b) { return a / b; }>};
// -dy a / b^2, without squaring b, which could overflow.
const TernaryKernel div_backward_kernel{"div.backward",
                                        map<[](auto dy, auto a, auto b) { return -dy * (a / b / b); }>};
const UnaryKernel neg_kernel{"neg", map<[](auto x) { return -x; }>};
const ScalarKernel add_scalar_kernel{"add.scalar", [](Tensor& y, const Tensor& x, double b) {
                                       map_elements(
                                           y, [b](auto a) { return a + decltype(a)(b); }, x);
                                     }};
const ScalarKernel mul_scalar_kernel{"mul.scalar", [](Tensor& y, const Tensor& x, double b) {
                                       map_elements(
                                           y, [b](auto a) { return a * decltype(a)(b); }, x);
                                     }};
const ScalarKernel div_scalar_kernel{"div.scalar", [](Tensor& y, const Tensor& x, double b) {
                                       map_elements(
                                           y, [b](auto a) { return a / decltype(a)(b); }, x);
                                     }};
const ScalarKernel scalar_div_kernel{"scalar.div", [](Tensor& y, const Tensor& x, double a) {
                                       map_elements(
                                           y, [a](auto b) { return decltype(b)(a) / b; }, x);
                                     }};
const Kernel<void(Tensor&, const Tensor&, const Tensor&, double)> scalar_div_backward_kernel{
    "scalar.div.backward", [](Tensor& dx, const Tensor& dy, const Tensor& x, double a) {
      map_elements(
          dx, [a](auto g, auto b) { return -g * (decltype(b)(a) / b / b); }, dy, x);
    }};

// x + b, whose derivative is 1.
Variable shift(const char* op, const Variable& x, double b) {
  const ProfileScope scope(op, ScopeKind::forward);
  check_floating(op, x);
  return record(op, {x}, mapped(add_scalar_kernel, x.value(), b),
                [](const OutputGrads& grads) -> std::vector<Tensor> { return {grads[0]}; });
}

// x times or over a number: linear, so the gradient takes the same kernel and nothing is saved.
Variable scale(const char* op, const ScalarKernel& kernel, const Variable& x, double b) {
  const ProfileScope scope(op, ScopeKind::forward);
  check_floating(op, x);
  return record(op, {x}, mapped(kernel, x.value(), b),
                [&kernel, b](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {mapped(kernel, grads[0], b)};
                });
}

}  // namespace

Variable add(const Variable& a, const Variable& b) {
  const ProfileScope scope("add", ScopeKind::forward);
  const auto [left, right] = broadcast("add", a, b);
  return record("add", {a, b}, mapped(add_kernel, left, right),
                [](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {grads[0], grads[0]};
                });
}

Variable sub(const Variable& a, const Variable& b) {
  const ProfileScope scope("sub", ScopeKind::forward);
  const auto [left, right] = broadcast("sub", a, b);
  return record("sub", {a, b}, mapped(sub_kernel, left, right),
                [](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {grads[0], grads.wants(1) ? mapped(neg_kernel, grads[0]) : Tensor()};
                });
}

Variable mul(const Variable& a, const Variable& b) {
  const ProfileScope scope("mul", ScopeKind::forward);
  const auto [left, right] = broadcast("mul", a, b);
  // Saved: each operand if the other wants a gradient.
  return record(
      "mul", {a, b}, mapped(mul_kernel, left, right),
      [left = Saved(b.requires_grad() ? left : Tensor()),
       right = Saved(a.requires_grad() ? right : Tensor())](const OutputGrads& grads) -> std::vector<Tensor> {
        return {grads.wants(0) ? mapped(mul_kernel, grads[0], right.get()) : Tensor(),
                grads.wants(1) ? mapped(mul_kernel, grads[0], left.get()) : Tensor()};
      });
}

Variable div(const Variable& a, const Variable& b) {
  const ProfileScope scope("div", ScopeKind::forward);
  const auto [left, right] = broadcast("div", a, b);
  // Saved: b for both gradients, a for that of b.
  return record(
      "div", {a, b}, mapped(div_kernel, left, right),
      [left = Saved(b.requires_grad() ? left : Tensor()),
       right = Saved(right)](const OutputGrads& grads) -> std::vector<Tensor> {
        return {grads.wants(0) ? mapped(div_kernel, grads[0], right.get()) : Tensor(),
                grads.wants(1) ? mapped(div_backward_kernel, grads[0], left.get(), right.get()) : Tensor()};
      });
}

Variable neg(const Variable& x) {
  const ProfileScope scope("neg", ScopeKind::forward);
  check_floating("neg", x);
  return record(
      "neg", {x}, mapped(neg_kernel, x.value()),
      [](const OutputGrads& grads) -> std::vector<Tensor> { return {mapped(neg_kernel, grads[0])}; });
}

Variable operator+(const Variable& a, double b) { return shift("add", a, b); }
Variable operator-(const Variable& a, double b) { return shift("sub", a, -b); }
Variable operator*(const Variable& a, double b) { return scale("mul", mul_scalar_kernel, a, b); }
Variable operator/(const Variable& a, double b) { return scale("div", div_scalar_kernel, a, b); }
Variable operator+(double a, const Variable& b) { return b + a; }
Variable operator-(double a, const Variable& b) { return -b + a; }
Variable operator*(double a, const Variable& b) { return b * a; }

Variable operator/(double a, const Variable& b) {
  const ProfileScope scope("div", ScopeKind::forward);
  check_floating("div", b);
  // Saved: the divisor.
  return record("div", {b}, mapped(scalar_div_kernel, b.value(), a),
                [x = Saved(b.value()), a](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {mapped(scalar_div_backward_kernel, grads[0], x.get(), a)};
                });
}

}  // namespace torus
