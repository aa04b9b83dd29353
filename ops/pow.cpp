#include <cmath>

#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// Calls use(f) with f(x) = x^p. The powers that formulas are made of vectorise.
template <class F>
void with_power(double p, F&& use) {
  if (p == 0) return use([](auto x) { return decltype(x)(1); });
  if (p == 1) return use([](auto x) { return x; });
  if (p == 2) return use([](auto x) { return x * x; });
  if (p == 3) return use([](auto x) { return x * x * x; });
  if (p == -1) return use([](auto x) { return 1 / x; });
  if (p == 0.5) return use([](auto x) { return std::sqrt(x); });
  if (p == -0.5) return use([](auto x) { return 1 / std::sqrt(x); });
  use([p](auto x) { return std::pow(x, decltype(x)(p)); });
}

const ScalarKernel scalar_kernel{"pow.scalar", [](Tensor& y, const Tensor& x, double p) {
                                   with_power(p, [&](auto power) { map_elements(y, power, x); });
                                 }};
const Kernel<void(Tensor&, const Tensor&, const Tensor&, double)> scalar_backward_kernel{
    "pow.scalar_backward", [](Tensor& dx, const Tensor& dy, const Tensor& x, double p) {
      with_power(p - 1, [&](auto power) {
        map_elements(
            dx, [=](auto g, auto at) { return g * (decltype(at)(p) * power(at)); }, dy, x);
      });
    }};

const BinaryKernel pow_kernel{"pow", map<[](auto x, auto p) { return std::pow(x, p); }>};
const TernaryKernel base_backward_kernel{
    "pow.base_backward",
    map<[](auto dy, auto x, auto p) { return p == 0 ? decltype(p)(0) : dy * (p * std::pow(x, p - 1)); }>};
const TernaryKernel exponent_backward_kernel{"pow.exponent_backward", map<[](auto dy, auto x, auto p) {
                                               return x == 0 && p >= 0 ? decltype(p)(0)
                                                                       : dy * (std::pow(x, p) * std::log(x));
                                             }>};

}  // namespace

Variable pow(const Variable& x, double exponent) {
  const ProfileScope scope("pow", ScopeKind::forward);
  check_floating("pow", x);
  // Saved: x.
  return record("pow", {x}, mapped(scalar_kernel, x.value(), exponent),
                [exponent, saved = Saved(x.value())](const OutputGrads& grads) -> std::vector<Tensor> {
                  if (exponent == 0) return {Tensor()};
                  return {mapped(scalar_backward_kernel, grads[0], saved.get(), exponent)};
                });
}

Variable pow(const Variable& x, const Variable& exponent) {
  const ProfileScope scope("pow", ScopeKind::forward);
  const auto [base, power] = broadcast("pow", x, exponent);
  // Saved: both operands.
  return record("pow", {x, exponent}, mapped(pow_kernel, base, power),
                [saved_base = Saved(base),
                 saved_power = Saved(power)](const OutputGrads& grads) -> std::vector<Tensor> {
                  const Tensor &at = saved_base.get(), &p = saved_power.get();
                  return {grads.wants(0) ? mapped(base_backward_kernel, grads[0], at, p) : Tensor(),
                          grads.wants(1) ? mapped(exponent_backward_kernel, grads[0], at, p) : Tensor()};
                });
}

}  // namespace torus
