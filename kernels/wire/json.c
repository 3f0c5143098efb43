/* Strings, values and objects of JSON as places in the bytes. */
#include "json.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

static inline bool continues(uint8_t c)
{
    return (c & 0xc0) == 0x80;
}

/* Passes what is not ASCII (RFC 3629 section 4: no overlong form, no surrogate, none above
 * U+10FFFF); NULL when it is not UTF-8. */
static const uint8_t *utf8_run(const uint8_t *p, const uint8_t *end)
{
    while (p < end && *p >= 0x80) {
        uint8_t lead = *p;
        Py_ssize_t left = end - p;
        if (lead >= 0xe1 && lead <= 0xef && lead != 0xed) {
            if (left < 3 || !continues(p[1]) || !continues(p[2])) {
                return NULL;
            }
            p += 3;
        } else if (lead >= 0xc2 && lead <= 0xdf) {
            if (left < 2 || !continues(p[1])) {
                return NULL;
            }
            p += 2;
        } else if (lead == 0xe0 || lead == 0xed) {
            if (left < 3 || !continues(p[1]) || !continues(p[2]) ||
                (lead == 0xe0 ? p[1] < 0xa0 : p[1] > 0x9f)) {
                return NULL;
            }
            p += 3;
        } else if (lead >= 0xf0 && lead <= 0xf4) {
            if (left < 4 || !continues(p[1]) || !continues(p[2]) || !continues(p[3]) ||
                (lead == 0xf0 && p[1] < 0x90) || (lead == 0xf4 && p[1] > 0x8f)) {
                return NULL;
            }
            p += 4;
        } else {
            return NULL;
        }
    }
    return p;
}

static int hex_digit(uint8_t c)
{
    if ((uint8_t)(c - '0') < 10) {
        return c - '0';
    }
    c |= 0x20;
    return (uint8_t)(c - 'a') < 6 ? c - 'a' + 10 : -1;
}

/* Four hex digits at `p`; -1 when they are not there. */
static int hex4(const uint8_t *p, const uint8_t *end)
{
    if (end - p < 4) {
        return -1;
    }
    int value = 0;
    for (int i = 0; i < 4; i++) {
        int nibble = hex_digit(p[i]);
        if (nibble < 0) {
            return -1;
        }
        value = value * 16 + nibble;
    }
    return value;
}

static bool high_surrogate(int unit)
{
    return unit >= 0xd800 && unit <= 0xdbff;
}

static bool low_surrogate(int unit)
{
    return unit >= 0xdc00 && unit <= 0xdfff;
}

/* `p` is at a backslash; returns what is behind the escape (both, of a surrogate pair). */
static const uint8_t *escape_end(const uint8_t *p, const uint8_t *end, unsigned *flags)
{
    *flags |= JSON_ESCAPE;
    if (end - p < 2) {
        return NULL;
    }
    switch (p[1]) {
    case '"': case '\\': case '/': case 'b': case 'f': case 'n': case 'r': case 't':
        return p + 2;
    case 'u':
        break;
    default:
        return NULL;
    }
    int unit = hex4(p + 2, end);
    if (unit < 0) {
        return NULL;
    }
    p += 6;
    if (high_surrogate(unit) && end - p >= 6 && p[0] == '\\' && p[1] == 'u' &&
        low_surrogate(hex4(p + 2, end))) {
        return p + 6;
    }
    if (high_surrogate(unit) || low_surrogate(unit)) {
        *flags |= JSON_UNPAIRED;
    }
    return p;
}

/* Passes plain ASCII text; stops at a quote, a backslash, a control byte, 0x80 and above. */
static const uint8_t *plain_end(const uint8_t *p, const uint8_t *end)
{
#if defined(__SSE2__) && !defined(WIRE_PORTABLE)
    const __m128i quote = _mm_set1_epi8('"'), slash = _mm_set1_epi8('\\');
    const __m128i low = _mm_set1_epi8(0x20);
    while (end - p >= 16) {
        __m128i block = _mm_loadu_si128((const __m128i *)p);
        /* As signed bytes, those below 0x20 are the control bytes and all from 0x80 on. */
        __m128i stop = _mm_or_si128(
            _mm_or_si128(_mm_cmpeq_epi8(block, quote), _mm_cmpeq_epi8(block, slash)),
            _mm_cmplt_epi8(block, low));
        unsigned mask = (unsigned)_mm_movemask_epi8(stop);
        if (mask != 0) {
            return p + __builtin_ctz(mask);
        }
        p += 16;
    }
#else
    while (end - p >= 8) {
        uint64_t word = load8(p);
        if ((word & EACH_BYTE(0x80)) | any_below(word, 0x20) | any_equal(word, '"') |
            any_equal(word, '\\')) {
            break;
        }
        p += 8;
    }
#endif
    while (p < end && *p >= 0x20 && *p < 0x80 && *p != '"' && *p != '\\') {
        p++;
    }
    return p;
}

const uint8_t *json_string(const uint8_t *p, const uint8_t *end, unsigned *flags)
{
    for (;;) {
        p = plain_end(p, end);
        if (p == end) {
            return NULL;
        }
        if (*p == '"') {
            return p;
        }
        if (*p == '\\') {
            p = escape_end(p, end, flags);
        } else {
            *flags |= JSON_WIDE;
            p = utf8_run(p, end); /* a control byte is no lead byte: it stays where it is */
            if (p != NULL && p < end && *p < 0x20) {
                return NULL;
            }
        }
        if (p == NULL) {
            return NULL;
        }
    }
}

static bool is_digit(const uint8_t *p, const uint8_t *end)
{
    return p < end && (uint8_t)(*p - '0') < 10;
}

static const uint8_t *digits_end(const uint8_t *p, const uint8_t *end)
{
    while (is_digit(p, end)) {
        p++;
    }
    return p;
}

static const uint8_t *number_end(const uint8_t *p, const uint8_t *end)
{
    p += *p == '-';
    if (!is_digit(p, end)) {
        return NULL;
    }
    p = *p == '0' ? p + 1 : digits_end(p, end);
    if (p < end && *p == '.') {
        if (!is_digit(++p, end)) {
            return NULL;
        }
        p = digits_end(p, end);
    }
    if (p < end && (*p | 0x20) == 'e') {
        p++;
        if (p < end && (*p == '+' || *p == '-')) {
            p++;
        }
        if (!is_digit(p, end)) {
            return NULL;
        }
        p = digits_end(p, end);
    }
    return p;
}

/* Passes a value that is no object and no array. */
static const uint8_t *scalar_end(const uint8_t *p, const uint8_t *end, unsigned *flags)
{
    switch (*p) {
    case '"':
        p = json_string(p + 1, end, flags);
        return p == NULL ? NULL : p + 1;
    case 't':
        return end - p >= 4 && memcmp(p, "true", 4) == 0 ? p + 4 : NULL;
    case 'f':
        return end - p >= 5 && memcmp(p, "false", 5) == 0 ? p + 5 : NULL;
    case 'n':
        return end - p >= 4 && memcmp(p, "null", 4) == 0 ? p + 4 : NULL;
    default:
        return number_end(p, end);
    }
}

/* Passes a member's name and colon, to its value. */
static const uint8_t *name_end(const uint8_t *p, const uint8_t *end, unsigned *flags)
{
    if (p == end || *p != '"' || (p = json_string(p + 1, end, flags)) == NULL) {
        return NULL;
    }
    p = json_blank(p + 1, end);
    return p < end && *p == ':' ? json_blank(p + 1, end) : NULL;
}

const uint8_t *json_value(const uint8_t *p, const uint8_t *end, unsigned *flags)
{
    uint64_t objects = 0; /* a bit for each open level: an object's, or an array's */
    int depth = 0;
    for (;;) {
        if (p == end) {
            return NULL;
        }
        if (*p == '{' || *p == '[') {
            bool object = *p == '{';
            if (depth++ == JSON_DEPTH_MAX) {
                return NULL;
            }
            objects = objects << 1 | object;
            p = json_blank(p + 1, end);
            if (p == end) {
                return NULL;
            }
            if (*p != (object ? '}' : ']')) {
                if (object && (p = name_end(p, end, flags)) == NULL) {
                    return NULL;
                }
                continue;
            }
            p++;
            objects >>= 1;
            depth--;
        } else if ((p = scalar_end(p, end, flags)) == NULL) {
            return NULL;
        }
        for (;;) { /* behind a value */
            if (depth == 0) {
                return p;
            }
            bool object = objects & 1;
            p = json_blank(p, end);
            if (p == end) {
                return NULL;
            }
            if (*p == ',') {
                p = json_blank(p + 1, end);
                if (object && (p = name_end(p, end, flags)) == NULL) {
                    return NULL;
                }
                break;
            }
            if (*p != (object ? '}' : ']')) {
                return NULL;
            }
            p++;
            objects >>= 1;
            depth--;
        }
    }
}

bool object_open(Object *object, const uint8_t *p, const uint8_t *end)
{
    object->p = p;
    object->end = end;
    object->bloom = 0;
    object->count = 0;
    return p < end && *p == '{';
}

int object_next(Object *object, unsigned *flags)
{
    const uint8_t *end = object->end, *p = json_blank(object->p, end);
    if (object->count == 0) {
        p = json_blank(p + 1, end); /* the opening brace */
        if (p < end && *p == '}') {
            object->p = p + 1;
            return 0;
        }
    } else if (p < end && *p == '}') {
        object->p = p + 1;
        return 0;
    } else if (p < end && *p == ',') {
        p = json_blank(p + 1, end);
    } else {
        return -1;
    }
    unsigned own = 0;
    Span name = {p + 1, 0};
    if (object->count == JSON_MEMBERS_MAX || p == end || *p != '"' ||
        (p = json_string(name.at, end, &own)) == NULL || (own & JSON_ESCAPE)) {
        return -1;
    }
    name.size = p - name.at;
    uint64_t bit = UINT64_C(1) << (name.size == 0 ? 0 : table_hash(name.at, name.size) % 64);
    if (object->bloom & bit) {
        for (int i = 0; i < object->count; i++) {
            if (object->names[i].size == name.size &&
                memcmp(object->names[i].at, name.at, (size_t)name.size) == 0) {
                return -1;
            }
        }
    }
    object->bloom |= bit;
    object->names[object->count++] = name;
    p = json_blank(p + 1, end);
    if (p == end || *p != ':') {
        return -1;
    }
    object->p = json_blank(p + 1, end);
    *flags |= own;
    return 1;
}

static int unescape(const uint8_t **from, const uint8_t *end, char *to)
{
    static const char plain[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    const uint8_t *p = *from;
    const char *found = p[1] == 'u' ? NULL : memchr(plain, p[1], sizeof plain - 1);
    if (found != NULL) {
        *from = p + 2;
        *to = meant[found - plain];
        return 1;
    }
    uint32_t code = (uint32_t)hex4(p + 2, end);
    *from = p + 6;
    if (code >= 0xd800 && code <= 0xdfff) {
        code = 0x10000 + ((code - 0xd800) << 10) + ((uint32_t)hex4(p + 8, end) - 0xdc00);
        *from = p + 12;
    }
    if (code < 0x80) {
        to[0] = (char)code;
        return 1;
    }
    int size = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int i = size - 1; i > 0; i--) {
        to[i] = (char)(0x80 | (code & 0x3f));
        code >>= 6;
    }
    to[0] = (char)((0xf00 >> size) | code);
    return size;
}

PyObject *json_str(Span inner, unsigned flags)
{
    if (!(flags & JSON_ESCAPE)) {
        if (!(flags & JSON_WIDE)) {
            PyObject *text = PyUnicode_New(inner.size, 127);
            if (text != NULL && inner.size > 0) {
                memcpy(PyUnicode_DATA(text), inner.at, (size_t)inner.size);
            }
            return text;
        }
        return PyUnicode_DecodeUTF8((const char *)inner.at, inner.size, NULL);
    }
    char small[512];
    /* No escape is shorter than what it means in UTF-8. */
    char *bytes = inner.size <= (Py_ssize_t)sizeof small ? small : PyMem_Malloc((size_t)inner.size);
    if (bytes == NULL) {
        return PyErr_NoMemory();
    }
    const uint8_t *p = inner.at, *end = inner.at + inner.size;
    Py_ssize_t size = 0;
    while (p < end) {
        const uint8_t *slash = memchr(p, '\\', (size_t)(end - p));
        size_t run = (size_t)((slash == NULL ? end : slash) - p);
        memcpy(bytes + size, p, run);
        size += (Py_ssize_t)run;
        p += run;
        if (p < end) {
            size += unescape(&p, end, bytes + size);
        }
    }
    PyObject *text = PyUnicode_DecodeUTF8(bytes, size, NULL);
    if (bytes != small) {
        PyMem_Free(bytes);
    }
    return text;
}
