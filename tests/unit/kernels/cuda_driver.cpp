// Runs every kernel once or more under sanitizers, each array in memory of exactly its size.
// With a kernel's name as the argument its output is 64 bytes too small: that must be reported.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "module.cu"

namespace {

template <class T> struct Array {
    T *at;
    explicit Array(size_t count, bool filled = true) {
        void *raw = nullptr;
        if (posix_memalign(&raw, 16, count * sizeof(T)))
            std::abort();
        at = (T *)raw;
        std::memset(raw, 0, count * sizeof(T));
        for (size_t i = 0; filled && i < count; i++)
            at[i] = (T)((u32)rand() * 2654435761u);
    }
    Array(const Array &) = delete;
    ~Array() { std::free(at); }
};

int failures;
const char *shortened = "";

// What is left out of an output, in halves.
size_t missing(const char *kernel) { return std::strcmp(shortened, kernel) ? 0 : 32; }

template <class... A> void run(const char *(*door)(const u32 *, u32, u32, int, void **), u32 x, u32 y,
                               u32 threads, u32 shared, A... values) {
    void *arguments[] = {(void *)&values...};
    u32 grid[3] = {x, y, 1};
    for (int falling = 0; falling < 2; falling++) {
        const char *problem = door(grid, threads, shared, falling, arguments);
        if (problem) {
            std::fprintf(stderr, "%s\n", problem);
            failures++;
        }
    }
}

void shape(int m, int rows, int k, int log2, int minima) {
    int words = (k + 31) / 32 * 4, groups = (k + (1 << log2) - 1) >> log2;
    Array<u32> codes((size_t)rows * words), meta((size_t)groups * rows);
    // Plain scales: this run looks at addresses, not at values.
    for (int i = 0; i < groups * rows; i++)
        meta.at[i] = 0x44003c00u;
    Array<u16> weights((size_t)rows * k - missing("dequant_int4"), false), x((size_t)m * k, false);
    for (int i = 0; i < m * k; i++)
        x.at[i] = (u16)(0x3800 + i % 512);
    Array<u16> out((size_t)m * rows, false);
    run(dequant_int4_launch, rows, 1, 64, 0, codes.at, meta.at, weights.at, rows, k, words, log2,
        minima);
    decltype(&gemv_1_launch) gemvs[] = {gemv_1_launch, gemv_2_launch, gemv_3_launch, gemv_4_launch};
    decltype(&gemv_1_launch) pairs[] = {gemv_gate_up_1_launch, gemv_gate_up_2_launch,
                                        gemv_gate_up_3_launch, gemv_gate_up_4_launch};
    if (m <= 4) {
        run(gemvs[m - 1], (rows + 7) / 8, 1, 256, m * words * 16 + m * 256, codes.at, meta.at, x.at,
            out.at, rows, k, words, log2, minima);
        if (rows % 2 == 0)
            run(pairs[m - 1], (rows / 2 + 7) / 8, 1, 256, m * words * 16 + m * 512, codes.at,
                meta.at, x.at, out.at, rows / 2, k, words, log2, minima);
    }
    if (k % 8)
        return;
    for (int paired = 0; paired < 1 + !(rows % 2); paired++)
        for (u32 shares = 1; shares < 3; shares++) {
            int tiles = m <= 8 ? 1 : m <= 16 ? 2 : m <= 32 ? 4 : 8;
            u32 blocks = (rows + 63) / 64, stage = 64 * 80 + tiles * 8 * 272 + 1024;
            Array<float> partial((size_t)blocks * shares * tiles * 512, false);
            Array<u32> counters(blocks, false);
            auto door = tiles == 1   ? gemm_8_launch
                        : tiles == 2 ? gemm_16_launch
                        : tiles == 4 ? gemm_32_launch
                                     : gemm_64_launch;
            run(door, blocks, shares, 128, 4 * stage, codes.at, meta.at, x.at, out.at, partial.at,
                counters.at, rows / (1 + paired), k, words, log2, minima, m, paired);
        }
}

// Halves around 1, some of them negative.
void plain(Array<u16> &array, size_t count) {
    for (size_t i = 0; i < count; i++)
        array.at[i] = (u16)((i % 3 ? 0x3800 : 0xb800) + i % 512);
}

void layer(int rows, int hidden) {
    size_t count = (size_t)rows * hidden;
    Array<u16> x(count, false), weight(hidden, false), out(count - missing("rms_norm"), false);
    plain(x, count);
    plain(weight, hidden);
    run(rms_norm_launch, rows, 1, 128, 16, x.at, weight.at, out.at, hidden, 1e-5f);
}

void turned(int rows, int heads, int dim) {
    size_t count = (size_t)rows * heads * dim;
    Array<u16> x(count - missing("rope"), false);
    Array<int> positions(rows, false);
    Array<float> inverse(dim / 2, false);
    plain(x, count - missing("rope"));
    for (int i = 0; i < rows; i++)
        positions.at[i] = 17 * i;
    for (int i = 0; i < dim / 2; i++)
        inverse.at[i] = 1.0f / (float)(1 + i);
    run(rope_launch, rows, 1, 128, 0, x.at, positions.at, inverse.at, heads, dim);
}

void attention(int sequences, int heads, int kv_heads, int dim, int tokens, int longest) {
    int width = (longest + tokens - 1) / tokens, blocks = width * sequences;
    size_t pool = (size_t)blocks * tokens * kv_heads * dim, rows = (size_t)sequences * heads * dim;
    Array<u16> query(rows, false), keys(pool, false), values(pool, false);
    Array<u16> out(rows - missing("paged_attention"), false);
    Array<int> table(blocks, false), lengths(sequences, false);
    plain(query, rows);
    plain(keys, pool);
    plain(values, pool);
    for (int i = 0; i < blocks; i++)
        table.at[i] = blocks - 1 - i;
    for (int i = 0; i < sequences; i++)
        lengths.at[i] = longest - i > 1 ? longest - i : 1;
    run(paged_attention_launch, heads, sequences, 128, 16 * (dim + 2), query.at, keys.at, values.at,
        table.at, lengths.at, out.at, heads, kv_heads, dim, tokens, width, 0.125f);
}

}  // namespace

int main(int count, char **words) {
    shortened = count > 1 ? words[1] : "";
    shape(1, 9, 576, 7, 0);
    shape(3, 66, 1000, 5, 1);
    shape(4, 7, 33, 6, 0);
    shape(17, 70, 264, 6, 1);
    shape(64, 8, 8, 5, 0);
    layer(1, 33);
    layer(3, 576);
    turned(2, 9, 64);
    turned(3, 5, 14);
    attention(3, 9, 3, 64, 16, 37);
    attention(2, 2, 2, 256, 4, 5);
    attention(1, 4, 1, 32, 8, 8);
    return failures ? 1 : 0;
}
