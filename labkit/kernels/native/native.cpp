// The whole decoder in one call, for a CPU. build.py compiles this file, and notebook 14 explains it.
//
// One token of a small model needs 120 matrix products of a few microseconds each. Python would need as long to call them
// as they take. Here one function runs all layers. Its threads meet at barriers. The time that remains is the time to read
// each weight once from memory.
//
//   weights       16 rows are interleaved: one 64-byte register has 4 columns of 16 rows. `dot4` multiplies them by four
//                 activations, which are the same for all rows, and adds to 16 sums. It needs no shuffle and no sum over
//                 the lanes of a register.
//   activations   32 neighbours share a scale: code = round(127 x / max|x|). The products of codes are exact integers.
//   tile          up to 8 tokens share a register of weights: it is read and unpacked once, and multiplied 8 times.
//
// For each token, the operations and their order are always the same. They do not depend on the batch, the tile or the
// number of threads: the results of five rows are bit for bit those of five single rows. A register has W floats, with
// AVX-512 16. native_other.cpp has the same primitives for other instruction sets. Letters as in labkit.model: N tokens,
// E, H, K, D, I, V. g counts groups of 32.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#ifdef _OPENMP
extern "C" int omp_get_thread_num(), omp_get_num_threads();  // in the library that torch has loaded, see build.py
#endif
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < n; i++)  // unrolled, so that arrays become registers
#define EACH2(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < n; i += 2)
#define INLINE static INLINE_IN
#define INLINE_IN inline __attribute__((always_inline))
#include "native_other.cpp"  // the primitives without AVX-512
#ifdef __AVX512VNNI__
#include <immintrin.h>
constexpr int W = 16;
typedef float vf __attribute__((vector_size(64)));    // 16 floats: + - * / act on all of them
typedef int32_t vi __attribute__((vector_size(64)));  // 16 integers
typedef __m512i vb;                                   // 64 bytes: 16 rows x 4 columns
INLINE vb low(vb x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE vb high(vb x) { return low(_mm512_srli_epi16(x, 4)); }
template <int BITS> INLINE vi dot4(vi sums, vb weights, int32_t four) {  // weights 0..255, activations -127..127
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, weights, _mm512_set1_epi32(four));
}
#ifdef __AVX512BF16__
#define BF16_DOTS  // two columns at once, but activations are rounded to bfloat16
INLINE vf dot2(vf sums, vb a, vb b) { return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b); }
INLINE vf dot2(vf sums, vb weights, int32_t two) { return dot2(sums, weights, _mm512_set1_epi32(two)); }
#endif
INLINE vf half(const uint8_t* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE vf halves(const uint16_t* p) {  // W bfloat16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
INLINE vf codes(const uint8_t* p) { return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
INLINE vf tofloat(vi x) { return (vf)_mm512_cvtepi32_ps((__m512i)x); }
INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
INLINE vf maximum(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE float largest(vf x) { return _mm512_reduce_max_ps((__m512)x); }
INLINE float sum(vf x) { return _mm512_reduce_add_ps((__m512)x); }
// Sum the lanes of each of W registers; the W sums fill one register. For 16, this tree needs 45 instructions, and single
// sums about 128.
template <int N> INLINE vf fold(vf x, vf y) {
    __m512 a = (__m512)x, b = (__m512)y;
    __m512d c = (__m512d)x, d = (__m512d)y;
    if constexpr (N == 2) return (vf)_mm512_unpacklo_ps(a, b) + (vf)_mm512_unpackhi_ps(a, b);
    else if constexpr (N == 4) return (vf)_mm512_unpacklo_pd(c, d) + (vf)_mm512_unpackhi_pd(c, d);
    else return (vf)_mm512_shuffle_f32x4(a, b, 0x88) + (vf)_mm512_shuffle_f32x4(a, b, 0xDD);
}
template <int Q> struct Many { vf of[Q]; };  // one register per query
template <int N, int Q, class Dot> INLINE Many<Q> dots(const Dot& dot, int first = 0) {
    if constexpr (N == 1) return dot(first);
    else {
        Many<Q> a = dots<N / 2, Q>(dot, first), b = dots<N / 2, Q>(dot, first + N / 2);
        EACH(g, Q) a.of[g] = fold<N>(a.of[g], b.of[g]);
        return a;
    }
}
#endif
typedef int8_t v8 __attribute__((vector_size(W)));
template <class T> INLINE T load(const void* p) { T x; memcpy(&x, p, sizeof x); return x; }
INLINE void store(float* p, vf x) { memcpy(p, &x, sizeof x); }
INLINE vf set(float x) { return x - vf{}; }
INLINE vi nearest(vf x) { return (vi)(x + 12582912.f) - 0x4B400000; }  // adding 1.5 * 2^23 leaves no fraction bits
INLINE vf exponential(vf x) {                                          // 2^n * e^r, |r| <= ln(2)/2; error 2e-7
    x = x > -87.f ? (x < 88.f ? x : set(88.f)) : set(-87.f);
    vi n = nearest(x * 1.44269504f);
    vf r = fma(tofloat(n), set(2.12194440e-4f), fma(tofloat(n), set(-0.693359375f), x)), p = set(1.9875691e-4f);
    for (float c : {1.3981999e-3f, 8.3334519e-3f, 4.1665796e-2f, 1.6666665e-1f, 0.5f, 1.f, 1.f}) p = fma(p, r, set(c));
    return (vf)((vi)p + (n << 23));
}
// Load 2 W neighbours into two registers. For bfloat16, one gets the even numbers and one the odd numbers: a bfloat16 is
// the upper half of a float.
INLINE void load2(const float* p, vf& a, vf& b) { a = load<vf>(p), b = load<vf>(p + W); }
INLINE void load2(const uint16_t* p, vf& a, vf& b) {
    vi x = load<vi>(p);
    a = (vf)(x << 16), b = (vf)(x & (int32_t)0xFFFF0000);
}
INLINE void put(float* p, float x) { *p = x; }
INLINE void put(uint16_t* p, float x) {
    uint32_t u = load<uint32_t>(&x);
    *p = (u + 0x7FFF + (u >> 16 & 1)) >> 16;  // to nearest, ties to even
}

// ---- Matrices, as Python passes them. structures.py has the same fields.
enum Kind { BF16, INT4_ROW, INT4_MINIMUM, INT4_ZERO, INT8_ROW, INT8_MINIMUM, INT8_ZERO };
constexpr int bits(int kind) { return kind == BF16 ? 16 : kind <= INT4_ZERO ? 4 : 8; }
constexpr bool by_row(int kind) { return kind == INT4_ROW || kind == INT8_ROW; }
struct Matrix {
    const uint8_t* blocks;       // of 16 rows; per group 16 fp16 scales, 16 fp16 offsets, then the codes
    const float *scale, *bias;   // per row, in the order of the blocks, or null; `scale`: row formats only
    int32_t rows, cols, groups;  // groups of 32 columns, with padding
    int32_t kind, per, pair;     // `per` groups share scale and offset; pair: blocks of gate and up alternate
};
static size_t block_bytes(const Matrix& m) {
    return (size_t)m.groups * 64 * bits(m.kind) + (m.kind == BF16 || by_row(m.kind) ? 0 : m.groups / m.per * 64);
}
static float weight(const Matrix& m, int row, int col) {  // one number; slow, for rows of an embedding
    int g = col / 32, c = col % 32, lane = row % 16;
    const uint8_t* p = m.blocks + row / 16 * block_bytes(m) + (size_t)g * 64 * bits(m.kind);
    if (m.kind == BF16) {
        uint32_t u = load<uint16_t>(p + c / 2 * 64 + lane * 4 + c % 2 * 2) << 16;
        return load<float>(&u);
    }
    if (!by_row(m.kind)) p += (g / m.per + 1) * 64;
    int line = c / 4, code = bits(m.kind) == 8 ? p[line * 64 + lane * 4 + c % 4]
                                               : p[line % 4 * 64 + lane * 4 + c % 4] >> line / 4 * 4 & 15;
    if (by_row(m.kind)) return (code - (1 << (bits(m.kind) - 1))) * m.scale[row];
    const uint8_t* head = p - 64 - (size_t)(g % m.per) * 64 * bits(m.kind);
    float scale = half_at(head + lane * 2), offset = half_at(head + 32 + lane * 2);
    return m.kind == INT4_MINIMUM || m.kind == INT8_MINIMUM ? code * scale + offset : (code + offset) * scale;
}

// Activations in the order in which a tile reads them: [tile][group of 32 columns][token of the tile][32].
constexpr int TILE = 8;
struct Group { float scale, sum; int32_t codes; };  // of 32 numbers: scale, sum, and sum of codes
struct Inputs { int8_t* codes; float* floats; Group* group; };
// Convert the vector x of one token into the input of matrix m. With `norm`, first multiply it by norm and factor.
static void prepare(const Inputs& in, const Matrix& m, int n, int N, const float* x, const float* norm, float factor) {
    int first = n / TILE * TILE, width = std::min(TILE, N - first);
    for (int g = 0; g < m.groups; g++) {
        size_t slot = (size_t)first * m.groups + (size_t)g * width + (n - first);
        alignas(64) float v[32] = {};
        const int here = std::max(0, std::min(32, m.cols - 32 * g));  // 0: in a group of 64, 32 columns can be padding
        if (norm) for (int c = 0; c < here; c++) v[c] = x[32 * g + c] * (factor * norm[32 * g + c]);
        else memcpy(v, x + 32 * g, 4 * here);
        if (m.kind == BF16) {
#ifdef BF16_DOTS
            for (int c = 0; c < 32; c++) put((uint16_t*)in.codes + slot * 32 + c, v[c]);
#else
            memcpy(in.floats + slot * 32, v, sizeof v);
#endif
            continue;
        }
        vf top = {}, total = {};
        for (int c = 0; c < 32; c += W) top = maximum(top, maximum(load<vf>(v + c), -load<vf>(v + c)));
        const float reach = largest(top), inverse = reach > 1e-30f ? 127.f / reach : 0.f;
        for (int c = 0; c < 32; c += W) {
            const vi code = nearest(load<vf>(v + c) * inverse);
            const auto narrow = __builtin_convertvector(code, v8);
            memcpy(in.codes + slot * 32 + c, &narrow, W), total += tofloat(code);
        }
        const float codes = sum(total);
        in.group[slot] = {reach / 127.f, reach / 127.f * codes, (int32_t)codes};
    }
}
// Multiply one block of 16 rows by NT tokens: y[t][row]. If a register has fewer than 16 lanes, `part` runs over the rows.
template <int KIND, int NT> static void tile(const Matrix& m, int block, const Inputs& in, size_t slot, float (*y)[16]) {
    constexpr int BITS = bits(KIND);  // no prefetching: the hardware detects the one long run
    for (int part = 0; part < 16; part += W) {
        const uint8_t* w = m.blocks + block * block_bytes(m);
        vf sums[NT] = {}, odd[NT] = {}, scale = {}, offset = {};
        for (int g = 0, left = 0; g < m.groups; g++, left--, slot += NT) {
            if (KIND != BF16 && !by_row(KIND) && left == 0) {
                scale = half(w + part * 2), offset = half(w + 32 + part * 2), left = m.per, w += 64;
                if (KIND == INT4_ZERO || KIND == INT8_ZERO) offset *= scale;
            }
            if constexpr (KIND == BF16) {
#ifdef BF16_DOTS
                const int8_t* x = in.codes + slot * 64;
                EACH2(i, 16) {
                    vb a = load<vb>(w + 64 * i), b = load<vb>(w + 64 * i + 64);
                    asm("" : "+v"(a), "+v"(b));  // keep them in registers; otherwise GCC loads them once per token
                    EACH(t, NT) {
                        sums[t] = dot2(sums[t], a, load<int32_t>(x + 64 * t + 4 * i));
                        odd[t] = dot2(odd[t], b, load<int32_t>(x + 64 * t + 4 * i + 4));
                    }
                }
#else
                const float* x = in.floats + slot * 32;
                EACH(i, 16) {
                    vf a, b;
                    load2((const uint16_t*)(w + 64 * i + 4 * part), a, b);
                    EACH(t, NT) {
                        sums[t] = fma(a, set(x[32 * t + 2 * i]), sums[t]);
                        odd[t] = fma(b, set(x[32 * t + 2 * i + 1]), odd[t]);
                    }
                }
#endif
            } else {
                vi total[NT];
                EACH(t, NT) total[t] = by_row(KIND) ? vi{} - (in.group[slot + t].codes << (BITS - 1)) : vi{};  // undo the + 8 or + 128
                EACH(i, 8) {  // the inner loop is over tokens: NT independent sums
                    vb codes = load<vb>(w + (BITS == 4 ? i % 4 : i) * 64 + 4 * part);
                    if (BITS == 4) codes = i < 4 ? low(codes) : high(codes);
                    EACH(t, NT) total[t] = dot4<BITS>(total[t], codes, load<int32_t>(in.codes + (slot + t) * 32 + 4 * i));
                }
                EACH(t, NT) {
                    const Group& group = in.group[slot + t];
                    if (by_row(KIND)) sums[t] = fma(tofloat(total[t]), set(group.scale), sums[t]);
                    else sums[t] = fma(offset, set(group.sum), fma(tofloat(total[t]), scale * group.scale, sums[t]));
                }
            }
            w += 64 * BITS;
        }
        slot -= (size_t)NT * m.groups;
        EACH(t, NT) {
            vf value = sums[t] + odd[t];
            if (by_row(KIND)) value *= load<vf>(m.scale + block * 16 + part);
            store(y[t] + part, m.bias ? value + load<vf>(m.bias + block * 16 + part) : value);
        }
    }
}
typedef void (*Tile)(const Matrix&, int, const Inputs&, size_t, float (*)[16]);
#define TILES(k) {tile<k, 1>, tile<k, 2>, tile<k, 3>, tile<k, 4>, tile<k, 5>, tile<k, 6>, tile<k, 7>, tile<k, 8>}
static const Tile TILE_OF[7][TILE] = {TILES(BF16), TILES(INT4_ROW), TILES(INT4_MINIMUM), TILES(INT4_ZERO), TILES(INT8_ROW),
                                      TILES(INT8_MINIMUM), TILES(INT8_ZERO)};

// ---- The team: threads that run the same function and wait for each other at barriers. They spin while they wait, because
// a phase takes only microseconds.
struct Team {
    int id, size;
    std::atomic<int>*arrived, *round;
    void meet() {
        int now = round->load(std::memory_order_acquire), spins = 0;
        if (arrived->fetch_add(1) + 1 == size) arrived->store(0), round->store(now + 1, std::memory_order_release);
        else while (round->load(std::memory_order_acquire) == now) ++spins < 4096 ? relax() : std::this_thread::yield();
    }
};
// Compute y = m x for N tokens. Each thread takes a range of blocks, and calls `done` for each finished tile.
template <class Done> static void multiply(const Matrix& m, const Inputs& in, int N, const Team& team, Done done) {
    int wide = 1 + m.pair, units = (m.rows / wide + 15) / 16;
    for (int u = units * team.id / team.size; u < units * (team.id + 1) / team.size; u++)
        for (int first = 0; first < N; first += TILE) {
            int width = std::min(TILE, N - first);
            alignas(64) float y[2][TILE][16];
            for (int i = 0; i < wide; i++) TILE_OF[m.kind][width - 1](m, u * wide + i, in, (size_t)first * m.groups, y[i]);
            done(u * 16, first, width, y);
        }
}
#include "native_forward.cpp"
