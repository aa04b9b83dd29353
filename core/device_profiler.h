// How a device tells the profiler what it ran. Not installed.
#pragma once

namespace torus::detail {

/// Records what a kind of device runs, between `start` and `stop`, which adds it by `add_profile_event`.
struct DeviceProfiler {
  void (*start)();
  void (*stop)();
};
/// At start-up.
void set_device_profiler(DeviceProfiler profiler);

}  // namespace torus::detail
