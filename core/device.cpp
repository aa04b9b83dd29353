#include "torus/core/device.h"

#include <atomic>
#include <ostream>

namespace torus {

const char* name(DeviceKind kind) { return kind == DeviceKind::cpu ? "cpu" : "cuda"; }

std::ostream& operator<<(std::ostream& out, Device device) {
  out << name(device.kind);
  if (device.kind != DeviceKind::cpu) out << ':' << device.index;
  return out;
}

double peak_flops(Device device, DType dtype) { return peak_flops(device_name(device), dtype); }

double peak_flops(const std::string& chip, DType dtype) {
  struct Chip {
    const char* name;
    double tera_16, tera_32, tera_64;  // of 16-bit floats, f32 without TF32, f64
  };
  static constexpr Chip chips[] = {{"H200", 989.5, 67, 67},
                                   {"H100 PCIe", 756, 51, 51},
                                   {"H100", 989.5, 67, 67},
                                   {"A100", 312, 19.5, 19.5}};
  for (const Chip& known : chips)
    if (chip.find(known.name) != std::string::npos)
      return 1e12 * (dtype == f64 ? known.tera_64 : dtype == f32 ? known.tera_32 : known.tera_16);
  return 0;
}

namespace {
std::atomic<bool> tf32{false};
}
void allow_tf32(bool on) { tf32 = on; }
bool tf32_allowed() { return tf32; }

}  // namespace torus
