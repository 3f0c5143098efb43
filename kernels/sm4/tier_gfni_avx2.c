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

/* CPUs with GFNI and AVX2 have VPCLMULQDQ too. Headers of gcc before 11 are not known to give its
 * 256-bit form without AVX-512. */
#if defined(__clang__) || __GNUC__ >= 11
#define SM4_TARGET "avx2,pclmul,gfni,vpclmulqdq"
#define SM4_TWO_LANES
#else
#define SM4_TARGET "avx2,pclmul,gfni"
#endif

#include "blocks_x86.h"
#include "cpu_x86.h"
#include "sbox_constants.h"

TIER_INLINE __m256i sm4_mix(__m256i x, __m256i word)
{
    const __m256i by8 = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14));
    const __m256i by16 = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    __m256i a = _mm256_gf2p8affineinv_epi64_epi8(x, _mm256_set1_epi64x(SM4_FOLD_A),
                                                 SM4_CONSTANT_FOLD);
    __m256i d = _mm256_gf2p8affineinv_epi64_epi8(x, _mm256_set1_epi64x(SM4_FOLD_D), 0);
    __m256i f = _mm256_xor_si256(a, _mm256_shuffle_epi8(d, by8));

    return _mm256_xor_si256(
        _mm256_xor_si256(word, f),
        _mm256_xor_si256(_mm256_shuffle_epi8(f, by8), _mm256_shuffle_epi8(f, by16)));
}

TIER_INLINE __m256i sm4_enter(__m256i x)
{
    return _mm256_gf2p8affine_epi64_epi8(x, _mm256_set1_epi64x(SM4_AFFINE_IN), 0);
}

TIER_INLINE __m256i sm4_leave(__m256i x)
{
    return _mm256_gf2p8affine_epi64_epi8(x, _mm256_set1_epi64x(SM4_AFFINE_IN_INVERSE), 0);
}

TIER_INLINE __m256i sm4_substitute(__m256i x)
{
    x = _mm256_gf2p8affine_epi64_epi8(x, _mm256_set1_epi64x(SM4_AFFINE_IN), SM4_CONSTANT_IN);
    return _mm256_gf2p8affineinv_epi64_epi8(x, _mm256_set1_epi64x(SM4_AFFINE_OUT),
                                            SM4_CONSTANT_OUT);
}

#include "avx2.h"

static int usable(void)
{
    unsigned wanted = CPU_AVX2 | CPU_PCLMUL | CPU_GFNI | CPU_VPCLMUL;

    return (cpu_features() & wanted) == wanted;
}

GCM_TIER(sm4_tier_gfni_avx2, "gfni-avx2", usable, expand);

#endif
