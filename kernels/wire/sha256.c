/* See sha256.h. */
#include "sha256.h"

#include <stdatomic.h>
#include <string.h>

static const uint32_t FIRST[SHA_WORDS] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

void sha_begin(Sha *sha, const uint32_t state[SHA_WORDS], const uint8_t *at, size_t blocks)
{
    memcpy(sha->state, state != NULL ? state : FIRST, sizeof sha->state);
    sha->at = at;
    sha->blocks = blocks;
}

size_t sha_pad(uint8_t *message, size_t size, size_t before)
{
    size_t blocks = (size + 8) / SHA_BLOCK + 1;
    memset(message + size, 0, blocks * SHA_BLOCK - size);
    message[size] = 0x80;
    uint64_t bits = (uint64_t)(before + size) * 8;
    for (uint8_t *at = message + blocks * SHA_BLOCK; bits != 0; bits >>= 8) {
        *--at = (uint8_t)bits;
    }
    return blocks;
}

void sha_write(const Sha *sha, uint8_t hash[SHA_WORDS * 4])
{
    for (int i = 0; i < SHA_WORDS; i++) {
        uint32_t word = sha->state[i];
        uint8_t bytes[4] = {(uint8_t)(word >> 24), (uint8_t)(word >> 16), (uint8_t)(word >> 8),
                            (uint8_t)word};
        memcpy(hash + (ptrdiff_t)4 * i, bytes, sizeof bytes); /* one instruction */
    }
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(WIRE_PORTABLE)

#include <cpuid.h>
#include <immintrin.h>

#define SHA_INLINE static inline __attribute__((always_inline, target("sha,sse4.1,ssse3")))
#define SHA_CODE static __attribute__((noinline, target("sha,sse4.1,ssse3")))

static const uint32_t ROUND[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static bool find_out(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1) || !(c & bit_SSSE3)) {
        return false;
    }
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29)) != 0;
}

bool sha_available(void)
{
    /* Found out once: in a virtual machine the host answers, which takes as long as ten hashes.
     * Threads that come at the same time find the same. */
    static atomic_int known;
    int now = atomic_load_explicit(&known, memory_order_relaxed);
    if (now == 0) {
        now = find_out() ? 1 : -1;
        atomic_store_explicit(&known, now, memory_order_relaxed);
    }
    return now > 0;
}

/* The instructions hold the eight words as (a, b, e, f) and (c, d, g, h), from the top down. */
SHA_INLINE void load_state(const uint32_t state[SHA_WORDS], __m128i out[2])
{
    __m128i abcd = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xB1);
    __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1B);
    out[0] = _mm_alignr_epi8(abcd, efgh, 8);
    out[1] = _mm_blend_epi16(efgh, abcd, 0xF0);
}

SHA_INLINE void store_state(const __m128i in[2], uint32_t state[SHA_WORDS])
{
    __m128i feba = _mm_shuffle_epi32(in[0], 0x1B);
    __m128i dchg = _mm_shuffle_epi32(in[1], 0xB1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

/* Four rounds of one message; `words` is the schedule's last sixteen. */
SHA_INLINE void rounds(int quad, const uint8_t *at, __m128i words[4], __m128i state[2])
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const __m128i *from = (const __m128i *)at + quad, *added = (const __m128i *)ROUND + quad;
    __m128i *now = &words[quad & 3];
    if (quad < 4) {
        *now = _mm_shuffle_epi8(_mm_loadu_si128(from), swap);
    } else {
        __m128i last = words[(quad + 3) & 3];
        __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(*now, words[(quad + 1) & 3]),
                                    _mm_alignr_epi8(last, words[(quad + 2) & 3], 4));
        *now = _mm_sha256msg2_epu32(sum, last);
    }
    __m128i sum = _mm_add_epi32(*now, _mm_load_si128(added));
    state[1] = _mm_sha256rnds2_epu32(state[1], state[0], sum);
    state[0] = _mm_sha256rnds2_epu32(state[0], state[1], _mm_shuffle_epi32(sum, 0x0E));
}

SHA_INLINE void take_blocks(Sha *const *lanes, int count, size_t blocks)
{
    __m128i state[2][2], before[2][2], words[2][4];
    for (int i = 0; i < count; i++) {
        load_state(lanes[i]->state, state[i]);
    }
    for (size_t block = 0; block < blocks; block++) {
        for (int i = 0; i < count; i++) {
            before[i][0] = state[i][0];
            before[i][1] = state[i][1];
        }
#pragma GCC unroll 16
        for (int quad = 0; quad < 16; quad++) {
            for (int i = 0; i < count; i++) {
                rounds(quad, lanes[i]->at + block * SHA_BLOCK, words[i], state[i]);
            }
        }
        for (int i = 0; i < count; i++) {
            state[i][0] = _mm_add_epi32(state[i][0], before[i][0]);
            state[i][1] = _mm_add_epi32(state[i][1], before[i][1]);
        }
    }
    for (int i = 0; i < count; i++) {
        store_state(state[i], lanes[i]->state);
        lanes[i]->at += blocks * SHA_BLOCK;
        lanes[i]->blocks -= blocks;
    }
}

SHA_CODE void take_one(Sha *one)
{
    Sha *const lanes[] = {one};
    take_blocks(lanes, 1, one->blocks);
}

SHA_CODE void take_two(Sha *one, Sha *two)
{
    Sha *const lanes[] = {one, two};
    take_blocks(lanes, 2, one->blocks < two->blocks ? one->blocks : two->blocks);
}

void sha_one(Sha *sha)
{
    take_one(sha);
}

void sha_two(Sha *one, Sha *two)
{
    take_two(one, two);
}

#else

bool sha_available(void)
{
    return false;
}

/* Nobody calls these where there are no such instructions. */
void sha_one(Sha *sha)
{
    (void)sha;
}

void sha_two(Sha *one, Sha *two)
{
    (void)one;
    (void)two;
}

#endif
