/* The S-box as a circuit on bit planes: no table, no branch, so no timing tells the input.
 *
 * A template: the including file defines `plane`, an unsigned integer or vector type; plane i holds
 * bit i of as many bytes as it has bits. Inversion in GF(16)[Y] / (Y^2 + Y + 8), with
 * GF(16) = GF(2)[X] / (X^4 + X + 1), stands between the two maps that derive.py has found.
 */
#include "sbox_constants.h"

typedef struct {
    plane b0, b1, b2, b3;
} nibble;

static inline __attribute__((always_inline)) nibble nibble_add(nibble x, nibble y)
{
    return (nibble){x.b0 ^ y.b0, x.b1 ^ y.b1, x.b2 ^ y.b2, x.b3 ^ y.b3};
}

/* Karatsuba on the halves; X^4 = X + 1. */
static inline __attribute__((always_inline)) nibble nibble_multiply(nibble x, nibble y)
{
    plane low0 = x.b0 & y.b0, low2 = x.b1 & y.b1;
    plane low1 = ((x.b0 ^ x.b1) & (y.b0 ^ y.b1)) ^ low0 ^ low2;
    plane high0 = x.b2 & y.b2, high2 = x.b3 & y.b3;
    plane high1 = ((x.b2 ^ x.b3) & (y.b2 ^ y.b3)) ^ high0 ^ high2;
    plane u0 = x.b0 ^ x.b2, u1 = x.b1 ^ x.b3, v0 = y.b0 ^ y.b2, v1 = y.b1 ^ y.b3;
    plane cross0 = u0 & v0, cross2 = u1 & v1;
    plane cross1 = ((u0 ^ u1) & (v0 ^ v1)) ^ cross0 ^ cross2;

    cross0 ^= low0 ^ high0; /* X^2 */
    cross1 ^= low1 ^ high1; /* X^3 */
    cross2 ^= low2 ^ high2; /* X^4 */
    plane c4 = cross2 ^ high0;
    return (nibble){low0 ^ c4, low1 ^ c4 ^ high1, low2 ^ cross0 ^ high1 ^ high2, cross1 ^ high2};
}

/* 8 x^2: squaring is linear, so one map does both. */
static inline __attribute__((always_inline)) nibble nibble_square_nu(nibble x)
{
    return (nibble){x.b2, x.b1 ^ x.b2 ^ x.b3, x.b1, x.b0 ^ x.b2 ^ x.b3};
}

static inline __attribute__((always_inline)) nibble nibble_square(nibble x)
{
    return (nibble){x.b0 ^ x.b2, x.b2, x.b1 ^ x.b3, x.b3};
}

/* 1 / x = x^14 = x^2 x^4 x^8; 0 stays 0. */
static inline __attribute__((always_inline)) nibble nibble_invert(nibble x)
{
    nibble x2 = nibble_square(x), x4 = nibble_square(x2), x8 = nibble_square(x4);
    return nibble_multiply(nibble_multiply(x2, x4), x8);
}

static inline __attribute__((always_inline)) void sbox_planes(plane p[8])
{
    plane x0 = p[0], x1 = p[1], x2 = p[2], x3 = p[3], x4 = p[4], x5 = p[5], x6 = p[6], x7 = p[7];
    plane y0, y1, y2, y3, y4, y5, y6, y7;
    {
        SM4_TOWER_IN
    }
    nibble low = {y0, y1, y2, y3}, high = {y4, y5, y6, y7};
    nibble both = nibble_add(low, high);
    /* N = 8 high^2 + high low + low^2, the norm; (high Y + low)^-1 = (high Y + high + low) / N. */
    nibble norm = nibble_add(nibble_square_nu(high), nibble_multiply(low, both));
    nibble inverse = nibble_invert(norm);
    high = nibble_multiply(high, inverse);
    low = nibble_multiply(both, inverse);
    x0 = low.b0, x1 = low.b1, x2 = low.b2, x3 = low.b3;
    x4 = high.b0, x5 = high.b1, x6 = high.b2, x7 = high.b3;
    {
        SM4_TOWER_OUT
    }
    p[0] = y0, p[1] = y1, p[2] = y2, p[3] = y3, p[4] = y4, p[5] = y5, p[6] = y6, p[7] = y7;
}
