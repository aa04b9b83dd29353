#include <cmath>

#include "torus/autograd/gradcheck.h"
#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// The comparisons keep a NaN.
const Kernel<void(Tensor&, const Tensor&, double, double)> forward_kernel{
    "clamp", [](Tensor& y, const Tensor& x, double low, double high) {
      map_elements(
          y,
          [=](auto a) {
            using C = decltype(a);
            const C raised = a < C(low) ? C(low) : a;
            return raised > C(high) ? C(high) : raised;
          },
          x);
    }};
const Kernel<void(Tensor&, const Tensor&, const Tensor&, double, double)> backward_kernel{
    "clamp.backward", [](Tensor& dx, const Tensor& dy, const Tensor& x, double low, double high) {
      map_elements(
          dx,
          [=](auto g, auto a) {
            using C = decltype(a);
            const C inside = a < C(low) ? C(0) : g;
            return a > C(high) ? C(0) : inside;
          },
          dy, x);
    }};

}  // namespace

Variable clamp(const Variable& x, double low, double high) {
  const ProfileScope scope("clamp", ScopeKind::forward);
  check_floating("clamp", x);
  check(low <= high, Error::Kind::Value, "[clamp] expected low <= high, got ", low, " and ", high);
  if (kinks_wanted())
    for (double bound : {low, high})
      if (std::isfinite(bound)) note_kink((x.detach() - bound).value());
  // Saved: x.
  return record("clamp", {x}, mapped(forward_kernel, x.value(), low, high),
                [low, high, saved = Saved(x.value())](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {mapped(backward_kernel, grads[0], saved.get(), low, high)};
                });
}

}  // namespace torus
