/* What the two doors to Python share. */
#ifndef TONGGUAN_CPU_DOOR_H
#define TONGGUAN_CPU_DOOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "products.h"

#define THREADS_MAX 256

/* The weights of a capsule that `four_bits` or `halves` made; NULL with an error set. */
struct weights *door_weights(PyObject *capsule);

/* Release buffers and return None, or NULL with an error: sizes that do not belong together, or no
 * memory where `done` is not 0. */
PyObject *door_finish(int good, int done, Py_buffer *buffers, int count);

/* (layers, hidden, heads, kv_heads, dim, eps) -> stack */
PyObject *door_stack(PyObject *self, PyObject *args);
/* (stack, x, cosines, sines, positions, offsets, tables, kv, block_tokens, threads) */
PyObject *door_step(PyObject *self, PyObject *args);

#endif
