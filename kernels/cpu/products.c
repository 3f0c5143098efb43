/* AVX2, FMA and F16C. A decode step reads every weight once and is bound by that as long as turning
 * codes into floats is cheap: a block of 32 codes is one load, and each 8 of them one widening, one
 * conversion and one multiply-add, shared by all rows of x in a tile. Sums are FP32.
 *
 * Threads are OpenMP's, as torch's are: one pool for both, or two pools would spin against each
 * other (agent/engine/threads.py). */
#include "products.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <math.h>
#include <omp.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE static inline __attribute__((always_inline))
#define BLOCK 32
#define TILE_MAX 8

int products_supported(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
           && __builtin_cpu_supports("f16c");
}

enum kind { HALVES, MINIMA, ZEROS };

static enum kind kind_of(const struct weights *w) {
    return w->halves ? HALVES : w->zeros ? ZEROS : MINIMA;
}

/* The 32 weights of one row from `at` on. `kind` is a constant where this is called. */
TARGET INLINE void unpack(const struct weights *w, enum kind kind, long row, long at,
                          __m256 out[4]) {
    if (kind == HALVES) {
        const uint16_t *from = w->halves + row * w->k + at;
        for (int i = 0; i < 4; i++)
            out[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8 * i)));
        return;
    }
    long groups = (w->k + (1L << w->group_log2) - 1) >> w->group_log2;
    uint32_t meta = w->meta[row * groups + (at >> w->group_log2)];
    __m128 halves = _mm_cvtph_ps(_mm_cvtsi32_si128((int)meta));
    __m256 scale = _mm256_broadcastss_ps(halves);
    __m256 offset = _mm256_broadcastss_ps(_mm_movehdup_ps(halves));
    if (kind == ZEROS) /* (q - z) * s = q * s - z * s; z * s has 15 bits: exact */
        offset = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(offset, scale));
    const uint8_t *from = w->codes + (row * w->k + at) / 2;
    __m128i first = _mm_loadl_epi64((const __m128i *)from);
    __m128i second = _mm_loadl_epi64((const __m128i *)(from + 8));
    /* Widened to 32 bits each: two codes lie in one, and a mask or a shift takes either. */
    __m256i both[2] = {_mm256_cvtepu8_epi32(first), _mm256_cvtepu8_epi32(second)};
    for (int i = 0; i < 2; i++) {
        __m256i low = _mm256_and_si256(both[i], _mm256_set1_epi32(15));
        __m256i high = _mm256_srli_epi32(both[i], 4);
        out[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(low), scale, offset);
        out[2 + i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(high), scale, offset);
    }
}

TARGET INLINE float total(__m256 a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* out[r * M + m] = row `row + r * apart` times row m of x. R and M are constants where this is
 * called: everything is unrolled into registers. */
TARGET INLINE void tile_of(const struct weights *w, enum kind kind, long row, long apart, int R,
                           const float *x, int M, float *out) {
    /* A sum is a chain of multiply-adds, each waiting for the last: few sums take several. */
    const int chains = R * M <= 2 ? 4 : R * M <= 4 ? 2 : 1;
    __m256 acc[TILE_MAX];
    for (int i = 0; i < R * M * chains; i++)
        acc[i] = _mm256_setzero_ps();
    for (long at = 0; at < w->k; at += BLOCK)
        for (int r = 0; r < R; r++) {
            __m256 values[4];
            unpack(w, kind, row + r * apart, at, values);
            for (int m = 0; m < M; m++)
                for (int i = 0; i < 4; i++) {
                    __m256 *sum = &acc[(r * M + m) * chains + i % chains];
                    *sum = _mm256_fmadd_ps(values[i], _mm256_loadu_ps(x + m * w->k + at + 8 * i),
                                           *sum);
                }
        }
    for (int i = 0; i < R * M; i++) {
        __m256 sum = acc[i * chains];
        for (int chain = 1; chain < chains; chain++)
            sum = _mm256_add_ps(sum, acc[i * chains + chain]);
        out[i] = total(sum);
    }
}

TARGET INLINE void tile(const struct weights *w, long row, long apart, int R, const float *x, int M,
                        float *out) {
    switch (kind_of(w)) {
    case HALVES: tile_of(w, HALVES, row, apart, R, x, M, out); break;
    case MINIMA: tile_of(w, MINIMA, row, apart, R, x, M, out); break;
    case ZEROS: tile_of(w, ZEROS, row, apart, R, x, M, out); break;
    }
}

/* Two rows, `apart` from each other, times m rows of x: out[r][m]. */
TARGET static void two_rows(const struct weights *w, long row, long apart, const float *x, long m,
                            float *out) {
    float sums[TILE_MAX];
    long at = 0;
    for (; m - at >= 8; at += 8) {
        tile(w, row, apart, 1, x + at * w->k, 8, out + at);
        tile(w, row + apart, apart, 1, x + at * w->k, 8, out + m + at);
    }
    for (; m - at >= 4; at += 4) {
        tile(w, row, apart, 2, x + at * w->k, 4, sums);
        for (int i = 0; i < 8; i++)
            out[i / 4 * m + at + i % 4] = sums[i];
    }
    for (; m - at >= 2; at += 2) {
        tile(w, row, apart, 2, x + at * w->k, 2, sums);
        for (int i = 0; i < 4; i++)
            out[i / 2 * m + at + i % 2] = sums[i];
    }
    if (at < m) {
        tile(w, row, apart, 2, x + at * w->k, 1, sums);
        out[at] = sums[0];
        out[m + at] = sums[1];
    }
}

#define M_MAX 32

/* The rows from `first` to before `last` times x, m at most M_MAX. */
TARGET static void some_rows(const struct weights *w, const float *x, float *y, long m, long first,
                             long last) {
    float out[4 * M_MAX];
    long row = first;
    if (m == 1)
        for (; row + 4 <= last; row += 4)
            tile(w, row, 1, 4, x, 1, y + row);
    for (; row < last; row += 2) {
        /* An odd last row is computed twice rather than in a loop of its own. */
        long apart = row + 1 < last ? 1 : 0;
        two_rows(w, row, apart, x, m, out);
        for (long i = 0; i < m; i++) {
            y[i * w->rows + row] = out[i];
            y[i * w->rows + row + apart] = out[m + i];
        }
    }
}

/* A thread's share of n, in steps of `step`. */
static void share(long n, long step, long *first, long *last) {
    long parts = (n + step - 1) / step, mine = omp_get_thread_num(), all = omp_get_num_threads();
    *first = parts * mine / all * step;
    *last = parts * (mine + 1) / all * step;
    if (*last > n)
        *last = n;
}

static void linear_part(const struct weights *w, const float *x, float *y, long m) {
    long first, last;
    share(w->rows, 4, &first, &last);
    for (long at = 0; at < m; at += M_MAX)
        some_rows(w, x + at * w->k, y + at * w->rows, m - at < M_MAX ? m - at : M_MAX, first, last);
}

static void gates_part(const struct weights *w, const float *x, float *middle, long m) {
    float out[2 * M_MAX];
    long gates = w->rows / 2, first, last;
    share(gates, 1, &first, &last);
    for (long at = 0; at < m; at += M_MAX) {
        long n = m - at < M_MAX ? m - at : M_MAX;
        for (long f = first; f < last; f++) {
            two_rows(w, f, gates, x + at * w->k, n, out);
            for (long i = 0; i < n; i++)
                middle[(at + i) * gates + f] = out[i] / (1.0f + expf(-out[i])) * out[n + i];
        }
    }
}

void products_linear(const struct weights *w, const float *x, float *y, long m, int threads) {
#pragma omp parallel num_threads(threads)
    linear_part(w, x, y, m);
}

void products_ffn(const struct weights *wide, const struct weights *narrow, const float *x,
                  float *middle, float *y, long m, int threads) {
#pragma omp parallel num_threads(threads)
    {
        gates_part(wide, x, middle, m);
#pragma omp barrier
        linear_part(narrow, middle, y, m);
    }
}

TARGET static void unpack_part(const struct weights *w, float *out) {
    long first, last;
    share(w->rows, 1, &first, &last);
    for (long row = first; row < last; row++)
        for (long at = 0; at < w->k; at += BLOCK) {
            __m256 values[4];
            unpack(w, kind_of(w), row, at, values);
            for (int i = 0; i < 4; i++)
                _mm256_storeu_ps(out + row * w->k + at + 8 * i, values[i]);
        }
}

void products_unpack(const struct weights *w, float *out, int threads) {
#pragma omp parallel num_threads(threads)
    unpack_part(w, out);
}

#else

int products_supported(void) { return 0; }
void products_linear(const struct weights *w, const float *x, float *y, long m, int threads) {
    (void)w, (void)x, (void)y, (void)m, (void)threads;
}
void products_ffn(const struct weights *wide, const struct weights *narrow, const float *x,
                  float *middle, float *y, long m, int threads) {
    (void)wide, (void)narrow, (void)x, (void)middle, (void)y, (void)m, (void)threads;
}
void products_unpack(const struct weights *w, float *out, int threads) {
    (void)w, (void)out, (void)threads;
}

#endif
