/* A step reads every weight once, and is bound by that as long as a weight costs little else.
 *
 * Four bits: 32 codes are one load of 16 bytes, a widening to 16 bits, a mask and a shift; two
 * multiply-add instructions give their products with 32 of x in integers, exactly, and the sum
 * becomes a float once. FP16: one conversion and one FP32 multiply-add for eight. (AVX-512 with
 * VNNI was tried, two rows in a register: no faster where its registers are computed by halves.) */
#include "tiles.h"

#if defined(__x86_64__)

#include "simd.h"

/* Blocks whose scales are unpacked at a time; in eights. */
#define SEGMENT 64
/* Bytes; of 2, 4 and 8 KiB the best. */
#define AHEAD 4096

enum kind { HALVES, MINIMA, ZEROS };

static enum kind kind_of(const struct weights *w) {
    return w->halves ? HALVES : w->zeros ? ZEROS : MINIMA;
}

long tiles_piece(const struct weights *w) {
    long bytes = w->halves ? w->k * 2 : w->k / 2 + (w->k >> w->group_log2) * 4;
    long rows = (32L << 10) / bytes / 12 * 12;
    return rows < 12 ? 12 : rows > 252 ? 252 : rows;
}

void tiles_ready(const struct weights *w, struct rows *rows, const float *x, long m, void *room) {
    if (w->halves)
        *rows = (struct rows){.m = m, .k = w->k, .x = x};
    else
        rows_quantise(rows, x, m, w->k, room);
}

/* Ask for the line that comes AHEAD bytes later: there are too many short streams for the CPU to
 * see. Behind the last row nothing is there to be read, and asking for it does no harm. */
TARGET INLINE void fetch(const void *line) {
    _mm_prefetch((const char *)line + AHEAD, _MM_HINT_T0);
}

/* Scales and offsets (what a code of 0 is) of eight blocks of a row, of which `count` are there. */
TARGET INLINE void scales8(const struct weights *w, enum kind kind, long row, long block,
                           long count, __m256 *scale, __m256 *offset) {
    int shift = w->group_log2 - 5;
    long groups = (w->k + (1L << w->group_log2) - 1) >> w->group_log2;
    const uint32_t *meta = w->meta + row * groups;
    __m256i both;
    if (!shift) {
        __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        __m256i there = _mm256_cmpgt_epi32(_mm256_set1_epi32(count > 8 ? 8 : (int)count), lane);
        both = _mm256_maskload_epi32((const int *)(meta + block), there);
    } else {
        uint32_t found[8];
        for (long i = 0; i < 8; i++)
            found[i] = i < count ? meta[(block + i) >> shift] : 0;
        both = _mm256_loadu_si256((const __m256i *)found);
    }
    __m256i low = _mm256_and_si256(both, _mm256_set1_epi32(0xffff));
    __m256i packed = _mm256_packus_epi32(low, _mm256_srli_epi32(both, 16));
    packed = _mm256_permute4x64_epi64(packed, 0xD8);
    *scale = _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
    *offset = _mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1));
    if (kind == ZEROS) /* (q - z) * s = q * s - z * s; z * s has 15 bits: exact */
        *offset = _mm256_fnmadd_ps(*offset, *scale, _mm256_setzero_ps());
}

/* Sums of R rows of w times M rows of x, eight parts each, for codes: acc[m * R + r]. R and M are
 * constants where this is called, and loops over them are never nested: so the compiler unrolls
 * them early enough to keep the sums in registers. */
TARGET INLINE void codes_tile(const struct weights *w, enum kind kind, long row, int R,
                              const struct rows *x, long first, int M, __m256 *acc) {
    float scales[8 * SEGMENT];
    long blocks = w->k / BLOCK;
    const uint8_t *codes = w->codes + row * (w->k / 2);
    const int16_t *q = x->q + first * x->k;
    const __m256i low_bits = _mm256_set1_epi16(15);
    for (long start = 0; start < blocks; start += SEGMENT) {
        long count = blocks - start < SEGMENT ? blocks - start : SEGMENT;
        for (long b = 0; b < count; b += 8) {
            __m256 scale[4], offset[4];
            for (int r = 0; r < R; r++)
                scales8(w, kind, row + r, start + b, count - b, &scale[r], &offset[r]);
            for (int i = 0; i < R * M; i++) {
                long at = (first + i / R) * x->blocks + start + b;
                acc[i] = _mm256_fmadd_ps(offset[i % R], _mm256_loadu_ps(x->sums + at), acc[i]);
                __m256 both = _mm256_mul_ps(scale[i % R], _mm256_loadu_ps(x->scale + at));
                _mm256_storeu_ps(scales + i * SEGMENT + b, both);
            }
        }
        const uint8_t *from = codes + start * (BLOCK / 2);
        const int16_t *of_x = q + start * BLOCK;
        for (long b = 0; b < count; b++, from += BLOCK / 2, of_x += BLOCK) {
            __m256i low[4], high[4];
            for (int r = 0; r < R; r++) {
                const __m128i *at = (const __m128i *)(from + r * (w->k / 2));
                low[r] = _mm256_cvtepu8_epi16(_mm_loadu_si128(at));
                high[r] = _mm256_srli_epi16(low[r], 4);
                low[r] = _mm256_and_si256(low[r], low_bits);
            }
            for (int i = 0; i < R * M; i++) {
                const __m256i *at = (const __m256i *)(of_x + i / R * x->k);
                __m256i sum = _mm256_madd_epi16(low[i % R], _mm256_loadu_si256(at));
                __m256i rest = _mm256_madd_epi16(high[i % R], _mm256_loadu_si256(at + 1));
                __m256 floats = _mm256_cvtepi32_ps(_mm256_add_epi32(sum, rest));
                __m256 scale = _mm256_broadcast_ss(scales + i * SEGMENT + b);
                acc[i] = _mm256_fmadd_ps(floats, scale, acc[i]);
            }
        }
    }
}

/* The same for FP16. */
TARGET INLINE void halves_tile(const struct weights *w, long row, int R, const struct rows *x,
                               long first, int M, __m256 *acc) {
    const uint16_t *halves = w->halves + row * w->k;
    const float *from = x->x + first * x->k;
    for (long at = 0; at < w->k; at += 8) {
        __m256 values[4];
        if (!first) /* a line of each of up to four rows, in turn */
            fetch(halves + at / 8 % R * w->k + at);
        for (int r = 0; r < R; r++)
            values[r] = halves8(halves + r * w->k + at);
        for (int i = 0; i < R * M; i++)
            acc[i] = _mm256_fmadd_ps(values[i % R], _mm256_loadu_ps(from + i / R * x->k + at),
                                     acc[i]);
    }
}

TARGET INLINE void tile(const struct weights *w, enum kind kind, long row, int R,
                        const struct rows *x, long first, int M, float *y, long stride, int add) {
    __m256 acc[12];
    for (int i = 0; i < R * M; i++)
        acc[i] = _mm256_setzero_ps();
    if (kind == HALVES)
        halves_tile(w, row, R, x, first, M, acc);
    else
        codes_tile(w, kind, row, R, x, first, M, acc);
    for (int i = 0; i < R * M; i++) {
        float *at = y + (first + i / R) * stride + i % R;
        *at = sum8(acc[i]) + (add ? *at : 0.0f);
    }
}

/* R rows of w times all rows of x, at most M at a time. */
TARGET INLINE void strip(const struct weights *w, enum kind kind, long row, int R,
                         const struct rows *x, int M, float *y, long stride, int add) {
    long m = 0;
    if (M >= 4)
        for (; x->m - m >= 4; m += 4)
            tile(w, kind, row, R, x, m, 4, y, stride, add);
    for (; x->m - m >= 2; m += 2)
        tile(w, kind, row, R, x, m, 2, y, stride, add);
    if (m < x->m)
        tile(w, kind, row, R, x, m, 1, y, stride, add);
}

/* For R rows of codes, which are too short to do it on the way. */
TARGET INLINE void fetch_codes(const struct weights *w, long row, int R) {
    long groups = (w->k + (1L << w->group_log2) - 1) >> w->group_log2;
    const char *codes = (const char *)w->codes + row * (w->k / 2);
    const char *meta = (const char *)w->meta + row * groups * 4;
    for (long at = 0; at < R * w->k / 2; at += 64)
        fetch(codes + at);
    for (long at = 0; at < R * groups * 4; at += 64)
        fetch(meta + at);
}

TARGET INLINE void product(const struct weights *w, enum kind kind, const struct rows *x, long row,
                           long last, float *y, long stride, int add) {
    if (x->m < 4)
        for (; last - row >= 4; row += 4, y += 4) {
            if (kind != HALVES)
                fetch_codes(w, row, 4);
            strip(w, kind, row, 4, x, 2, y, stride, add);
        }
    if (kind == HALVES) /* twelve sums: enough to hide how long one takes */
        for (; last - row >= 3; row += 3, y += 3)
            strip(w, kind, row, 3, x, 4, y, stride, add);
    for (; last - row >= 2; row += 2, y += 2) {
        if (kind != HALVES)
            fetch_codes(w, row, 2);
        strip(w, kind, row, 2, x, 4, y, stride, add);
    }
    if (row < last)
        strip(w, kind, row, 1, x, 4, y, stride, add);
}

TARGET void tiles_product(const struct weights *w, const struct rows *x, long first, long last,
                          float *y, long stride, int add) {
    switch (kind_of(w)) {
    case HALVES: product(w, HALVES, x, first, last, y, stride, add); break;
    case MINIMA: product(w, MINIMA, x, first, last, y, stride, add); break;
    case ZEROS: product(w, ZEROS, x, first, last, y, stride, add); break;
    }
}

TARGET void tiles_gates(const struct weights *w, const struct rows *x, long first, long last,
                        float *middle, long stride) {
    float gate[M_MAX * GATES_MAX], up[M_MAX * GATES_MAX];
    long gates = w->rows / 2, count = last - first;
    tiles_product(w, x, first, last, gate, GATES_MAX, 0);
    tiles_product(w, x, gates + first, gates + last, up, GATES_MAX, 0);
    for (long i = 0; i < x->m; i++)
        for (long f = 0; f < count; f += 8) {
            /* Behind the last gate there is room, and what is computed there goes nowhere. */
            __m256 g = _mm256_loadu_ps(gate + i * GATES_MAX + f);
            __m256 u = _mm256_loadu_ps(up + i * GATES_MAX + f);
            __m256 below = exp8(_mm256_xor_ps(g, _mm256_set1_ps(-0.0f)));
            below = _mm256_add_ps(below, _mm256_set1_ps(1.0f));
            float out[8];
            _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_div_ps(g, below), u));
            for (long lane = 0; lane < 8 && f + lane < count; lane++)
                middle[i * stride + f + lane] = out[lane];
        }
}

TARGET void tiles_unpack(const struct weights *w, long first, long last, float *out) {
    enum kind kind = kind_of(w);
    long blocks = w->k / BLOCK;
    for (long row = first; row < last; row++)
        for (long b = 0; b < blocks; b++, out += BLOCK) {
            if (kind == HALVES) {
                for (int i = 0; i < BLOCK; i += 8)
                    _mm256_storeu_ps(out + i, halves8(w->halves + row * w->k + b * BLOCK + i));
                continue;
            }
            float scales[8], offsets[8];
            __m256 scale, offset;
            scales8(w, kind, row, b, 1, &scale, &offset);
            _mm256_storeu_ps(scales, scale);
            _mm256_storeu_ps(offsets, offset);
            scale = _mm256_set1_ps(scales[0]);
            offset = _mm256_set1_ps(offsets[0]);
            const uint8_t *from = w->codes + (row * w->k + b * BLOCK) / 2;
            for (int i = 0; i < 2; i++) {
                const __m128i *at = (const __m128i *)(from + 8 * i);
                __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64(at));
                __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(15)));
                __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(both, 4));
                _mm256_storeu_ps(out + 8 * i, _mm256_fmadd_ps(low, scale, offset));
                _mm256_storeu_ps(out + 16 + 8 * i, _mm256_fmadd_ps(high, scale, offset));
            }
        }
}

#endif
