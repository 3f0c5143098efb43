/* SM4-GCM with GFNI on 256-bit registers (Alder Lake and its successors; Zen 4 held to AVX2).
 *
 * The S-box is an inversion in AES's field between affine maps, and GF2P8AFFINEINVQB does inversion
 * and map in one step. The state is kept under the S-box's inner map, so that the outer map, the
 * linear layer and the next inner map are one matrix per term. Its four terms are, by bytes,
 * A(t) + R(rho t) + R(rho^2 t) + D(rho^3 t) with rho a byte's rotation and R = A + D (derive.py),
 * which is F + rho F + rho^2 F for F = A(t) + rho D(t): two matrices and three rotations.
 */
#include "sm4.h"

#if defined(__x86_64__)

#define SM4_TARGET "avx2,pclmul,gfni"

#include <immintrin.h>

#include "cpu_x86.h"
#include "sbox_constants.h"

#define MIX_INLINE static inline __attribute__((always_inline, target(SM4_TARGET)))

MIX_INLINE __m256i sm4_mix(__m256i x)
{
    const __m256i a = _mm256_set1_epi64x(SM4_FOLD_A), d = _mm256_set1_epi64x(SM4_FOLD_D);
    const __m256i by8 = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14));
    const __m256i by16 = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    __m256i f = _mm256_gf2p8affineinv_epi64_epi8(x, a, SM4_CONSTANT_FOLD);

    f = _mm256_xor_si256(
        f, _mm256_shuffle_epi8(_mm256_gf2p8affineinv_epi64_epi8(x, d, 0), by8));
    return _mm256_xor_si256(
        f, _mm256_xor_si256(_mm256_shuffle_epi8(f, by8), _mm256_shuffle_epi8(f, by16)));
}

MIX_INLINE __m256i sm4_enter(__m256i x)
{
    return _mm256_gf2p8affine_epi64_epi8(x, _mm256_set1_epi64x(SM4_AFFINE_IN), 0);
}

MIX_INLINE __m256i sm4_leave(__m256i x)
{
    return _mm256_gf2p8affine_epi64_epi8(x, _mm256_set1_epi64x(SM4_AFFINE_IN_INVERSE), 0);
}

MIX_INLINE __m256i sm4_substitute(__m256i x)
{
    x = _mm256_gf2p8affine_epi64_epi8(x, _mm256_set1_epi64x(SM4_AFFINE_IN), SM4_CONSTANT_IN);
    return _mm256_gf2p8affineinv_epi64_epi8(x, _mm256_set1_epi64x(SM4_AFFINE_OUT),
                                            SM4_CONSTANT_OUT);
}

#include "avx2_gcm.h"

static int usable(void)
{
    unsigned wanted = CPU_AVX2 | CPU_PCLMUL | CPU_GFNI;

    return (cpu_features() & wanted) == wanted;
}

static __attribute__((target(SM4_TARGET))) void expand(sm4_key *key, const uint8_t *raw)
{
    gcm_expand(key, raw);
}

static __attribute__((target(SM4_TARGET))) void powers(sm4_key *key, size_t message_bytes)
{
    ghash_expand(key, message_bytes);
    gcm_own_keys(key);
}

static __attribute__((target(SM4_TARGET))) void gcm(const sm4_key *key, const uint8_t *nonce,
                                                    const uint8_t *aad, size_t aad_length,
                                                    const uint8_t *in, uint8_t *out, size_t length,
                                                    uint8_t *tag, int seal)
{
    gcm_run(key, nonce, aad, aad_length, in, out, length, tag, seal);
}

const sm4_tier sm4_tier_gfni_avx2 = {"gfni-avx2", usable, powers, gcm, expand};

#endif
