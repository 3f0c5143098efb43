/* Runs SM4-GCM cases on one tier: for CPUs that Python's own process is not on (qemu-user).
 *
 *     sm4_driver                  names the tiers compiled in, and whether each is usable here
 *     sm4_driver TIER             cases on stdin, answers on stdout
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

#define TIER(name) extern const sm4_tier sm4_tier_##name;
#if defined(__x86_64__)
#define TIERS TIER(gfni_avx2) TIER(aesni_avx2)
#elif defined(__aarch64__)
#define TIERS TIER(arm_sm4) TIER(arm_aese)
#endif
TIERS
#undef TIER
#define TIER(name) &sm4_tier_##name,
static const sm4_tier *const tiers[] = {TIERS NULL};

static int take(void *to, size_t length)
{
    return fread(to, 1, length, stdin) == length;
}

static uint8_t *taken(size_t length, size_t offset)
{
    uint8_t *memory = malloc(length + offset + (length + offset == 0));

    if (memory == NULL || !take(memory + offset, length))
        exit(3);
    return memory;
}

static int answer(const sm4_tier *tier)
{
    uint32_t sizes[3];
    uint8_t how[4], raw[SM4_BLOCK], nonce[SM4_NONCE], tag[SM4_TAG];
    sm4_key *key;
    uint8_t *aad, *in, *out;

    if (!take(sizes, sizeof sizes))
        return 0;
    key = aligned_alloc(64, (sizeof *key + 63) / 64 * 64);
    if (key == NULL || !take(how, sizeof how) || !take(raw, sizeof raw) ||
        !take(nonce, sizeof nonce))
        exit(3);
    memset(key, 0xA5, sizeof *key); /* what a tier has not filled must not matter */
    aad = taken(sizes[0], 0);
    in = taken(sizes[1], how[1]);
    out = how[3] ? in : malloc(sizes[1] + (size_t)how[2] + 1);
    if (out == NULL)
        exit(3);
    key->tier = tier;
    (tier->expand != NULL ? tier->expand : sm4_expand_key)(key, raw);
    tier->powers(key, sizes[2]);
    {
        size_t offset = how[3] ? how[1] : how[2];
        /* To the byte here too. */
        uint8_t *exact = how[3] ? out : realloc(out, sizes[1] + offset + (sizes[1] + offset == 0));

        tier->gcm(key, nonce, aad, sizes[0], in + how[1], exact + offset, sizes[1], tag, how[0]);
        fwrite(exact + offset, 1, sizes[1], stdout);
        fwrite(tag, 1, sizeof tag, stdout);
        if (!how[3])
            free(exact);
    }
    free(in);
    free(aad);
    free(key);
    return 1;
}

int main(int count, char **arguments)
{
    for (const sm4_tier *const *tier = tiers; *tier != NULL; tier++) {
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
