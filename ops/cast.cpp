#include "torus/core/profiler.h"
#include "torus/ops/ops.h"

namespace torus {

Variable cast(const Variable& x, DType dtype) {
  check_defined("cast", "x", x);
  if (x.dtype() == dtype) return x;
  const ProfileScope scope("cast", ScopeKind::forward);
  const Tensor y = x.value().to(dtype);
  if (!is_floating(x.dtype()) || !is_floating(dtype)) return Variable(y);
  return record("cast", {x}, y, [dtype = x.dtype()](const OutputGrads& grads) -> std::vector<Tensor> {
    return {grads[0].to(dtype)};
  });
}

}  // namespace torus
