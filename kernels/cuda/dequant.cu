// Four bits -> FP16, for what is used often enough to be unpacked first (a long prompt) and for
// import. One block a row; a thread turns one word into one 16-byte store, so a warp reads 128 and
// writes 512 bytes in one piece.
#include "int4.h"

// out: FP16 [rows, k]. group_log2: 5, 6 or 7. Any k; grid.x = rows.
KERNEL BOUNDS(256, 4) dequant_int4(const u32 *codes, const u32 *meta, u16 *out, int rows, int k,
                                   int row_words, int group_log2, int minima) {
    int row = blockIdx.x;
    const u32 *line = codes + (u64)row * row_words;
    u16 *to = out + (u64)row * k;
    int whole = k % 8 ? 0 : k / 8;  // words stored as 16 bytes: rows are aligned
#pragma unroll 4
    for (int word = threadIdx.x; word < (k + 7) / 8; word += blockDim.x) {
        u32 group = (u32)word * 8 >> group_log2;
        u32 w[4];
        int4_unpack(line[word], int4_scale(meta[(u64)group * rows + row], minima), w);
        if (word < whole) {
            *(u32x4 *)(to + word * 8) = u32x4{w[0], w[1], w[2], w[3]};
        } else {
            for (int i = 0; i < 8 && word * 8 + i < k; i++)
                to[word * 8 + i] = (u16)(w[i / 2] >> 16 * (i % 2));
        }
    }
}

EXPORT(dequant_int4)
