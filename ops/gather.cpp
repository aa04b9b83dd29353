#include "torus/ops/elementwise.h"
#include "torus/ops/ops.h"

namespace torus {

namespace {

void check_indices(const char* op, const Tensor& index, int64_t bound) {
  Tensor distinct = index;
  for (int axis = 0; axis < index.dim(); ++axis)
    if (index.strides()[axis] == 0 && index.size(axis) > 1) distinct = distinct.slice(axis, 0, 1);
  distinct = distinct.contiguous();
  const int64_t* const data = distinct.data<int64_t>();
  const int64_t count = distinct.numel();
  for (int64_t i = 0; i < count; ++i)
    check(data[i] >= 0 && data[i] < bound, Error::Kind::Value, "[", op, "] index ", data[i], " at position ",
          i, " is outside [0, ", bound, ")");
}

// Calls f(many + i, one + at) for each element at place i along `axis` of `many`, whose index is `at`, and
// the element there of `one`. `index` has the shape of `many`. A thread takes whole lines along the axis,
// each in ascending order, so sums into `one` do not depend on the thread count.
template <class Many, class One, class F>
void for_each_pair(const Tensor& many, Many* many_data, const Tensor& one, One* one_data, const Tensor& index,
                   int axis, F f) {
  const int64_t length = many.size(axis);
  Shape lines = many.shape();
  lines[axis] = 1;
  const int64_t many_along = many.strides()[axis], one_along = one.strides()[axis];
  const int64_t index_along = index.strides()[axis];
  const int64_t* const index_data = index.data<int64_t>();
  for_each_run<3>(
      lines, {many.strides(), one.strides(), index.strides()}, elementwise_grain / (length + 1) + 1,
      [=](const auto& offset, const auto& step, int64_t count) {
        // Lines are walked side by side; all of them where they share their indices, and then in vectors.
        const int64_t together = step[2] == 0 ? count : 32;
        for (int64_t start = 0; start < count; start += together) {
          const int64_t width = std::min(together, count - start);
          Many* const many_lines = many_data + offset[0] + start * step[0];
          One* const one_lines = one_data + offset[1] + start * step[1];
          const int64_t* const at = index_data + offset[2] + start * step[2];
          for (int64_t i = 0; i < length; ++i) {
            Many* const a = many_lines + i * many_along;
            if (step[2] == 0) {
              One* const b = one_lines + at[i * index_along] * one_along;
              if (step[0] == 1 && step[1] == 1)
                for (int64_t j = 0; j < width; ++j) f(a[j], b[j]);
              else
                for (int64_t j = 0; j < width; ++j) f(a[j * step[0]], b[j * step[1]]);
            } else {
              for (int64_t j = 0; j < width; ++j)
                f(a[j * step[0]], one_lines[j * step[1] + at[i * index_along + j * step[2]] * one_along]);
            }
          }
        }
      });
}

void gather_cpu(Tensor& y, const Tensor& x, const Tensor& index, int axis) {
  dispatch(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    for_each_pair(y, y.mutable_data<T>(), x, x.data<T>(), index, axis,
                  [](T& to, const T& from) { to = from; });
  });
}

void scatter_add_cpu(Tensor& sums, const Tensor& source, const Tensor& index, int axis) {
  dispatch_floating(sums.dtype(), "scatter_add", [&](auto zero) {
    using T = decltype(zero);
    for_each_pair(source, source.data<T>(), sums, sums.mutable_data<T>(), index, axis,
                  [](const T& from, T& to) { to = static_cast<T>(to + from); });
  });
}

// [..., classes], zero before.
void one_hot_cpu(Tensor& y, const Tensor& indices) {
  const int64_t classes = y.size(-1), count = indices.numel();
  dispatch(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* const to = y.mutable_data<T>();
    const int64_t* const at = indices.data<int64_t>();
    for (int64_t i = 0; i < count; ++i) to[i * classes + at[i]] = static_cast<T>(1);
  });
}

using IndexKernel = Kernel<void(Tensor&, const Tensor&, const Tensor&, int)>;
const IndexKernel gather_kernel{"gather", gather_cpu};
const IndexKernel scatter_add_kernel{"scatter_add", scatter_add_cpu};
const Kernel<void(const char*, const Tensor&, int64_t)> check_kernel{"check_indices", check_indices};
const Kernel<void(Tensor&, const Tensor&)> one_hot_kernel{"one_hot", one_hot_cpu};

// `index` stretched to `shape`, but for its own size along `axis`.
Tensor stretched_index(const char* op, const Tensor& x, const Tensor& index, int axis, Shape shape) {
  check(index.dtype() == i64, Error::Kind::DType, "[", op, "] index must be i64, got ", index.dtype());
  check(index.device() == x.device(), Error::Kind::Device, "[", op, "] index must be on ", x.device(),
        " as x, got ", index.device());
  bool fits = index.dim() == shape.dim();
  for (int i = 0; fits && i < shape.dim(); ++i)
    fits = i == axis || index.size(i) == 1 || index.size(i) == shape[i];
  check(fits, Error::Kind::Shape, "[", op, "] index must have the sizes of ", shape, " or 1 but along axis ",
        axis, ", got ", index.shape());
  check_kernel(x.device(), op, index, x.size(axis));
  shape[axis] = index.size(axis);
  return index.expand(shape);
}

Tensor gathered(const Tensor& x, const Tensor& index, int axis) {
  Tensor y = Tensor::empty(index.shape(), x.dtype(), x.device());
  gather_kernel(x.device(), y, x, index, axis);
  return y;
}

// x plus `source` at its indices, summed in at least f32; x undefined is zeros of `shape`.
Tensor scattered(const Tensor& x, const Shape& shape, const Tensor& source, const Tensor& index, int axis) {
  const DType wide = source.dtype() == f64 ? f64 : f32;
  Tensor sums = Tensor::empty(shape, wide, source.device());
  if (x.defined())
    sums.copy_(x);
  else
    sums.fill_(0);
  scatter_add_kernel(sums.device(), sums, source.to(wide), index, axis);
  return sums.to(source.dtype());
}

Variable gather_along(const char* op, const Variable& x, int axis, const Tensor& index) {
  // Saved: the indices only.
  return record(
      op, {x}, gathered(x.value(), index, axis),
      [axis, shape = x.shape(), saved = Saved(index)](const OutputGrads& grads) -> std::vector<Tensor> {
        return {scattered({}, shape, grads[0], saved.get(), axis)};
      });
}

}  // namespace

Variable gather(const Variable& x, int axis, const Tensor& index) {
  check_defined("gather", "x", x);
  const ProfileScope scope("gather", ScopeKind::forward);
  axis = checked_axis("gather", axis, x.dim());
  return gather_along("gather", x, axis, stretched_index("gather", x.value(), index, axis, x.shape()));
}

Variable index_select(const Variable& x, int axis, const Tensor& index) {
  check_defined("index_select", "x", x);
  const ProfileScope scope("index_select", ScopeKind::forward);
  axis = checked_axis("index_select", axis, x.dim());
  check(index.dim() == 1, Error::Kind::Shape, "[index_select] index must have one axis, got ", index.shape());
  Shape shape;
  for (int i = 0; i < x.dim(); ++i) shape.push_back(i == axis ? index.size(0) : 1);
  return gather_along("index_select", x, axis,
                      stretched_index("index_select", x.value(), index.reshape(shape), axis, x.shape()));
}

Variable scatter_add(const Variable& x, int axis, const Tensor& index, const Variable& source) {
  const ProfileScope scope("scatter_add", ScopeKind::forward);
  check_floating("scatter_add", x);
  check_defined("scatter_add", "source", source);
  axis = checked_axis("scatter_add", axis, x.dim());
  check(x.dtype() == source.dtype(), Error::Kind::DType, "[scatter_add] expected one dtype, got ", x.dtype(),
        " and ", source.dtype());
  check(x.device() == source.device(), Error::Kind::Device, "[scatter_add] expected one device, got ",
        x.device(), " and ", source.device());
  Shape shape = x.shape();
  if (source.dim() == shape.dim()) shape[axis] = source.size(axis);
  check(source.shape() == shape, Error::Kind::Shape, "[scatter_add] source must have the sizes of x ",
        x.shape(), " but along axis ", axis, ", got ", source.shape());
  const Tensor places = stretched_index("scatter_add", x.value(), index, axis, shape);
  check(places.shape() == shape, Error::Kind::Shape, "[scatter_add] index must have the size of source ",
        shape[axis], " along axis ", axis, ", got ", index.size(axis));
  // Saved: the indices only.
  return record("scatter_add", {x, source}, scattered(x.value(), x.shape(), source.value(), places, axis),
                [axis, saved = Saved(places)](const OutputGrads& grads) -> std::vector<Tensor> {
                  return {grads[0], grads.wants(1) ? gathered(grads[0], saved.get(), axis) : Tensor()};
                });
}

Tensor one_hot(const Tensor& indices, int64_t classes, DType dtype) {
  ProfileScope scope("one_hot", ScopeKind::forward);
  scope.show(indices);
  check(indices.dtype() == i64, Error::Kind::DType, "[one_hot] indices must be i64, got ", indices.dtype());
  check(classes >= 0, Error::Kind::Value, "[one_hot] expected classes of at least 0, got ", classes);
  check_kernel(indices.device(), "one_hot", indices, classes);
  Shape shape = indices.shape();
  shape.push_back(classes);
  Tensor y = Tensor::zeros(shape, dtype, indices.device());
  one_hot_kernel(y.device(), y, indices.contiguous());
  return y;
}

}  // namespace torus
