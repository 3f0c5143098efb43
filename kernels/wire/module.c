/* kernels.wire._wire: the module, and what its two types share. */
#include "wire.h"

#include <structmember.h>

int record_bind(Record *record, PyObject *cls, const char *const *names, int count)
{
    if (!PyType_Check(cls) || count > RECORD_FIELDS_MAX) {
        PyErr_SetString(PyExc_TypeError, "a record class is needed");
        return -1;
    }
    PyTypeObject *type = (PyTypeObject *)cls;
    PyObject *slots = PyObject_GetAttrString(cls, "__slots__");
    if (slots == NULL) {
        return -1;
    }
    if (!PyTuple_Check(slots) || PyTuple_GET_SIZE(slots) != count || type->tp_itemsize != 0) {
        Py_DECREF(slots);
        PyErr_Format(PyExc_TypeError, "%s has not the %d slots to fill", type->tp_name, count);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        PyObject *member = PyObject_GetAttrString(cls, names[i]);
        PyMemberDef *def = NULL;
        if (member == NULL) {
            PyErr_Clear();
        } else if (Py_IS_TYPE(member, &PyMemberDescr_Type) && PyDescr_TYPE(member) == type) {
            def = ((PyMemberDescrObject *)member)->d_member;
        }
        if (def == NULL || def->type != T_OBJECT_EX || def->offset < (Py_ssize_t)sizeof(PyObject) ||
            def->offset > type->tp_basicsize - (Py_ssize_t)sizeof(PyObject *)) {
            Py_XDECREF(member);
            Py_DECREF(slots);
            PyErr_Format(PyExc_TypeError, "%s has no slot %s there", type->tp_name, names[i]);
            return -1;
        }
        record->offsets[i] = def->offset;
        Py_DECREF(member);
    }
    Py_DECREF(slots);
    record->count = count;
    record->type = (PyTypeObject *)Py_NewRef(cls);
    return 0;
}

PyObject *record_make(const Record *record, PyObject *const *values)
{
    bool whole = true;
    for (int i = 0; i < record->count; i++) {
        whole = whole && values[i] != NULL;
    }
    PyObject *made = whole ? record->type->tp_alloc(record->type, 0) : NULL;
    if (made == NULL) {
        for (int i = 0; i < record->count; i++) {
            Py_XDECREF(values[i]);
        }
        return NULL;
    }
    for (int i = 0; i < record->count; i++) {
        *(PyObject **)((char *)made + record->offsets[i]) = values[i];
    }
    return made;
}

int table_add(Table *table, PyObject *name)
{
    if (!PyBytes_CheckExact(name) || PyBytes_GET_SIZE(name) == 0) {
        PyErr_SetString(PyExc_TypeError, "a name is bytes, not empty");
        return -1;
    }
    if (table->count == TABLE_NAMES_MAX) {
        PyErr_SetString(PyExc_ValueError, "too many names");
        return -1;
    }
    unsigned at = table_hash((const uint8_t *)PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name));
    while (table->slots[at] != 0) {
        at = (at + 1) % TABLE_SLOTS;
    }
    table->names[table->count] = Py_NewRef(name);
    table->slots[at] = (uint8_t)++table->count;
    return table->count - 1;
}

void table_clear(Table *table)
{
    int count = table->count;
    table->count = 0;
    memset(table->slots, 0, sizeof table->slots);
    for (int i = 0; i < count; i++) {
        Py_CLEAR(table->names[i]);
    }
}

int table_traverse(Table *table, visitproc visit, void *arg)
{
    for (int i = 0; i < table->count; i++) {
        Py_VISIT(table->names[i]);
    }
    return 0;
}

static int module_exec(PyObject *module)
{
    PyType_Spec *specs[] = {&wire_heads_spec, &wire_bodies_spec, &wire_pump_spec};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], NULL);
        if (type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0) {
            Py_XDECREF(type);
            return -1;
        }
        Py_DECREF(type);
    }
    if (PyModule_AddIntConstant(module, "CRC32", wire_crc32_available()) < 0) {
        return -1;
    }
    return wire_add_mac(module);
}

static PyMethodDef module_methods[] = {
    {"whole_chunks", (PyCFunction)(void (*)(void))wire_whole_chunks, METH_FASTCALL,
     "whole_chunks(data, pieces, /)\n--\n\n"
     "Append the payload of each chunk that `data` begins with; return where they end."},
    {"plain_events", (PyCFunction)(void (*)(void))wire_plain_events, METH_FASTCALL,
     "plain_events(data, event_bytes, /)\n--\n\nSee kernels.wire.events."},
    {"plain_traceparent", (PyCFunction)wire_plain_traceparent, METH_O,
     "plain_traceparent(value, /)\n--\n\nSee kernels.wire.traceparents."},
    {"answer_head", (PyCFunction)(void (*)(void))wire_answer_head, METH_FASTCALL,
     "answer_head(status, reason, lines, framing, fields, trace_id, queue_ns, upstream_ns,\n"
     "            tail, body, /)\n--\n\nSee kernels.wire.answer_heads."},
    {"sha256", (PyCFunction)(void (*)(void))wire_sha256, METH_FASTCALL,
     "sha256(*parts)\n--\n\nReturn SHA-256 of the parts, joined; where Mac is there."},
    {"take_requests", (PyCFunction)(void (*)(void))wire_take_requests, METH_FASTCALL,
     "take_requests(data, start, stop, mac, origin, key_id, prev, seq, wall_ns, mono_ns,\n"
     "              quiet_ns, outcomes, phases, /)\n--\n\nSee kernels.wire.requests."},
    {"request_line", (PyCFunction)(void (*)(void))wire_request_line, METH_FASTCALL,
     "request_line(mac, prev, kind, origin, seq, wall_ns, mono_ns,\n"
     "             head, model, middle, prompt, tail, /)\n--\n\nSee kernels.wire.lines."},
    {"request_run", (PyCFunction)(void (*)(void))wire_request_run, METH_FASTCALL,
     "request_run(mac, prev, kind, origin, seq, walls, monos, rows, most, /)\n--\n\n"
     "See kernels.wire.runs."},
    {"crc32", (PyCFunction)(void (*)(void))wire_crc32, METH_FASTCALL,
     "crc32(data, value, /)\n--\n\nSee kernels.wire.checksums."},
    {"begin_write", (PyCFunction)(void (*)(void))wire_begin_write, METH_FASTCALL,
     "begin_write(fd, offset, size, /)\n--\n\nSee kernels.wire.writes."},
    {"grow", (PyCFunction)(void (*)(void))wire_grow, METH_FASTCALL,
     "grow(begin, end, sizes, hashes, data, lines, /)\n--\n\nSee kernels.wire.trees."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_def = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "kernels.wire._wire",
    .m_doc = "HTTP/1.1 heads and JSON bodies; what is not sure goes to a pure twin.",
    .m_size = 0,
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__wire(void)
{
    return PyModuleDef_Init(&module_def);
}
