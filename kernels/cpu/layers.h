/* A few tokens through all layers of a Llama-class model, in one call. */
#ifndef TONGGUAN_CPU_LAYERS_H
#define TONGGUAN_CPU_LAYERS_H

#include "products.h"

/* Norms [hidden]; qkv_bias [qkv's rows] or NULL. */
struct layer {
    const struct weights *qkv, *out, *gate_up, *down;
    const float *attn_norm, *ffn_norm, *qkv_bias;
};

struct stack {
    long count, hidden, heads, kv_heads, dim;
    float eps;
    struct layer *layers;
};

/* m tokens, at most 32: `x` [m, hidden] is what goes in and comes out. Token i is at positions[i]
 * of the sequence whose blocks begin at tables[offsets[i]]; cosines and sines [m, dim / 2].
 * `kv` [count, 2, blocks, block_tokens, kv_heads, dim], FP16. */
struct step {
    float *x;
    const float *cosines, *sines;
    const int64_t *positions, *offsets;
    const int32_t *tables;
    uint16_t *kv;
    long m, blocks, block_tokens;
};

/* Whether the layers' shapes belong together and can be computed here. */
int layers_fit(const struct stack *s);

/* Compute a step, whose indices the caller has checked. 0, or -1 where there is no memory. */
int layers_step(const struct stack *s, const struct step *step, int threads);

#endif
