#include "torus/autograd/tape.h"

#include <algorithm>
#include <atomic>

namespace torus {

namespace {

std::atomic<uint64_t> next_tape_id{1};

// The tapes and NoGrads alive on this thread, innermost last; a NoGrad is a null pointer.
struct Scope {
  Tape* tape;
  uint64_t id;
};
thread_local std::vector<Scope> scopes;

thread_local const char* backward_op = nullptr;  // whose backward is running

bool alive(uint64_t tape) {
  return std::any_of(scopes.begin(), scopes.end(), [=](const Scope& s) { return s.tape && s.id == tape; });
}

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

// ------------------------------------------------------------------------------------------------- Saved

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

std::vector<Variable> Tape::append(const char* op, std::span<const Variable> inputs,
                                   std::span<const Tensor> outputs, BackwardFunction backward) {
  Node node{op, {}, output_count_, outputs.size(), std::move(backward)};
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
      check(state.tape == 0 || !refuses_outer_, Error::Kind::Value, "[", op,
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

}  // namespace

void Tape::accumulate(const Node& node, size_t input, Tensor grad, std::vector<Tensor>& table) {
  const Edge& edge = node.inputs[input];
  if (!edge.wanted || !grad.defined()) return;
  check(grad.dtype() == edge.dtype, Error::Kind::DType, "[", node.op, "] backward returned ", grad.dtype(),
        " for input ", input, " of ", edge.dtype);
  if (grad.shape() != edge.shape) grad = sum_to(grad, edge.shape);
  if (edge.slot) {
    Tensor& sum = edge.slot->grad;
    // A leaf's gradient must be its own memory: optimizers and users write to it.
    if (!sum.defined() && (grad.storage().use_count() > 1 || !grad.is_contiguous())) grad = grad.clone();
    if (sum.defined()) add_into(sum, grad);
    else sum = std::move(grad);
  } else {
    add_gradient(table[nodes_[static_cast<size_t>(edge.node)].first_output + static_cast<size_t>(edge.output)],
                 std::move(grad));
  }
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
  std::vector<Tensor> table(output_count_);
  int32_t last = -1;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!seeds[i].defined()) continue;
    const Variable& output = outputs[i];
    check(output.requires_grad(), Error::Kind::Value,
          "[backward] the loss depends on nothing that wants a gradient; was it computed while this tape was the "
          "innermost?");
    const auto& state = *output.state_;
    check(state.tape == id_ || state.tape == 0, Error::Kind::Value, "[backward] the loss is on another tape");
    check(seeds[i].shape() == output.shape() && seeds[i].dtype() == output.dtype(), Error::Kind::Shape,
          "[backward] the seed must be ", output.dtype(), " ", output.shape(), ", got ", seeds[i].dtype(), " ",
          seeds[i].shape());
    if (state.tape == 0) {  // a leaf is its own derivative
      if (state.slot->grad.defined()) add_into(state.slot->grad, seeds[i]);
      else state.slot->grad = seeds[i].clone();
      continue;
    }
    add_gradient(table[nodes_[static_cast<size_t>(state.node)].first_output + static_cast<size_t>(state.output)],
                 seeds[i]);
    last = std::max(last, state.node);
  }

  const NoGrad backward_never_records;
  const char* outer_op = backward_op;
  std::vector<bool> wanted;
  for (int32_t index = last; index >= 0; --index) {
    Node& node = nodes_[static_cast<size_t>(index)];
    const std::span grads(table.begin() + static_cast<ptrdiff_t>(node.first_output), node.output_count);
    if (std::none_of(grads.begin(), grads.end(), [](const Tensor& grad) { return grad.defined(); })) continue;
    check(bool(node.backward), Error::Kind::Value, "[", node.op,
          "] what backward needs was freed by an earlier backward; call backward(loss, {.keep_graph = true}) first");
    wanted.assign(node.inputs.size(), false);
    for (size_t i = 0; i < node.inputs.size(); ++i) wanted[i] = node.inputs[i].wanted;
    backward_op = node.op;
    std::vector<Tensor> results;
    try {
      results = node.backward(OutputGrads(grads, wanted));
    } catch (...) {
      backward_op = outer_op;
      throw;
    }
    backward_op = outer_op;
    check(results.size() == node.inputs.size(), Error::Kind::Value, "[", node.op, "] backward returned ",
          results.size(), " gradients for ", node.inputs.size(), " inputs");
    std::fill(grads.begin(), grads.end(), Tensor());
    if (!keep_graph) node.backward = nullptr;
    for (size_t i = 0; i < results.size(); ++i) accumulate(node, i, std::move(results[i]), table);
  }
}

// ------------------------------------------------------------------------------------------------ record

bool recording(const char* op, std::span<const Variable> inputs) {
  bool wanted = false;
  for (const Variable& input : inputs) {
    if (!input.requires_grad()) continue;
    check(input.is_leaf() || alive(input.tape_id()), Error::Kind::Value, "[", op,
          "] an input was recorded on a tape that is gone or lives on another thread; detach() keeps its value");
    wanted = true;
  }
  return wanted && Tape::current();
}

std::vector<Variable> record(const char* op, std::span<const Variable> inputs, std::span<const Tensor> outputs,
                             BackwardFunction backward) {
  if (recording(op, inputs)) return Tape::current()->append(op, inputs, outputs, std::move(backward));
  return std::vector<Variable>(outputs.begin(), outputs.end());
}

Variable record(const char* op, std::span<const Variable> inputs, const Tensor& output, BackwardFunction backward) {
  return record(op, inputs, std::span(&output, 1), std::move(backward))[0];
}

namespace {

// Puts a generator back where it was, whatever happens in between.
class KeepState {
 public:
  explicit KeepState(Generator& generator) : generator_(generator), state_(generator.state()) {}
  ~KeepState() { generator_.set_state(state_); }
  KeepState(const KeepState&) = delete;
  KeepState& operator=(const KeepState&) = delete;

 private:
  Generator& generator_;
  Generator::State state_;
};

}  // namespace

std::vector<Variable> recompute_list(
    std::function<std::vector<Variable>(const std::vector<Variable>&)> function, std::vector<Variable> inputs,
    Generator& generator) {
  Tape* tape = Tape::current();
  recording("recompute", inputs);  // for its check of dead tapes
  if (!tape) return function(inputs);

  const Generator::State start = generator.state();
  std::vector<Tensor> outputs;
  std::vector<Saved> saved;
  {
    const NoGrad forward_only;
    for (const Variable& output : function(inputs)) outputs.push_back(output.value());
    for (const Variable& input : inputs) saved.emplace_back(input.value());
  }
  return tape->append("recompute", inputs, outputs, [=, &generator](const OutputGrads& grads) {
    std::vector<Variable> leaves;
    for (size_t i = 0; i < saved.size(); ++i) leaves.emplace_back(saved[i].get(), grads.wants(i));
    Tape inner;
    inner.refuses_outer_ = true;
    std::vector<Variable> again;
    {
      const KeepState keep(generator);
      generator.set_state(start);
      again = function(leaves);
    }
    std::vector<Tensor> seeds;
    for (size_t i = 0; i < again.size(); ++i)
      seeds.push_back(again[i].requires_grad() ? grads[i] : Tensor());
    inner.backward(again, seeds);
    std::vector<Tensor> results;
    for (const Variable& leaf : leaves) results.push_back(leaf.requires_grad() ? leaf.grad() : Tensor());
    return results;
  });
}

}  // namespace torus
