// Variable: a tensor and its place on a tape. Parameter: a leaf with a gradient that persists.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "torus/core/tensor.h"

namespace torus {

class Tape;

/// Called with a gradient, which it must not write to. Returns one of the same shape and dtype to use
/// instead, or an undefined Tensor to leave it.
using GradientHook = std::function<Tensor(const Tensor& grad)>;

namespace detail {

struct Hooks {
  std::map<uint64_t, GradientHook> list;  // in the order in which they were added
  uint64_t next = 0;

  Tensor apply(Tensor grad) const;
};

/// Where the gradient of a leaf accumulates. Shared by the leaf and the tapes that used it.
struct GradSlot {
  Tensor grad;
  Hooks hooks;
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

/// Takes a gradient hook away again; the hook stays if the handle is dropped.
class HookHandle {
 public:
  HookHandle() = default;
  /// From now on the hook is not called. Does nothing the second time, or if the variable is gone.
  void remove() {
    if (const auto hooks = hooks_.lock()) hooks->list.erase(id_);
  }

 private:
  std::weak_ptr<detail::Hooks> hooks_;
  uint64_t id_ = 0;
  friend class Variable;
};

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
  /// Has `hook` called with the complete gradient of each backward, once however often the value was used,
  /// before it goes further: on into the op that made the value, or, at the end of backward, into the
  /// gradient of a leaf. What it returns goes on instead. The hook must not hold this Variable: neither would
  /// ever be freed. A value that gets no gradient calls no hook; hooks on the output of an op are gone with
  /// its tape, and throw if it is.
  HookHandle on_gradient(GradientHook hook) const;
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
