/* The type `Heads`: its calls, and how it is made. */
#include "heads.h"

static const char *const ROLE_NAMES[ROLES] = {
    "host", "content-length", "transfer-encoding", "connection", "expect",
};
static const char *const REQUEST_FIELDS[] = {
    "method", "target", "minor",   "content_length", "chunked", "keep_alive",
    "expect", "upgrade", "fields", "repeated",       "lines",   "size",
};
static const char *const RESPONSE_FIELDS[] = {
    "status",   "reason",  "minor",  "content_length", "chunked", "keep_alive",
    "bodiless", "upgrade", "fields", "repeated",       "lines",   "size",
};
static const char *const LIMITS_FIELDS[] = {"head_bytes", "field_bytes", "fields"};

/* --- calls ------------------------------------------------------------------------------------ */

static bool whole_number(PyObject *value, Py_ssize_t *out)
{
    if (value == NULL || !PyLong_CheckExact(value)) {
        return false;
    }
    *out = PyLong_AsSsize_t(value);
    if (*out == -1 && PyErr_Occurred()) {
        PyErr_Clear();
    }
    return *out >= 0;
}

/* Reads a head if the arguments are the usual ones: buffer, limits, [method], start. */
static PyObject *parse(Heads *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                       bool request)
{
    Py_ssize_t least = request ? 2 : 3, start = 0;
    Bounds bounds;
    if (kwnames != NULL || nargs < least || nargs > least + 1 ||
        !Py_IS_TYPE(args[1], self->limits.type) ||
        !whole_number(record_get(&self->limits, args[1], 0), &bounds.head) ||
        !whole_number(record_get(&self->limits, args[1], 1), &bounds.field) ||
        !whole_number(record_get(&self->limits, args[1], 2), &bounds.fields) ||
        (nargs > least && !whole_number(args[least], &start)) ||
        (!request && !PyBytes_CheckExact(args[2]))) {
        Py_RETURN_NONE;
    }
    Py_buffer held = {.obj = NULL};
    const uint8_t *data;
    Py_ssize_t size;
    if (PyBytes_CheckExact(args[0])) {
        data = (const uint8_t *)PyBytes_AS_STRING(args[0]);
        size = PyBytes_GET_SIZE(args[0]);
    } else if (PyByteArray_CheckExact(args[0])) {
        /* An allocation below may run foreign code; the export forbids it to resize. */
        if (PyObject_GetBuffer(args[0], &held, PyBUF_SIMPLE) < 0) {
            return NULL;
        }
        data = held.buf;
        size = held.len;
    } else {
        Py_RETURN_NONE;
    }
    PyObject *found;
    if (start >= size) {
        found = Py_NewRef(Py_None);
    } else {
        const uint8_t *begin = data + start;
        const uint8_t *end = begin + (bounds.head < size - start ? bounds.head : size - start);
        if (request) {
            found = read_request(self, begin, end, &bounds);
        } else {
            bool head_only = PyBytes_GET_SIZE(args[2]) == 4 &&
                             memcmp(PyBytes_AS_STRING(args[2]), "HEAD", 4) == 0;
            found = read_response(self, begin, end, &bounds, head_only);
        }
    }
    if (held.obj != NULL) {
        PyBuffer_Release(&held);
    }
    return found;
}

static PyObject *parse_or_ask(Heads *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames, bool request)
{
    PyObject *found = parse(self, args, nargs, kwnames, request);
    if (found != Py_None) {
        return found;
    }
    Py_DECREF(found);
    return PyObject_Vectorcall(self->pure[request ? 0 : 1], args, (size_t)nargs, kwnames);
}

static PyObject *heads_parse_request(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                                     PyObject *kwnames)
{
    return parse_or_ask((Heads *)self, args, nargs, kwnames, true);
}

static PyObject *heads_parse_response(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                                      PyObject *kwnames)
{
    return parse_or_ask((Heads *)self, args, nargs, kwnames, false);
}

/* --- set-up ----------------------------------------------------------------------------------- */

/* Every item of a tuple of bytes goes into the table, once; `mark` says what that means. */
static int add_names(Names *names, PyObject *items, void (*mark)(Rule *))
{
    if (!PyTuple_Check(items)) {
        PyErr_SetString(PyExc_TypeError, "names are a tuple of bytes");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); i++) {
        PyObject *name = PyTuple_GET_ITEM(items, i);
        int index = -1;
        if (PyBytes_CheckExact(name)) {
            index = table_find(&names->table, (const uint8_t *)PyBytes_AS_STRING(name),
                               PyBytes_GET_SIZE(name), false);
        }
        if (index < 0) {
            index = table_add(&names->table, name);
            if (index < 0) {
                return -1;
            }
            names->rules[index] = (Rule){false, true, false, NO_ROLE};
        }
        mark(&names->rules[index]);
    }
    return 0;
}

static void mark_watched(Rule *rule)
{
    rule->watched = true;
}

static void mark_dropped(Rule *rule)
{
    rule->kept = false;
}

static void mark_doubtful(Rule *rule)
{
    rule->watched = rule->doubtful = true;
}

static int set_names(Names *names, PyObject *watched, PyObject *dropped, PyObject *doubtful,
                     int roles)
{
    if (add_names(names, watched, mark_watched) < 0 ||
        add_names(names, dropped, mark_dropped) < 0 ||
        add_names(names, doubtful, mark_doubtful) < 0) {
        return -1;
    }
    for (int role = 0; role < ROLES; role++) {
        const char *name = ROLE_NAMES[role];
        int index =
            table_find(&names->table, (const uint8_t *)name, (Py_ssize_t)strlen(name), false);
        bool watched_here = index >= 0 && names->rules[index].watched;
        if (watched_here) {
            names->rules[index].role = (uint8_t)role;
        } else if (roles & (1 << role)) {
            PyErr_Format(PyExc_ValueError, "%s has to be watched", name);
            return -1;
        }
    }
    return 0;
}

static int set_bytes(bool *set, const char *bytes, Py_ssize_t size)
{
    for (Py_ssize_t i = 0; i < size; i++) {
        set[(uint8_t)bytes[i]] = true;
    }
    return 0;
}

static int set_methods(Heads *self, PyObject *methods)
{
    PyObject *list = PySequence_List(methods);
    if (list == NULL) {
        return -1;
    }
    int result = PyList_GET_SIZE(list) > METHODS_MAX ? -1 : 0;
    for (Py_ssize_t i = 0; result == 0 && i < PyList_GET_SIZE(list); i++) {
        PyObject *method = PyList_GET_ITEM(list, i);
        if (!PyBytes_CheckExact(method)) {
            result = -1;
        } else {
            self->methods[self->methods_count++] = Py_NewRef(method);
        }
    }
    Py_DECREF(list);
    if (result < 0) {
        PyErr_SetString(PyExc_TypeError, "methods are a few bytes objects");
    }
    return result;
}

static int set_connections(Heads *self, PyObject *connections)
{
    PyObject *name, *keep;
    Py_ssize_t at = 0;
    while (PyDict_Next(connections, &at, &name, &keep)) {
        if (!PyBytes_CheckExact(name) || !PyBool_Check(keep) ||
            self->connections_count == CONNECTIONS_MAX) {
            PyErr_SetString(PyExc_TypeError, "connection values are a few bytes with a bool");
            return -1;
        }
        self->keeps[self->connections_count] = keep == Py_True;
        self->connections[self->connections_count++] = Py_NewRef(name);
    }
    return 0;
}

static PyObject *heads_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *classes[3], *watched[2], *dropped[2], *doubtful, *methods, *connections, *pure[2];
    const char *token, *host;
    Py_ssize_t token_size, host_size;
    static const int needed[2] = {(1 << ROLES) - 1, 1 << LENGTH | 1 << CODING | 1 << CONNECTION};

    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Heads takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "(OOO)((OO)(OO))Oy#y#OO!(OO):Heads", &classes[0], &classes[1],
                          &classes[2], &watched[0], &dropped[0], &watched[1], &dropped[1],
                          &doubtful, &token, &token_size, &host, &host_size, &methods,
                          &PyDict_Type, &connections, &pure[0], &pure[1])) {
        return NULL;
    }
    Heads *self = (Heads *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->pure[0] = Py_NewRef(pure[0]);
    self->pure[1] = Py_NewRef(pure[1]);
    self->nothing = PyFrozenSet_New(NULL);
    self->empty = PyBytes_FromString("");
    self->ok = PyBytes_FromString("OK");
    set_bytes(self->token, token, token_size);
    set_bytes(self->host, host, host_size);
    if (self->nothing == NULL || self->empty == NULL || self->ok == NULL ||
        record_bind(&self->request, classes[0], REQUEST_FIELDS, 12) < 0 ||
        record_bind(&self->response, classes[1], RESPONSE_FIELDS, 12) < 0 ||
        record_bind(&self->limits, classes[2], LIMITS_FIELDS, 3) < 0 ||
        set_names(&self->names[0], watched[0], dropped[0], doubtful, needed[0]) < 0 ||
        set_names(&self->names[1], watched[1], dropped[1], doubtful, needed[1]) < 0 ||
        set_methods(self, methods) < 0 || set_connections(self, connections) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int heads_traverse(PyObject *object, visitproc visit, void *arg)
{
    Heads *self = (Heads *)object;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->request.type);
    Py_VISIT(self->response.type);
    Py_VISIT(self->limits.type);
    Py_VISIT(self->nothing);
    Py_VISIT(self->pure[0]);
    Py_VISIT(self->pure[1]);
    return 0;
}

/* Breaks cycles only where they can be: the rest stays whole for a call on its way. */
static int heads_clear(PyObject *object)
{
    Heads *self = (Heads *)object;
    for (int i = 0; i < 2; i++) {
        PyObject *pure = self->pure[i];
        self->pure[i] = Py_NewRef(Py_None);
        Py_XDECREF(pure);
    }
    return 0;
}

static void heads_dealloc(PyObject *object)
{
    Heads *self = (Heads *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->request.type);
    Py_XDECREF(self->response.type);
    Py_XDECREF(self->limits.type);
    table_clear(&self->names[0].table);
    table_clear(&self->names[1].table);
    for (int i = 0; i < self->methods_count; i++) {
        Py_DECREF(self->methods[i]);
    }
    for (int i = 0; i < self->connections_count; i++) {
        Py_DECREF(self->connections[i]);
    }
    Py_XDECREF(self->nothing);
    Py_XDECREF(self->empty);
    Py_XDECREF(self->ok);
    Py_XDECREF(self->pure[0]);
    Py_XDECREF(self->pure[1]);
    type->tp_free(object);
    Py_DECREF(type);
}

/* Through void (*)(void): the usual way to store a fast call where the table wants a plain one. */
#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef heads_methods[] = {
    {"parse_request", FAST(heads_parse_request), METH_FASTCALL | METH_KEYWORDS,
     "parse_request(buffer, limits, start=0)\n--\n\nReturn a request's head, or ask the twin."},
    {"parse_response", FAST(heads_parse_response), METH_FASTCALL | METH_KEYWORDS,
     "parse_response(buffer, limits, request_method, start=0)\n--\n\n"
     "Return a response's head, or ask the twin."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot heads_slots[] = {
    {Py_tp_doc, "Reads HTTP/1.1 heads by the tables it is made with."},
    {Py_tp_new, heads_new},
    {Py_tp_traverse, heads_traverse},
    {Py_tp_clear, heads_clear},
    {Py_tp_dealloc, heads_dealloc},
    {Py_tp_methods, heads_methods},
    {0, NULL},
};

PyType_Spec wire_heads_spec = {
    .name = "kernels.wire._wire.Heads",
    .basicsize = sizeof(Heads),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = heads_slots,
};
