/* SM4's rounds, the state cut into bytes: register 4 w + j holds byte j of word w of each block.
 *
 * So a rotation by 8 costs nothing (another register), and what is left of a round is two affine
 * inversions a byte and exclusive ors. With d = D(t), a = A(t) of sbox_constants.h, output byte j
 * gains d[j] + a[j+3] + s where s is the sum of these terms over all j (derive.py). Two rounds
 * share x2 ^ x3. About 24 operations for 64 blocks (512-bit) or 32 (256-bit) a round.
 *
 * A template: the including file defines BS_TARGET, BS_VECTOR, BS_OP(name) for the intrinsics,
 * BS_XOR(a, b), and BS_NAME(name) for the functions made here.
 */

#define BS_INLINE static inline __attribute__((always_inline, target(BS_TARGET)))
#define BS_XOR3(a, b, c) BS_OP(ternarylogic_epi32)(a, b, c, 0x96)
#define BS_A(t) BS_OP(gf2p8affineinv_epi64_epi8)(t, a, 0)
#define BS_D(t) BS_OP(gf2p8affineinv_epi64_epi8)(t, d, SM4_CONSTANT_FOLD)
#define BS_KEY(j) BS_OP(set1_epi32)((int)keys[j])

/* w ^= F(m ^ n ^ keys), m the sum of the other two words. */
BS_INLINE void BS_NAME(round)(BS_VECTOR *w, const BS_VECTOR *m, const BS_VECTOR *n,
                              const uint32_t *keys, BS_VECTOR a, BS_VECTOR d)
{
    BS_VECTOR t0 = BS_XOR3(m[0], n[0], BS_KEY(0)), t1 = BS_XOR3(m[1], n[1], BS_KEY(1));
    BS_VECTOR t2 = BS_XOR3(m[2], n[2], BS_KEY(2)), t3 = BS_XOR3(m[3], n[3], BS_KEY(3));
    BS_VECTOR z0 = BS_XOR(BS_D(t0), BS_A(t3)), z1 = BS_XOR(BS_D(t1), BS_A(t0));
    BS_VECTOR z2 = BS_XOR(BS_D(t2), BS_A(t1)), z3 = BS_XOR(BS_D(t3), BS_A(t2));
    BS_VECTOR s = BS_XOR3(BS_XOR(z0, z1), z2, z3);
    w[0] = BS_XOR3(w[0], z0, s);
    w[1] = BS_XOR3(w[1], z1, s);
    w[2] = BS_XOR3(w[2], z2, s);
    w[3] = BS_XOR3(w[3], z3, s);
}

/* Two rounds: words a and b change. */
BS_INLINE void BS_NAME(rounds)(BS_VECTOR *x, int first, const uint32_t *keys, BS_VECTOR a,
                               BS_VECTOR d)
{
    BS_VECTOR *w0 = x + 4 * first, *w1 = x + 4 * ((first + 1) & 3);
    BS_VECTOR *w2 = x + 4 * ((first + 2) & 3), *w3 = x + 4 * ((first + 3) & 3);
    BS_VECTOR m[4] = {BS_XOR(w2[0], w3[0]), BS_XOR(w2[1], w3[1]), BS_XOR(w2[2], w3[2]),
                      BS_XOR(w2[3], w3[3])};
    BS_NAME(round)(w0, m, w1, keys, a, d);
    BS_NAME(round)(w1, m, w0, keys + 4, a, d);
}

/* Words under P, from the nonce (its bytes already so) and a counter; `offsets` tells each byte's
 * lane how far behind `counter` it is. Lanes in `ones` have the counter 1. */
BS_INLINE void BS_NAME(start)(BS_VECTOR *x, const uint8_t nonce[SM4_NONCE], uint32_t counter,
                              BS_VECTOR offsets, BS_MASK ones)
{
    BS_VECTOR p = BS_OP(set1_epi64)(SM4_AFFINE_IN), one = BS_OP(set1_epi8)(1);
    BS_VECTOR low = BS_OP(add_epi8)(BS_OP(set1_epi8)((char)counter), offsets);
    BS_VECTOR b2 = BS_OP(set1_epi8)((char)(counter >> 8));
    BS_VECTOR b1 = BS_OP(set1_epi8)((char)(counter >> 16));
    BS_VECTOR b0 = BS_OP(set1_epi8)((char)(counter >> 24));
    /* A lane carries where its sum came round to less than it began with. */
    BS_MASK carry = BS_OP(cmplt_epu8_mask)(low, offsets);
    b2 = BS_OP(mask_add_epi8)(b2, carry, b2, one);
    if ((counter >> 8 & 0xff) == 0xff) {
        b1 = BS_OP(mask_add_epi8)(b1, carry, b1, one);
        if ((counter >> 16 & 0xff) == 0xff) {
            b0 = BS_OP(mask_add_epi8)(b0, carry, b0, one);
        }
    }
    if (ones != 0) {
        low = BS_OP(mask_mov_epi8)(low, ones, one);
        b2 = BS_OP(maskz_mov_epi8)(~ones, b2);
        b1 = BS_OP(maskz_mov_epi8)(~ones, b1);
        b0 = BS_OP(maskz_mov_epi8)(~ones, b0);
    }
    x[12] = BS_OP(gf2p8affine_epi64_epi8)(b0, p, 0);
    x[13] = BS_OP(gf2p8affine_epi64_epi8)(b1, p, 0);
    x[14] = BS_OP(gf2p8affine_epi64_epi8)(b2, p, 0);
    x[15] = BS_OP(gf2p8affine_epi64_epi8)(low, p, 0);
#define BS_SPLAT(i) x[i] = BS_OP(set1_epi8)((char)nonce[i]);
    BS_SPLAT(0) BS_SPLAT(1) BS_SPLAT(2) BS_SPLAT(3) BS_SPLAT(4) BS_SPLAT(5)
    BS_SPLAT(6) BS_SPLAT(7) BS_SPLAT(8) BS_SPLAT(9) BS_SPLAT(10) BS_SPLAT(11)
#undef BS_SPLAT
}

/* Out of P, words in reverse (GB/T 32907, 6.1), and byte i of lane l of register b to byte b of
 * lane l of register i. Each step interleaves registers 8 apart: bit by bit a register's number and
 * that of a byte in its lane change places. */
BS_INLINE void BS_NAME(finish)(BS_VECTOR *x, BS_VECTOR *out)
{
    BS_VECTOR p = BS_OP(set1_epi64)(SM4_AFFINE_IN_INVERSE), y[16];
#define BS_BACK(i) BS_OP(gf2p8affine_epi64_epi8)(x[(12 - ((i) & 12)) + ((i) & 3)], p, 0)
#define BS_PAIR(to, from, i)                                    \
    to[2 * (i)] = BS_OP(unpacklo_epi8)(from(i), from((i) + 8)); \
    to[2 * (i) + 1] = BS_OP(unpackhi_epi8)(from(i), from((i) + 8));
#define BS_STEP(to, from)                                                                   \
    BS_PAIR(to, from, 0) BS_PAIR(to, from, 1) BS_PAIR(to, from, 2) BS_PAIR(to, from, 3)     \
    BS_PAIR(to, from, 4) BS_PAIR(to, from, 5) BS_PAIR(to, from, 6) BS_PAIR(to, from, 7)
#define BS_Y(i) y[i]
#define BS_OUT(i) out[i]
    BS_VECTOR back[16];
#define BS_SET(i) back[i] = BS_BACK(i);
    BS_SET(0) BS_SET(1) BS_SET(2) BS_SET(3) BS_SET(4) BS_SET(5) BS_SET(6) BS_SET(7)
    BS_SET(8) BS_SET(9) BS_SET(10) BS_SET(11) BS_SET(12) BS_SET(13) BS_SET(14) BS_SET(15)
#define BS_FROM(i) back[i]
    BS_STEP(y, BS_FROM)
    BS_STEP(out, BS_Y)
    BS_STEP(y, BS_OUT)
    BS_STEP(out, BS_Y)
#undef BS_FROM
#undef BS_SET
#undef BS_OUT
#undef BS_Y
#undef BS_STEP
#undef BS_PAIR
#undef BS_BACK
}

#undef BS_KEY
#undef BS_D
#undef BS_A
#undef BS_XOR3
#undef BS_INLINE
