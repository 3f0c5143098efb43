/* The tiers compiled in, best first. A tier whose file is not in the tree is not in the list. */
#include "sm4.h"

extern const sm4_tier sm4_tier_gfni_avx512, sm4_tier_gfni_avx2, sm4_tier_aesni_avx2;
extern const sm4_tier sm4_tier_arm_sm4, sm4_tier_arm_aese, sm4_tier_portable;

const sm4_tier *const sm4_tiers[] = {
#if defined(__x86_64__)
#if __has_include("tier_gfni_avx512.c")
    &sm4_tier_gfni_avx512,
#endif
#if __has_include("tier_gfni_avx2.c")
    &sm4_tier_gfni_avx2,
#endif
#if __has_include("tier_aesni_avx2.c")
    &sm4_tier_aesni_avx2,
#endif
#elif defined(__aarch64__)
#if __has_include("tier_arm_sm4.c")
    &sm4_tier_arm_sm4,
#endif
#if __has_include("tier_arm_aese.c")
    &sm4_tier_arm_aese,
#endif
#endif
    &sm4_tier_portable,
    NULL,
};

int sm4_tier_usable(const sm4_tier *tier)
{
    enum { UNKNOWN, NO, YES };
    static _Atomic unsigned char answers[sizeof sm4_tiers / sizeof *sm4_tiers];
    size_t at = 0;

    while (sm4_tiers[at] != tier) {
        at++; /* a tier of the list: it ends here */
    }
    if (answers[at] == UNKNOWN) {
        answers[at] = tier->usable() ? YES : NO; /* whoever asks twice at once hears the same */
    }
    return answers[at] == YES;
}

const sm4_tier *sm4_best_tier(void)
{
    const sm4_tier *const *tier = sm4_tiers;
    while (!sm4_tier_usable(*tier)) {
        tier++; /* the portable one, last, always is */
    }
    return *tier;
}
