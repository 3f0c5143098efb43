/* Two small things of every request: whether its traceparent is an ordinary one, and the head that
 * its answer gets (proxy/trace.py and proxy/answer.py have the twins). */
#include "wire.h"

enum {
    TRACEPARENT = 55, /* version 00: two, 32, 16 and two hex digits, three dashes */
    NUMBER_ROOM = 24,
    NUMBERS = 3, /* status and two durations */
    PIECES = 16,
};

static const char hex_digits[] = "0123456789abcdef";

/* Hex digits, lower case, and not all of them 0 where `some` is asked for. */
static bool hex(const char *at, int size, bool some)
{
    int or = 0;
    for (int i = 0; i < size; i++) {
        char c = at[i];
        if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) {
            return false;
        }
        or |= c - '0';
    }
    return !some || or != 0;
}

/* plain_traceparent(value): true for a valid one of version 00; false is not sure. */
PyObject *wire_plain_traceparent(PyObject *module, PyObject *value)
{
    (void)module;
    bool plain = PyBytes_Check(value) && PyBytes_GET_SIZE(value) == TRACEPARENT;
    if (plain) {
        const char *at = PyBytes_AS_STRING(value);
        plain = memcmp(at, "00-", 3) == 0 && at[35] == '-' && at[52] == '-' &&
                hex(at + 3, 32, true) && hex(at + 36, 16, true) && hex(at + 53, 2, false);
    }
    return PyBool_FromLong(plain);
}

typedef struct {
    char text[NUMBER_ROOM];
    Py_ssize_t size;
} Number;

static void decimal(unsigned long long value, int digits_min, Number *out)
{
    char *p = out->text + NUMBER_ROOM;
    do {
        *--p = hex_digits[value % 10];
        value /= 10;
    } while (value != 0 || out->text + NUMBER_ROOM - p < digits_min);
    out->size = out->text + NUMBER_ROOM - p;
    memmove(out->text, p, (size_t)out->size);
}

/* Milliseconds with three digits, rounded to the nearest microsecond; false: an exception. */
static bool milliseconds(PyObject *ns, Number *out)
{
    unsigned long long value = PyLong_AsUnsignedLongLong(ns);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        return false;
    }
    decimal(value / 1000 + (value % 1000 >= 500), 4, out);
    memmove(out->text + out->size - 2, out->text + out->size - 3, 3);
    out->text[out->size - 3] = '.';
    out->size++;
    return true;
}

/* answer_head(status, reason, lines, framing, fields, trace_id, queue_ns, upstream_ns, tail, body):
 * the head of an answer and what of its body is here, in one piece. */
PyObject *wire_answer_head(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 10) {
        PyErr_SetString(PyExc_TypeError, "answer_head takes ten arguments");
        return NULL;
    }
    static const int given[] = {1, 2, 3, 4, 8, 9};
    Span bytes[10];
    for (size_t i = 0; i < sizeof given / sizeof *given; i++) {
        PyObject *arg = args[given[i]];
        if (!PyBytes_Check(arg)) {
            PyErr_SetString(PyExc_TypeError, "answer_head takes bytes");
            return NULL;
        }
        bytes[given[i]] = (Span){(const uint8_t *)PyBytes_AS_STRING(arg), PyBytes_GET_SIZE(arg)};
    }
    Py_ssize_t id_size;
    const char *id = PyUnicode_AsUTF8AndSize(args[5], &id_size);
    unsigned long long status = PyLong_AsUnsignedLongLong(args[0]);
    Number numbers[NUMBERS];
    if (id == NULL || (status == (unsigned long long)-1 && PyErr_Occurred()) ||
        !milliseconds(args[6], &numbers[1]) || !milliseconds(args[7], &numbers[2])) {
        return NULL;
    }
    decimal(status, 1, &numbers[0]);
#define FIXED(text) {(const uint8_t *)(text), sizeof(text) - 1}
#define NUMBER(i) {(const uint8_t *)numbers[i].text, numbers[i].size}
    const Span pieces[PIECES] = {
        FIXED("HTTP/1.1 "), NUMBER(0), FIXED(" "), bytes[1], FIXED("\r\n"), bytes[2], bytes[3],
        bytes[4], {(const uint8_t *)id, id_size}, FIXED("\r\nServer-Timing: queue;dur="), NUMBER(1),
        FIXED(", upstream;dur="), NUMBER(2), FIXED("\r\n"), bytes[8], bytes[9],
    };
    Py_ssize_t size = 0;
    for (int i = 0; i < PIECES; i++) {
        size += pieces[i].size;
    }
    PyObject *head = PyBytes_FromStringAndSize(NULL, size);
    if (head == NULL) {
        return NULL;
    }
    char *p = PyBytes_AS_STRING(head);
    for (int i = 0; i < PIECES; i++) {
        memcpy(p, pieces[i].at, (size_t)pieces[i].size);
        p += pieces[i].size;
    }
    return head;
}
