// One to four rows of x times four-bit weights, by plain multiply-adds in FP32: any K, no tensor
// core. A block owns 8 rows of weights (or 8 pairs of gate and up); its warps share k. Four lanes
// take a row, each 16 bytes of codes at a time, so a warp reads 64 bytes of each of 8 rows.
//
// Every sum has a fixed order: the same input gives the same bits, whatever runs beside it.
#include "int4.h"

#define GEMV_THREADS 256
#define GEMV_ROWS 8
#define GEMV_WARPS (GEMV_THREADS / 32)
#define GEMV_STEP (GEMV_WARPS * 128)  // k that a block takes at once

DEVICE float silu(float a) { return a / (1.0f + fast_exp(-a)); }

// acc[m] += the 32 weights of `codes` at k0 times x; x is in shared memory, zeros beyond k.
template <int M>
DEVICE void gemv_step(u32x4 codes, const Int4Scale &scale, const u8 *x, int k0, int x_halves,
                      float acc[M]) {
    u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 w[4];
        int4_unpack(words[i], scale, w);
#pragma unroll
        for (int m = 0; m < M; m++) {
            u32x4 a = *(const u32x4 *)(x + 2 * (m * x_halves + k0 + 8 * i));
            acc[m] += h2_low(w[0]) * h2_low(a.x) + h2_high(w[0]) * h2_high(a.x);
            acc[m] += h2_low(w[1]) * h2_low(a.y) + h2_high(w[1]) * h2_high(a.y);
            acc[m] += h2_low(w[2]) * h2_low(a.z) + h2_high(w[2]) * h2_high(a.z);
            acc[m] += h2_low(w[3]) * h2_low(a.w) + h2_high(w[3]) * h2_high(a.w);
        }
    }
}

// x into shared memory in rows of `x_halves`, zeros from k on: what lies in a row's padding must
// count for nothing, and what shared memory holds may be no number at all.
template <int M> DEVICE void gemv_fetch(const u16 *x, u8 *to, int k, int x_halves) {
    for (int m = 0; m < M; m++)
        for (int at = threadIdx.x; at < x_halves; at += GEMV_THREADS)
            ((u16 *)to)[m * x_halves + at] = at < k ? x[(u64)m * k + at] : (u16)0;
    __syncthreads();
}

// PARTS 1: out[m][row] = x . w[row]. PARTS 2: rows are gates, and the ups follow all of them:
// out[m][row] = silu(x . w[row]) * (x . w[outputs + row]).
template <int M, int PARTS>
DEVICE void gemv(const u32 *codes, const u32 *meta, const u16 *x, u16 *out, int outputs, int k,
                 int row_words, int group_log2, int minima) {
    SHARED(shared);
    int x_halves = row_words * 8;
    gemv_fetch<M>(x, shared, k, x_halves);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int row = blockIdx.x * GEMV_ROWS + lane / 4;
    int rows = outputs * PARTS;
    bool there = row < outputs;
    float acc[PARTS][M] = {};
#pragma unroll 2
    for (int k0 = warp * 128 + lane % 4 * 32; k0 < x_halves; k0 += GEMV_STEP) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            u64 at = there ? row + part * outputs : 0;
            u32x4 words = load_stream((const u32x4 *)(codes + at * row_words + k0 / 8));
            // The padding of a row may reach into a group that is not there.
            int group = (k0 < k ? k0 : k - 1) >> group_log2;
            Int4Scale scale = int4_scale(meta[(u64)group * rows + at], minima);
            gemv_step<M>(words, scale, shared, k0, x_halves, acc[part]);
        }
    }
    // Four lanes of a row, then the warps, through what comes after x in shared memory.
    float *sums = (float *)(shared + 2 * M * x_halves);
#pragma unroll
    for (int i = 0; i < PARTS * M; i++) {
        float sum = acc[i / M][i % M];
        sum += lane_xor(sum, 1);
        sum += lane_xor(sum, 2);
        if (lane % 4 == 0)
            sums[(i * GEMV_WARPS + warp) * GEMV_ROWS + lane / 4] = sum;
    }
    __syncthreads();
    int m = threadIdx.x / GEMV_ROWS, mine = blockIdx.x * GEMV_ROWS + threadIdx.x % GEMV_ROWS;
    if (m >= M || mine >= outputs)
        return;
    float total[PARTS] = {};
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        for (int i = 0; i < GEMV_WARPS; i++)
            total[part] += sums[((part * M + m) * GEMV_WARPS + i) * GEMV_ROWS
                                + threadIdx.x % GEMV_ROWS];
    float result = PARTS == 1 ? total[0] : silu(total[0]) * total[PARTS - 1];
    out[(u64)m * outputs + mine] = f_to_h(result);
}

#define GEMV(name, m, parts)                                                                       \
    KERNEL BOUNDS(GEMV_THREADS, 2)                                                                 \
        name(const u32 *codes, const u32 *meta, const u16 *x, u16 *out, int outputs, int k,        \
             int row_words, int group_log2, int minima) {                                          \
        gemv<m, parts>(codes, meta, x, out, outputs, k, row_words, group_log2, minima);            \
    }                                                                                              \
    EXPORT(name)

GEMV(gemv_1, 1, 1)
GEMV(gemv_2, 2, 1)
GEMV(gemv_3, 3, 1)
GEMV(gemv_4, 4, 1)
GEMV(gemv_gate_up_1, 1, 2)
GEMV(gemv_gate_up_2, 2, 2)
GEMV(gemv_gate_up_3, 3, 2)
GEMV(gemv_gate_up_4, 4, 2)
