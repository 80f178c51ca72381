// The second part of native.cpp: norms, the layers, and the functions that Python calls.
struct Layer {
    Matrix qkv, o, gate_up, down;
    const float *attn_norm, *mlp_norm, *q_norm, *k_norm;  // the last two can be null
};
struct Model {
    const Layer* layers;
    Matrix embed, head;
    const float *norm, *cos, *sin;  // cos and sin [positions, D/2]
    int32_t L, E, H, K, D, I, V;
    float eps;
};
struct Step {
    const int64_t* ids;                // N tokens, from any rows
    const int32_t *row, *position;     // of each token; the tokens of a row are in order
    const int32_t *logits_at, *window; // where the logits of each token go (-1: not needed); per layer, 0: no window
    void **keys, **values;             // per layer [rows, K, slots, D]
    uint16_t** scales;                 // per layer, for INT8 caches: scale and minimum of keys, then of values
    float *logits, *hidden;            // [.., V]; [N, E] after the final norm, can be null
    double* spent;                     // the seconds of each phase are added here; can be null
    int32_t N, slots, kv, rounded, threads;  // `kv`: see Numbers; `rounded`: first round keys and values to bfloat16
};
enum Phase { EMBED, NORMS, PRODUCTS, ROTARY, KV, HEAD, PHASES };
constexpr int MOST_THREADS = 256;
constexpr int TOKENS = 256;  // tokens per pass: their activations fit into the processor's cache
#include "native_attention.cpp"

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
static void append(const Model& m, const Step& s, int layer, int n, const float* keys) {
    uint16_t** scales = s.kv == INT8 ? s.scales + 4 * layer : nullptr;
    for (int side = 0; side < 2; side++)  // keys, then values
        for (int k = 0; k < m.K; k++)
            put_head(s, keys + (side * m.K + k) * m.D, (side ? s.values : s.keys)[layer], scales ? scales[2 * side] : nullptr,
                     scales ? scales[2 * side + 1] : nullptr, ((size_t)s.row[n] * m.K + k) * s.slots + s.position[n], m.D);
}

static double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// ---- The layers, for the tokens first .. first + N - 1. Each thread of the team runs this function.
struct Work {
    float *x, *qkv, *h, *parts, *out;
    Inputs in[MOST_THREADS];
    int splits, record;  // parts of attention per head, floats per part
    bool alone;          // for few tokens each thread prepares all inputs, which is faster than waiting
};
static void stack(const Model& m, const Step& s, const Work& w, Team& team, int first, int N) {
    const int D = m.D, G = m.H / m.K, heads = m.H + 2 * m.K, hidden = (m.I + 15) / 16 * 16, id = team.id, size = team.size;
    const bool pairs = s.kv == BFLOAT16 && whole(D) && !Pairs<uint16_t>::here;
    const int number_bytes = kv_bytes(s.kv);
    Attend attend[HEADS + 1] = {};
    for (int few = 1; few <= HEADS; few++) attend[few] = attend_of(s.kv, D, few);
    const float scale = 1.f / std::sqrt((float)D);
    auto residual = [&](int row, int at, int width, float (*y)[TILE][16]) {
        for (int t = 0; t < width; t++)
            for (int r = 0; r < std::min(16, m.E - row); r++) w.x[(size_t)(at + t) * m.E + row + r] += y[0][t][r];
    };
    const Inputs& in = w.in[w.alone ? id : 0];
    const int start = w.alone ? 0 : id, stride = w.alone ? 1 : size;  // the tokens that this thread prepares
    auto prepared = [&] { if (!w.alone) team.meet(); };
    auto normed = [&](const Matrix& into, const float* norm) {
        for (int n = start; n < N; n += stride) {
            const float* x = w.x + (size_t)n * m.E;
            prepare(in, into, n, N, x, norm, norm_factor(x, m.E, m.eps));
        }
        prepared();
    };
    double last = s.spent && id == 0 ? seconds() : 0;
    auto lap = [&](Phase phase) {  // the time of the first thread, with its waits
        if (!s.spent || id) return;
        const double time = seconds();
        s.spent[phase] += time - last, last = time;
    };
    for (int n = id; n < N; n += size)
        for (int e = 0; e < m.E; e++) w.x[(size_t)n * m.E + e] = weight(m.embed, s.ids[first + n], e);
    team.meet(), lap(EMBED);
    for (int l = 0; l < m.L; l++) {
        const Layer& layer = m.layers[l];
        normed(layer.qkv, layer.attn_norm), lap(NORMS);
        multiply(layer.qkv, in, N, team, [&](int row, int at, int width, float (*y)[TILE][16]) {
            for (int t = 0; t < width; t++)
                memcpy(w.qkv + (size_t)(at + t) * heads * D + row, y[0][t], 4 * std::min(16, heads * D - row));
        });
        team.meet(), lap(PRODUCTS);
        for (int n = id; n < N; n += size) {
            float* q = w.qkv + (size_t)n * heads * D;
            const size_t at = (size_t)s.position[first + n] * (D / 2);
            for (int h = 0; h < m.H + m.K; h++)
                turn(q + h * D, h < m.H ? layer.q_norm : layer.k_norm, m.cos + at, m.sin + at, D, m.eps);
            append(m, s, l, first + n, q + m.H * D);
        }
        team.meet(), lap(ROTARY);
        const int tasks = N * m.K * w.splits;  // each thread takes neighbouring tasks, so that its reads are one run
        for (int task = (long)tasks * id / size; task < (long)tasks * (id + 1) / size; task++) {
            const int n = task / (m.K * w.splits), k = task / w.splits % m.K, split = task % w.splits;
            const int end = s.position[first + n] + 1, begin = s.window[l] ? std::max(0, end - s.window[l]) : 0;
            const size_t base = ((size_t)s.row[first + n] * m.K + k) * s.slots;
            for (int h = k * G, few; h < k * G + G; h += few) {
                few = k * G + G - h == 4 ? 2 : std::min(HEADS, k * G + G - h);  // take 4 heads as 2 and 2
                const size_t stride = (size_t)w.splits * w.record;
                float* part = w.parts + ((size_t)n * m.H + h) * stride + split * w.record;
                alignas(64) float q[HEADS * WIDE];
                for (int g = 0; g < few; g++) {
                    for (int d = 0; d < D; d++)
                        q[g * WIDE + place(pairs, d)] = w.qkv[((size_t)n * heads + h + g) * D + d] * scale;
                    part[g * stride] = -INFINITY, part[g * stride + 1] = 0, memset(part + g * stride + 16, 0, 4 * D);
                }
                for (int c = w.splits > 1 ? split : begin / CHUNK; c * CHUNK < end; c++) {
                    const int from = std::max(c * CHUNK, begin), to = std::min(c * CHUNK + CHUNK, end);
                    const size_t slot = base + from, bytes = slot * D * number_bytes;
                    Cached held = {(char*)s.keys[l] + bytes, (char*)s.values[l] + bytes};
                    if (s.kv == INT8) {
                        uint16_t** scales = s.scales + 4 * l;
                        held = {held.keys, held.values, scales[0] + slot, scales[1] + slot, scales[2] + slot, scales[3] + slot};
                    }
                    if (from < to) attend[few](q, held, to - from, D, part, stride);
                    if (w.splits > 1) break;
                }
            }
        }
        team.meet();
        for (int n = start; n < N; n += stride) {
            float out[WIDE + 16], *all = w.out + ((size_t)n + (w.alone ? id * N : 0)) * m.H * D;
            for (int h = 0; h < m.H; h++) {
                const float* part = w.parts + ((size_t)n * m.H + h) * w.splits * w.record;
                out[0] = -INFINITY, out[1] = 0, memset(out + 16, 0, 4 * D);
                for (int c = 0; c < w.splits; c++, part += w.record)
                    if (part[1] > 0) merge(out, part[0], part[1], part + 16, D);
                for (int d = 0; d < D; d++) all[h * D + d] = out[16 + place(pairs, d)] / out[1];
            }
            prepare(in, layer.o, n, N, all, nullptr, 1);
        }
        prepared(), lap(KV);
        multiply(layer.o, in, N, team, residual);
        team.meet(), lap(PRODUCTS);
        normed(layer.gate_up, layer.mlp_norm), lap(NORMS);
        multiply(layer.gate_up, in, N, team, [&](int row, int at, int width, float (*y)[TILE][16]) {
            for (int t = 0; t < width; t++)
                for (int r = 0; r < 16; r += W) {  // silu(gate) * up, in registers
                    vf gate = load<vf>(y[0][t] + r);
                    store(w.h + (size_t)(at + t) * hidden + row + r, gate / (1.f + exponential(-gate)) * load<vf>(y[1][t] + r));
                }
        });
        team.meet();
        for (int n = start; n < N; n += stride) prepare(in, layer.down, n, N, w.h + (size_t)n * hidden, nullptr, 1);
        prepared();
        multiply(layer.down, in, N, team, residual);
        team.meet(), lap(PRODUCTS);
    }
    int wanted[TOKENS], M = 0;
    for (int n = 0; n < N; n++)
        if (s.logits_at[first + n] >= 0) wanted[M++] = n;
    if (s.hidden)
        for (int n = id; n < N; n += size) {
            const float *x = w.x + (size_t)n * m.E, factor = norm_factor(x, m.E, m.eps);
            for (int e = 0; e < m.E; e++) s.hidden[(size_t)(first + n) * m.E + e] = x[e] * (factor * m.norm[e]);
        }
    for (int i = start; i < M; i += stride) {
        const float* x = w.x + (size_t)wanted[i] * m.E;
        prepare(in, m.head, i, M, x, m.norm, norm_factor(x, m.E, m.eps));
    }
    prepared();
    multiply(m.head, in, M, team, [&](int row, int at, int width, float (*y)[TILE][16]) {
        for (int t = 0; t < width; t++)
            memcpy(s.logits + (size_t)s.logits_at[first + wanted[at + t]] * m.V + row, y[0][t], 4 * std::min(16, m.V - row));
    });
    team.meet(), lap(HEAD);
}

// ---- The functions that Python calls.
struct Arena {  // one allocation per call; each piece starts at a cache line
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
    // For few tokens, the keys are divided among the threads; for many, the tokens.
    const int threads = std::min(s->threads, MOST_THREADS);
    w.alone = N <= 2;
    w.splits = N * m->K < 8 * threads ? chunks : 1, w.record = (m->D + 31) / 16 * 16;
    int groups = m->head.groups;
    for (int l = 0; l < m->L; l++)
        for (const Matrix* x : {&m->layers[l].qkv, &m->layers[l].o, &m->layers[l].gate_up, &m->layers[l].down})
            groups = std::max(groups, x->groups);
    Arena arena;
    auto carve = [&] {
        w.x = arena.take<float>((size_t)N * m->E), w.qkv = arena.take<float>((size_t)N * (m->H + 2 * m->K) * m->D);
        w.h = arena.take<float>((size_t)N * (m->I + 16)), w.out = arena.take<float>((size_t)N * m->H * m->D * (w.alone ? threads : 1));
        w.parts = arena.take<float>((size_t)N * m->H * w.splits * w.record);
        for (int i = 0; i < (w.alone ? threads : 1); i++) w.in[i] = take_inputs(arena, N, groups);
    };
    carve();  // first to count the bytes, then to place the pieces
    arena.base = arena.next = (char*)std::aligned_alloc(64, arena.next - (char*)nullptr);
    if (!arena.base) return 1;
    carve();
    with_team(threads, [&](Team team) {
        for (int first = 0; first < s->N; first += TOKENS) stack(*m, *s, w, team, first, std::min(TOKENS, s->N - first));
    });
    std::free(arena.base);
    return 0;
}
// Compute y [N, rows] from x [N, cols] and one matrix, for decoders that run layer by layer.
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
void lk_rows(const Matrix* m, const int64_t* ids, float* y, int N) {  // look up rows of an embedding
    for (int n = 0; n < N; n++)
        for (int c = 0; c < m->cols; c++) y[(size_t)n * m->cols + c] = weight(*m, ids[n], c);
}
}
