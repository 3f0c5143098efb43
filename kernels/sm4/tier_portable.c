/* The tier for any CPU: bit-sliced SM4, 32 blocks at a time, and GHASH by integer multiplication.
 *
 * Nothing depends on secrets but the operands of and, xor, shift and multiply, which take the same
 * time for all operands on every CPU this runs on (a few microcontrollers multiply faster by small
 * numbers; they run no sidecar).
 */
#include "sm4.h"

#include <string.h>

enum { LANES = 32, BATCH = LANES * SM4_BLOCK };

/* Bit i of byte j (0: the most significant) of one word of the state: element j, a bit a block. */
typedef uint32_t plane __attribute__((vector_size(16)));
#include "sbox_circuit.h"

#if defined(__clang__) || __GNUC__ >= 12
#define TURN(p, by) \
    __builtin_shufflevector(p, p, (by) & 3, ((by) + 1) & 3, ((by) + 2) & 3, ((by) + 3) & 3)
#else
#define TURN(p, by) \
    __builtin_shuffle(p, (plane){(by) & 3, ((by) + 1) & 3, ((by) + 2) & 3, ((by) + 3) & 3})
#endif

/* x0 ^= L(S(x1 ^ x2 ^ x3 ^ key)). A rotation by 8 is a turn of elements, one by 2 a step between
 * planes where the lowest two take from the next byte. */
static inline __attribute__((always_inline)) void round_planes(plane x0[8], const plane x1[8],
                                                               const plane x2[8],
                                                               const plane x3[8], uint32_t key)
{
    plane t[8], two[8];

    for (int bit = 0; bit < 8; bit++) {
        plane k;
        for (int byte = 0; byte < 4; byte++) {
            k[byte] = 0u - (key >> (24 - 8 * byte + bit) & 1u);
        }
        t[bit] = x1[bit] ^ x2[bit] ^ x3[bit] ^ k;
    }
    sbox_planes(t);
    two[0] = TURN(t[6], 1), two[1] = TURN(t[7], 1);
    for (int bit = 2; bit < 8; bit++) {
        two[bit] = t[bit - 2];
    }
    for (int bit = 0; bit < 8; bit++) {
        plane sum = two[bit] ^ TURN(two[bit], 1);
        x0[bit] ^= t[bit] ^ sum ^ TURN(two[bit], 2) ^ TURN(t[bit], 3);
    }
}

/* Transposes 32 x 32 bits in each of the four elements. */
static void transpose(plane m[32])
{
    uint32_t mask = 0x0000ffffu;
    for (int step = 16; step != 0; step >>= 1, mask ^= mask << step) {
        for (int i = 0; i < 32; i = (i + step + 1) & ~step) {
            plane t = (m[i] >> step ^ m[i + step]) & mask;
            m[i + step] ^= t;
            m[i] ^= t << step;
        }
    }
}

static inline uint32_t swapped(uint32_t x)
{
    return __builtin_bswap32(x);
}

/* The key stream of counters first .. first + 31. */
static void key_stream(const sm4_key *key, const uint8_t nonce[SM4_NONCE], uint32_t first,
                       uint8_t out[BATCH])
{
    plane x[4][8], m[32];

    for (int word = 0; word < 3; word++) {
        for (int bit = 0; bit < 8; bit++) {
            for (int byte = 0; byte < 4; byte++) {
                x[word][bit][byte] = 0u - (nonce[4 * word + byte] >> bit & 1u);
            }
        }
    }
    for (uint32_t block = 0; block < LANES; block++) {
        m[block] = (plane){first + block, 0, 0, 0};
    }
    transpose(m);
    for (int bit = 0; bit < 8; bit++) {
        x[3][bit] = (plane){m[24 + bit][0], m[16 + bit][0], m[8 + bit][0], m[bit][0]};
    }
    for (int round = 0; round < SM4_ROUNDS; round += 4) {
        round_planes(x[0], x[1], x[2], x[3], key->round_keys[round]);
        round_planes(x[1], x[2], x[3], x[0], key->round_keys[round + 1]);
        round_planes(x[2], x[3], x[0], x[1], key->round_keys[round + 2]);
        round_planes(x[3], x[0], x[1], x[2], key->round_keys[round + 3]);
    }
    for (int bit = 0; bit < 8; bit++) {
        for (int byte = 0; byte < 4; byte++) {
            m[24 - 8 * byte + bit] =
                (plane){x[3][bit][byte], x[2][bit][byte], x[1][bit][byte], x[0][bit][byte]};
        }
    }
    transpose(m);
    for (int block = 0; block < LANES; block++) {
        for (int word = 0; word < 4; word++) {
            uint32_t big = m[block][word];
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
            big = swapped(big);
#endif
            memcpy(out + SM4_BLOCK * block + 4 * word, &big, 4);
        }
    }
}

/* GHASH in POLYVAL's form (RFC 8452, appendix A): blocks byte-reversed, H times x, so that products
 * need no shift. Here (hi, lo) are the halves of a field element. */
typedef struct {
    uint64_t lo, hi;
} element;

typedef struct { /* H, the sum of its halves, and all three with their bits reversed */
    uint64_t lo, hi, sum, lo_turned, hi_turned, sum_turned;
} hash_key;

/* The low 64 bits of the product without carries. Of each operand every fourth bit is taken, so the
 * at most 16 ones that meet at a place (15 below the last) carry into the holes only. */
static inline uint64_t multiply(uint64_t x, uint64_t y)
{
    const uint64_t m0 = 0x1111111111111111u, m1 = m0 << 1, m2 = m0 << 2, m3 = m0 << 3;
    uint64_t x0 = x & m0, x1 = x & m1, x2 = x & m2, x3 = x & m3;
    uint64_t y0 = y & m0, y1 = y & m1, y2 = y & m2, y3 = y & m3;

    return (((x0 * y0) ^ (x1 * y3) ^ (x2 * y2) ^ (x3 * y1)) & m0) |
           (((x0 * y1) ^ (x1 * y0) ^ (x2 * y3) ^ (x3 * y2)) & m1) |
           (((x0 * y2) ^ (x1 * y1) ^ (x2 * y0) ^ (x3 * y3)) & m2) |
           (((x0 * y3) ^ (x1 * y2) ^ (x2 * y1) ^ (x3 * y0)) & m3);
}

static inline uint64_t turned(uint64_t x)
{
    x = (x >> 1 & 0x5555555555555555u) | (x & 0x5555555555555555u) << 1;
    x = (x >> 2 & 0x3333333333333333u) | (x & 0x3333333333333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0f0f0f0f0fu) | (x & 0x0f0f0f0f0f0f0f0fu) << 4;
    return __builtin_bswap64(x);
}

static element product(element y, const hash_key *h)
{
    uint64_t lo_turned = turned(y.lo), hi_turned = turned(y.hi);
    uint64_t a0 = multiply(y.lo, h->lo), b0 = multiply(y.hi, h->hi);
    uint64_t c0 = multiply(y.lo ^ y.hi, h->sum) ^ a0 ^ b0;
    /* The high half is the low half of the reversed operands, reversed. */
    uint64_t a1 = multiply(lo_turned, h->lo_turned), b1 = multiply(hi_turned, h->hi_turned);
    uint64_t c1 = multiply(lo_turned ^ hi_turned, h->sum_turned) ^ a1 ^ b1;
    a1 = turned(a1) >> 1, b1 = turned(b1) >> 1, c1 = turned(c1) >> 1;
    uint64_t p0 = a0, p1 = a1 ^ c0, p2 = b0 ^ c1, p3 = b1;
    /* Add what clears the low half, a multiple of x^128 + x^127 + x^126 + x^121 + 1; what is left
     * is the product over x^128. */
    p1 ^= p0 << 63 ^ p0 << 62 ^ p0 << 57;
    p2 ^= p0 ^ p0 >> 1 ^ p0 >> 2 ^ p0 >> 7;
    p2 ^= p1 << 63 ^ p1 << 62 ^ p1 << 57;
    p3 ^= p1 ^ p1 >> 1 ^ p1 >> 2 ^ p1 >> 7;
    return (element){p2, p3};
}

static inline uint64_t load_big(const uint8_t *bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < 8; i++) {
        value = value << 8 | bytes[i];
    }
    return value;
}

static inline void store_big(uint8_t *bytes, uint64_t value)
{
    for (int i = 0; i < 8; i++) {
        bytes[i] = (uint8_t)(value >> (56 - 8 * i));
    }
}

static element absorb(element y, const hash_key *h, const uint8_t *bytes, size_t length)
{
    uint8_t last[SM4_BLOCK] = {0};

    for (; length >= SM4_BLOCK; bytes += SM4_BLOCK, length -= SM4_BLOCK) {
        y.hi ^= load_big(bytes), y.lo ^= load_big(bytes + 8);
        y = product(y, h);
    }
    if (length != 0) {
        memcpy(last, bytes, length);
        y.hi ^= load_big(last), y.lo ^= load_big(last + 8);
        y = product(y, h);
    }
    return y;
}

static void powers(sm4_key *key, size_t message_bytes)
{
    uint64_t hi = load_big(key->h), lo = load_big(key->h + 8), over = 0u - (hi >> 63);
    hash_key h;

    (void)message_bytes;
    h.hi = (hi << 1 | lo >> 63) ^ (over & 0xc200000000000000u);
    h.lo = lo << 1 ^ (over & 1u);
    h.sum = h.lo ^ h.hi;
    h.lo_turned = turned(h.lo), h.hi_turned = turned(h.hi), h.sum_turned = turned(h.sum);
    memcpy(key->powers, &h, sizeof h);
    key->powers_for = SIZE_MAX;
    sm4_wipe(&h, sizeof h);
}

static void gcm(const sm4_key *key, const uint8_t nonce[SM4_NONCE], const uint8_t *aad,
                size_t aad_length, const uint8_t *in, uint8_t *out, size_t length,
                uint8_t tag[SM4_TAG], int seal)
{
    uint8_t stream[BATCH], mask[SM4_TAG];
    uint32_t counter = 1;
    size_t left = length, at = SM4_BLOCK; /* the first block of the stream masks the tag */
    hash_key h;

    memcpy(&h, key->powers, sizeof h);
    element y = absorb((element){0, 0}, &h, aad, aad_length);
    key_stream(key, nonce, counter, stream);
    memcpy(mask, stream, sizeof mask);
    while (left != 0) {
        if (at == BATCH) {
            key_stream(key, nonce, counter += LANES, stream);
            at = 0;
        }
        size_t now = left < BATCH - at ? left : BATCH - at;
        if (!seal) {
            y = absorb(y, &h, in, now);
        }
        for (size_t i = 0; i < now; i++) {
            out[i] = in[i] ^ stream[at + i];
        }
        if (seal) {
            y = absorb(y, &h, out, now);
        }
        in += now, out += now, left -= now, at += now;
    }
    y.hi ^= (uint64_t)aad_length * 8, y.lo ^= (uint64_t)length * 8;
    y = product(y, &h);
    store_big(tag, y.hi), store_big(tag + 8, y.lo);
    for (int i = 0; i < SM4_TAG; i++) {
        tag[i] ^= mask[i];
    }
    sm4_wipe(stream, sizeof stream);
    sm4_wipe(mask, sizeof mask);
    sm4_wipe(&h, sizeof h);
}

static int usable(void)
{
    return 1;
}

const sm4_tier sm4_tier_portable = {
    .name = "portable", .usable = usable, .powers = powers, .gcm = gcm};
