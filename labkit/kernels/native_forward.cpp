// The second half of native.cpp: attention over a contiguous cache, the stack of layers, and what Python calls.
//
// Attention takes 128 keys at a time and keeps, per query head, the largest score m, the sum of exponentials l and the
// weighted sum of values; two such parts are merged by rescaling to the larger m (Milakov and Gimelshein 2018;
// "flash-decoding", Dao et al. 2023). Parts end at multiples of 128 whatever the batch, so results do not depend on it.
struct Layer {
    Matrix qkv, o, gate_up, down;
    const float *attn_norm, *mlp_norm, *q_norm, *k_norm;  // the last two or null
};
struct Model {
    const Layer* layers;
    Matrix embed, head;
    const float *norm, *cos, *sin;  // cos and sin [positions, D/2]
    int32_t L, E, H, K, D, I, V;
    float eps;
};
struct Step {
    const int64_t* ids;                // N tokens, of whichever rows
    const int32_t *row, *position;     // of each token; a row's tokens in order
    const int32_t *logits_at, *window; // where each token's logits go (-1: nowhere); per layer, 0: none
    void **keys, **values;             // per layer [rows, K, slots, D]
    float *logits, *hidden;            // [.., V]; [N, E] after the final norm, or null
    int32_t N, slots, bf16, threads;
};
constexpr int CHUNK = 128, TOKENS = 256;  // keys an attention part; tokens a pass, so that activations stay in cache

// ---- Attention of one query head over `count` neighbouring keys, merged into part = [m, l, ., ., sum of values].
static void merge(float* into, float m, float l, const float* values, int D) {
    float top = std::max(into[0], m), a = std::exp(into[0] - top), b = std::exp(m - top);
    into[0] = top, into[1] = into[1] * a + l * b;
    for (int d = 0; d < D; d++) into[16 + d] = into[16 + d] * a + values[d] * b;
}
// D = 32 C; C = 0 is any other head size, in plain loops. `q` is scaled, and for bfloat16 in the order of `load2`.
INLINE float number(float x) { return x; }
INLINE float number(uint16_t x) {
    uint32_t u = (uint32_t)x << 16;
    return load<float>(&u);
}
template <class KV, int C> static void attend(const float* q, const KV* keys, const KV* values, int count, int D, float* part) {
    alignas(64) float p[CHUNK + 16] = {}, out[512];
    if constexpr (C > 0) {
        constexpr int R = 32 * C / W;  // registers a head
        D = 32 * C;
        for (int j = 0; j < count; j += W)
            store(p + j, dots<W>([&](int i) __attribute__((always_inline)) {
                const KV* key = keys + (size_t)std::min(j + i, count - 1) * 32 * C;
                vf even = {}, odd = {}, a, b;
                for (int r = 0; r < R; r += 2) {
                    load2(key + r * W, a, b);
                    even = fma(a, load<vf>(q + r * W), even), odd = fma(b, load<vf>(q + r * W + W), odd);
                }
                return even + odd;
            }));
    } else
        for (int j = 0; j < count; j++) {
            p[j] = 0;
            for (int d = 0; d < D; d++) p[j] += q[d] * number(keys[(size_t)j * D + d]);
        }
    float m = *std::max_element(p, p + count), l = 0;
    for (int j = 0; j < count; j += W) store(p + j, exponential(load<vf>(p + j) - m));
    for (int j = 0; j < count; j++) l += p[j];
    if constexpr (C > 0) {
        constexpr int R = 32 * C / W;
        vf sums[R] = {}, a, b;
        for (int j = 0; j < count; j++)
            for (int r = 0; r < R; r += 2) {
                load2(values + (size_t)j * 32 * C + r * W, a, b);
                sums[r] = fma(set(p[j]), a, sums[r]), sums[r + 1] = fma(set(p[j]), b, sums[r + 1]);
            }
        for (int r = 0; r < R; r++) store(out + r * W, sums[r]);
    } else
        for (int d = 0; d < D; d++) {
            out[d] = 0;
            for (int j = 0; j < count; j++) out[d] += p[j] * number(values[(size_t)j * D + d]);
        }
    merge(part, m, l, out, D);
}

typedef void (*Attend)(const float*, const void*, const void*, int, int, float*);
template <class KV, int C> static void attend_any(const float* q, const void* k, const void* v, int count, int D, float* part) {
    attend<KV, C>(q, (const KV*)k, (const KV*)v, count, D, part);
}
template <class KV> static Attend attend_of(int D) {
    switch (D % 32 ? 0 : D / 32) {
        case 1: return attend_any<KV, 1>;
        case 2: return attend_any<KV, 2>;
        case 3: return attend_any<KV, 3>;
        case 4: return attend_any<KV, 4>;
        case 8: return attend_any<KV, 8>;
    }
    return attend_any<KV, 0>;
}
static bool by_pairs(const Step& s, int D) { return s.bf16 && attend_of<uint16_t>(D) != attend_any<uint16_t, 0>; }
static int place(bool pairs, int d) { return pairs ? d / (2 * W) * (2 * W) + d % 2 * W + d % (2 * W) / 2 : d; }

// ---- Norms and rotations, one token at a time.
static float norm_factor(const float* x, int n, float eps) {
    vf squares[4] = {};
    int i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int j = 0; j < 4; j++) { vf a = load<vf>(x + i + j * W); squares[j] = fma(a, a, squares[j]); }
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; i < n; i++) total += x[i] * x[i];
    return 1.f / std::sqrt(total / n + eps);
}
static void turn(float* head, const float* norm, const float* cos, const float* sin, int D, float eps) {
    float factor = norm ? norm_factor(head, D, eps) : 1.f;
    for (int i = 0; i < D / 2; i++) {
        float a = head[i], b = head[i + D / 2];
        if (norm) a *= factor * norm[i], b *= factor * norm[i + D / 2];
        head[i] = a * cos[i] - b * sin[i], head[i + D / 2] = b * cos[i] + a * sin[i];
    }
}
template <class KV> static void append(const Model& m, const Step& s, int layer, int n, const float* keys) {
    for (int side = 0; side < 2; side++)  // keys, then values, which lie behind them
        for (int k = 0; k < m.K; k++) {
            KV* at = (KV*)(side ? s.values : s.keys)[layer] + (((size_t)s.row[n] * m.K + k) * s.slots + s.position[n]) * m.D;
            for (int d = 0; d < m.D; d++) put(at + d, keys[(side * m.K + k) * m.D + d]);
        }
}

// ---- The stack of layers, for tokens first .. first + N, run by every thread of the team.
struct Work {
    float *x, *qkv, *h, *parts, *out;
    Inputs in;
    int splits, record;  // attention parts a head, floats a part
};
static void stack(const Model& m, const Step& s, const Work& w, Team& team, int first, int N) {
    const int D = m.D, G = m.H / m.K, heads = m.H + 2 * m.K, hidden = (m.I + 15) / 16 * 16, id = team.id, size = team.size;
    const bool pairs = by_pairs(s, D);
    const Attend attend = s.bf16 ? attend_of<uint16_t>(D) : attend_of<float>(D);
    const float scale = 1.f / std::sqrt((float)D);
    auto residual = [&](int row, int at, int width, float (*y)[TILE][16]) {
        for (int t = 0; t < width; t++)
            for (int r = 0; r < std::min(16, m.E - row); r++) w.x[(size_t)(at + t) * m.E + row + r] += y[0][t][r];
    };
    auto normed = [&](const Matrix& into, const float* norm) {
        for (int n = id; n < N; n += size) {
            const float* x = w.x + (size_t)n * m.E;
            prepare(w.in, into, n, N, x, norm, norm_factor(x, m.E, m.eps));
        }
        team.meet();
    };
    for (int n = id; n < N; n += size)
        for (int e = 0; e < m.E; e++) w.x[(size_t)n * m.E + e] = weight(m.embed, s.ids[first + n], e);
    for (int l = 0; l < m.L; l++) {
        const Layer& layer = m.layers[l];
        normed(layer.qkv, layer.attn_norm);
        multiply(layer.qkv, w.in, N, team, [&](int row, int at, int width, float (*y)[TILE][16]) {
            for (int t = 0; t < width; t++)
                memcpy(w.qkv + (size_t)(at + t) * heads * D + row, y[0][t], 4 * std::min(16, heads * D - row));
        });
        team.meet();
        for (int n = id; n < N; n += size) {
            float* q = w.qkv + (size_t)n * heads * D;
            const size_t at = (size_t)s.position[first + n] * (D / 2);
            for (int h = 0; h < m.H + m.K; h++)
                turn(q + h * D, h < m.H ? layer.q_norm : layer.k_norm, m.cos + at, m.sin + at, D, m.eps);
            s.bf16 ? append<uint16_t>(m, s, l, first + n, q + m.H * D) : append<float>(m, s, l, first + n, q + m.H * D);
        }
        team.meet();
        for (int task = id; task < N * m.K * w.splits; task += size) {
            const int n = task / (m.K * w.splits), k = task / w.splits % m.K, split = task % w.splits;
            const int end = s.position[first + n] + 1, begin = s.window[l] ? std::max(0, end - s.window[l]) : 0;
            const size_t base = ((size_t)s.row[first + n] * m.K + k) * s.slots * D * (s.bf16 ? 2 : 4);
            const char *keys = (char*)s.keys[l] + base, *values = (char*)s.values[l] + base;
            for (int g = 0; g < G; g++) {
                const int h = k * G + g;
                float* part = w.parts + (((size_t)n * m.H + h) * w.splits + split) * w.record;
                alignas(64) float q[512];
                for (int d = 0; d < D; d++) q[place(pairs, d)] = w.qkv[((size_t)n * heads + h) * D + d] * scale;
                part[0] = -INFINITY, part[1] = 0, memset(part + 16, 0, 4 * D);
                for (int c = w.splits > 1 ? split : begin / CHUNK; c * CHUNK < end; c++) {
                    const int from = std::max(c * CHUNK, begin), to = std::min(c * CHUNK + CHUNK, end);
                    const size_t skip = (size_t)from * D * (s.bf16 ? 2 : 4);
                    if (from < to) attend(q, keys + skip, values + skip, to - from, D, part);
                    if (w.splits > 1) break;
                }
            }
        }
        team.meet();
        for (int n = id; n < N; n += size) {
            float* out = w.out + (size_t)n * m.H * D;
            for (int h = 0; h < m.H; h++) {
                float* part = w.parts + ((size_t)n * m.H + h) * w.splits * w.record;
                for (int c = 1; c < w.splits; c++)
                    if (const float* next = part + c * w.record; next[1] > 0) {
                        if (part[1] > 0) merge(part, next[0], next[1], next + 16, D);
                        else memcpy(part, next, 4 * w.record);
                    }
                for (int d = 0; d < D; d++) out[h * D + d] = part[16 + place(pairs, d)] / part[1];
            }
            prepare(w.in, layer.o, n, N, out, nullptr, 1);
        }
        team.meet();
        multiply(layer.o, w.in, N, team, residual);
        team.meet();
        normed(layer.gate_up, layer.mlp_norm);
        multiply(layer.gate_up, w.in, N, team, [&](int row, int at, int width, float (*y)[TILE][16]) {
            for (int t = 0; t < width; t++)
                for (int r = 0; r < 16; r += W) {  // silu(gate) * up, while both are in registers
                    vf gate = load<vf>(y[0][t] + r);
                    store(w.h + (size_t)(at + t) * hidden + row + r, gate / (1.f + exponential(-gate)) * load<vf>(y[1][t] + r));
                }
        });
        team.meet();
        for (int n = id; n < N; n += size) prepare(w.in, layer.down, n, N, w.h + (size_t)n * hidden, nullptr, 1);
        team.meet();
        multiply(layer.down, w.in, N, team, residual);
        team.meet();
    }
    int wanted[TOKENS], M = 0;
    for (int n = 0; n < N; n++)
        if (s.logits_at[first + n] >= 0) wanted[M++] = n;
    if (s.hidden)
        for (int n = id; n < N; n += size) {
            const float *x = w.x + (size_t)n * m.E, factor = norm_factor(x, m.E, m.eps);
            for (int e = 0; e < m.E; e++) s.hidden[(size_t)(first + n) * m.E + e] = x[e] * (factor * m.norm[e]);
        }
    for (int i = id; i < M; i += size) {
        const float* x = w.x + (size_t)wanted[i] * m.E;
        prepare(w.in, m.head, i, M, x, m.norm, norm_factor(x, m.E, m.eps));
    }
    team.meet();
    multiply(m.head, w.in, M, team, [&](int row, int at, int width, float (*y)[TILE][16]) {
        for (int t = 0; t < width; t++)
            memcpy(s.logits + (size_t)s.logits_at[first + wanted[at + t]] * m.V + row, y[0][t], 4 * std::min(16, m.V - row));
    });
    team.meet();
}

// ---- What Python calls.
struct Arena {  // one allocation a call, cut into pieces that start on cache lines
    char *base = nullptr, *next = nullptr;
    template <class T> T* take(size_t count) {
        T* piece = (T*)next;
        next += (count * sizeof(T) + 63) / 64 * 64;
        return piece;
    }
};
static Inputs take_inputs(Arena& a, size_t tokens, int groups) {
    Inputs in;
    in.floats = a.take<float>(tokens * groups * 32), in.codes = (int8_t*)in.floats;
    in.group = a.take<Group>(tokens * groups);
    return in;
}
template <class Run> static void with_team(int threads, Run run) {
    std::atomic<int> arrived{0}, round{0};
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
    run(Team{omp_get_thread_num(), omp_get_num_threads(), &arrived, &round});
#else
    run(Team{0, 1, &arrived, &round});
#endif
}
extern "C" {
int lk_sizes(int which) { return which == 0 ? sizeof(Matrix) : which == 1 ? sizeof(Layer) : which == 2 ? sizeof(Model) : sizeof(Step); }
int lk_lanes() { return W; }
int lk_forward(const Model* m, const Step* s) {
    const int N = std::min(s->N, TOKENS), chunks = (*std::max_element(s->position, s->position + s->N)) / CHUNK + 1;
    Work w;
    // Few tokens: the keys are split over the threads. Many: the tokens are.
    w.splits = N * m->K < 8 * s->threads ? chunks : 1, w.record = (m->D + 31) / 16 * 16;
    int groups = m->head.groups;
    for (int l = 0; l < m->L; l++)
        for (const Matrix* x : {&m->layers[l].qkv, &m->layers[l].o, &m->layers[l].gate_up, &m->layers[l].down})
            groups = std::max(groups, x->groups);
    Arena arena;
    auto carve = [&] {
        w.x = arena.take<float>((size_t)N * m->E), w.qkv = arena.take<float>((size_t)N * (m->H + 2 * m->K) * m->D);
        w.h = arena.take<float>((size_t)N * (m->I + 16)), w.out = arena.take<float>((size_t)N * m->H * m->D);
        w.parts = arena.take<float>((size_t)N * m->H * w.splits * w.record), w.in = take_inputs(arena, N, groups);
    };
    carve();  // once to count, once for real
    arena.base = arena.next = (char*)std::aligned_alloc(64, arena.next - (char*)nullptr);
    if (!arena.base) return 1;
    carve();
    with_team(s->threads, [&](Team team) {
        for (int first = 0; first < s->N; first += TOKENS) stack(*m, *s, w, team, first, std::min(TOKENS, s->N - first));
    });
    std::free(arena.base);
    return 0;
}
// y [N, rows] = x [N, cols] times the matrix: for decoders that run layer by layer, over a cache of any kind.
int lk_linear(const Matrix* m, const float* x, float* y, int N, int threads) {
    Arena arena;
    take_inputs(arena, N, m->groups);
    arena.base = arena.next = (char*)std::aligned_alloc(64, arena.next - (char*)nullptr);
    if (!arena.base) return 1;
    Inputs in = take_inputs(arena, N, m->groups);
    with_team(threads, [&](Team team) {
        for (int n = team.id; n < N; n += team.size) prepare(in, *m, n, N, x + (size_t)n * m->cols, nullptr, 1);
        team.meet();
        const int part = m->rows / (1 + m->pair);
        multiply(*m, in, N, team, [&](int row, int at, int width, float (*y_)[TILE][16]) {
            for (int i = 0; i <= m->pair; i++)
                for (int t = 0; t < width; t++)
                    memcpy(y + (size_t)(at + t) * m->rows + i * part + row, y_[i][t], 4 * std::min(16, part - row));
        });
    });
    std::free(arena.base);
    return 0;
}
void lk_rows(const Matrix* m, const int64_t* ids, float* y, int N) {  // rows of an embedding
    for (int n = 0; n < N; n++)
        for (int c = 0; c < m->cols; c++) y[(size_t)n * m->cols + c] = weight(*m, ids[n], c);
}
}
