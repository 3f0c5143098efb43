/* GHASH by carry-less multiplication, the part that no instruction set changes: a template.
 *
 * Kept in POLYVAL's form (RFC 8452, appendix A): blocks are byte-reversed, H is multiplied by x
 * once and no product needs a shift. key->powers holds H^32 .. H^1 in this order, so that blocks of
 * a batch and their powers are read side by side; up to 32 products share one reduction.
 *
 * blocks_x86.h or blocks_arm.h, included before, gives `block` (16 bytes) and `sum` (unreduced
 * products), what is done with them, and TIER_INLINE.
 */
enum { GHASH_BATCH = 32 };

typedef struct {
    sum products;         /* of this batch */
    block carried;        /* what the batch before came to, until it joins the next block */
    const uint8_t *power; /* the next block's; meaningful while left > 0 */
    size_t left;          /* blocks that this batch still takes */
} ghash;

/* How many powers a message of this many bytes gets (SIZE_MAX: any). */
static inline size_t ghash_powers(size_t powers_for)
{
    return powers_for < (GHASH_BATCH - 2) * SM4_BLOCK ? powers_for / SM4_BLOCK + 2 : GHASH_BATCH;
}

TIER_INLINE block ghash_multiply(block a, block b)
{
    sum product = sum_zero();

    sum_add(&product, a, b);
    return sum_reduced(&product);
}

TIER_INLINE void ghash_expand(sm4_key *key, size_t message_bytes)
{
    size_t enough = message_bytes == 0 ? SIZE_MAX : message_bytes;
    size_t count = ghash_powers(enough);
    uint8_t *end = key->powers + GHASH_BATCH * SM4_BLOCK;
    uint64_t half[2], top;

    /* H * x: shift by one, and reduce if the top bit was set; by mask, as H is secret. */
    block_store((uint8_t *)half, block_reversed(block_load(key->h)));
    top = 0 - (half[1] >> 63);
    half[1] = (half[1] << 1 | half[0] >> 63) ^ (top & 0xC200000000000000ULL);
    half[0] = half[0] << 1 ^ (top & 1);
    memcpy(end - SM4_BLOCK, half, SM4_BLOCK);
    for (size_t i = 2; i <= count; i++) {
        /* From the halves rather than from the neighbour: shorter chains. */
        block a = block_load(end - i / 2 * SM4_BLOCK);
        block b = block_load(end - (i - i / 2) * SM4_BLOCK);

        block_store(end - i * SM4_BLOCK, ghash_multiply(a, b));
    }
    key->powers_for = count == GHASH_BATCH ? SIZE_MAX : enough;
    sm4_wipe(half, sizeof half);
}

TIER_INLINE void ghash_start(ghash *hash)
{
    hash->products = sum_zero();
    hash->carried = block_zero();
    hash->power = NULL;
    hash->left = 0;
}

TIER_INLINE void ghash_settle(ghash *hash)
{
    hash->carried = sum_reduced(&hash->products);
    hash->products = sum_zero();
}

/* Begin a batch if none is open; `coming` is how many blocks the hash still takes. */
TIER_INLINE void ghash_open(ghash *hash, const sm4_key *key, size_t coming)
{
    size_t most = ghash_powers(key->powers_for);

    if (hash->left > 0)
        return;
    hash->left = coming < most ? coming : most;
    hash->power = key->powers + (GHASH_BATCH - hash->left) * SM4_BLOCK;
}

TIER_INLINE void ghash_passed(ghash *hash, size_t blocks)
{
    hash->power += blocks * SM4_BLOCK;
    hash->left -= blocks;
    hash->carried = block_zero();
    if (hash->left == 0)
        ghash_settle(hash);
}

TIER_INLINE void ghash_block(ghash *hash, const sm4_key *key, block reversed, size_t coming)
{
    ghash_open(hash, key, coming);
    sum_add(&hash->products, block_xor(reversed, hash->carried), block_load(hash->power));
    ghash_passed(hash, 1);
}

/* Take bytes, zeros added to fill the last block; `following` blocks come after them that may share
 * a batch with these. */
TIER_INLINE void ghash_bytes(ghash *hash, const sm4_key *key, const uint8_t *bytes, size_t length,
                             size_t following)
{
    size_t coming = length / SM4_BLOCK + (length % SM4_BLOCK != 0) + following;

    while (length >= SM4_BLOCK) {
        size_t blocks = length / SM4_BLOCK;

        ghash_open(hash, key, coming);
        blocks = blocks < hash->left ? blocks : hash->left;
        for (size_t i = 0; i + 1 < blocks; i += 2) {
            sum_add_two(&hash->products, hash->carried, bytes + i * SM4_BLOCK,
                        hash->power + i * SM4_BLOCK);
            hash->carried = block_zero();
        }
        if (blocks % 2 != 0) {
            size_t last = (blocks - 1) * SM4_BLOCK;

            sum_add(&hash->products,
                    block_xor(block_reversed(block_load(bytes + last)), hash->carried),
                    block_load(hash->power + last));
        }
        ghash_passed(hash, blocks);
        bytes += blocks * SM4_BLOCK;
        length -= blocks * SM4_BLOCK;
        coming -= blocks;
    }
    if (length > 0) {
        uint8_t last[SM4_BLOCK] = {0};

        memcpy(last, bytes, length);
        ghash_block(hash, key, block_reversed(block_load(last)), coming);
    }
}

/* Take the lengths, which end the hash, and give its value. */
TIER_INLINE block ghash_finish(ghash *hash, const sm4_key *key, size_t aad_length, size_t length)
{
    uint64_t bits[2] = {(uint64_t)length * 8, (uint64_t)aad_length * 8};

    ghash_block(hash, key, block_load((const uint8_t *)bits), 1);
    return block_reversed(hash->carried);
}
