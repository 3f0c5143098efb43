/* The lines of requests' records, each made in one go: text in pieces, MAC, newline
 * (proxy/audit/chain.py has the twins). */
#include "mac.h"

enum { DIGITS_MAX = 20, RUN_MAX = 65536 };

typedef struct {
    char text[DIGITS_MAX];
    int size;
} Digits;

static void write_digits(unsigned long long left, Digits *out)
{
    char *p = out->text + DIGITS_MAX;
    do {
        *--p = (char)('0' + left % 10);
        left /= 10;
    } while (left != 0);
    out->size = (int)(out->text + DIGITS_MAX - p);
    memmove(out->text, p, (size_t)out->size);
}

static bool digits_of(PyObject *number, Digits *out)
{
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        return false;
    }
    write_digits(value, out);
    return true;
}

typedef struct {
    const char *at;
    Py_ssize_t size;
} Piece;

#define FIXED(text) {(text), sizeof(text) - 1}

/* What the lines of one run share, and what each has of its own. */
typedef struct {
    const MacObject *mac;
    Piece kind, origin;
} Chain;

enum { OWN = 5, LINE_PIECES = 19 };

typedef struct {
    Digits seq, wall_ns, mono_ns;
    Piece own[OWN]; /* head, model, middle, prompt, tail */
} Row;

static bool piece_of(PyObject *text, Piece *out)
{
    out->at = PyUnicode_AsUTF8AndSize(text, &out->size);
    return out->at != NULL;
}

static Py_ssize_t lay_out(const Chain *chain, const Row *row, const char *prev, Piece *out)
{
    const Piece line[LINE_PIECES] = {
        FIXED("{"), row->own[0], chain->kind, row->own[1], FIXED("\"mono_ns\":\""),
        {row->mono_ns.text, row->mono_ns.size}, chain->origin, row->own[2],
        FIXED("\"prev\":\""), {prev, MAC_HEX}, FIXED("\","), row->own[3],
        FIXED("\"seq\":"), {row->seq.text, row->seq.size}, FIXED(","), row->own[4],
        FIXED("\"v\":1,\"wall_ns\":\""), {row->wall_ns.text, row->wall_ns.size}, FIXED("\"}"),
    };
    Py_ssize_t size = 0;
    for (int i = 0; i < LINE_PIECES; i++) {
        size += line[i].size;
    }
    memcpy(out, line, sizeof line);
    return size;
}

/* Writes the line at `begin`, which has room for its text, MAC, tab and newline; returns where its
 * MAC is. Needs no GIL. */
static char *write_line(const Chain *chain, const Piece *pieces, const char *prev, char *begin)
{
    char *p = begin;
    for (int i = 0; i < LINE_PIECES; i++) {
        memcpy(p, pieces[i].at, (size_t)pieces[i].size);
        p += pieces[i].size;
    }
    uint8_t before[HASH_BYTES], hash[HASH_BYTES];
    hex_read((const uint8_t *)prev, before);
    mac_compute(chain->mac, (Span){before, HASH_BYTES}, (Span){(const uint8_t *)begin, p - begin},
                hash);
    *p++ = '\t';
    hex_write(hash, p);
    p[MAC_HEX] = '\n';
    return p;
}

/* The arguments both calls begin with: mac, prev, kind, origin. */
static bool chain_of(PyObject *const *args, Chain *chain, Piece *prev)
{
    uint8_t unused[HASH_BYTES];
    if (!mac_available() || !mac_check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "a Mac is needed");
        return false;
    }
    chain->mac = (const MacObject *)args[0];
    if (!piece_of(args[1], prev) || !piece_of(args[2], &chain->kind) ||
        !piece_of(args[3], &chain->origin)) {
        return false;
    }
    if (prev->size != MAC_HEX || !hex_read((const uint8_t *)prev->at, unused)) {
        PyErr_SetString(PyExc_ValueError, "prev is 64 hex characters");
        return false;
    }
    return true;
}

/* wall_ns, mono_ns, head, model, middle, prompt, tail */
static bool row_of(PyObject *const *args, Row *row)
{
    if (!digits_of(args[0], &row->wall_ns) || !digits_of(args[1], &row->mono_ns)) {
        return false;
    }
    for (int i = 0; i < OWN; i++) {
        if (!piece_of(args[2 + i], &row->own[i])) {
            return false;
        }
    }
    return true;
}

/* request_line(mac, prev, kind, origin, seq, wall_ns, mono_ns, head, model, middle, prompt, tail):
 * (line, its MAC in hex). */
PyObject *wire_request_line(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Chain chain;
    Piece prev, pieces[LINE_PIECES];
    Row row;
    if (count != 12) {
        PyErr_SetString(PyExc_TypeError, "request_line takes twelve arguments");
        return NULL;
    }
    if (!chain_of(args, &chain, &prev) || !digits_of(args[4], &row.seq) ||
        !row_of(args + 5, &row)) {
        return NULL;
    }
    Py_ssize_t size = lay_out(&chain, &row, prev.at, pieces);
    PyObject *line = PyBytes_FromStringAndSize(NULL, size + MAC_HEX + 2);
    PyObject *hex = PyUnicode_New(MAC_HEX, 127);
    if (line == NULL || hex == NULL) {
        Py_XDECREF(line);
        Py_XDECREF(hex);
        return NULL;
    }
    const char *made = write_line(&chain, pieces, prev.at, PyBytes_AS_STRING(line));
    memcpy(PyUnicode_1BYTE_DATA(hex), made, MAC_HEX);
    return Py_BuildValue("NN", line, hex);
}

/* Fills `lines`, new bytes that nobody else knows yet, one for each row. */
static void write_lines(const Chain *chain, const Row *rows, Py_ssize_t count, const char *prev,
                        char *const *lines)
{
    Piece pieces[LINE_PIECES];
    for (Py_ssize_t i = 0; i < count; i++) {
        lay_out(chain, &rows[i], prev, pieces);
        prev = write_line(chain, pieces, prev, lines[i]);
    }
}

/* request_lines(mac, prev, kind, origin, seq, rows): a list of lines. */
PyObject *wire_request_lines(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Chain chain;
    Piece prev, pieces[LINE_PIECES];
    if (count != 6 || !PyList_CheckExact(args[5]) || PyList_GET_SIZE(args[5]) > RUN_MAX) {
        PyErr_SetString(PyExc_TypeError, "request_lines takes six arguments, the last a list");
        return NULL;
    }
    unsigned long long seq = PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred() || !chain_of(args, &chain, &prev)) {
        return NULL;
    }
    /* A tuple of our own keeps the strings while the GIL is let go. */
    PyObject *given = PyList_AsTuple(args[5]);
    if (given == NULL) {
        return NULL;
    }
    count = PyTuple_GET_SIZE(given);
    PyObject *made = PyList_New(count);
    Row *rows = PyMem_Calloc((size_t)count + 1, sizeof *rows);
    char **lines = PyMem_Calloc((size_t)count + 1, sizeof *lines);
    bool good = made != NULL && rows != NULL && lines != NULL;
    if (!good) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; good && i < count; i++) {
        PyObject *row = PyTuple_GET_ITEM(given, i);
        good = PyTuple_CheckExact(row) && PyTuple_GET_SIZE(row) == 2 + OWN;
        if (!good) {
            PyErr_SetString(PyExc_TypeError, "a row is a tuple of seven");
            break;
        }
        write_digits(seq + (unsigned long long)i, &rows[i].seq);
        good = row_of(&PyTuple_GET_ITEM(row, 0), &rows[i]);
        if (good) {
            Py_ssize_t size = lay_out(&chain, &rows[i], prev.at, pieces);
            PyObject *line = PyBytes_FromStringAndSize(NULL, size + MAC_HEX + 2);
            PyList_SET_ITEM(made, i, line);
            good = line != NULL;
            lines[i] = good ? PyBytes_AS_STRING(line) : NULL;
        }
    }
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        write_lines(&chain, rows, count, prev.at, lines);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(rows);
    PyMem_Free(lines);
    Py_DECREF(given);
    if (!good) {
        Py_CLEAR(made);
    }
    return made;
}
