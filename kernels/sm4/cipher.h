/* The key object, and how its calls take their arguments. */
#ifndef TONGGUAN_SM4_CIPHER_H
#define TONGGUAN_SM4_CIPHER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "sm4.h"

enum { KEY_ALIGNMENT = 64 };

typedef struct {
    PyTypeObject *cipher;
    PyObject *invalid_tag;
} Module;

typedef struct {
    PyObject_HEAD
    sm4_key *key;  /* in `room`, aligned */
    sm4_key *full; /* NULL until a one-message key is used for more than it has powers for */
    int primed;    /* whether key->powers are there */
    uint8_t room[sizeof(sm4_key) + KEY_ALIGNMENT];
} Cipher;

typedef struct {
    const uint8_t *data;
    size_t length;
    Py_buffer buffer; /* meaningful when `exported` */
    int exported;
} View;

static inline int view_get(View *view, PyObject *object)
{
    view->exported = 0;
    if (PyBytes_CheckExact(object)) {
        view->data = (const uint8_t *)PyBytes_AS_STRING(object);
        view->length = (size_t)PyBytes_GET_SIZE(object);
        return 0;
    }
    if (PyObject_GetBuffer(object, &view->buffer, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    view->exported = 1;
    view->data = view->buffer.buf;
    view->length = (size_t)view->buffer.len;
    return 0;
}

static inline void view_release(View *view)
{
    if (view->exported) {
        PyBuffer_Release(&view->buffer);
        view->exported = 0;
    }
}

/* Spreads positional and named arguments over `values` (absent: NULL); -1 with TypeError set. */
int sm4_spread(const char *function, const char *const *names, Py_ssize_t required,
               Py_ssize_t count, PyObject *const *args, Py_ssize_t given, PyObject *kwnames,
               PyObject **values);

extern PyMethodDef sm4_cipher_methods[];

#endif
