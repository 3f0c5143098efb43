/* Runs SM4-GCM cases on one tier: for CPUs other than Python's own (qemu-user) and for sanitizers.
 *
 *     sm4_driver         names the tiers compiled in, and whether each is usable here
 *     sm4_driver TIER    cases on stdin, answers on stdout
 *
 * A case, numbers in little-endian: u32 additional data's length, u32 length, u32 bytes for which
 * powers are made (0: any), u8 seal, u8 offset of the input, u8 offset of the output, u8 in place;
 * then key, nonce, additional data, input. An answer is the output and the tag. Buffers are
 * allocated to the byte, so that a sanitizer sees what is read or written past them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sm4.h"

static int take(void *to, size_t length)
{
    return fread(to, 1, length, stdin) == length;
}

static uint8_t *exactly(size_t bytes)
{
    uint8_t *memory = malloc(bytes > 0 ? bytes : 1);

    if (memory == NULL)
        exit(3);
    return memory;
}

static uint8_t *taken(size_t length, size_t offset)
{
    uint8_t *memory = exactly(length + offset);

    if (!take(memory + offset, length))
        exit(3);
    return memory;
}

static int answer(const sm4_tier *tier)
{
    uint32_t sizes[3];
    uint8_t how[4], raw[SM4_BLOCK], nonce[SM4_NONCE], tag[SM4_TAG];
    uint8_t *aad, *in, *out, *text;
    sm4_key *key;

    if (!take(sizes, sizeof sizes))
        return 0;
    key = aligned_alloc(64, (sizeof *key + 63) / 64 * 64);
    if (key == NULL || !take(how, sizeof how) || !take(raw, sizeof raw) ||
        !take(nonce, sizeof nonce))
        exit(3);
    memset(key, 0xA5, sizeof *key); /* what a tier has not filled must not matter */
    aad = taken(sizes[0], 0);
    in = taken(sizes[1], how[1]);
    out = how[3] ? in : exactly(sizes[1] + how[2]);
    text = out + (how[3] ? how[1] : how[2]);
    key->tier = tier;
    (tier->expand != NULL ? tier->expand : sm4_expand_key)(key, raw);
    tier->powers(key, sizes[2]);
    tier->gcm(key, nonce, aad, sizes[0], in + how[1], text, sizes[1], tag, how[0]);
    fwrite(text, 1, sizes[1], stdout);
    fwrite(tag, 1, sizeof tag, stdout);
    if (out != in)
        free(out);
    free(in);
    free(aad);
    free(key);
    return 1;
}

int main(int count, char **arguments)
{
    for (const sm4_tier *const *tier = sm4_tiers; *tier != NULL; tier++) {
        if (count == 1)
            printf("%s %s\n", (*tier)->name, (*tier)->usable() ? "usable" : "unusable");
        else if (strcmp(arguments[1], (*tier)->name) == 0) {
            while (answer(*tier)) {
            }
            return 0;
        }
    }
    return count == 1 ? 0 : 2;
}
