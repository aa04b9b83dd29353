#include "torus/core/profiler.h"
#include "torus/core/tensor.h"
#include "torus/ops/ops.h"

namespace torus {

Variable reshape(const Variable& x, const Shape& shape) {
  check_defined("reshape", "x", x);
  const ProfileScope scope("reshape", ScopeKind::forward);
  return record(
      "reshape", {x}, x.value().reshape(shape),
      [old = x.shape()](const OutputGrads& grads) -> std::vector<Tensor> { return {grads[0].reshape(old)}; });
}

Variable transpose(const Variable& x, int a, int b) {
  check_defined("transpose", "x", x);
  const ProfileScope scope("transpose", ScopeKind::forward);
  return record(
      "transpose", {x}, x.value().transpose(a, b),
      [a, b](const OutputGrads& grads) -> std::vector<Tensor> { return {grads[0].transpose(a, b)}; });
}

Variable permute(const Variable& x, const std::vector<int>& order) {
  check_defined("permute", "x", x);
  const ProfileScope scope("permute", ScopeKind::forward);
  const Tensor y = x.value().permute(order);
  std::vector<int> inverse(order.size());
  for (int i = 0; i < x.dim(); ++i) {
    const int axis = checked_axis("permute", order[static_cast<size_t>(i)], x.dim());
    inverse[static_cast<size_t>(axis)] = i;
  }
  return record("permute", {x}, y, [inverse](const OutputGrads& grads) -> std::vector<Tensor> {
    return {grads[0].permute(inverse)};
  });
}

Variable slice(const Variable& x, int axis, int64_t first, int64_t last, int64_t step) {
  check_defined("slice", "x", x);
  if (first == 0 && last == x.size(axis) && step == 1) return x;
  const ProfileScope scope("slice", ScopeKind::forward);
  return record("slice", {x}, x.value().slice(axis, first, last, step),
                [=, shape = x.shape()](const OutputGrads& grads) -> std::vector<Tensor> {
                  Tensor dx = Tensor::zeros(shape, grads[0].dtype(), grads[0].device());
                  dx.slice(axis, first, last, step).copy_(grads[0]);
                  return {dx};
                });
}

Variable expand(const Variable& x, const Shape& shape) {
  check_defined("expand", "x", x);
  const ProfileScope scope("expand", ScopeKind::forward);
  // The engine sums the gradient back to x.
  return record("expand", {x}, x.value().expand(shape),
                [](const OutputGrads& grads) -> std::vector<Tensor> { return {grads[0]}; });
}

Variable cat(const std::vector<Variable>& parts, int axis) {
  const ProfileScope scope("cat", ScopeKind::forward);
  check(!parts.empty(), Error::Kind::Shape, "[cat] expected at least one part, got none");
  for (const Variable& part : parts) check_defined("cat", "parts", part);
  const Variable& first = parts[0];
  axis = checked_axis("cat", axis, first.dim());
  Shape shape = first.shape();
  std::vector<int64_t> starts{0};
  for (size_t i = 0; i < parts.size(); ++i) {
    const Variable& part = parts[i];
    check(part.dtype() == first.dtype(), Error::Kind::DType, "[cat] expected one dtype, got ", first.dtype(),
          " and ", part.dtype(), " in part ", i);
    check(part.device() == first.device(), Error::Kind::Device, "[cat] expected one device, got ",
          first.device(), " and ", part.device(), " in part ", i);
    if (part.dim() == shape.dim()) shape[axis] = part.size(axis);
    check(part.shape() == shape, Error::Kind::Shape, "[cat] parts must agree but for axis ", axis, ", got ",
          first.shape(), " and ", part.shape(), " in part ", i);
    starts.push_back(starts.back() + part.size(axis));
  }
  shape[axis] = starts.back();
  Tensor y = Tensor::empty(shape, first.dtype(), first.device());
  for (size_t i = 0; i < parts.size(); ++i) y.slice(axis, starts[i], starts[i + 1]).copy_(parts[i].value());
  return record("cat", parts, y, [=](const OutputGrads& grads) {
    std::vector<Tensor> results(starts.size() - 1);
    for (size_t i = 0; i < results.size(); ++i)
      if (grads.wants(i)) results[i] = grads[0].slice(axis, starts[i], starts[i + 1]);
    return results;
  });
}

Variable stack(const std::vector<Variable>& parts, int axis) {
  const ProfileScope scope("stack", ScopeKind::forward);
  check(!parts.empty(), Error::Kind::Shape, "[stack] expected at least one part, got none");
  for (const Variable& part : parts) check_defined("stack", "parts", part);
  const Variable& first = parts[0];
  axis = checked_axis("stack", axis, first.dim() + 1);
  Shape shape = first.shape();
  shape.insert(axis, static_cast<int64_t>(parts.size()));
  Tensor y = Tensor::empty(shape, first.dtype(), first.device());
  for (size_t i = 0; i < parts.size(); ++i) {
    const Variable& part = parts[i];
    check(part.dtype() == first.dtype(), Error::Kind::DType, "[stack] expected one dtype, got ",
          first.dtype(), " and ", part.dtype(), " in part ", i);
    check(part.device() == first.device(), Error::Kind::Device, "[stack] expected one device, got ",
          first.device(), " and ", part.device(), " in part ", i);
    check(part.shape() == first.shape(), Error::Kind::Shape, "[stack] expected one shape, got ",
          first.shape(), " and ", part.shape(), " in part ", i);
    y.select(axis, static_cast<int64_t>(i)).copy_(part.value());
  }
  return record("stack", parts, y, [axis, count = parts.size()](const OutputGrads& grads) {
    std::vector<Tensor> results(count);
    for (size_t i = 0; i < count; ++i)
      if (grads.wants(i)) results[i] = grads[0].select(axis, static_cast<int64_t>(i));
    return results;
  });
}

namespace {

// The gradients of the parts [starts[i], starts[i + 1]) as one of the whole, if that is how they lie in
// memory.
Tensor joined(const OutputGrads& grads, const std::vector<int64_t>& starts, int axis, const Shape& whole) {
  const Tensor& first = grads[0];
  if (!first.defined() || whole.numel() == 0) return Tensor();
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    const Tensor& part = grads[i];
    if (!part.defined() || part.storage() != first.storage() || part.strides() != first.strides() ||
        part.offset() != first.offset() + starts[i] * first.strides()[axis])
      return Tensor();
  }
  return first.as_strided(whole, first.strides(), first.offset());
}

}  // namespace

std::vector<Variable> split(const Variable& x, const std::vector<int64_t>& sizes, int axis) {
  check_defined("split", "x", x);
  const ProfileScope scope("split", ScopeKind::forward);
  axis = checked_axis("split", axis, x.dim());
  std::vector<int64_t> starts{0};
  for (int64_t size : sizes) {
    check(size >= 0, Error::Kind::Shape, "[split] sizes must be at least 0, got ", size);
    starts.push_back(starts.back() + size);
  }
  check(starts.back() == x.size(axis), Error::Kind::Shape, "[split] sizes must add up to ", x.size(axis),
        " (axis ", axis, " of ", x.shape(), "), got ", starts.back());
  std::vector<Tensor> parts;
  for (size_t i = 0; i < sizes.size(); ++i) parts.push_back(x.value().slice(axis, starts[i], starts[i + 1]));
  const std::vector<Variable> inputs{x};
  return record("split", inputs, parts,
                [=, shape = x.shape(), dtype = x.dtype(),
                 device = x.device()](const OutputGrads& grads) -> std::vector<Tensor> {
                  Tensor dx = joined(grads, starts, axis, shape);
                  if (dx.defined()) return {dx};
                  dx = Tensor::empty(shape, dtype, device);
                  for (size_t i = 0; i + 1 < starts.size(); ++i) {
                    Tensor part = dx.slice(axis, starts[i], starts[i + 1]);
                    if (grads[i].defined())
                      part.copy_(grads[i]);
                    else
                      part.fill_(0);
                  }
                  return {dx};
                });
}

}  // namespace torus
