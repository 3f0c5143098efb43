/* SHA-256 (FIPS 180-4) on the instructions some CPUs have for it: what libcrypto has no call for.
 *
 * One block waits for the one before it and leaves half of the CPU's units idle, so two messages
 * side by side take little longer than one. */
#ifndef TONGGUAN_WIRE_SHA256_H
#define TONGGUAN_WIRE_SHA256_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SHA_BLOCK = 64, SHA_WORDS = 8 };

/* A hash under way, and whole blocks that it has still to take. */
typedef struct {
    uint32_t state[SHA_WORDS];
    const uint8_t *at;
    size_t blocks;
} Sha;

/* Whether this CPU has the instructions; to be asked before any of the following. */
bool sha_available(void);
/* Begins at `state`, of a hash that has taken whole blocks; NULL: that has taken none. */
void sha_begin(Sha *sha, const uint32_t state[SHA_WORDS], const uint8_t *at, size_t blocks);
/* Takes all blocks of one. */
void sha_one(Sha *sha);
/* Takes as many blocks of each as both have. */
void sha_two(Sha *one, Sha *two);
/* Pads the message of `size` bytes at `message`, with room for 72 more; `before`: bytes taken
 * earlier. Returns its blocks. */
size_t sha_pad(uint8_t *message, size_t size, size_t before);
/* Writes the hash, or, unlike the hash a value to go on from, its eight words, big end first. */
void sha_write(const Sha *sha, uint8_t hash[SHA_WORDS * 4]);

#endif
