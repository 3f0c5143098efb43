/* SHA-256 and HMAC-SHA256 for the other files of kernels.wire: libcrypto's, found by mac.c. */
#ifndef TONGGUAN_WIRE_MAC_H
#define TONGGUAN_WIRE_MAC_H

#include "wire.h"

enum { HASH_BYTES = 32, MAC_HEX = 64 };

typedef struct MacObject MacObject;

/* True if a loaded libcrypto offers what all below needs; to be asked before any of it is used. */
bool mac_available(void);
/* Whether `object` is a kernels.wire Mac; no exception. */
bool mac_check(PyObject *object);
/* The MAC of two parts, joined. Needs no GIL as long as somebody holds `mac`. */
void mac_compute(const MacObject *mac, Span first, Span second, uint8_t hash[HASH_BYTES]);
/* Whether `sha256.h` is there for this MAC, and its two hashes behind their first block: the inner
 * one's state, and the outer one's; either may be NULL. Needs no GIL. */
bool mac_states(const MacObject *mac, const uint32_t **inner, const uint32_t **outer);
/* SHA-256 of a byte and two parts, joined. Needs no GIL. */
void hash_tagged(uint8_t tag, Span first, Span second, uint8_t hash[HASH_BYTES]);

void hex_write(const uint8_t hash[HASH_BYTES], char out[MAC_HEX]);
/* False where a character is none of 0-9a-f. */
bool hex_read(const uint8_t text[MAC_HEX], uint8_t hash[HASH_BYTES]);

#endif
