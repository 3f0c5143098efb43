/* The key stream of the tier of 512-bit registers: 16 or 32 or 64 blocks, and groups of 64 that
 * hash beside their rounds.
 *
 * From 17 blocks on the state is cut into bytes (byteslice.h); 16 blocks are kept as words, a block
 * a column, which is quicker to an end. A register that comes out holds four blocks in order.
 */
#ifndef TONGGUAN_SM4_STREAMS512_H
#define TONGGUAN_SM4_STREAMS512_H

#include "ghash512.h"
#include "sbox_constants.h"

enum { GROUP = 64, GROUP_BYTES = GROUP * SM4_BLOCK };

/* In tier_keys: P(key) + p, each byte four times; then the same as words, bytes as in memory. */
typedef struct {
    uint32_t bytes[4 * SM4_ROUNDS];
    uint32_t words[SM4_ROUNDS];
} form;

_Static_assert(sizeof(form) <= sizeof((sm4_key *)0)->tier_keys, "no room for the keys");

#define BS_TARGET TARGET
#define BS_VECTOR __m512i
#define BS_MASK __mmask64
#define BS_OP(name) _mm512_##name
#define BS_XOR(a, b) _mm512_xor_si512(a, b)
#define BS_NAME(name) wide_##name
#include "byteslice.h"
#undef BS_VECTOR
#undef BS_MASK
#undef BS_OP
#undef BS_XOR
#undef BS_NAME
#define BS_VECTOR __m256i
#define BS_MASK __mmask32
#define BS_OP(name) _mm256_##name
#define BS_XOR(a, b) _mm256_xor_si256(a, b)
#define BS_NAME(name) half_##name
#define _mm256_set1_epi64 _mm256_set1_epi64x
#include "byteslice.h"
#undef _mm256_set1_epi64

/* w0 ^= F(w1 ^ w2 ^ w3 ^ key) on words: A + R rho + R rho^2 + D rho^3, rho a byte's rotation. */
#define WORD_ROUND(OP, XOR, w0, w1, w2, w3, key)                                             \
    do {                                                                                     \
        __auto_type t = OP(ternarylogic_epi32)(                                              \
            w3, w1, XOR(w2, OP(set1_epi32)((int)(key))), 0x96);                              \
        __auto_type r = OP(gf2p8affineinv_epi64_epi8)(t, OP(set1_epi64)(SM4_FOLD_R), 0);     \
        __auto_type d = OP(gf2p8affineinv_epi64_epi8)(t, OP(set1_epi64)(SM4_FOLD_D), 0);     \
        w0 = XOR(w0, OP(gf2p8affineinv_epi64_epi8)(t, OP(set1_epi64)(SM4_FOLD_A),            \
                                                   SM4_CONSTANT_FOLD));                      \
        w0 = OP(ternarylogic_epi32)(w0, OP(ror_epi32)(r, 8), OP(ror_epi32)(r, 16), 0x96);    \
        w0 = XOR(w0, OP(ror_epi32)(d, 24));                                                  \
    } while (0)
#define WIDE_OP(name) _mm512_##name
#define SINGLE_OP(name) _mm_##name
#define _mm_set1_epi64 _mm_set1_epi64x

/* Nonce under P, as bytes and as words. */
typedef union {
    uint8_t bytes[16];
    uint32_t words[4];
} start;

/* The block that masks the tag, counter 1, by itself: in lane 0 of four registers. */
typedef struct {
    __m128i w0, w1, w2, w3;
} single;

INLINE single single_start(const start *nonce)
{
    const __m128i p = _mm_set1_epi64x(SM4_AFFINE_IN);
    return (single){_mm_cvtsi32_si128((int)nonce->words[0]),
                    _mm_cvtsi32_si128((int)nonce->words[1]),
                    _mm_cvtsi32_si128((int)nonce->words[2]),
                    _mm_gf2p8affine_epi64_epi8(_mm_cvtsi32_si128(0x01000000), p, 0)};
}

INLINE void single_rounds(single *b, const form *keys, int round)
{
    WORD_ROUND(SINGLE_OP, _mm_xor_si128, b->w0, b->w1, b->w2, b->w3, keys->words[round]);
    WORD_ROUND(SINGLE_OP, _mm_xor_si128, b->w1, b->w2, b->w3, b->w0, keys->words[round + 1]);
    WORD_ROUND(SINGLE_OP, _mm_xor_si128, b->w2, b->w3, b->w0, b->w1, keys->words[round + 2]);
    WORD_ROUND(SINGLE_OP, _mm_xor_si128, b->w3, b->w0, b->w1, b->w2, keys->words[round + 3]);
}

INLINE __m128i single_finish(const single *b)
{
    __m128i block =
        _mm_unpacklo_epi64(_mm_unpacklo_epi32(b->w3, b->w2), _mm_unpacklo_epi32(b->w1, b->w0));
    return _mm_gf2p8affine_epi64_epi8(block, _mm_set1_epi64x(SM4_AFFINE_IN_INVERSE), 0);
}

/* Key stream of 16 blocks from `counter` on; returns the block that masks the tag. Unless `full`
 * that one takes the last block's place, which is free; else it has rounds of its own. */
INLINE __m128i stream16(const form *keys, const start *nonce, uint32_t counter, __m512i out[4],
                        int full)
{
    /* Lane 4 l + r is block l of register r, so block 4 r + l of the stream. */
    const __m512i offsets = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512i swap = _mm512_broadcast_i32x4(
        _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
    const __m512i back = _mm512_set1_epi64(SM4_AFFINE_IN_INVERSE);
    single alone = single_start(nonce);
    __m512i n = _mm512_add_epi32(_mm512_set1_epi32((int)counter), offsets);

    if (!full) {
        n = _mm512_mask_mov_epi32(n, 0x8000, _mm512_set1_epi32(1));
    }
    __m512i w0 = _mm512_set1_epi32((int)nonce->words[0]);
    __m512i w1 = _mm512_set1_epi32((int)nonce->words[1]);
    __m512i w2 = _mm512_set1_epi32((int)nonce->words[2]);
    __m512i w3 = _mm512_gf2p8affine_epi64_epi8(_mm512_shuffle_epi8(n, swap),
                                               _mm512_set1_epi64(SM4_AFFINE_IN), 0);
    for (int round = 0; round < SM4_ROUNDS; round += 4) {
        WORD_ROUND(WIDE_OP, _mm512_xor_si512, w0, w1, w2, w3, keys->words[round]);
        WORD_ROUND(WIDE_OP, _mm512_xor_si512, w1, w2, w3, w0, keys->words[round + 1]);
        WORD_ROUND(WIDE_OP, _mm512_xor_si512, w2, w3, w0, w1, keys->words[round + 2]);
        WORD_ROUND(WIDE_OP, _mm512_xor_si512, w3, w0, w1, w2, keys->words[round + 3]);
        if (full) {
            single_rounds(&alone, keys, round);
        }
    }
    w0 = _mm512_gf2p8affine_epi64_epi8(w0, back, 0);
    w1 = _mm512_gf2p8affine_epi64_epi8(w1, back, 0);
    w2 = _mm512_gf2p8affine_epi64_epi8(w2, back, 0);
    w3 = _mm512_gf2p8affine_epi64_epi8(w3, back, 0);
    __m512i a = _mm512_unpacklo_epi32(w3, w2), b = _mm512_unpackhi_epi32(w3, w2);
    __m512i c = _mm512_unpacklo_epi32(w1, w0), d = _mm512_unpackhi_epi32(w1, w0);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
    return full ? single_finish(&alone) : _mm512_extracti32x4_epi32(out[3], 3);
}

/* Byte (lane l, i) is block lanes * i + l of the stream. */
#define OFFSETS4(l) \
    60 + (l), 56 + (l), 52 + (l), 48 + (l), 44 + (l), 40 + (l), 36 + (l), 32 + (l), 28 + (l), \
        24 + (l), 20 + (l), 16 + (l), 12 + (l), 8 + (l), 4 + (l), 0 + (l)
#define OFFSETS2(l) \
    30 + (l), 28 + (l), 26 + (l), 24 + (l), 22 + (l), 20 + (l), 18 + (l), 16 + (l), 14 + (l), \
        12 + (l), 10 + (l), 8 + (l), 6 + (l), 4 + (l), 2 + (l), 0 + (l)

INLINE __m512i offsets64(void)
{
    return _mm512_set_epi8(OFFSETS4(3), OFFSETS4(2), OFFSETS4(1), OFFSETS4(0));
}

/* As stream16, of 32 blocks. */
INLINE __m128i stream32(const form *keys, const start *nonce, uint32_t counter, __m512i out[8],
                        int full)
{
    const __m256i a = _mm256_set1_epi64x(SM4_FOLD_A), d = _mm256_set1_epi64x(SM4_FOLD_D);
    single alone = single_start(nonce);
    __m256i x[16], y[16];

    half_start(x, nonce->bytes, counter, _mm256_set_epi8(OFFSETS2(1), OFFSETS2(0)),
               full ? 0 : 1u << 31);
    for (int round = 0; round < SM4_ROUNDS; round += 4) {
        half_rounds(x, 0, keys->bytes + 4 * round, a, d);
        half_rounds(x, 2, keys->bytes + 4 * round + 8, a, d);
        if (full) {
            single_rounds(&alone, keys, round);
        }
    }
    half_finish(x, y);
#define JOIN(i) \
    out[i] = _mm512_inserti64x4(_mm512_castsi256_si512(y[2 * (i)]), y[2 * (i) + 1], 1);
    JOIN(0) JOIN(1) JOIN(2) JOIN(3) JOIN(4) JOIN(5) JOIN(6) JOIN(7)
#undef JOIN
    return full ? single_finish(&alone) : _mm512_extracti32x4_epi32(out[7], 3);
}

/* As stream16, of 63 blocks and the tag's. */
INLINE __m128i stream64(const form *keys, const start *nonce, uint32_t counter, __m512i out[16])
{
    const __m512i a = _mm512_set1_epi64(SM4_FOLD_A), d = _mm512_set1_epi64(SM4_FOLD_D);
    __m512i x[16];

    wide_start(x, nonce->bytes, counter, offsets64(), 1ull << 63);
    for (int round = 0; round < SM4_ROUNDS; round += 4) {
        wide_rounds(x, 0, keys->bytes + 4 * round, a, d);
        wide_rounds(x, 2, keys->bytes + 4 * round + 8, a, d);
    }
    wide_finish(x, out);
    return _mm512_extracti32x4_epi32(out[15], 3);
}

/* What a group of 64 blocks works on beside its own rounds. */
typedef struct {
    const sm4_key *key;
    const uint8_t *hashed; /* NULL, or 64 blocks of ciphertext to absorb */
    __m128i y;             /* the hash so far */
    __m128i mask;          /* the block for the tag, when asked for */
} beside;

INLINE void group_apply(const __m512i stream[16], const uint8_t *in, uint8_t *out)
{
#define APPLY(i)                 \
    _mm512_storeu_si512(out + 64 * (i), \
                        _mm512_xor_si512(stream[i], _mm512_loadu_si512(in + 64 * (i))));
    APPLY(0) APPLY(1) APPLY(2) APPLY(3) APPLY(4) APPLY(5) APPLY(6) APPLY(7)
    APPLY(8) APPLY(9) APPLY(10) APPLY(11) APPLY(12) APPLY(13) APPLY(14) APPLY(15)
#undef APPLY
}

INLINE void group(const form *keys, const start *nonce, uint32_t counter, const uint8_t *in,
                  uint8_t *out, beside *b, int hash, int masks)
{
    const __m512i a = _mm512_set1_epi64(SM4_FOLD_A), d = _mm512_set1_epi64(SM4_FOLD_D);
    __m512i x[16], stream[16];
    single alone = single_start(nonce);
    sum s = sum_none();
    __m512i y = _mm512_zextsi128_si512(b->y);

    wide_start(x, nonce->bytes, counter, offsets64(), 0);
    for (int round = 0; round < SM4_ROUNDS; round += 4) {
        wide_rounds(x, 0, keys->bytes + 4 * round, a, d);
        if (hash) {
            __m512i c = _mm512_loadu_si512(b->hashed + 32 * round);
            sum_add(&s, b->key, (size_t)(GROUP - 2 * round), _mm512_xor_si512(reversed(c), y));
            y = _mm512_setzero_si512();
        }
        wide_rounds(x, 2, keys->bytes + 4 * round + 8, a, d);
        if (masks) {
            single_rounds(&alone, keys, round);
        }
        if (hash) {
            __m512i c = _mm512_loadu_si512(b->hashed + 32 * round + 64);
            sum_add(&s, b->key, (size_t)(GROUP - 2 * round - 4), reversed(c));
        }
    }
    wide_finish(x, stream);
    group_apply(stream, in, out);
    if (hash) {
        b->y = sum_total(&s);
    }
    if (masks) {
        b->mask = single_finish(&alone);
    }
}

/* Two groups side by side, so that one's affine inversions, for which some CPUs have a single port,
 * meet the other's exclusive ors; the states do not fit the registers, and still it is faster.
 * Hashes, if told to, 128 blocks with a reduction in between. */
INLINE void group_pair(const form *keys, const start *nonce, uint32_t counter, const uint8_t *in,
                       uint8_t *out, beside *b, int hash, int masks)
{
    const __m512i a = _mm512_set1_epi64(SM4_FOLD_A), d = _mm512_set1_epi64(SM4_FOLD_D);
    __m512i x[16], y[16], stream[16];
    const uint8_t *hashed = b->hashed;
    const uint32_t *k = keys->bytes;
    single alone = single_start(nonce);
    int round = 0;

    wide_start(x, nonce->bytes, counter, offsets64(), 0);
    wide_start(y, nonce->bytes, counter + GROUP, offsets64(), 0);
    for (int half = 0; half < 2; half++) {
        __m512i before = _mm512_zextsi128_si512(b->y);
        sum s = sum_none();

        for (size_t e = GROUP; e != 0; e -= 16, k += 16, round += 4) {
#define HASH_FOUR(i)                                                                     \
    if (hash) {                                                                          \
        __m512i c = reversed(_mm512_loadu_si512(hashed));                                \
        sum_add(&s, b->key, e - 4 * (i), (i) == 0 ? _mm512_xor_si512(c, before) : c);    \
        hashed += 64;                                                                    \
    }
            wide_rounds(x, 0, k, a, d);
            HASH_FOUR(0)
            wide_rounds(y, 0, k, a, d);
            HASH_FOUR(1)
            wide_rounds(x, 2, k + 8, a, d);
            HASH_FOUR(2)
            if (masks) {
                single_rounds(&alone, keys, round);
            }
            wide_rounds(y, 2, k + 8, a, d);
            HASH_FOUR(3)
#undef HASH_FOUR
            before = _mm512_setzero_si512();
        }
        if (hash) {
            b->y = sum_total(&s);
        }
    }
    if (masks) {
        b->mask = single_finish(&alone);
    }
    wide_finish(x, stream);
    group_apply(stream, in, out);
    wide_finish(y, stream);
    group_apply(stream, in + GROUP_BYTES, out + GROUP_BYTES);
}

#endif
