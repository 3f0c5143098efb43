// What a decoder layer needs beside its products: norm, rotation, attention of one new token over a
// paged cache. FP16 in and out, FP32 between.
#include "device.h"

#define LAYER_WARPS 4
#define LAYER_THREADS (LAYER_WARPS * 32)

DEVICE float warp_sum(float value) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2)
        value += lane_xor(value, mask);
    return value;
}

// out[row] = x[row] / root mean square * weight. grid.x = rows.
KERNEL BOUNDS(LAYER_THREADS, 4) rms_norm(const u16 *x, const u16 *weight, u16 *out, int hidden,
                                         float eps) {
    SHARED(shared);
    float *sums = (float *)shared;
    const u16 *from = x + (u64)blockIdx.x * hidden;
    float sum = 0;
    for (int i = threadIdx.x; i < hidden; i += LAYER_THREADS) {
        float value = h_to_f(from[i]);
        sum += value * value;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0;
    for (int i = 0; i < LAYER_WARPS; i++)
        total += sums[i];
    float scale = inverse_sqrt(total / (float)hidden + eps);
    for (int i = threadIdx.x; i < hidden; i += LAYER_THREADS)
        out[(u64)blockIdx.x * hidden + i] = f_to_h(h_to_f(from[i]) * scale * h_to_f(weight[i]));
}

// x [rows, heads, dim] turned in place by its row's position, pairs (i, i + dim / 2). grid.x = rows
KERNEL BOUNDS(LAYER_THREADS, 4) rope(u16 *x, const int *positions, const float *inverse, int heads,
                                     int dim) {
    int half = dim / 2;
    float position = (float)positions[blockIdx.x];
    u16 *row = x + (u64)blockIdx.x * heads * dim;
    for (int i = threadIdx.x; i < heads * half; i += LAYER_THREADS) {
        u16 *low = row + i / half * dim + i % half, *high = low + half;
        float sine, cosine;
        exact_sincos(position * inverse[i % half], &sine, &cosine);
        float a = h_to_f(*low), b = h_to_f(*high);
        *low = f_to_h(a * cosine - b * sine);
        *high = f_to_h(b * cosine + a * sine);
    }
}

// Attention of one new token of each sequence. A block is one query head of one sequence (grid.x
// heads, grid.y sequences); its warps take tokens in turn, each with a softmax of its own that is
// corrected as it goes, and these are joined at the end. dim is a multiple of 32, at most 256.
// keys, values [blocks, block_tokens, kv_heads, dim]; table [sequences, table_width].
KERNEL BOUNDS(LAYER_THREADS, 4)
    paged_attention(const u16 *query, const u16 *keys, const u16 *values, const int *table,
                    const int *lengths, u16 *out, int heads, int kv_heads, int dim,
                    int block_tokens, int table_width, float scale) {
    SHARED(shared);
    float *joined = (float *)shared;  // for each warp: greatest score, sum, dim values
    int head = blockIdx.x, sequence = blockIdx.y, kv = head / (heads / kv_heads);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, each = dim / 32;
    const u16 *q = query + ((u64)sequence * heads + head) * dim;
    const int *blocks = table + (u64)sequence * table_width;
    float mine[8], acc[8], best = -1e30f, sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        mine[i] = i < each ? h_to_f(q[i * 32 + lane]) * scale : 0.0f;
        acc[i] = 0;
    }
    for (int token = warp; token < lengths[sequence]; token += LAYER_WARPS) {
        u64 slot = (u64)blocks[token / block_tokens] * block_tokens + token % block_tokens;
        u64 at = (slot * kv_heads + kv) * dim + lane;
        float score = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < each)
                score += mine[i] * h_to_f(keys[at + i * 32]);
        score = warp_sum(score);
        float most = score > best ? score : best;
        float old = fast_exp(best - most), now = fast_exp(score - most);
        best = most;
        sum = sum * old + now;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < each)
                acc[i] = acc[i] * old + now * h_to_f(values[at + i * 32]);
    }
    float *place = joined + warp * (dim + 2);
    if (lane == 0) {
        place[0] = best;
        place[1] = sum;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < each)
            place[2 + i * 32 + lane] = acc[i];
    __syncthreads();
    float most = -1e30f, total = 0;
    for (int i = 0; i < LAYER_WARPS; i++)
        most = joined[i * (dim + 2)] > most ? joined[i * (dim + 2)] : most;
    for (int i = 0; i < LAYER_WARPS; i++)
        total += joined[i * (dim + 2) + 1] * fast_exp(joined[i * (dim + 2)] - most);
    for (int d = threadIdx.x; d < dim; d += LAYER_THREADS) {
        float value = 0;
        for (int i = 0; i < LAYER_WARPS; i++)
            value += joined[i * (dim + 2) + 2 + d] * fast_exp(joined[i * (dim + 2)] - most);
        out[((u64)sequence * heads + head) * dim + d] = f_to_h(value / total);
    }
}

EXPORT(rms_norm)
EXPORT(rope)
EXPORT(paged_attention)
