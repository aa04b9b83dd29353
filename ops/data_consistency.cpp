#include "torus/core/profiler.h"
#include "torus/ops/ops.h"

namespace torus {

Variable data_consistency(const Variable& x, const Variable& measured, const Tensor& mask,
                          const std::vector<int>& axes) {
  check_defined("data_consistency", "x", x);
  check_defined("data_consistency", "measured", measured);
  ProfileScope scope("data_consistency", ScopeKind::forward);
  scope.show(x.value());
  scope.show(measured.value());
  check(x.shape() == measured.shape() && x.dtype() == measured.dtype(), Error::Kind::Shape,
        "[data_consistency] expected x and measured alike, got ", x.dtype(), " ", x.shape(), " and ",
        measured.dtype(), " ", measured.shape());
  const Variable is_measured(mask.to(x.dtype()).to(x.device()));
  return fft(fft(x, axes) * (1 - is_measured) + measured * is_measured, axes, true);
}

}  // namespace torus
