/* Rows of x as products take them: FP32, and for four-bit weights as 16-bit integers. */
#ifndef TONGGUAN_CPU_ROWS_H
#define TONGGUAN_CPU_ROWS_H

#include <stddef.h>
#include <stdint.h>

#define BLOCK 32
/* Rows that are taken together. */
#define M_MAX 32

/* m rows of k floats. Each block of 32 neighbours is `scale` times the integers in `q`; `sums` are
 * the blocks' own. Both have `blocks` entries a row, in eights, zeros behind the last block. */
struct rows {
    long m, k, blocks;
    const float *x;
    int16_t *q;
    float *scale, *sums;
};

/* Bytes that `rows_quantise` needs for M_MAX rows of k floats. */
size_t rows_room(long k);

/* Round m rows to integers. A float is off by at most 2^-16 of the greatest of its block. */
void rows_quantise(struct rows *rows, const float *x, long m, long k, void *room);

/* out = each row over its root mean square, times weight; k in eights. */
void rows_norm(const float *x, const float *weight, float *out, long m, long k, float eps);

#endif
