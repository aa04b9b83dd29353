#include "torus/core/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace torus {
namespace {

// The value of a float format from its definition, in double.
double value_of(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1, special = (1 << exponent_bits) - 1;
  const double sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1 : 1;
  const auto exponent = static_cast<int>(bits >> mantissa_bits) & special;
  const double mantissa = bits & ((1u << mantissa_bits) - 1);
  if (exponent == special)
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  return exponent == 0 ? sign * std::ldexp(mantissa, 1 - bias - mantissa_bits)
                       : sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

template <class T>
T from_bits(uint32_t bits) {
  T result;
  result.bits = static_cast<uint16_t>(bits);
  return result;
}

template <class T>
void check_format(int exponent_bits, int mantissa_bits) {
  const uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
  // Every pattern reads as its definition and comes back unchanged.
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const double expected = value_of(bits, exponent_bits, mantissa_bits);
    const float got = from_bits<T>(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << bits;
      ASSERT_TRUE(std::isnan(static_cast<float>(T(got)))) << bits;
      continue;
    }
    ASSERT_EQ(got, expected) << bits;
    ASSERT_EQ(std::signbit(got), std::signbit(expected)) << bits;
    ASSERT_EQ(T(got).bits, bits);
  }
  const float endless = std::numeric_limits<float>::infinity();
  // Between neighbours, rounding goes to the nearer one, from the middle to the even one.
  for (uint32_t bits = 0; bits < infinity; ++bits) {
    const double low = value_of(bits, exponent_bits, mantissa_bits);
    const double ulp = bits + 1 == infinity ? low - value_of(bits - 1, exponent_bits, mantissa_bits)
                                            : value_of(bits + 1, exponent_bits, mantissa_bits) - low;
    const auto middle = static_cast<float>(low + ulp / 2);
    if (static_cast<double>(middle) != low + ulp / 2) continue;  // float's own subnormals end here
    for (const float sign : {1.f, -1.f}) {
      const uint32_t negative = sign < 0 ? 0x8000 : 0;
      ASSERT_EQ(T(sign * middle).bits, negative | (bits + (bits & 1))) << bits;
      ASSERT_EQ(T(sign * std::nextafter(middle, 0.f)).bits, negative | bits) << bits;
      ASSERT_EQ(T(sign * std::nextafter(middle, endless)).bits, negative | (bits + 1)) << bits;
    }
  }
  const float largest = std::numeric_limits<float>::max();
  EXPECT_EQ(T(largest).bits, infinity);
  EXPECT_EQ(T(endless).bits, infinity);
  EXPECT_EQ(T(-endless).bits, infinity | 0x8000);
  // A NaN stays one whatever its payload and sign.
  for (const uint32_t word : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu, 0x7fc00000u})
    EXPECT_TRUE(std::isnan(static_cast<float>(T(std::bit_cast<float>(word))))) << word;
}

TEST(DType, HalfIsExhaustivelyRight) { check_format<Half>(5, 10); }
TEST(DType, BFloat16IsExhaustivelyRight) { check_format<BFloat16>(8, 7); }

TEST(DType, SizesAndNames) {
  const std::vector<std::pair<DType, size_t>> sizes = {{f64, 8}, {f32, 4}, {f16, 2}, {bf16, 2},
                                                       {i64, 8}, {i32, 4}, {u8, 1},  {boolean, 1}};
  for (const auto& [dtype, size] : sizes) {
    EXPECT_EQ(size_of(dtype), size) << dtype;
    EXPECT_EQ(dispatch(dtype, [](auto zero) { return dtype_of<decltype(zero)>; }), dtype);
    EXPECT_EQ(is_floating(dtype), dtype == f64 || dtype == f32 || dtype == f16 || dtype == bf16);
  }
  EXPECT_STREQ(name(boolean), "bool");
  EXPECT_STREQ(name(bf16), "bf16");
}

}  // namespace
}  // namespace torus
