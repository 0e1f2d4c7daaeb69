// Vectors as wide as the compiler's flags allow, for the CPU kernels: one library per instruction set, see build.py.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__GNUC__) && !defined(__clang__)  // GCC warns about its own intrinsics, GCC bug 105593
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int LANES = 8, REGISTERS = 16;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

constexpr float NOTHING = -std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Int __attribute__((vector_size(4 * LANES)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * LANES)));
typedef uint16_t Half __attribute__((vector_size(2 * LANES)));
typedef uint8_t Byte __attribute__((vector_size(LANES)));

// ---------------------------------------------------------------------------------------------------------- vectors

template <class To, class From>
inline To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

inline Vec zero() { return Vec{}; }
inline Vec splat(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  return x - Vec{};  // not a sum: that would have to turn -0 into 0
#endif
}

inline Vec load(const float* from) {
  Vec x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }  // b where one of them is NaN

inline float sum(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(x);
#else
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += x[i];
  return total;
#endif
}

inline float largest(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(x);
#elif defined(__AVX2__)
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  float top = x[0];
  for (int i = 1; i < LANES; ++i) top = x[i] > top ? x[i] : top;
  return top;
#endif
}

// The sums of four vectors, side by side.
inline void sum_four(Vec a, Vec b, Vec c, Vec d, float* to) {
#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__AVX512F__)
  const Vec ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  const Vec cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
  const __m512d ab2 = _mm512_castps_pd(ab), cd2 = _mm512_castps_pd(cd);
  const __m512 all = _mm512_add_ps(
      _mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2)));
  const __m256 half = _mm256_add_ps(
      _mm512_castps512_ps256(all), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1)));
#else
  const Vec ab = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
  const Vec cd = _mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d);
  const __m256d ab2 = _mm256_castps_pd(ab), cd2 = _mm256_castps_pd(cd);
  const __m256 half = _mm256_add_ps(
      _mm256_castpd_ps(_mm256_unpacklo_pd(ab2, cd2)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab2, cd2)));
#endif
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
#endif
}

// e^x for x <= 0 (a little above does no harm), to about 1e-7; 0 below the normal numbers; NaN stays NaN.
inline Vec exponential(Vec x) {
  const Vec bounded = x < -87.3f ? splat(-87.3f) : x;
  const Vec shifted = bounded * 1.44269504f + 12582912.f;  // 1.5 * 2^23: the nearest integer is in the low bits
  const Vec n = shifted - 12582912.f;
  const Vec r = (bounded - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts; |r| <= ln(2) / 2
  Vec p = splat(1 / 5040.f);
  p = p * r + 1 / 720.f;
  p = p * r + 1 / 120.f;
  p = p * r + 1 / 24.f;
  p = p * r + 1 / 6.f;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const Int power = (same_bits<Int>(shifted) - (0x4B400000 - 127)) << 23;  // bits of 2^n
  const Vec result = p * same_bits<Vec>(power);
  return x < -87.3f ? zero() : result;
}

inline Int widened(Byte bytes) {
#if defined(__AVX512F__)
  return same_bits<Int>(_mm512_cvtepu8_epi32(same_bits<__m128i>(bytes)));
#elif defined(__AVX2__)
  return same_bits<Int>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(same_bits<int64_t>(bytes))));
#else
  return __builtin_convertvector(bytes, Int);
#endif
}

inline Vec converted(Int x) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(same_bits<__m512i>(x));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(same_bits<__m256i>(x));
#else
  return __builtin_convertvector(x, Vec);
#endif
}

constexpr int BLOCK = 8;  // query rows whose sums are in registers at once

// Calls function(G) with the number of query rows as a compile-time constant.
template <int G = BLOCK, class Function>
inline void with_rows(int rows, const Function& function) {
  if (rows == G) {
    function(std::integral_constant<int, G>());
  } else if constexpr (G > 1) {
    with_rows<G - 1>(rows, function);
  }
}

inline float from_bfloat16(uint16_t bits) { return same_bits<float>(uint32_t(bits) << 16); }

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
using Floats = std::unique_ptr<float[], FreeDeleter>;

inline Floats floats(int64_t count) {
  void* memory = std::aligned_alloc(64, (std::max<int64_t>(count, 1) * sizeof(float) + 63) / 64 * 64);
  if (!memory) throw std::bad_alloc();
  return Floats(static_cast<float*>(memory));
}

}  // namespace
