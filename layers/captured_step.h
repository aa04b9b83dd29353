// A training step that a CUDA device runs again by itself.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "torus/core/memory.h"

namespace torus {

/// Runs the same step again and again. On a CUDA device its first two runs are ordinary; the third is
/// captured into a graph, which all others replay: no kernel is launched by the host any more, so small
/// models train several times faster. On the CPU every run is ordinary.
///
///     Tensor inputs = ..., targets = ...;                  // kept; each batch is copied into them
///     CapturedStep step(device, [&] {
///       Tape tape;
///       const Variable loss = model.loss(inputs, targets);
///       tape.backward(loss);
///       optimizer.step();
///       optimizer.zero_grad();
///       last_loss.copy_(loss.value());                     // kept too; read it after step()
///     });
///     for (...) { inputs.copy_(batch.inputs); ...; optimizer.set_lr(...); step(); }
///
/// What replays do differently each time: the learning rate and t of the optimizer, and the draws of one
/// generator. Everything else on the host is as it was when the step was captured, so the step must not
/// depend on it. A step that does what cannot be captured runs as it is, and one line on stderr says why: it
/// waits for the device (`item`, a copy to the host), copies from the host, draws from two generators.
class CapturedStep {
 public:
  CapturedStep(Device device, std::function<void()> step) : device_(device), step_(std::move(step)) {}

  void operator()();
  bool captured() const { return graph_ != nullptr; }
  /// Why the step is not captured and will not be, as for a line of a log; empty otherwise.
  const std::string& why_not() const { return why_not_; }

 private:
  Device device_;
  std::function<void()> step_;
  int runs_ = 0;
  size_t bytes_ = 0;  // that the step allocates at once
  std::string why_not_;
  std::unique_ptr<CapturedGraph> graph_;
};

}  // namespace torus
