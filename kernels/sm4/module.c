/* kernels.sm4._sm4: the key type and the module. No state is shared between interpreters. */
#include "cipher.h"

#include <stdlib.h>
#include <string.h>

#include "frames.h"

/* --- the type -------------------------------------------------------------------------------- */

static const sm4_tier *tier_named(PyObject *name)
{
    if (name == NULL || name == Py_None) {
        return sm4_best_tier();
    }
    if (!PyUnicode_Check(name)) {
        PyErr_SetString(PyExc_TypeError, "tier: expected a name or None");
        return NULL;
    }
    for (const sm4_tier *const *tier = sm4_tiers; *tier != NULL; tier++) {
        if (PyUnicode_CompareWithASCIIString(name, (*tier)->name) == 0 && sm4_tier_usable(*tier)) {
            return *tier;
        }
    }
    PyErr_Format(PyExc_ValueError, "tier %R is unknown or this CPU has it not", name);
    return NULL;
}

static PyObject *cipher_vectorcall(PyObject *type, PyObject *const *args, size_t flags,
                                   PyObject *kwnames)
{
    static const char *const names[] = {"key", "tier", "one_message"};
    PyObject *values[3];
    View raw;
    if (sm4_spread("Sm4Gcm", names, 1, 3, args, PyVectorcall_NARGS(flags), kwnames, values) < 0) {
        return NULL;
    }
    int one_message = values[2] == NULL ? 0 : PyObject_IsTrue(values[2]);
    const sm4_tier *tier = one_message < 0 ? NULL : tier_named(values[1]);
    if (tier == NULL || view_get(&raw, values[0]) < 0) {
        return NULL;
    }
    PyTypeObject *cls = (PyTypeObject *)type;
    Cipher *self = NULL;
    if (raw.length != SM4_BLOCK) {
        PyErr_Format(PyExc_ValueError, "a key of %zu bytes: expected 16", raw.length);
    } else if ((self = (Cipher *)cls->tp_alloc(cls, 0)) != NULL) {
        uintptr_t at = ((uintptr_t)self->room + KEY_ALIGNMENT - 1) / KEY_ALIGNMENT * KEY_ALIGNMENT;
        self->key = (sm4_key *)at;
        self->key->tier = tier;
        (tier->expand != NULL ? tier->expand : sm4_expand_key)(self->key, raw.data);
        if (!one_message) {
            tier->powers(self->key, 0);
            self->primed = 1;
        }
    }
    view_release(&raw);
    return (PyObject *)self;
}

static void cipher_dealloc(Cipher *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->full != NULL) {
        sm4_wipe(self->full, sizeof *self->full);
        free(self->full);
    }
    sm4_wipe(self->room, sizeof self->room);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *cipher_tier(Cipher *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(self->key->tier->name);
}

static PyGetSetDef cipher_getset[] = {
    {"tier", (getter)cipher_tier, NULL, "The tier this key works with.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot cipher_slots[] = {
    {Py_tp_dealloc, cipher_dealloc},
    {Py_tp_methods, sm4_cipher_methods},
    {Py_tp_getset, cipher_getset},
    {Py_tp_doc, "Sm4Gcm(key, tier=None, one_message=False)\n--\n\n"
                "SM4-128-GCM under one key: 12-byte nonces, 16-byte tags. Threads may share it."},
    {0, NULL},
};

static PyType_Spec cipher_spec = {
    .name = "kernels.sm4.Sm4Gcm",
    .basicsize = sizeof(Cipher),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = cipher_slots,
};

/* --- the module ------------------------------------------------------------------------------ */

static PyObject *module_tiers(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *names = PyList_New(0);
    for (const sm4_tier *const *tier = sm4_tiers; names != NULL && *tier != NULL; tier++) {
        PyObject *name = sm4_tier_usable(*tier) ? PyUnicode_FromString((*tier)->name) : Py_None;
        if (name == NULL || (name != Py_None && PyList_Append(names, name) < 0)) {
            Py_CLEAR(names);
        }
        if (name != Py_None) {
            Py_XDECREF(name);
        }
    }
    PyObject *tuple = names == NULL ? NULL : PyList_AsTuple(names);
    Py_XDECREF(names);
    return tuple;
}

static int module_exec(PyObject *module)
{
    Module *state = PyModule_GetState(module);
    state->invalid_tag = PyErr_NewExceptionWithDoc(
        "kernels.sm4.InvalidTag", "What was opened is not what was sealed.", PyExc_ValueError,
        NULL);
    state->cipher = (PyTypeObject *)PyType_FromModuleAndSpec(module, &cipher_spec, NULL);
    if (state->invalid_tag == NULL || state->cipher == NULL) {
        return -1;
    }
    /* The only way to make one: no instance exists without a key. */
    state->cipher->tp_vectorcall = cipher_vectorcall;
    return PyModule_AddObjectRef(module, "InvalidTag", state->invalid_tag) < 0 ||
                   PyModule_AddType(module, state->cipher) < 0 || sm4_frames_add(module) < 0
               ? -1
               : 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    Module *state = PyModule_GetState(module);
    Py_VISIT(state->cipher);
    Py_VISIT(state->invalid_tag);
    return 0;
}

static int module_clear(PyObject *module)
{
    Module *state = PyModule_GetState(module);
    Py_CLEAR(state->cipher);
    Py_CLEAR(state->invalid_tag);
    return 0;
}

static PyMethodDef module_methods[] = {
    {"tiers", module_tiers, METH_NOARGS,
     "tiers()\n--\n\nReturn the names of the tiers that this CPU can use, best first."},
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
    .m_name = "kernels.sm4._sm4",
    .m_doc = "SM4-128-GCM.",
    .m_size = sizeof(Module),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__sm4(void)
{
    return PyModuleDef_Init(&module_def);
}
