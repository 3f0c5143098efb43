/* SM4-GCM with GFNI, AVX-512 and VPCLMULQDQ (Ice Lake, Zen 4 and later).
 *
 * A short message is one run of streams512.h and one reduction of ghash512.h. In a long one each
 * group of 64 blocks, or pair of groups, hashes ciphertext beside its rounds: opening, its own;
 * sealing, that of the one before. The block that masks the tag is a lane of whatever comes last.
 */
#include "sm4.h"

#if defined(__x86_64__)

#include <string.h>

#include "cpu_x86.h"
#include "streams512.h"

/* --- a message ------------------------------------------------------------------------------- */

/* The last 0 to 63 blocks: y is the hash so far and joins the first of them, s holds products that
 * have no reduction yet. Returns the hash of everything. */
INLINE __m128i end(const sm4_key *key, const start *nonce, uint32_t counter, const uint8_t *in,
                   uint8_t *out, size_t length, sum s, __m512i y, __m128i lengths, __m128i *mask,
                   int seal)
{
    const form *keys = (const form *)(const void *)key->tier_keys;
    __m512i stream[16];
    size_t blocks = blocks_of(length), exponent = blocks + 1;

    if (blocks < 16) {
        *mask = stream16(keys, nonce, counter, stream, 0);
    } else if (blocks == 16) {
        *mask = stream16(keys, nonce, counter, stream, 1);
    } else if (blocks < 32) {
        *mask = stream32(keys, nonce, counter, stream, 0);
    } else if (blocks == 32) {
        *mask = stream32(keys, nonce, counter, stream, 1);
    } else {
        *mask = stream64(keys, nonce, counter, stream);
    }
    for (size_t at = 0; at < length; at += 64, exponent -= 4) {
        __mmask64 some = first(length - at);
        __m512i text = _mm512_maskz_loadu_epi8(some, in + at);
        __m512i other = _mm512_maskz_mov_epi8(some, _mm512_xor_si512(text, stream[at / 64]));
        _mm512_mask_storeu_epi8(out + at, some, other);
        sum_add(&s, key, exponent, _mm512_xor_si512(reversed(seal ? other : text), y));
        y = _mm512_setzero_si512();
    }
    if (blocks == 0) {
        lengths = _mm_xor_si128(lengths, _mm512_castsi512_si128(y));
    }
    sm4_wipe(stream, blocks <= 16 ? 256 : blocks <= 32 ? 512 : 1024);
    return sum_total_and(&s, key, lengths);
}

__attribute__((target(TARGET))) static void gcm(const sm4_key *key,
                                                const uint8_t nonce[SM4_NONCE], const uint8_t *aad,
                                                size_t aad_length, const uint8_t *in, uint8_t *out,
                                                size_t length, uint8_t tag[SM4_TAG], int seal)
{
    const form *keys = (const form *)(const void *)key->tier_keys;
    size_t aad_blocks = blocks_of(aad_length), blocks = blocks_of(length);
    __m128i lengths = _mm_set_epi64x((long long)(aad_length * 8), (long long)(length * 8));
    uint32_t counter = 2;
    int masked = 0; /* whether a group has made the block for the tag */
    beside b = {.key = key, .y = _mm_setzero_si128()};
    sum s = sum_none();
    start begin;
    __m128i hash;

    __m128i n = _mm_maskz_loadu_epi8(0x0fff, nonce);
    _mm_storeu_si128((__m128i *)begin.bytes,
                     _mm_gf2p8affine_epi64_epi8(n, _mm_set1_epi64x(SM4_AFFINE_IN), 0));
    if (aad_blocks + blocks < GROUP) { /* one reduction for everything */
        sum_bytes(&s, key, aad_blocks + blocks + 1, aad, aad_length, _mm512_setzero_si512());
    } else {
        while (aad_length != 0) {
            size_t now = aad_length < GROUP_BYTES ? aad_length : GROUP_BYTES;
            sum_bytes(&s, key, blocks_of(now), aad, now, _mm512_zextsi128_si512(b.y));
            b.y = sum_total(&s);
            s = sum_none();
            aad += now, aad_length -= now;
        }
        uint8_t padded[GROUP_BYTES];
        const uint8_t *before = NULL; /* sealing: the group that is not hashed yet */
        while (length >= 2 * GROUP_BYTES) { /* two groups */
            b.hashed = seal ? before : in;
            masked = length == 2 * GROUP_BYTES;
            if (b.hashed != NULL && masked) {
                group_pair(keys, &begin, counter, in, out, &b, 1, 1);
            } else if (b.hashed != NULL) {
                group_pair(keys, &begin, counter, in, out, &b, 1, 0);
            } else if (masked) {
                group_pair(keys, &begin, counter, in, out, &b, 0, 1);
            } else {
                group_pair(keys, &begin, counter, in, out, &b, 0, 0);
            }
            before = out, counter += 2 * GROUP;
            in += 2 * GROUP_BYTES, out += 2 * GROUP_BYTES, length -= 2 * GROUP_BYTES;
        }
        if (seal && before != NULL) { /* a group has room for the hash of one */
            sum_bytes(&s, key, GROUP, before, GROUP_BYTES, _mm512_zextsi128_si512(b.y));
            b.y = sum_total(&s);
            s = sum_none();
            before += GROUP_BYTES;
        }
        while (length > GROUP_BYTES - SM4_BLOCK) { /* 64 blocks, the last one perhaps cut */
            size_t now = length < GROUP_BYTES ? length : GROUP_BYTES;
            const uint8_t *from = in;
            uint8_t *to = out;
            if (now < GROUP_BYTES) {
                memset(padded + now, 0, GROUP_BYTES - now);
                memcpy(padded, in, now);
                from = to = padded;
            }
            b.hashed = seal ? before : from;
            masked = length <= GROUP_BYTES;
            if (b.hashed != NULL && masked) {
                group(keys, &begin, counter, from, to, &b, 1, 1);
            } else if (b.hashed != NULL) {
                group(keys, &begin, counter, from, to, &b, 1, 0);
            } else if (masked) {
                group(keys, &begin, counter, from, to, &b, 0, 1);
            } else {
                group(keys, &begin, counter, from, to, &b, 0, 0);
            }
            if (now < GROUP_BYTES) {
                memcpy(out, padded, now);
                memset(padded + now, 0, GROUP_BYTES - now);
            }
            before = to, counter += GROUP, in += now, out += now, length -= now;
        }
        if (seal && before != NULL) {
            sum_bytes(&s, key, GROUP, before, GROUP_BYTES, _mm512_zextsi128_si512(b.y));
            b.y = sum_total(&s);
            s = sum_none();
        }
        if (before == padded) {
            sm4_wipe(padded, sizeof padded);
        }
    }
    if (masked) {
        hash = sum_total_and(&s, key, _mm_xor_si128(lengths, b.y));
    } else {
        hash = end(key, &begin, counter, in, out, length, s, _mm512_zextsi128_si512(b.y), lengths,
                   &b.mask, seal);
    }
    hash = _mm512_castsi512_si128(reversed(_mm512_castsi128_si512(hash)));
    _mm_storeu_si128((__m128i *)tag, _mm_xor_si128(hash, b.mask));
}

/* --- keys ------------------------------------------------------------------------------------ */

/* H^64 .. H^1 in this order, so that a load at H^e brings the powers of the next three blocks. */
__attribute__((target(TARGET))) static void powers(sm4_key *key, size_t message_bytes)
{
    form *keys = (form *)(void *)key->tier_keys;
    size_t need = message_bytes == 0 || message_bytes > (GROUP - 1) * SM4_BLOCK
                      ? GROUP
                      : blocks_of(message_bytes) + 1;
    const __m512i in = _mm512_set1_epi64(SM4_AFFINE_IN);
    const __m512i swap = _mm512_broadcast_i32x4(
        _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
    const __m512i four_times =
        _mm512_set_epi8(15, 15, 15, 15, 14, 14, 14, 14, 13, 13, 13, 13, 12, 12, 12, 12, 11, 11, 11,
                        11, 10, 10, 10, 10, 9, 9, 9, 9, 8, 8, 8, 8, 7, 7, 7, 7, 6, 6, 6, 6, 5, 5, 5,
                        5, 4, 4, 4, 4, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);

    for (int i = 0; i < SM4_ROUNDS; i += 16) {
        __m512i k = _mm512_shuffle_epi8(_mm512_loadu_si512(key->round_keys + i), swap);
        _mm512_storeu_si512(keys->words + i, _mm512_gf2p8affine_epi64_epi8(k, in, SM4_CONSTANT_IN));
    }
    for (int i = 0; i < SM4_ROUNDS; i += 4) {
        __m512i k = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(keys->words + i)));
        _mm512_storeu_si512(keys->bytes + 4 * i, _mm512_shuffle_epi8(k, four_times));
    }
    /* H times x (RFC 8452, appendix A), then H^2, then as many at once as there are. */
    __m128i h = _mm512_castsi512_si128(
        reversed(_mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)key->h))));
    __m128i carries = _mm_srli_epi64(h, 63);
    __m128i over = _mm_shuffle_epi32(_mm_sub_epi64(_mm_setzero_si128(), carries), 0xee);
    h = _mm_or_si128(_mm_slli_epi64(h, 1), _mm_bslli_si128(carries, 8));
    h = _mm_xor_si128(h, _mm_and_si128(over, _mm_set_epi64x((long long)0xc200000000000000u, 1)));
    uint8_t *last = key->powers + (SM4_POWERS - 1) * SM4_BLOCK;
    __m512i h1 = _mm512_castsi128_si512(h);
    __m512i h2 = multiplied(h1, h1);
    __m512i h21 = _mm512_inserti32x4(h2, h, 1);
    __m512i h43 = multiplied(_mm512_broadcast_i32x4(_mm512_castsi512_si128(h2)), h21);
    __m512i h4321 = _mm512_inserti64x4(h43, _mm512_castsi512_si256(h21), 1);
    _mm512_storeu_si512(last - 3 * SM4_BLOCK, h4321);
    for (size_t have = 4; have < need; have *= 2) {
        __m512i top = _mm512_broadcast_i32x4(_mm_loadu_si128(
            (const __m128i *)(last - (have - 1) * SM4_BLOCK)));
        for (size_t i = 4; i <= have; i += 4) {
            __m512i those = _mm512_loadu_si512(last - (i - 1) * SM4_BLOCK);
            _mm512_storeu_si512(last - (have + i - 1) * SM4_BLOCK, multiplied(those, top));
        }
    }
    key->powers_for = need == GROUP ? SIZE_MAX : (need - 1) * SM4_BLOCK;
}

/* Round keys and H by the same instructions; CK is 7 (4 i + j) mod 256 (GB/T 32907, 7.3). */
__attribute__((target(TARGET))) static void expand(sm4_key *key, const uint8_t raw[SM4_BLOCK])
{
    const __m128i in = _mm_set1_epi64x(SM4_AFFINE_IN), out = _mm_set1_epi64x(SM4_AFFINE_OUT);
    const __m128i swap = _mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3);
    __m128i k = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)raw), swap);
    k = _mm_xor_si128(k, _mm_set_epi32((int)0xb27022dc, 0x677d9197, 0x56aa3350, (int)0xa3b1bac6));
    __m128i k0 = k, k1 = _mm_shuffle_epi32(k, 1), k2 = _mm_shuffle_epi32(k, 2);
    __m128i k3 = _mm_shuffle_epi32(k, 3);
    __m128i h0 = _mm_setzero_si128(), h1 = h0, h2 = h0, h3 = h0;
    uint32_t ck = 0x00070e15;

    for (int round = 0; round < SM4_ROUNDS; round++) {
        __m128i t = _mm_xor_si128(k2, _mm_cvtsi32_si128((int)ck));
        t = _mm_ternarylogic_epi32(k3, k1, t, 0x96);
        t = _mm_gf2p8affine_epi64_epi8(t, in, SM4_CONSTANT_IN);
        t = _mm_gf2p8affineinv_epi64_epi8(t, out, SM4_CONSTANT_OUT);
        k0 = _mm_xor_si128(k0, t);
        t = _mm_ternarylogic_epi32(k0, _mm_rol_epi32(t, 13), _mm_rol_epi32(t, 23), 0x96);
        k0 = k1, k1 = k2, k2 = k3, k3 = t;
        key->round_keys[round] = (uint32_t)_mm_cvtsi128_si32(t);
        /* Byte by byte plus 28, without a carry between them. */
        ck = ((ck & 0x7f7f7f7fu) + 0x1c1c1c1cu) ^ (ck & 0x80808080u);
        /* H = E(K, 0) goes along, on numbers rather than bytes in memory: so rol, not ror. */
        __m128i word = _mm_gf2p8affine_epi64_epi8(t, in, SM4_CONSTANT_IN);
        __m128i u = _mm_ternarylogic_epi32(h3, h1, _mm_xor_si128(h2, word), 0x96);
        __m128i r = _mm_gf2p8affineinv_epi64_epi8(u, _mm_set1_epi64x(SM4_FOLD_R), 0);
        __m128i d = _mm_gf2p8affineinv_epi64_epi8(u, _mm_set1_epi64x(SM4_FOLD_D), 0);
        h0 = _mm_xor_si128(h0, _mm_gf2p8affineinv_epi64_epi8(u, _mm_set1_epi64x(SM4_FOLD_A),
                                                             SM4_CONSTANT_FOLD));
        h0 = _mm_ternarylogic_epi32(h0, _mm_rol_epi32(r, 8), _mm_rol_epi32(r, 16), 0x96);
        u = _mm_xor_si128(h0, _mm_rol_epi32(d, 24));
        h0 = h1, h1 = h2, h2 = h3, h3 = u;
    }
    h0 = _mm_unpacklo_epi64(_mm_unpacklo_epi32(h3, h2), _mm_unpacklo_epi32(h1, h0));
    h0 = _mm_gf2p8affine_epi64_epi8(h0, _mm_set1_epi64x(SM4_AFFINE_IN_INVERSE), 0);
    _mm_storeu_si128((__m128i *)key->h, _mm_shuffle_epi8(h0, swap));
}

static int usable(void)
{
    /* AVX512 F 16, DQ 17, BW 30, VL 31 and BMI2 8 in EBX; ZMM, opmask saved by the system. */
    const unsigned wanted = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31 | 1u << 8;
    const unsigned features = CPU_AVX2 | CPU_PCLMUL | CPU_GFNI | CPU_VPCLMUL;
    unsigned a, b, c, d, low, high;

    if ((cpu_features() & features) != features || !__get_cpuid_count(7, 0, &a, &b, &c, &d) ||
        (b & wanted) != wanted) {
        return 0;
    }
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & 0xe6) == 0xe6;
}

const sm4_tier sm4_tier_gfni_avx512 = {"gfni-avx512", usable, powers, gcm, expand};

#endif
