/* Heads that share keys read them once. A softmax goes along in pieces of TOKENS, each corrected
 * for the greatest score so far, so that no room grows with the length. */
#include "attention.h"

#if defined(__x86_64__)

#include <math.h>

#include "simd.h"

#define TOKENS 64
#define TOGETHER 4

static long slot_of(const struct attention *a, const int32_t *table, long position) {
    return table[position / a->block_tokens] * a->block_tokens + position % a->block_tokens;
}

TARGET static void store8(uint16_t *to, __m256 value) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

TARGET void attention_keep(const struct attention *a, float *qkv, const float *bias,
                           const float *cosines, const float *sines, const int32_t *table,
                           long position) {
    long half = a->dim / 2, turned = a->heads + a->kv_heads, width = a->kv_heads * a->dim;
    for (long i = 0; bias && i < (turned + a->kv_heads) * a->dim; i += 8) {
        __m256 sum = _mm256_add_ps(_mm256_loadu_ps(qkv + i), _mm256_loadu_ps(bias + i));
        _mm256_storeu_ps(qkv + i, sum);
    }
    for (long head = 0; head < turned; head++)
        for (long i = 0; i < half; i += 8) {
            float *low = qkv + head * a->dim + i, *high = low + half;
            __m256 cosine = _mm256_loadu_ps(cosines + i), sine = _mm256_loadu_ps(sines + i);
            __m256 first = _mm256_loadu_ps(low), second = _mm256_loadu_ps(high);
            __m256 across = _mm256_mul_ps(second, sine);
            _mm256_storeu_ps(low, _mm256_fmsub_ps(first, cosine, across));
            across = _mm256_mul_ps(first, sine);
            _mm256_storeu_ps(high, _mm256_fmadd_ps(second, cosine, across));
        }
    long slot = slot_of(a, table, position);
    for (long i = 0; i < width; i += 8) {
        store8(a->keys + slot * width + i, _mm256_loadu_ps(qkv + a->heads * a->dim + i));
        store8(a->values + slot * width + i, _mm256_loadu_ps(qkv + turned * a->dim + i));
    }
}

/* What TOGETHER heads know so far; lane g is head g, and lanes without a head count for nothing. */
struct state {
    float query[TOGETHER][DIM_MAX], out[TOGETHER][DIM_MAX];
    float scores[TOKENS * TOGETHER];
    const uint16_t *at[TOKENS];
};

/* Scores of `count` tokens, and the greatest of them and `most`. */
TARGET INLINE __m128 scores(struct state *s, long dim, int count, int heads, __m128 most) {
    for (int t = 0; t < count; t++) {
        __m256 sum[TOGETHER];
        for (int g = 0; g < TOGETHER; g++)
            sum[g] = _mm256_setzero_ps();
        for (long d = 0; d < dim; d += 8) {
            __m256 key = halves8(s->at[t] + d);
            for (int g = 0; g < heads; g++)
                sum[g] = _mm256_fmadd_ps(key, _mm256_loadu_ps(s->query[g] + d), sum[g]);
        }
        __m128 found = sums8(sum[0], sum[1], sum[2], sum[3]);
        _mm_storeu_ps(s->scores + t * TOGETHER, found);
        most = _mm_max_ps(found, most);
    }
    return most;
}

/* Scores become weights; their sums. */
TARGET INLINE __m128 weights(struct state *s, int count, __m128 most) {
    __m256 sum = _mm256_setzero_ps(), both = _mm256_set_m128(most, most);
    for (int t = 0; t < count; t += 2) {
        float *at = s->scores + t * TOGETHER;
        __m256 weight = exp8(_mm256_sub_ps(_mm256_loadu_ps(at), both));
        if (t + 1 == count)
            weight = _mm256_insertf128_ps(weight, _mm_setzero_ps(), 1);
        _mm256_storeu_ps(at, weight);
        sum = _mm256_add_ps(sum, weight);
    }
    return _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
}

/* out = out * its correction + weights times values, 16 numbers of each head at a time. */
TARGET INLINE void gather(struct state *s, long dim, int count, int heads,
                          const float *correction) {
    for (long d = 0; d < dim; d += 16) {
        __m256 sum[2 * TOGETHER];
        for (int i = 0; i < 2 * heads; i++)
            sum[i] = _mm256_mul_ps(_mm256_loadu_ps(s->out[i / 2] + d + i % 2 * 8),
                                   _mm256_broadcast_ss(correction + i / 2));
        for (int t = 0; t < count; t++) {
            __m256 value[2] = {halves8(s->at[t] + d), halves8(s->at[t] + d + 8)};
            for (int i = 0; i < 2 * heads; i++)
                sum[i] = _mm256_fmadd_ps(
                    value[i % 2], _mm256_broadcast_ss(s->scores + t * TOGETHER + i / 2), sum[i]);
        }
        for (int i = 0; i < 2 * heads; i++)
            _mm256_storeu_ps(s->out[i / 2] + d + i % 2 * 8, sum[i]);
    }
}

/* `heads` query heads of one KV head, a constant where this is called. */
TARGET INLINE void some_heads(const struct attention *a, int heads, const float *query,
                              const int32_t *table, long position, long kv_head, float *out) {
    struct state s;
    long dim = a->dim, width = a->kv_heads * dim;
    __m256 scale = _mm256_set1_ps(1.0f / sqrtf((float)dim));
    for (int g = 0; g < heads; g++)
        for (long d = 0; d < dim; d += 8) {
            _mm256_storeu_ps(s.query[g] + d,
                             _mm256_mul_ps(_mm256_loadu_ps(query + g * dim + d), scale));
            _mm256_storeu_ps(s.out[g] + d, _mm256_setzero_ps());
        }
    __m128 most = _mm_set1_ps(-1e30f), sum = _mm_setzero_ps();
    for (long first = 0; first <= position; first += TOKENS) {
        int count = position + 1 - first < TOKENS ? (int)(position + 1 - first) : TOKENS;
        for (int t = 0; t < count; t++)
            s.at[t] = a->keys + slot_of(a, table, first + t) * width + kv_head * dim;
        __m128 before = most;
        most = scores(&s, dim, count, heads, most);
        __m128 change = _mm_sub_ps(before, most);
        float correction[8];
        _mm256_storeu_ps(correction, exp8(_mm256_set_m128(change, change)));
        __m128 now = weights(&s, count, most);
        sum = _mm_add_ps(_mm_mul_ps(sum, _mm_loadu_ps(correction)), now);
        for (int t = 0; t < count; t++)
            s.at[t] = s.at[t] - a->keys + a->values;
        gather(&s, dim, count, heads, correction);
    }
    float total[TOGETHER];
    _mm_storeu_ps(total, sum);
    for (int g = 0; g < heads; g++)
        for (long d = 0; d < dim; d += 8) {
            __m256 mean = _mm256_div_ps(_mm256_loadu_ps(s.out[g] + d), _mm256_set1_ps(total[g]));
            _mm256_storeu_ps(out + g * dim + d, mean);
        }
}

TARGET void attention_attend(const struct attention *a, const float *qkv, const int32_t *table,
                             long position, long kv_head, float *out) {
    long each = a->heads / a->kv_heads;
    for (long g = 0; g < each; g += TOGETHER) {
        long head = kv_head * each + g;
        const float *query = qkv + head * a->dim;
        float *to = out + head * a->dim;
        switch (each - g) {
        case 1: some_heads(a, 1, query, table, position, kv_head, to); break;
        case 2: some_heads(a, 2, query, table, position, kv_head, to); break;
        case 3: some_heads(a, 3, query, table, position, kv_head, to); break;
        default: some_heads(a, 4, query, table, position, kv_head, to);
        }
    }
}

#endif
