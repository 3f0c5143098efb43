/* Sixteen bits are more than the weights have: what is lost is some 1e-5 of |x||w|, and products of
 * integers need no conversion of each weight (tiles.c). */
#include "rows.h"

#if defined(__x86_64__)

#include <math.h>

#include "simd.h"

static long padded(long k) { return (k / BLOCK + 7) / 8 * 8; }

size_t rows_room(long k) {
    return (size_t)M_MAX * (k * sizeof(int16_t) + padded(k) * 2 * sizeof(float)) + 64;
}

TARGET static void quantise(const float *x, int16_t *q, float *scale, float *sum) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 at[4], most = _mm256_setzero_ps(), all = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++) {
        at[i] = _mm256_loadu_ps(x + 8 * i);
        most = _mm256_max_ps(most, _mm256_andnot_ps(sign, at[i]));
        all = _mm256_add_ps(all, at[i]);
    }
    float greatest = greatest8(most);
    /* Below, the quotient would overflow; what so small a block adds is lost anyway. */
    __m256 factor = _mm256_set1_ps(greatest > 1e-30f ? 32767.0f / greatest : 0.0f);
    *scale = greatest / 32767.0f;
    __m256i codes = _mm256_setzero_si256();
    for (int i = 0; i < 4; i += 2) {
        __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(at[i], factor));
        __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(at[i + 1], factor));
        __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
        _mm256_storeu_si256((__m256i *)(q + 8 * i), both);
        codes = _mm256_add_epi32(codes, _mm256_madd_epi16(both, _mm256_set1_epi16(1)));
    }
    /* The sum of what x was rounded to: then what is computed is a product of exactly that with the
     * weights, also where scale and offset of a group nearly cancel. NaN and infinity stay. */
    float plain = sum8(all);
    *sum = *scale * sum8(_mm256_cvtepi32_ps(codes)) + (plain - plain);
}

void rows_quantise(struct rows *rows, const float *x, long m, long k, void *room) {
    long blocks = padded(k);
    *rows = (struct rows){.m = m, .k = k, .blocks = blocks, .x = x};
    rows->scale = (float *)room;
    rows->sums = rows->scale + M_MAX * blocks;
    rows->q = (int16_t *)(rows->sums + M_MAX * blocks);
    for (long i = 0; i < m; i++) {
        float *scale = rows->scale + i * blocks, *sums = rows->sums + i * blocks;
        for (long b = 0; b < blocks; b++)
            if (b < k / BLOCK)
                quantise(x + i * k + b * BLOCK, rows->q + i * k + b * BLOCK, scale + b, sums + b);
            else
                scale[b] = sums[b] = 0;
    }
}

TARGET void rows_norm(const float *x, const float *weight, float *out, long m, long k, float eps) {
    for (long i = 0; i < m; i++, x += k, out += k) {
        __m256 squares[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (long at = 0; at < k; at += 8) {
            __m256 value = _mm256_loadu_ps(x + at);
            squares[at / 8 % 2] = _mm256_fmadd_ps(value, value, squares[at / 8 % 2]);
        }
        float mean = sum8(_mm256_add_ps(squares[0], squares[1])) / (float)k;
        __m256 factor = _mm256_set1_ps(1.0f / sqrtf(mean + eps));
        for (long at = 0; at < k; at += 8) {
            __m256 value = _mm256_mul_ps(_mm256_loadu_ps(x + at), factor);
            _mm256_storeu_ps(out + at, _mm256_mul_ps(value, _mm256_loadu_ps(weight + at)));
        }
    }
}

#endif
