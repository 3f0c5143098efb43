/* kernels.sm4._sm4: the key object and its calls.
 *
 * All arguments are checked before a byte is written. An opened text leaves the call only after its
 * tag was compared; on a mismatch the output is wiped. Long messages run without the GIL: buffers
 * stay exported meanwhile, and a key that is in use never changes. No state is shared between
 * interpreters.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "frames.h"
#include "sm4.h"

enum { UNLOCKED_ABOVE = 64 << 10, KEY_ALIGNMENT = 64 };

/* SP 800-38D, 5.2.1.1: 2^39 - 256 bits. */
#define MESSAGE_BYTES_MAX ((1ULL << 36) - 32)

typedef struct {
    PyTypeObject *cipher;
    PyObject *invalid_tag;
} Module;

typedef struct {
    PyObject_HEAD
    sm4_key *key;  /* in `room`, aligned */
    sm4_key *full; /* NULL until a one-message key is used for more than its powers are enough for */
    int primed;    /* whether key->powers are there */
    uint8_t room[sizeof(sm4_key) + KEY_ALIGNMENT];
} Cipher;

/* --- arguments ------------------------------------------------------------------------------- */

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

/* Spreads positional and named arguments over `values` (absent: NULL). */
static int spread(const char *function, const char *const *names, Py_ssize_t required,
                  Py_ssize_t count, PyObject *const *args, Py_ssize_t given, PyObject *kwnames,
                  PyObject **values)
{
    Py_ssize_t named = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);

    if (given > count) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %zd arguments", function, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        values[i] = i < given ? args[i] : NULL;
    }
    for (Py_ssize_t k = 0; k < named; k++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, k);
        Py_ssize_t i = 0;
        while (i < count && PyUnicode_CompareWithASCIIString(name, names[i]) != 0) {
            i++;
        }
        if (i == count || values[i] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s(): argument %R is unknown or given twice", function,
                         name);
            return -1;
        }
        values[i] = args[given + k];
    }
    for (Py_ssize_t i = 0; i < required; i++) {
        if (values[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s(): argument %s is missing", function, names[i]);
            return -1;
        }
    }
    return 0;
}

static int nonce_get(PyObject *object, uint8_t nonce[SM4_NONCE])
{
    View view;
    if (view_get(&view, object) < 0) {
        return -1;
    }
    size_t length = view.length;
    if (length == SM4_NONCE) {
        memcpy(nonce, view.data, SM4_NONCE);
    }
    view_release(&view);
    if (length != SM4_NONCE) {
        PyErr_Format(PyExc_ValueError, "a nonce of %zu bytes: expected 12", length);
        return -1;
    }
    return 0;
}

/* --- the work -------------------------------------------------------------------------------- */

/* The key with powers enough for this message; NULL with an exception set. Under the GIL. */
static const sm4_key *key_for(Cipher *self, size_t aad_length, size_t length)
{
    sm4_key *key = self->key;
    if (__builtin_expect(self->primed && key->powers_for == SIZE_MAX, 1)) {
        return key;
    }
    size_t bytes = ((aad_length + 15) & ~(size_t)15) + ((length + 15) & ~(size_t)15);
    if (!self->primed) {
        key->tier->powers(key, bytes == 0 ? SM4_BLOCK : bytes);
        self->primed = 1;
    }
    if (bytes <= key->powers_for) {
        return key;
    }
    /* Another thread may be reading the first one without the GIL: it stays as it is. */
    if (self->full == NULL) {
        sm4_key *full = aligned_alloc(KEY_ALIGNMENT, (sizeof *full + KEY_ALIGNMENT - 1) /
                                                         KEY_ALIGNMENT * KEY_ALIGNMENT);
        if (full == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        memcpy(full, key, sizeof *full);
        full->tier->powers(full, 0);
        self->full = full;
    }
    return self->full;
}

static int run(Cipher *self, const uint8_t nonce[SM4_NONCE], const View *aad, const uint8_t *in,
               uint8_t *out, size_t length, uint8_t tag[SM4_TAG], int seal)
{
    const sm4_key *key = key_for(self, aad->length, length);
    if (key == NULL) {
        return -1;
    }
    if (length > UNLOCKED_ABOVE || aad->length > UNLOCKED_ABOVE) {
        Py_BEGIN_ALLOW_THREADS
        key->tier->gcm(key, nonce, aad->data, aad->length, in, out, length, tag, seal);
        Py_END_ALLOW_THREADS
    } else {
        key->tier->gcm(key, nonce, aad->data, aad->length, in, out, length, tag, seal);
    }
    return 0;
}

static int seal_to(Cipher *self, const uint8_t nonce[SM4_NONCE], const View *text, const View *aad,
                   uint8_t *out)
{
    /* By way of a copy: the tag's place may be anything in a caller's buffer. */
    uint8_t tag[SM4_TAG];
    if (run(self, nonce, aad, text->data, out, text->length, tag, 1) < 0) {
        return -1;
    }
    memcpy(out + text->length, tag, SM4_TAG);
    return 0;
}

/* Writes sealed->length - 16 bytes, or as many zeros and raises. */
static int open_to(Cipher *self, const uint8_t nonce[SM4_NONCE], const View *sealed,
                   const View *aad, uint8_t *out)
{
    uint8_t expected[SM4_TAG], tag[SM4_TAG];
    size_t length = sealed->length - SM4_TAG;

    memcpy(tag, sealed->data + length, SM4_TAG);
    if (run(self, nonce, aad, sealed->data, out, length, expected, 0) < 0) {
        return -1;
    }
    int equal = sm4_tags_equal(tag, expected);
    sm4_wipe(expected, sizeof expected); /* the right tag of a forgery would be one */
    if (!equal) {
        sm4_wipe(out, length);
        Module *module = PyType_GetModuleState(Py_TYPE((PyObject *)self));
        PyErr_SetString(module->invalid_tag, "the tag does not match");
        return -1;
    }
    return 0;
}

static int text_allowed(const View *text, int seal)
{
    if (text->length > MESSAGE_BYTES_MAX + (seal ? 0 : SM4_TAG)) {
        PyErr_SetString(PyExc_OverflowError, "a message is at most 2^36 - 32 bytes");
        return 0;
    }
    return 1;
}

static int sealed_allowed(Cipher *self, const View *sealed)
{
    if (sealed->length < SM4_TAG) {
        Module *module = PyType_GetModuleState(Py_TYPE((PyObject *)self));
        PyErr_SetString(module->invalid_tag, "shorter than a tag");
        return 0;
    }
    return text_allowed(sealed, 0);
}

static PyObject *whole(Cipher *self, PyObject *const values[3], int seal)
{
    static const View none = {.data = (const uint8_t *)""};
    uint8_t nonce[SM4_NONCE];
    View text, aad = none;
    PyObject *result = NULL;

    if (nonce_get(values[0], nonce) < 0 || view_get(&text, values[1]) < 0) {
        return NULL;
    }
    if (values[2] != NULL && view_get(&aad, values[2]) < 0) {
        view_release(&text);
        return NULL;
    }
    if (seal ? text_allowed(&text, 1) : sealed_allowed(self, &text)) {
        size_t length = seal ? text.length + SM4_TAG : text.length - SM4_TAG;
        result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
        if (result != NULL) {
            uint8_t *out = (uint8_t *)PyBytes_AS_STRING(result);
            if ((seal ? seal_to : open_to)(self, nonce, &text, &aad, out) < 0) {
                Py_CLEAR(result);
            }
        }
    }
    view_release(&aad);
    view_release(&text);
    return result;
}

static PyObject *cipher_seal(Cipher *self, PyObject *const *args, Py_ssize_t given,
                             PyObject *kwnames)
{
    static const char *const names[] = {"nonce", "plaintext", "aad"};
    PyObject *values[3];
    if (spread("seal", names, 2, 3, args, given, kwnames, values) < 0) {
        return NULL;
    }
    return whole(self, values, 1);
}

static PyObject *cipher_open(Cipher *self, PyObject *const *args, Py_ssize_t given,
                             PyObject *kwnames)
{
    static const char *const names[] = {"nonce", "sealed", "aad"};
    PyObject *values[3];
    if (spread("open", names, 2, 3, args, given, kwnames, values) < 0) {
        return NULL;
    }
    return whole(self, values, 0);
}

static int apart(const uint8_t *a, size_t a_length, const uint8_t *b, size_t b_length)
{
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return a_length == 0 || b_length == 0 || (x < y ? y - x >= a_length : x - y >= b_length);
}

static PyObject *into(Cipher *self, PyObject *const values[4], int seal)
{
    static const View none = {.data = (const uint8_t *)""};
    uint8_t nonce[SM4_NONCE];
    View text, aad = none;
    Py_buffer out;
    PyObject *result = NULL;

    if (nonce_get(values[0], nonce) < 0 || view_get(&text, values[1]) < 0) {
        return NULL;
    }
    if (values[3] != NULL && view_get(&aad, values[3]) < 0) {
        view_release(&text);
        return NULL;
    }
    if (PyObject_GetBuffer(values[2], &out, PyBUF_WRITABLE) < 0) {
        view_release(&aad);
        view_release(&text);
        return NULL;
    }
    if (seal ? text_allowed(&text, 1) : sealed_allowed(self, &text)) {
        size_t length = seal ? text.length + SM4_TAG : text.length - SM4_TAG;
        if ((size_t)out.len < length) {
            PyErr_Format(PyExc_ValueError, "out has %zd bytes: expected at least %zu", out.len,
                         length);
        } else if ((text.data != out.buf && !apart(text.data, text.length, out.buf, length)) ||
                   !apart(aad.data, aad.length, out.buf, length)) {
            PyErr_SetString(PyExc_ValueError,
                            "out overlaps an input: in place means the same first byte");
        } else if ((seal ? seal_to : open_to)(self, nonce, &text, &aad, out.buf) == 0) {
            result = PyLong_FromSize_t(length);
        }
    }
    PyBuffer_Release(&out);
    view_release(&aad);
    view_release(&text);
    return result;
}

static PyObject *cipher_seal_into(Cipher *self, PyObject *const *args, Py_ssize_t given,
                                  PyObject *kwnames)
{
    static const char *const names[] = {"nonce", "plaintext", "out", "aad"};
    PyObject *values[4];
    if (spread("seal_into", names, 3, 4, args, given, kwnames, values) < 0) {
        return NULL;
    }
    return into(self, values, 1);
}

static PyObject *cipher_open_into(Cipher *self, PyObject *const *args, Py_ssize_t given,
                                  PyObject *kwnames)
{
    static const char *const names[] = {"nonce", "sealed", "out", "aad"};
    PyObject *values[4];
    if (spread("open_into", names, 3, 4, args, given, kwnames, values) < 0) {
        return NULL;
    }
    return into(self, values, 0);
}

static PyObject *cipher_seal_many(Cipher *self, PyObject *const *args, Py_ssize_t given,
                                  PyObject *kwnames)
{
    static const char *const names[] = {"nonces", "messages", "aads"};
    PyObject *values[3], *lists[3] = {NULL, NULL, NULL}, *results = NULL;
    if (spread("seal_many", names, 2, 3, args, given, kwnames, values) < 0) {
        return NULL;
    }
    int columns = values[2] == NULL || values[2] == Py_None ? 2 : 3;
    /* Tuples: what a foreign buffer's code does to the caller's list is no matter then. */
    for (int i = 0; i < columns; i++) {
        lists[i] = PySequence_Tuple(values[i]);
        if (lists[i] == NULL) {
            goto done;
        }
        if (PyTuple_GET_SIZE(lists[i]) != PyTuple_GET_SIZE(lists[0])) {
            PyErr_Format(PyExc_ValueError, "%zd %s for %zd nonces", PyTuple_GET_SIZE(lists[i]),
                         names[i], PyTuple_GET_SIZE(lists[0]));
            goto done;
        }
    }
    results = PyList_New(PyTuple_GET_SIZE(lists[0]));
    for (Py_ssize_t i = 0; results != NULL && i < PyList_GET_SIZE(results); i++) {
        PyObject *one[3] = {PyTuple_GET_ITEM(lists[0], i), PyTuple_GET_ITEM(lists[1], i),
                            columns == 3 ? PyTuple_GET_ITEM(lists[2], i) : NULL};
        PyObject *sealed = whole(self, one, 1);
        if (sealed == NULL) {
            Py_CLEAR(results);
        } else {
            PyList_SET_ITEM(results, i, sealed);
        }
    }
done:
    for (int i = 0; i < 3; i++) {
        Py_XDECREF(lists[i]);
    }
    return results;
}

static PyObject *cipher_encrypt_block(Cipher *self, PyObject *block)
{
    uint8_t out[SM4_BLOCK];
    View view;
    if (view_get(&view, block) < 0) {
        return NULL;
    }
    int right = view.length == SM4_BLOCK;
    if (right) {
        sm4_encrypt_block(self->key->round_keys, view.data, out);
    }
    view_release(&view);
    if (!right) {
        PyErr_SetString(PyExc_ValueError, "a block is 16 bytes");
        return NULL;
    }
    return PyBytes_FromStringAndSize((const char *)out, SM4_BLOCK);
}

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
        if (PyUnicode_CompareWithASCIIString(name, (*tier)->name) == 0 && (*tier)->usable()) {
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
    if (spread("Sm4Gcm", names, 1, 3, args, PyVectorcall_NARGS(flags), kwnames, values) < 0) {
        return NULL;
    }
    int one_message = values[2] == NULL ? 0 : PyObject_IsTrue(values[2]);
    const sm4_tier *tier = one_message < 0 ? NULL : tier_named(values[1]);
    if (tier == NULL || view_get(&raw, values[0]) < 0) {
        return NULL;
    }
    Cipher *self = NULL;
    if (raw.length != SM4_BLOCK) {
        PyErr_Format(PyExc_ValueError, "a key of %zu bytes: expected 16", raw.length);
    } else if ((self = (Cipher *)((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0)) != NULL) {
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

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL | METH_KEYWORDS

static PyMethodDef cipher_methods[] = {
    {"seal", FAST(cipher_seal),
     "seal($self, /, nonce, plaintext, aad=b'')\n--\n\n"
     "Return ciphertext and tag. The nonce: 12 bytes, never twice under one key."},
    {"open", FAST(cipher_open),
     "open($self, /, nonce, sealed, aad=b'')\n--\n\n"
     "Return the text of what `seal` made; raise InvalidTag if it is not that."},
    {"seal_into", FAST(cipher_seal_into),
     "seal_into($self, /, nonce, plaintext, out, aad=b'')\n--\n\n"
     "Write ciphertext and tag to `out`, which may begin where `plaintext` does; return how many."},
    {"open_into", FAST(cipher_open_into),
     "open_into($self, /, nonce, sealed, out, aad=b'')\n--\n\n"
     "Write the text to `out`, which may begin where `sealed` does; return how many bytes.\n\n"
     "On InvalidTag as many bytes of `out` are zero, in place or not."},
    {"seal_many", FAST(cipher_seal_many),
     "seal_many($self, /, nonces, messages, aads=None)\n--\n\n"
     "Return a list of what `seal` gives for each."},
    {"encrypt_block", (PyCFunction)cipher_encrypt_block, METH_O,
     "encrypt_block($self, block, /)\n--\n\nReturn the bare cipher's output for 16 bytes."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef cipher_getset[] = {
    {"tier", (getter)cipher_tier, NULL, "The tier this key works with.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot cipher_slots[] = {
    {Py_tp_dealloc, cipher_dealloc},
    {Py_tp_methods, cipher_methods},
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
        PyObject *name = (*tier)->usable() ? PyUnicode_FromString((*tier)->name) : Py_None;
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
        "kernels.sm4.InvalidTag", "What was opened is not what was sealed.", PyExc_ValueError, NULL);
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
