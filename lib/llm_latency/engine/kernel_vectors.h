// Vectors of LANES numbers, and what compilers do not find by themselves: the product of four bytes, and FP16.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#ifndef LANES  // numbers in one vector
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));  // FP16, as bits
typedef int8_t codes8 __attribute__((vector_size(LANES)));

template <class To> static inline To load(const void* from) { To to; memcpy(&to, from, sizeof to); return to; }
template <class From> static inline void store(void* to, From from) { memcpy(to, &from, sizeof from); }

// ---- the only instructions that a compiler does not find by itself (PLAIN: none of them, for tests) -----------------

// dot4: each lane adds four products of unsigned weights w and signed activations x. Where a sum has 16 bits (AVX2), a
// group of 4-bit weights just fits, 8 x 2 x 15 x 128 = 30,720; 8-bit weights would saturate and go as two nibbles.
#if !defined(PLAIN) && LANES == 16 && defined(__AVX512VNNI__)
typedef ints sums;
constexpr int NIBBLES = 1;
static inline sums dot4(sums s, words w, ints x) {
    return (ints)_mm512_dpbusd_epi32((__m512i)s, (__m512i)w, (__m512i)x);
}
static inline ints total(sums s) { return s; }
#elif !defined(PLAIN) && LANES == 8 && defined(__AVX2__)
typedef int16_t sums __attribute__((vector_size(32)));
constexpr int NIBBLES = 2;
static inline sums dot4(sums s, words w, ints x) { return s + (sums)_mm256_maddubs_epi16((__m256i)w, (__m256i)x); }
static inline ints total(sums s) { return (ints)_mm256_madd_epi16((__m256i)s, _mm256_set1_epi16(1)); }
#elif !defined(PLAIN) && LANES == 4 && defined(__ARM_FEATURE_DOTPROD)
typedef ints sums;
constexpr int NIBBLES = 2;  // this instruction takes w as signed: a nibble may be, a byte may not
static inline sums dot4(sums s, words w, ints x) { return (ints)vdotq_s32((int32x4_t)s, (int8x16_t)w, (int8x16_t)x); }
static inline ints total(sums s) { return s; }
#else
typedef ints sums;
constexpr int NIBBLES = 1;
static inline sums dot4(sums s, words w, ints x) {
    for (int i = 0; i < 32; i += 8) s += (ints)((w >> i) & 255) * ((ints)((words)x << (24 - i)) >> 24);
    return s;
}
static inline ints total(sums s) { return s; }
#endif

#if !defined(PLAIN) && LANES == 16 && defined(__AVX512F__)
static inline floats widen(const uint16_t* h) { return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)h)); }
#elif !defined(PLAIN) && LANES == 8 && defined(__F16C__)
static inline floats widen(const uint16_t* h) { return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)h)); }
#elif !defined(PLAIN) && LANES == 4 && defined(__ARM_NEON)
static inline floats widen(const uint16_t* h) { return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(h))); }
#else
static inline floats widen(const uint16_t* h) {  // FP32's exponents are 112 larger; infinities never come here
    const words w = __builtin_convertvector(load<halves>(h), words);
    return (floats)((words)((floats)((w & 0x7fff) << 13) * 0x1p112f) | (w & 0x8000) << 16);
}
#endif

#if !defined(PLAIN) && LANES == 16 && defined(__AVX512F__)  // two instructions, of which GCC 12 makes thirty
static inline floats widen(const int8_t* codes) {
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes)));
}
#elif !defined(PLAIN) && LANES == 8 && defined(__AVX2__)
static inline floats widen(const int8_t* codes) {
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)codes)));
}
#else
static inline floats widen(const int8_t* codes) { return __builtin_convertvector(load<codes8>(codes), floats); }
#endif

static inline uint16_t to_half(float f) {  // to nearest, ties to even; the caller has seen to the range
    const uint32_t bits = load<uint32_t>(&f), size = bits & 0x7fffffff;
    const float small = load<float>(&size) + 0.5f;  // a subnormal half: this addition rounds it
    const uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    return (bits >> 16 & 0x8000) | (size < 0x38800000 ? load<uint32_t>(&small) - 0x3f000000 : normal);
}

constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: added, it rounds a number to an integer in the lowest bits

// exp as 2^n times a polynomial (Cephes), so that every CPU gives the same bits. NaN stays NaN.
static inline floats exponential(floats x) {
    x = x < -87.0f ? floats{} - 87.0f : x > 88.0f ? floats{} + 88.0f : x;
    const floats shifted = x * 1.44269504f + ROUND, n = shifted - ROUND;
    const floats r = x - n * 0.693359375f - n * -2.12194440e-4f;  // at most ln(2) / 2
    floats p = (r * 1.9875691500e-4f + 1.3981999507e-3f) * r + 8.3334519073e-3f;
    p = ((p * r + 4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
    return (p * (r * r) + r + 1.0f) * (floats)(((words)shifted << 23) + 0x3f800000);
}
