/* GCM (SP 800-38D, 7) around a key stream: a template.
 *
 * Included after ghash.h and after what gives the key stream:
 *     gcm_stream(key, nonce, counter, blocks, all, stream)
 *     gcm_stream_and_hash(key, nonce, counter, blocks, all, stream, hash, ciphertext)
 * `blocks` blocks from `counter` on; if `all` is one more, the block of counter 1 follows, which
 * masks the tag: so the mask is a by-product of the last pass. The second also hashes PASS bytes of
 * ciphertext, all powers there and no batch open; it is called when `all` takes at least as many
 * GROUPs as PASS bytes. PASS_MOST is the widest pass.
 */
TIER_INLINE void gcm_xor(const uint8_t *in, uint8_t *out, const uint8_t *stream, size_t length)
{
    for (; length >= 2 * SM4_BLOCK; length -= 32, in += 32, out += 32, stream += 32) {
        block first = block_xor(block_load(in), block_load(stream));
        block second = block_xor(block_load(in + 16), block_load(stream + 16));

        block_store(out, first);
        block_store(out + 16, second);
    }
    if (length >= SM4_BLOCK) {
        block_store(out, block_xor(block_load(in), block_load(stream)));
        length -= 16, in += 16, out += 16, stream += 16;
    }
    if (length > 0) {
        /* A buffer of one block, so that the last one is read and written to its end only. */
        uint8_t last[SM4_BLOCK] = {0};

        memcpy(last, in, length);
        block_store(last, block_xor(block_load(last), block_load(stream)));
        memcpy(out, last, length);
    }
}

/* The key stream is as secret as the text; the barrier keeps the stores. */
TIER_INLINE void gcm_forget(uint8_t *stream, size_t used)
{
    used = (used + GROUP - 1) / GROUP * GROUP;
    for (size_t i = 0; i < used; i += SM4_BLOCK)
        block_store(stream + i, block_zero());
    __asm__ volatile("" : : "r"(stream) : "memory");
}

TIER_INLINE uint32_t gcm_word(const uint8_t *bytes)
{
    uint32_t word;

    memcpy(&word, bytes, sizeof word);
    return __builtin_bswap32(word);
}

TIER_INLINE void gcm_run(const sm4_key *key, const uint8_t *nonce_bytes, const uint8_t *aad,
                         size_t aad_length, const uint8_t *in, uint8_t *out, size_t length,
                         uint8_t *tag, int seal)
{
    _Alignas(64) uint8_t stream[PASS_MOST];
    const uint32_t nonce[3] = {gcm_word(nonce_bytes), gcm_word(nonce_bytes + 4),
                               gcm_word(nonce_bytes + 8)};
    const uint8_t *ciphertext = seal ? out : in;
    size_t blocks = length / SM4_BLOCK + (length % SM4_BLOCK != 0);
    int bulk = length >= PASS && key->powers_for >= length;
    size_t done = 0, hashed = 0;
    uint32_t counter = 2;
    size_t last;
    ghash hash;

    if (length == 0)
        in = out = stream; /* callers may have NULL, which nothing may be added to */
    ghash_start(&hash);
    ghash_bytes(&hash, key, aad, aad_length, bulk ? 0 : blocks + 1);
    do {
        size_t now = length - done, count;

        last = now + SM4_BLOCK <= PASS_MOST;
        now = last ? now : PASS;
        count = (now + SM4_BLOCK - 1) / SM4_BLOCK;
        if (bulk && (count + last) * SM4_BLOCK > PASS - GROUP &&
            (seal ? done : length) - hashed >= PASS) {
            gcm_stream_and_hash(key, nonce, counter, count, count + last, stream, &hash,
                                ciphertext + hashed);
            hashed += PASS;
        } else {
            gcm_stream(key, nonce, counter, count, count + last, stream);
        }
        /* Opening in place: what the text replaces must have been hashed. */
        if (!seal && hashed < done + now) {
            ghash_bytes(&hash, key, in + hashed, length - hashed, 1);
            hashed = length;
        }
        gcm_xor(in + done, out + done, stream, now);
        done += now;
        counter += PASS / SM4_BLOCK;
        blocks = count;
    } while (!last);
    if (hashed < length)
        ghash_bytes(&hash, key, ciphertext + hashed, length - hashed, 1);
    block_store(tag, block_xor(block_load(stream + blocks * SM4_BLOCK),
                               ghash_finish(&hash, key, aad_length, length)));
    gcm_forget(stream, length < PASS ? (blocks + 1) * SM4_BLOCK : PASS_MOST);
}

/* The tier's entries; own_keys fills key->tier_keys. */
#define GCM_TIER(symbol, name, usable, expand)                                                     \
    TIER_CODE void powers(sm4_key *key, size_t message_bytes)                                      \
    {                                                                                              \
        ghash_expand(key, message_bytes);                                                          \
        own_keys(key);                                                                             \
    }                                                                                              \
                                                                                                   \
    TIER_CODE void gcm(const sm4_key *key, const uint8_t *nonce, const uint8_t *aad,               \
                       size_t aad_length, const uint8_t *in, uint8_t *out, size_t length,          \
                       uint8_t *tag, int seal)                                                     \
    {                                                                                              \
        gcm_run(key, nonce, aad, aad_length, in, out, length, tag, seal);                          \
    }                                                                                              \
                                                                                                   \
    const sm4_tier symbol = {name, usable, powers, gcm, expand}
