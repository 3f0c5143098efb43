/* GHASH four blocks at a time, for the tier of 512-bit registers.
 *
 * In POLYVAL's form (RFC 8452, appendix A): blocks are byte-reversed and H is multiplied by x once,
 * so that no product needs a shift. Up to 64 products share a reduction; key->powers holds
 * H^64 .. H^1 in this order, so that a load at H^e brings the powers of the next three blocks too.
 */
#ifndef TONGGUAN_SM4_GHASH512_H
#define TONGGUAN_SM4_GHASH512_H

#include <immintrin.h>

#include "sm4.h"

#define TARGET "avx2,bmi2,avx512f,avx512bw,avx512vl,avx512dq,gfni,pclmul,vpclmulqdq"
#define INLINE static inline __attribute__((always_inline, target(TARGET)))

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
    __m128i middle =
        _mm_xor_si128(_mm_clmulepi64_si128(x, h, 0x01), _mm_clmulepi64_si128(x, h, 0x10));
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

/* Four products, each reduced. */
INLINE __m512i multiplied(__m512i x, __m512i h)
{
    const __m512i modulus =
        _mm512_broadcast_i32x4(_mm_set_epi64x(0, (long long)0xc200000000000000u));
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

#endif
