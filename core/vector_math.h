// Elementary functions without branches, so that the compiler vectorises the loops that call them. For
// kernels on the CPU; not installed. The float forms are accurate to a few units in the last place; the
// double forms are std's.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "torus/core/dtype.h"

namespace torus::vmath {

// A call that is not inlined keeps its loop from being vectorised, and the compiler's own limits are not
// enough.
#define TORUS_INLINE [[gnu::always_inline]] inline

/// e^x. Overflows to infinity and underflows through the subnormal numbers to 0, as it should.
TORUS_INLINE float exp(float x) {
  // Beyond these bounds the result is 0 or infinity anyway. Both comparisons keep a NaN.
  x = x < -105.f ? -105.f : x;
  x = x > 89.f ? 89.f : x;
  // x = n ln 2 + r. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  constexpr float magic = 12582912.f;
  const float shifted = x * 1.44269504f + magic, n = shifted - magic;
  const float r =
      x - n * 0.693359375f - n * -2.12194440e-4f;  // ln 2 in two parts; the first product is exact
  // e^r = 1 + r + r^2 p(r), |r| <= ln(2) / 2, minimax to 4e-9.
  float p = 1.381314236e-3f;
  p = p * r + 8.369419043e-3f;
  p = p * r + 4.166845683e-2f;
  p = p * r + 1.666651479e-1f;
  p = p * r + 4.999999305e-1f;
  p = p * (r * r) + r + 1.f;
  // 2^n in two factors: it may be too large or too small for one float while the result is not.
  const uint32_t power = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(magic);
  const auto half = static_cast<uint32_t>(static_cast<int32_t>(power) >> 1);
  return p * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((power - half + 127) << 23);
}
TORUS_INLINE double exp(double x) { return std::exp(x); }

/// 1 / (1 + e^-x).
template <class C>
TORUS_INLINE C sigmoid(C x) {
  return C(1) / (C(1) + exp(-x));
}

/// sigmoid(x) and its derivative, both to their relative accuracy: the derivative is not value * (1 - value),
/// which loses its digits where the value is near 1.
template <class C>
struct Sigmoid {
  C value, slope;
};
template <class C>
TORUS_INLINE Sigmoid<C> sigmoid_and_slope(C x) {
  const C e = exp(-std::abs(x)), r = C(1) / (C(1) + e);
  return {x < C(0) ? e * r : r, e * r * r};
}

/// Natural. NaN below 0, minus infinity at 0; subnormal numbers count as such.
TORUS_INLINE float log(float x) {
  // x = 2^n m with m in [sqrt(1/2), sqrt(2)); the lift makes subnormal numbers normal.
  const bool tiny = x < 1.17549435e-38f;
  const uint32_t bits = std::bit_cast<uint32_t>(tiny ? x * 8388608.f : x), shifted = bits - 0x3f3504f3;
  const float n = static_cast<float>(static_cast<int32_t>(shifted) >> 23) - (tiny ? 23.f : 0.f);
  const float r = std::bit_cast<float>((shifted & 0x007fffff) + 0x3f3504f3) - 1.f;
  // log(1 + r) = r - r^2 / 2 + r^3 p(r); the coefficients are of Cephes.
  float p = 7.0376836292e-2f;
  p = p * r - 1.1514610310e-1f;
  p = p * r + 1.1676998740e-1f;
  p = p * r - 1.2420140846e-1f;
  p = p * r + 1.4249322787e-1f;
  p = p * r - 1.6668057665e-1f;
  p = p * r + 2.0000714765e-1f;
  p = p * r - 2.4999993993e-1f;
  p = p * r + 3.3333331174e-1f;
  const float square = r * r;
  float y = p * r * square + n * -2.12194440e-4f;  // ln 2 in two parts
  y = y - 0.5f * square + r + n * 0.693359375f;
  y = x == 0.f ? -std::numeric_limits<float>::infinity() : y;
  y = x < 0.f ? std::numeric_limits<float>::quiet_NaN() : y;
  return x < std::numeric_limits<float>::infinity() ? y : x;
}
TORUS_INLINE double log(double x) { return std::log(x); }

TORUS_INLINE float tanh(float x) {
  const float magnitude = std::abs(x);
  const float large = 1.f - 2.f / (exp(2.f * magnitude) + 1.f);
  // x + x^3 p(x^2) where the other form cancels; minimax to 4e-9 for |x| <= 0.625.
  const float square = x * x;
  float p = -5.717035668e-3f;
  p = p * square + 2.065057813e-2f;
  p = p * square - 5.374349496e-2f;
  p = p * square + 1.333149124e-1f;
  p = p * square - 3.333328392e-1f;
  const float small = p * square * x + x;
  return magnitude < 0.625f ? small : std::copysign(large, x);
}
TORUS_INLINE double tanh(double x) { return std::tanh(x); }

/// The normal distribution at x: P(X <= x) and its density.
template <class C>
struct Normal {
  C cdf, density;
};

TORUS_INLINE Normal<float> normal(float x) {
  const float magnitude = std::abs(x);
  const float bell = exp(-0.5f * (x * x));
  // The upper tail is bell * t * p(t) with t = 1 / (1 + 0.27 |x|), minimax to 3e-8: it keeps its relative
  // accuracy.
  const float t = 1.f / (1.f + 0.27f * magnitude);
  float p = 2.896884658e-2f;
  p = p * t - 1.265247908e-1f;
  p = p * t + 1.698695618e-1f;
  p = p * t - 6.931001683e-2f;
  p = p * t + 1.078972026e-1f;
  p = p * t + 7.201766907e-2f;
  p = p * t + 1.018192000e-1f;
  p = p * t + 1.075416040e-1f;
  p = p * t + 1.077207355e-1f;
  const float tail = bell * t * p;
  return {x > 0.f ? 1.f - tail : tail, 0.398942280f * bell};
}
TORUS_INLINE Normal<double> normal(double x) {
  return {0.5 * std::erfc(x * -0.70710678118654752440), 0.39894228040143267794 * std::exp(-0.5 * x * x)};
}

#undef TORUS_INLINE

/// The largest of n elements, -inf of none.
template <class T>
Compute<T> largest_of(const T* x, int64_t n) {
  using C = Compute<T>;
  C largest = -std::numeric_limits<C>::infinity();
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) largest = C(x[i]) > largest ? C(x[i]) : largest;
  return largest;
}

/// The sum of exp(x - shift) over n elements.
template <class T>
Compute<T> sum_of_exponentials(const T* x, int64_t n, Compute<T> shift) {
  using C = Compute<T>;
  C sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += exp(C(x[i]) - shift);
  return sum;
}

}  // namespace torus::vmath
