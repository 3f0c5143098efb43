/* SM4-128-GCM (GB/T 32907, NIST SP 800-38D; RFC 8998 for the pair): what the tiers share.
 *
 * A tier is one way to run the same function on one class of CPU. Tiers are compiled with
 * per-function target attributes and chosen at run time; each gives the same bytes. No tier looks
 * anything up by a secret index.
 *
 * Nonces are 12 bytes, tags 16 bytes; a message is at most 2^36 - 32 bytes (SP 800-38D, 5.2.1.1).
 */
#ifndef TONGGUAN_SM4_H
#define TONGGUAN_SM4_H

#include <stddef.h>
#include <stdint.h>

enum { SM4_ROUNDS = 32, SM4_BLOCK = 16, SM4_NONCE = 12, SM4_TAG = 16, SM4_POWERS = 64 };

typedef struct sm4_key sm4_key;

typedef struct sm4_tier {
    const char *name; /* as shown to operators: "gfni-avx512", "gfni-avx2", "aesni-avx2", ... */
    int (*usable)(void); /* does this CPU, and this OS, allow it? */
    /* Fills `powers` as this tier wants them, at least those needed for `message_bytes` (0: all):
     * whole blocks, additional data and text each rounded up to 16 bytes; sets `powers_for`.
     * Called once after the expansion, so a tier's own form of the round keys is made here too. */
    void (*powers)(sm4_key *key, size_t message_bytes);
    /* Encrypts (seal != 0) or decrypts `length` bytes; `in` and `out` may be equal, not overlap
     * otherwise; writes the tag of the ciphertext. Counters start at 2, as GCM has it for 12-byte
     * nonces. Opening: the caller compares the tag in constant time and wipes `out` on a
     * mismatch. */
    void (*gcm)(const sm4_key *key, const uint8_t nonce[SM4_NONCE], const uint8_t *aad,
                size_t aad_length, const uint8_t *in, uint8_t *out, size_t length,
                uint8_t tag[SM4_TAG], int seal);
    /* May be NULL: sm4_expand_key then does it. Same results, for tiers that are faster at it. */
    void (*expand)(sm4_key *key, const uint8_t raw[SM4_BLOCK]);
} sm4_tier;

struct sm4_key {
    /* H^1.. in whatever form and order the tier keeps; 64-byte aligned for the widest loads. */
    _Alignas(64) uint8_t powers[SM4_POWERS * SM4_BLOCK];
    uint32_t round_keys[SM4_ROUNDS];
    uint8_t h[SM4_BLOCK]; /* E(K, 0^128), big-endian as in the standard */
    _Alignas(64) uint8_t tier_keys[1024]; /* the round keys once more, as the tier likes them */
    const sm4_tier *tier;
    size_t powers_for; /* longest message the powers are enough for; SIZE_MAX: any */
};

/* schedule.c: portable and constant-time; used by every tier. Fills round_keys and h. */
void sm4_expand_key(sm4_key *key, const uint8_t raw[SM4_BLOCK]);
void sm4_encrypt_block(const uint32_t round_keys[SM4_ROUNDS], const uint8_t in[SM4_BLOCK],
                       uint8_t out[SM4_BLOCK]);
void sm4_wipe(void *memory, size_t length);
int sm4_tags_equal(const uint8_t a[SM4_TAG], const uint8_t b[SM4_TAG]); /* constant time */

/* tiers.c: the tiers compiled in, best first, NULL at the end. */
extern const sm4_tier *const sm4_tiers[];
/* Remembered: a virtual machine takes microseconds to answer CPUID. */
int sm4_tier_usable(const sm4_tier *tier);
const sm4_tier *sm4_best_tier(void);

#endif
