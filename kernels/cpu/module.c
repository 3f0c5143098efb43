/* Python's door to products.c. Lengths are checked here; the GIL is released while computing. */
#include "door.h"

#define NAME "kernels.cpu.weights"

struct held {
    struct weights w;
    Py_buffer values, meta;
};

static void give_back(PyObject *capsule) {
    struct held *held = PyCapsule_GetPointer(capsule, NAME);
    if (!held)
        return;
    PyBuffer_Release(&held->values);
    if (held->meta.obj)
        PyBuffer_Release(&held->meta);
    PyMem_Free(held);
}

/* Whether sizes agree; k in whole blocks of 32, so that no load leaves a row. */
static int fits(const struct held *h, int four_bits) {
    long rows = h->w.rows, k = h->w.k, most = 1L << 30;
    if (rows < 1 || k < 32 || k % 32 || rows > most || k > most)
        return 0;
    if (!four_bits)
        return h->values.len == rows * k * 2;
    if (h->w.group_log2 < 5 || h->w.group_log2 > 7)
        return 0;
    long groups = (k + (1L << h->w.group_log2) - 1) >> h->w.group_log2;
    return h->values.len == rows * k / 2 && h->meta.len == rows * groups * 4;
}

static PyObject *make(PyObject *values, PyObject *meta, long rows, long k, int log2, int zeros) {
    if (!products_supported()) {
        PyErr_SetString(PyExc_RuntimeError, "this CPU lacks AVX2, FMA or F16C");
        return NULL;
    }
    struct held *held = PyMem_Calloc(1, sizeof *held);
    if (!held)
        return PyErr_NoMemory();
    held->w = (struct weights){.rows = rows, .k = k, .group_log2 = log2, .zeros = zeros};
    if (PyObject_GetBuffer(values, &held->values, PyBUF_C_CONTIGUOUS) < 0) {
        PyMem_Free(held);
        return NULL;
    }
    if (meta && PyObject_GetBuffer(meta, &held->meta, PyBUF_C_CONTIGUOUS) < 0) {
        PyBuffer_Release(&held->values);
        PyMem_Free(held);
        return NULL;
    }
    PyObject *capsule = PyCapsule_New(held, NAME, give_back);
    if (!capsule || !fits(held, meta != NULL)) {
        if (capsule) {
            Py_DECREF(capsule);
            PyErr_SetString(PyExc_ValueError, "weights whose sizes do not belong together");
        }
        return NULL;
    }
    if (meta) {
        held->w.codes = held->values.buf;
        held->w.meta = held->meta.buf;
    } else {
        held->w.halves = held->values.buf;
    }
    return capsule;
}

static PyObject *four_bits(PyObject *self, PyObject *args) {
    PyObject *codes, *meta;
    long rows, k;
    int log2, zeros;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOllip", &codes, &meta, &rows, &k, &log2, &zeros))
        return NULL;
    return make(codes, meta, rows, k, log2, zeros);
}

static PyObject *halves(PyObject *self, PyObject *args) {
    PyObject *values;
    long rows, k;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oll", &values, &rows, &k))
        return NULL;
    return make(values, NULL, rows, k, 0, 0);
}

struct weights *door_weights(PyObject *capsule) {
    struct held *held = PyCapsule_GetPointer(capsule, NAME);
    return held ? &held->w : NULL;
}

/* How many rows of `columns` floats a buffer holds, or -1. */
static long rows_of(const Py_buffer *buffer, long columns) {
    long row = columns * (long)sizeof(float);
    return buffer->len % row || buffer->len == 0 ? -1 : (long)(buffer->len / row);
}

PyObject *door_finish(int good, int done, Py_buffer *buffers, int count) {
    for (int i = 0; i < count; i++)
        PyBuffer_Release(&buffers[i]);
    if (done)
        return PyErr_NoMemory();
    if (!good) {
        PyErr_SetString(PyExc_ValueError, "arrays whose sizes do not belong together");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *linear(PyObject *self, PyObject *args) {
    PyObject *capsule;
    Py_buffer b[2];
    int threads, done = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "Oy*w*i", &capsule, &b[0], &b[1], &threads))
        return NULL;
    struct weights *w = door_weights(capsule);
    long m = w ? rows_of(&b[0], w->k) : -1;
    int good = m > 0 && rows_of(&b[1], w->rows) == m && threads > 0 && threads <= THREADS_MAX;
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        done = products_linear(w, b[0].buf, b[1].buf, m, threads);
        Py_END_ALLOW_THREADS
    }
    PyErr_Clear();
    return door_finish(good, done, b, 2);
}

static PyObject *ffn(PyObject *self, PyObject *args) {
    PyObject *first, *second;
    Py_buffer b[3];
    int threads, done = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOy*w*w*i", &first, &second, &b[0], &b[1], &b[2], &threads))
        return NULL;
    struct weights *wide = door_weights(first), *narrow = wide ? door_weights(second) : NULL;
    long m = narrow ? rows_of(&b[0], wide->k) : -1;
    int good = m > 0 && wide->rows == 2 * narrow->k && rows_of(&b[1], narrow->k) == m
               && rows_of(&b[2], narrow->rows) == m && threads > 0 && threads <= THREADS_MAX;
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        done = products_ffn(wide, narrow, b[0].buf, b[1].buf, b[2].buf, m, threads);
        Py_END_ALLOW_THREADS
    }
    PyErr_Clear();
    return door_finish(good, done, b, 3);
}

static PyObject *unpack(PyObject *self, PyObject *args) {
    PyObject *capsule;
    Py_buffer b[1];
    int threads, done = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "Ow*i", &capsule, &b[0], &threads))
        return NULL;
    struct weights *w = door_weights(capsule);
    int good = w && b[0].len == w->rows * w->k * (long)sizeof(float) && threads > 0
               && threads <= THREADS_MAX;
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        products_unpack(w, b[0].buf, threads);
        Py_END_ALLOW_THREADS
    }
    PyErr_Clear();
    return door_finish(good, done, b, 1);
}

static PyObject *supported(PyObject *self, PyObject *nothing) {
    (void)self, (void)nothing;
    return PyBool_FromLong(products_supported());
}

static PyMethodDef methods[] = {
    {"supported", supported, METH_NOARGS, "Whether this CPU has what the products need."},
    {"four_bits", four_bits, METH_VARARGS, "(codes, meta, rows, k, group_log2, zeros) -> weights"},
    {"halves", halves, METH_VARARGS, "(values, rows, k) -> weights"},
    {"linear", linear, METH_VARARGS, "(weights, x, y, threads)"},
    {"ffn", ffn, METH_VARARGS, "(wide, narrow, x, middle, y, threads)"},
    {"stack", door_stack, METH_VARARGS,
     "(layers, hidden, heads, kv_heads, dim, eps) -> stack; a layer is (qkv, out, gate_up, down, "
     "attn_norm, ffn_norm, qkv_bias or None)"},
    {"step", door_step, METH_VARARGS,
     "(stack, x, cosines, sines, positions, offsets, tables, kv, block_tokens, threads)"},
    {"unpack", unpack, METH_VARARGS, "(weights, out, threads)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kernels.cpu._products", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__products(void) { return PyModule_Create(&definition); }
