// Variable: a tensor and its place on a tape. Parameter: a leaf with a gradient that persists.
#pragma once

#include <cstdint>
#include <memory>

#include "torus/core/tensor.h"

namespace torus {

class Tape;

namespace detail {

/// Where the gradient of a leaf accumulates. Shared by the leaf and the tapes that used it.
struct GradSlot {
  Tensor grad;
};

struct VariableState {
  Tensor value;
  bool requires_grad = false;
  uint64_t tape = 0;  // id of the tape that recorded it, 0 for a leaf
  int32_t node = -1;
  int32_t output = 0;
  std::shared_ptr<GradSlot> slot;  // made for leaves, and for values that an inner tape takes as leaves
};

}  // namespace detail

/// What ops take and return: a value, and where on which tape it was recorded. Copies are handles of the same
/// Variable. A Variable outlives its tape as a value only: using it in an op then throws.
class Variable {
 public:
  /// Undefined; stands for an optional argument that is not given.
  Variable() = default;
  /// A leaf. It gets a gradient from `Tape::backward` if `requires_grad`.
  Variable(Tensor value, bool requires_grad = false);

  bool defined() const { return state_ != nullptr; }
  const Tensor& value() const;
  const Shape& shape() const { return value().shape(); }
  int64_t size(int axis) const { return value().size(axis); }
  int dim() const { return value().dim(); }
  int64_t numel() const { return value().numel(); }
  DType dtype() const { return value().dtype(); }
  Device device() const { return value().device(); }
  double item() const { return value().item(); }

  bool requires_grad() const { return defined() && state_->requires_grad; }
  bool is_leaf() const { return defined() && state_->tape == 0; }
  /// The id of the tape that recorded this, 0 for a leaf.
  uint64_t tape_id() const { return defined() ? state_->tape : 0; }

  /// The gradient that `backward` added up for this leaf (or, on a value of an outer tape, what an inner tape
  /// added); an undefined Tensor if there was none. Throws for a value in the middle of its own tape.
  const Tensor& grad() const;
  /// Drops the gradient.
  void zero_grad();
  /// The same value as a leaf that wants no gradient.
  Variable detach() const { return Variable(value()); }

 protected:
  std::shared_ptr<detail::VariableState> state_;
  friend class Tape;
};

/// A leaf that a module trains. `backward` adds into its gradient; the gradient outlives the tape, until
/// `zero_grad()`. Copies are handles of the same parameter: that is how weights are tied.
class Parameter : public Variable {
 public:
  Parameter() = default;
  explicit Parameter(Tensor value) : Variable(std::move(value), true) {}

  /// For optimizers and checkpoints: writing through it is caught if a live tape has saved the old value.
  Tensor& mutable_value() { return state_->value; }
  Tensor& mutable_grad() { return state_->slot->grad; }
};

}  // namespace torus
