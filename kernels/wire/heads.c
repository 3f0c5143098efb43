/* HTTP/1.1 heads; proxy/http/http1.py says what is returned. Taken here: a whole head with a known
 * method, a target in origin form, no watched name twice, and a Connection field in one of the
 * usual spellings. The rest is the twin's.
 */
#include "heads.h"

enum { WATCHED_MAX = 32, KEPT_MAX = 48 };

typedef struct {
    const uint8_t *after; /* behind the empty line */
    uint64_t seen[2];     /* by index in the table */
    int values_count, kept_count;
    int names[WATCHED_MAX];
    Span values[WATCHED_MAX];
    Span kept[KEPT_MAX];
    Span role[ROLES];
} Fields;

/* --- scanning --------------------------------------------------------------------------------- */

/* The first byte that is neither HTAB, SP, VCHAR nor obs-text (RFC 9110 section 5.5). */
static const uint8_t *text_end(const uint8_t *p, const uint8_t *end)
{
    while (end - p >= 8) {
        uint64_t word = load8(p);
        if (any_below(word, 0x20) | any_equal(word, 0x7f)) {
            break;
        }
        p += 8;
    }
    while (p < end && ((*p >= 0x20 && *p != 0x7f) || *p == '\t')) {
        p++;
    }
    return p;
}

static bool at_line_end(const uint8_t *p, const uint8_t *end)
{
    return end - p >= 2 && p[0] == '\r' && p[1] == '\n';
}

static bool blank(uint8_t c)
{
    return c == ' ' || c == '\t';
}

/* Reads field lines and the empty line behind them; false when not sure. */
static bool scan_fields(const Heads *self, const Names *names, const uint8_t *p, const uint8_t *end,
                        const Bounds *bounds, Fields *f)
{
    f->seen[0] = f->seen[1] = 0;
    f->values_count = f->kept_count = 0;
    memset(f->role, 0, sizeof f->role);
    for (Py_ssize_t count = 0; !at_line_end(p, end); count++) {
        const uint8_t *line = p;
        while (p < end && self->token[*p]) {
            p++;
        }
        Py_ssize_t size = p - line;
        if (size == 0 || p == end || *p != ':' || count == bounds->fields) {
            return false;
        }
        const uint8_t *value = ++p, *last = p = text_end(p, end);
        if (!at_line_end(p, end) || p - line > bounds->field) {
            return false;
        }
        p += 2;
        int index = table_find(&names->table, line, size, true);
        Rule rule = index < 0 ? (Rule){false, true, false, NO_ROLE} : names->rules[index];
        if (rule.kept) {
            if (f->kept_count > 0 &&
                f->kept[f->kept_count - 1].at + f->kept[f->kept_count - 1].size == line) {
                f->kept[f->kept_count - 1].size += p - line;
            } else if (f->kept_count == KEPT_MAX) {
                return false;
            } else {
                f->kept[f->kept_count++] = (Span){line, p - line};
            }
        }
        if (!rule.watched) {
            continue;
        }
        uint64_t bit = UINT64_C(1) << (index % 64);
        if (rule.doubtful || (f->seen[index / 64] & bit) || f->values_count == WATCHED_MAX) {
            return false;
        }
        f->seen[index / 64] |= bit;
        while (value < last && blank(*value)) {
            value++;
        }
        while (value < last && blank(last[-1])) {
            last--;
        }
        Span found = {value, last - value};
        f->names[f->values_count] = index;
        f->values[f->values_count++] = found;
        if (rule.role != NO_ROLE) {
            f->role[rule.role] = found;
        }
    }
    f->after = p + 2;
    return true;
}

static bool equal_folded(Span text, const char *want, Py_ssize_t size)
{
    if (text.at == NULL || text.size != size) {
        return false;
    }
    for (Py_ssize_t i = 0; i < size; i++) {
        if (ascii_lower(text.at[i]) != (uint8_t)want[i]) {
            return false;
        }
    }
    return true;
}

typedef struct {
    long long length; /* -1: none */
    bool chunked, keep_alive;
} Framing;

/* RFC 9112 section 6.3; false on any doubt. */
static bool framing(const Heads *self, const Fields *f, int minor, Framing *out)
{
    Span length = f->role[LENGTH], coding = f->role[CODING], connection = f->role[CONNECTION];
    *out = (Framing){-1, false, minor == 1};
    if (coding.at != NULL) {
        if (length.at != NULL || minor == 0 || !equal_folded(coding, "chunked", 7)) {
            return false;
        }
        out->chunked = true;
    }
    if (length.at != NULL) {
        if (length.size < 1 || length.size > 18) {
            return false;
        }
        out->length = 0;
        for (Py_ssize_t i = 0; i < length.size; i++) {
            unsigned value = length.at[i] - (unsigned)'0';
            if (value > 9) {
                return false;
            }
            out->length = out->length * 10 + value;
        }
    }
    if (connection.at == NULL) {
        return true;
    }
    for (int i = 0; i < self->connections_count; i++) {
        PyObject *plain = self->connections[i];
        if (PyBytes_GET_SIZE(plain) == connection.size &&
            memcmp(PyBytes_AS_STRING(plain), connection.at, (size_t)connection.size) == 0) {
            out->keep_alive = self->keeps[i];
            return true;
        }
    }
    return false;
}

/* --- results ---------------------------------------------------------------------------------- */

static PyObject *bytes_of(Span text)
{
    return PyBytes_FromStringAndSize((const char *)text.at, text.size);
}

static PyObject *fields_of(const Names *names, const Fields *f)
{
    PyObject *dict = PyDict_New();
    for (int i = 0; dict != NULL && i < f->values_count; i++) {
        PyObject *value = bytes_of(f->values[i]);
        if (value == NULL || PyDict_SetItem(dict, names->table.names[f->names[i]], value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *lines_of(const Fields *f)
{
    Py_ssize_t size = 0;
    for (int i = 0; i < f->kept_count; i++) {
        size += f->kept[i].size;
    }
    PyObject *lines = PyBytes_FromStringAndSize(NULL, size);
    if (lines == NULL) {
        return NULL;
    }
    char *to = PyBytes_AS_STRING(lines);
    for (int i = 0; i < f->kept_count; i++) {
        memcpy(to, f->kept[i].at, (size_t)f->kept[i].size);
        to += f->kept[i].size;
    }
    return lines;
}

static PyObject *length_of(const Framing *framed)
{
    return framed->length < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(framed->length);
}

PyObject *read_request(Heads *self, const uint8_t *p, const uint8_t *end, const Bounds *bounds)
{
    const uint8_t *start = p;
    if (at_line_end(p, end)) {
        p += 2;
    }
    const uint8_t *line = p;
    PyObject *method = NULL;
    for (int i = 0; i < self->methods_count && method == NULL; i++) {
        Py_ssize_t size = PyBytes_GET_SIZE(self->methods[i]);
        if (end - p > size && p[size] == ' ' &&
            memcmp(p, PyBytes_AS_STRING(self->methods[i]), (size_t)size) == 0) {
            method = self->methods[i];
            p += size + 1;
        }
    }
    Span target = {p, 0};
    if (method == NULL || p == end || *p != '/') {
        Py_RETURN_NONE;
    }
    while (p < end && *p > 0x20 && *p < 0x7f) {
        p++;
    }
    target.size = p - target.at;
    if (end - p < 11 || memcmp(p, " HTTP/1.", 8) != 0 || (p[8] != '0' && p[8] != '1') ||
        !at_line_end(p + 9, end) || p + 9 - line > bounds->field) {
        Py_RETURN_NONE;
    }
    int minor = p[8] - '0';
    Fields f;
    Framing framed;
    if (!scan_fields(self, &self->names[0], p + 11, end, bounds, &f) ||
        !framing(self, &f, minor, &framed)) {
        Py_RETURN_NONE;
    }
    Span host = f.role[HOST];
    if (host.at == NULL && minor == 1) {
        Py_RETURN_NONE;
    }
    for (Py_ssize_t i = 0; i < host.size; i++) {
        if (!self->host[host.at[i]]) {
            Py_RETURN_NONE;
        }
    }
    bool expect = f.role[EXPECT].at != NULL;
    if (expect && !equal_folded(f.role[EXPECT], "100-continue", 12)) {
        Py_RETURN_NONE; /* a list, or another one */
    }
    expect = expect && minor == 1 && (framed.length > 0 || framed.chunked);
    PyObject *values[] = {
        Py_NewRef(method),
        bytes_of(target),
        PyLong_FromLong(minor),
        length_of(&framed),
        PyBool_FromLong(framed.chunked),
        PyBool_FromLong(framed.keep_alive),
        PyBool_FromLong(expect),
        Py_NewRef(Py_None),
        fields_of(&self->names[0], &f),
        Py_NewRef(self->nothing),
        lines_of(&f),
        PyLong_FromSsize_t(f.after - start),
    };
    return record_make(&self->request, values);
}

PyObject *read_response(Heads *self, const uint8_t *p, const uint8_t *end, const Bounds *bounds,
                        bool head_only)
{
    const uint8_t *start = p;
    if (end - p < 14 || memcmp(p, "HTTP/1.", 7) != 0 || (p[7] != '0' && p[7] != '1') ||
        p[8] != ' ') {
        Py_RETURN_NONE;
    }
    int minor = p[7] - '0';
    unsigned hundreds = p[9] - (unsigned)'0', tens = p[10] - (unsigned)'0',
             ones = p[11] - (unsigned)'0';
    if (hundreds < 1 || hundreds > 9 || tens > 9 || ones > 9) {
        Py_RETURN_NONE;
    }
    long status = (long)(hundreds * 100 + tens * 10 + ones);
    p += 12;
    Span reason = {p, 0};
    if (*p == ' ') {
        reason.at = ++p;
        p = text_end(p, end);
        reason.size = p - reason.at;
    }
    Fields f;
    Framing framed;
    if (!at_line_end(p, end) || p - start > bounds->field ||
        !scan_fields(self, &self->names[1], p + 2, end, bounds, &f) ||
        !framing(self, &f, minor, &framed)) {
        Py_RETURN_NONE;
    }
    bool bodiless = status < 200 || status == 204 || status == 304 || head_only;
    bool framed_here = framed.length >= 0 || framed.chunked || bodiless;
    bool ok = reason.size == 2 && memcmp(reason.at, "OK", 2) == 0;
    PyObject *values[] = {
        PyLong_FromLong(status),
        ok ? Py_NewRef(self->ok) : reason.size == 0 ? Py_NewRef(self->empty) : bytes_of(reason),
        PyLong_FromLong(minor),
        length_of(&framed),
        PyBool_FromLong(framed.chunked),
        PyBool_FromLong(framed.keep_alive && framed_here),
        PyBool_FromLong(bodiless),
        Py_NewRef(Py_None),
        fields_of(&self->names[1], &f),
        Py_NewRef(self->nothing),
        lines_of(&f),
        PyLong_FromSsize_t(f.after - start),
    };
    return record_make(&self->response, values);
}
