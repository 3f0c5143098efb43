// Four-bit weights in our own layout, and the one rule that turns them into FP16.
//
//   codes [rows, row_words] u32   8 codes a word, k ascending; nibble i holds k = ORDER[i] of its 8
//                                 with ORDER = 0 2 4 6 1 3 5 7. So the nibbles j and j + 4, which
//                                 one mask takes together, are the neighbours 2j and 2j + 1.
//                                 row_words is a multiple of 4: rows start at 16 bytes.
//   meta  [groups, rows]    u32   FP16 scale (low half), FP16 offset (high half) of a group of k.
//
// Offset is the zero point z (0..15) or, with `minima`, the least value m:
//
//   w = fp16((q - z) * s)         or        w = fp16(q * s + m)        (one rounding)
//
// Exact on the way: a nibble OR'ed into 0x6400 is the FP16 number 1024 + q; less 1024 + z it is
// q - z. The first form is the second with m = -0.0, which changes no bit of a product, so both are
// one fused multiply-add. Every kernel multiplies by these FP16 values and no others: which kernel
// ran is invisible in the model.
#pragma once

#include "device.h"

#define INT4_MAGIC 0x64006400u

struct Int4Scale {
    u32 base, scale, add;  // halves twice: 1024 + z, s, m
};

DEVICE Int4Scale int4_scale(u32 meta, int minima) {
    Int4Scale s;
    u32 offset = h2_both((u16)(meta >> 16));
    s.scale = h2_both((u16)meta);
    s.base = minima ? INT4_MAGIC : h2_add(INT4_MAGIC, offset);
    s.add = minima ? offset : 0x80008000u;
    return s;
}

// Eight codes of a word into four half2, k ascending.
DEVICE void int4_unpack(u32 word, const Int4Scale &s, u32 out[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 codes = (word >> 4 * j & 0x000f000fu) | INT4_MAGIC;
        out[j] = h2_fma(h2_sub(codes, s.base), s.scale, s.add);
    }
}
