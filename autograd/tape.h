// The tape: ops append nodes while one is alive, backward walks them in reverse.
#pragma once

#include <functional>
#include <initializer_list>
#include <iosfwd>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "torus/autograd/anomaly.h"
#include "torus/autograd/variable.h"

namespace torus {

/// A tensor that backward needs, kept with its version: `get` throws Error{Version}, naming the op that saved
/// it, if anyone wrote to the storage since.
class Saved {
 public:
  Saved() = default;
  explicit Saved(const Tensor& tensor) : tensor_(tensor), version_(tensor.defined() ? tensor.version() : 0) {}
  Saved(const Saved& other);
  Saved(Saved&&) noexcept = default;
  Saved& operator=(const Saved&) = default;
  Saved& operator=(Saved&&) noexcept = default;
  const Tensor& get() const;
  bool defined() const { return tensor_.defined(); }

 private:
  Tensor tensor_;
  uint64_t version_ = 0;
};

/// What a node's backward receives: the gradient of each output and which inputs want one.
class OutputGrads {
 public:
  OutputGrads(std::span<const Tensor> grads, const std::vector<bool>& wanted, bool keeps_graph,
              const std::function<Tensor(size_t)>& sums)
      : grads_(grads), wanted_(wanted), keeps_graph_(keeps_graph), sums_(sums) {}
  /// The gradient of an output, in any strides; undefined where the loss does not depend on that output.
  const Tensor& operator[](size_t output) const { return grads_[output]; }
  bool wants(size_t input) const { return wanted_[input]; }
  /// The contiguous gradient that an input has so far, if there is one that may be written to: backward must
  /// then add into it and return it. Saves the engine an addition. Else an undefined Tensor.
  Tensor sum(size_t input) const { return sums_(input); }
  /// Whether backward may run again, so that what was saved must stay as it is.
  bool keeps_graph() const { return keeps_graph_; }

 private:
  std::span<const Tensor> grads_;
  const std::vector<bool>& wanted_;
  bool keeps_graph_;
  const std::function<Tensor(size_t)>& sums_;
};

/// Returns one gradient an input, undefined where none is wanted or it is zero. A gradient may have any shape
/// that the input broadcast to: the engine sums it back.
using BackwardFunction = std::function<std::vector<Tensor>(const OutputGrads&)>;

/// What the nodes of a tape keep for backward.
struct TapeSummary {
  struct Row {
    std::string op;
    int64_t nodes = 0;
    int64_t bytes = 0;  // of the storages that they keep; one that several ops keep counts for the first
  };
  std::vector<Row> rows;  // most bytes first
  int64_t nodes = 0, bytes = 0;
};
std::ostream& operator<<(std::ostream& out, const TapeSummary& summary);

/// An append-only record of the ops that ran on this thread while it was alive and innermost. First order
/// only.
class Tape {
 public:
  Tape();
  ~Tape();
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  struct BackwardOptions {
    Tensor seed = {};         // gradient of the loss; undefined: 1, and the loss must have one element
    bool keep_graph = false;  // keep what the nodes saved, so that backward can run again
  };

  /// Adds d(loss)/d(leaf) into the gradient of every leaf and Parameter that `loss` depends on. Walks the
  /// nodes in reverse, once, without recursion; frees what each node saved as it passes.
  void backward(const Variable& loss, const BackwardOptions& options);
  void backward(const Variable& loss) { backward(loss, BackwardOptions{}); }
  /// The same for several outputs at once; `seeds` holds the gradient of each, undefined for none.
  void backward(const std::vector<Variable>& outputs, const std::vector<Tensor>& seeds,
                bool keep_graph = false);

  /// Nodes recorded so far; they are numbered from 0.
  int64_t recorded_nodes() const { return static_cast<int64_t>(nodes_.size()); }
  /// Nodes recorded whose saved tensors are still held.
  int64_t live_nodes() const;
  /// What these hold, by op, parameters and leaves among it. Counted only here.
  TapeSummary summary() const;

  /// The innermost tape of this thread, or nullptr where nothing records (no tape, or NoGrad inside it).
  static Tape* current();

  /// For `record` only: appends a node and returns its outputs.
  std::vector<Variable> append(const char* op, std::span<const Variable> inputs,
                               std::span<const Tensor> outputs, BackwardFunction backward);

 private:
  struct Edge {
    bool wanted = false;
    int32_t node = -1, output = 0;           // a value of this tape
    std::shared_ptr<detail::GradSlot> slot;  // a leaf
    Shape shape;
    DType dtype = f32;
  };
  struct Node {
    const char* op;
    std::vector<Edge> inputs;
    size_t first_output, output_count;  // into the table of gradients
    BackwardFunction backward;          // empty once consumed
    std::string recorded;               // where, for AnomalyMode
  };

  size_t place(const Variable& value) const;  // in the table of gradients
  std::string where(const Node& node) const;
  // Where the gradient of a value of this tape adds up.
  Tensor& entry_of(const Edge& edge, std::vector<Tensor>& table) const;
  Tensor writable_sum(const Edge& edge, std::vector<Tensor>& table) const;
  void accumulate(const Node& node, size_t input, Tensor grad, std::vector<Tensor>& table);

  uint64_t id_;
  std::vector<Node> nodes_;
  size_t output_count_ = 0;
  std::map<size_t, std::shared_ptr<detail::Hooks>> hooks_;  // on outputs, by their place in the table
  // Inside recompute: the gradient of a captured value of the outer tape would be lost, and the gradients of
  // leaves are not complete before the outer backward is done.
  bool inside_recompute_ = false;

  friend class Variable;
  friend std::vector<Variable> recompute_list(
      std::function<std::vector<Variable>(const std::vector<Variable>&)> function,
      std::vector<Variable> inputs);
};

/// While alive, nothing records on this thread (a Tape made inside it does).
class NoGrad {
 public:
  NoGrad();
  ~NoGrad();
  NoGrad(const NoGrad&) = delete;
  NoGrad& operator=(const NoGrad&) = delete;
};

/// True if an op on these inputs will be recorded: ask before computing what only backward needs. Throws if
/// an input belongs to a tape that is gone.
bool recording(const char* op, std::span<const Variable> inputs);
inline bool recording(const char* op, std::initializer_list<Variable> inputs) {
  return recording(op, std::span(inputs.begin(), inputs.size()));
}

/// Begins an op: throws "[op] expected x, got an undefined variable" where the operand called `name` is none.
void check_defined(const char* op, const char* name, const Variable& operand);

/// Ends an op: wraps its outputs, and appends a node if one is to be recorded. `op` must outlive the tape.
/// Undefined inputs are allowed: they want no gradient. `infinities` are those that AnomalyMode is to accept.
/// A profiler shows the inputs' shapes if the op began with `ProfileScope scope(op, ScopeKind::forward);`.
std::vector<Variable> record(const char* op, std::span<const Variable> inputs,
                             std::span<const Tensor> outputs, BackwardFunction backward,
                             Infinities infinities = Infinities::none);
Variable record(const char* op, std::span<const Variable> inputs, const Tensor& output,
                BackwardFunction backward, Infinities infinities = Infinities::none);
inline Variable record(const char* op, std::initializer_list<Variable> inputs, const Tensor& output,
                       BackwardFunction backward, Infinities infinities = Infinities::none) {
  return record(op, std::span(inputs.begin(), inputs.size()), output, std::move(backward), infinities);
}

/// `function(inputs)` without keeping what its ops save: backward runs it again, with every generator that it
/// drew from where that was, so dropout repeats; generators made outside of it must outlive backward. Always
/// recorded while a tape is alive, because parameters inside may want gradients. `function` must depend on
/// values of the outer tape only through `inputs`; a captured one throws. It must compute the same both
/// times, so leave modules in the mode they had in forward until backward is done. What tells that it does
/// not throws: leaves that were written to or replaced, other draws, and outputs of another count, shape or
/// dtype.
std::vector<Variable> recompute_list(
    std::function<std::vector<Variable>(const std::vector<Variable>&)> function,
    std::vector<Variable> inputs);

/// The same for a function of Variables that returns one: `recompute(block, x)`.
template <class F, class... Inputs>
Variable recompute(F function, const Inputs&... inputs) {
  auto spread = [function](const std::vector<Variable>& list) {
    return [&]<size_t... I>(std::index_sequence<I...>) { return std::vector<Variable>{function(list[I]...)}; }
    (std::index_sequence_for<Inputs...>{});
  };
  return recompute_list(spread, {inputs...})[0];
}

}  // namespace torus
