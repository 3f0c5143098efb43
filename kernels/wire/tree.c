/* The Merkle tree of RFC 6962, many leaves at a time (proxy/audit/tree.py has the twin).
 *
 * What is kept of the leaves [begin, end) are the roots of its largest aligned subtrees, as two
 * Python lists, sizes and hashes; they are read, grown without the GIL, and written back whole.
 */
#include "mac.h"

enum { NODES_MAX = 192 };

typedef struct {
    int64_t begin, end;
    int count;
    int64_t sizes[NODES_MAX];
    uint8_t hashes[NODES_MAX][HASH_BYTES];
} Nodes;

/* Returns false when there is no room: no tree has so many nodes. */
static bool add_leaf(Nodes *nodes, const uint8_t leaf[HASH_BYTES])
{
    int64_t size = 1, end = nodes->end++;
    uint8_t node[HASH_BYTES];
    memcpy(node, leaf, HASH_BYTES);
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

static bool grow_lines(Nodes *nodes, const uint8_t *p, const uint8_t *end)
{
    uint8_t leaf[HASH_BYTES];
    while (p < end) {
        const uint8_t *newline = memchr(p, '\n', (size_t)(end - p));
        newline = newline != NULL ? newline : end;
        hash_tagged(0, (Span){p, newline - p}, (Span){NULL, 0}, leaf);
        if (!add_leaf(nodes, leaf)) {
            return false;
        }
        p = newline + 1;
    }
    return true;
}

static bool grow_leaves(Nodes *nodes, const uint8_t *p, const uint8_t *end)
{
    for (; end - p >= HASH_BYTES; p += HASH_BYTES) {
        if (!add_leaf(nodes, p)) {
            return false;
        }
    }
    return true;
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
