/* SM4-GCM with GFNI, AVX-512 and VPCLMULQDQ (Ice Lake, Zen 4 and later).
 *
 * From 16 blocks on the state is cut into bytes (byteslice.h), 32 or 64 blocks at a time; below that
 * one register holds one word of 16 blocks, which is quicker to an end. The block that masks the tag
 * is a lane of whatever is last. GHASH is in POLYVAL's form (RFC 8452, appendix A); up to 64 products
 * share a reduction, and in long messages they run between the rounds of a group.
 */
#include "sm4.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "cpu_x86.h"
#include "sbox_constants.h"

#define TARGET "avx2,bmi2,avx512f,avx512bw,avx512vl,avx512dq,gfni,pclmul,vpclmulqdq"
#define INLINE static inline __attribute__((always_inline, target(TARGET)))

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

/* --- GHASH ----------------------------------------------------------------------------------- */

typedef struct {
    __m512i low, middle, high;
} sum;

INLINE sum sum_none(void)
{
    return (sum){_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
}

INLINE __m512i reversed(__m512i blocks)
{
    return _mm512_shuffle_epi8(
        blocks, _mm512_broadcast_i32x4(
                    _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
}

/* Adds four blocks (reversed), the first to be multiplied by H^exponent. */
INLINE void sum_add(sum *s, const sm4_key *key, size_t exponent, __m512i x)
{
    __m512i h = _mm512_loadu_si512((const uint8_t *)key + (SM4_POWERS - exponent) * SM4_BLOCK);
    s->low = _mm512_xor_si512(s->low, _mm512_clmulepi64_epi128(x, h, 0x00));
    s->high = _mm512_xor_si512(s->high, _mm512_clmulepi64_epi128(x, h, 0x11));
    s->middle = _mm512_ternarylogic_epi32(s->middle, _mm512_clmulepi64_epi128(x, h, 0x01),
                                          _mm512_clmulepi64_epi128(x, h, 0x10), 0x96);
}

INLINE __m128i folded(__m512i x)
{
    __m256i y = _mm256_xor_si256(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    return _mm_xor_si128(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
}

/* (high : low + middle x^64) / x^128 modulo x^128 + x^127 + x^126 + x^121 + 1. */
INLINE __m128i reduced(__m128i low, __m128i middle, __m128i high)
{
    const __m128i modulus = _mm_set_epi64x(0, (long long)0xc200000000000000u);
    low = _mm_xor_si128(low, _mm_slli_si128(middle, 8));
    high = _mm_xor_si128(high, _mm_srli_si128(middle, 8));
    low = _mm_xor_si128(_mm_shuffle_epi32(low, 0x4e), _mm_clmulepi64_si128(low, modulus, 0x00));
    high = _mm_xor_si128(high, _mm_shuffle_epi32(low, 0x4e));
    return _mm_xor_si128(high, _mm_clmulepi64_si128(low, modulus, 0x00));
}

INLINE __m128i sum_total(const sum *s)
{
    return reduced(folded(s->low), folded(s->middle), folded(s->high));
}

/* The total with one block more, which is multiplied by H. */
INLINE __m128i sum_total_and(const sum *s, const sm4_key *key, __m128i x)
{
    __m128i h = _mm_load_si128((const __m128i *)(key->powers + (SM4_POWERS - 1) * SM4_BLOCK));
    __m128i middle = _mm_xor_si128(_mm_clmulepi64_si128(x, h, 0x01), _mm_clmulepi64_si128(x, h, 0x10));
    return reduced(_mm_xor_si128(_mm_clmulepi64_si128(x, h, 0x00), folded(s->low)),
                   _mm_xor_si128(middle, folded(s->middle)),
                   _mm_xor_si128(_mm_clmulepi64_si128(x, h, 0x11), folded(s->high)));
}

INLINE size_t blocks_of(size_t bytes)
{
    return bytes / SM4_BLOCK + (bytes % SM4_BLOCK != 0);
}

INLINE __mmask64 first(size_t bytes)
{
    return bytes >= 64 ? ~(__mmask64)0 : _bzhi_u64(~(__mmask64)0, (unsigned)bytes);
}

/* Adds bytes, padded to blocks with zeros; the first block is for H^exponent and is joined by y. */
INLINE void sum_bytes(sum *s, const sm4_key *key, size_t exponent, const uint8_t *bytes,
                      size_t length, __m512i y)
{
    for (size_t at = 0; at < length; at += 64, exponent -= 4) {
        __m512i x = reversed(_mm512_maskz_loadu_epi8(first(length - at), bytes + at));
        sum_add(s, key, exponent, _mm512_xor_si512(x, y));
        y = _mm512_setzero_si512();
    }
}

/* --- the cipher ------------------------------------------------------------------------------ */

/* One round on words: w0 ^= F(u ^ w3), u being w1 ^ w2 ^ key. A + R rho + R rho^2 + D rho^3. */
#define WORD_ROUND(w0, w1, w2, w3, key)                                                          \
    do {                                                                                         \
        __m512i t = _mm512_ternarylogic_epi32(                                                   \
            w3, w1, _mm512_xor_si512(w2, _mm512_set1_epi32((int)(key))), 0x96);                  \
        __m512i r = _mm512_gf2p8affineinv_epi64_epi8(t, fold_r, 0);                              \
        __m512i d = _mm512_gf2p8affineinv_epi64_epi8(t, fold_d, 0);                              \
        w0 = _mm512_xor_si512(w0, _mm512_gf2p8affineinv_epi64_epi8(t, fold_a, SM4_CONSTANT_FOLD)); \
        w0 = _mm512_ternarylogic_epi32(w0, _mm512_ror_epi32(r, 8), _mm512_ror_epi32(r, 16), 0x96); \
        w0 = _mm512_xor_si512(w0, _mm512_ror_epi32(d, 24));                                      \
    } while (0)

/* 16 blocks: words under P in w[0..3], a block a column; out: four blocks a register. */
INLINE void words_run(const form *keys, __m512i w0, __m512i w1, __m512i w2, __m512i w3,
                      __m512i out[4])
{
    const __m512i fold_a = _mm512_set1_epi64(SM4_FOLD_A), fold_r = _mm512_set1_epi64(SM4_FOLD_R);
    const __m512i fold_d = _mm512_set1_epi64(SM4_FOLD_D);
    const __m512i back = _mm512_set1_epi64(SM4_AFFINE_IN_INVERSE);

    for (int round = 0; round < SM4_ROUNDS; round += 4) {
        WORD_ROUND(w0, w1, w2, w3, keys->words[round]);
        WORD_ROUND(w1, w2, w3, w0, keys->words[round + 1]);
        WORD_ROUND(w2, w3, w0, w1, keys->words[round + 2]);
        WORD_ROUND(w3, w0, w1, w2, keys->words[round + 3]);
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
}

/* Nonce under P, as bytes and as words. */
typedef union {
    uint8_t bytes[16];
    uint32_t words[4];
} start;

/* Key stream of up to 15 blocks from `counter` on; block 15 is for the tag. */
INLINE void stream16(const form *keys, const start *nonce, uint32_t counter, __m512i out[4])
{
    /* Lane 4 l + r is block l of register r, so block 4 r + l of the stream. */
    const __m512i offsets = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512i swap = _mm512_broadcast_i32x4(
        _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
    __m512i n = _mm512_add_epi32(_mm512_set1_epi32((int)counter), offsets);
    n = _mm512_mask_mov_epi32(n, 0x8000, _mm512_set1_epi32(1));
    n = _mm512_gf2p8affine_epi64_epi8(_mm512_shuffle_epi8(n, swap),
                                      _mm512_set1_epi64(SM4_AFFINE_IN), 0);
    words_run(keys, _mm512_set1_epi32((int)nonce->words[0]),
              _mm512_set1_epi32((int)nonce->words[1]), _mm512_set1_epi32((int)nonce->words[2]), n,
              out);
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

/* As stream16, of up to 31 blocks; block 31 is for the tag. */
INLINE void stream32(const form *keys, const start *nonce, uint32_t counter, __m512i out[8])
{
    const __m256i a = _mm256_set1_epi64x(SM4_FOLD_A), d = _mm256_set1_epi64x(SM4_FOLD_D);
    __m256i x[16], y[16];

    half_start(x, nonce->bytes, counter, _mm256_set_epi8(OFFSETS2(1), OFFSETS2(0)), 1u << 31);
    for (int round = 0; round < SM4_ROUNDS; round += 4) {
        half_rounds(x, 0, keys->bytes + 4 * round, a, d);
        half_rounds(x, 2, keys->bytes + 4 * round + 8, a, d);
    }
    half_finish(x, y);
#define JOIN(i) \
    out[i] = _mm512_inserti64x4(_mm512_castsi256_si512(y[2 * (i)]), y[2 * (i) + 1], 1);
    JOIN(0) JOIN(1) JOIN(2) JOIN(3) JOIN(4) JOIN(5) JOIN(6) JOIN(7)
#undef JOIN
}

/* As stream16, of up to 63 blocks; block 63 is for the tag. */
INLINE void stream64(const form *keys, const start *nonce, uint32_t counter, __m512i out[16])
{
    const __m512i a = _mm512_set1_epi64(SM4_FOLD_A), d = _mm512_set1_epi64(SM4_FOLD_D);
    __m512i x[16];

    wide_start(x, nonce->bytes, counter, offsets64(), 1ull << 63);
    for (int round = 0; round < SM4_ROUNDS; round += 4) {
        wide_rounds(x, 0, keys->bytes + 4 * round, a, d);
        wide_rounds(x, 2, keys->bytes + 4 * round + 8, a, d);
    }
    wide_finish(x, out);
}

/* One round of a single block on words, in lane 0. */
INLINE __m128i single_round(__m128i w0, __m128i w1, __m128i w2, __m128i w3, uint32_t key)
{
    __m128i t = _mm_ternarylogic_epi32(w3, w1, _mm_xor_si128(w2, _mm_set1_epi32((int)key)), 0x96);
    __m128i r = _mm_gf2p8affineinv_epi64_epi8(t, _mm_set1_epi64x(SM4_FOLD_R), 0);
    __m128i d = _mm_gf2p8affineinv_epi64_epi8(t, _mm_set1_epi64x(SM4_FOLD_D), 0);
    w0 = _mm_xor_si128(w0, _mm_gf2p8affineinv_epi64_epi8(t, _mm_set1_epi64x(SM4_FOLD_A),
                                                         SM4_CONSTANT_FOLD));
    w0 = _mm_ternarylogic_epi32(w0, _mm_ror_epi32(r, 8), _mm_ror_epi32(r, 16), 0x96);
    return _mm_xor_si128(w0, _mm_ror_epi32(d, 24));
}

/* What a group of 64 blocks works on beside its own rounds. */
typedef struct {
    const sm4_key *key;
    const uint8_t *hashed; /* NULL, or 64 blocks of ciphertext to absorb */
    __m128i y;             /* the hash so far */
    __m128i mask;          /* the block for the tag, when asked for */
} beside;

INLINE void group(const form *keys, const start *nonce, uint32_t counter, const uint8_t *in,
                  uint8_t *out, beside *b, int hash, int masks)
{
    const __m512i a = _mm512_set1_epi64(SM4_FOLD_A), d = _mm512_set1_epi64(SM4_FOLD_D);
    __m512i x[16], stream[16];
    __m128i w0, w1, w2, w3;
    sum s = sum_none();
    __m512i y = _mm512_zextsi128_si512(b->y);

    wide_start(x, nonce->bytes, counter, offsets64(), 0);
    if (masks) {
        w0 = _mm_cvtsi32_si128((int)nonce->words[0]);
        w1 = _mm_cvtsi32_si128((int)nonce->words[1]);
        w2 = _mm_cvtsi32_si128((int)nonce->words[2]);
        w3 = _mm_gf2p8affine_epi64_epi8(_mm_cvtsi32_si128(0x01000000),
                                        _mm_set1_epi64x(SM4_AFFINE_IN), 0);
    }
    for (int round = 0; round < SM4_ROUNDS; round += 4) {
        wide_rounds(x, 0, keys->bytes + 4 * round, a, d);
        if (masks) {
            w0 = single_round(w0, w1, w2, w3, keys->words[round]);
            w1 = single_round(w1, w2, w3, w0, keys->words[round + 1]);
        }
        if (hash) {
            __m512i c = _mm512_loadu_si512(b->hashed + 32 * round);
            sum_add(&s, b->key, (size_t)(GROUP - 2 * round), _mm512_xor_si512(reversed(c), y));
            y = _mm512_setzero_si512();
        }
        wide_rounds(x, 2, keys->bytes + 4 * round + 8, a, d);
        if (masks) {
            w2 = single_round(w2, w3, w0, w1, keys->words[round + 2]);
            w3 = single_round(w3, w0, w1, w2, keys->words[round + 3]);
        }
        if (hash) {
            __m512i c = _mm512_loadu_si512(b->hashed + 32 * round + 64);
            sum_add(&s, b->key, (size_t)(GROUP - 2 * round - 4), reversed(c));
        }
    }
    wide_finish(x, stream);
#define APPLY(i)                 \
    _mm512_storeu_si512(out + 64 * (i), \
                        _mm512_xor_si512(stream[i], _mm512_loadu_si512(in + 64 * (i))));
    APPLY(0) APPLY(1) APPLY(2) APPLY(3) APPLY(4) APPLY(5) APPLY(6) APPLY(7)
    APPLY(8) APPLY(9) APPLY(10) APPLY(11) APPLY(12) APPLY(13) APPLY(14) APPLY(15)
#undef APPLY
    if (hash) {
        b->y = sum_total(&s);
    }
    if (masks) {
        __m128i back = _mm_set1_epi64x(SM4_AFFINE_IN_INVERSE);
        b->mask = _mm_unpacklo_epi64(_mm_unpacklo_epi32(w3, w2), _mm_unpacklo_epi32(w1, w0));
        b->mask = _mm_gf2p8affine_epi64_epi8(b->mask, back, 0);
    }
}

/* --- a message ------------------------------------------------------------------------------- */

/* The last 0 to 63 blocks, and the tag's. Returns the hash of everything. */
INLINE __m128i end(const sm4_key *key, const start *nonce, uint32_t counter, const uint8_t *in,
                   uint8_t *out, size_t length, sum s, __m512i y, __m128i lengths, __m128i *mask,
                   int seal)
{
    const form *keys = (const form *)(const void *)key->tier_keys;
    __m512i stream[16];
    size_t blocks = blocks_of(length), exponent = blocks + 1;

    if (blocks < 16) {
        stream16(keys, nonce, counter, stream);
        *mask = _mm512_extracti32x4_epi32(stream[3], 3);
    } else if (blocks < 32) {
        stream32(keys, nonce, counter, stream);
        *mask = _mm512_extracti32x4_epi32(stream[7], 3);
    } else {
        stream64(keys, nonce, counter, stream);
        *mask = _mm512_extracti32x4_epi32(stream[15], 3);
    }
    for (size_t at = 0; at < length; at += 64, exponent -= 4) {
        __mmask64 some = first(length - at);
        __m512i text = _mm512_maskz_loadu_epi8(some, in + at);
        __m512i other = _mm512_maskz_mov_epi8(some, _mm512_xor_si512(text, stream[at / 64]));
        _mm512_mask_storeu_epi8(out + at, some, other);
        sum_add(&s, key, exponent, _mm512_xor_si512(reversed(seal ? other : text), y));
        y = _mm512_setzero_si512();
    }
    if (blocks == 0) {
        lengths = _mm_xor_si128(lengths, _mm512_castsi512_si128(y));
    }
    sm4_wipe(stream, sizeof stream);
    return sum_total_and(&s, key, lengths);
}

__attribute__((target(TARGET))) static void gcm(const sm4_key *key,
                                                const uint8_t nonce[SM4_NONCE], const uint8_t *aad,
                                                size_t aad_length, const uint8_t *in, uint8_t *out,
                                                size_t length, uint8_t tag[SM4_TAG], int seal)
{
    const form *keys = (const form *)(const void *)key->tier_keys;
    size_t aad_blocks = blocks_of(aad_length), blocks = blocks_of(length);
    __m128i lengths = _mm_set_epi64x((long long)(aad_length * 8), (long long)(length * 8));
    uint32_t counter = 2;
    beside b = {.key = key, .y = _mm_setzero_si128()};
    sum s = sum_none();
    start begin;
    __m128i hash;

    __m128i n = _mm_maskz_loadu_epi8(0x0fff, nonce);
    _mm_storeu_si128((__m128i *)begin.bytes,
                     _mm_gf2p8affine_epi64_epi8(n, _mm_set1_epi64x(SM4_AFFINE_IN), 0));
    if (aad_blocks + blocks < GROUP) { /* one reduction for everything */
        sum_bytes(&s, key, aad_blocks + blocks + 1, aad, aad_length, _mm512_setzero_si512());
        hash = end(key, &begin, counter, in, out, length, s, _mm512_setzero_si512(), lengths, &b.mask,
                   seal);
    } else {
        while (aad_length != 0) {
            size_t now = aad_length < GROUP_BYTES ? aad_length : GROUP_BYTES;
            sum_bytes(&s, key, blocks_of(now), aad, now, _mm512_zextsi128_si512(b.y));
            b.y = sum_total(&s);
            s = sum_none();
            aad += now, aad_length -= now;
        }
        uint8_t padded[GROUP_BYTES];
        const uint8_t *before = NULL; /* sealing: the group that is not hashed yet */
        int masked = 0;
        while (length > GROUP_BYTES - SM4_BLOCK) { /* 64 blocks, the last one perhaps cut */
            size_t now = length < GROUP_BYTES ? length : GROUP_BYTES;
            const uint8_t *from = in;
            uint8_t *to = out;
            if (now < GROUP_BYTES) {
                memset(padded + now, 0, GROUP_BYTES - now);
                memcpy(padded, in, now);
                from = to = padded;
            }
            b.hashed = seal ? before : from;
            masked = length <= GROUP_BYTES;
            if (b.hashed != NULL && masked) {
                group(keys, &begin, counter, from, to, &b, 1, 1);
            } else if (b.hashed != NULL) {
                group(keys, &begin, counter, from, to, &b, 1, 0);
            } else if (masked) {
                group(keys, &begin, counter, from, to, &b, 0, 1);
            } else {
                group(keys, &begin, counter, from, to, &b, 0, 0);
            }
            if (now < GROUP_BYTES) {
                memcpy(out, padded, now);
                memset(padded + now, 0, GROUP_BYTES - now);
            }
            before = to, counter += GROUP, in += now, out += now, length -= now;
        }
        if (seal && before != NULL) {
            sum_bytes(&s, key, GROUP, before, GROUP_BYTES, _mm512_zextsi128_si512(b.y));
            b.y = sum_total(&s);
            s = sum_none();
        }
        if (before == padded) {
            sm4_wipe(padded, sizeof padded);
        }
        if (masked) {
            hash = sum_total_and(&s, key, _mm_xor_si128(lengths, b.y));
        } else {
            hash = end(key, &begin, counter, in, out, length, s, _mm512_zextsi128_si512(b.y),
                       lengths, &b.mask, seal);
        }
    }
    hash = _mm512_castsi512_si128(reversed(_mm512_castsi128_si512(hash)));
    _mm_storeu_si128((__m128i *)tag, _mm_xor_si128(hash, b.mask));
}

/* --- keys ------------------------------------------------------------------------------------ */

INLINE __m512i multiplied(__m512i x, __m512i h)
{
    const __m512i modulus = _mm512_set_epi64(0, (long long)0xc200000000000000u, 0, (long long)0xc200000000000000u,
                                             0, (long long)0xc200000000000000u, 0, (long long)0xc200000000000000u);
    __m512i low = _mm512_clmulepi64_epi128(x, h, 0x00), high = _mm512_clmulepi64_epi128(x, h, 0x11);
    __m512i middle = _mm512_xor_si512(_mm512_clmulepi64_epi128(x, h, 0x01),
                                      _mm512_clmulepi64_epi128(x, h, 0x10));
    low = _mm512_xor_si512(low, _mm512_bslli_epi128(middle, 8));
    high = _mm512_xor_si512(high, _mm512_bsrli_epi128(middle, 8));
    low = _mm512_xor_si512(_mm512_shuffle_epi32(low, 0x4e),
                           _mm512_clmulepi64_epi128(low, modulus, 0x00));
    high = _mm512_xor_si512(high, _mm512_shuffle_epi32(low, 0x4e));
    return _mm512_xor_si512(high, _mm512_clmulepi64_epi128(low, modulus, 0x00));
}

/* H^64 .. H^1 in this order, so that a load at H^e brings the powers of the next three blocks. */
__attribute__((target(TARGET))) static void powers(sm4_key *key, size_t message_bytes)
{
    form *keys = (form *)(void *)key->tier_keys;
    size_t need = message_bytes == 0 || message_bytes > (GROUP - 1) * SM4_BLOCK
                      ? GROUP
                      : blocks_of(message_bytes) + 1;
    const __m512i in = _mm512_set1_epi64(SM4_AFFINE_IN);
    const __m512i swap = _mm512_broadcast_i32x4(
        _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
    const __m512i four_times =
        _mm512_set_epi8(15, 15, 15, 15, 14, 14, 14, 14, 13, 13, 13, 13, 12, 12, 12, 12, 11, 11, 11,
                        11, 10, 10, 10, 10, 9, 9, 9, 9, 8, 8, 8, 8, 7, 7, 7, 7, 6, 6, 6, 6, 5, 5, 5,
                        5, 4, 4, 4, 4, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);

    for (int i = 0; i < SM4_ROUNDS; i += 16) {
        __m512i k = _mm512_shuffle_epi8(_mm512_loadu_si512(key->round_keys + i), swap);
        _mm512_storeu_si512(keys->words + i, _mm512_gf2p8affine_epi64_epi8(k, in, SM4_CONSTANT_IN));
    }
    for (int i = 0; i < SM4_ROUNDS; i += 4) {
        __m512i k = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(keys->words + i)));
        _mm512_storeu_si512(keys->bytes + 4 * i, _mm512_shuffle_epi8(k, four_times));
    }
    /* H times x (RFC 8452, appendix A), then H^2, then as many at once as there are. */
    __m128i h = _mm512_castsi512_si128(
        reversed(_mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)key->h))));
    __m128i carries = _mm_srli_epi64(h, 63);
    __m128i over = _mm_shuffle_epi32(_mm_sub_epi64(_mm_setzero_si128(), carries), 0xee);
    h = _mm_or_si128(_mm_slli_epi64(h, 1), _mm_bslli_si128(carries, 8));
    h = _mm_xor_si128(h, _mm_and_si128(over, _mm_set_epi64x((long long)0xc200000000000000u, 1)));
    uint8_t *last = key->powers + (SM4_POWERS - 1) * SM4_BLOCK;
    __m512i h1 = _mm512_castsi128_si512(h);
    __m512i h2 = multiplied(h1, h1);
    __m512i h21 = _mm512_inserti32x4(h2, h, 1);
    __m512i h43 = multiplied(_mm512_broadcast_i32x4(_mm512_castsi512_si128(h2)), h21);
    __m512i h4321 = _mm512_inserti64x4(h43, _mm512_castsi512_si256(h21), 1);
    _mm512_storeu_si512(last - 3 * SM4_BLOCK, h4321);
    for (size_t have = 4; have < need; have *= 2) {
        __m512i top = _mm512_broadcast_i32x4(_mm_loadu_si128(
            (const __m128i *)(last - (have - 1) * SM4_BLOCK)));
        for (size_t i = 4; i <= have; i += 4) {
            __m512i those = _mm512_loadu_si512(last - (i - 1) * SM4_BLOCK);
            _mm512_storeu_si512(last - (have + i - 1) * SM4_BLOCK, multiplied(those, top));
        }
    }
    key->powers_for = need == GROUP ? SIZE_MAX : (need - 1) * SM4_BLOCK;
}

/* Round keys and H by the same instructions; CK is 7 (4 i + j) mod 256 (GB/T 32907, 7.3). */
__attribute__((target(TARGET))) static void expand(sm4_key *key, const uint8_t raw[SM4_BLOCK])
{
    const __m128i in = _mm_set1_epi64x(SM4_AFFINE_IN), out = _mm_set1_epi64x(SM4_AFFINE_OUT);
    const __m128i swap = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
    __m128i k = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)raw), swap);
    k = _mm_xor_si128(k, _mm_set_epi32((int)0xb27022dc, 0x677d9197, 0x56aa3350, (int)0xa3b1bac6));
    __m128i k0 = k, k1 = _mm_shuffle_epi32(k, 1), k2 = _mm_shuffle_epi32(k, 2);
    __m128i k3 = _mm_shuffle_epi32(k, 3);
    __m128i h0 = _mm_setzero_si128(), h1 = h0, h2 = h0, h3 = h0;
    uint32_t ck = 0x00070e15;

    for (int round = 0; round < SM4_ROUNDS; round++) {
        __m128i t = _mm_ternarylogic_epi32(k3, k1, _mm_xor_si128(k2, _mm_cvtsi32_si128((int)ck)), 0x96);
        t = _mm_gf2p8affine_epi64_epi8(t, in, SM4_CONSTANT_IN);
        t = _mm_gf2p8affineinv_epi64_epi8(t, out, SM4_CONSTANT_OUT);
        k0 = _mm_xor_si128(k0, t);
        t = _mm_ternarylogic_epi32(k0, _mm_rol_epi32(t, 13), _mm_rol_epi32(t, 23), 0x96);
        k0 = k1, k1 = k2, k2 = k3, k3 = t;
        key->round_keys[round] = (uint32_t)_mm_cvtsi128_si32(t);
        /* Byte by byte plus 28, without a carry between them. */
        ck = ((ck & 0x7f7f7f7fu) + 0x1c1c1c1cu) ^ (ck & 0x80808080u);
        /* H = E(K, 0) goes along one round behind, on numbers rather than bytes: so rol, not ror. */
        __m128i word = _mm_gf2p8affine_epi64_epi8(t, in, SM4_CONSTANT_IN);
        __m128i u = _mm_ternarylogic_epi32(h3, h1, _mm_xor_si128(h2, word), 0x96);
        __m128i r = _mm_gf2p8affineinv_epi64_epi8(u, _mm_set1_epi64x(SM4_FOLD_R), 0);
        __m128i d = _mm_gf2p8affineinv_epi64_epi8(u, _mm_set1_epi64x(SM4_FOLD_D), 0);
        h0 = _mm_xor_si128(h0, _mm_gf2p8affineinv_epi64_epi8(u, _mm_set1_epi64x(SM4_FOLD_A),
                                                             SM4_CONSTANT_FOLD));
        h0 = _mm_ternarylogic_epi32(h0, _mm_rol_epi32(r, 8), _mm_rol_epi32(r, 16), 0x96);
        u = _mm_xor_si128(h0, _mm_rol_epi32(d, 24));
        h0 = h1, h1 = h2, h2 = h3, h3 = u;
    }
    h0 = _mm_unpacklo_epi64(_mm_unpacklo_epi32(h3, h2), _mm_unpacklo_epi32(h1, h0));
    h0 = _mm_gf2p8affine_epi64_epi8(h0, _mm_set1_epi64x(SM4_AFFINE_IN_INVERSE), 0);
    _mm_storeu_si128((__m128i *)key->h, _mm_shuffle_epi8(h0, swap));
}

static int usable(void)
{
    /* AVX512 F 16, DQ 17, BW 30, VL 31 and BMI2 8 in EBX; ZMM, opmask saved by the system. */
    const unsigned wanted = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31 | 1u << 8;
    const unsigned features = CPU_AVX2 | CPU_PCLMUL | CPU_GFNI | CPU_VPCLMUL;
    unsigned a, b, c, d, low, high;

    if ((cpu_features() & features) != features || !__get_cpuid_count(7, 0, &a, &b, &c, &d) ||
        (b & wanted) != wanted) {
        return 0;
    }
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & 0xe6) == 0xe6;
}

const sm4_tier sm4_tier_gfni_avx512 = {"gfni-avx512", usable, powers, gcm, expand};

#endif
