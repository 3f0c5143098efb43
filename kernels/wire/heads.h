/* What the two files of `Heads` share. */
#ifndef TONGGUAN_WIRE_HEADS_H
#define TONGGUAN_WIRE_HEADS_H

#include "wire.h"

enum { METHODS_MAX = 16, CONNECTIONS_MAX = 8 };

/* Names that decide something here; the tables say what they are called. */
enum { HOST, LENGTH, CODING, CONNECTION, EXPECT, ROLES, NO_ROLE = ROLES };

typedef struct {
    bool watched, kept, doubtful;
    uint8_t role;
} Rule;

typedef struct {
    Table table;
    Rule rules[TABLE_NAMES_MAX];
} Names;

typedef struct {
    PyObject_HEAD
    Record request, response, limits;
    Names names[2]; /* of a request, of a response */
    bool token[256], host[256];
    int methods_count, connections_count;
    PyObject *methods[METHODS_MAX];
    PyObject *connections[CONNECTIONS_MAX];
    bool keeps[CONNECTIONS_MAX];
    PyObject *nothing, *empty, *ok; /* frozenset(), b"", b"OK" */
    PyObject *pure[2];
} Heads;

typedef struct {
    Py_ssize_t head, field, fields;
} Bounds;

/* Each reads one head in [p, end); Py_None stands for "not sure", NULL for an exception. */
PyObject *read_request(Heads *self, const uint8_t *p, const uint8_t *end, const Bounds *bounds);
PyObject *read_response(Heads *self, const uint8_t *p, const uint8_t *end, const Bounds *bounds,
                        bool head_only);

#endif
