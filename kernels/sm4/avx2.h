/* SM4 on 256-bit registers: a template for the tiers that differ only in the S-box.
 *
 * A group is 8 blocks in 4 registers, one register per word of the state. Up to 9 groups go through
 * the rounds side by side, since a round is a chain of dependent steps: with few groups the CPU
 * waits. That is more state than there are registers, and the loads and stores cost less than the
 * waiting. In long messages a pass also hashes 64 blocks of ciphertext, two per round: the
 * multiplier is idle otherwise.
 *
 * The state goes through the rounds under the inner affine map P of the S-box (derive.py). Included
 * after blocks_x86.h and after these functions of a tier, each on eight words:
 *     sm4_enter(x): P(x);  sm4_leave: back;  sm4_substitute(x): S(x)
 *     sm4_mix(P(x) + p, P(w)): P(w + L(S(x)))
 * with L and S of GB/T 32907, 6.2; p is SM4_CONSTANT_IN.
 */
#include "ghash.h"

enum { GROUP = 8 * SM4_BLOCK, PASS = 8 * GROUP, PASS_MOST = 9 * GROUP };

/* `statement` for each group g < groups; groups is a constant once inlined. */
#define EACH_GROUP(statement)                                                                      \
    do {                                                                                           \
        ONE_GROUP(0, statement)                                                                    \
        ONE_GROUP(1, statement)                                                                    \
        ONE_GROUP(2, statement)                                                                    \
        ONE_GROUP(3, statement)                                                                    \
        ONE_GROUP(4, statement)                                                                    \
        ONE_GROUP(5, statement)                                                                    \
        ONE_GROUP(6, statement)                                                                    \
        ONE_GROUP(7, statement)                                                                    \
        ONE_GROUP(8, statement)                                                                    \
    } while (0)
#define ONE_GROUP(number, statement)                                                               \
    if (groups > number) {                                                                         \
        enum { g = number };                                                                       \
        statement;                                                                                 \
    }

TIER_INLINE int round_key(const uint8_t *keys, int round)
{
    int word;

    memcpy(&word, keys + (size_t)round * sizeof word, sizeof word);
    return word;
}

/* Two blocks of the 64 that are hashed beside the rounds, in two batches of 32. */
TIER_INLINE void hash_beside(ghash *hash, const sm4_key *key, const uint8_t *ciphertext, int round)
{
    const size_t at = (size_t)round * 2 * SM4_BLOCK;
    block carried = round % 16 == 0 ? hash->carried : block_zero();

    sum_add_two(&hash->products, carried, ciphertext + at,
                key->powers + at % (GHASH_BATCH * SM4_BLOCK));
    if (round % 16 == 15)
        ghash_settle(hash);
}

/* The newest word, d, joins last: the chain of rounds is through it. */
#define ROUND(a, b, c, d, round)                                                                   \
    do {                                                                                           \
        __m256i k = _mm256_set1_epi32(round_key(key->tier_keys, round));                           \
                                                                                                   \
        EACH_GROUP(x[g][a] = sm4_mix(                                                              \
                       _mm256_xor_si256(_mm256_xor_si256(_mm256_xor_si256(x[g][b], x[g][c]), k),   \
                                        x[g][d]),                                                  \
                       x[g][a]));                                                                  \
        if (hash != NULL)                                                                          \
            hash_beside(hash, key, ciphertext, round);                                             \
    } while (0)

/* The 32 rounds; hashes PASS bytes of ciphertext beside them unless `hash` is NULL. */
TIER_INLINE void all_rounds(const sm4_key *key, __m256i x[][4], int groups, ghash *hash,
                            const uint8_t *ciphertext)
{
    for (int i = 0; i < SM4_ROUNDS; i += 4) {
        ROUND(0, 1, 2, 3, i);
        ROUND(1, 2, 3, 0, i + 1);
        ROUND(2, 3, 0, 1, i + 2);
        ROUND(3, 0, 1, 2, i + 3);
    }
}

/* The round keys as the rounds want them: P(key) + p. */
TIER_INLINE void own_keys(sm4_key *key)
{
    __m256i *to = (__m256i *)key->tier_keys;

    for (int i = 0; i < SM4_ROUNDS / 8; i++) {
        __m256i plain = _mm256_loadu_si256((const __m256i *)(key->round_keys + 8 * i));

        _mm256_store_si256(to + i, _mm256_xor_si256(sm4_enter(plain),
                                                    _mm256_set1_epi8(SM4_CONSTANT_IN)));
    }
}

TIER_INLINE __m256i turned(__m256i words, int bits)
{
    return _mm256_or_si256(_mm256_slli_epi32(words, bits), _mm256_srli_epi32(words, 32 - bits));
}

/* From words to blocks: the state's words come out in reverse order (GB/T 32907, 7.1), big-endian.
 * The low lanes hold the even blocks, the high lanes the odd ones. */
TIER_INLINE void store_group(uint8_t *out, const __m256i x[4])
{
    const __m256i swap = _mm256_broadcastsi128_si256(
        _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
    __m256i x0 = sm4_leave(x[0]), x1 = sm4_leave(x[1]), x2 = sm4_leave(x[2]), x3 = sm4_leave(x[3]);
    __m256i low32 = _mm256_unpacklo_epi32(x3, x2), low10 = _mm256_unpacklo_epi32(x1, x0);
    __m256i high32 = _mm256_unpackhi_epi32(x3, x2), high10 = _mm256_unpackhi_epi32(x1, x0);
    __m256i *to = (__m256i *)out;

    _mm256_store_si256(to, _mm256_shuffle_epi8(_mm256_unpacklo_epi64(low32, low10), swap));
    _mm256_store_si256(to + 1, _mm256_shuffle_epi8(_mm256_unpackhi_epi64(low32, low10), swap));
    _mm256_store_si256(to + 2, _mm256_shuffle_epi8(_mm256_unpacklo_epi64(high32, high10), swap));
    _mm256_store_si256(to + 3, _mm256_shuffle_epi8(_mm256_unpackhi_epi64(high32, high10), swap));
}

/* `groups` groups of key stream: `blocks` blocks from `counter` on, counter 1 in every other. */
TIER_INLINE void pass(const sm4_key *key, const uint32_t nonce[3], uint32_t counter, size_t blocks,
                      uint8_t *stream, int groups, ghash *hash, const uint8_t *ciphertext)
{
    const __m256i steps = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7), one = _mm256_set1_epi32(1);
    const __m256i last = _mm256_set1_epi32((int)blocks - 1);
    const __m256i first = _mm256_add_epi32(_mm256_set1_epi32((int)counter), steps);
    __m256i x[PASS_MOST / GROUP][4];
    __m256i x0 = sm4_enter(_mm256_set1_epi32((int)nonce[0]));
    __m256i x1 = sm4_enter(_mm256_set1_epi32((int)nonce[1]));
    __m256i x2 = sm4_enter(_mm256_set1_epi32((int)nonce[2]));

    EACH_GROUP(const __m256i before = _mm256_set1_epi32(8 * g); x[g][0] = x0; x[g][1] = x1;
               x[g][2] = x2; x[g][3] = sm4_enter(_mm256_blendv_epi8(
                                 _mm256_add_epi32(first, before), one,
                                 _mm256_cmpgt_epi32(_mm256_add_epi32(steps, before), last))));
    all_rounds(key, x, groups, hash, ciphertext);
    EACH_GROUP(store_group(stream + g * GROUP, x[g]));
}

/* One body each, so that a short message runs no wider than it needs. */
#define STREAM(groups)                                                                             \
    TIER_CODE void stream_##groups(const sm4_key *key, const uint32_t nonce[3], uint32_t counter,  \
                                   size_t blocks, uint8_t *stream)                                 \
    {                                                                                              \
        pass(key, nonce, counter, blocks, stream, groups, NULL, NULL);                             \
    }
#define STREAM_AND_HASH(groups)                                                                    \
    TIER_CODE void stream_and_hash_##groups(const sm4_key *key, const uint32_t nonce[3],           \
                                            uint32_t counter, size_t blocks, uint8_t *stream,      \
                                            ghash *hash, const uint8_t *ciphertext)                \
    {                                                                                              \
        ghash beside = *hash; /* a copy that can live in registers */                              \
                                                                                                   \
        pass(key, nonce, counter, blocks, stream, groups, &beside, ciphertext);                    \
        *hash = beside;                                                                            \
    }
STREAM(1)
STREAM(2)
STREAM(3)
STREAM(4)
STREAM(5)
STREAM(6)
STREAM(7)
STREAM(8)
STREAM(9)
STREAM_AND_HASH(8)
STREAM_AND_HASH(9)

TIER_INLINE void gcm_stream(const sm4_key *key, const uint32_t nonce[3], uint32_t counter,
                            size_t blocks, size_t all, uint8_t *stream)
{
    switch ((all + 7) / 8) {
    case 1: stream_1(key, nonce, counter, blocks, stream); break;
    case 2: stream_2(key, nonce, counter, blocks, stream); break;
    case 3: stream_3(key, nonce, counter, blocks, stream); break;
    case 4: stream_4(key, nonce, counter, blocks, stream); break;
    case 5: stream_5(key, nonce, counter, blocks, stream); break;
    case 6: stream_6(key, nonce, counter, blocks, stream); break;
    case 7: stream_7(key, nonce, counter, blocks, stream); break;
    case 8: stream_8(key, nonce, counter, blocks, stream); break;
    default: stream_9(key, nonce, counter, blocks, stream); break;
    }
}

TIER_INLINE void gcm_stream_and_hash(const sm4_key *key, const uint32_t nonce[3], uint32_t counter,
                                     size_t blocks, size_t all, uint8_t *stream, ghash *hash,
                                     const uint8_t *ciphertext)
{
    if ((all + 7) / 8 == 8)
        stream_and_hash_8(key, nonce, counter, blocks, stream, hash, ciphertext);
    else
        stream_and_hash_9(key, nonce, counter, blocks, stream, hash, ciphertext);
}

#include "gcm.h"

/* sm4_expand_key (GB/T 32907, 7.3) on vectors of eight equal words. */
TIER_CODE void expand(sm4_key *key, const uint8_t *raw)
{
    static const uint32_t fk[4] = {0xA3B1BAC6, 0x56AA3350, 0x677D9197, 0xB27022DC};
    const __m256i zero = _mm256_setzero_si256();
    _Alignas(32) uint8_t h[GROUP];
    __m256i k[4], x[1][4] = {{zero, zero, zero, zero}};

    for (int i = 0; i < 4; i++)
        k[i] = _mm256_set1_epi32((int)(gcm_word(raw + 4 * i) ^ fk[i]));
    for (unsigned i = 0; i < SM4_ROUNDS; i++) {
        /* CK: byte j of word i is 7 * (4 * i + j), the most significant first. */
        uint32_t ck = (28 * i & 255) << 24 | ((28 * i + 7) & 255) << 16 |
                      ((28 * i + 14) & 255) << 8 | ((28 * i + 21) & 255);
        __m256i t = sm4_substitute(
            _mm256_xor_si256(_mm256_xor_si256(k[(i + 1) % 4], k[(i + 2) % 4]),
                             _mm256_xor_si256(k[(i + 3) % 4], _mm256_set1_epi32((int)ck))));

        t = _mm256_xor_si256(t, _mm256_xor_si256(turned(t, 13), turned(t, 23)));
        k[i % 4] = _mm256_xor_si256(k[i % 4], t);
        key->round_keys[i] = (uint32_t)_mm256_cvtsi256_si32(k[i % 4]);
    }
    own_keys(key);
    all_rounds(key, x, 1, NULL, NULL);
    store_group(h, x[0]);
    memcpy(key->h, h, SM4_BLOCK);
    sm4_wipe(h, sizeof h);
}
