// 1 to 64 rows of x times four-bit weights by tensor cores.
//
// The weights are the 16-row operand and x the 8-column one: a batch of 8 wastes nothing, and what
// a lane must hold of the weights is what a 16-byte piece of our layout holds. The sum over k may
// take k in any order as long as both operands do: lane 4g + t takes the word t of a row's four
// words, so of each 32 k the eight from 8t on, as two steps of mma.m16n8k16. No shuffle, no second
// layout.
//
// A block owns 64 rows of weights, 16 for each of its warps, and a share of k (grid.y). A pipeline
// of copies brings codes, scales and x of 128 k at a time. With several shares the last block to
// finish adds them up, in order: sums have one order, and counters are left as they were found, 0.
#include "int4.h"

#define GEMM_THREADS 128
#define GEMM_ROWS 64
#define GEMM_DEPTH 128
#define GEMM_STAGES 4
#define GEMM_X_BYTES 272     // a row of x in a stage: 256 and a step aside: no bank twice
#define GEMM_CODE_BYTES 80   // a row of codes in a stage: 64 and a step aside
#define GEMM_META_BYTES 1024 // scales of up to 4 groups of 64 rows

struct GemmArguments {
    const u32 *codes, *meta;
    const u16 *x;
    u16 *out;
    float *partial;
    u32 *counters;
    int outputs, k, row_words, group_log2, minima, m, paired;
};

// The row of the weights behind row `r` of the block's 64. Paired, the rows g and g + 8 of a warp's
// 16 are a gate and its up: one lane ends up with both sums.
DEVICE int gemm_row(const GemmArguments &a, int r) {
    if (!a.paired)
        return blockIdx.x * GEMM_ROWS + r;
    int output = blockIdx.x * (GEMM_ROWS / 2) + r / 16 * 8 + r % 8;
    return output < a.outputs ? output + (r & 8 ? a.outputs : 0) : 2 * a.outputs;
}

template <int TILES>
DEVICE void gemm_fetch(const GemmArguments &a, u8 *stage, int k0, int k_end, int rows) {
    u8 *x = stage + GEMM_ROWS * GEMM_CODE_BYTES, *meta = x + TILES * 8 * GEMM_X_BYTES;
#pragma unroll
    for (int i = threadIdx.x; i < GEMM_ROWS * 4; i += GEMM_THREADS) {
        int row = gemm_row(a, i / 4), at = k0 + i % 4 * 32;
        bool there = row < rows && at < k_end;
        copy_async(stage + i / 4 * GEMM_CODE_BYTES + i % 4 * 16,
                   a.codes + (there ? (u64)row * a.row_words + at / 8 : 0), there);
    }
#pragma unroll
    for (int i = threadIdx.x; i < TILES * 8 * 16; i += GEMM_THREADS) {
        int row = i / 16, at = k0 + i % 16 * 8;
        bool there = row < a.m && at < a.k && at < k_end;
        copy_async(x + row * GEMM_X_BYTES + i % 16 * 16, a.x + (there ? (u64)row * a.k + at : 0),
                   there);
    }
    // Scales one by one: rows of a block need not be neighbours, nor their number a multiple of 4.
    int groups = GEMM_DEPTH >> a.group_log2;
    for (int i = threadIdx.x; i < groups * GEMM_ROWS; i += GEMM_THREADS) {
        int row = gemm_row(a, i % GEMM_ROWS), at = k0 + (i / GEMM_ROWS << a.group_log2);
        bool there = row < rows && at < a.k && at < k_end;
        copy_async_4(meta + 4 * i,
                     a.meta + (there ? (u64)(at >> a.group_log2) * rows + row : 0), there);
    }
}

template <int TILES>
DEVICE void gemm_multiply(const GemmArguments &a, const u8 *stage, float acc[TILES][4]) {
    const u8 *x = stage + GEMM_ROWS * GEMM_CODE_BYTES;
    const u32 *meta = (const u32 *)(x + TILES * 8 * GEMM_X_BYTES);
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int part = 0; part < GEMM_DEPTH / 32; part++) {
        u32 weights[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = warp * 16 + g + half * 8;
            u32 scale = meta[(part * 32 >> a.group_log2) * GEMM_ROWS + row];
            u32 word = ((const u32 *)(stage + row * GEMM_CODE_BYTES))[part * 4 + t];
            int4_unpack(word, int4_scale(scale, a.minima), weights[half]);
        }
        u32 first[4] = {weights[0][0], weights[1][0], weights[0][1], weights[1][1]};
        u32 second[4] = {weights[0][2], weights[1][2], weights[0][3], weights[1][3]};
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            u32x4 b = *(const u32x4 *)(x + (tile * 8 + g) * GEMM_X_BYTES + part * 64 + t * 16);
            u32 low[2] = {b.x, b.y}, high[2] = {b.z, b.w};
            mma_16816(acc[tile], first, low);
            mma_16816(acc[tile], second, high);
        }
    }
}

DEVICE void gemm_store(const GemmArguments &a, int m, int r, float value, float up) {
    int output = a.paired ? blockIdx.x * (GEMM_ROWS / 2) + r / 16 * 8 + r % 8
                          : blockIdx.x * GEMM_ROWS + r;
    if (m >= a.m || output >= a.outputs)
        return;
    if (a.paired)
        value = value / (1.0f + fast_exp(-value)) * up;
    a.out[(u64)m * a.outputs + output] = f_to_h(value);
}

// The block's 64 x 8 TILES sums: into `partial`, and by the last block of all shares, added up.
// True for that block; then `acc` holds the whole sums.
template <int TILES>
DEVICE bool gemm_last(const GemmArguments &a, u8 *shared, float acc[TILES][4]) {
    int shares = gridDim.y, per_share = TILES * 4 * GEMM_THREADS;
    float *mine = a.partial + (u64)blockIdx.x * shares * per_share + threadIdx.x;
#pragma unroll
    for (int i = 0; i < TILES * 4; i++)
        mine[(u64)blockIdx.y * per_share + i * GEMM_THREADS] = acc[i / 4][i % 4];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        *(u32 *)shared = atomicAdd(a.counters + blockIdx.x, 1u) + 1 == gridDim.y;
    __syncthreads();
    if (!*(u32 *)shared)
        return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < TILES * 4; i++) {
        float sum = 0;
        for (int share = 0; share < shares; share++)
            sum += load_shared_by_blocks(mine + (u64)share * per_share + i * GEMM_THREADS);
        acc[i / 4][i % 4] = sum;
    }
    if (threadIdx.x == 0)
        a.counters[blockIdx.x] = 0;
    return true;
}

template <int TILES> DEVICE void gemm(const GemmArguments &a) {
    SHARED(shared);
    const int stage_bytes =
        GEMM_ROWS * GEMM_CODE_BYTES + TILES * 8 * GEMM_X_BYTES + GEMM_META_BYTES;
    int rows = a.outputs * (a.paired ? 2 : 1), padded = a.row_words * 8;
    int steps = (padded + GEMM_DEPTH - 1) / GEMM_DEPTH;
    int first = (int)((u64)steps * blockIdx.y / gridDim.y);
    int last = (int)((u64)steps * (blockIdx.y + 1) / gridDim.y);
    float acc[TILES][4] = {};
#pragma unroll
    for (int i = 0; i < GEMM_STAGES - 1; i++) {
        if (first + i < last)
            gemm_fetch<TILES>(a, shared + i * stage_bytes, (first + i) * GEMM_DEPTH, padded, rows);
        copy_commit();
    }
    for (int step = first; step < last; step++) {
        copy_wait<GEMM_STAGES - 2>();
        __syncthreads();  // this stage has come for all, and all are done with the one before
        int next = step + GEMM_STAGES - 1;
        if (next < last)
            gemm_fetch<TILES>(a, shared + (next - first) % GEMM_STAGES * stage_bytes,
                              next * GEMM_DEPTH, padded, rows);
        copy_commit();
        gemm_multiply<TILES>(a, shared + (step - first) % GEMM_STAGES * stage_bytes, acc);
    }
    copy_wait<0>();
    __syncthreads();
    if (gridDim.y > 1 && !gemm_last<TILES>(a, shared, acc))
        return;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < TILES * 2; i++) {
        int m = i / 2 * 8 + t * 2 + i % 2, r = warp * 16 + g;
        float low = acc[i / 2][i % 2], high = acc[i / 2][2 + i % 2];
        gemm_store(a, m, r, low, high);
        if (!a.paired)
            gemm_store(a, m, r + 8, high, 0.0f);
    }
}

#define GEMM(name, tiles)                                                                          \
    KERNEL BOUNDS(GEMM_THREADS, 2)                                                                 \
        name(const u32 *codes, const u32 *meta, const u16 *x, u16 *out, float *partial,            \
             u32 *counters, int outputs, int k, int row_words, int group_log2, int minima, int m,  \
             int paired) {                                                                         \
        gemm<tiles>(GemmArguments{codes, meta, x, out, partial, counters, outputs, k, row_words,   \
                                  group_log2, minima, m, paired});                                 \
    }                                                                                              \
    EXPORT(name)

GEMM(gemm_8, 1)
GEMM(gemm_16, 2)
GEMM(gemm_32, 4)
GEMM(gemm_64, 8)
