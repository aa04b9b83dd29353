// What the ops made of products share. For op code; not installed.
#pragma once

#include "torus/autograd/tape.h"

namespace torus {

/// That weight [O, I], bias [O] and residual [..., O], of which the last two may be undefined, fit what they
/// are applied to: [..., I], like x in dtype and device. Returns [..., O].
Shape check_linear(const char* op, const Shape& applied_to, const Variable& x, const Variable& weight,
                   const Variable& bias, const Variable& residual = {});

/// The gradient of an input, shaped `shape`, from a @ b: added to what the input has so far.
Tensor add_product(const OutputGrads& grads, size_t input, const Tensor& a, const Tensor& b,
                   const Shape& shape);

}  // namespace torus
