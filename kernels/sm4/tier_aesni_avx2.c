/* SM4-GCM with AES-NI and AVX2: the x86 servers of the last ten years that have no GFNI.
 *
 * AESENCLAST with a zero key is AES's S-box and ShiftRows: the inversion that SM4 needs, with
 * another affine map behind it. The state is kept under the S-box's inner map, so that nothing
 * comes before the instruction; behind it are two maps, each two PSHUFB look-ups by nibble inside
 * registers, and shuffles that undo ShiftRows and turn the words in one (derive_aes.py). Nothing
 * secret is an address.
 */
#include "sm4.h"

#if defined(__x86_64__)

#define SM4_TARGET "avx2,pclmul,aes"

#include "aes_constants.h"
#include "blocks_x86.h"
#include "cpu_x86.h"
#include "sbox_constants.h"

typedef uint8_t sixteen __attribute__((vector_size(16)));

/* The same 16 bytes in both lanes. */
#define BOTH(...) _mm256_broadcastsi128_si256((__m128i)(sixteen){__VA_ARGS__})

/* The map given by its tables, of a byte given by its nibbles. */
TIER_INLINE __m256i mapped(__m256i low_nibble, __m256i high_nibble, __m256i low, __m256i high)
{
    return _mm256_xor_si256(_mm256_shuffle_epi8(low, low_nibble),
                            _mm256_shuffle_epi8(high, high_nibble));
}

TIER_INLINE __m256i low_nibble(__m256i x)
{
    return _mm256_and_si256(x, _mm256_set1_epi8(15));
}

TIER_INLINE __m256i high_nibble(__m256i x)
{
    return _mm256_and_si256(_mm256_srli_epi32(x, 4), _mm256_set1_epi8(15));
}

/* Where ShiftRows put each byte of a word. */
#define UNSHIFT BOTH(0, 13, 10, 7, 4, 1, 14, 11, 8, 5, 2, 15, 12, 9, 6, 3)
/* The same for words turned left by a byte. */
#define UNSHIFT_TURN BOTH(7, 0, 13, 10, 11, 4, 1, 14, 15, 8, 5, 2, 3, 12, 9, 6)

/* AES's SubBytes and ShiftRows. */
TIER_INLINE __m256i aes_substituted(__m256i x)
{
    const __m128i zero = _mm_setzero_si128();
    __m128i lower = _mm_aesenclast_si128(_mm256_castsi256_si128(x), zero);
    __m128i upper = _mm_aesenclast_si128(_mm256_extracti128_si256(x, 1), zero);

    return _mm256_inserti128_si256(_mm256_castsi128_si256(lower), upper, 1);
}

TIER_INLINE __m256i sm4_mix(__m256i x, __m256i word)
{
    const __m256i a_low = BOTH(SM4_AES_A_LOW), a_high = BOTH(SM4_AES_A_HIGH);
    const __m256i d_low = BOTH(SM4_AES_D_LOW), d_high = BOTH(SM4_AES_D_HIGH);
    const __m256i turn8 = BOTH(3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14);
    const __m256i turn16 = BOTH(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    __m256i t = aes_substituted(x);
    __m256i low = low_nibble(t), high = high_nibble(t);
    __m256i a = mapped(low, high, a_low, a_high), d = mapped(low, high, d_low, d_high);
    __m256i f =
        _mm256_xor_si256(_mm256_shuffle_epi8(a, UNSHIFT), _mm256_shuffle_epi8(d, UNSHIFT_TURN));

    return _mm256_xor_si256(
        _mm256_xor_si256(word, f),
        _mm256_xor_si256(_mm256_shuffle_epi8(f, turn8), _mm256_shuffle_epi8(f, turn16)));
}

TIER_INLINE __m256i sm4_enter(__m256i x)
{
    return mapped(low_nibble(x), high_nibble(x), BOTH(SM4_AES_ENTER_LOW),
                  BOTH(SM4_AES_ENTER_HIGH));
}

TIER_INLINE __m256i sm4_leave(__m256i x)
{
    return mapped(low_nibble(x), high_nibble(x), BOTH(SM4_AES_LEAVE_LOW),
                  BOTH(SM4_AES_LEAVE_HIGH));
}

TIER_INLINE __m256i sm4_substitute(__m256i x)
{
    x = aes_substituted(_mm256_xor_si256(sm4_enter(x), _mm256_set1_epi8(SM4_CONSTANT_IN)));
    return _mm256_shuffle_epi8(mapped(low_nibble(x), high_nibble(x), BOTH(SM4_AES_SBOX_LOW),
                                      BOTH(SM4_AES_SBOX_HIGH)),
                               UNSHIFT);
}

#include "avx2.h"

static int usable(void)
{
    unsigned wanted = CPU_AVX2 | CPU_PCLMUL | CPU_AESNI;

    return (cpu_features() & wanted) == wanted;
}

GCM_TIER(sm4_tier_aesni_avx2, "aesni-avx2", usable, expand);

#endif
