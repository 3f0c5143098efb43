/* The calls of the key object.
 *
 * All arguments are checked before a byte is written. An opened text leaves the call only after its
 * tag was compared; on a mismatch the output is wiped. Long messages run without the GIL: buffers
 * stay exported meanwhile, and a key that is in use never changes.
 */
#include "cipher.h"

#include <stdlib.h>
#include <string.h>

enum { UNLOCKED_ABOVE = 64 << 10 };

/* SP 800-38D, 5.2.1.1: 2^39 - 256 bits. */
#define MESSAGE_BYTES_MAX ((1ULL << 36) - 32)

int sm4_spread(const char *function, const char *const *names, Py_ssize_t required,
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
    if (sm4_spread("seal", names, 2, 3, args, given, kwnames, values) < 0) {
        return NULL;
    }
    return whole(self, values, 1);
}

static PyObject *cipher_open(Cipher *self, PyObject *const *args, Py_ssize_t given,
                             PyObject *kwnames)
{
    static const char *const names[] = {"nonce", "sealed", "aad"};
    PyObject *values[3];
    if (sm4_spread("open", names, 2, 3, args, given, kwnames, values) < 0) {
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
    if (sm4_spread("seal_into", names, 3, 4, args, given, kwnames, values) < 0) {
        return NULL;
    }
    return into(self, values, 1);
}

static PyObject *cipher_open_into(Cipher *self, PyObject *const *args, Py_ssize_t given,
                                  PyObject *kwnames)
{
    static const char *const names[] = {"nonce", "sealed", "out", "aad"};
    PyObject *values[4];
    if (sm4_spread("open_into", names, 3, 4, args, given, kwnames, values) < 0) {
        return NULL;
    }
    return into(self, values, 0);
}

static PyObject *cipher_seal_many(Cipher *self, PyObject *const *args, Py_ssize_t given,
                                  PyObject *kwnames)
{
    static const char *const names[] = {"nonces", "messages", "aads"};
    PyObject *values[3], *lists[3] = {NULL, NULL, NULL}, *results = NULL;
    if (sm4_spread("seal_many", names, 2, 3, args, given, kwnames, values) < 0) {
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

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL | METH_KEYWORDS

PyMethodDef sm4_cipher_methods[] = {
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
