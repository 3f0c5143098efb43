/* SM4-GCM with NEON and AESE: aarch64 cores without SM4 instructions (Kunpeng 920, Neoverse N1).
 *
 * AESE is AddRoundKey, AES's S-box and ShiftRows: the inversion that SM4 needs, with another affine
 * map behind it. The state is kept under the S-box's inner map, so that nothing comes before the
 * instruction; behind it are two maps, each two TBL look-ups by nibble inside registers, and
 * permutations that undo ShiftRows and turn the words in one (derive_aes.py). Nothing secret is an
 * address. Correctness is shown under an emulator only: no machine of this kind has timed it.
 */
#include "sm4.h"

#if defined(__aarch64__)

#define SM4_TARGET "+crypto"

#include "arm.h"

#if !defined(ARM_TIER_BUILT)
ARM_TIER_NOT_BUILT(sm4_tier_arm_aese, "arm-aese");
#else

#include "aes_constants.h"
#include "sbox_constants.h"

/* A unit is 4 blocks in 4 registers, one per word of the state; 4 units go side by side. */
enum { UNITS = 4, GROUP_BLOCKS = 4 * UNITS, GROUP = GROUP_BLOCKS * SM4_BLOCK };
enum { PASS = 2 * GROUP, PASS_MOST = 3 * GROUP };

static int usable(void)
{
    return arm_has(ARM_AES | ARM_PMULL);
}

#define TABLE(...) ((uint8x16_t){__VA_ARGS__})

TIER_INLINE uint8x16_t mapped(uint8x16_t x, uint8x16_t low, uint8x16_t high)
{
    return veorq_u8(vqtbl1q_u8(low, vandq_u8(x, vdupq_n_u8(15))),
                    vqtbl1q_u8(high, vshrq_n_u8(x, 4)));
}

TIER_INLINE uint8x16_t enter(uint8x16_t x)
{
    return mapped(x, TABLE(SM4_AES_ENTER_LOW), TABLE(SM4_AES_ENTER_HIGH));
}

TIER_INLINE uint8x16_t leave(uint8x16_t x)
{
    return mapped(x, TABLE(SM4_AES_LEAVE_LOW), TABLE(SM4_AES_LEAVE_HIGH));
}

/* P(w + L(S(x))) of P(w) and of P(x) + p, given as a sum of two. */
TIER_INLINE uint8x16_t mix(uint8x16_t one, uint8x16_t other, uint8x16_t word)
{
    /* Where ShiftRows put each byte of a word, then the same of words turned left by a byte. */
    const uint8x16_t by0 = TABLE(0, 13, 10, 7, 4, 1, 14, 11, 8, 5, 2, 15, 12, 9, 6, 3);
    const uint8x16_t by8 = TABLE(7, 0, 13, 10, 11, 4, 1, 14, 15, 8, 5, 2, 3, 12, 9, 6);
    const uint8x16_t turn8 = TABLE(3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14);
    uint8x16_t t = vaeseq_u8(one, other);
    uint8x16_t a = mapped(t, TABLE(SM4_AES_A_LOW), TABLE(SM4_AES_A_HIGH));
    uint8x16_t d = mapped(t, TABLE(SM4_AES_D_LOW), TABLE(SM4_AES_D_HIGH));
    uint8x16_t f = veorq_u8(vqtbl1q_u8(a, by0), vqtbl1q_u8(d, by8));
    uint8x16_t turned16 = vreinterpretq_u8_u16(vrev32q_u16(vreinterpretq_u16_u8(f)));

    return veorq_u8(veorq_u8(word, f), veorq_u8(vqtbl1q_u8(f, turn8), turned16));
}

TIER_INLINE uint8x16_t round_key(const uint8_t *keys, size_t round)
{
    uint32_t word;

    memcpy(&word, keys + round * sizeof word, sizeof word);
    return vreinterpretq_u8_u32(vdupq_n_u32(word));
}

/* From words to blocks: the words come out in reverse order, each big-endian (GB/T 32907, 7.1). */
TIER_INLINE void store_unit(uint8_t *out, const uint8x16_t x[4])
{
    uint32x4_t x0 = vreinterpretq_u32_u8(leave(x[0])), x1 = vreinterpretq_u32_u8(leave(x[1]));
    uint32x4_t x2 = vreinterpretq_u32_u8(leave(x[2])), x3 = vreinterpretq_u32_u8(leave(x[3]));
    uint32x4_t low31 = vzip1q_u32(x3, x1), low20 = vzip1q_u32(x2, x0);
    uint32x4_t high31 = vzip2q_u32(x3, x1), high20 = vzip2q_u32(x2, x0);

    vst1q_u8(out, vrev32q_u8(vreinterpretq_u8_u32(vzip1q_u32(low31, low20))));
    vst1q_u8(out + 16, vrev32q_u8(vreinterpretq_u8_u32(vzip2q_u32(low31, low20))));
    vst1q_u8(out + 32, vrev32q_u8(vreinterpretq_u8_u32(vzip1q_u32(high31, high20))));
    vst1q_u8(out + 48, vrev32q_u8(vreinterpretq_u8_u32(vzip2q_u32(high31, high20))));
}

#define ROUND(a, b, c, d, round)                                                                   \
    do {                                                                                           \
        uint8x16_t k = round_key(keys, round);                                                     \
                                                                                                   \
        for (size_t u = 0; u < UNITS; u++)                                                         \
            x[u][a] = mix(veorq_u8(veorq_u8(x[u][b], x[u][c]), k), x[u][d], x[u][a]);              \
    } while (0)

TIER_CODE void group(const uint8_t *keys, const uint32_t nonce[3],
                     const uint32_t counters[GROUP_BLOCKS], uint8_t *stream)
{
    uint8x16_t x[UNITS][4];

    for (size_t u = 0; u < UNITS; u++) {
        for (size_t word = 0; word < 3; word++)
            x[u][word] = enter(vreinterpretq_u8_u32(vdupq_n_u32(nonce[word])));
        x[u][3] = enter(vreinterpretq_u8_u32(vld1q_u32(counters + 4 * u)));
    }
    for (size_t i = 0; i < SM4_ROUNDS; i += 4) {
        ROUND(0, 1, 2, 3, i);
        ROUND(1, 2, 3, 0, i + 1);
        ROUND(2, 3, 0, 1, i + 2);
        ROUND(3, 0, 1, 2, i + 3);
    }
    for (size_t u = 0; u < UNITS; u++)
        store_unit(stream + 4 * u * SM4_BLOCK, x[u]);
}

TIER_CODE void gcm_stream(const sm4_key *key, const uint32_t nonce[3], uint32_t counter,
                          size_t blocks, size_t all, uint8_t *stream)
{
    for (size_t at = 0; at < all; at += GROUP_BLOCKS) {
        uint32_t counters[GROUP_BLOCKS];

        for (size_t i = 0; i < GROUP_BLOCKS; i++)
            counters[i] = at + i < blocks ? counter + (uint32_t)(at + i) : 1;
        group(key->tier_keys, nonce, counters, stream + at * SM4_BLOCK);
    }
}

TIER_CODE void gcm_stream_and_hash(const sm4_key *key, const uint32_t nonce[3], uint32_t counter,
                                   size_t blocks, size_t all, uint8_t *stream, ghash *hash,
                                   const uint8_t *ciphertext)
{
    gcm_stream(key, nonce, counter, blocks, all, stream);
    ghash_bytes(hash, key, ciphertext, PASS, 0);
}

#include "gcm.h"

/* The round keys as the rounds want them: P(key) + p. */
TIER_INLINE void own_keys(sm4_key *key)
{
    for (size_t i = 0; i < SM4_ROUNDS; i += 4) {
        uint8x16_t four = vreinterpretq_u8_u32(vld1q_u32(key->round_keys + i));

        vst1q_u8(key->tier_keys + 4 * i, veorq_u8(enter(four), vdupq_n_u8(SM4_CONSTANT_IN)));
    }
}

GCM_TIER(sm4_tier_arm_aese, "arm-aese", usable, NULL);

#endif
#endif
