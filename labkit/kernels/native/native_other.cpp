// The primitives of native.cpp for CPUs without AVX-512 VNNI: AVX2, Arm NEON, and portable C++.
//
// The layout of packed weights is the same for all: 64 bytes have 16 rows x 4 columns. A narrower register takes a part of
// the 16 rows, 4 bytes each. The block is read once per part; after the first time it is in the first-level cache.
//
//   dot4     AVX2: multiplies bytes and adds pairs of products to 16 bits, then pairs of these to 32 bits. Two products of a
//            nibble and 127 fit into 16 bits. Two products of a byte and 127 do not, so INT8 weights are first widened to 16
//            bits, with twice as many instructions.
//            NEON: one instruction, but for signed numbers only. INT8 weights are taken minus 128, and 128 times the sum of
//            activations is added.
//            Portable: plain loops over the vector types of GCC and clang.
INLINE float half_at(const uint8_t* p) {  // float16 -> float, exact, in integer arithmetic
    uint16_t h;
    memcpy(&h, p, 2);
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023, u;
    if (exponent == 0) return (sign ? -1.f : 1.f) * std::ldexp((float)fraction, -24);
    u = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
    float x;
    memcpy(&x, &u, 4);
    return x;
}
INLINE void relax() {  // tell the core that this loop waits
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

#ifndef __AVX512VNNI__
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
constexpr int W = 8;
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
typedef __m256i vb;
INLINE vb low(vb x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
INLINE vb high(vb x) { return low(_mm256_srli_epi16(x, 4)); }
template <int BITS> INLINE vi dot4(vi sums, vb weights, int32_t four) {
    if constexpr (BITS == 4) {
        __m256i pairs = _mm256_maddubs_epi16(weights, _mm256_set1_epi32(four));
        return sums + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    } else {
        __m256i x = _mm256_cvtepi8_epi16(_mm_set1_epi32(four));
        __m256i a = _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm256_castsi256_si128(weights)), x);       // rows 0..3
        __m256i b = _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm256_extracti128_si256(weights, 1)), x);  // rows 4..7
        return sums + (vi)_mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xD8);
    }
}
INLINE vf half(const uint8_t* p) { return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE vf halves(const uint16_t* p) { return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16); }
INLINE vf codes(const uint8_t* p) { return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

#else
constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint8_t vb __attribute__((vector_size(16)));
INLINE vb low(vb x) { return x & 15; }
INLINE vb high(vb x) { return x >> 4; }
INLINE vf half(const uint8_t* p) { return vf{half_at(p), half_at(p + 2), half_at(p + 4), half_at(p + 6)}; }
INLINE vf halves(const uint16_t* p) { return (vf)vi{p[0] << 16, p[1] << 16, p[2] << 16, p[3] << 16}; }
INLINE vf codes(const uint8_t* p) { return vf{(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
template <int BITS> INLINE vi dot4(vi sums, vb weights, int32_t four) {
    int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four));
    if constexpr (BITS == 4) return (vi)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, x);
    int32x4_t back = vdotq_s32(vdotq_s32((int32x4_t)sums, vdupq_n_s8(64), x), vdupq_n_s8(64), x);
    return (vi)vdotq_s32(back, (int8x16_t)(weights ^ 128), x);
}
INLINE vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
template <int BITS> INLINE vi dot4(vi sums, vb weights, int32_t four) {
    typedef int16_t v16 __attribute__((vector_size(16)));
    vi x = four - vi{}, w = (vi)weights;  // one column at a time: a byte per lane, with sign for the activations
    for (int c = 0; c < 4; c++) {
        vi a = (w >> 8 * c) & 255, b = x << (24 - 8 * c) >> 24;
        if constexpr (BITS == 4) sums += (vi)((v16)a * (v16)(b & 0xFFFF)) << 16 >> 16;  // |products| < 2^15
        else sums += a * b;
    }
    return sums;
}
INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
#endif
#endif
INLINE vf tofloat(vi x) { return __builtin_convertvector(x, vf); }
INLINE vf maximum(vf a, vf b) { return a > b ? a : b; }
INLINE float largest(vf x) {
    float top = x[0];
    for (int i = 1; i < W; i++) top = x[i] > top ? x[i] : top;
    return top;
}
INLINE float sum(vf x) {
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
}
template <int Q> struct Many { vf of[Q]; };
template <int N, int Q, class Dot> INLINE Many<Q> dots(const Dot& dot) {
    Many<Q> all;
    for (int i = 0; i < W; i++) {
        const Many<Q> one = dot(i);
        for (int g = 0; g < Q; g++) all.of[g][i] = sum(one.of[g]);
    }
    return all;
}
#endif
