/* Shared by the files of kernels.wire: records, name tables, byte classes.
 *
 * Everything here is exactly right about what it accepts and says "not sure" about all else; the
 * pure Python twin, which each reader is given, then decides. So no refusal is worded in C.
 *
 * No static mutable state but what was found out about the machine; the readers hold the GIL, the
 * thread of pump.c and loops over many records do not. Every read is bounded by an end pointer.
 */
#ifndef TONGGUAN_WIRE_H
#define TONGGUAN_WIRE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    const uint8_t *at;
    Py_ssize_t size;
} Span;

/* --- records: instances of a Python class with slots, filled without its __init__ ------------- */

enum { RECORD_FIELDS_MAX = 16 };

typedef struct {
    PyTypeObject *type;
    int count;
    Py_ssize_t offsets[RECORD_FIELDS_MAX];
} Record;

/* Binds to `cls`, whose __slots__ must be exactly `names`, in any order (a msgspec.Struct sorts its
 * own); 0, or -1 with TypeError. */
int record_bind(Record *record, PyObject *cls, const char *const *names, int count);
/* Returns a new instance that takes over `values`, count references; on any NULL among them, or no
 * memory, drops them all and returns NULL with an exception. */
PyObject *record_make(const Record *record, PyObject *const *values);

static inline PyObject *record_get(const Record *record, PyObject *instance, int field)
{
    return *(PyObject **)((char *)instance + record->offsets[field]);
}

/* --- tables of byte names, filled once -------------------------------------------------------- */

enum { TABLE_SLOTS = 256, TABLE_NAMES_MAX = 96 };

typedef struct {
    int count;
    PyObject *names[TABLE_NAMES_MAX]; /* bytes */
    uint8_t slots[TABLE_SLOTS];       /* index + 1; 0 is free */
} Table;

static inline unsigned table_hash(const uint8_t *name, Py_ssize_t size)
{
    /* 0x20 folds the case of letters; what else it folds is told apart by the comparison. */
    unsigned first = name[0] | 0x20u, last = name[size - 1] | 0x20u;
    unsigned middle = name[size / 2] | 0x20u;
    return ((unsigned)size * 5 + first * 3 + middle * 17 + last * 7) % TABLE_SLOTS;
}

/* Adds a name that is not there yet; its index, or -1 with an exception. */
int table_add(Table *table, PyObject *name);
void table_clear(Table *table);
int table_traverse(Table *table, visitproc visit, void *arg);

static inline uint8_t ascii_lower(uint8_t c)
{
    return (uint8_t)(c - 'A') < 26 ? (uint8_t)(c | 0x20) : c;
}

/* Index of a name, -1 if unknown. `fold`: names in the table are lower case, `name` any case. */
static inline int table_find(const Table *table, const uint8_t *name, Py_ssize_t size, bool fold)
{
    if (size <= 0) {
        return -1;
    }
    for (unsigned at = table_hash(name, size);; at = (at + 1) % TABLE_SLOTS) {
        if (table->slots[at] == 0) {
            return -1;
        }
        int index = table->slots[at] - 1;
        PyObject *known = table->names[index];
        if (PyBytes_GET_SIZE(known) != size) {
            continue;
        }
        const uint8_t *want = (const uint8_t *)PyBytes_AS_STRING(known);
        if (fold) {
            Py_ssize_t i = 0;
            while (i < size && ascii_lower(name[i]) == want[i]) {
                i++;
            }
            if (i == size) {
                return index;
            }
        } else if (memcmp(name, want, (size_t)size) == 0) {
            return index;
        }
    }
}

/* --- eight bytes at a time -------------------------------------------------------------------- */

#define EACH_BYTE(c) (UINT64_C(0x0101010101010101) * (c))

static inline uint64_t load8(const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

/* Not zero if a byte of `word` is below `bound` (at most 128). */
static inline uint64_t any_below(uint64_t word, unsigned bound)
{
    return (word - EACH_BYTE(bound)) & ~word & EACH_BYTE(0x80);
}

static inline uint64_t any_equal(uint64_t word, unsigned byte)
{
    return any_below(word ^ EACH_BYTE(byte), 1);
}

/* --- the module's parts ---------------------------------------------------------------------- */

extern PyType_Spec wire_heads_spec;
extern PyType_Spec wire_bodies_spec;
extern PyType_Spec wire_pump_spec;

/* Adds the type Mac, where a libcrypto is loaded that offers what it needs; 0, or -1. */
int wire_add_mac(PyObject *module);

PyObject *wire_plain_events(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *wire_plain_traceparent(PyObject *module, PyObject *value);
PyObject *wire_answer_head(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *wire_sha256(PyObject *module, PyObject *const *parts, Py_ssize_t count);
PyObject *wire_take_requests(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *wire_request_line(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *wire_request_run(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *wire_crc32(PyObject *module, PyObject *const *args, Py_ssize_t count);
/* Whether this CPU makes it quicker than zlib does. */
bool wire_crc32_available(void);
PyObject *wire_begin_write(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *wire_grow(PyObject *module, PyObject *const *args, Py_ssize_t count);
/* One chunk without extensions at `p`: what is behind it, NULL when it is none, the last one, or
 * not here as a whole. */
const uint8_t *wire_whole_chunk(const uint8_t *p, const uint8_t *end, Span *payload);
PyObject *wire_whole_chunks(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

#endif
