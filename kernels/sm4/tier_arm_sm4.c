/* SM4-GCM with Arm's SM4 instructions (Neoverse V1, V2, N2 and what is made of them).
 *
 * SM4E does four rounds of one block; eight blocks go side by side to cover its latency. GHASH is
 * by PMULL. Correctness is shown under an emulator only: no machine of this kind has timed it.
 */
#include "sm4.h"

#if defined(__aarch64__)

#define SM4_TARGET "arch=armv8.2-a+crypto+sm4"

#include "arm.h"

#if !defined(ARM_TIER_BUILT)
ARM_TIER_NOT_BUILT(sm4_tier_arm_sm4, "arm-sm4");
#else

enum { GROUP_BLOCKS = 8, GROUP = GROUP_BLOCKS * SM4_BLOCK };
enum { PASS = 4 * GROUP, PASS_MOST = 5 * GROUP };

static int usable(void)
{
    return arm_has(ARM_SM4 | ARM_PMULL);
}

TIER_CODE void gcm_stream(const sm4_key *key, const uint32_t nonce[3], uint32_t counter,
                          size_t blocks, size_t all, uint8_t *stream)
{
    for (size_t at = 0; at < all; at += GROUP_BLOCKS) {
        uint32x4_t x[GROUP_BLOCKS];

        for (size_t i = 0; i < GROUP_BLOCKS; i++) {
            uint32_t words[4] = {nonce[0], nonce[1], nonce[2],
                                 at + i < blocks ? counter + (uint32_t)(at + i) : 1};

            x[i] = vld1q_u32(words);
        }
        for (size_t round = 0; round < SM4_ROUNDS; round += 4) {
            uint32x4_t four = vld1q_u32(key->round_keys + round);

            for (size_t i = 0; i < GROUP_BLOCKS; i++)
                x[i] = vsm4eq_u32(x[i], four);
        }
        /* The words come out in reverse order, each big-endian (GB/T 32907, 7.1). */
        for (size_t i = 0; i < GROUP_BLOCKS; i++)
            block_store(stream + (at + i) * SM4_BLOCK, block_reversed(vreinterpretq_u8_u32(x[i])));
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

TIER_INLINE void own_keys(sm4_key *key)
{
    (void)key; /* the instructions take the round keys as they are */
}

/* sm4_expand_key: SM4EKEY does four rounds of GB/T 32907, 7.3. */
TIER_CODE void expand(sm4_key *key, const uint8_t *raw)
{
    static const uint32_t fk[4] = {0xA3B1BAC6, 0x56AA3350, 0x677D9197, 0xB27022DC};
    uint32x4_t k = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(raw)));
    uint32x4_t x = vdupq_n_u32(0);

    k = veorq_u32(k, vld1q_u32(fk));
    for (unsigned round = 0; round < SM4_ROUNDS; round += 4) {
        uint32_t ck[4];

        /* CK: byte j of word i is 7 * (4 * i + j), the most significant first. */
        for (unsigned i = 0; i < 4; i++) {
            uint32_t first = 28 * (round + i);

            ck[i] = (first & 255) << 24 | ((first + 7) & 255) << 16 | ((first + 14) & 255) << 8 |
                    ((first + 21) & 255);
        }
        k = vsm4ekeyq_u32(k, vld1q_u32(ck));
        vst1q_u32(key->round_keys + round, k);
        x = vsm4eq_u32(x, k);
    }
    block_store(key->h, block_reversed(vreinterpretq_u8_u32(x)));
}

GCM_TIER(sm4_tier_arm_sm4, "arm-sm4", usable, expand);

#endif
#endif
