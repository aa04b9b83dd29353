// GELU for ops that hold it. For op code; not installed.
#pragma once

#include "torus/ops/ops.h"

namespace torus {

/// y = gelu(x), and dx = dy * gelu'(x). The results may be in the memory of x and of dy.
void gelu_forward(Tensor& y, const Tensor& x, Gelu form);
void gelu_backward(Tensor& dx, const Tensor& dy, const Tensor& x, Gelu form);

}  // namespace torus
