// The third part of native.cpp: attention over a contiguous cache of float32, bfloat16 or INT8 numbers.
//
// The keys are split into parts of 512. For each part and query head, the code computes the largest score m, the sum of
// exponentials l and the weighted sum of values. Two parts are merged by rescaling both to the larger m (Milakov and
// Gimelshein 2018; "flash-decoding", Dao et al. 2023). Parts end at multiples of 512 for every batch, so results do not
// depend on the batch. Long parts without explicit prefetching are fastest: from 94 MB, one core read 27 GB/s in runs of
// 512 keys, 20 GB/s in runs of 128, and 19 GB/s with prefetch instructions. table_attention.cpp does the same for caches
// with block tables.
//
//   INT8     number = scale * code + minimum, with one pair per token. A score is scale * (q . code) + minimum * sum(q).
//            With a weight p, the codes of a value count p * scale, and p * minimum is added once to all of D.
enum Numbers { FLOAT32, BFLOAT16, INT8 };
constexpr int CHUNK = 512;            // keys per part
constexpr int HEADS = 3, WIDE = 512;  // query heads at once; the largest D
struct Cached {                       // neighbouring tokens of one head; scales: INT8 only, otherwise null
    const void *keys, *values;
    const uint16_t *key_scale, *key_minimum, *value_scale, *value_minimum;
};
INLINE float number(float x) { return x; }
INLINE float number(uint8_t x) { return x; }
INLINE float number(uint16_t x) {
    uint32_t u = (uint32_t)x << 16;
    return load<float>(&u);
}
INLINE void load2(const uint8_t* p, vf& a, vf& b) { a = codes(p), b = codes(p + W); }
static void merge(float* into, float m, float l, const float* values, int D) {
    const bool above = m > into[0];
    const float factor = above ? std::exp(into[0] - m) : std::exp(m - into[0]), a = above ? factor : 1.f, b = above ? 1.f : factor;
    into[0] = above ? m : into[0], into[1] = into[1] * a + l * b;
    int d = 0;
    for (; d + W <= D; d += W) store(into + 16 + d, load<vf>(into + 16 + d) * a + load<vf>(values + d) * b);
    for (; d < D; d++) into[16 + d] = into[16 + d] * a + values[d] * b;
}

// ---- Q <= 3 query heads of one KV head and `count` <= 512 neighbouring keys. Each key is read and widened once for all Q.
// D is 32 C; with C = 0, D is any number, and the loops are plain. q [Q][WIDE] is scaled, in the order of `load2` (`place`).
typedef float Scores[CHUNK + 16];
// Some CPUs multiply 32 pairs of 16-bit numbers and add neighbours in one instruction. There, numbers keep 16 bits:
// bfloat16 is not converted, and codes become integers. For bfloat16, queries and weights are rounded to bfloat16; for codes,
// to integers of 15 and 14 bits.
template <class KV> struct Pairs { static constexpr bool here = false; };
#ifdef BF16_DOTS
template <> struct Pairs<uint16_t> {
    static constexpr bool here = true;
    typedef vf Sum;
    static INLINE_IN vb load32(const uint16_t* p) { return load<vb>(p); }
    static INLINE_IN Sum dot(Sum sums, vb a, vb b) { return dot2(sums, a, b); }
    static INLINE_IN float step(float, float) { return 1.f; }
    static INLINE_IN uint16_t narrow(float x) { uint16_t half; put(&half, x); return half; }
    static INLINE_IN vf tofloat(Sum x) { return x; }
};
#endif
#ifdef __AVX512VNNI__
template <> struct Pairs<uint8_t> {
    static constexpr bool here = true;
    typedef vi Sum;
    static INLINE_IN vb load32(const uint8_t* p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
    static INLINE_IN Sum dot(Sum sums, vb a, vb b) { return (vi)_mm512_dpwssd_epi32((__m512i)sums, a, b); }
    static INLINE_IN float step(float reach, float most) { return reach > 1e-30f ? reach / most : 1.f; }
    static INLINE_IN uint16_t narrow(float x) { return load<uint32_t>(&(x += 12582912.f)); }  // as `nearest`, the low half
    static INLINE_IN vf tofloat(Sum x) { return ::tofloat(x); }
};
#endif
constexpr float MOST_QUERY = 32767, MOST_WEIGHT = 16383;  // so that sums over 512 codes fit into 32 bits
template <class KV, int C, int Q> INLINE void scores(const float* q, const KV* keys, int count, int D, Scores* p) {
    constexpr int R = C * 32 / W;  // registers per head
    if constexpr (C == 0) {
        for (int g = 0; g < Q; g++)
            for (int j = 0; j < count; j++) {
                p[g][j] = 0;
                for (int d = 0; d < D; d++) p[g][j] += q[g * WIDE + d] * number(keys[(size_t)j * D + d]);
            }
        return;
    }
    alignas(64) uint16_t narrow[Q][32 * C];
    float step[Q];
    if constexpr (Pairs<KV>::here)
        for (int g = 0; g < Q; g++) {
            vf reach = {};
            for (int d = 0; d < 32 * C; d += W) reach = maximum(reach, maximum(load<vf>(q + g * WIDE + d), -load<vf>(q + g * WIDE + d)));
            step[g] = Pairs<KV>::step(largest(reach), MOST_QUERY);
            for (int d = 0; d < 32 * C; d++) narrow[g][d] = Pairs<KV>::narrow(q[g * WIDE + d] * (1 / step[g]));
        }
    for (int j = 0; j < count; j += W) {
        const Many<Q> found = dots<W, Q>([&](int n) __attribute__((always_inline)) {
            const KV* key = keys + (size_t)std::min(j + n, count - 1) * 32 * C;
            Many<Q> sums = {};
            if constexpr (Pairs<KV>::here) {
                typename Pairs<KV>::Sum total[Q] = {};
                EACH(r, C) {
                    const vb numbers = Pairs<KV>::load32(key + 32 * r);
                    EACH(g, Q) total[g] = Pairs<KV>::dot(total[g], numbers, load<vb>(&narrow[g][32 * r]));
                }
                EACH(g, Q) sums.of[g] = Pairs<KV>::tofloat(total[g]);
                return sums;
            }
            EACH2(r, R) {
                vf a, b;
                load2(key + r * W, a, b);
                EACH(g, Q) {
                    sums.of[g] = fma(a, load<vf>(q + g * WIDE + r * W), sums.of[g]);
                    sums.of[g] = fma(b, load<vf>(q + g * WIDE + r * W + W), sums.of[g]);
                }
            }
            return sums;
        });
        EACH(g, Q) store(p[g] + j, Pairs<KV>::here ? found.of[g] * step[g] : found.of[g]);
    }
}
// out[g] = low[g] + the sum of p[g][j] * value j. After the last key, p has zeros up to a whole register.
template <class KV, int C, int Q>
INLINE void weighted(const Scores* p, const KV* values, int count, int D, const float* low, float (*out)[WIDE]) {
    constexpr int R = C * 32 / W, PIECE = R < 8 ? R : 8;  // registers at once, for each of Q
    if constexpr (C == 0) {
        for (int g = 0; g < Q; g++) {
            for (int d = 0; d < D; d++) out[g][d] = low[g];
            for (int j = 0; j < count; j++)
                for (int d = 0; d < D; d++) out[g][d] += p[g][j] * number(values[(size_t)j * D + d]);
        }
        return;
    }
#ifdef __AVX512VNNI__
    if constexpr (Pairs<KV>::here) {  // two keys at once: their values are interleaved in fours
        alignas(64) uint16_t narrow[Q][CHUNK + 16];
        float step[Q];
        for (int g = 0; g < Q; g++) {
            vf reach = {};
            for (int j = 0; j < count; j += W) reach = maximum(reach, load<vf>(p[g] + j));
            step[g] = Pairs<KV>::step(largest(reach), MOST_WEIGHT);
            for (int j = 0; j < count; j++) narrow[g][j] = Pairs<KV>::narrow(p[g][j] * (1 / step[g]));
            narrow[g][count] = 0;
        }
        for (int piece = 0; piece < R; piece += PIECE) {
            typename Pairs<KV>::Sum sums[Q][PIECE] = {};
            for (int j = 0; j < count; j += 2)
                EACH2(r, PIECE) {
                    const KV *one = values + (size_t)j * 32 * C + (piece + r) * W, *two = j + 1 < count ? one + 32 * C : one;
                    const vb a = Pairs<KV>::load32(one), b = Pairs<KV>::load32(two);
                    const vb first = _mm512_unpacklo_epi16(a, b), second = _mm512_unpackhi_epi16(a, b);
                    EACH(g, Q) {
                        const vb weights = _mm512_set1_epi32(load<int32_t>(&narrow[g][j]));
                        sums[g][r] = Pairs<KV>::dot(sums[g][r], first, weights);
                        sums[g][r + 1] = Pairs<KV>::dot(sums[g][r + 1], second, weights);
                    }
                }
            for (int g = 0; g < Q; g++)
                for (int r = 0; r < PIECE; r++) {
                    alignas(64) float found[16];
                    store(found, Pairs<KV>::tofloat(sums[g][r]) * step[g] + low[g]);
                    for (int i = 0; i < 4; i++) memcpy(out[g] + (piece + r / 2 * 2) * W + 8 * i + r % 2 * 4, found + 4 * i, 16);
                }
        }
        return;
    }
#endif
    for (int piece = 0; piece < R; piece += PIECE) {
        vf sums[Q][PIECE];
        for (int g = 0; g < Q; g++) EACH(r, PIECE) sums[g][r] = set(low[g]);
        for (int j = 0; j < count; j++)
            EACH2(r, PIECE) {
                vf a, b;
                load2(values + (size_t)j * 32 * C + (piece + r) * W, a, b);
                EACH(g, Q) {
                    sums[g][r] = fma(set(p[g][j]), a, sums[g][r]);
                    sums[g][r + 1] = fma(set(p[g][j]), b, sums[g][r + 1]);
                }
            }
        for (int g = 0; g < Q; g++) EACH(r, PIECE) store(out[g] + (piece + r) * W, sums[g][r]);
    }
}
// Compute scores and weighted values, and merge them into one part per head: [m, l, 14 unused, sum of values]. The parts
// are `stride` floats apart.
template <class KV, int C, int Q>
static void attend(const float* q, const Cached& c, int count, int D, float* part, size_t stride) {
    constexpr bool CODES = sizeof(KV) == 1;
    alignas(64) Scores p[Q];
    alignas(64) float out[Q][WIDE], m[Q], l[Q], low[Q];
    alignas(64) uint16_t scale[4][CHUNK + 16];  // a copy, because whole registers are read beyond the last key
    scores<KV, C, Q>(q, (const KV*)c.keys, count, D, p);
    if (CODES) {
        const uint16_t* from[4] = {c.key_scale, c.key_minimum, c.value_scale, c.value_minimum};
        for (int i = 0; i < 4; i++) memcpy(scale[i], from[i], 2 * count), memset(scale[i] + count, 0, 32);
    }
    for (int g = 0; g < Q; g++) {
        if (CODES) {
            float total = 0;
            for (int d = 0; d < D; d++) total += q[g * WIDE + d];
            for (int j = 0; j < count; j += W)
                store(p[g] + j, fma(halves(scale[1] + j), set(total), load<vf>(p[g] + j) * halves(scale[0] + j)));
        }
        for (int j = count; j % W; j++) p[g][j] = -INFINITY;
        vf top = load<vf>(p[g]), total = {}, below = {};
        for (int j = W; j < count; j += W) top = maximum(top, load<vf>(p[g] + j));
        m[g] = largest(top);
        for (int j = 0; j < count; j += W) store(p[g] + j, exponential(load<vf>(p[g] + j) - m[g]));
        for (int j = count; j % W; j++) p[g][j] = 0;
        for (int j = 0; j < count; j += W) {
            const vf weight = load<vf>(p[g] + j);
            total += weight;
            if (CODES) below = fma(weight, halves(scale[3] + j), below), store(p[g] + j, weight * halves(scale[2] + j));
        }
        l[g] = sum(total), low[g] = sum(below);
    }
    weighted<KV, C, Q>(p, (const KV*)c.values, count, D, low, out);
    for (int g = 0; g < Q; g++) merge(part + g * stride, m[g], l[g], out[g], D);
}
typedef void (*Attend)(const float*, const Cached&, int, int, float*, size_t);
template <class KV, int C> static Attend attend_heads(int heads) {
    return heads == 1 ? attend<KV, C, 1> : heads == 2 ? attend<KV, C, 2> : attend<KV, C, 3>;
}
static bool whole(int D) { return D == 32 || D == 64 || D == 96 || D == 128 || D == 256; }
template <class KV> static Attend attend_of(int D, int heads) {
    switch (whole(D) ? D / 32 : 0) {
        case 1: return attend_heads<KV, 1>(heads);
        case 2: return attend_heads<KV, 2>(heads);
        case 3: return attend_heads<KV, 3>(heads);
        case 4: return attend_heads<KV, 4>(heads);
        case 8: return attend_heads<KV, 8>(heads);
    }
    return attend_heads<KV, 0>(heads);
}
static Attend attend_of(int kv, int D, int heads) {
    return kv == FLOAT32 ? attend_of<float>(D, heads) : kv == BFLOAT16 ? attend_of<uint16_t>(D, heads) : attend_of<uint8_t>(D, heads);
}
// Return the place of dimension d in a query: `load2` reads keys in this order.
static int place(bool pairs, int d) { return pairs ? d / (2 * W) * (2 * W) + d % 2 * W + d % (2 * W) / 2 : d; }

// Write the key or value of one token and head into the cache, into slot `at` of `slot` (all heads and slots of all rows).
static int kv_bytes(int kv) { return kv == FLOAT32 ? 4 : kv == BFLOAT16 ? 2 : 1; }
static void put_head(const Step& s, const float* x, void* held, uint16_t* scales, uint16_t* minima, size_t at, int D) {
    if (s.kv == FLOAT32) memcpy((float*)held + at * D, x, 4 * D);
    else if (s.kv == BFLOAT16) for (int d = 0; d < D; d++) put((uint16_t*)held + at * D + d, x[d]);
    else {  // as in labkit.cache.quantized.blocks: round the minimum down first, then fit the scale to it
        float v[WIDE], low = INFINITY, high = -INFINITY;
        for (int d = 0; d < D; d++) {
            uint16_t half;
            if (s.rounded) put(&half, x[d]), v[d] = number(half);
            else v[d] = x[d];
            low = std::min(low, v[d]), high = std::max(high, v[d]);
        }
        put(minima + at, low);
        if (number(minima[at]) > low) put(minima + at, low - std::fabs(low) * 0.0078125f);
        const float minimum = number(minima[at]);
        put(scales + at, (high - minimum) / 255.f);
        const float step = std::max(number(scales[at]), 1.17549435e-38f);
        for (int d = 0; d < D; d++)
            ((uint8_t*)held)[at * D + d] = (uint8_t)std::min(255.f, std::max(0.f, std::nearbyint((v[d] - minimum) / step)));
    }
}
