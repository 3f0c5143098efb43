/* What the aarch64 tiers share: may they be built, may they run, blocks and sums of products for
 * ghash.h and gcm.h. */
#include "sm4.h"

/* arm_neon.h of older clang has no intrinsics beyond what the whole file is compiled for. Such a
 * build has the tiers' names, and says that none is usable. */
#if defined(__ARM_BIG_ENDIAN) || (defined(__clang__) && __clang_major__ < 16)
#define ARM_TIER_NOT_BUILT(symbol, name)                                                           \
    static int usable(void)                                                                        \
    {                                                                                              \
        return 0;                                                                                  \
    }                                                                                              \
    const sm4_tier symbol = {name, usable, NULL, NULL, NULL}
#else

#include <arm_neon.h>
#include <string.h>
#include <sys/auxv.h>

enum { ARM_AES = 1 << 3, ARM_PMULL = 1 << 4, ARM_SM4 = 1 << 19 }; /* Linux: HWCAP_... */

static inline int arm_has(unsigned long wanted)
{
    return (getauxval(AT_HWCAP) & wanted) == wanted;
}

#define TIER_INLINE static inline __attribute__((always_inline, target(SM4_TARGET)))
#define TIER_CODE static __attribute__((noinline, target(SM4_TARGET)))

typedef uint8x16_t block;

TIER_INLINE block block_zero(void)
{
    return vdupq_n_u8(0);
}

TIER_INLINE block block_load(const uint8_t *bytes)
{
    return vld1q_u8(bytes);
}

TIER_INLINE void block_store(uint8_t *bytes, block a)
{
    vst1q_u8(bytes, a);
}

TIER_INLINE block block_xor(block a, block b)
{
    return veorq_u8(a, b);
}

TIER_INLINE block block_halves_swapped(block a)
{
    return vextq_u8(a, a, 8);
}

TIER_INLINE block block_reversed(block a)
{
    return block_halves_swapped(vrev64q_u8(a));
}

typedef struct {
    block low, middle, high;
} sum;

TIER_INLINE sum sum_zero(void)
{
    return (sum){block_zero(), block_zero(), block_zero()};
}

/* The carry-less product of the low halves, and of the high halves. */
TIER_INLINE block low_product(block a, block b)
{
    return vreinterpretq_u8_p128(vmull_p64(vgetq_lane_p64(vreinterpretq_p64_u8(a), 0),
                                           vgetq_lane_p64(vreinterpretq_p64_u8(b), 0)));
}

TIER_INLINE block high_product(block a, block b)
{
    return vreinterpretq_u8_p128(vmull_high_p64(vreinterpretq_p64_u8(a), vreinterpretq_p64_u8(b)));
}

/* a * b */
TIER_INLINE void sum_add(sum *to, block a, block b)
{
    block crossed = block_halves_swapped(b);

    to->low = veorq_u8(to->low, low_product(a, b));
    to->high = veorq_u8(to->high, high_product(a, b));
    to->middle = veorq_u8(to->middle, low_product(a, crossed));
    to->middle = veorq_u8(to->middle, high_product(a, crossed));
}

/* (the first block of `bytes` + carried) * the first power + the second * the second */
TIER_INLINE void sum_add_two(sum *to, block carried, const uint8_t *bytes, const uint8_t *powers)
{
    sum_add(to, veorq_u8(block_reversed(block_load(bytes)), carried), block_load(powers));
    sum_add(to, block_reversed(block_load(bytes + SM4_BLOCK)), block_load(powers + SM4_BLOCK));
}

/* (high : low + middle * x^64) / x^128 modulo x^128 + x^127 + x^126 + x^121 + 1. */
TIER_INLINE block sum_reduced(const sum *of)
{
    const block modulus = vreinterpretq_u8_u64(vdupq_n_u64(0xC200000000000000ULL));
    block low = veorq_u8(of->low, vextq_u8(block_zero(), of->middle, 8));
    block high = veorq_u8(of->high, vextq_u8(of->middle, block_zero(), 8));

    low = veorq_u8(block_halves_swapped(low), low_product(low, modulus));
    low = veorq_u8(block_halves_swapped(low), low_product(low, modulus));
    return veorq_u8(high, low);
}

#include "ghash.h"

#define ARM_TIER_BUILT

#endif
