/* Python's door to layers.c. All indices are checked here. */
#include "door.h"
#include "layers.h"

#define NAME "kernels.cpu.stack"
#define LAYERS_MAX 1024
#define M_MAX 32

/* A stack, what keeps its weights alive, and its layers' vectors. */
struct held {
    struct stack s;
    PyObject *given;
    long vectors;
    Py_buffer *vector;
};

static void drop(struct held *held) {
    for (long i = 0; i < held->vectors; i++)
        PyBuffer_Release(&held->vector[i]);
    Py_XDECREF(held->given);
    PyMem_Free(held->vector);
    PyMem_Free(held->s.layers);
    PyMem_Free(held);
}

static void give_back(PyObject *capsule) {
    struct held *held = PyCapsule_GetPointer(capsule, NAME);
    if (held)
        drop(held);
}

/* Keep a vector of `count` floats; NULL with an error set. */
static const float *vector_of(struct held *held, PyObject *object, long count) {
    Py_buffer *buffer = &held->vector[held->vectors];
    if (PyObject_GetBuffer(object, buffer, PyBUF_C_CONTIGUOUS) < 0)
        return NULL;
    held->vectors++;
    if (buffer->len == count * (long)sizeof(float))
        return buffer->buf;
    PyErr_SetString(PyExc_ValueError, "a vector of another size");
    return NULL;
}

/* (qkv, out, gate_up, down, attn_norm, ffn_norm, qkv_bias or None) */
static int layer_of(struct held *held, PyObject *given, struct layer *l) {
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 7) {
        PyErr_SetString(PyExc_TypeError, "a layer is a tuple of seven");
        return -1;
    }
    PyObject *bias = PyTuple_GET_ITEM(given, 6);
    if (!(l->qkv = door_weights(PyTuple_GET_ITEM(given, 0)))
        || !(l->out = door_weights(PyTuple_GET_ITEM(given, 1)))
        || !(l->gate_up = door_weights(PyTuple_GET_ITEM(given, 2)))
        || !(l->down = door_weights(PyTuple_GET_ITEM(given, 3)))
        || !(l->attn_norm = vector_of(held, PyTuple_GET_ITEM(given, 4), held->s.hidden))
        || !(l->ffn_norm = vector_of(held, PyTuple_GET_ITEM(given, 5), held->s.hidden)))
        return -1;
    return bias == Py_None || (l->qkv_bias = vector_of(held, bias, l->qkv->rows)) ? 0 : -1;
}

PyObject *door_stack(PyObject *self, PyObject *args) {
    PyObject *given;
    struct stack s = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "O!llllf", &PyTuple_Type, &given, &s.hidden, &s.heads, &s.kv_heads,
                          &s.dim, &s.eps))
        return NULL;
    s.count = PyTuple_GET_SIZE(given);
    if (s.count < 1 || s.count > LAYERS_MAX || s.hidden < 1 || s.hidden > 1L << 30) {
        PyErr_SetString(PyExc_ValueError, "layers that do not belong together");
        return NULL;
    }
    struct held *held = PyMem_Calloc(1, sizeof *held);
    if (!held)
        return PyErr_NoMemory();
    held->s = s;
    held->s.layers = PyMem_Calloc(s.count, sizeof *held->s.layers);
    held->vector = PyMem_Calloc(3 * s.count, sizeof *held->vector);
    Py_INCREF(given);
    held->given = given;
    int good = held->s.layers && held->vector;
    if (!good)
        PyErr_NoMemory();
    for (long i = 0; good && i < s.count; i++)
        good = !layer_of(held, PyTuple_GET_ITEM(given, i), &held->s.layers[i]);
    if (good && !layers_fit(&held->s)) {
        PyErr_SetString(PyExc_ValueError, "layers that do not belong together");
        good = 0;
    }
    PyObject *capsule = good ? PyCapsule_New(held, NAME, give_back) : NULL;
    if (!capsule)
        drop(held);
    return capsule;
}

/* Whether each token's position has a block, and each block is one of the cache's. */
static int indices_fit(const struct step *t, long tables) {
    for (long i = 0; i < t->m; i++) {
        long position = t->positions[i], offset = t->offsets[i];
        if (position < 0 || offset < 0 || offset >= tables
            || position / t->block_tokens >= tables - offset)
            return 0;
    }
    for (long i = 0; i < tables; i++)
        if (t->tables[i] < 0 || t->tables[i] >= t->blocks)
            return 0;
    return 1;
}

PyObject *door_step(PyObject *self, PyObject *args) {
    PyObject *capsule;
    Py_buffer b[7];
    struct step t = {0};
    int threads, done = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "Ow*y*y*y*y*y*w*li", &capsule, &b[0], &b[1], &b[2], &b[3], &b[4],
                          &b[5], &b[6], &t.block_tokens, &threads))
        return NULL;
    struct held *held = PyCapsule_GetPointer(capsule, NAME);
    int good = held && threads > 0 && threads <= THREADS_MAX && t.block_tokens > 0
               && t.block_tokens <= 1 << 20;
    if (good) {
        const struct stack *s = &held->s;
        long row = s->hidden * (long)sizeof(float), angles = s->dim / 2 * (long)sizeof(float);
        long block = s->count * 2 * t.block_tokens * s->kv_heads * s->dim * 2;
        t.m = b[0].len / row;
        t.blocks = b[6].len / block;
        good = t.m > 0 && t.m <= M_MAX && b[0].len == t.m * row && b[1].len == t.m * angles
               && b[2].len == b[1].len && b[3].len == t.m * 8 && b[4].len == t.m * 8
               && b[5].len % 4 == 0 && t.blocks > 0 && b[6].len == t.blocks * block;
    }
    if (good) {
        t.x = b[0].buf;
        t.cosines = b[1].buf;
        t.sines = b[2].buf;
        t.positions = b[3].buf;
        t.offsets = b[4].buf;
        t.tables = b[5].buf;
        t.kv = b[6].buf;
        good = indices_fit(&t, b[5].len / 4);
    }
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        done = layers_step(&held->s, &t, threads);
        Py_END_ALLOW_THREADS
    }
    PyErr_Clear();
    return door_finish(good, done, b, 7);
}
