#include "torus/core/tensor.h"

#include <cmath>
#include <cstring>
#include <memory>
#include <ostream>

#include "torus/core/kernel.h"
#include "torus/core/strided.h"

namespace torus {

namespace {

void fill_cpu(Tensor& tensor, double value) {
  dispatch(tensor.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* data = tensor.mutable_data<T>();
    const T element = static_cast<T>(value);
    for_each_run<1>(tensor.shape(), {tensor.strides()}, elementwise_grain,
                    [&](auto offset, auto step, int64_t count) {
                      T* to = data + offset[0];
                      for (int64_t i = 0; i < count; ++i) to[i * step[0]] = element;
                    });
  });
}

template <class To, class From>
To convert(From value) {
  if constexpr (std::is_same_v<To, From>)
    return value;
  else if constexpr (std::is_same_v<To, bool>)
    return static_cast<Compute<From>>(value) != 0;
  else
    return static_cast<To>(static_cast<Compute<From>>(value));
}

// `from` has the shape of `into`.
void copy_cpu(Tensor& into, const Tensor& from) {
  dispatch(into.dtype(), [&](auto to_zero) {
    dispatch(from.dtype(), [&](auto from_zero) {
      using To = decltype(to_zero);
      using From = decltype(from_zero);
      To* target = into.mutable_data<To>();
      const From* source = from.data<From>();
      for_each_run<2>(into.shape(), {into.strides(), from.strides()}, elementwise_grain,
                      [&](auto offset, auto step, int64_t count) {
                        To* to = target + offset[0];
                        const From* with = source + offset[1];
                        if (step[0] == 1 && step[1] == 1) {
                          if constexpr (std::is_same_v<To, From>)
                            std::memcpy(to, with, static_cast<size_t>(count) * sizeof(To));
                          else
                            for (int64_t i = 0; i < count; ++i) to[i] = convert<To>(with[i]);
                        } else {
                          for (int64_t i = 0; i < count; ++i)
                            to[i * step[0]] = convert<To>(with[i * step[1]]);
                        }
                      });
    });
  });
}

void add_into_cpu(Tensor& into, const Tensor& from) {
  dispatch_floating(into.dtype(), "add_into", [&](auto zero) {
    using T = decltype(zero);
    using C = Compute<T>;
    T* target = into.mutable_data<T>();
    const T* source = from.data<T>();
    for_each_run<2>(into.shape(), {into.strides(), from.strides()}, elementwise_grain,
                    [&](auto offset, auto step, int64_t count) {
                      T* to = target + offset[0];
                      const T* with = source + offset[1];
                      if (step[0] == 1 && step[1] == 1)
                        for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(C(to[i]) + C(with[i]));
                      else
                        for (int64_t i = 0; i < count; ++i)
                          to[i * step[0]] = static_cast<T>(C(to[i * step[0]]) + C(with[i * step[1]]));
                    });
  });
}

// The axes [first, last) of a tensor as one index, joined where they lie in one line.
struct Walk {
  std::array<int64_t, Shape::max_axes> sizes{}, steps{};
  int64_t count = 1, inner_size = 1, inner_step = 0;
  size_t axes = 0;

  Walk(const Tensor& tensor, int first, int last) {
    for (int axis = first; axis < last; ++axis) {
      const int64_t size = tensor.shape()[axis], step = tensor.strides()[axis];
      if (size == 1) continue;
      count *= size;
      if (axes > 0 && steps[axes - 1] == step * size) {
        sizes[axes - 1] *= size;
      } else {
        sizes[axes++] = size;
      }
      steps[axes - 1] = step;
      inner_size = sizes[axes - 1];
      inner_step = step;
    }
  }
  int64_t offset(int64_t index) const {
    if (axes == 0) return 0;
    int64_t result = 0;
    for (size_t axis = axes - 1; axis > 0; --axis) {
      result += index % sizes[axis] * steps[axis];
      index /= sizes[axis];
    }
    return result + index * steps[0];
  }
};

template <class C, class T>
C sum_run(const T* from, int64_t step, int64_t count) {
  C sum = 0;
  if (step == 1) {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += static_cast<C>(from[i]);
  } else {
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += static_cast<C>(from[i * step]);
  }
  return sum;
}

// into[j] = (sum over i of from[i, j]) / divisor. Blocks of a fixed size are summed one by one and then in
// pairs: the error grows slowly, and the bits do not depend on the thread count.
template <class T>
void sum_walk(T* into, const T* from, const Walk& summed, const Walk& kept, double divisor) {
  using C = Compute<T>;
  const bool by_column = kept.inner_size >= 8 && kept.inner_step < summed.inner_step;
  const int64_t block = by_column ? 128 : std::min<int64_t>(1024, 64 * summed.inner_size);
  const int64_t blocks = (summed.count + block - 1) / block, columns = kept.count;
  const auto partial = std::make_unique_for_overwrite<C[]>(static_cast<size_t>(blocks * columns));
  if (by_column) {
    constexpr int64_t chunk = 1024;
    const int64_t chunks = (kept.inner_size + chunk - 1) / chunk, strips = columns / kept.inner_size * chunks;
    const int64_t work = std::min(summed.count, block) * std::min(kept.inner_size, chunk);
    parallel_for(
        0, blocks * strips, std::max<int64_t>(1, elementwise_grain / work), [&](int64_t first, int64_t last) {
          for (int64_t task = first; task < last; ++task) {
            const int64_t b = task / strips, strip = task % strips, start = strip % chunks * chunk;
            const int64_t column = strip / chunks * kept.inner_size + start;
            const int64_t width = std::min(chunk, kept.inner_size - start), step = kept.inner_step;
            const T* strip_from = from + kept.offset(column);
            C* sum = partial.get() + b * columns + column;
            std::fill(sum, sum + width, C(0));
            int64_t row = b * block;
            const int64_t end = std::min(summed.count, row + block);
            const auto add_rows = [&](auto unit) {
              for (; row + 4 <= end; row += 4) {
                const T *r0 = strip_from + summed.offset(row), *r1 = strip_from + summed.offset(row + 1),
                        *r2 = strip_from + summed.offset(row + 2), *r3 = strip_from + summed.offset(row + 3);
                for (int64_t j = 0; j < width; ++j) {
                  const int64_t at = unit ? j : j * step;
                  sum[j] += (C(r0[at]) + C(r1[at])) + (C(r2[at]) + C(r3[at]));
                }
              }
              for (; row < end; ++row) {
                const T* r = strip_from + summed.offset(row);
                for (int64_t j = 0; j < width; ++j) sum[j] += C(r[unit ? j : j * step]);
              }
            };
            if (step == 1)
              add_rows(std::true_type{});
            else
              add_rows(std::false_type{});
          }
        });
  } else {
    const int64_t work = std::min(summed.count, block);
    parallel_for(0, columns * blocks, std::max<int64_t>(1, elementwise_grain / work),
                 [&](int64_t first, int64_t last) {
                   for (int64_t task = first; task < last; ++task) {
                     const int64_t column = task / blocks, b = task % blocks;
                     const T* column_from = from + kept.offset(column);
                     C sum = 0;
                     for (int64_t i = b * block, end = std::min(summed.count, i + block); i < end;) {
                       const int64_t run = std::min(end - i, summed.inner_size - i % summed.inner_size);
                       sum += sum_run<C>(column_from + summed.offset(i), summed.inner_step, run);
                       i += run;
                     }
                     partial[static_cast<size_t>(b * columns + column)] = sum;
                   }
                 });
  }
  parallel_for(0, columns, elementwise_grain / blocks + 1, [&](int64_t first, int64_t last) {
    for (int64_t width = 1; width < blocks; width *= 2)
      for (int64_t b = 0; b + width < blocks; b += 2 * width) {
        C* sum = partial.get() + b * columns;
        const C* other = sum + width * columns;
        for (int64_t j = first; j < last; ++j) sum[j] += other[j];
      }
    for (int64_t j = first; j < last; ++j)
      into[j] = static_cast<T>(partial[static_cast<size_t>(j)] / C(divisor));
  });
}

// `from` is permuted so that the `summed` axes come first: [summed..., kept...]; `into` [kept...],
// contiguous.
void sum_leading_cpu(Tensor& into, const Tensor& from, int summed, double divisor) {
  dispatch_floating(into.dtype(), "sum_to", [&](auto zero) {
    using T = decltype(zero);
    sum_walk(into.mutable_data<T>(), from.data<T>(), Walk(from, 0, summed), Walk(from, summed, from.dim()),
             divisor);
  });
}

const Kernel<void(Tensor&, double)> fill_kernel{"fill", fill_cpu};
const Kernel<void(Tensor&, const Tensor&)> copy_kernel{"copy", copy_cpu};
const Kernel<void(Tensor&, const Tensor&)> add_into_kernel{"add_into", add_into_cpu};
const Kernel<void(Tensor&, const Tensor&, int, double)> sum_leading_kernel{"sum_to", sum_leading_cpu};

}  // namespace

Tensor Tensor::empty(const Shape& shape, DType dtype, Device device) {
  for (int64_t size : shape)
    check(size >= 0, Error::Kind::Shape, "[empty] sizes must be at least 0, got ", shape);
  int64_t bytes = 0;
  check(!__builtin_mul_overflow(shape.numel(), static_cast<int64_t>(size_of(dtype)), &bytes),
        Error::Kind::Memory, "[empty] ", shape, " of ", dtype, " is more than 2^63 bytes");
  Tensor result;
  result.storage_ = std::make_shared<Storage>(static_cast<size_t>(bytes), device);
  result.shape_ = shape;
  result.strides_ = row_major_strides(shape);
  result.dtype_ = dtype;
  return result;
}

Tensor Tensor::zeros(const Shape& shape, DType dtype, Device device) { return full(shape, 0, dtype, device); }

Tensor Tensor::full(const Shape& shape, double value, DType dtype, Device device) {
  Tensor result = empty(shape, dtype, device);
  result.fill_(value);
  return result;
}

Tensor Tensor::from_values(const void* values, int64_t count, DType dtype, const Shape& shape) {
  check(count == shape.numel(), Error::Kind::Shape, "[from] shape ", shape, " needs ", shape.numel(),
        " values, got ", count);
  Tensor result = empty(shape, dtype);
  if (count) std::memcpy(result.storage_->data(), values, result.storage_->bytes());
  return result;
}

Tensor Tensor::arange(int64_t count, DType dtype) {
  Tensor result = empty({count}, dtype);
  dispatch(dtype, [&](auto zero) {
    using T = decltype(zero);
    T* data = result.mutable_data<T>();
    for (int64_t i = 0; i < count; ++i) data[i] = static_cast<T>(i);
  });
  return result;
}

void* Tensor::pointer(DType expected) const {
  check(defined(), Error::Kind::Value, "[data] the tensor is undefined");
  check(expected == dtype_, Error::Kind::DType, "[data] the tensor is ", dtype_, ", asked for as ", expected);
  return static_cast<std::byte*>(storage_->data()) + static_cast<size_t>(offset_) * size_of(dtype_);
}

bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  for (int axis = dim() - 1; axis >= 0; --axis) {
    if (shape_[axis] == 0) return true;
    if (shape_[axis] != 1 && strides_[axis] != expected) return false;
    expected *= shape_[axis];
  }
  return true;
}

Tensor Tensor::as_strided(const Shape& shape, const Shape& strides, int64_t offset) const {
  Tensor view = *this;
  view.shape_ = shape;
  view.strides_ = strides;
  view.offset_ = offset;
  return view;
}

Tensor Tensor::reshape(const Shape& wanted) const {
  Shape shape = wanted, known;
  int unknown = -1;
  for (int axis = 0; axis < shape.dim(); ++axis) {
    if (shape[axis] == -1 && unknown < 0) {
      unknown = axis;
      continue;
    }
    check(shape[axis] >= 0, Error::Kind::Shape, "[reshape] ", shape_, " does not fit ", wanted);
    known.push_back(shape[axis]);
  }
  if (unknown >= 0) {
    const int64_t rest = known.numel();
    check(rest != 0 && numel() % rest == 0, Error::Kind::Shape, "[reshape] ", shape_, " does not fit ",
          wanted);
    shape[unknown] = numel() / rest;
  }
  check(shape.numel() == numel(), Error::Kind::Shape, "[reshape] ", shape_, " has ", numel(), " elements, ",
        wanted, " has ", shape.numel());
  if (shape == shape_) return *this;
  if (numel() == 0 || is_contiguous()) return as_strided(shape, row_major_strides(shape), offset_);

  // Match groups of old axes that lie in one line with groups of new axes of the same product; old axes of
  // size 1, whose strides mean nothing, are left out.
  Shape sizes, steps;
  for (int axis = 0; axis < dim(); ++axis)
    if (shape_[axis] != 1) sizes.push_back(shape_[axis]), steps.push_back(strides_[axis]);
  Shape strides = shape;
  int old_axis = 0, new_axis = 0;
  while (new_axis < shape.dim()) {
    if (shape[new_axis] == 1) {
      strides[new_axis++] = 1;
      continue;
    }
    int64_t old_size = sizes[old_axis], new_size = shape[new_axis];
    int old_last = old_axis, new_last = new_axis;
    while (old_size != new_size) {
      if (old_size < new_size) {
        ++old_last;
        if (steps[old_last - 1] != steps[old_last] * sizes[old_last]) return clone().reshape(shape);
        old_size *= sizes[old_last];
      } else {
        new_size *= shape[++new_last];
      }
    }
    int64_t stride = steps[old_last];
    for (int axis = new_last; axis >= new_axis; --axis) {
      strides[axis] = stride;
      stride *= shape[axis];
    }
    old_axis = old_last + 1;
    new_axis = new_last + 1;
  }
  return as_strided(shape, strides, offset_);
}

Tensor Tensor::transpose(int a, int b) const {
  a = checked_axis("transpose", a, dim());
  b = checked_axis("transpose", b, dim());
  Tensor view = *this;
  std::swap(view.shape_[a], view.shape_[b]);
  std::swap(view.strides_[a], view.strides_[b]);
  return view;
}

Tensor Tensor::permute(const std::vector<int>& order) const {
  check(static_cast<int>(order.size()) == dim(), Error::Kind::Shape, "[permute] expected ", dim(),
        " axes, got ", order.size());
  Tensor view = *this;
  unsigned seen = 0;
  for (int i = 0; i < dim(); ++i) {
    const int axis = checked_axis("permute", order[static_cast<size_t>(i)], dim());
    check(!(seen >> axis & 1u), Error::Kind::Shape, "[permute] axis ", axis, " comes twice");
    seen |= 1u << axis;
    view.shape_[i] = shape_[axis];
    view.strides_[i] = strides_[axis];
  }
  return view;
}

Tensor Tensor::slice(int axis, int64_t first, int64_t last, int64_t step) const {
  axis = checked_axis("slice", axis, dim());
  const int64_t length = shape_[axis];
  const int64_t from = first < 0 ? first + length : first, to = last < 0 ? last + length : last;
  check(step > 0, Error::Kind::Shape, "[slice] step must be positive, got ", step);
  check(from >= 0 && from <= to && to <= length, Error::Kind::Shape, "[slice] [", first, ", ", last,
        ") is outside axis ", axis, " of ", shape_);
  Tensor view = *this;
  view.shape_[axis] = (to - from + step - 1) / step;
  view.strides_[axis] = strides_[axis] * step;
  if (view.shape_[axis] > 0) view.offset_ += from * strides_[axis];
  return view;
}

Tensor Tensor::select(int axis, int64_t index) const {
  axis = checked_axis("select", axis, dim());
  const int64_t at = index < 0 ? index + shape_[axis] : index;
  check(at >= 0 && at < shape_[axis], Error::Kind::Shape, "[select] index ", index, " is outside axis ", axis,
        " of ", shape_);
  return slice(axis, at, at + 1).squeeze(axis);
}

Tensor Tensor::expand(const Shape& shape) const {
  check(shape.dim() >= dim(), Error::Kind::Shape, "[expand] ", shape_, " has more axes than ", shape);
  const int extra = shape.dim() - dim();
  Shape strides = shape;
  for (int axis = 0; axis < shape.dim(); ++axis) {
    const int64_t old = axis < extra ? 1 : shape_[axis - extra];
    check(old == shape[axis] || (old == 1 && shape[axis] >= 0), Error::Kind::Shape, "[expand] ", shape_,
          " does not expand to ", shape);
    strides[axis] = axis < extra || old != shape[axis] ? 0 : strides_[axis - extra];
  }
  return as_strided(shape, strides, offset_);
}

Tensor Tensor::unsqueeze(int axis) const {
  axis = checked_axis("unsqueeze", axis, dim() + 1);
  Tensor view = *this;
  view.shape_.insert(axis, 1);
  view.strides_.insert(axis, 1);
  return view;
}

Tensor Tensor::squeeze(int axis) const {
  axis = checked_axis("squeeze", axis, dim());
  check(shape_[axis] == 1, Error::Kind::Shape, "[squeeze] axis ", axis, " of ", shape_, " is not 1");
  Tensor view = *this;
  view.shape_.erase(axis);
  view.strides_.erase(axis);
  return view;
}

Tensor Tensor::contiguous() const { return is_contiguous() ? *this : clone(); }

Tensor Tensor::clone() const {
  Tensor result = empty(shape_, dtype_, device());
  result.copy_(*this);
  return result;
}

Tensor Tensor::to(DType dtype) const {
  if (dtype == dtype_) return *this;
  Tensor result = empty(shape_, dtype, device());
  result.copy_(*this);
  return result;
}

Tensor Tensor::to(Device wanted) const {
  if (wanted == device()) return *this;
  Tensor result = empty(shape_, dtype_, wanted);
  result.copy_(*this);
  return result;
}

Tensor& Tensor::fill_(double value) {
  fill_kernel(device(), *this, value);
  return *this;
}

Tensor& Tensor::copy_(const Tensor& source) {
  // Between devices, the one that is not the host knows how.
  copy_kernel(source.device().kind == DeviceKind::cpu ? device() : source.device(), *this,
              source.expand(shape_));
  return *this;
}

double Tensor::item() const {
  check(numel() == 1, Error::Kind::Shape, "[item] expected one element, got shape ", shape_);
  return to_vector<double>()[0];
}

namespace {

template <class T>
void print_axis(std::ostream& out, const Tensor& tensor, int depth) {
  constexpr int64_t edge = 3;
  if (tensor.dim() == 0) {
    const T value = *tensor.data<T>();
    if constexpr (std::is_same_v<T, bool>)
      out << (value ? "true" : "false");
    else if constexpr (std::is_same_v<T, uint8_t>)
      out << static_cast<int>(value);
    else
      out << static_cast<Compute<T>>(value);
    return;
  }
  const int64_t length = tensor.size(0);
  const bool nested = tensor.dim() > 1;
  out << '[';
  for (int64_t i = 0; i < length; ++i) {
    if (i > 0) out << (nested ? ",\n" + std::string(static_cast<size_t>(depth) + 1, ' ') : std::string(", "));
    if (length > 2 * edge + 2 && i == edge) {
      out << "...";
      i = length - edge - 1;
      continue;
    }
    print_axis<T>(out, tensor.select(0, i), depth + 1);
  }
  out << ']';
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) {
  if (!tensor.defined()) return out << "undefined tensor";
  dispatch(tensor.dtype(), [&](auto zero) { print_axis<decltype(zero)>(out, tensor.to(cpu), 0); });
  return out << "\n" << tensor.dtype() << ' ' << tensor.shape() << " on " << tensor.device();
}

void add_into(Tensor& into, const Tensor& source) {
  check(into.dtype() == source.dtype(), Error::Kind::DType, "[add_into] expected ", into.dtype(), ", got ",
        source.dtype());
  check(into.device() == source.device(), Error::Kind::Device, "[add_into] expected ", into.device(),
        ", got ", source.device());
  add_into_kernel(into.device(), into, source.expand(into.shape()));
}

Tensor sum_to(const Tensor& tensor, const Shape& shape, double divisor) {
  if (tensor.shape() == shape && divisor == 1) return tensor;
  check(broadcast_shapes("sum_to", tensor.shape(), shape) == tensor.shape(), Error::Kind::Shape, "[sum_to] ",
        shape, " does not broadcast to ", tensor.shape());
  const int extra = tensor.dim() - shape.dim();
  std::vector<int> order, kept;
  for (int axis = 0; axis < tensor.dim(); ++axis) {
    const bool summed = axis < extra || (shape[axis - extra] == 1 && tensor.size(axis) != 1);
    (summed ? order : kept).push_back(axis);
  }
  const int summed_axes = static_cast<int>(order.size());
  order.insert(order.end(), kept.begin(), kept.end());
  Tensor result = Tensor::empty(shape, tensor.dtype(), tensor.device());
  if (tensor.numel() == 0) return result.fill_(0);
  sum_leading_kernel(tensor.device(), result, tensor.permute(order), summed_axes, divisor);
  return result;
}

}  // namespace torus
