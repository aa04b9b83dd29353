#include "torus/layers/captured_step.h"

#include <iostream>

namespace torus {

void CapturedStep::operator()() {
  constexpr int ordinary_runs = 2;  // the first makes what lasts: the state of the optimizer, maps, plans
  if (graph_) return graph_->launch();
  if (device_.kind == DeviceKind::cpu && why_not_.empty()) why_not_ = "the CPU runs steps as they are";
  if (!why_not_.empty()) return step_();
  if (runs_ == ordinary_runs) {
    graph_ = capture(device_, bytes_, step_, why_not_);
    if (!graph_) std::cerr << "torus: not captured: " << why_not_ << std::endl;
    return;
  }
  ++runs_;
  reset_peak_memory(device_);
  const int64_t before = memory_stats(device_).live_bytes;
  step_();
  // Room for the gaps that blocks of other sizes leave.
  bytes_ = static_cast<size_t>(memory_stats(device_).peak_bytes - before);
  bytes_ += bytes_ / 50 + (size_t{8} << 20);
}

}  // namespace torus
