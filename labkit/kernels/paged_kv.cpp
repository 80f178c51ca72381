// Attention over keys and values that lie in blocks: token s of row b is slot s % size of block tables[b][s / size].
//
//   out[b, h, t] = sum over s of softmax over s of (q[b, h, t] . k[s]) * v[s],    s <= starts[b] + t, within the window
//
// A task is one row, one KV head and CHUNK of its tokens, so rows cost their own length and few rows still feed many threads.
// Each task leaves its maximum, its sum and its weighted values; a second pass puts a row's tasks together (the streaming
// softmax, arXiv 1805.02867). Chunks begin at multiples of CHUNK whatever the batch: neither other rows nor the number of
// threads change a bit. Codes of one block become floats once, for all queries of their head. Plain loops, marked for the
// compiler to vectorise; the exponential is a polynomial, because libm's would not be.
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

constexpr long CHUNK = 256;

static inline float bf16(uint16_t x) { uint32_t bits = (uint32_t)x << 16; float f; memcpy(&f, &bits, 4); return f; }

// e^x for x <= 0, relative error 2e-7: x = n ln 2 + r, and a polynomial of degree 6 for r (Cephes).
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

// Where token `at` of a row lies among a head's vectors, and how many follow it in the same block, up to `last`.
static inline long find(const Call& c, long b, long k, long at, long last, long& count) {
    const long slot = at % c.size;
    count = c.size - slot < last - at ? c.size - slot : last - at;
    return ((long)c.tables[b * c.width + at / c.size] * c.K + k) * c.size + slot;
}

// The processor foresees reads within a page of memory, and the next block lies in another: ask for it ahead of time.
static inline const char* ahead(const Call& c, const void* side, long b, long k, long at, long last, long width) {
    long count;
    return (const char*)side + (at < last ? find(c, b, k, at, last, count) * width : 0);
}
static inline void fetch(const char* from, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// One block's vectors of one head as floats: where they lie, or converted into `buffer`.
static const float* numbers(const Call& c, const void* side, const uint16_t* scale, const uint16_t* minimum, long at, long count,
                            float* buffer) {
    const long n = count * c.D;
    if (c.kind == 0) return (const float*)side + at * c.D;
    if (c.kind == 1) {
        const uint16_t* from = (const uint16_t*)side + at * c.D;
#pragma omp simd
        for (long i = 0; i < n; i++) {
            const uint32_t bits = (uint32_t)from[i] << 16;
            memcpy(buffer + i, &bits, 4);
        }
        return buffer;
    }
    const uint8_t* codes = (const uint8_t*)side + at * c.D;
    for (long s = 0; s < count; s++) {
        const float step = bf16(scale[at + s]), low = bf16(minimum[at + s]);
#pragma omp simd
        for (long d = 0; d < c.D; d++) buffer[s * c.D + d] = step * codes[s * c.D + d] + low;
    }
    return buffer;
}

// One key against N queries, D apart: it is loaded once for all of them.
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

template <int FIXED> static inline void add(float* to, const float* w, const float* v, long count, long D) {
    const long n = FIXED ? FIXED : D;
    long s = 0;
    for (; s + 4 <= count; s += 4) {
        const float *a = v + s * n, *b = a + n, *c = b + n, *d = c + n;
#pragma omp simd
        for (long i = 0; i < n; i++) to[i] += (w[s] * a[i] + w[s + 1] * b[i]) + (w[s + 2] * c[i] + w[s + 3] * d[i]);
    }
    for (; s < count; s++)
#pragma omp simd
        for (long i = 0; i < n; i++) to[i] += w[s] * v[s * n + i];
}

// part: [R][D + 2], for each query its weighted values, its maximum, its sum.
template <int FIXED> static void chunk(const Call& c, long b, long k, long first, long last, float* part, float* scores, float* buffer) {
    const long R = c.G * c.T, D = c.D, start = c.starts[b], width = D * (c.kind == 0 ? 4 : c.kind == 1 ? 2 : 1);
    const float* q = c.q + (b * c.K + k) * R * D;
    for (long at = first, count; at < last; at += count) {
        const long place = find(c, b, k, at, last, count);
        const char* next = ahead(c, c.keys, b, k, at + count, last, width);
        const float* keys = numbers(c, c.keys, c.key_scale, c.key_minimum, place, count, buffer);
        for (long r = 0; r < R; r += 3)
            for (long s = 0; s < count; s++) {
                if (r == 0) fetch(next + s * width, width);
                float* to = scores + r * CHUNK + at - first + s;
                if (R - r >= 3) dots<FIXED, 3>(q + r * D, keys + s * D, D, to);
                else if (R - r == 2) dots<FIXED, 2>(q + r * D, keys + s * D, D, to);
                else dots<FIXED, 1>(q + r * D, keys + s * D, D, to);
            }
    }
    for (long r = 0; r < R; r++) {
        float *row = scores + r * CHUNK, *to = part + r * (D + 2), most = -INFINITY, sum = 0;
        const long position = start + r % c.T, n = last - first, lost = c.window ? position - c.window : -1;
        if (last - 1 > position || first <= lost)
            for (long s = 0; s < n; s++)
                if (first + s > position || (first + s <= lost && first + s >= c.sinks)) row[s] = -INFINITY;
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
        const float* values = numbers(c, c.values, c.value_scale, c.value_minimum, place, count, buffer);
        for (long r = 0; r < R; r++) {
            for (long s = r * count / R; s < (r + 1) * count / R; s++) fetch(next + s * width, width);
            add<FIXED>(part + r * (D + 2), scores + r * CHUNK + at - first, values, count, D);
        }
    }
}

extern "C" void paged_attend(const Call* call) {
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
        std::vector<float> scores(R * CHUNK), buffer(c.size * D);
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
