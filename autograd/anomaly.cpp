#include "torus/autograd/anomaly.h"

#include <cmath>
#include <sstream>

#include "torus/core/profiler.h"

namespace torus {

namespace {

thread_local bool on = false;

enum Kind { nan, positive, negative, kinds };
constexpr const char* kind_names[kinds] = {"NaN", "+inf", "-inf"};

// What is not finite in a tensor.
struct Scan {
  int64_t count[kinds] = {}, first[kinds] = {};

  explicit Scan(const Tensor& tensor) {
    if (!tensor.defined() || !is_floating(tensor.dtype())) return;
    const Tensor flat = tensor.to(cpu).contiguous();
    dispatch_floating(flat.dtype(), "anomaly", [&](auto zero) {
      using T = decltype(zero);
      const T* const from = flat.data<T>();
      for (int64_t i = 0; i < flat.numel(); ++i) {
        const auto value = static_cast<Compute<T>>(from[i]);
        if (std::isfinite(value)) continue;
        const Kind kind = std::isnan(value) ? nan : value > 0 ? positive : negative;
        if (count[kind]++ == 0) first[kind] = i;
      }
    });
  }

  // The gravest, but for the infinities that are allowed; `kinds` if there is none.
  Kind worst(Infinities allowed = Infinities::none) const {
    if (count[nan]) return nan;
    if (count[positive] && allowed != Infinities::both) return positive;
    if (count[negative] && allowed == Infinities::none) return negative;
    return kinds;
  }
};

void print_tensor(std::ostream& out, const Tensor& tensor) {
  if (tensor.defined())
    out << tensor.dtype() << ' ' << tensor.shape();
  else
    out << "none";
}

// "f64 [2, 3] holds it in 1 of 6 elements, first at [0, 2]"
std::string describe(const Tensor& tensor, const Scan& scan, Kind kind) {
  std::ostringstream out;
  print_tensor(out, tensor);
  Shape place = tensor.shape();
  int64_t rest = scan.first[kind];
  for (int axis = tensor.dim() - 1; axis >= 0; --axis) {
    place[axis] = rest % tensor.size(axis);
    rest /= tensor.size(axis);
  }
  out << " holds it in " << scan.count[kind] << " of " << tensor.numel() << " elements, first at " << place;
  return out.str();
}

}  // namespace

AnomalyMode::AnomalyMode(bool wanted) : outer_(on) {
  on = wanted;
  ++detail::scope_listeners;
}

AnomalyMode::~AnomalyMode() {
  on = outer_;
  --detail::scope_listeners;
}

bool AnomalyMode::active() { return on; }

std::string detail::describe_call(std::span<const Variable> inputs, std::span<const Tensor> outputs,
                                  int64_t node) {
  std::ostringstream out;
  if (node >= 0)
    out << "node " << node;
  else
    out << "not recorded";
  const std::string scopes = open_scopes();
  if (!scopes.empty()) out << " in \"" << scopes << '"';
  const char* separator = ", inputs ";
  for (const Variable& input : inputs) {
    out << separator;
    print_tensor(out, input.defined() ? input.value() : Tensor());
    separator = ", ";
  }
  separator = ", outputs ";
  for (const Tensor& output : outputs) {
    out << separator;
    print_tensor(out, output);
    separator = ", ";
  }
  return out.str();
}

void detail::check_forward(const char* op, std::span<const Variable> inputs, std::span<const Tensor> outputs,
                           Infinities infinities, int64_t node) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Scan output(outputs[i]);
    const Kind kind = output.worst(infinities);
    if (kind == kinds) continue;
    // All ops are looked at, so an input that holds it comes from the user.
    std::string source;
    for (size_t j = 0; j < inputs.size() && source.empty(); ++j) {
      if (!inputs[j].defined()) continue;
      const Scan input(inputs[j].value());
      if (!input.count[kind]) continue;
      source = "; input " + std::to_string(j) + ", " + describe(inputs[j].value(), input, kind);
    }
    if (kind == negative && !source.empty()) continue;
    fail(Error::Kind::Value, "[", op, "] forward ", source.empty() ? "made " : "was given ", kind_names[kind],
         ": output ", i, ", ", describe(outputs[i], output, kind), source, " (",
         describe_call(inputs, outputs, node), ")");
  }
}

void detail::check_gradient(const char* op, const char* what, const Tensor& gradient, const std::string& of,
                            const std::string& recorded) {
  const Scan scan(gradient);
  const Kind kind = scan.worst();
  if (kind == kinds) return;
  fail(Error::Kind::Value, "[", op, "] backward ", what, ' ', kind_names[kind], ": the gradient of ", of,
       ", ", describe(gradient, scan, kind), " (", recorded, ")");
}

}  // namespace torus
