// gradcheck: is the backward of this function the derivative of its forward?
#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

#include "torus/autograd/variable.h"

namespace torus {

struct GradcheckOptions {
  /// full: the whole Jacobian, two forward calls an input element. projection: one random direction in and one
  /// out, two forward calls in all, whatever the size.
  enum class Mode { full, projection };
  Mode mode = Mode::full;
  double eps = 1e-6;        // step of the central difference
  double tolerance = 1e-5;  // |analytic - numeric| <= tolerance * (1 + |numeric|), both scaled by the step's effect
  uint64_t seed = 0;        // of the random directions, and of the default generator while checking
};

/// The outcome; true in a condition if the check passed. It fails without any input or output.
struct GradcheckReport {
  bool passed = false;
  int64_t checked = 0;  // derivatives compared
  int64_t skipped = 0;  // not compared: a kink lay within the step, or an output was infinite
  // The worst derivative: of element `output_index` of output `output` by element `input_index` of input `input`
  // (row-major). -1 in projection mode.
  int64_t input = -1, input_index = -1, output = -1, output_index = -1;
  double analytic = 0, numeric = 0;
  std::string reproduce;  // options that give the same comparison again

  explicit operator bool() const { return passed; }
};
std::ostream& operator<<(std::ostream& out, const GradcheckReport& report);

using GradcheckFunction = std::function<std::vector<Variable>(const std::vector<Variable>&)>;

/// Compares the gradients that the tape computes for `function` at `inputs` with central differences. The inputs
/// must be f64, and so must everything in between: finite differences say nothing in less. Throws Error{DType}
/// otherwise. `function` must be deterministic; the default generator is reset before each call, so dropout is.
/// Derivatives across a kink that an op declared (`note_kink`) are skipped and counted.
GradcheckReport gradcheck(const GradcheckFunction& function, const std::vector<Tensor>& inputs,
                          const GradcheckOptions& options = {});

/// An op with a kink calls this in forward with the tensor whose sign chooses the branch. Free unless a gradcheck
/// is running on this thread; then the signs are noted, and a step that changes any of them is skipped.
void note_kink(const Tensor& side);
/// True while a gradcheck listens, for ops that must compute the tensor for `note_kink`.
bool kinks_wanted();

}  // namespace torus
