// Tensor: a strided view of shared memory. It knows nothing of gradients.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "torus/core/device.h"
#include "torus/core/dtype.h"
#include "torus/core/memory.h"
#include "torus/core/shape.h"

namespace torus {

/// An array of up to 8 axes: a shape, strides and an offset into a storage that other tensors may share.
/// Copying a Tensor copies the view, never the elements; `clone()` copies elements. A default-made Tensor is
/// undefined: it has no storage, and only `defined()` may be asked of it.
class Tensor {
 public:
  Tensor() = default;

  /// Elements that nobody has set.
  static Tensor empty(const Shape& shape, DType dtype = f32, Device device = cpu);
  static Tensor zeros(const Shape& shape, DType dtype = f32, Device device = cpu);
  static Tensor full(const Shape& shape, double value, DType dtype = f32, Device device = cpu);
  /// The values in row-major order; their number must be that of the shape.
  template <class T>
  static Tensor from(const std::vector<T>& values, const Shape& shape) {
    return from_values(values.data(), static_cast<int64_t>(values.size()), dtype_of<T>, shape);
  }
  /// One axis.
  template <class T>
  static Tensor from(std::initializer_list<T> values) {
    return from_values(values.begin(), static_cast<int64_t>(values.size()), dtype_of<T>,
                       {static_cast<int64_t>(values.size())});
  }
  static Tensor scalar(double value, DType dtype = f32) { return full({}, value, dtype); }
  /// 0, 1, ... count - 1.
  static Tensor arange(int64_t count, DType dtype = i64);

  bool defined() const { return storage_ != nullptr; }
  const Shape& shape() const { return shape_; }
  int64_t size(int axis) const { return shape_[checked_axis("size", axis, dim())]; }
  int dim() const { return shape_.dim(); }
  int64_t numel() const { return shape_.numel(); }
  DType dtype() const { return dtype_; }
  Device device() const { return storage_->device(); }
  /// In elements, one an axis; 0 where an axis is expanded.
  const Shape& strides() const { return strides_; }
  int64_t offset() const { return offset_; }
  /// Row-major without gaps.
  bool is_contiguous() const;
  const std::shared_ptr<Storage>& storage() const { return storage_; }
  uint64_t version() const { return storage_->version(); }

  /// First element, to read. T must be the dtype's type. A device tensor's pointer is only for kernels.
  template <class T>
  const T* data() const {
    return static_cast<const T*>(pointer(dtype_of<T>));
  }
  /// First element, to write: bumps the version, so that the tape catches a write to what it saved.
  template <class T>
  T* mutable_data() {
    void* first = pointer(dtype_of<T>);
    storage_->bump_version();
    return static_cast<T*>(first);
  }

  // Views: no element moves. Each throws Error{Shape} where the arguments do not fit.

  /// The same elements in row-major order under another shape; one size may be -1. A copy if strides forbid a view.
  Tensor reshape(const Shape& shape) const;
  /// Swaps two axes.
  Tensor transpose(int a, int b) const;
  /// Axis i of the result is axis order[i] of this.
  Tensor permute(const std::vector<int>& order) const;
  /// Elements first, first + step, ... below last along an axis; negative bounds count from the end. step > 0.
  Tensor slice(int axis, int64_t first, int64_t last, int64_t step = 1) const;
  /// The index-th slice along an axis, which goes.
  Tensor select(int axis, int64_t index) const;
  /// Stretches axes of size 1 (and adds leading ones) to `shape`.
  Tensor expand(const Shape& shape) const;
  /// Adds an axis of size 1 before `axis`.
  Tensor unsqueeze(int axis) const;
  /// Removes an axis of size 1.
  Tensor squeeze(int axis) const;

  /// This, or a row-major copy if it is not contiguous.
  Tensor contiguous() const;
  /// A row-major copy.
  Tensor clone() const;
  /// This, or a converted copy. Floats convert to integers by truncation, anything to bool by != 0.
  Tensor to(DType dtype) const;
  Tensor to(Device device) const;

  /// Sets every element; returns this.
  Tensor& fill_(double value);
  /// Copies `source`, broadcast and converted, into this; returns this.
  Tensor& copy_(const Tensor& source);

  /// The only element, as a double. Throws Error{Shape} unless numel() is 1.
  double item() const;
  /// All elements in row-major order, converted to T.
  template <class T>
  std::vector<T> to_vector() const {
    const Tensor flat = to(cpu).to(dtype_of<T>).contiguous();
    return std::vector<T>(flat.data<T>(), flat.data<T>() + flat.numel());
  }

  /// A view with these sizes, strides (elements) and offset (elements from the storage's start), all unchecked.
  Tensor as_strided(const Shape& shape, const Shape& strides, int64_t offset) const;

 private:
  static Tensor from_values(const void* values, int64_t count, DType dtype, const Shape& shape);
  void* pointer(DType expected) const;

  std::shared_ptr<Storage> storage_;
  Shape shape_, strides_;
  int64_t offset_ = 0;
  DType dtype_ = f32;
};

/// The elements in nested brackets, long axes elided, then shape, dtype and device.
std::ostream& operator<<(std::ostream& out, const Tensor& tensor);

/// into += source, broadcast to `into`. Same floating dtype.
void add_into(Tensor& into, const Tensor& source);
/// Sums `tensor` over the axes that broadcasting `shape` to its shape had stretched: the inverse of expand.
/// Sums 16-bit floats in f32, and rounds after dividing by `divisor`.
Tensor sum_to(const Tensor& tensor, const Shape& shape, double divisor = 1);

}  // namespace torus
