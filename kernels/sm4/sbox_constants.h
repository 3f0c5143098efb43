/* Written by kernels/sm4/derive.py from the published S-box; do not edit.
 *
 * S(x) = Q(inv(P(x) + p)) + c with inv in the AES field (0x11b). Matrices are in the
 * form of GF2P8AFFINEQB. FOLD: the state is kept as P(x), round keys as P(k) + p; output
 * byte j gains A(t[j]) + R(t[j+1]) + R(t[j+2]) + D(t[j+3]), A + D = R, each one
 * GF2P8AFFINEINVQB, t[0] the most significant byte; the constants together are FOLD.
 * TOWER: the same S-box around inversion in GF(16)[Y] / (Y^2 + Y + 8), on bit planes.
 */
#ifndef TONGGUAN_SM4_SBOX_CONSTANTS_H
#define TONGGUAN_SM4_SBOX_CONSTANTS_H

#define SM4_AFFINE_IN 0x4c287db91a22505dLL /* P */
#define SM4_AFFINE_OUT 0xf3ab34a974a6b589LL /* Q */
#define SM4_AFFINE_IN_INVERSE 0xb3a4f5863284728bLL /* P^-1 */
#define SM4_FOLD_A 0x040db891e9a481b7LL /* P a Q */
#define SM4_FOLD_R 0x2c020425162040adLL /* P r Q */
#define SM4_FOLD_D 0x280fbcb4ff84c11aLL /* P d Q */
#define SM4_CONSTANT_IN 0x3e /* p */
#define SM4_CONSTANT_OUT 0xd3 /* c */
#define SM4_CONSTANT_FOLD 0x63 /* P(r(c)): what the four terms' constants add up to */

#define SM4_TOWER_IN \
    plane s0 = x0 ^ x1, s1 = x2 ^ x5, s2 = x3 ^ x4, s3 = x6 ^ x7, s4 = s1 ^ s2; \
    y0 = s2 ^ s3; y1 = s1 ^ x0 ^ x6; y2 = ~(s4 ^ x1 ^ x7); y3 = ~(s0 ^ s3 ^ x5); \
    y4 = s0 ^ x4 ^ x7; y5 = ~(x6); y6 = s3 ^ x2; y7 = ~(s0 ^ s4 ^ x6);

#define SM4_TOWER_OUT \
    plane s0 = x0 ^ x4, s1 = x2 ^ x6, s2 = s0 ^ x1, s3 = x1 ^ x3, s4 = s3 ^ x4, s5 = x5 ^ x7; \
    y0 = ~(s2 ^ x7); y1 = ~(s1 ^ x0); y2 = s1 ^ s5; y3 = s0 ^ x2 ^ x7; y4 = ~(s4); y5 = s4 ^ s5; \
    y6 = ~(s1 ^ s2); y7 = ~(s0 ^ x3);

#endif
