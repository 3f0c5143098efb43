/* The lines of requests' records, each made in one go: text in pieces, MAC, newline
 * (proxy/audit/chain.py has the twins). */
#include "mac.h"
#include "sha256.h"

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

/* What the lines of one run share, and what each has of its own. */
typedef struct {
    const MacObject *mac;
    Piece kind, origin;
} Chain;

enum { OWN = 5 };

typedef struct {
    Digits seq, wall_ns, mono_ns;
    Piece own[OWN]; /* head, model, middle, prompt, tail */
} Row;

static bool piece_of(PyObject *text, Piece *out)
{
    out->at = PyUnicode_AsUTF8AndSize(text, &out->size);
    return out->at != NULL;
}

static char *put(char *p, const char *from, Py_ssize_t size)
{
    memcpy(p, from, (size_t)size);
    return p + size;
}

#define PUT_FIXED(p, text) put((p), (text), sizeof(text) - 1)
#define PUT_PIECE(p, piece) put((p), (piece).at, (piece).size)
/* All its room is copied, which is one instruction or two; what is too much is written over. */
#define PUT_DIGITS(p, digits) (memcpy((p), (digits).text, DIGITS_MAX), (p) + (digits).size)

/* Of the names and the punctuation below, with the hex of `prev`. */
enum { FIXED_BYTES = 112 };

static Py_ssize_t text_size(const Chain *chain, const Row *row)
{
    Py_ssize_t size = FIXED_BYTES + chain->kind.size + chain->origin.size;
    for (int i = 0; i < OWN; i++) {
        size += row->own[i].size;
    }
    return size + row->seq.size + row->wall_ns.size + row->mono_ns.size;
}

/* Writes the line's text, behind which is room for tab, MAC and newline; returns where it ends. */
static char *write_text(const Chain *chain, const Row *row, const char *prev, char *p)
{
    p = PUT_FIXED(p, "{");
    p = PUT_PIECE(p, row->own[0]);
    p = PUT_PIECE(p, chain->kind);
    p = PUT_PIECE(p, row->own[1]);
    p = PUT_FIXED(p, "\"mono_ns\":\"");
    p = PUT_DIGITS(p, row->mono_ns);
    p = PUT_PIECE(p, chain->origin);
    p = PUT_PIECE(p, row->own[2]);
    p = PUT_FIXED(p, "\"prev\":\"");
    p = put(p, prev, MAC_HEX);
    p = PUT_FIXED(p, "\",");
    p = PUT_PIECE(p, row->own[3]);
    p = PUT_FIXED(p, "\"seq\":");
    p = PUT_DIGITS(p, row->seq);
    p = PUT_FIXED(p, ",");
    p = PUT_PIECE(p, row->own[4]);
    p = PUT_FIXED(p, "\"v\":1,\"wall_ns\":\"");
    p = PUT_DIGITS(p, row->wall_ns);
    return PUT_FIXED(p, "\"}");
}

/* Writes the line at `begin`, which has room for its text, MAC, tab and newline, and its MAC to
 * `last`, where that of the line before is; returns where the MAC is in hex. Needs no GIL. */
static char *write_line(const Chain *chain, const Row *row, const char *prev,
                        uint8_t last[HASH_BYTES], char *begin)
{
    char *p = write_text(chain, row, prev, begin);
    Span before = {last, HASH_BYTES}, text = {(const uint8_t *)begin, p - begin};
    mac_compute(chain->mac, before, text, last);
    *p++ = '\t';
    hex_write(last, p);
    p[MAC_HEX] = '\n';
    return p;
}

/* The arguments both calls begin with: mac, prev, kind, origin; `last` is the bytes of prev. */
static bool chain_of(PyObject *const *args, Chain *chain, Piece *prev, uint8_t last[HASH_BYTES])
{
    if (!mac_available() || !mac_check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "a Mac is needed");
        return false;
    }
    chain->mac = (const MacObject *)args[0];
    if (!piece_of(args[1], prev) || !piece_of(args[2], &chain->kind) ||
        !piece_of(args[3], &chain->origin)) {
        return false;
    }
    if (prev->size != MAC_HEX || !hex_read((const uint8_t *)prev->at, last)) {
        PyErr_SetString(PyExc_ValueError, "prev is 64 hex characters");
        return false;
    }
    return true;
}

/* head, model, middle, prompt, tail */
static bool own_of(PyObject *const *args, Row *row)
{
    for (int i = 0; i < OWN; i++) {
        if (!piece_of(args[i], &row->own[i])) {
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
    Piece prev;
    Row row = {.own = {{NULL, 0}}};
    uint8_t last[HASH_BYTES];
    if (count != 12) {
        PyErr_SetString(PyExc_TypeError, "request_line takes twelve arguments");
        return NULL;
    }
    if (!chain_of(args, &chain, &prev, last) || !digits_of(args[4], &row.seq) ||
        !digits_of(args[5], &row.wall_ns) || !digits_of(args[6], &row.mono_ns) ||
        !own_of(args + 7, &row)) {
        return NULL;
    }
    Py_ssize_t size = text_size(&chain, &row);
    PyObject *line = PyBytes_FromStringAndSize(NULL, size + MAC_HEX + 2);
    PyObject *hex = PyUnicode_New(MAC_HEX, 127);
    if (line == NULL || hex == NULL) {
        Py_XDECREF(line);
        Py_XDECREF(hex);
        return NULL;
    }
    const char *made = write_line(&chain, &row, prev.at, last, PyBytes_AS_STRING(line));
    memcpy(PyUnicode_1BYTE_DATA(hex), made, MAC_HEX);
    return Py_BuildValue("NN", line, hex);
}

/* --- many lines, and their leaves ------------------------------------------------------------- */

/* What one call fills: the lines one behind another, and the leaf hash of each. */
typedef struct {
    const Row *rows;
    Py_ssize_t count;
    const char *prev; /* hex, and below as bytes */
    uint8_t last[HASH_BYTES];
    char *lines;
    uint8_t *leaves;
} Filling;

static void write_plainly(const Chain *chain, Filling *filling)
{
    char *begin = filling->lines;
    for (Py_ssize_t i = 0; i < filling->count; i++) {
        const char *prev = filling->prev;
        char *made = write_line(chain, &filling->rows[i], prev, filling->last, begin);
        Span line = {(const uint8_t *)begin, made + MAC_HEX - begin};
        hash_tagged(0, line, (Span){NULL, 0}, filling->leaves + i * HASH_BYTES);
        filling->prev = made;
        begin = made + MAC_HEX + 1;
    }
}

/* As above, a line's MAC and the leaf of the line before side by side. Each line is made in one of
 * two frames: 32 bytes for what stands before its text in what is hashed, then the line, then room
 * for padding. */
static void write_paired(const Chain *chain, Filling *filling, uint8_t *frames, size_t frame)
{
    const uint32_t *inner, *outer;
    Sha mac, leaf = {.blocks = 0};
    char *out = filling->lines;
    mac_states(chain->mac, &inner, &outer);
    for (Py_ssize_t i = 0; i < filling->count; i++) {
        uint8_t *message = frames + (i % 2 == 0 ? 0 : frame), *text = message + HASH_BYTES;
        uint8_t digest[SHA_BLOCK * 2];
        char *end = write_text(chain, &filling->rows[i], filling->prev, (char *)text);
        size_t size = (size_t)(end - (char *)text);
        memcpy(message, filling->last, HASH_BYTES);
        sha_begin(&mac, inner, message, sha_pad(message, HASH_BYTES + size, SHA_BLOCK));
        sha_two(&mac, &leaf);
        sha_one(&mac);
        sha_write(&mac, digest);
        sha_begin(&mac, outer, digest, sha_pad(digest, HASH_BYTES, SHA_BLOCK));
        sha_two(&mac, &leaf);
        sha_one(&mac);
        sha_write(&mac, filling->last);
        if (i > 0) {
            sha_one(&leaf);
            sha_write(&leaf, filling->leaves + (i - 1) * HASH_BYTES);
        }
        text[size] = '\t';
        hex_write(filling->last, (char *)text + size + 1);
        text[size + 1 + MAC_HEX] = '\n';
        memcpy(out, text, size + MAC_HEX + 2);
        filling->prev = out + size + 1;
        out += size + MAC_HEX + 2;
        text[-1] = 0;
        sha_begin(&leaf, NULL, text - 1, sha_pad(text - 1, size + MAC_HEX + 2, 0));
    }
    if (filling->count > 0) {
        sha_one(&leaf);
        sha_write(&leaf, filling->leaves + (filling->count - 1) * HASH_BYTES);
    }
}

/* Fills the rows from lists of numbers and a tuple of tuples; returns the bytes of all lines, and
 * of the longest, or -1 with an exception. */
static Py_ssize_t rows_of(const Chain *chain, PyObject *const *args, PyObject *given, Row *rows,
                          size_t *longest)
{
    unsigned long long seq = PyLong_AsUnsignedLongLong(args[0]);
    Py_ssize_t most = PyLong_AsSsize_t(args[4]), total = 0, count = PyTuple_GET_SIZE(given);
    if (PyErr_Occurred()) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *row = PyTuple_GET_ITEM(given, i);
        if (!PyTuple_CheckExact(row) || PyTuple_GET_SIZE(row) != OWN) {
            PyErr_SetString(PyExc_TypeError, "a row is a tuple of five");
            return -1;
        }
        PyObject *wall = PyList_GET_ITEM(args[1], i), *mono = PyList_GET_ITEM(args[2], i);
        /* Records that come together share their times. */
        bool known = i > 0 && wall == PyList_GET_ITEM(args[1], i - 1) &&
                     mono == PyList_GET_ITEM(args[2], i - 1);
        if (known) {
            rows[i].wall_ns = rows[i - 1].wall_ns;
            rows[i].mono_ns = rows[i - 1].mono_ns;
        } else if (!PyLong_CheckExact(wall) || !PyLong_CheckExact(mono)) {
            PyErr_SetString(PyExc_TypeError, "a time is an int");
            return -1;
        } else if (!digits_of(wall, &rows[i].wall_ns) || !digits_of(mono, &rows[i].mono_ns)) {
            return -1;
        }
        write_digits(seq + (unsigned long long)i, &rows[i].seq);
        if (!own_of(&PyTuple_GET_ITEM(row, 0), &rows[i])) {
            return -1;
        }
        Py_ssize_t size = text_size(chain, &rows[i]) + MAC_HEX + 2;
        if (size > most) {
            PyErr_Format(PyExc_ValueError, "a line holds %zd bytes", most);
            return -1;
        }
        *longest = (size_t)size > *longest ? (size_t)size : *longest;
        total += size;
    }
    return total;
}

/* request_run(mac, prev, kind, origin, seq, walls, monos, rows, most): (lines, leaves). */
PyObject *wire_request_run(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Chain chain;
    Piece prev;
    Filling filling;
    if (count != 9 || !PyList_CheckExact(args[5]) || !PyList_CheckExact(args[6]) ||
        !PyList_CheckExact(args[7]) || PyList_GET_SIZE(args[7]) > RUN_MAX) {
        PyErr_SetString(PyExc_TypeError, "request_run takes nine arguments, three of them lists");
        return NULL;
    }
    if (!chain_of(args, &chain, &prev, filling.last)) {
        return NULL;
    }
    /* A tuple of our own keeps the strings while the GIL is let go. */
    PyObject *given = PyList_AsTuple(args[7]);
    if (given == NULL) {
        return NULL;
    }
    count = PyTuple_GET_SIZE(given);
    if (PyList_GET_SIZE(args[5]) != count || PyList_GET_SIZE(args[6]) != count) {
        Py_DECREF(given);
        PyErr_SetString(PyExc_ValueError, "a record has two times and a row");
        return NULL;
    }
    size_t longest = 0, frame;
    Row *rows = PyMem_Calloc((size_t)count + 1, sizeof *rows);
    Py_ssize_t size = rows != NULL ? rows_of(&chain, args + 4, given, rows, &longest) : -1;
    frame = HASH_BYTES + longest + (size_t)2 * SHA_BLOCK;
    uint8_t *frames = size >= 0 ? PyMem_Malloc(2 * frame) : NULL;
    PyObject *lines = frames != NULL ? PyBytes_FromStringAndSize(NULL, size) : NULL;
    PyObject *leaves = lines != NULL ? PyBytes_FromStringAndSize(NULL, count * HASH_BYTES) : NULL;
    if (leaves != NULL) {
        filling.rows = rows;
        filling.count = count;
        filling.prev = prev.at;
        filling.lines = PyBytes_AS_STRING(lines);
        filling.leaves = (uint8_t *)PyBytes_AS_STRING(leaves);
        bool paired = mac_states(chain.mac, NULL, NULL);
        Py_BEGIN_ALLOW_THREADS
        if (paired) {
            write_paired(&chain, &filling, frames, frame);
        } else {
            write_plainly(&chain, &filling);
        }
        Py_END_ALLOW_THREADS
    } else if (!PyErr_Occurred()) {
        PyErr_NoMemory();
    }
    PyMem_Free(rows);
    PyMem_Free(frames);
    Py_DECREF(given);
    if (leaves == NULL) {
        Py_XDECREF(lines);
        return NULL;
    }
    return Py_BuildValue("NN", lines, leaves);
}
