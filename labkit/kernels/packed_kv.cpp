// Attention over an INT8 KV cache, straight from the codes: scores of the keys, and the weighted sum of the values.
//
//   scores[h, r, s] = scale[h, s] * (q[h, r] . code[h, s]) + minimum[h, s] * sum(q[h, r])
//   sums[h, r, d]   = sum over s of weight[h, r, s] * (scale[h, s] * code[h, s, d] + minimum[h, s])
//
// Codes of TOKENS tokens are made into floats at once, which stay in the first-level cache, and used for all R = G * T
// queries of their KV head. That is what PyTorch's operators cannot do: they write the floats to memory, four bytes a code,
// and read them back for the product. Plain loops, marked for the compiler to vectorise, so this serves any CPU.
#include <cstdint>
#include <cstring>
#include <vector>

static inline float bf16(uint16_t x) { uint32_t bits = (uint32_t)x << 16; float f; memcpy(&f, &bits, 4); return f; }

constexpr long TASK = 256;   // tokens a task, so that few heads still feed many threads
constexpr long TOKENS = 32;  // converted at once: 8 KiB at D = 64

static void convert(const uint8_t* codes, float* numbers, long count) {
#pragma omp simd
    for (long i = 0; i < count; i++) numbers[i] = codes[i];
}

template <int D> static inline float dot(const float* a, const float* b, long width) {
    float sum = 0;
    const long n = D ? D : width;
#pragma omp simd reduction(+ : sum)
    for (long d = 0; d < n; d++) sum += a[d] * b[d];
    return sum;
}

template <int FIXED> static void scores(const float* q, const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum,
                                        float* out, long R, long D, long row, long first, long last) {
    std::vector<float> total(R), numbers(TOKENS * D);
    for (long r = 0; r < R; r++)
        for (long d = 0; d < D; d++) total[r] += q[r * D + d];
    for (long at = first; at < last; at += TOKENS) {
        const long count = at + TOKENS < last ? TOKENS : last - at;
        convert(codes + at * D, numbers.data(), count * D);
        for (long r = 0; r < R; r++)
            for (long s = 0; s < count; s++)
                out[r * row + at + s] = bf16(scale[at + s]) * dot<FIXED>(q + r * D, &numbers[s * D], D)
                                        + bf16(minimum[at + s]) * total[r];
    }
}

extern "C" void kv_scores(const float* q, const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum, float* out,
                          long heads, long R, long D, long slots, long held, long row, int threads) {
    const long tasks = (slots + TASK - 1) / TASK;
    auto run = D == 64 ? scores<64> : D == 128 ? scores<128> : scores<0>;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long task = 0; task < heads * tasks; task++) {
        const long h = task / tasks, first = task % tasks * TASK, last = first + TASK < slots ? first + TASK : slots;
        run(q + h * R * D, codes + h * held * D, scale + h * held, minimum + h * held, out + h * R * row, R, D, row, first, last);
    }
}

// A step over eight tokens for each reading and writing of the sums. Behind the last token, weights are zero.
template <int W> static void sums(const float* weight, const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum,
                                  float* out, long R, long D, long slots, long row) {
    float numbers[TOKENS][W], w[TOKENS];
    memset(numbers, 0, sizeof numbers);
    for (long r = 0; r < R; r++) memset(out + r * D, 0, W * sizeof(float));
    for (long at = 0; at < slots; at += TOKENS) {
        const long count = at + TOKENS < slots ? TOKENS : slots - at;
        for (long s = 0; s < count; s++) {
            const uint8_t* code = codes + (at + s) * D;
            const float step = bf16(scale[at + s]), low = bf16(minimum[at + s]);
#pragma omp simd
            for (int d = 0; d < W; d++) numbers[s][d] = step * code[d] + low;
        }
        for (long r = 0; r < R; r++) {
            float* to = out + r * D;
            memset(w, 0, sizeof w);
            memcpy(w, weight + r * row + at, count * sizeof(float));
            for (long s = 0; s < TOKENS; s += 8) {
                const float(*n)[W] = numbers + s;
#pragma omp simd
                for (int d = 0; d < W; d++)
                    to[d] += w[s] * n[0][d] + w[s + 1] * n[1][d] + w[s + 2] * n[2][d] + w[s + 3] * n[3][d]
                             + (w[s + 4] * n[4][d] + w[s + 5] * n[5][d] + w[s + 6] * n[6][d] + w[s + 7] * n[7][d]);
            }
        }
    }
}

extern "C" void kv_sums(const float* weight, const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum, float* out,
                        long heads, long R, long D, long slots, long held, long row, int threads) {
    const long width = D % 32 ? 16 : 32, columns = D / width;
    auto run = width == 32 ? sums<32> : sums<16>;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long task = 0; task < heads * columns; task++) {
        const long h = task / columns, d = task % columns * width;
        run(weight + h * R * row, codes + h * held * D + d, scale + h * held, minimum + h * held, out + h * R * D + d, R, D, slots, row);
    }
}
