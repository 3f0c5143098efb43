/* The CRC-32 of zlib, by carry-less multiplication: sixteen bytes at a time are folded onto those
 * further on, as in "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction"
 * (Gopal et al., Intel, 2009), whose constants for this polynomial these are. */
#include "wire.h"

enum { LANES = 4, LANE_BYTES = 16, GIL_BYTES = 4096 };

static uint32_t few_bytes(uint32_t crc, const uint8_t *at, const uint8_t *end)
{
    while (at < end) {
        crc ^= *at++;
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc >> 1) ^ (UINT32_C(0xEDB88320) & (0 - (crc & 1)));
        }
    }
    return crc;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(WIRE_PORTABLE)

#include <cpuid.h>
#include <immintrin.h>

#define CRC_CODE __attribute__((target("pclmul,sse4.1")))

bool wire_crc32_available(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_PCLMUL) && (c & bit_SSE4_1);
}

/* `fold` by as many bytes as `by` is for, onto `next`. */
CRC_CODE static inline __m128i fold(__m128i folded, __m128i by, __m128i next)
{
    __m128i low = _mm_clmulepi64_si128(folded, by, 0x00);
    __m128i high = _mm_clmulepi64_si128(folded, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

CRC_CODE static inline __m128i load(const uint8_t *at)
{
    return _mm_loadu_si128((const __m128i *)at);
}

/* At least 64 bytes, a multiple of 16. */
CRC_CODE static uint32_t many_bytes(uint32_t crc, const uint8_t *at, const uint8_t *end)
{
    const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i to_64 = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i words = _mm_setr_epi32(-1, 0, -1, 0);
    __m128i lane[LANES];
    for (int i = 0; i < LANES; i++) {
        lane[i] = load(at + (ptrdiff_t)LANE_BYTES * i);
    }
    lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128((int)crc));
    for (at += LANES * LANE_BYTES; end - at >= LANES * LANE_BYTES; at += LANES * LANE_BYTES) {
        for (int i = 0; i < LANES; i++) {
            lane[i] = fold(lane[i], by_64, load(at + (ptrdiff_t)LANE_BYTES * i));
        }
    }
    __m128i all = lane[0];
    for (int i = 1; i < LANES; i++) {
        all = fold(all, by_16, lane[i]);
    }
    for (; at < end; at += LANE_BYTES) {
        all = fold(all, by_16, load(at));
    }
    all = _mm_xor_si128(_mm_srli_si128(all, 8), _mm_clmulepi64_si128(all, by_16, 0x10));
    __m128i rest = _mm_srli_si128(all, 4);
    all = _mm_clmulepi64_si128(_mm_and_si128(all, words), to_64, 0x00);
    all = _mm_xor_si128(all, rest);
    __m128i part = _mm_clmulepi64_si128(_mm_and_si128(all, words), barrett, 0x10);
    part = _mm_clmulepi64_si128(_mm_and_si128(part, words), barrett, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(all, part), 1);
}

#else

bool wire_crc32_available(void)
{
    return false;
}

static uint32_t many_bytes(uint32_t crc, const uint8_t *at, const uint8_t *end)
{
    return few_bytes(crc, at, end);
}

#endif

static uint32_t crc_of(uint32_t crc, const uint8_t *at, Py_ssize_t size)
{
    const uint8_t *end = at + size;
    crc = ~crc;
    if (size >= LANES * LANE_BYTES) {
        const uint8_t *middle = at + size / LANE_BYTES * LANE_BYTES;
        crc = many_bytes(crc, at, middle);
        at = middle;
    }
    return ~few_bytes(crc, at, end);
}

/* crc32(data, value): as zlib's, for bytes. */
PyObject *wire_crc32(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 2 || !PyBytes_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "crc32 takes bytes and a number");
        return NULL;
    }
    unsigned long value = PyLong_AsUnsignedLong(args[1]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (value > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a CRC-32 has 32 bits");
        return NULL;
    }
    const uint8_t *at = (const uint8_t *)PyBytes_AS_STRING(args[0]);
    Py_ssize_t size = PyBytes_GET_SIZE(args[0]);
    uint32_t made;
    if (size < GIL_BYTES) {
        made = crc_of((uint32_t)value, at, size);
    } else {
        Py_BEGIN_ALLOW_THREADS
        made = crc_of((uint32_t)value, at, size);
        Py_END_ALLOW_THREADS
    }
    return PyLong_FromUnsignedLong(made);
}
