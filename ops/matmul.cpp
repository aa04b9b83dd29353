#include "torus/core/gemm.h"
#include "torus/core/profiler.h"
#include "torus/core/strided.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

// a @ b, leading axes broadcast. Many matrices times one are stacked into one product: it is faster than a
// batch.
Tensor multiplied(const Tensor& a, const Tensor& b) {
  if (b.dim() == 2 && a.dim() > 2 && a.is_contiguous()) {
    Shape shape = a.shape();
    shape[-1] = b.size(-1);
    return multiplied(as_rows(a), b).reshape(shape);
  }
  Shape shape = broadcast_shapes("matmul", a.shape().slice(0, a.dim() - 2), b.shape().slice(0, b.dim() - 2));
  shape.push_back(a.size(-2));
  shape.push_back(b.size(-1));
  Tensor c = Tensor::empty(shape, a.dtype(), a.device());
  product(c, a, b);
  return c;
}

}  // namespace

Variable matmul(const Variable& a, const Variable& b) {
  check_defined("matmul", "a", a);
  check_defined("matmul", "b", b);
  const ProfileScope scope("matmul", ScopeKind::forward);
  check(a.dim() >= 2 && b.dim() >= 2, Error::Kind::Shape, "[matmul] expected matrices, got ", a.shape(),
        " and ", b.shape());
  check(a.dtype() == b.dtype() && is_floating(a.dtype()), Error::Kind::DType,
        "[matmul] a and b must share a floating dtype, got ", a.dtype(), " and ", b.dtype());
  check(a.device() == b.device(), Error::Kind::Device, "[matmul] a and b must share a device, got ",
        a.device(), " and ", b.device());
  check(a.size(-1) == b.size(-2), Error::Kind::Shape, "[matmul] the columns of a must be the rows of b, got ",
        a.shape(), " and ", b.shape());
  // Saved: each operand if the other wants a gradient.
  return record("matmul", {a, b}, multiplied(a.value(), b.value()),
                [b_dim = b.dim(), saved_a = Saved(b.requires_grad() ? a.value() : Tensor()),
                 saved_b = Saved(a.requires_grad() ? b.value() : Tensor())](
                    const OutputGrads& grads) -> std::vector<Tensor> {
                  const Tensor& g = grads[0];
                  Tensor da, db;
                  if (grads.wants(0)) da = multiplied(g, saved_b.get().transpose(-2, -1));
                  if (grads.wants(1)) {
                    const Tensor& left = saved_a.get();
                    // Stacked, the gradient of one matrix needs no sum over a batch.
                    db = b_dim == 2 && left.dim() > 2 ? multiplied(as_rows(left).transpose(0, 1), as_rows(g))
                                                      : multiplied(left.transpose(-2, -1), g);
                  }
                  return {da, db};
                });
}

}  // namespace torus
