// One pass of a Llama-family model as one function: no operators, no launches, and between two matrices only a barrier.
// First the numbers (32 weights share a scale and a minimum, 32 activations a scale, all else is integers), then their
// products (LANES output rows side by side), attention (over blocks of 16 tokens), and the pass (phases that all
// threads go through together).
//
// A pass computes ROWS: (token, position, block table). Consecutive positions of one request are a prompt, or guesses
// to be checked; rows of different requests are a batch; the code does not know which. Every number is computed by one
// thread, by the same operations in the same order, whatever else is in the pass and however many threads there are: no
// sum of floats runs across the lanes of a vector, and none is contracted to a fused one (-ffp-contract=off). So a row
// gives the same bits alone and in company, on 4 lanes and on 16.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernel.h"
#include "kernel_vectors.h"

extern "C" int omp_get_thread_num(), omp_get_num_threads();

// ---- numbers --------------------------------------------------------------------------------------------------------

// Activations [rows][columns]: in each group 32 integers times a scale. INT8 is one digit; INT16 is two, 256 * high +
// low, at twice the products: free at a row or two, where the memory is what is waited for.
struct Inputs {
    int8_t *low, *high;
    float *scale, *sum;  // [rows][columns / 32]; sum: of a group's numbers, for the weights' minimum
    int64_t columns;
};

// Without their sign, floats sort as integers do, infinity and NaN last.
static inline uint32_t largest_bits(const float* x, int64_t count) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, load<uint32_t>(x + i) & 0x7fffffff);
    return largest;
}

static bool quantise(const float* x, const Inputs& in, int64_t group, bool two_digits) {  // false: NaN or infinity
    const uint32_t bits = largest_bits(x, GROUP);
    const float largest = load<float>(&bits), limit = two_digits ? 127 * 256 + 127 : 127;
    const float inverse = largest > 1e-30f ? limit / largest : 0.0f;
    if (bits >= 0x7f800000) return false;
    int32_t sum = 0;
    for (int64_t i = 0; i < GROUP; i++) {
        const float shifted = x[i] * inverse + ROUND;
        const int32_t v = load<int32_t>(&shifted) - 0x4b400000;
        in.low[group * GROUP + i] = (int8_t)v;
        in.high[group * GROUP + i] = (int8_t)((v - (int8_t)v) / 256);
        sum += v;
    }
    in.scale[group] = largest / limit;
    in.sum[group] = (float)sum * in.scale[group];
    return true;
}

// RMSNorm of x [size] (arXiv 1910.07467), with sixteen sums on every CPU.
static void normalise(const float* x, const float* weight, float eps, int64_t size, float* out) {
    float squares[16] = {}, sum = 0;
    for (int64_t i = 0; i < size; i++) squares[i % 16] += x[i] * x[i];
    for (float square : squares) sum += square;
    const float factor = 1.0f / std::sqrt(sum / (float)size + eps);
    for (int64_t i = 0; i < size; i++) out[i] = weight[i] * (x[i] * factor);
}

// ---- products -------------------------------------------------------------------------------------------------------

// A tile of weights times R rows: unpacked once for all of them. R and DIGITS are constants, so that every sum has its
// register; indexed at run time they would live in memory.
template <int BITS, int DIGITS, int R>
static inline void multiply_rows(const Matrix& w, int64_t tile, const Inputs& in, int64_t row, floats* y) {
    constexpr int64_t VECTOR = 4 * LANES, SCALES = LANES * (BITS == 4 ? 2 : 1);
    const int64_t groups = w.columns / GROUP;
    const uint8_t* codes = w.codes + tile * groups * BITS * VECTOR;
    const uint16_t* scales = w.scales + tile * groups * SCALES;
    for (int r = 0; r < R; r++) y[r] = w.bias ? load<floats>(w.bias + tile * LANES) : floats{};
    for (int64_t group = 0; group < groups; group++, codes += BITS * VECTOR, scales += SCALES) {
        ints dot[R] = {};
        for (int part = 0; part < (BITS == 8 ? NIBBLES : 1); part++) {
            sums s[R][DIGITS] = {};
#pragma GCC unroll 1  // unrolled further, GCC loads all ahead and runs out of registers
            for (int v = 0; v < (BITS == 4 ? 4 : 8); v++) {
                const words both = load<words>(codes + v * VECTOR);  // [LANES][4 columns]
#pragma GCC unroll 2
                for (int half = 0; half < (BITS == 4 ? 2 : 1); half++) {
                    words w4 = both >> (BITS == 4 ? half * 4 : part * 4);
                    if (BITS == 4 || NIBBLES == 2) w4 &= 0x0f0f0f0f;
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++) {
                        const int64_t at = (row + r) * in.columns + group * GROUP + half * 16 + v * 4;
                        s[r][0] = dot4(s[r][0], w4, ints{} + load<int32_t>(in.low + at));
                        if constexpr (DIGITS == 2) s[r][1] = dot4(s[r][1], w4, ints{} + load<int32_t>(in.high + at));
                    }
                }
            }
            for (int r = 0; r < R; r++)
                dot[r] += (total(s[r][0]) + (DIGITS == 2 ? total(s[r][DIGITS - 1]) * 256 : ints{})) * (part ? 16 : 1);
        }
        const floats scale = widen(scales), minimum = BITS == 4 ? widen(scales + SCALES - LANES) : scale * -128.0f;
        for (int r = 0; r < R; r++) {
            const int64_t at = (row + r) * groups + group;
            y[r] += scale * (__builtin_convertvector(dot[r], floats) * in.scale[at]) + minimum * in.sum[at];
        }
    }
}

template <int BITS, int DIGITS, int R>
static void multiply_all(const Matrix& w, int64_t tile, const Inputs& in, int64_t row, int64_t rows, floats* y) {
    for (; row + R <= rows; row += R) multiply_rows<BITS, DIGITS, R>(w, tile, in, row, y + row);
    if constexpr (R > 1) multiply_all<BITS, DIGITS, R / 2>(w, tile, in, row, rows, y);
}

static void multiply(const Matrix& w, int64_t tile, const Inputs& in, int64_t rows, bool two_digits, floats* y) {
    constexpr int R = LANES == 16 ? 8 : 4;  // as many as there are registers for
    if (w.bits == 4) (two_digits ? multiply_all<4, 2, R> : multiply_all<4, 1, R>)(w, tile, in, 0, rows, y);
    else (two_digits ? multiply_all<8, 2, R> : multiply_all<8, 1, R>)(w, tile, in, 0, rows, y);
}

// ---- attention ------------------------------------------------------------------------------------------------------

// H query heads q [H][dim] of one KV head over a chunk of the text. For each a state: its largest score, the sum of
// exp(score - largest), and the mixture of values [dim] under these weights. A key is widened once for all H.
template <class Stored, int H>
static void attend(const Cache& c, const int64_t* slabs, int64_t tokens, int64_t dim, const float* q, float* state,
                   int64_t stride) {
    constexpr int V = BLOCK / LANES;
    float p[H][CHUNK];
    for (int64_t start = 0; start < tokens; start += BLOCK) {
        const int64_t slab = slabs[start / BLOCK];
        const Stored* keys = (const Stored*)c.keys + slab * dim * BLOCK;
        floats score[H][V] = {};
        for (int64_t d = 0; d < dim; d++)
            for (int v = 0; v < V; v++) {
                const floats key = widen(keys + d * BLOCK + v * LANES);
                for (int h = 0; h < H; h++) score[h][v] += key * q[h * dim + d];
            }
        for (int i = 0; i < H * V; i++) {
            const int64_t at = i % V * LANES;
            if (c.key_scales) score[i / V][i % V] *= load<floats>(c.key_scales + slab * BLOCK + at);
            store(p[i / V] + start + at, score[i / V][i % V]);
        }
    }
    for (int h = 0; h < H; h++) {
        float largest = *std::max_element(p[h], p[h] + tokens), sum = 0;
        for (int64_t t = 0; t < tokens; t += LANES) store(p[h] + t, exponential(load<floats>(p[h] + t) - largest));
        for (int64_t t = 0; t < tokens; t++) {
            sum += p[h][t];
            if (c.value_scales) p[h][t] *= c.value_scales[slabs[t / BLOCK] * BLOCK + t % BLOCK];
        }
        state[h * stride] = largest, state[h * stride + 1] = sum;
    }
    for (int64_t d = 0; d < dim; d += BLOCK) {
        floats mixture[H][V] = {};
        for (int64_t t = 0; t < tokens; t++)
            for (int v = 0; v < V; v++) {
                const int64_t at = (slabs[t / BLOCK] * BLOCK + t % BLOCK) * dim + d + v * LANES;
                const floats value = widen((const Stored*)c.values + at);
                for (int h = 0; h < H; h++) mixture[h][v] += value * p[h][t];
            }
        for (int h = 0; h < H; h++) memcpy(state + h * stride + 2 + d, mixture[h], sizeof mixture[h]);
    }
}

// Store the key or value v [dim] of one token; false if it holds NaN or what FP16 cannot hold.
static bool keep(const Cache& c, bool key, int64_t slab, int64_t token, int64_t dim, const float* v) {
    const uint32_t bits = largest_bits(v, dim);
    void* stored = key ? c.keys : c.values;
    float* scales = key ? c.key_scales : c.value_scales;
    const float scale = load<float>(&bits) / 127, inverse = scale > 1e-30f ? 1 / scale : 0;
    if (bits > 0x477fe000) return false;  // 65,504
    if (scales) scales[slab * BLOCK + token] = scale;
    for (int64_t d = 0; d < dim; d++) {
        const int64_t at = slab * dim * BLOCK + (key ? d * BLOCK + token : token * dim + d);
        if (scales) ((int8_t*)stored)[at] = (int8_t)std::lrint(v[d] * inverse);
        else ((uint16_t*)stored)[at] = to_half(v[d]);
    }
    return true;
}

// ---- the pass -------------------------------------------------------------------------------------------------------

// Between two phases all threads meet. Waiting is spinning, which costs a tenth of a microsecond, but not for long: if
// another process has the core, the thread that is waited for can only run where this one yields.
struct Barrier {
    alignas(64) std::atomic<int> arrived{0}, phase{0};
    void meet(int threads) {
        const int now = phase.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            arrived.store(0, std::memory_order_relaxed);
            phase.store(now + 1, std::memory_order_release);
        }
        for (int spins = 0; phase.load(std::memory_order_acquire) == now; spins++)
            if (spins > 2000) sched_yield();
    }
};

struct Scratch {
    float *x, *normed, *qkv, *mixed, *ffn, *states;
    Inputs in;
    int64_t used = 0;  // floats

    Scratch(const Model& m, float* base) {  // base null: only to count
        const Layer& l = m.layer[0];
        auto take = [&](int64_t n) { return used += MAX_ROWS * n, base ? base + used - MAX_ROWS * n : base; };
        const int64_t widest = std::max({l.down.columns, l.output.columns, 2 * m.hidden});
        x = take(m.hidden), normed = take(2 * m.hidden), qkv = take(l.qkv.rows);
        mixed = take(l.output.columns), ffn = take(l.down.columns);
        states = take(m.heads * ((m.positions + CHUNK - 1) / CHUNK) * (m.head_dim + 2));
        in.low = (int8_t*)take(widest / 4), in.high = (int8_t*)take(widest / 4);
        in.scale = take(widest / GROUP), in.sum = take(widest / GROUP);
    }
};

static void run(const Model& m, const Cache& c, const Pass& p, Scratch s, int me, int threads, Barrier& barrier,
                std::atomic<bool>& finite) {
    const int64_t n = p.rows, hidden = m.hidden, dim = m.head_dim, turned = m.heads + m.kv_heads;
    const int64_t all = turned + m.kv_heads, group = m.heads / m.kv_heads, stride = dim + 2;
    const int64_t chunks = *std::max_element(p.positions, p.positions + n) / CHUNK + 1;  // of the longest text
    floats y[MAX_ROWS], z[MAX_ROWS];

    // A phase: this thread's part of `count` pieces of work, then everybody waits for everybody.
    auto phase = [&](int64_t count, auto work) {
        for (int64_t i = count * me / threads; i < count * (me + 1) / threads; i++) work(i);
        barrier.meet(threads);
    };
    auto integers = [&](const float* x, int64_t columns, int64_t rows, const int64_t* which) {  // which: null for all
        s.in.columns = columns;
        phase(rows * columns / GROUP, [&](int64_t i) {
            const int64_t row = i * GROUP / columns, at = (which ? which[row] : row) * columns + i * GROUP % columns;
            if (!quantise(x + at, s.in, i, p.two_digits)) finite = false;
        });
    };
    auto product = [&](const Matrix& w, int64_t rows, auto use) {
        phase(w.rows / LANES, [&](int64_t tile) {
            multiply(w, tile, s.in, rows, p.two_digits, y);
            for (int64_t r = 0; r < rows; r++) use(r, tile * LANES, y[r]);
        });
    };
    auto add_to_x = [&](int64_t r, int64_t at, floats sum) {
        store(s.x + r * hidden + at, load<floats>(s.x + r * hidden + at) + sum);
    };
    auto norm = [&](const float* weight, float* out) {
        phase(n, [&](int64_t r) { normalise(s.x + r * hidden, weight, m.eps, hidden, out + r * hidden); });
    };

    phase(n, [&](int64_t r) {
        const float* embedding = m.embedding + p.tokens[r] * hidden;
        float *x = s.x + r * hidden, *pair = s.normed + r * 2 * hidden;
        if (m.join.codes) normalise(embedding, m.token_norm, m.eps, hidden, pair);
        if (m.join.codes) normalise(p.given + r * hidden, m.feature_norm, m.eps, hidden, pair + hidden);
        for (int64_t i = 0; i < hidden; i++) x[i] = m.join.codes ? 0 : embedding[i];
    });
    if (m.join.codes) {
        integers(s.normed, 2 * hidden, n, nullptr);
        product(m.join, n, add_to_x);
    }
    for (int64_t l = 0; l < m.layers; l++) {
        const Layer& layer = m.layer[l];
        auto slab = [&](int64_t row, int64_t block, int64_t kv) {
            return (l * c.blocks + p.tables[row * p.table_width + block]) * m.kv_heads + kv;
        };
        norm(layer.attention_norm, s.normed);
        integers(s.normed, hidden, n, nullptr);
        product(layer.qkv, n, [&](int64_t r, int64_t at, floats sum) { store(s.qkv + r * all * dim + at, sum); });
        phase(n * all, [&](int64_t i) {  // queries and keys are rotated (RoPE, arXiv 2104.09864), keys, values stored
            float* v = s.qkv + i * dim;
            const int64_t r = i / all, head = i % all, position = p.positions[r];
            const float *cosine = m.cosines + position * dim, *sine = m.sines + position * dim;
            for (int64_t d = 0; d < dim / 2 && head < turned; d++) {
                const float a = v[d], b = v[d + dim / 2];
                v[d] = a * cosine[d] + b * sine[d];  // this half of the sines carries the minus
                v[d + dim / 2] = b * cosine[d + dim / 2] + a * sine[d + dim / 2];
            }
            for (int64_t d = 0; d < dim && head < m.heads; d++) v[d] *= 1.0f / std::sqrt((float)dim);
            const int64_t to = slab(r, position / BLOCK, (head + m.kv_heads - m.heads) % m.kv_heads);
            if (head >= m.heads && !keep(c, head < turned, to, position % BLOCK, dim, v)) finite = false;
        });
        phase(n * m.kv_heads * chunks, [&](int64_t i) {
            const int64_t r = i / m.kv_heads / chunks, kv = i / chunks % m.kv_heads, first = i % chunks * CHUNK;
            const int64_t tokens = std::min(p.positions[r] + 1 - first, CHUNK);
            int64_t slabs[CHUNK / BLOCK];
            for (int64_t t = 0; t < tokens; t += BLOCK) slabs[t / BLOCK] = slab(r, (first + t) / BLOCK, kv);
            for (int64_t h = kv * group; h < (kv + 1) * group && tokens > 0; h += 4) {
                constexpr decltype(&attend<int8_t, 1>) SOME[2][4] = {
                    {attend<uint16_t, 1>, attend<uint16_t, 2>, attend<uint16_t, 3>, attend<uint16_t, 4>},
                    {attend<int8_t, 1>, attend<int8_t, 2>, attend<int8_t, 3>, attend<int8_t, 4>}};
                SOME[c.key_scales != nullptr][std::min<int64_t>((kv + 1) * group - h, 4) - 1](
                    c, slabs, tokens, dim, s.qkv + (r * all + h) * dim,
                    s.states + ((r * m.heads + h) * chunks + i % chunks) * stride, chunks * stride);
            }
        });
        phase(n * m.heads, [&](int64_t i) {  // the chunks of a text come together, weighed by their largest scores
            const float* state = s.states + i * chunks * stride;
            const int64_t r = i / m.heads, count = p.positions[r] / CHUNK + 1;
            float *out = s.mixed + r * layer.output.columns + i % m.heads * dim, largest = state[0], sum = 0;
            for (int64_t k = 1; k < count; k++) largest = std::max(largest, state[k * stride]);
            for (int64_t k = 0; k < count; k++, state += stride) {
                const float factor = exponential(floats{} + (state[0] - largest))[0];
                sum += state[1] * factor;
                for (int64_t d = 0; d < dim; d++) out[d] = (k ? out[d] : 0) + state[2 + d] * factor;
            }
            for (int64_t d = 0; d < dim; d++) out[d] /= sum;
        });
        integers(s.mixed, layer.output.columns, n, nullptr);
        product(layer.output, n, add_to_x);
        norm(layer.ffn_norm, s.normed);
        integers(s.normed, hidden, n, nullptr);
        phase(layer.gate_up.rows / (2 * LANES), [&](int64_t pair) {  // SwiGLU (arXiv 2002.05202)
            multiply(layer.gate_up, 2 * pair, s.in, n, p.two_digits, y);
            multiply(layer.gate_up, 2 * pair + 1, s.in, n, p.two_digits, z);
            for (int64_t r = 0; r < n; r++)
                store(s.ffn + r * layer.down.columns + pair * LANES, y[r] / (1.0f + exponential(-y[r])) * z[r]);
        });
        integers(s.ffn, layer.down.columns, n, nullptr);
        product(layer.down, n, add_to_x);
    }
    norm(m.norm, p.features);
    integers(p.features, hidden, p.wanted_rows, p.wanted);
    product(m.head, p.wanted_rows, [&](int64_t r, int64_t at, floats sum) {
        memcpy(p.logits + r * m.outputs + at, &sum, 4 * std::min<int64_t>(m.outputs - at, LANES));
    });
}

// The first row that cannot be computed, as 8 * row + Error; NONE if all can.
static int64_t check(const Model& m, const Cache& c, const Pass& p) {
    for (int64_t r = 0; r < p.rows; r++) {
        const int64_t position = p.positions[r], *table = p.tables + r * p.table_width;
        if (p.tokens[r] < 0 || p.tokens[r] >= m.vocab) return 8 * r + TOKEN;
        if (position < 0 || position >= m.positions || position >= p.table_width * BLOCK) return 8 * r + POSITION;
        for (int64_t i = 0; i <= position / BLOCK; i++)
            if (table[i] < 0 || table[i] >= c.blocks) return 8 * r + TABLE;
        for (int64_t other = 0, at; other < r; other++)
            if ((at = p.positions[other]) % BLOCK == position % BLOCK &&
                p.tables[other * p.table_width + at / BLOCK] == table[position / BLOCK]) return 8 * r + TWICE;
    }
    return NONE;
}

extern "C" int64_t kernel_lanes() { return LANES; }
extern "C" int64_t kernel_scratch(const Model* model) { return Scratch(*model, nullptr).used; }  // floats
extern "C" int64_t kernel_pass(const Model* model, const Cache* cache, const Pass* pass) {
    if (const int64_t error = check(*model, *cache, *pass)) return error;
    Barrier barrier;
    std::atomic<bool> finite{true};
#pragma omp parallel num_threads(pass->threads)
    run(*model, *cache, *pass, {*model, pass->scratch}, omp_get_thread_num(), omp_get_num_threads(), barrier, finite);
    return finite ? NONE : NOT_FINITE;
}
