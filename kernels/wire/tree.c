/* The Merkle tree of RFC 6962, many leaves at a time (proxy/audit/tree.py has the twin).
 *
 * What is kept of the leaves [begin, end) are the roots of its largest aligned subtrees, as two
 * Python lists, sizes and hashes; they are read, grown without the GIL, and written back whole.
 */
#include "mac.h"
#include "sha256.h"

enum { NODES_MAX = 192 };

typedef struct {
    int64_t begin, end;
    int count;
    int64_t sizes[NODES_MAX];
    uint8_t hashes[NODES_MAX][HASH_BYTES];
} Nodes;

/* Adds the root of the next `size` leaves, whole and in its place. Returns false when there is no
 * room: no tree has so many nodes. */
static bool add_node(Nodes *nodes, int64_t size, const uint8_t hash[HASH_BYTES])
{
    int64_t end = nodes->end;
    uint8_t node[HASH_BYTES];
    memcpy(node, hash, HASH_BYTES);
    nodes->end += size;
    /* The subtree on the left is whole and its sibling: together they are one. */
    while ((end & size) && end - size >= nodes->begin && nodes->count > 0) {
        nodes->count--;
        hash_tagged(1, (Span){nodes->hashes[nodes->count], HASH_BYTES}, (Span){node, HASH_BYTES},
                    node);
        end -= size;
        size += size;
    }
    if (nodes->count == NODES_MAX) {
        return false;
    }
    nodes->sizes[nodes->count] = size;
    memcpy(nodes->hashes[nodes->count++], node, HASH_BYTES);
    return true;
}

/* --- two hashes at a time, where `sha256.h` is there ------------------------------------------ */

enum { BATCH = 256, SHORT_BYTES = 4096, FRAME_BYTES = SHORT_BYTES + 2 * SHA_BLOCK };

static void tagged_frame(Sha *sha, uint8_t *frame, uint8_t tag, const uint8_t *at, size_t size)
{
    frame[0] = tag;
    memcpy(frame + 1, at, size);
    sha_begin(sha, NULL, frame, sha_pad(frame, size + 1, 0));
}

/* The hashes of two rows of bytes behind a tag. */
static void hash_two(uint8_t tag, const Span rows[2], uint8_t *first, uint8_t *second)
{
    uint8_t frames[2][FRAME_BYTES];
    Sha one, two;
    tagged_frame(&one, frames[0], tag, rows[0].at, (size_t)rows[0].size);
    tagged_frame(&two, frames[1], tag, rows[1].at, (size_t)rows[1].size);
    sha_two(&one, &two);
    sha_one(&one);
    sha_one(&two);
    sha_write(&one, first);
    sha_write(&two, second);
}

/* Makes of `size` leaves, a power of two and at least two, their root, in place of the first. */
static void root_of(uint8_t *leaves, int64_t size)
{
    Py_ssize_t pair = (Py_ssize_t)2 * HASH_BYTES;
    for (; size > 2; size /= 2) {
        for (int64_t i = 0; i < size / 2; i += 2) {
            const Span rows[2] = {{leaves + i * pair, pair}, {leaves + (i + 1) * pair, pair}};
            hash_two(1, rows, leaves + i * HASH_BYTES, leaves + (i + 1) * HASH_BYTES);
        }
    }
    hash_tagged(1, (Span){leaves, HASH_BYTES}, (Span){leaves + HASH_BYTES, HASH_BYTES}, leaves);
}

/* The most of the next `left` leaves, at least one, that are a subtree. */
static int64_t aligned(int64_t end, int64_t left)
{
    int64_t size = 1;
    while (size < BATCH && 2 * size <= left && end % (2 * size) == 0) {
        size *= 2;
    }
    return size;
}

static bool grow_leaves(Nodes *nodes, const uint8_t *p, const uint8_t *end)
{
    uint8_t batch[BATCH * HASH_BYTES];
    bool paired = sha_available();
    while (end - p >= HASH_BYTES) {
        int64_t size = paired ? aligned(nodes->end, (end - p) / HASH_BYTES) : 1;
        memcpy(batch, p, (size_t)size * HASH_BYTES);
        if (size > 1) {
            root_of(batch, size);
        }
        if (!add_node(nodes, size, batch)) {
            return false;
        }
        p += size * HASH_BYTES;
    }
    return true;
}

static Span next_line(const uint8_t **p, const uint8_t *end)
{
    const uint8_t *begin = *p, *newline = memchr(begin, '\n', (size_t)(end - begin));
    newline = newline != NULL ? newline : end;
    *p = newline + 1;
    return (Span){begin, newline - begin};
}

static bool grow_lines(Nodes *nodes, const uint8_t *p, const uint8_t *end)
{
    uint8_t batch[BATCH * HASH_BYTES];
    bool paired = sha_available(), good = true;
    while (good && p < end) {
        uint8_t *leaf = batch;
        while (p < end && leaf - batch <= (BATCH - 2) * HASH_BYTES) {
            Span rows[2] = {next_line(&p, end), {NULL, 0}};
            int count = 1;
            if (paired && p < end) {
                rows[count++] = next_line(&p, end);
            }
            if (count == 2 && rows[0].size < SHORT_BYTES && rows[1].size < SHORT_BYTES) {
                hash_two(0, rows, leaf, leaf + HASH_BYTES);
            } else {
                for (int i = 0; i < count; i++) {
                    hash_tagged(0, rows[i], (Span){NULL, 0}, leaf + (ptrdiff_t)i * HASH_BYTES);
                }
            }
            leaf += (ptrdiff_t)count * HASH_BYTES;
        }
        good = grow_leaves(nodes, batch, leaf);
    }
    return good;
}

static bool read_nodes(Nodes *nodes, PyObject *const *args)
{
    nodes->begin = PyLong_AsLongLong(args[0]);
    nodes->end = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) {
        return false;
    }
    bool good = PyList_CheckExact(args[2]) && PyList_CheckExact(args[3]) &&
                PyList_GET_SIZE(args[2]) == PyList_GET_SIZE(args[3]) &&
                PyList_GET_SIZE(args[2]) < NODES_MAX / 2 && PyBytes_CheckExact(args[4]);
    nodes->count = good ? (int)PyList_GET_SIZE(args[2]) : 0;
    for (int i = 0; good && i < nodes->count; i++) {
        PyObject *hash = PyList_GET_ITEM(args[3], i);
        nodes->sizes[i] = PyLong_AsLongLong(PyList_GET_ITEM(args[2], i));
        good = !PyErr_Occurred() && PyBytes_CheckExact(hash) &&
               PyBytes_GET_SIZE(hash) == HASH_BYTES;
        if (good) {
            memcpy(nodes->hashes[i], PyBytes_AS_STRING(hash), HASH_BYTES);
        }
    }
    if (!good && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_TypeError, "lists of sizes and hashes, and bytes, are needed");
    }
    return good;
}

static int write_nodes(const Nodes *nodes, PyObject *sizes, PyObject *hashes)
{
    PyObject *new_sizes = PyList_New(nodes->count), *new_hashes = PyList_New(nodes->count);
    int done = new_sizes != NULL && new_hashes != NULL ? 0 : -1;
    for (int i = 0; done == 0 && i < nodes->count; i++) {
        PyObject *size = PyLong_FromLongLong(nodes->sizes[i]);
        PyObject *hash = PyBytes_FromStringAndSize((const char *)nodes->hashes[i], HASH_BYTES);
        PyList_SET_ITEM(new_sizes, i, size);
        PyList_SET_ITEM(new_hashes, i, hash);
        done = size != NULL && hash != NULL ? 0 : -1;
    }
    if (done == 0) {
        done = PyList_SetSlice(sizes, 0, PY_SSIZE_T_MAX, new_sizes);
    }
    if (done == 0) {
        done = PyList_SetSlice(hashes, 0, PY_SSIZE_T_MAX, new_hashes);
    }
    Py_XDECREF(new_sizes);
    Py_XDECREF(new_hashes);
    return done;
}

/* grow(begin, end, sizes, hashes, data, lines): the new end. */
PyObject *wire_grow(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 6 || !mac_available()) {
        PyErr_SetString(PyExc_TypeError, "grow takes six arguments, and a libcrypto");
        return NULL;
    }
    Nodes nodes;
    int lines = PyObject_IsTrue(args[5]);
    if (lines < 0 || !read_nodes(&nodes, args)) {
        return NULL;
    }
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(args[4]);
    const uint8_t *end = data + PyBytes_GET_SIZE(args[4]);
    bool room;
    Py_BEGIN_ALLOW_THREADS
    room = lines ? grow_lines(&nodes, data, end) : grow_leaves(&nodes, data, end);
    Py_END_ALLOW_THREADS
    if (!room) {
        PyErr_SetString(PyExc_ValueError, "no range has so many nodes");
        return NULL;
    }
    return write_nodes(&nodes, args[2], args[3]) < 0 ? NULL : PyLong_FromLongLong(nodes.end);
}
