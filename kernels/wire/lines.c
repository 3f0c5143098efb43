/* The line of a request's record, made in one go: text in pieces, MAC, newline
 * (proxy/audit/chain.py has the twin). */
#include "mac.h"

enum { PIECES = 8, DIGITS_MAX = 20 };

typedef struct {
    char text[DIGITS_MAX];
    int size;
} Digits;

static bool digits_of(PyObject *number, Digits *out)
{
    unsigned long long left = PyLong_AsUnsignedLongLong(number);
    if (left == (unsigned long long)-1 && PyErr_Occurred()) {
        return false;
    }
    char *p = out->text + DIGITS_MAX;
    do {
        *--p = (char)('0' + left % 10);
        left /= 10;
    } while (left != 0);
    out->size = (int)(out->text + DIGITS_MAX - p);
    memmove(out->text, p, (size_t)out->size);
    return true;
}

typedef struct {
    const char *at;
    Py_ssize_t size;
} Piece;

#define FIXED(text) {(text), sizeof(text) - 1}

static PyObject *written(const MacObject *mac, const uint8_t prev[HASH_BYTES], const Piece *pieces,
                         int count)
{
    Py_ssize_t size = 0;
    for (int i = 0; i < count; i++) {
        size += pieces[i].size;
    }
    PyObject *line = PyBytes_FromStringAndSize(NULL, size + MAC_HEX + 2);
    PyObject *hex = PyUnicode_New(MAC_HEX, 127);
    if (line == NULL || hex == NULL) {
        Py_XDECREF(line);
        Py_XDECREF(hex);
        return NULL;
    }
    char *begin = PyBytes_AS_STRING(line), *p = begin;
    for (int i = 0; i < count; i++) {
        memcpy(p, pieces[i].at, (size_t)pieces[i].size);
        p += pieces[i].size;
    }
    uint8_t hash[HASH_BYTES];
    mac_compute(mac, (Span){prev, HASH_BYTES}, (Span){(const uint8_t *)begin, size}, hash);
    *p++ = '\t';
    hex_write(hash, p);
    memcpy(PyUnicode_1BYTE_DATA(hex), p, MAC_HEX);
    p[MAC_HEX] = '\n';
    return Py_BuildValue("NN", line, hex);
}

/* request_line(mac, prev, kind, origin, seq, wall_ns, mono_ns, head, model, middle, prompt, tail):
 * (line, its MAC in hex). */
PyObject *wire_request_line(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 12 || !mac_available() || !mac_check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "request_line takes a Mac and eleven other arguments");
        return NULL;
    }
    static const int places[PIECES] = {1, 2, 3, 7, 8, 9, 10, 11};
    Piece text[PIECES];
    Digits seq, wall_ns, mono_ns;
    for (int i = 0; i < PIECES; i++) {
        text[i].at = PyUnicode_AsUTF8AndSize(args[places[i]], &text[i].size);
        if (text[i].at == NULL) {
            return NULL;
        }
    }
    uint8_t prev[HASH_BYTES];
    if (text[0].size != MAC_HEX || !hex_read((const uint8_t *)text[0].at, prev)) {
        PyErr_SetString(PyExc_ValueError, "prev is 64 hex characters");
        return NULL;
    }
    if (!digits_of(args[4], &seq) || !digits_of(args[5], &wall_ns) ||
        !digits_of(args[6], &mono_ns)) {
        return NULL;
    }
    const Piece line[] = {
        FIXED("{"), text[3], text[1], text[4], FIXED("\"mono_ns\":\""),
        {mono_ns.text, mono_ns.size}, text[2], text[5], FIXED("\"prev\":\""), text[0],
        FIXED("\","), text[6], FIXED("\"seq\":"), {seq.text, seq.size}, FIXED(","), text[7],
        FIXED("\"v\":1,\"wall_ns\":\""), {wall_ns.text, wall_ns.size}, FIXED("\"}"),
    };
    return written((const MacObject *)args[0], prev, line, (int)(sizeof line / sizeof *line));
}
