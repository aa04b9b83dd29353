// AnomalyMode: which op made the first NaN or infinity?
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "torus/autograd/variable.h"

namespace torus {

/// While alive, every value and every gradient that ops make on this thread is looked through, and the first
/// that is not finite throws Error{Value}: it names the op, forward or backward, which element, the shapes,
/// the node's number on its tape and the ProfileScopes that were open when the op ran, both where they began
/// while the mode was on. Costs nothing else while off; while on, a pass over each result.
///
/// NaN and +inf in a value are always anomalies, -inf is where no input held it: so a mask of -inf may travel
/// to its softmax. An op whose definition gives infinities says so when it records (`Infinities`). In a
/// gradient all three are anomalies.
class AnomalyMode {
 public:
  /// `false` switches an outer one off for a while.
  explicit AnomalyMode(bool on = true);
  ~AnomalyMode();
  AnomalyMode(const AnomalyMode&) = delete;
  AnomalyMode& operator=(const AnomalyMode&) = delete;

  /// Whether it is on for this thread.
  static bool active();

 private:
  bool outer_;
};

/// The infinities that an op may make of finite inputs without being at fault.
enum class Infinities {
  none,
  negative,  // say the logarithm of a sum over nothing
  both       // say a filling value that the user chose
};

namespace detail {

/// "node 4 in "step/block 3", inputs f32 [2, 3], outputs f32 [2]"; no node where it is not recorded (-1).
std::string describe_call(std::span<const Variable> inputs, std::span<const Tensor> outputs, int64_t node);
void check_forward(const char* op, std::span<const Variable> inputs, std::span<const Tensor> outputs,
                   Infinities infinities, int64_t node);
/// Throws "[op] backward WHAT NaN: the gradient of OF, f32 [2] ... (RECORDED)" unless all of it is finite.
void check_gradient(const char* op, const char* what, const Tensor& gradient, const std::string& of,
                    const std::string& recorded);

}  // namespace detail

}  // namespace torus
