// Where a tensor lives.
#pragma once

#include <iosfwd>

namespace torus {

enum class DeviceKind { cpu, cuda };
inline constexpr int device_kinds = 2;

/// A processor with its own memory: the host, or one CUDA device by its index.
struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

inline constexpr Device cpu{};

const char* name(DeviceKind kind);
std::ostream& operator<<(std::ostream& out, Device device);

}  // namespace torus
