/* SHA-256 and HMAC-SHA256 (FIPS 180-4, RFC 2104) of short messages, without an object per hash.
 *
 * The hash itself is libcrypto's, the one that hashlib has loaded into this process; what is spared
 * is everything around it: looking up an algorithm, and a context on the heap for each of the two
 * hashes of a MAC. Where no loaded libcrypto offers these functions, none of this is available.
 */
#include "mac.h"
#include "sha256.h"

#include <dlfcn.h>

enum { BLOCK_BYTES = 64 };

/* SHA256_CTX of OpenSSL 1.0 to 3 has 112 bytes; nobody relies on what is behind them. */
typedef union {
    uint8_t bytes[256];
    uint64_t aligned;
} Context;

static struct {
    int (*init)(void *);
    int (*update)(void *, const void *, size_t);
    int (*final)(unsigned char *, void *);
} sha256;

/* Finds the functions once. */
bool mac_available(void)
{
    static const char *const libraries[] = {"libcrypto.so.3", "libcrypto.so.1.1"};
    for (size_t i = 0; i < sizeof libraries / sizeof *libraries && sha256.final == NULL; i++) {
        void *library = dlopen(libraries[i], RTLD_NOW | RTLD_NOLOAD);
        if (library == NULL) {
            continue;
        }
        /* ISO C has no cast from an object's pointer to a function's; POSIX says this one works. */
        *(void **)&sha256.init = dlsym(library, "SHA256_Init");
        *(void **)&sha256.update = dlsym(library, "SHA256_Update");
        if (sha256.init != NULL && sha256.update != NULL) {
            *(void **)&sha256.final = dlsym(library, "SHA256_Final");
        }
    }
    return sha256.final != NULL;
}

static void wipe(void *at, size_t size)
{
    volatile uint8_t *bytes = at;
    while (size-- > 0) {
        *bytes++ = 0;
    }
}

/* Feeds each part; `framed`: its length before it, four bytes, big end first. */
static int feed(Context *context, PyObject *const *parts, Py_ssize_t count, bool framed)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyBytes_CheckExact(parts[i])) {
            PyErr_SetString(PyExc_TypeError, "a part is bytes");
            return -1;
        }
        size_t size = (size_t)PyBytes_GET_SIZE(parts[i]);
        if (framed) {
            if (size > UINT32_MAX) {
                PyErr_SetString(PyExc_OverflowError, "a part is longer than 4 GiB");
                return -1;
            }
            uint8_t length[4] = {(uint8_t)(size >> 24), (uint8_t)(size >> 16),
                                 (uint8_t)(size >> 8), (uint8_t)size};
            sha256.update(context, length, sizeof length);
        }
        sha256.update(context, PyBytes_AS_STRING(parts[i]), size);
    }
    return 0;
}

void hex_write(const uint8_t hash[HASH_BYTES], char out[MAC_HEX])
{
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < HASH_BYTES; i++) {
        *out++ = digits[hash[i] >> 4];
        *out++ = digits[hash[i] & 15];
    }
}

static int nibble(uint8_t c)
{
    if ((uint8_t)(c - '0') < 10) {
        return c - '0';
    }
    return (uint8_t)(c - 'a') < 6 ? c - 'a' + 10 : -1;
}

bool hex_read(const uint8_t text[MAC_HEX], uint8_t hash[HASH_BYTES])
{
    int bad = 0;
    for (int i = 0; i < HASH_BYTES; i++) {
        int high = nibble(text[2 * i]), low = nibble(text[2 * i + 1]);
        bad |= high | low;
        hash[i] = (uint8_t)(high * 16 + low);
    }
    return bad >= 0;
}

static PyObject *hex(const uint8_t hash[HASH_BYTES])
{
    PyObject *text = PyUnicode_New(MAC_HEX, 127);
    if (text != NULL) {
        hex_write(hash, (char *)PyUnicode_1BYTE_DATA(text));
    }
    return text;
}

/* --- a key, absorbed once --------------------------------------------------------------------- */

struct MacObject {
    PyObject_HEAD
    Context inner, outer;
    Sha states[2]; /* the same, for `sha256.h` */
    bool states_there;
};
typedef struct MacObject Mac;

static PyObject *mac_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Py_buffer key;
    static char *names[] = {"key", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*:Mac", names, &key)) {
        return NULL;
    }
    Mac *self = NULL;
    if (key.len > BLOCK_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a key has at most 64 bytes");
    } else {
        self = (Mac *)type->tp_alloc(type, 0);
    }
    if (self != NULL) {
        uint8_t pads[2][BLOCK_BYTES];
        memset(pads[0], 0x36, BLOCK_BYTES);
        memset(pads[1], 0x5c, BLOCK_BYTES);
        for (Py_ssize_t i = 0; i < key.len; i++) {
            pads[0][i] ^= ((const uint8_t *)key.buf)[i];
            pads[1][i] ^= ((const uint8_t *)key.buf)[i];
        }
        sha256.init(&self->inner);
        sha256.update(&self->inner, pads[0], BLOCK_BYTES);
        sha256.init(&self->outer);
        sha256.update(&self->outer, pads[1], BLOCK_BYTES);
        self->states_there = sha_available();
        for (int i = 0; i < 2 && self->states_there; i++) {
            sha_begin(&self->states[i], NULL, pads[i], 1);
            sha_one(&self->states[i]);
        }
        wipe(pads, sizeof pads);
    }
    PyBuffer_Release(&key);
    return (PyObject *)self;
}

static void mac_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    wipe(&((Mac *)self)->inner, 2 * sizeof(Context));
    wipe(((Mac *)self)->states, sizeof ((Mac *)self)->states);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *mac_of(PyObject *self, PyObject *const *parts, Py_ssize_t count, bool framed)
{
    Context context = ((Mac *)self)->inner;
    uint8_t hash[HASH_BYTES];
    if (feed(&context, parts, count, framed) < 0) {
        return NULL;
    }
    sha256.final(hash, &context);
    context = ((Mac *)self)->outer;
    sha256.update(&context, hash, HASH_BYTES);
    sha256.final(hash, &context);
    return hex(hash);
}

static PyObject *mac_hex(PyObject *self, PyObject *const *parts, Py_ssize_t count)
{
    return mac_of(self, parts, count, false);
}

static PyObject *mac_framed(PyObject *self, PyObject *const *parts, Py_ssize_t count)
{
    return mac_of(self, parts, count, true);
}

static PyMethodDef mac_methods[] = {
    {"hex", (PyCFunction)(void (*)(void))mac_hex, METH_FASTCALL,
     "hex($self, /, *parts)\n--\n\nReturn the MAC of the parts, joined, as 64 hex characters."},
    {"framed", (PyCFunction)(void (*)(void))mac_framed, METH_FASTCALL,
     "framed($self, /, *parts)\n--\n\n"
     "Return the MAC of u32 big-endian length || part for each part, as 64 hex characters."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot mac_slots[] = {
    {Py_tp_doc, "Mac(key)\n--\n\nHMAC-SHA256 with a key of at most 64 bytes, absorbed once."},
    {Py_tp_new, mac_new},
    {Py_tp_dealloc, mac_dealloc},
    {Py_tp_methods, mac_methods},
    {0, NULL},
};

static PyType_Spec mac_spec = {
    .name = "kernels.wire._wire.Mac",
    .basicsize = sizeof(Mac),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = mac_slots,
};

bool mac_check(PyObject *object)
{
    /* The type is immutable and has no subclasses; one interpreter's is like another's. */
    return Py_TYPE(object)->tp_dealloc == mac_dealloc;
}

void mac_compute(const Mac *mac, Span first, Span second, uint8_t hash[HASH_BYTES])
{
    Context context = mac->inner;
    sha256.update(&context, first.at, (size_t)first.size);
    sha256.update(&context, second.at, (size_t)second.size);
    sha256.final(hash, &context);
    context = mac->outer;
    sha256.update(&context, hash, HASH_BYTES);
    sha256.final(hash, &context);
}

bool mac_states(const Mac *mac, const uint32_t **inner, const uint32_t **outer)
{
    if (inner != NULL) {
        *inner = mac->states[0].state;
    }
    if (outer != NULL) {
        *outer = mac->states[1].state;
    }
    return mac->states_there;
}

void hash_tagged(uint8_t tag, Span first, Span second, uint8_t hash[HASH_BYTES])
{
    Context context;
    sha256.init(&context);
    sha256.update(&context, &tag, 1);
    sha256.update(&context, first.at, (size_t)first.size);
    sha256.update(&context, second.at, (size_t)second.size);
    sha256.final(hash, &context);
}

PyObject *wire_sha256(PyObject *module, PyObject *const *parts, Py_ssize_t count)
{
    (void)module;
    if (!mac_available()) {
        PyErr_SetString(PyExc_RuntimeError, "no libcrypto is loaded here");
        return NULL;
    }
    Context context;
    uint8_t hash[HASH_BYTES];
    sha256.init(&context);
    if (feed(&context, parts, count, false) < 0) {
        return NULL;
    }
    sha256.final(hash, &context);
    return PyBytes_FromStringAndSize((const char *)hash, HASH_BYTES);
}

int wire_add_mac(PyObject *module)
{
    if (!mac_available()) {
        return 0;
    }
    PyObject *type = PyType_FromModuleAndSpec(module, &mac_spec, NULL);
    if (type == NULL) {
        return -1;
    }
    int added = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return added;
}
