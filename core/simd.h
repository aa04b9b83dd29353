// Vectors of the processor and the small matrix product that kernels are made of. For kernels on the CPU; not
// installed.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace torus::simd {

#if defined(__AVX512F__)
inline constexpr int vector_bytes = 64;
inline constexpr int panel_vectors = 4;  // 4 rows x 4 vectors of sums, in 32 registers
#elif defined(__AVX__)
inline constexpr int vector_bytes = 32;
inline constexpr int panel_vectors = 2;  // in 16 registers
#else
inline constexpr int vector_bytes = 16;
inline constexpr int panel_vectors = 2;
#endif

template <class T>
inline constexpr int lanes = vector_bytes / static_cast<int>(sizeof(T));

// GCC drops attributes of template arguments, so each vector type is spelled out.
typedef float FloatVector __attribute__((vector_size(vector_bytes)));
typedef double DoubleVector __attribute__((vector_size(vector_bytes)));
typedef int32_t Int32Vector __attribute__((vector_size(vector_bytes)));
typedef uint32_t UInt32Vector __attribute__((vector_size(vector_bytes)));
typedef int64_t Int64Vector __attribute__((vector_size(vector_bytes)));
typedef uint64_t UInt64Vector __attribute__((vector_size(vector_bytes)));

template <class T>
using Vector = std::conditional_t<std::is_same_v<T, float>, FloatVector, DoubleVector>;
/// Integers as wide as T: what comparing two Vector<T> gives.
template <class T>
using IntVector = std::conditional_t<std::is_same_v<T, float>, Int32Vector, Int64Vector>;

template <class T>
Vector<T> load(const T* from) {
  Vector<T> result;
  __builtin_memcpy(&result, from, sizeof(result));
  return result;
}

template <class T>
void store(T* to, Vector<T> value) {
  __builtin_memcpy(to, &value, sizeof(value));
}

template <class T>
Vector<T> splat(T value) {
  return value - Vector<T>{};
}

/// x as its own rounded result: the compiler may not fuse its product with a following sum.
template <class V>
V rounded(V x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

template <class V>
V larger(V a, V b) {
  return a > b ? a : b;
}

/// x in the lanes whose bits are set, `otherwise` elsewhere.
template <class T>
Vector<T> select(uint64_t bits, Vector<T> x, T otherwise) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>)
    return reinterpret_cast<Vector<T>>(_mm512_mask_mov_ps(
        _mm512_set1_ps(otherwise), static_cast<__mmask16>(bits), reinterpret_cast<__m512>(x)));
  else
    return reinterpret_cast<Vector<T>>(_mm512_mask_mov_pd(
        _mm512_set1_pd(otherwise), static_cast<__mmask8>(bits), reinterpret_cast<__m512d>(x)));
#else
  IntVector<T> place;
  for (int i = 0; i < lanes<T>; ++i) place[i] = 1 << i;
  using Int = std::remove_reference_t<decltype(place[0])>;
  return (place & static_cast<Int>(bits)) != 0 ? x : splat(otherwise);
#endif
}

/// Whether any lane of a comparison is true.
template <class Mask>
bool any(Mask lanes_true) {
  uint64_t words[sizeof(Mask) / sizeof(uint64_t)], all = 0;
  __builtin_memcpy(words, &lanes_true, sizeof(words));
  for (uint64_t word : words) all |= word;
  return all != 0;
}

/// exp, a few units in the last place; 0 for what is too small, infinity for what is too large, NaN of NaN.
inline FloatVector exp(FloatVector x) {
  const FloatVector shift = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
#if defined(__AVX512F__)
  // Subnormal results would be slow to make and to use. A NaN compares with nothing, so it stays.
  const __mmask16 normal =
      _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), _mm512_set1_ps(-87.3365f), _CMP_NLT_UQ);
  // Of a number and a NaN this takes its second operand.
  x = reinterpret_cast<FloatVector>(
      _mm512_maskz_min_ps(0xffff, _mm512_set1_ps(89.f), reinterpret_cast<__m512>(x)));
#endif
  const FloatVector biased = x * 1.44269504f + shift, n = biased - shift;
  // What is lost of ln 2 here, 2e-9 n, is less than the last place of x.
  const FloatVector r = x - n * 0.693147182f;
  // 1 + r + r^2 p(r), |r| <= ln(2) / 2, minimax to 4e-9.
  FloatVector p = splat(1.381314236e-3f);
  p = p * r + 8.369419043e-3f;
  p = p * r + 4.166845683e-2f;
  p = p * r + 1.666651479e-1f;
  p = p * r + 4.999999305e-1f;
  p = p * r + 1.f;
  p = p * r + 1.f;
#if defined(__AVX512F__)
  return reinterpret_cast<FloatVector>(
      _mm512_maskz_scalef_ps(normal, reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(n)));
#else
  const UInt32Vector exponent = std::bit_cast<UInt32Vector>(biased) << 23;
  FloatVector y = std::bit_cast<FloatVector>(std::bit_cast<UInt32Vector>(p) + exponent);
  y = x < -87.3365f ? FloatVector{} : y;
  y = x > 88.7228f ? splat(std::numeric_limits<float>::infinity()) : y;
  return x == x ? y : x;
#endif
}

inline DoubleVector exp(DoubleVector x) {
  const DoubleVector shift = splat(6755399441055744.0);  // 1.5 * 2^52
  const DoubleVector biased = x * 1.4426950408889634 + shift, n = biased - shift;
  DoubleVector r = x - n * 0.693147180369123816490;
  r = r - n * 1.90821492927058770002e-10;
  // Taylor's series to r^13: |r| <= ln(2) / 2, so the next term is below 5e-18.
  DoubleVector p = splat(1.0 / 6227020800);
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.0;
  const UInt64Vector exponent = std::bit_cast<UInt64Vector>(biased) << 52;
  DoubleVector y = std::bit_cast<DoubleVector>(std::bit_cast<UInt64Vector>(p) + exponent);
  y = x < -708.396 ? DoubleVector{} : y;
  y = x > 709.782 ? splat(std::numeric_limits<double>::infinity()) : y;
  return x == x ? y : x;
}

// Four elements, whatever the width of a Vector.
typedef float FloatQuad __attribute__((vector_size(16)));
typedef double DoubleQuad __attribute__((vector_size(32)));
typedef int32_t Int32Quad __attribute__((vector_size(16)));
typedef int64_t Int64Quad __attribute__((vector_size(32)));

/// to[j][i] = from[i][j] for i, j < 4.
template <class T>
void transpose_quads(const T* const (&from)[4], T* const (&to)[4]) {
  using Quad = std::conditional_t<std::is_same_v<T, float>, FloatQuad, DoubleQuad>;
  using Places = std::conditional_t<std::is_same_v<T, float>, Int32Quad, Int64Quad>;
  Quad row[4];
  for (int l = 0; l < 4; ++l) __builtin_memcpy(&row[l], from[l], sizeof(Quad));
  const Quad a = __builtin_shuffle(row[0], row[1], Places{0, 4, 1, 5});
  const Quad b = __builtin_shuffle(row[2], row[3], Places{0, 4, 1, 5});
  const Quad c = __builtin_shuffle(row[0], row[1], Places{2, 6, 3, 7});
  const Quad d = __builtin_shuffle(row[2], row[3], Places{2, 6, 3, 7});
  const Quad column[4] = {
      __builtin_shuffle(a, b, Places{0, 1, 4, 5}), __builtin_shuffle(a, b, Places{2, 3, 6, 7}),
      __builtin_shuffle(c, d, Places{0, 1, 4, 5}), __builtin_shuffle(c, d, Places{2, 3, 6, 7})};
  for (int l = 0; l < 4; ++l) __builtin_memcpy(to[l], &column[l], sizeof(Quad));
}

/// to[j][i] = from[i][j] for i < rows and j < columns; strides in elements.
template <class T>
void transpose(T* to, int64_t to_stride, const T* from, int64_t from_stride, int64_t rows, int64_t columns) {
  const int64_t block_rows = rows / 4 * 4, block_columns = columns / 4 * 4;
  for (int64_t i = 0; i < block_rows; i += 4)
    for (int64_t j = 0; j < block_columns; j += 4) {
      const T* at = from + i * from_stride + j;
      T* into = to + j * to_stride + i;
      transpose_quads<T>({at, at + from_stride, at + 2 * from_stride, at + 3 * from_stride},
                         {into, into + to_stride, into + 2 * to_stride, into + 3 * to_stride});
    }
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = i < block_rows ? block_columns : 0; j < columns; ++j)
      to[j * to_stride + i] = from[i * from_stride + j];
}

/// Whether no element is infinite or NaN.
template <class T>
bool all_finite(const T* from, int64_t count) {
  int bad = 0;
  for (int64_t i = 0; i < count; ++i) bad |= !(std::abs(from[i]) <= std::numeric_limits<T>::max());
  return !bad;
}

/// How the scalar operand of `multiply_panel` is found: element (i, r) is rows[i][r] or rows[r][i].
enum class Rows { by_output, by_sum };

/// c[i][j] (+)= sum over r < depth of a(i, r) * b[r][j], for `M` rows i and `N` vectors of columns j.
template <class T, int M, int N, Rows by>
void multiply_micro(const T* const* rows, int64_t first_row, int64_t depth, const T* b, int64_t b_stride,
                    T* c, int64_t c_stride, bool accumulate) {
  Vector<T> sum[M][N];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) sum[i][j] = accumulate ? load(c + i * c_stride + j * lanes<T>) : Vector<T>{};
  const T* a[M];
  if constexpr (by == Rows::by_output)
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) a[i] = rows[first_row + i];
  for (int64_t r = 0; r < depth; ++r) {
    Vector<T> right[N];
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) right[j] = load(b + r * b_stride + j * lanes<T>);
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const Vector<T> left = splat(by == Rows::by_output ? a[i][r] : rows[r][first_row + i]);
#pragma GCC unroll 16
      for (int j = 0; j < N; ++j) sum[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) store(c + i * c_stride + j * lanes<T>, sum[i][j]);
}

// Narrow panels take more rows at once, so that as many sums are in flight and each vector of b, once loaded,
// serves more of them.
template <class T, int N, Rows by>
void multiply_columns(const T* const* rows, int64_t count, int64_t depth, const T* b, int64_t b_stride, T* c,
                      int64_t c_stride, bool accumulate) {
  // Sums, of 32 or 16 registers; rows reached by a pointer each take general registers too.
  constexpr int sums = panel_vectors == 4 ? 24 : 8, most = by == Rows::by_sum ? 16 : 8;
  constexpr int tall = sums / N < most ? sums / N : most;
  int64_t i = 0;
  const auto by_rows = [&]<int M>(std::integral_constant<int, M>) {
    for (; i + M <= count; i += M)
      multiply_micro<T, M, N, by>(rows, i, depth, b, b_stride, c + i * c_stride, c_stride, accumulate);
  };
  by_rows(std::integral_constant<int, tall>{});
  if constexpr (tall > 8) by_rows(std::integral_constant<int, 8>{});
  if constexpr (tall > 4) by_rows(std::integral_constant<int, 4>{});
  by_rows(std::integral_constant<int, 2>{});
  by_rows(std::integral_constant<int, 1>{});
}

/// c [count, width] (+)= a [count, depth] @ b [depth, width], the rows of `a` wherever pointers say. `width`
/// is a multiple of `lanes<T>`. Sums run over r in ascending order, each step one fused multiply-add.
template <class T, Rows by>
void multiply_panel(const T* const* rows, int64_t count, int64_t depth, const T* b, int64_t b_stride, T* c,
                    int64_t c_stride, int64_t width, bool accumulate) {
  int64_t j = 0;
  const auto by_columns = [&]<int N>(std::integral_constant<int, N>) {
    for (; j + N * lanes<T> <= width; j += N * lanes<T>)
      multiply_columns<T, N, by>(rows, count, depth, b + j, b_stride, c + j, c_stride, accumulate);
  };
  by_columns(std::integral_constant<int, panel_vectors>{});
  if constexpr (panel_vectors > 2) {
    by_columns(std::integral_constant<int, 3>{});
    by_columns(std::integral_constant<int, 2>{});
  }
  by_columns(std::integral_constant<int, 1>{});
}

}  // namespace torus::simd
