#include "torus/autograd/tape.h"

#include <algorithm>
#include <atomic>
#include <iomanip>
#include <ostream>
#include <set>

#include "torus/core/profiler.h"
#include "torus/core/random.h"

namespace torus {

namespace {

std::atomic<uint64_t> next_tape_id{1};

// The tapes and NoGrads alive on this thread, innermost last; a NoGrad is a null pointer.
struct Scope {
  Tape* tape;
  uint64_t id;
};
thread_local std::vector<Scope> scopes;

Tape* find_tape(uint64_t id) {
  const auto found =
      std::find_if(scopes.begin(), scopes.end(), [=](const Scope& s) { return s.tape && s.id == id; });
  return found == scopes.end() ? nullptr : found->tape;
}

thread_local const char* backward_op = nullptr;  // whose backward is running

// Gradients of leaves with hooks, which must be complete before the hooks see them; null outside backward.
using HookedGradients = std::vector<std::pair<std::shared_ptr<detail::GradSlot>, Tensor>>;
thread_local HookedGradients* hooked_gradients = nullptr;

// Sets a variable for a while.
template <class T>
class Exchanged {
 public:
  Exchanged(T& variable, T value) : variable_(variable), old_(std::exchange(variable, value)) {}
  ~Exchanged() { variable_ = old_; }
  Exchanged(const Exchanged&) = delete;
  Exchanged& operator=(const Exchanged&) = delete;

 private:
  T& variable_;
  T old_;
};

// A leaf that the function of `recompute` used in forward, and its value then.
struct UsedLeaf {
  Variable leaf;
  Saved value;
};
thread_local std::vector<UsedLeaf>* used_leaves = nullptr;  // null: nobody asks

// Where copies of Saved tell their storage while a tape counts what its nodes keep.
thread_local std::vector<const Storage*>* held_storages = nullptr;

}  // namespace

// ---------------------------------------------------------------------------------------------- Variable

Variable::Variable(Tensor value, bool requires_grad) : state_(std::make_shared<detail::VariableState>()) {
  check(value.defined(), Error::Kind::Value, "[variable] the tensor is undefined");
  check(!requires_grad || is_floating(value.dtype()), Error::Kind::DType,
        "[variable] only floating tensors have gradients, got ", value.dtype());
  state_->value = std::move(value);
  state_->requires_grad = requires_grad;
  if (requires_grad) state_->slot = std::make_shared<detail::GradSlot>();
}

const Tensor& Variable::value() const {
  check(defined(), Error::Kind::Value, "[variable] the variable is undefined");
  return state_->value;
}

const Tensor& Variable::grad() const {
  static const Tensor none;
  check(defined(), Error::Kind::Value, "[variable] the variable is undefined");
  check(state_->tape == 0 || state_->slot, Error::Kind::Value,
        "[grad] only leaves keep a gradient; this variable is the output of an op");
  return state_->slot ? state_->slot->grad : none;
}

void Variable::zero_grad() {
  if (defined() && state_->slot) state_->slot->grad = Tensor();
}

HookHandle Variable::on_gradient(GradientHook hook) const {
  check(defined(), Error::Kind::Value, "[on_gradient] the variable is undefined");
  check(bool(hook), Error::Kind::Value, "[on_gradient] expected a hook, got an empty function");
  HookHandle handle;
  if (!state_->requires_grad) return handle;
  std::shared_ptr<detail::Hooks> hooks;
  if (state_->tape == 0) {
    hooks = {state_->slot, &state_->slot->hooks};
  } else {
    Tape* tape = find_tape(state_->tape);
    check(tape, Error::Kind::Value,
          "[on_gradient] the variable was recorded on a tape that is gone or lives on another thread");
    auto& of_output = tape->hooks_[tape->place(*this)];
    if (!of_output) of_output = std::make_shared<detail::Hooks>();
    hooks = of_output;
  }
  handle.id_ = hooks->next++;
  handle.hooks_ = hooks;
  hooks->list.emplace(handle.id_, std::move(hook));
  return handle;
}

Tensor detail::Hooks::apply(Tensor grad) const {
  const auto now = list;  // a hook may remove itself
  for (const auto& [id, hook] : now) {
    const Tensor result = hook(grad);
    if (!result.defined()) continue;
    check(
        result.shape() == grad.shape() && result.dtype() == grad.dtype() && result.device() == grad.device(),
        Error::Kind::Shape, "[on_gradient] a hook must return ", grad.dtype(), ' ', grad.shape(), " on ",
        grad.device(), ", got ", result.dtype(), ' ', result.shape(), " on ", result.device());
    grad = result;
  }
  return grad;
}

// ------------------------------------------------------------------------------------------------- Saved

Saved::Saved(const Saved& other) : tensor_(other.tensor_), version_(other.version_) {
  if (held_storages && tensor_.defined()) held_storages->push_back(tensor_.storage().get());
}

const Tensor& Saved::get() const {
  check(!tensor_.defined() || tensor_.version() == version_, Error::Kind::Version, "[",
        backward_op ? backward_op : "saved", "] a tensor ", tensor_.shape(),
        " that backward needs was written to after it was saved: expected version ", version_, ", got ",
        tensor_.defined() ? tensor_.version() : 0);
  return tensor_;
}

// -------------------------------------------------------------------------------------------------- Tape

Tape::Tape() : id_(next_tape_id++) { scopes.push_back({this, id_}); }

Tape::~Tape() {
  std::erase_if(scopes, [this](const Scope& s) { return s.tape == this; });
}

NoGrad::NoGrad() { scopes.push_back({nullptr, 0}); }

NoGrad::~NoGrad() {
  const auto last = std::find_if(scopes.rbegin(), scopes.rend(), [](const Scope& s) { return !s.tape; });
  scopes.erase(std::next(last).base());
}

Tape* Tape::current() { return scopes.empty() ? nullptr : scopes.back().tape; }

int64_t Tape::live_nodes() const {
  return std::count_if(nodes_.begin(), nodes_.end(), [](const Node& node) { return bool(node.backward); });
}

TapeSummary Tape::summary() const {
  TapeSummary summary;
  std::vector<const Storage*> held;
  std::set<const Storage*> counted;
  const Exchanged listen(held_storages, &held);
  for (const Node& node : nodes_) {
    if (!node.backward) continue;
    auto row = std::find_if(summary.rows.begin(), summary.rows.end(),
                            [&](const TapeSummary::Row& other) { return other.op == node.op; });
    if (row == summary.rows.end()) row = summary.rows.insert(row, {node.op, 0, 0});
    held.clear();
    const BackwardFunction copy = node.backward;  // closures are opaque, but copies of what they saved tell
    for (const Storage* storage : held)
      if (counted.insert(storage).second) row->bytes += static_cast<int64_t>(storage->bytes());
    ++row->nodes;
  }
  for (const auto& row : summary.rows) summary.nodes += row.nodes, summary.bytes += row.bytes;
  std::stable_sort(summary.rows.begin(), summary.rows.end(),
                   [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  return summary;
}

std::ostream& operator<<(std::ostream& out, const TapeSummary& summary) {
  size_t width = 5;
  for (const auto& row : summary.rows) width = std::max(width, row.op.size());
  const auto line = [&](const std::string& op, const auto& nodes, const auto& bytes) {
    out << op << std::string(width - op.size(), ' ') << std::right << std::setw(10) << nodes << std::setw(16)
        << bytes << '\n';
  };
  line("op", "nodes", "saved bytes");
  for (const auto& row : summary.rows) line(row.op, row.nodes, row.bytes);
  line("total", summary.nodes, summary.bytes);
  return out;
}

size_t Tape::place(const Variable& value) const {
  const auto& state = *value.state_;
  return nodes_[static_cast<size_t>(state.node)].first_output + static_cast<size_t>(state.output);
}

std::string Tape::where(const Node& node) const {
  if (!node.recorded.empty()) return node.recorded;
  return "node " + std::to_string(&node - nodes_.data()) + ", recorded outside AnomalyMode";
}

std::vector<Variable> Tape::append(const char* op, std::span<const Variable> inputs,
                                   std::span<const Tensor> outputs, BackwardFunction backward) {
  Node node{op, {}, output_count_, outputs.size(), std::move(backward), {}};
  if (AnomalyMode::active())
    node.recorded = detail::describe_call(inputs, outputs, static_cast<int64_t>(nodes_.size()));
  node.inputs.reserve(inputs.size());
  for (const Variable& input : inputs) {
    Edge& edge = node.inputs.emplace_back();
    if (!input.requires_grad()) continue;
    auto& state = *input.state_;
    edge.wanted = true;
    edge.shape = input.shape();
    edge.dtype = input.dtype();
    if (state.tape == id_) {
      edge.node = state.node;
      edge.output = state.output;
    } else {
      check(state.tape == 0 || !inside_recompute_, Error::Kind::Value, "[", op,
            "] inside recompute, a value of the outer tape was captured: pass it as an input of recompute");
      if (!state.slot) state.slot = std::make_shared<detail::GradSlot>();
      edge.slot = state.slot;
    }
  }
  std::vector<Variable> results;
  results.reserve(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    Variable& result = results.emplace_back(outputs[i]);
    if (!is_floating(outputs[i].dtype())) continue;
    result.state_->requires_grad = true;
    result.state_->tape = id_;
    result.state_->node = static_cast<int32_t>(nodes_.size());
    result.state_->output = static_cast<int32_t>(i);
  }
  nodes_.push_back(std::move(node));
  output_count_ += outputs.size();
  return results;
}

namespace {

// Adds `grad` into `sum`, taking it over if `sum` is undefined.
void add_gradient(Tensor& sum, Tensor grad) {
  if (!sum.defined()) {
    sum = std::move(grad);
    return;
  }
  // Others may hold this storage: the same gradient often flows to several inputs.
  if (sum.storage().use_count() > 1 || !sum.is_contiguous()) sum = sum.clone();
  add_into(sum, grad);
}

// The same for a leaf, whose gradient must be its own memory: optimizers and users write to it.
void add_to_leaf(Tensor& sum, Tensor grad) {
  if (sum.defined()) return add_into(sum, grad);
  if (grad.storage().use_count() > 1 || !grad.is_contiguous()) grad = grad.clone();
  sum = std::move(grad);
}

// A leaf's gradient: kept back until it is complete if hooks want to see it. Returns the sum so far.
const Tensor& send_to_leaf(const std::shared_ptr<detail::GradSlot>& slot, Tensor grad) {
  if (slot->hooks.list.empty()) {
    add_to_leaf(slot->grad, std::move(grad));
    return slot->grad;
  }
  auto found = std::find_if(hooked_gradients->begin(), hooked_gradients->end(),
                            [&](const auto& entry) { return entry.first == slot; });
  if (found == hooked_gradients->end()) found = hooked_gradients->insert(found, {slot, Tensor()});
  add_gradient(found->second, std::move(grad));
  return found->second;
}

}  // namespace

Tensor& Tape::entry_of(const Edge& edge, std::vector<Tensor>& table) const {
  return table[nodes_[static_cast<size_t>(edge.node)].first_output + static_cast<size_t>(edge.output)];
}

// What a node may add into on its own. The memory of a leaf's gradient stays; any other may be shared with
// gradients of other values, as the two of an addition are.
Tensor Tape::writable_sum(const Edge& edge, std::vector<Tensor>& table) const {
  // AnomalyMode looks at each gradient before it is added; hooks wait for a sum of their own.
  if (!edge.wanted || AnomalyMode::active() || (edge.slot && !edge.slot->hooks.list.empty())) return Tensor();
  const Tensor& sum = edge.slot ? edge.slot->grad : entry_of(edge, table);
  const bool writable = sum.defined() && sum.is_contiguous() && (edge.slot || sum.storage().use_count() == 1);
  return writable ? sum : Tensor();
}

void Tape::accumulate(const Node& node, size_t input, Tensor grad, std::vector<Tensor>& table) {
  const Edge& edge = node.inputs[input];
  if (!edge.wanted || !grad.defined()) return;
  check(grad.dtype() == edge.dtype, Error::Kind::DType, "[", node.op, "] backward returned ", grad.dtype(),
        " for input ", input, " of ", edge.dtype);
  if (grad.shape() != edge.shape) grad = sum_to(grad, edge.shape);
  const Tensor* sum;
  if (edge.slot) {
    sum = &send_to_leaf(edge.slot, std::move(grad));
  } else {
    Tensor& entry = entry_of(edge, table);
    add_gradient(entry, std::move(grad));
    sum = &entry;
  }
  if (AnomalyMode::active())
    detail::check_gradient(node.op, "summed to", *sum,
                           "input " + std::to_string(input) + " with what was there before", where(node));
}

void Tape::backward(const Variable& loss, const BackwardOptions& options) {
  check(loss.defined(), Error::Kind::Value, "[backward] the loss is undefined");
  Tensor seed = options.seed;
  if (!seed.defined()) {
    check(loss.numel() == 1, Error::Kind::Shape,
          "[backward] the loss must have one element unless a seed is given, got shape ", loss.shape());
    seed = Tensor::full(loss.shape(), 1, loss.dtype(), loss.device());
  }
  backward({loss}, {seed}, options.keep_graph);
}

void Tape::backward(const std::vector<Variable>& outputs, const std::vector<Tensor>& seeds, bool keep_graph) {
  check(outputs.size() == seeds.size(), Error::Kind::Value, "[backward] expected a seed an output, got ",
        outputs.size(), " outputs and ", seeds.size(), " seeds");
  const ProfileScope walk("backward");
  const NoGrad backward_never_records;
  HookedGradients own;
  const Exchanged hooked(hooked_gradients, inside_recompute_ && hooked_gradients ? hooked_gradients : &own);
  std::vector<Tensor> table(output_count_);
  int32_t last = -1;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!seeds[i].defined()) continue;
    const Variable& output = outputs[i];
    check(output.requires_grad(), Error::Kind::Value,
          "[backward] the loss depends on nothing that wants a gradient; was it computed while this tape was "
          "the innermost?");
    const auto& state = *output.state_;
    check(state.tape == id_ || state.tape == 0, Error::Kind::Value, "[backward] the loss is on another tape");
    check(seeds[i].shape() == output.shape() && seeds[i].dtype() == output.dtype(), Error::Kind::Shape,
          "[backward] the seed must be ", output.dtype(), " ", output.shape(), ", got ", seeds[i].dtype(),
          " ", seeds[i].shape());
    if (state.tape == 0) {  // a leaf is its own derivative
      send_to_leaf(state.slot, seeds[i]);
      continue;
    }
    add_gradient(table[place(output)], seeds[i]);
    last = std::max(last, state.node);
  }

  std::vector<bool> wanted;
  for (int32_t index = last; index >= 0; --index) {
    Node& node = nodes_[static_cast<size_t>(index)];
    const std::span grads(table.begin() + static_cast<ptrdiff_t>(node.first_output), node.output_count);
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& grad) { return grad.defined(); })) continue;
    check(bool(node.backward), Error::Kind::Value, "[", node.op,
          "] what backward needs was freed by an earlier backward; call backward(loss, {.keep_graph = true}) "
          "first");
    ProfileScope scope(node.op, ScopeKind::backward);
    if (scope)
      for (const Tensor& grad : grads) scope.show(grad);
    const auto first_hooks = hooks_.lower_bound(node.first_output),
               last_hooks = hooks_.lower_bound(node.first_output + node.output_count);
    for (auto found = first_hooks; found != last_hooks; ++found)
      if (Tensor& grad = table[found->first]; grad.defined()) grad = found->second->apply(std::move(grad));
    const auto look_through = [&](const char* what, std::span<const Tensor> gradients, const char* of) {
      if (!AnomalyMode::active()) return;
      for (size_t i = 0; i < gradients.size(); ++i)
        detail::check_gradient(node.op, what, gradients[i], of + std::to_string(i), where(node));
    };
    look_through("was given", grads, "output ");
    wanted.assign(node.inputs.size(), false);
    for (size_t i = 0; i < node.inputs.size(); ++i) wanted[i] = node.inputs[i].wanted;
    std::vector<bool> summed(node.inputs.size(), false);  // by the node itself
    const std::function sum_of = [&](size_t input) {
      Tensor sum = summed[input] ? Tensor() : writable_sum(node.inputs[input], table);
      summed[input] = summed[input] || sum.defined();
      return sum;
    };
    std::vector<Tensor> results;
    {
      const Exchanged running(backward_op, node.op);
      results = node.backward(OutputGrads(grads, wanted, keep_graph, sum_of));
    }
    check(results.size() == node.inputs.size(), Error::Kind::Value, "[", node.op, "] backward returned ",
          results.size(), " gradients for ", node.inputs.size(), " inputs");
    look_through("made", results, "input ");
    std::fill(grads.begin(), grads.end(), Tensor());
    if (!keep_graph) {
      node.backward = nullptr;
      hooks_.erase(first_hooks, last_hooks);
    }
    for (size_t i = 0; i < results.size(); ++i)
      if (!summed[i]) accumulate(node, i, std::move(results[i]), table);
  }
  for (auto& [slot, grad] : own) {
    grad = slot->hooks.apply(std::move(grad));
    if (AnomalyMode::active())
      detail::check_gradient("on_gradient", "was handed", grad, "a leaf", "by one of its hooks");
    add_to_leaf(slot->grad, std::move(grad));
  }
}

// ------------------------------------------------------------------------------------------------ record

namespace {

void note_used(const Variable& leaf) {
  const Tensor& value = leaf.value();
  if (std::none_of(used_leaves->begin(), used_leaves->end(),
                   [&](const UsedLeaf& other) { return &other.leaf.value() == &value; }))
    used_leaves->push_back({leaf, Saved(value)});
}

}  // namespace

bool recording(const char* op, std::span<const Variable> inputs) {
  bool wanted = false;
  for (const Variable& input : inputs) {
    if (!input.requires_grad()) continue;
    check(input.is_leaf() || find_tape(input.tape_id()), Error::Kind::Value, "[", op,
          "] an input was recorded on a tape that is gone or lives on another thread; detach() keeps its "
          "value");
    wanted = true;
    if (used_leaves && input.is_leaf()) note_used(input);
  }
  return wanted && Tape::current();
}

void check_defined(const char* op, const char* name, const Variable& operand) {
  check(operand.defined(), Error::Kind::Value, "[", op, "] expected ", name, ", got an undefined variable");
}

std::vector<Variable> record(const char* op, std::span<const Variable> inputs,
                             std::span<const Tensor> outputs, BackwardFunction backward,
                             Infinities infinities) {
  Tape* tape = recording(op, inputs) ? Tape::current() : nullptr;
  if (detail::scope_listeners.load(std::memory_order_relaxed) != 0) [[unlikely]]
    for (const Variable& input : inputs)
      if (input.defined()) detail::show_in_forward(op, input.value());
  if (AnomalyMode::active())
    detail::check_forward(op, inputs, outputs, infinities, tape ? tape->recorded_nodes() : -1);
  if (!tape) return std::vector<Variable>(outputs.begin(), outputs.end());
  for (const Tensor& output : outputs)
    if (output.defined()) output.storage()->note_op(op);
  return tape->append(op, inputs, outputs, std::move(backward));
}

Variable record(const char* op, std::span<const Variable> inputs, const Tensor& output,
                BackwardFunction backward, Infinities infinities) {
  return record(op, inputs, std::span(&output, 1), std::move(backward), infinities)[0];
}

namespace {

// Puts generators back where they are now, whatever happens in between.
class KeepStates {
 public:
  explicit KeepStates(std::span<const detail::DrawObserver::Draws> drawn) {
    for (const auto& draws : drawn) states_.emplace_back(draws.generator, draws.generator->state());
  }
  ~KeepStates() {
    for (const auto& [generator, state] : states_) generator->set_state(state);
  }
  KeepStates(const KeepStates&) = delete;
  KeepStates& operator=(const KeepStates&) = delete;

 private:
  std::vector<std::pair<Generator*, Generator::State>> states_;
};

// An output without its value, which `recompute` must not hold.
struct Form {
  DType dtype;
  Shape shape;
};

}  // namespace

std::vector<Variable> recompute_list(
    std::function<std::vector<Variable>(const std::vector<Variable>&)> function,
    std::vector<Variable> inputs) {
  ProfileScope scope("recompute", ScopeKind::forward);
  for (const Variable& input : inputs)
    if (scope && input.defined()) scope.show(input.value());
  Tape* tape = Tape::current();
  recording("recompute", inputs);  // for its check of dead tapes
  if (!tape) return function(inputs);

  std::vector<Tensor> outputs;
  std::vector<Form> forms;
  std::vector<Saved> saved;
  std::vector<UsedLeaf> used;
  std::vector<detail::DrawObserver::Draws> drawn;
  {
    const NoGrad forward_only;
    const Exchanged note(used_leaves, &used);
    const detail::DrawObserver observer;
    for (const Variable& output : function(inputs)) {
      check(output.defined(), Error::Kind::Value, "[recompute] expected defined outputs, got output ",
            outputs.size(), " undefined");
      outputs.push_back(output.value());
      forms.push_back({output.dtype(), output.shape()});
    }
    for (const Variable& input : inputs) saved.emplace_back(input.defined() ? input.value() : Tensor());
    drawn = observer.draws();
  }
  return tape->append("recompute", inputs, outputs, [=](const OutputGrads& grads) {
    for (const auto& [leaf, value] : used)
      check(leaf.value().storage() == value.get().storage(), Error::Kind::Version,
            "[recompute] expected a leaf ", value.get().shape(), " as it was in forward, got another ",
            leaf.shape(), " in its place");
    std::vector<Variable> leaves;
    for (size_t i = 0; i < saved.size(); ++i)
      leaves.push_back(saved[i].defined() ? Variable(saved[i].get(), grads.wants(i)) : Variable());
    Tape inner;
    inner.inside_recompute_ = true;
    std::vector<Variable> again;
    {
      const KeepStates keep(drawn);
      for (const auto& draws : drawn) draws.generator->set_state(draws.first);
      const detail::DrawObserver observer;
      again = function(leaves);
      check(observer.draws() == drawn, Error::Kind::Value,
            "[recompute] expected the random draws of forward, got others the second time; was a module set "
            "to train or not in between?");
    }
    check(again.size() == forms.size(), Error::Kind::Value,
          "[recompute] expected as many outputs as in forward, ", forms.size(), ", got ", again.size(),
          " the second time");
    std::vector<Tensor> seeds;
    for (size_t i = 0; i < again.size(); ++i) {
      const auto& [dtype, shape] = forms[i];
      check(again[i].defined(), Error::Kind::Value, "[recompute] expected output ", i,
            " as in forward, got an undefined one the second time");
      check(again[i].dtype() == dtype && again[i].shape() == shape, Error::Kind::Shape,
            "[recompute] expected output ", i, " to be ", dtype, ' ', shape, " as in forward, got ",
            again[i].dtype(), ' ', again[i].shape(), " the second time");
      seeds.push_back(again[i].requires_grad() ? grads[i] : Tensor());
    }
    inner.backward(again, seeds);
    std::vector<Tensor> results;
    for (const Variable& leaf : leaves) results.push_back(leaf.requires_grad() ? leaf.grad() : Tensor());
    return results;
  });
}

}  // namespace torus
