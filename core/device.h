// Where a tensor lives.
#pragma once

#include <iosfwd>
#include <string>

#include "torus/core/dtype.h"

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
inline constexpr Device cuda{DeviceKind::cuda};

/// CUDA devices that can be used: 0 without a driver, or in a build for the CPU alone.
int cuda_device_count();
inline bool cuda_available() { return cuda_device_count() > 0; }

/// Waits for all work of a device, and throws what its kernels found wrong with their arguments.
void synchronize(Device device);

/// "NVIDIA H200"; "cpu" for the host.
std::string device_name(Device device);
/// Dense matrix products a second by the maker's data sheet, in floating-point operations; 0 where it is not
/// known.
double peak_flops(Device device, DType dtype);
/// The same of a chip by its name, as `device_name` gives it.
double peak_flops(const std::string& chip, DType dtype);

/// Whether matrix products of f32 on CUDA may round their operands to TF32 (10 bits): several times faster.
/// At first they may not.
void allow_tf32(bool on);
bool tf32_allowed();

const char* name(DeviceKind kind);
std::ostream& operator<<(std::ostream& out, Device device);

}  // namespace torus
