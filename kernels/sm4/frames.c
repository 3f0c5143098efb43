/* The frames of one sealed stream (docs/envelope.md, "Single and stream"), in one call each.
 *
 *     frame = u32 (bit 31 = last | n) || sealed of n bytes, tag included
 *     nonce = (7 zero bytes || u32 counter from 0 || u8 last) XOR mask
 *
 * What proxy.sm4.frames.StreamCipher does over any cipher, this does for SM4 without a Python frame
 * or a copy in between; the tests hold both to the same bytes. Data is padded with 0x80 and zeros.
 * For the SSE carrier a frame comes as its event: `data: `, base64url without `=`, LF LF. The table
 * of that encoding is indexed by ciphertext only.
 */
#include "frames.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "sm4.h"

enum {
    PREFIX = 4,
    MASK = 12,
    SEALED_MAX = 65536 + SM4_TAG,
    UNIT_MAX = 65536,
    EVENT_HEAD = 6, /* `data: ` */
    EVENT_TAIL = 2
};

typedef struct {
    PyObject_HEAD
    sm4_key *key;
    PyObject *invalid_tag;
    PyObject *aad; /* bytes, until frame 0 has come */
    uint64_t counter;
    bool ended;
    uint8_t mask[MASK];
} Frames;

static uint16_t pairs[4096]; /* twelve bits to their two characters, in memory order */

/* When the library is loaded: interpreters share it, and none may see it half filled. */
__attribute__((constructor)) static void fill_pairs(void)
{
    static const char alphabet[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    for (int i = 0; i < 4096; i++) {
        memcpy(&pairs[i], (char[2]){alphabet[i >> 6], alphabet[i & 63]}, 2);
    }
}

static size_t encoded_bytes(size_t size)
{
    return size / 3 * 4 + (size % 3 ? size % 3 + 1 : 0);
}

/* `in` may lie at the end of the room that `out` begins: writing stays behind reading. */
static void encode(const uint8_t *in, size_t size, uint8_t *out)
{
    for (; size >= 3; size -= 3, in += 3, out += 4) {
        uint32_t word = (uint32_t)in[0] << 16 | (uint32_t)in[1] << 8 | in[2];
        uint16_t both[2] = {pairs[word >> 12], pairs[word & 0xfff]};
        memcpy(out, both, 4);
    }
    if (size != 0) {
        uint32_t word = (uint32_t)in[0] << 16 | (size == 2 ? (uint32_t)in[1] << 8 : 0);
        uint16_t both[2] = {pairs[word >> 12], pairs[word & 0xfff]};
        memcpy(out, both, size + 1);
    }
}

/* Borrows the bytes of an object; `view` is released by the caller where it was taken. */
static int borrow(PyObject *object, Py_buffer *view, const uint8_t **bytes, size_t *size)
{
    view->obj = NULL;
    if (PyBytes_CheckExact(object)) {
        *bytes = (const uint8_t *)PyBytes_AsString(object);
        *size = (size_t)PyBytes_Size(object);
        return 0;
    }
    if (PyObject_GetBuffer(object, view, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    *bytes = view->buf, *size = (size_t)view->len;
    return 0;
}

static void give_back(Py_buffer *view)
{
    if (view->obj != NULL) {
        PyBuffer_Release(view);
    }
}

static size_t whole_blocks(size_t length)
{
    return (length + SM4_BLOCK - 1) & ~(size_t)(SM4_BLOCK - 1);
}

/* Moves on to the next frame: its nonce, its additional data, powers enough for it. */
static int next(Frames *self, bool last, size_t length, uint8_t nonce[SM4_NONCE],
                const uint8_t **aad, size_t *aad_length)
{
    if (self->ended) {
        PyErr_SetString(PyExc_RuntimeError, "the last frame has been");
        return -1;
    }
    if (self->counter > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a stream has at most 2^32 frames");
        return -1;
    }
    *aad = NULL, *aad_length = 0;
    if (self->counter == 0) {
        *aad = (const uint8_t *)PyBytes_AsString(self->aad);
        *aad_length = (size_t)PyBytes_Size(self->aad);
    }
    memcpy(nonce, self->mask, SM4_NONCE);
    for (int i = 0; i < 4; i++) {
        nonce[7 + i] ^= (uint8_t)(self->counter >> (24 - 8 * i));
    }
    nonce[11] ^= last;
    self->counter++;
    self->ended = last;
    /* Most frames of a stream are as long as its first one. */
    size_t bytes = whole_blocks(*aad_length) + whole_blocks(length);
    if (bytes > self->key->powers_for) {
        self->key->tier->powers(self->key, self->counter == 1 ? bytes : 0);
    }
    return 0;
}

static PyObject *frames_seal(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Frames *self = (Frames *)object;
    Py_buffer view;
    const uint8_t *data, *aad;
    size_t size, aad_length;
    uint8_t nonce[SM4_NONCE];

    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "seal takes data, unit, last, as_event");
        return NULL;
    }
    /* One by one: what an argument's own code does must not meet the error of another. */
    long unit = PyLong_AsLong(args[1]);
    if (unit == -1 && PyErr_Occurred()) {
        return NULL;
    }
    int last = PyObject_IsTrue(args[2]);
    int as_event = last < 0 ? -1 : PyObject_IsTrue(args[3]);
    if (as_event < 0) {
        return NULL;
    }
    if (unit < 1 || unit > UNIT_MAX) {
        PyErr_SetString(PyExc_ValueError, "unit: expected 1 to 65536");
        return NULL;
    }
    if (borrow(args[0], &view, &data, &size) < 0) {
        return NULL;
    }
    PyObject *out = NULL;
    size_t padded = size < SEALED_MAX ? (size / (size_t)unit + 1) * (size_t)unit : SEALED_MAX;
    size_t sealed = padded + SM4_TAG, frame = PREFIX + sealed;
    if (sealed > SEALED_MAX) {
        PyErr_SetString(PyExc_ValueError, "the data does not fit in a frame");
        goto done;
    }
    size_t text = encoded_bytes(frame);
    size_t whole = as_event ? EVENT_HEAD + text + EVENT_TAIL : frame;
    out = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)whole);
    if (out == NULL || next(self, last, padded, nonce, &aad, &aad_length) < 0) {
        Py_CLEAR(out);
        goto done;
    }
    uint8_t *start = (uint8_t *)PyBytes_AsString(out), *p = start + whole - frame;
    uint32_t word = (uint32_t)sealed | (last ? 1u << 31 : 0);
    for (int i = 0; i < PREFIX; i++) {
        p[i] = (uint8_t)(word >> (24 - 8 * i));
    }
    uint8_t *body = p + PREFIX;
    memcpy(body, data, size);
    body[size] = 0x80;
    memset(body + size + 1, 0, padded - size - 1);
    self->key->tier->gcm(self->key, nonce, aad, aad_length, body, body, padded, body + padded, 1);
    if (as_event) {
        memcpy(start, "data: ", EVENT_HEAD);
        encode(p, frame, start + EVENT_HEAD);
        memcpy(start + EVENT_HEAD + text, "\n\n", EVENT_TAIL);
    }
done:
    give_back(&view);
    return out;
}

static PyObject *frames_open(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Frames *self = (Frames *)object;
    Py_buffer view;
    const uint8_t *sealed, *aad;
    size_t size, aad_length;
    uint8_t nonce[SM4_NONCE], tag[SM4_TAG];

    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "open takes sealed, last");
        return NULL;
    }
    int last = PyObject_IsTrue(args[1]);
    if (last < 0 || borrow(args[0], &view, &sealed, &size) < 0) {
        return NULL;
    }
    PyObject *out = NULL;
    if (size < SM4_TAG || size > SEALED_MAX) {
        PyErr_SetNone(self->invalid_tag);
        goto done;
    }
    size_t length = size - SM4_TAG;
    out = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
    if (out == NULL || next(self, last, length, nonce, &aad, &aad_length) < 0) {
        Py_CLEAR(out);
        goto done;
    }
    uint8_t *plain = (uint8_t *)PyBytes_AsString(out);
    self->key->tier->gcm(self->key, nonce, aad, aad_length, sealed, plain, length, tag, 0);
    int same = sm4_tags_equal(tag, sealed + length);
    sm4_wipe(tag, sizeof tag); /* the right tag of what may be a forgery */
    if (!same) {
        sm4_wipe(plain, length);
        Py_CLEAR(out);
        PyErr_SetNone(self->invalid_tag);
    }
done:
    give_back(&view);
    return out;
}

static const sm4_tier *tier_named(const char *name)
{
    for (const sm4_tier *const *tier = sm4_tiers; *tier != NULL; tier++) {
        if (strcmp((*tier)->name, name) == 0 && sm4_tier_usable(*tier)) {
            return *tier;
        }
    }
    return NULL;
}

static PyObject *frames_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    const char *raw, *mask, *name;
    Py_ssize_t raw_size, mask_size;
    PyObject *aad;

    if (keywords != NULL && PyDict_Size(keywords) != 0) {
        PyErr_SetString(PyExc_TypeError, "Frames takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "y#y#Ss:Frames", &raw, &raw_size, &mask, &mask_size, &aad,
                          &name)) {
        return NULL;
    }
    if (raw_size != SM4_BLOCK || mask_size != MASK) {
        PyErr_SetString(PyExc_ValueError, "expected a key of 16 and a mask of 12 bytes");
        return NULL;
    }
    const sm4_tier *tier = tier_named(name);
    if (tier == NULL) {
        PyErr_Format(PyExc_ValueError, "tier %s is not usable here", name);
        return NULL;
    }
    PyObject *module = PyType_GetModule(type);
    PyObject *invalid_tag = module ? PyObject_GetAttrString(module, "InvalidTag") : NULL;
    if (invalid_tag == NULL) {
        return NULL;
    }
    Frames *self = (Frames *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        Py_DECREF(invalid_tag);
        return NULL;
    }
    self->invalid_tag = invalid_tag;
    self->aad = Py_NewRef(aad);
    memcpy(self->mask, mask, MASK);
    self->key = aligned_alloc(_Alignof(sm4_key), sizeof(sm4_key));
    if (self->key == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->key->tier = tier;
    self->key->powers_for = 0;
    (tier->expand != NULL ? tier->expand : sm4_expand_key)(self->key, (const uint8_t *)raw);
    return (PyObject *)self;
}

static void frames_dealloc(PyObject *object)
{
    Frames *self = (Frames *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->key != NULL) {
        sm4_wipe(self->key, sizeof(sm4_key));
        free(self->key);
    }
    sm4_wipe(self->mask, MASK);
    Py_XDECREF(self->invalid_tag);
    Py_XDECREF(self->aad);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef frames_methods[] = {
    {"seal", (PyCFunction)(void (*)(void))frames_seal, METH_FASTCALL,
     "seal(data, unit, last, as_event, /)\n--\n\n"
     "Return the next frame with data padded to a multiple of unit, or its SSE event."},
    {"open", (PyCFunction)(void (*)(void))frames_open, METH_FASTCALL,
     "open(sealed, last, /)\n--\n\n"
     "Return the next frame's padded data; raises InvalidTag."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot frames_slots[] = {
    {Py_tp_doc, "Frames(key, mask, aad, tier, /)\n--\n\n"
                "The frames of one sealed stream, in order; seals or opens, not both."},
    {Py_tp_new, frames_new},
    {Py_tp_dealloc, frames_dealloc},
    {Py_tp_methods, frames_methods},
    {0, NULL},
};

static PyType_Spec frames_spec = {
    .name = "kernels.sm4._sm4.Frames",
    .basicsize = sizeof(Frames),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = frames_slots,
};

int sm4_frames_add(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &frames_spec, NULL);
    int done = type == NULL ? -1 : PyModule_AddObjectRef(module, "Frames", type);
    Py_XDECREF(type);
    return done;
}
