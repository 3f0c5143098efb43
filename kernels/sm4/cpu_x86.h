/* What an x86 CPU has and its operating system keeps: CPUID and XCR0, read afresh at each call. */
#ifndef TONGGUAN_SM4_CPU_X86_H
#define TONGGUAN_SM4_CPU_X86_H

#include <cpuid.h>
#include <stdint.h>

enum {
    CPU_AVX2 = 1, /* with YMM state saved by the system, as for all below */
    CPU_PCLMUL = 2,
    CPU_AESNI = 4,
    CPU_GFNI = 8,
    CPU_VAES = 16,
    CPU_VPCLMUL = 32
};

static inline unsigned cpu_features(void)
{
    unsigned a, b, c, d, low, high, found = 0;

    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 27)) || !(c & (1u << 28)))
        return 0; /* no XGETBV, or no AVX */
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 6) != 6)
        return 0; /* XMM and YMM are not both saved across a switch */
    found |= c & (1u << 1) ? CPU_PCLMUL : 0;
    found |= c & (1u << 25) ? CPU_AESNI : 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return found;
    found |= b & (1u << 5) ? CPU_AVX2 : 0;
    found |= c & (1u << 8) ? CPU_GFNI : 0;
    found |= c & (1u << 9) ? CPU_VAES : 0;
    found |= c & (1u << 10) ? CPU_VPCLMUL : 0;
    return found;
}

#endif
