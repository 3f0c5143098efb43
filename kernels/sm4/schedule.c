/* The key schedule and single blocks, for every tier: portable, constant-time, four bytes wide. */
#include "sm4.h"

#include <string.h>

typedef uint32_t plane; /* bit i of each byte of a word, at bits 0, 8, 16 and 24 */
#include "sbox_circuit.h"

static uint32_t substitute(uint32_t word)
{
    plane p[8];
    for (int bit = 0; bit < 8; bit++) {
        p[bit] = word >> bit; /* the other bits go along and are dropped below */
    }
    sbox_planes(p);
    word = 0;
    for (int bit = 0; bit < 8; bit++) {
        word |= (p[bit] & 0x01010101u) << bit;
    }
    return word;
}

static inline uint32_t rotate(uint32_t word, int by)
{
    return word << by | word >> (32 - by);
}

static inline uint32_t load(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

static inline void store(uint8_t *bytes, uint32_t word)
{
    bytes[0] = (uint8_t)(word >> 24);
    bytes[1] = (uint8_t)(word >> 16);
    bytes[2] = (uint8_t)(word >> 8);
    bytes[3] = (uint8_t)word;
}

void sm4_encrypt_block(const uint32_t round_keys[SM4_ROUNDS], const uint8_t in[SM4_BLOCK],
                       uint8_t out[SM4_BLOCK])
{
    uint32_t x[4] = {load(in), load(in + 4), load(in + 8), load(in + 12)};

    for (int round = 0; round < SM4_ROUNDS; round++) {
        uint32_t t = substitute(x[1] ^ x[2] ^ x[3] ^ round_keys[round]);
        t = x[0] ^ t ^ rotate(t, 2) ^ rotate(t, 10) ^ rotate(t, 18) ^ rotate(t, 24);
        x[0] = x[1], x[1] = x[2], x[2] = x[3], x[3] = t;
    }
    for (int word = 0; word < 4; word++) {
        store(out + 4 * word, x[3 - word]);
    }
    sm4_wipe(x, sizeof x);
}

void sm4_expand_key(sm4_key *key, const uint8_t raw[SM4_BLOCK])
{
    static const uint8_t zero[SM4_BLOCK];
    /* FK of GB/T 32907, 7.3. */
    uint32_t k[4] = {load(raw) ^ 0xa3b1bac6u, load(raw + 4) ^ 0x56aa3350u,
                     load(raw + 8) ^ 0x677d9197u, load(raw + 12) ^ 0xb27022dcu};

    for (int round = 0; round < SM4_ROUNDS; round++) {
        uint32_t ck = 0; /* byte j of CK_i is 7 (4 i + j) mod 256 */
        for (int byte = 0; byte < 4; byte++) {
            ck = ck << 8 | (uint8_t)(7 * (4 * round + byte));
        }
        uint32_t t = substitute(k[1] ^ k[2] ^ k[3] ^ ck);
        t = k[0] ^ t ^ rotate(t, 13) ^ rotate(t, 23);
        k[0] = k[1], k[1] = k[2], k[2] = k[3], k[3] = t;
        key->round_keys[round] = t;
    }
    sm4_wipe(k, sizeof k);
    sm4_encrypt_block(key->round_keys, zero, key->h);
}

void sm4_wipe(void *memory, size_t length)
{
    memset(memory, 0, length);
    /* The compiler is told that someone looks at it, so the stores stay. */
    __asm__ volatile("" : : "r"(memory) : "memory");
}

int sm4_tags_equal(const uint8_t a[SM4_TAG], const uint8_t b[SM4_TAG])
{
    unsigned difference = 0;
    for (int i = 0; i < SM4_TAG; i++) {
        difference |= (unsigned)(a[i] ^ b[i]);
        __asm__ volatile("" : "+r"(difference)); /* no early way out may be invented */
    }
    return (int)((difference - 1u) >> 8 & 1u);
}
