/* Attention of single tokens over a paged cache of FP16 keys and values, on one thread. */
#ifndef TONGGUAN_CPU_ATTENTION_H
#define TONGGUAN_CPU_ATTENTION_H

#include <stdint.h>

#define DIM_MAX 256

/* One layer: blocks [blocks, block_tokens, kv_heads, dim]; `query` rows hold all query heads, then
 * keys, then values. dim is a multiple of 16, at most DIM_MAX. */
struct attention {
    long heads, kv_heads, dim, block_tokens;
    uint16_t *keys, *values;
};

/* Turn a row's queries and keys by its position (pairs i, i + dim / 2; cosines and sines of dim / 2
 * angles) and keep its keys and values at `position` of the sequence whose blocks are in `table`.
 * `bias` [heads + 2 kv_heads, dim] is added before, unless NULL. */
void attention_keep(const struct attention *a, float *qkv, const float *bias, const float *cosines,
                    const float *sines, const int32_t *table, long position);

/* out [heads, dim]: the heads that share `kv_head`, over the positions up to `position`. */
void attention_attend(const struct attention *a, const float *qkv, const int32_t *table,
                      long position, long kv_head, float *out);

#endif
