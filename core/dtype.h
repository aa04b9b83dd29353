// Element types and how code is written once for all of them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <type_traits>

#include "torus/core/error.h"

namespace torus {

/// Element type of a Tensor. A complex number is a trailing axis of 2.
enum class DType : uint8_t { f64, f32, f16, bf16, i64, i32, u8, boolean };

inline constexpr DType f64 = DType::f64, f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16;
inline constexpr DType i64 = DType::i64, i32 = DType::i32, u8 = DType::u8, boolean = DType::boolean;

/// Bytes of one element.
size_t size_of(DType dtype);
/// "f32" and so on; "bool" for boolean.
const char* name(DType dtype);
std::ostream& operator<<(std::ostream& out, DType dtype);
inline bool is_floating(DType dtype) { return dtype <= DType::bf16; }

/// IEEE binary16. Only storage: convert to float to compute. Rounds to nearest, ties to even.
struct Half {
  uint16_t bits = 0;
  Half() = default;
  Half(float value);
  operator float() const;
};

/// The upper half of a float. Only storage: convert to float to compute. Rounds to nearest, ties to even.
struct BFloat16 {
  uint16_t bits = 0;
  BFloat16() = default;
  BFloat16(float value) {
    const auto word = std::bit_cast<uint32_t>(value);
    // A NaN must stay one: rounding could carry its payload into the exponent, or drop it to infinity.
    bits = value != value ? static_cast<uint16_t>((word >> 16) | 0x40)
                          : static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
  }
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

template <class T>
inline constexpr DType dtype_of = [] {
  if constexpr (std::is_same_v<T, double>) return f64;
  else if constexpr (std::is_same_v<T, float>) return f32;
  else if constexpr (std::is_same_v<T, Half>) return f16;
  else if constexpr (std::is_same_v<T, BFloat16>) return bf16;
  else if constexpr (std::is_same_v<T, int64_t>) return i64;
  else if constexpr (std::is_same_v<T, int32_t>) return i32;
  else if constexpr (std::is_same_v<T, uint8_t>) return u8;
  else {
    static_assert(std::is_same_v<T, bool>, "not an element type of torus");
    return boolean;
  }
}();

/// The type that arithmetic on T runs in: float for 16-bit floats, T itself otherwise.
template <class T>
using Compute = std::conditional_t<std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>, float, T>;

/// Calls f(T{}) with the C++ type of `dtype`.
template <class F>
decltype(auto) dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64: return f(double{});
    case DType::f32: return f(float{});
    case DType::f16: return f(Half{});
    case DType::bf16: return f(BFloat16{});
    case DType::i64: return f(int64_t{});
    case DType::i32: return f(int32_t{});
    case DType::u8: return f(uint8_t{});
    case DType::boolean: return f(bool{});
  }
  fail(Error::Kind::DType, "[dispatch] unknown dtype ", static_cast<int>(dtype));
}

/// Calls f(T{}) with the C++ type of `dtype`, which must be floating; `op` names the caller in the error.
template <class F>
decltype(auto) dispatch_floating(DType dtype, const char* op, F&& f) {
  switch (dtype) {
    case DType::f64: return f(double{});
    case DType::f32: return f(float{});
    case DType::f16: return f(Half{});
    case DType::bf16: return f(BFloat16{});
    default: fail(Error::Kind::DType, "[", op, "] expected a floating dtype, got ", name(dtype));
  }
}

}  // namespace torus
