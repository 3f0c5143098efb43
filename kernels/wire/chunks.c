/* Chunked transfer coding (RFC 9112 section 7.1): the chunks that are here as a whole. */
#include "wire.h"

enum { DIGITS_MAX = 15 }; /* below 2^60 */

static int hex_value(uint8_t c)
{
    if ((uint8_t)(c - '0') < 10) {
        return c - '0';
    }
    c |= 0x20;
    return (uint8_t)(c - 'a') < 6 ? c - 'a' + 10 : -1;
}

const uint8_t *wire_whole_chunk(const uint8_t *p, const uint8_t *end, Span *payload)
{
    Py_ssize_t size = 0;
    const uint8_t *line = p;
    for (int value; p < end && p - line < DIGITS_MAX && (value = hex_value(*p)) >= 0; p++) {
        if (size > (PY_SSIZE_T_MAX - 15) / 16) {
            return NULL;
        }
        size = size * 16 + value;
    }
    if (size == 0 || end - p < 4 || p[0] != '\r' || p[1] != '\n') {
        return NULL;
    }
    p += 2;
    if (end - p - 2 < size || p[size] != '\r' || p[size + 1] != '\n') {
        return NULL;
    }
    *payload = (Span){p, size};
    return p + size + 2;
}

PyObject *wire_whole_chunks(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 2 || !PyList_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "whole_chunks takes bytes and a list");
        return NULL;
    }
    if (!PyBytes_CheckExact(args[0])) {
        return PyLong_FromLong(0);
    }
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(args[0]), *p = data, *after;
    const uint8_t *end = data + PyBytes_GET_SIZE(args[0]);
    for (Span payload; (after = wire_whole_chunk(p, end, &payload)) != NULL; p = after) {
        PyObject *piece = PyBytes_FromStringAndSize((const char *)payload.at, payload.size);
        if (piece == NULL || PyList_Append(args[1], piece) < 0) {
            Py_XDECREF(piece);
            return NULL;
        }
        Py_DECREF(piece);
    }
    return PyLong_FromSsize_t(p - data);
}
