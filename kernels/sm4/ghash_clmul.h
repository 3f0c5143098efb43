/* GHASH by carry-less multiplication, for the tiers of 256-bit registers.
 *
 * Kept in POLYVAL's form (RFC 8452, appendix A): blocks are byte-reversed, H is multiplied by x once
 * and no product needs a shift. key->powers holds H^32 .. H^1 in this order, so that the blocks of a
 * batch and their powers are read side by side; up to 32 products share one reduction.
 *
 * A template: the including file has defined SM4_TARGET, its instruction sets.
 */
#include <immintrin.h>
#include <string.h>

#include "sm4.h"

#define GHASH_INLINE static inline __attribute__((always_inline, target(SM4_TARGET)))

enum { GHASH_BATCH = 32 };

typedef struct {
    __m128i low, middle, high; /* the sum of this batch's products, unreduced */
    __m128i carried;           /* what the batch before came to; joins the next block */
    const __m128i *powers;     /* the next block's power; meaningful while left > 0 */
    size_t left;               /* blocks that this batch still takes */
} ghash;

/* Powers for a message of this many bytes (SIZE_MAX: any); its additional data may need less. */
static inline size_t ghash_powers(size_t powers_for)
{
    return powers_for < (GHASH_BATCH - 1) * SM4_BLOCK ? powers_for / SM4_BLOCK + 2 : GHASH_BATCH;
}

GHASH_INLINE __m128i ghash_reverse(__m128i block)
{
    return _mm_shuffle_epi8(block,
                            _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

GHASH_INLINE __m128i ghash_load(const uint8_t *block)
{
    return ghash_reverse(_mm_loadu_si128((const __m128i *)block));
}

/* (high : low + middle * x^64) / x^128 modulo x^128 + x^127 + x^126 + x^121 + 1. */
GHASH_INLINE __m128i ghash_reduce(__m128i low, __m128i middle, __m128i high)
{
    const __m128i modulus = _mm_set_epi64x(0, (long long)0xC200000000000000ULL);

    low = _mm_xor_si128(low, _mm_slli_si128(middle, 8));
    high = _mm_xor_si128(high, _mm_srli_si128(middle, 8));
    low = _mm_xor_si128(_mm_shuffle_epi32(low, 0x4E), _mm_clmulepi64_si128(low, modulus, 0x00));
    low = _mm_xor_si128(_mm_shuffle_epi32(low, 0x4E), _mm_clmulepi64_si128(low, modulus, 0x00));
    return _mm_xor_si128(high, low);
}

GHASH_INLINE __m128i ghash_multiply(__m128i a, __m128i b)
{
    return ghash_reduce(
        _mm_clmulepi64_si128(a, b, 0x00),
        _mm_xor_si128(_mm_clmulepi64_si128(a, b, 0x01), _mm_clmulepi64_si128(a, b, 0x10)),
        _mm_clmulepi64_si128(a, b, 0x11));
}

GHASH_INLINE void ghash_expand(sm4_key *key, size_t message_bytes)
{
    __m128i *powers = (__m128i *)key->powers;
    size_t enough = message_bytes == 0 ? SIZE_MAX : message_bytes;
    size_t count = ghash_powers(enough);
    __m128i h = ghash_load(key->h);
    /* H * x: shift by one, and reduce if the top bit was set; by mask, as H is secret. */
    __m128i top = _mm_shuffle_epi32(_mm_srai_epi32(h, 31), 0xFF);
    __m128i carry = _mm_slli_si128(_mm_srli_epi64(h, 63), 8);
    const __m128i modulus = _mm_set_epi64x((long long)0xC200000000000000ULL, 1);

    h = _mm_or_si128(_mm_slli_epi64(h, 1), carry);
    h = _mm_xor_si128(h, _mm_and_si128(top, modulus));
    _mm_store_si128(&powers[GHASH_BATCH - 1], h);
    for (size_t i = 2; i <= count; i++) {
        /* From the halves rather than from the neighbour: shorter chains. */
        __m128i a = powers[GHASH_BATCH - i / 2], b = powers[GHASH_BATCH - (i - i / 2)];
        _mm_store_si128(&powers[GHASH_BATCH - i], ghash_multiply(a, b));
    }
    key->powers_for = count == GHASH_BATCH ? SIZE_MAX : enough;
}

GHASH_INLINE void ghash_start(ghash *state)
{
    state->low = state->middle = state->high = state->carried = _mm_setzero_si128();
    state->powers = NULL;
    state->left = 0;
}

GHASH_INLINE void ghash_step(ghash *state, __m128i block, __m128i power)
{
    state->low = _mm_xor_si128(state->low, _mm_clmulepi64_si128(block, power, 0x00));
    state->middle = _mm_xor_si128(state->middle, _mm_clmulepi64_si128(block, power, 0x01));
    state->middle = _mm_xor_si128(state->middle, _mm_clmulepi64_si128(block, power, 0x10));
    state->high = _mm_xor_si128(state->high, _mm_clmulepi64_si128(block, power, 0x11));
}

GHASH_INLINE void ghash_settle(ghash *state)
{
    state->carried = ghash_reduce(state->low, state->middle, state->high);
    state->low = state->middle = state->high = _mm_setzero_si128();
}

/* Take one block; `coming` is how many the hash still takes, this one included. */
GHASH_INLINE void ghash_block(ghash *state, const sm4_key *key, __m128i block, size_t coming)
{
    if (state->left == 0) {
        size_t most = ghash_powers(key->powers_for);

        state->left = coming < most ? coming : most;
        state->powers = (const __m128i *)key->powers + (GHASH_BATCH - state->left);
        block = _mm_xor_si128(block, state->carried);
    }
    ghash_step(state, block, _mm_load_si128(state->powers++));
    if (--state->left == 0)
        ghash_settle(state);
}

/* Take bytes, zeros added to fill the last block; `following` blocks come after them that may share
 * a batch with these. */
GHASH_INLINE void ghash_bytes(ghash *state, const sm4_key *key, const uint8_t *bytes, size_t length,
                              size_t following)
{
    size_t coming = length / SM4_BLOCK + (length % SM4_BLOCK != 0) + following;

    for (; length >= SM4_BLOCK; length -= SM4_BLOCK, bytes += SM4_BLOCK)
        ghash_block(state, key, ghash_load(bytes), coming--);
    if (length > 0) {
        uint8_t last[SM4_BLOCK] = {0};

        memcpy(last, bytes, length);
        ghash_block(state, key, ghash_load(last), coming);
    }
}

/* Take the lengths, which end the hash, and give its value. */
GHASH_INLINE __m128i ghash_finish(ghash *state, const sm4_key *key, size_t aad_length,
                                  size_t length)
{
    __m128i lengths = _mm_set_epi64x((long long)aad_length * 8, (long long)length * 8);

    ghash_block(state, key, lengths, 1);
    return ghash_reverse(state->carried);
}
