// GELU for ops that hold it. For op code; not installed.
#pragma once

#include "torus/ops/ops.h"

namespace torus {

/// y = gelu(x), and dx = dy * gelu'(x). The results may be in the memory of x and of dy.
void gelu_forward(Tensor& y, const Tensor& x, Gelu form);
void gelu_backward(Tensor& dx, const Tensor& dy, const Tensor& x, Gelu form);
/// The same for matrices [N, C], and the sums of dx over its rows [C], as sum_to gives them.
Tensor gelu_backward_and_sums(Tensor& dx, const Tensor& dy, const Tensor& x, Gelu form);

}  // namespace torus
