/* Blocks and sums of products for ghash.h and gcm.h, on x86. The including file has defined
 * SM4_TARGET, its instruction sets; SM4_TWO_LANES if VPCLMULQDQ, two products at once, is among
 * them. */
#include <immintrin.h>
#include <string.h>

#include "sm4.h"

#define TIER_INLINE static inline __attribute__((always_inline, target(SM4_TARGET)))
#define TIER_CODE static __attribute__((noinline, target(SM4_TARGET)))

typedef __m128i block;

TIER_INLINE block block_zero(void)
{
    return _mm_setzero_si128();
}

TIER_INLINE block block_load(const uint8_t *bytes)
{
    return _mm_loadu_si128((const __m128i *)bytes);
}

TIER_INLINE void block_store(uint8_t *bytes, block a)
{
    _mm_storeu_si128((__m128i *)bytes, a);
}

TIER_INLINE block block_xor(block a, block b)
{
    return _mm_xor_si128(a, b);
}

TIER_INLINE block block_reversed(block a)
{
    return _mm_shuffle_epi8(a, _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

/* (high : low + middle * x^64) / x^128 modulo x^128 + x^127 + x^126 + x^121 + 1. */
TIER_INLINE block block_reduced(__m128i low, __m128i middle, __m128i high)
{
    const __m128i modulus = _mm_set_epi64x(0, (long long)0xC200000000000000ULL);

    low = _mm_xor_si128(low, _mm_slli_si128(middle, 8));
    high = _mm_xor_si128(high, _mm_srli_si128(middle, 8));
    low = _mm_xor_si128(_mm_shuffle_epi32(low, 0x4E), _mm_clmulepi64_si128(low, modulus, 0x00));
    low = _mm_xor_si128(_mm_shuffle_epi32(low, 0x4E), _mm_clmulepi64_si128(low, modulus, 0x00));
    return _mm_xor_si128(high, low);
}

#if defined(SM4_TWO_LANES)

typedef struct {
    __m256i low, middle, high;
} sum;

TIER_INLINE sum sum_zero(void)
{
    __m256i zero = _mm256_setzero_si256();

    return (sum){zero, zero, zero};
}

TIER_INLINE void sum_add_lanes(sum *to, __m256i a, __m256i b)
{
    to->low = _mm256_xor_si256(to->low, _mm256_clmulepi64_epi128(a, b, 0x00));
    to->middle = _mm256_xor_si256(to->middle, _mm256_clmulepi64_epi128(a, b, 0x01));
    to->middle = _mm256_xor_si256(to->middle, _mm256_clmulepi64_epi128(a, b, 0x10));
    to->high = _mm256_xor_si256(to->high, _mm256_clmulepi64_epi128(a, b, 0x11));
}

TIER_INLINE __m256i one_lane(block a)
{
    return _mm256_inserti128_si256(_mm256_setzero_si256(), a, 0);
}

/* a * b */
TIER_INLINE void sum_add(sum *to, block a, block b)
{
    sum_add_lanes(to, one_lane(a), one_lane(b));
}

/* (the first block of `bytes` + carried) * the first power + the second * the second */
TIER_INLINE void sum_add_two(sum *to, block carried, const uint8_t *bytes, const uint8_t *powers)
{
    const __m256i reverse = _mm256_broadcastsi128_si256(
        _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    __m256i both = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)bytes), reverse);

    sum_add_lanes(to, _mm256_xor_si256(both, one_lane(carried)),
                  _mm256_loadu_si256((const __m256i *)powers));
}

TIER_INLINE block lanes_joined(__m256i lanes)
{
    return _mm_xor_si128(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
}

TIER_INLINE block sum_reduced(const sum *of)
{
    return block_reduced(lanes_joined(of->low), lanes_joined(of->middle), lanes_joined(of->high));
}

#else

typedef struct {
    __m128i low, middle, high;
} sum;

TIER_INLINE sum sum_zero(void)
{
    __m128i zero = _mm_setzero_si128();

    return (sum){zero, zero, zero};
}

/* a * b */
TIER_INLINE void sum_add(sum *to, block a, block b)
{
    to->low = _mm_xor_si128(to->low, _mm_clmulepi64_si128(a, b, 0x00));
    to->middle = _mm_xor_si128(to->middle, _mm_clmulepi64_si128(a, b, 0x01));
    to->middle = _mm_xor_si128(to->middle, _mm_clmulepi64_si128(a, b, 0x10));
    to->high = _mm_xor_si128(to->high, _mm_clmulepi64_si128(a, b, 0x11));
}

/* (the first block of `bytes` + carried) * the first power + the second * the second */
TIER_INLINE void sum_add_two(sum *to, block carried, const uint8_t *bytes, const uint8_t *powers)
{
    block first = block_xor(block_reversed(block_load(bytes)), carried);

    sum_add(to, first, block_load(powers));
    sum_add(to, block_reversed(block_load(bytes + SM4_BLOCK)), block_load(powers + SM4_BLOCK));
}

TIER_INLINE block sum_reduced(const sum *of)
{
    return block_reduced(of->low, of->middle, of->high);
}

#endif
