// Attention over keys and values in blocks. Token s of row b is in slot s % size of block tables[b][s / size].
//
//   out[b, h, t] = sum over s of softmax over s of (q[b, h, t] . k[s]) * v[s],    s <= starts[b] + t, within the window
//
// A task is CHUNK tokens of one row and one KV head. A row costs as much as its own length, and a few rows are enough work
// for many threads. Each task writes its maximum, its sum and its weighted values. A second pass merges the tasks of a row
// (the streaming softmax, arXiv 1805.02867). Chunks begin at multiples of CHUNK for every batch, so the result does not
// depend on other rows or on the number of threads. Codes are converted to floats once for all queries of their head. The
// loops are plain, so that the compiler can vectorize them. The exponential is a polynomial, because that of libm is not
// vectorized.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

struct Call {
    const float* q;
    float* out;
    const void *keys; const uint16_t *key_scale, *key_minimum;
    const void *values; const uint16_t *value_scale, *value_minimum;
    const int32_t *tables, *starts, *counts;
    int64_t B, K, G, T, D, size, width, window, sinks, kind, threads;
};

enum Numbers { FLOAT32, BFLOAT16, INT8 };
constexpr long CHUNK = 256, STEP = 64;  // tokens per task; tokens per conversion, which fit into the first-level cache

static inline float bf16(uint16_t x) { uint32_t bits = (uint32_t)x << 16; float f; memcpy(&f, &bits, 4); return f; }

// e^x for x <= 0 with a relative error of 2e-7: x = n ln 2 + r, with a polynomial of degree 6 for r (Cephes).
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float n = std::floor(x * 1.44269504f + 0.5f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f; y = y * r + 8.3334519073e-3f; y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f; y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const int32_t bits = ((int32_t)n + 127) << 23;
    float two; memcpy(&two, &bits, 4);
    return y * two;
}

// Return the index of token `at` of a row among the vectors of a head. `count`: how many vectors from there on are in the
// same block and before `last`.
static inline long find(const Call& c, long b, long k, long at, long last, long& count) {
    const long slot = at % c.size;
    count = std::min({c.size - slot, last - at, STEP});
    return ((long)c.tables[b * c.width + at / c.size] * c.K + k) * c.size + slot;
}

// The processor prefetches only within a page of memory. The next block is in another page, so the code prefetches it.
static inline const char* ahead(const Call& c, const void* side, long b, long k, long at, long last, long width) {
    long count;
    return at < last && at % c.size == 0 ? (const char*)side + find(c, b, k, at, last, count) * width : nullptr;
}
static inline void fetch(const char* from, long bytes) {
    for (long i = 0; from && i < bytes; i += 64) __builtin_prefetch(from + i);
}

// Return some vectors of one head as floats: in place, or converted in `buffer`. Scales are applied to codes later.
static const float* numbers(const Call& c, const void* side, long at, long count, float* buffer) {
    const long n = count * c.D;
    if (c.kind == FLOAT32) return (const float*)side + at * c.D;
    if (c.kind == INT8) {
        const uint8_t* codes = (const uint8_t*)side + at * c.D;
#pragma omp simd
        for (long i = 0; i < n; i++) buffer[i] = codes[i];
        return buffer;
    }
    const uint16_t* from = (const uint16_t*)side + at * c.D;
#pragma omp simd
    for (long i = 0; i < n; i++) {
        const uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(buffer + i, &bits, 4);
    }
    return buffer;
}

// Multiply one key by N queries, which are D apart. The key is loaded once.
template <int FIXED, int N> static inline void dots(const float* q, const float* key, long D, float* out) {
    const long n = FIXED ? FIXED : D;
    const float *q1 = N > 1 ? q + n : q, *q2 = N > 2 ? q + 2 * n : q;
    float a = 0, b = 0, c = 0;
#pragma omp simd reduction(+ : a, b, c)
    for (long d = 0; d < n; d++) {
        a += q[d] * key[d];
        if (N > 1) b += q1[d] * key[d];
        if (N > 2) c += q2[d] * key[d];
    }
    out[0] = a;
    if (N > 1) out[CHUNK] = b;
    if (N > 2) out[2 * CHUNK] = c;
}

// Add the values in groups of eight, with one read and write of the sums per group. An incomplete group gets weights of
// zero. The result of a query then does not depend on the number of later tokens in the same pass, which it does not see.
template <int FIXED> static inline void add(float* to, const float* w, const float* v, long count, long D) {
    const long n = FIXED ? FIXED : D;
    for (long s = 0; s < count; s += 8) {
        const float* a[8];
        float x[8];
        for (long j = 0; j < 8; j++) {
            a[j] = v + std::min(s + j, count - 1) * n;
            x[j] = s + j < count ? w[s + j] : 0.0f;
        }
#pragma omp simd
        for (long i = 0; i < n; i++)
            to[i] += (x[0] * a[0][i] + x[1] * a[1][i] + x[2] * a[2][i] + x[3] * a[3][i])
                     + (x[4] * a[4][i] + x[5] * a[5][i] + x[6] * a[6][i] + x[7] * a[7][i]);
    }
}

// part: [R][D + 2]; for each query its weighted values, its maximum, its sum.
template <int FIXED> static void chunk(const Call& c, long b, long k, long first, long last, float* part, float* scores, float* buffer) {
    const long R = c.G * c.T, D = c.D, start = c.starts[b], width = D * (c.kind == FLOAT32 ? 4 : c.kind == BFLOAT16 ? 2 : 1);
    const float* q = c.q + (b * c.K + k) * R * D;
    float *total = scores + R * CHUNK, *low = total + R;  // per query: the sum of its numbers, and the sum of weights * minima
    for (long r = 0; r < R; r++) {
        total[r] = low[r] = 0;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long d = 0; d < D; d++) sum += q[r * D + d];
        total[r] = sum;
    }
    for (long at = first, count; at < last; at += count) {
        const long place = find(c, b, k, at, last, count);
        const char* next = ahead(c, c.keys, b, k, at + count, last, width);
        const float* keys = numbers(c, c.keys, place, count, buffer);
        for (long r = 0; r < R; r += 3)
            for (long s = 0; s < count; s++) {
                if (r == 0) fetch(next ? next + s * width : next, width);
                float* to = scores + r * CHUNK + at - first + s;
                if (R - r >= 3) dots<FIXED, 3>(q + r * D, keys + s * D, D, to);
                else if (R - r == 2) dots<FIXED, 2>(q + r * D, keys + s * D, D, to);
                else dots<FIXED, 1>(q + r * D, keys + s * D, D, to);
            }
        for (long r = 0; r < R && c.kind == INT8; r++) {
            float* to = scores + r * CHUNK + at - first;
#pragma omp simd
            for (long s = 0; s < count; s++) to[s] = to[s] * bf16(c.key_scale[place + s]) + total[r] * bf16(c.key_minimum[place + s]);
        }
    }
    for (long r = 0; r < R; r++) {
        float *row = scores + r * CHUNK, *to = part + r * (D + 2), most = -INFINITY, sum = 0;
        const long position = start + r % c.T, lost = c.window ? position - c.window : -1;
        const long real = last - first, n = (real + 15) / 16 * 16;  // whole vectors, for the reason given at `add`
        if (last - 1 > position || first <= lost)
            for (long s = 0; s < real; s++)
                if (first + s > position || (first + s <= lost && first + s >= c.sinks)) row[s] = -INFINITY;
        std::fill(row + real, row + n, -INFINITY);
#pragma omp simd reduction(max : most)
        for (long s = 0; s < n; s++) most = row[s] > most ? row[s] : most;
        memset(to, 0, D * sizeof(float));
        if (most == -INFINITY) {
            memset(row, 0, n * sizeof(float));
        } else {
#pragma omp simd reduction(+ : sum)
            for (long s = 0; s < n; s++) {
                const float w = row[s] == -INFINITY ? 0.0f : exponential(row[s] - most);
                row[s] = w;
                sum += w;
            }
        }
        to[D] = most;
        to[D + 1] = sum;
    }
    for (long at = first, count; at < last; at += count) {
        const long place = find(c, b, k, at, last, count);
        const char* next = ahead(c, c.values, b, k, at + count, last, width);
        const float* values = numbers(c, c.values, place, count, buffer);
        for (long r = 0; r < R; r++) {
            for (long s = r * count / R; s < (r + 1) * count / R; s++) fetch(next ? next + s * width : next, width);
            float* w = scores + r * CHUNK + at - first;
            if (c.kind == INT8) {
                float sum = 0, minima[STEP] = {};
                for (long s = 0; s < count; s++) minima[s] = bf16(c.value_minimum[place + s]);
#pragma omp simd reduction(+ : sum)
                for (long s = 0; s < (count + 15) / 16 * 16; s++) sum += w[s] * minima[s];
                for (long s = 0; s < count; s++) w[s] *= bf16(c.value_scale[place + s]);
                low[r] += sum;
            }
            add<FIXED>(part + r * (D + 2), w, values, count, D);
        }
    }
    for (long r = 0; r < R && c.kind == INT8; r++)
        for (long d = 0; d < D; d++) part[r * (D + 2) + d] += low[r];
}

extern "C" void attend(const Call* call) {
    const Call& c = *call;
    const long R = c.G * c.T, D = c.D, stride = R * (D + 2);
    struct Task { long b, k, first, last; };
    std::vector<Task> tasks;
    std::vector<long> from(c.B * c.K + 1);
    for (long b = 0; b < c.B; b++)
        for (long k = 0; k < c.K; k++) {
            from[b * c.K + k] = tasks.size();
            const long length = c.counts[b] ? c.starts[b] + c.counts[b] : 0;
            for (long first = 0; first < length; first += CHUNK)
                if (!c.window || c.sinks || first + CHUNK > c.starts[b] - c.window)
                    tasks.push_back({b, k, first, first + CHUNK < length ? first + CHUNK : length});
        }
    from[c.B * c.K] = tasks.size();
    std::vector<float> parts(tasks.size() * stride);
    auto run = D == 64 ? chunk<64> : D == 128 ? chunk<128> : chunk<0>;
#pragma omp parallel num_threads(c.threads)
    {
        std::vector<float> scores(R * (CHUNK + 2) + 16), buffer(STEP * D);
#pragma omp for schedule(dynamic, 1)
        for (long i = 0; i < (long)tasks.size(); i++)
            run(c, tasks[i].b, tasks[i].k, tasks[i].first, tasks[i].last, &parts[i * stride], scores.data(), buffer.data());
#pragma omp for schedule(static)
        for (long i = 0; i < c.B * c.K * R; i++) {
            const long row = i / R, r = i % R, b = row / c.K;
            float most = -INFINITY, sum = 0, *to = c.out + i * D;
            memset(to, 0, D * sizeof(float));
            if (r % c.T >= c.counts[b]) continue;
            for (long t = from[row]; t < from[row + 1]; t++) most = std::fmax(most, parts[t * stride + r * (D + 2) + D]);
            for (long t = from[row]; t < from[row + 1]; t++) {
                const float* part = &parts[t * stride + r * (D + 2)];
                if (part[D] == -INFINITY) continue;
                const float w = exponential(part[D] - most);
                sum += w * part[D + 1];
#pragma omp simd
                for (long d = 0; d < D; d++) to[d] += w * part[d];
            }
            const float inverse = sum > 0 ? 1 / sum : 0;
            for (long d = 0; d < D; d++) to[d] *= inverse;
        }
    }
}
