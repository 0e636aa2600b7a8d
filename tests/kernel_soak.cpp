// Random models, rows and thread counts through the kernel, for the sanitizers: memory read or written beyond its end,
// undefined behaviour, or two threads on one number ends this program with a report. Each pass is done again by one
// thread and must give the same bits. Numbers that the kernel must refuse are among them. The threads are the standard
// library's: the thread sanitizer cannot see how OpenMP's begin and end, and would report each beginning as a race.
#include "kernel.cpp"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

static std::mt19937 dice(20240607);
static int64_t draw(int64_t low, int64_t high) { return low + (int64_t)(dice() % (uint64_t)(high - low + 1)); }

// Exactly as long as the kernel may read, so that one element more is found.
template <class T>
struct Field {
    std::unique_ptr<T[]> data;
    explicit Field(int64_t size) : data(new T[(size_t)size]()) {}
};

static int64_t computed = 0;  // passes that were not refused
static std::vector<Field<uint8_t>> code_fields;
static std::vector<Field<uint16_t>> scale_fields;
static std::vector<Field<float>> float_fields;

static const float* floats_of(int64_t size, float from, float to) {
    float_fields.emplace_back(size);
    float* data = float_fields.back().data.get();
    for (int64_t i = 0; i < size; i++) data[i] = from + (to - from) * (float)(dice() % 1024) / 1023.0f;
    return data;
}

static int64_t up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

static Matrix matrix(int64_t rows, int64_t columns, int64_t bits, bool bias) {
    rows = up(rows, LANES), columns = up(columns, GROUP);
    code_fields.emplace_back(rows * columns * bits / 8);
    for (int64_t i = 0; i < rows * columns * bits / 8; i++) code_fields.back().data[i] = (uint8_t)dice();
    const int64_t scales = rows * columns / GROUP * (bits == 4 ? 2 : 1);
    scale_fields.emplace_back(scales);
    for (int64_t i = 0; i < scales; i++)  // 2^-9 to 2^-7, either sign; subnormal ones, too
        scale_fields.back().data[i] =
            (uint16_t)(draw(0, 9) ? 0x1800 + dice() % 0x800 + dice() % 2 * 0x8000 : dice() % 0x400);
    return {code_fields.back().data.get(), scale_fields.back().data.get(),
            bias ? floats_of(rows, -1, 1) : nullptr, rows, columns, bits};
}

static int64_t pass_by_threads(const Model& m, const Cache& c, const Pass& p) {
    if (const int64_t error = check(m, c, p)) return error;
    Barrier barrier;
    std::atomic<bool> finite{true};
    std::vector<std::thread> team;
    for (int me = 0; me < p.threads; me++)
        team.emplace_back([&, me] { run(m, c, p, {m, p.scratch}, me, (int)p.threads, barrier, finite); });
    for (std::thread& thread : team) thread.join();
    return finite ? NONE : NOT_FINITE;
}

static void round_of(int64_t number) {
    Model m{};
    m.layers = draw(1, 3), m.hidden = 32 * draw(1, 5), m.kv_heads = draw(1, 3), m.heads = m.kv_heads * draw(1, 7);
    m.head_dim = 16 * draw(1, 5), m.vocab = draw(2, 70), m.outputs = draw(1, 90), m.positions = draw(1, 200);
    m.eps = 1e-5;
    const int64_t inner = 32 * draw(1, 4), width = (m.heads + 2 * m.kv_heads) * m.head_dim;
    const bool bias = draw(0, 1), joined = draw(0, 2) == 0, codes = draw(0, 1), broken = draw(0, 19) == 0;
    m.embedding = floats_of(m.vocab * m.hidden, -1, broken ? INFINITY : 1);
    m.cosines = floats_of(m.positions * m.head_dim, -1, 1), m.sines = floats_of(m.positions * m.head_dim, -1, 1);
    m.norm = floats_of(m.hidden, 0, 2);
    m.token_norm = floats_of(m.hidden, 0, 2), m.feature_norm = floats_of(m.hidden, 0, 2);
    std::vector<Layer> layers;
    for (int64_t l = 0; l < m.layers; l++)
        layers.push_back({floats_of(m.hidden, 0, 2), floats_of(m.hidden, 0, 2), matrix(width, m.hidden, 4, bias),
                          matrix(m.hidden, m.heads * m.head_dim, draw(1, 2) * 4, bias),
                          matrix(2 * inner, m.hidden, 4, bias), matrix(m.hidden, inner, draw(1, 2) * 4, bias)});
    m.layer = layers.data(), m.head = matrix(m.outputs, m.hidden, 8, bias);
    if (joined) m.join = matrix(m.hidden, 2 * m.hidden, 8, false);

    const int64_t requests = draw(1, 4), per = up(m.positions, BLOCK) / BLOCK, blocks = requests * per;
    const int64_t cells = m.layers * blocks * m.kv_heads * BLOCK;
    Field<uint16_t> keys(cells * m.head_dim / (codes ? 2 : 1)), values(cells * m.head_dim / (codes ? 2 : 1));
    Field<float> key_scales(cells), value_scales(cells), scratch(Scratch(m, nullptr).used);
    const Cache c{keys.data.get(), values.data.get(), codes ? key_scales.data.get() : nullptr,
                  codes ? value_scales.data.get() : nullptr, blocks};
    std::vector<int64_t> order(blocks), filled(requests, 0);
    for (int64_t i = 0; i < blocks; i++) order[i] = i;
    std::shuffle(order.begin(), order.end(), dice);

    for (int pass = 0; pass < 4; pass++) {
        std::vector<int64_t> tokens, positions, tables, wanted;
        for (int64_t r = 0; r < requests; r++)
            for (int64_t left = draw(0, 16); left > 0 && filled[r] < m.positions; left--) {
                tokens.push_back(draw(0, m.vocab - 1)), positions.push_back(filled[r]++);
                tables.insert(tables.end(), order.begin() + r * per, order.begin() + (r + 1) * per);
                if (draw(0, 1)) wanted.push_back((int64_t)tokens.size() - 1);
            }
        const int64_t n = (int64_t)tokens.size(), asked = (int64_t)wanted.size();
        if (n == 0) continue;
        if (draw(0, 9) == 0) tokens[draw(0, n - 1)] = draw(0, 1) ? -1 : m.vocab;
        if (draw(0, 9) == 0) tables[draw(0, n * per - 1)] = draw(0, 1) ? -1 : blocks;
        Field<float> features(n * m.hidden), logits(asked * m.outputs), again(asked * m.outputs);
        Pass p{n, asked, per, draw(1, 5), draw(0, 1), tokens.data(), positions.data(), tables.data(), wanted.data(),
               joined ? floats_of(n * m.hidden, -1, 1) : nullptr, features.data.get(), logits.data.get(),
               scratch.data.get()};
        const int64_t error = pass_by_threads(m, c, p);
        p.threads = 1, p.logits = again.data.get();
        const bool same = kernel_pass(&m, &c, &p) == error &&
                          (error || !memcmp(logits.data.get(), again.data.get(), 4 * asked * m.outputs));
        if (!same) {
            printf("round %ld: threads change the result\n", (long)number);
            exit(1);
        }
        computed += !error;
        if (error) return;  // what a refused pass leaves in the cache is not read again
    }
}

int main(int, char** arguments) {
    const int64_t rounds = atoi(arguments[1]);
    for (int64_t i = 0; i < rounds; i++) {
        round_of(i);
        code_fields.clear(), scale_fields.clear(), float_fields.clear();
    }
    printf("%ld rounds on %d lanes, %ld passes\n", (long)rounds, LANES, (long)computed);
    return computed < rounds;  // else nearly everything was refused, and nothing was tried
}
