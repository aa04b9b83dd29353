#include "torus/core/dtype.h"

#include <ostream>

namespace torus {

size_t size_of(DType dtype) {
  return dispatch(dtype, [](auto zero) { return sizeof(zero); });
}

const char* name(DType dtype) {
  static constexpr const char* names[] = {"f64", "f32", "f16", "bf16", "i64", "i32", "u8", "bool"};
  return names[static_cast<int>(dtype)];
}

std::ostream& operator<<(std::ostream& out, DType dtype) { return out << name(dtype); }

Half::Half(float value) {
  const auto word = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (word >> 16) & 0x8000, magnitude = word & 0x7fffffff;
  if (magnitude > 0x7f800000) {  // NaN
    bits = static_cast<uint16_t>(sign | 0x7e00);
  } else if (magnitude >= 0x477ff000) {  // rounds to infinity
    bits = static_cast<uint16_t>(sign | 0x7c00);
  } else if (magnitude < 0x38800000) {  // subnormal or zero: let a float addition do the rounding
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    bits = static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000));
  } else {
    bits = static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
  }
}

Half::operator float() const {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x400) return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000));
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return sign ? -value : value;
}

}  // namespace torus
