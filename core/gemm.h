// Matrix products. For op code; not installed.
#pragma once

#include "torus/core/tensor.h"

namespace torus {

struct ProductOptions {
  bool accumulate = false;  // c += a @ b instead of c = a @ b
  Tensor bias = {};         // [N], added to every row of c; undefined for none
  Tensor addend = {};       // shaped as c, added to it; undefined for none. Not with `accumulate`
};

/// c [..., M, N] = a [..., M, K] @ b [..., K, N] + bias + addend, all of one floating dtype. Leading axes
/// broadcast to c's. Operands may have any strides: one with a unit stride along rows or columns is used in
/// place, any other is copied. c has no overlap. 16-bit operands are summed in f32, with what is added to
/// them, and rounded once. The bits do not depend on the thread count. On CUDA, large products of 16 bits are
/// timed the first time that one of their sizes runs, to choose among algorithms that give the same bits.
void product(Tensor& c, const Tensor& a, const Tensor& b, const ProductOptions& options = {});

/// hidden = gelu(input), in GELU's tanh form, of input = a @ b + bias (undefined for none): a product and
/// what follows it in one pass. All are contiguous matrices, but b may be transposed. False, with nothing
/// done, where the device has no such product; the CPU has none.
bool product_gelu(Tensor& hidden, Tensor& input, const Tensor& a, const Tensor& b, const Tensor& bias);

}  // namespace torus
