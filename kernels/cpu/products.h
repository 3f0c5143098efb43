/* Products of a few rows of FP32 with weights that are kept small: four bits, or FP16. */
#ifndef TONGGUAN_CPU_PRODUCTS_H
#define TONGGUAN_CPU_PRODUCTS_H

#include <stdint.h>

/* rows x k weights. Four bits: `codes` holds 16 bytes for each 32 neighbours of k, the first 16 in
 * the low nibbles (GGUF's order), and `meta` [rows, groups] an FP16 scale below an FP16 offset:
 * w = q * s + offset, or (q - offset) * s where `zeros` is set. FP16: `halves` [rows, k]. */
struct weights {
    const uint8_t *codes;
    const uint32_t *meta;
    const uint16_t *halves;
    long rows, k;
    int group_log2, zeros;
};

/* Whether this CPU can; nothing below may be called otherwise. */
int products_supported(void);

/* y [m, rows] = x [m, k] times the weights. 0, or -1 where there is no memory. */
int products_linear(const struct weights *w, const float *x, float *y, long m, int threads);

/* y [m, hidden] = down(silu(gate(x)) * up(x)); `wide` holds all gates, then all ups. `middle` is
 * room for m rows of as many floats as there are gates. As above. */
int products_ffn(const struct weights *wide, const struct weights *narrow, const float *x,
                  float *middle, float *y, long m, int threads);

/* out [rows, k] = the weights in FP32, for products of many rows. */
void products_unpack(const struct weights *w, float *out, int threads);

#endif
