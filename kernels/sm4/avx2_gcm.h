/* SM4-GCM on 256-bit registers: a template for the tiers that differ only in the S-box.
 *
 * A group is 8 blocks in 4 registers, one register per word of the state; up to 5 groups go through
 * the rounds side by side, since one round of one group is a long chain of dependent steps. The key
 * stream starts at counter 1, so its first block is the one that masks the tag (SP 800-38D, 7.1).
 * In long messages a pass of 4 groups also hashes 32 blocks of ciphertext, one per round: the
 * multiplier is idle otherwise.
 *
 * The state goes through the rounds under the inner affine map P of the S-box (derive.py). Before
 * including this, a tier defines SM4_TARGET, its instruction sets, and on eight words each
 *     sm4_enter(x): P(x);  sm4_leave: back;  sm4_mix(P(x) + p): P(L(S(x)));  sm4_substitute(x): S(x)
 * with L and S of GB/T 32907, 6.2; p is SM4_CONSTANT_IN. Its entries call what is named for them here.
 */
#include "ghash_clmul.h"

#define GCM_INLINE static inline __attribute__((always_inline, target(SM4_TARGET)))

enum {
    GROUP = 8 * SM4_BLOCK,
    PASS = 4 * GROUP,       /* a pass with a hash beside it */
    PASS_MOST = 5 * GROUP,  /* the widest pass: spares a pass for one last block */
    BULK = 2 * PASS         /* from here on hashing beside the cipher pays */
};

/* `statement` for each group g < groups; groups is a constant once inlined. */
#define GCM_EACH(statement)                                                                        \
    do {                                                                                           \
        { enum { g = 0 }; statement; }                                                             \
        if (groups > 1) { enum { g = 1 }; statement; }                                             \
        if (groups > 2) { enum { g = 2 }; statement; }                                             \
        if (groups > 3) { enum { g = 3 }; statement; }                                             \
        if (groups > 4) { enum { g = 4 }; statement; }                                             \
    } while (0)

#define GCM_ROUND(a, b, c, d, round)                                                               \
    do {                                                                                           \
        __m256i k = _mm256_set1_epi32(gcm_round_key(round_keys, round));                                    \
        GCM_EACH(x[g][a] = _mm256_xor_si256(                                                       \
                     x[g][a], sm4_mix(_mm256_xor_si256(_mm256_xor_si256(x[g][b], x[g][c]),         \
                                                       _mm256_xor_si256(x[g][d], k)))));           \
        if (ciphertext != NULL)                                                                    \
            gcm_hash_beside(hash, powers, ciphertext, round);                                      \
    } while (0)

GCM_INLINE void gcm_hash_beside(ghash *hash, const __m128i *powers, const uint8_t *ciphertext,
                                int round)
{
    __m128i block = ghash_load(ciphertext + round * SM4_BLOCK);

    if (round == 0)
        block = _mm_xor_si128(block, hash->carried);
    ghash_step(hash, block, _mm_load_si128(powers + round));
}

GCM_INLINE int gcm_round_key(const uint8_t *round_keys, int round)
{
    int word;

    memcpy(&word, round_keys + round * sizeof word, sizeof word);
    return word;
}

/* From words to blocks: the state's words come out in reverse order (GB/T 32907, 7.3), big-endian.
 * The low lanes hold the even blocks, the high lanes the odd ones. */
GCM_INLINE void gcm_store_group(uint8_t *out, const __m256i x[4])
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

/* The 32 rounds of `groups` groups; hashes 32 blocks at `ciphertext` beside them unless NULL. */
GCM_INLINE void gcm_rounds(const uint8_t *round_keys, __m256i x[][4], int groups, ghash *hash,
                           const __m128i *powers, const uint8_t *ciphertext)
{
    for (int i = 0; i < SM4_ROUNDS; i += 4) {
        GCM_ROUND(0, 1, 2, 3, i);
        GCM_ROUND(1, 2, 3, 0, i + 1);
        GCM_ROUND(2, 3, 0, 1, i + 2);
        GCM_ROUND(3, 0, 1, 2, i + 3);
    }
}

GCM_INLINE uint32_t gcm_word(const uint8_t *bytes)
{
    uint32_t word;

    memcpy(&word, bytes, sizeof word);
    return __builtin_bswap32(word);
}

GCM_INLINE __m256i gcm_turned(__m256i words, int bits)
{
    return _mm256_or_si256(_mm256_slli_epi32(words, bits), _mm256_srli_epi32(words, 32 - bits));
}

/* The round keys as the rounds want them: P(key) + p. */
GCM_INLINE void gcm_own_keys(sm4_key *key)
{
    __m256i *to = (__m256i *)key->tier_keys;

    for (int i = 0; i < SM4_ROUNDS / 8; i++) {
        __m256i plain = _mm256_loadu_si256((const __m256i *)(key->round_keys + 8 * i));

        _mm256_store_si256(to + i, _mm256_xor_si256(sm4_enter(plain),
                                                    _mm256_set1_epi8(SM4_CONSTANT_IN)));
    }
}

/* sm4_expand_key (GB/T 32907, 7.3) on vectors of eight equal words. */
GCM_INLINE void gcm_expand(sm4_key *key, const uint8_t *raw)
{
    static const uint32_t fk[4] = {0xA3B1BAC6, 0x56AA3350, 0x677D9197, 0xB27022DC};
    const __m256i zero = _mm256_setzero_si256();
    _Alignas(32) uint8_t h[GROUP];
    __m256i k[4], x[1][4] = {{zero, zero, zero, zero}};

    for (int i = 0; i < 4; i++)
        k[i] = _mm256_set1_epi32((int)(gcm_word(raw + 4 * i) ^ fk[i]));
    for (int i = 0; i < SM4_ROUNDS; i++) {
        /* CK: byte j of word i is 7 * (4 * i + j), the most significant first. */
        uint32_t ck = (28u * i & 255) << 24 | ((28u * i + 7) & 255) << 16 |
                      ((28u * i + 14) & 255) << 8 | ((28u * i + 21) & 255);
        __m256i t = sm4_substitute(
            _mm256_xor_si256(_mm256_xor_si256(k[(i + 1) % 4], k[(i + 2) % 4]),
                             _mm256_xor_si256(k[(i + 3) % 4], _mm256_set1_epi32((int)ck))));

        t = _mm256_xor_si256(t, _mm256_xor_si256(gcm_turned(t, 13), gcm_turned(t, 23)));
        k[i % 4] = _mm256_xor_si256(k[i % 4], t);
        key->round_keys[i] = (uint32_t)_mm256_cvtsi256_si32(k[i % 4]);
    }
    gcm_own_keys(key);
    gcm_rounds(key->tier_keys, x, 1, NULL, NULL, NULL);
    gcm_store_group(h, x[0]);
    memcpy(key->h, h, SM4_BLOCK);
    sm4_wipe(h, sizeof h);
}

/* Key stream of `groups` groups from `counter`; hashes 32 blocks at `ciphertext` unless NULL. */
GCM_INLINE void gcm_pass(const uint8_t *round_keys, const uint32_t nonce[3], uint32_t counter,
                         uint8_t *stream, int groups, ghash *hash, const __m128i *powers,
                         const uint8_t *ciphertext)
{
    const __m256i steps = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    __m256i x[5][4];

    __m256i first[3] = {sm4_enter(_mm256_set1_epi32((int)nonce[0])),
                        sm4_enter(_mm256_set1_epi32((int)nonce[1])),
                        sm4_enter(_mm256_set1_epi32((int)nonce[2]))};

    GCM_EACH(x[g][0] = first[0]; x[g][1] = first[1]; x[g][2] = first[2];
             x[g][3] = sm4_enter(
                 _mm256_add_epi32(_mm256_set1_epi32((int)(counter + 8 * g)), steps)));
    gcm_rounds(round_keys, x, groups, hash, powers, ciphertext);
    GCM_EACH(gcm_store_group(stream + g * GROUP, x[g]));
    if (ciphertext != NULL)
        ghash_settle(hash);
}

/* Passes without hashing, one body each so that a short message runs no wider than it needs. */
#define GCM_STREAM(groups)                                                                         \
    static __attribute__((noinline, target(SM4_TARGET))) void gcm_stream_##groups(                 \
        const uint8_t *round_keys, const uint32_t nonce[3], uint32_t counter, uint8_t *stream)    \
    {                                                                                              \
        gcm_pass(round_keys, nonce, counter, stream, groups, NULL, NULL, NULL);                    \
    }
GCM_STREAM(1)
GCM_STREAM(2)
GCM_STREAM(3)
GCM_STREAM(4)
GCM_STREAM(5)

static __attribute__((target(SM4_TARGET))) void gcm_stream(const uint8_t *round_keys,
                                                           const uint32_t nonce[3],
                                                           uint32_t counter, uint8_t *stream,
                                                           size_t bytes)
{
    switch ((bytes + GROUP - 1) / GROUP) {
    case 1: gcm_stream_1(round_keys, nonce, counter, stream); break;
    case 2: gcm_stream_2(round_keys, nonce, counter, stream); break;
    case 3: gcm_stream_3(round_keys, nonce, counter, stream); break;
    case 4: gcm_stream_4(round_keys, nonce, counter, stream); break;
    default: gcm_stream_5(round_keys, nonce, counter, stream); break;
    }
}

static __attribute__((noinline, target(SM4_TARGET))) void
gcm_stream_and_hash(const sm4_key *key, const uint32_t nonce[3], uint32_t counter, uint8_t *stream,
                    ghash *hash, const uint8_t *ciphertext)
{
    ghash beside = *hash; /* a copy that can live in registers */

    gcm_pass(key->tier_keys, nonce, counter, stream, 4, &beside, (const __m128i *)key->powers,
             ciphertext);
    *hash = beside;
}

GCM_INLINE void gcm_xor(const uint8_t *in, uint8_t *out, const uint8_t *stream, size_t length)
{
    for (; length >= 32; length -= 32, in += 32, out += 32, stream += 32)
        _mm256_storeu_si256(
            (__m256i *)out, _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)in),
                                             _mm256_loadu_si256((const __m256i *)stream)));
    if (length >= 16) {
        _mm_storeu_si128((__m128i *)out, _mm_xor_si128(_mm_loadu_si128((const __m128i *)in),
                                                       _mm_loadu_si128((const __m128i *)stream)));
        length -= 16, in += 16, out += 16, stream += 16;
    }
    if (length > 0) {
        /* A buffer of one block, so that the last one is read and written to its end only. */
        uint8_t last[SM4_BLOCK] = {0};

        memcpy(last, in, length);
        _mm_storeu_si128((__m128i *)last,
                         _mm_xor_si128(_mm_loadu_si128((const __m128i *)last),
                                       _mm_loadu_si128((const __m128i *)stream)));
        memcpy(out, last, length);
    }
}

/* The key stream is as secret as the text; the barrier keeps the stores. */
GCM_INLINE void gcm_forget(uint8_t *stream, size_t used)
{
    used = (used + GROUP - 1) / GROUP * GROUP;
    for (size_t i = 0; i < used; i += 32)
        _mm256_store_si256((__m256i *)(stream + i), _mm256_setzero_si256());
    __asm__ volatile("" : : "r"(stream) : "memory");
}

GCM_INLINE void gcm_run(const sm4_key *key, const uint8_t *nonce_bytes, const uint8_t *aad,
                        size_t aad_length, const uint8_t *in, uint8_t *out, size_t length,
                        uint8_t *tag, int seal)
{
    _Alignas(32) uint8_t stream[PASS_MOST];
    const uint32_t nonce[3] = {gcm_word(nonce_bytes), gcm_word(nonce_bytes + 4),
                               gcm_word(nonce_bytes + 8)};
    const uint8_t *ciphertext = seal ? out : in;
    size_t blocks = length / SM4_BLOCK + (length % SM4_BLOCK != 0);
    int bulk = length >= BULK && key->powers_for >= length;
    size_t done = 0, hashed = 0, used = 0, skip = SM4_BLOCK;
    uint32_t counter = 1;
    __m128i mask = _mm_setzero_si128();
    ghash hash;

    if (length == 0)
        in = out = stream; /* callers may have NULL, which nothing may be added to */
    ghash_start(&hash);
    ghash_bytes(&hash, key, aad, aad_length, bulk ? 0 : blocks + 1);
    do {
        size_t left = length - done + skip;
        /* A fifth group at the end rather than a pass for it alone. */
        size_t width = left <= PASS_MOST ? left : PASS;

        if (bulk && width == PASS && (seal ? done : length) - hashed >= PASS) {
            gcm_stream_and_hash(key, nonce, counter, stream, &hash, ciphertext + hashed);
            hashed += PASS;
        } else {
            gcm_stream(key->tier_keys, nonce, counter, stream, width);
            /* Opening in place: what the text replaces must have been hashed. */
            if (!seal && hashed < done + width - skip) {
                ghash_bytes(&hash, key, in + hashed, length - hashed, 1);
                hashed = length;
            }
        }
        if (skip > 0)
            mask = _mm_load_si128((const __m128i *)stream);
        gcm_xor(in + done, out + done, stream + skip, width - skip);
        done += width - skip;
        used = width > used ? width : used;
        counter += PASS / SM4_BLOCK;
        skip = 0;
    } while (done < length);
    if (hashed < length)
        ghash_bytes(&hash, key, ciphertext + hashed, length - hashed, 1);
    _mm_storeu_si128((__m128i *)tag,
                     _mm_xor_si128(mask, ghash_finish(&hash, key, aad_length, length)));
    gcm_forget(stream, used);
}
