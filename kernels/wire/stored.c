/* Stored lines of an audit log (docs/audit.md): a verifier's plain case, many lines in one call.
 *
 * A line is taken only if it is a record of a request as the writer makes them, in canonical form,
 * that continues the line before it in every respect; its MAC is checked, its leaf hash given back.
 * The first line that is anything else ends the call, and the verifier in Python judges it: so no
 * finding is ever made here.
 */
#include "json.h"
#include "mac.h"

enum { LINE_BYTES = 64 << 10, DEPTH_MAX = 8, TEXT_BYTES = 256, DIGITS_MAX = 19, WORDS_MAX = 16 };
static const int64_t INT_LIMIT = INT64_C(1) << 53;

typedef enum { NONE, TEXT, INTEGER, OTHER } Kind;

typedef struct {
    Kind kind;
    Span text; /* TEXT: between the quotes */
    int64_t number;
    bool map;
} Value;

/* In the order of their bytes, which is that of the members. */
enum {
    IDS_AT, IDS_N, KEY_ID, KIND, MONO_NS, ORIGIN, OUTCOME, PHASE, PREV, QOS, SEQ, STATUS, TENANT,
    TIMES_US, TRACE_ID, VERSION, WALL_NS, MEMBERS
};
static const char *const NAMES[MEMBERS] = {
    "ids_at", "ids_n",  "key_id", "kind",   "mono_ns",  "origin",   "outcome", "phase",  "prev",
    "qos",    "seq",    "status", "tenant", "times_us", "trace_id", "v",       "wall_ns"};

typedef struct {
    Span words[WORDS_MAX];
    int count;
} Words;

typedef struct {
    Span origin, key_id;
    Words outcomes, phases;
    const MacObject *mac; /* NULL: not checked */
    uint8_t prev[HASH_BYTES];
    char prev_hex[MAC_HEX];
    uint64_t wall_ns, mono_ns, first_mono_ns, quiet_ns; /* quiet_ns 0: any silence is allowed */
    int64_t seq;
    int64_t ids_end, ids_seq; /* where entries of token ids end, and by whose word */
} Chain;

static bool same(Span a, Span b)
{
    return a.size == b.size && memcmp(a.at, b.at, (size_t)a.size) == 0;
}

static bool is_text(const Value *value)
{
    return value->kind == TEXT;
}

/* --- one value in canonical form ------------------------------------------------------------- */

/* `p` is at the opening quote. An escape may be canonical too, but is not ours to judge. */
static const uint8_t *text_end(const uint8_t *p, const uint8_t *end, Span *inner)
{
    unsigned flags = 0;
    if (p >= end || *p != '"') {
        return NULL;
    }
    inner->at = ++p;
    p = json_string(p, end, &flags);
    if (p == NULL || (flags & (JSON_ESCAPE | JSON_UNPAIRED))) {
        return NULL;
    }
    inner->size = p - inner->at;
    return p + 1;
}

static const uint8_t *integer_end(const uint8_t *p, const uint8_t *end, int64_t *number)
{
    bool negative = p < end && *p == '-';
    const uint8_t *first = p += negative;
    int64_t found = 0;
    while (p < end && (uint8_t)(*p - '0') < 10 && p - first < DIGITS_MAX - 1) {
        found = found * 10 + (*p++ - '0');
    }
    /* Canonical: no leading zero, no minus zero; what follows a digit too many is no separator. */
    if (p == first || (*first == '0' && (p - first > 1 || negative)) || found >= INT_LIMIT) {
        return NULL;
    }
    *number = negative ? -found : found;
    return p;
}

static bool before(Span a, Span b)
{
    Py_ssize_t size = a.size < b.size ? a.size : b.size;
    int order = memcmp(a.at, b.at, (size_t)size);
    return order < 0 || (order == 0 && a.size < b.size);
}

static bool ascii(Span text)
{
    uint8_t all = 0;
    for (Py_ssize_t i = 0; i < text.size; i++) {
        all |= text.at[i];
    }
    return all < 0x80;
}

/* `p` is at the name's quote; names rise strictly, so none comes twice. */
static const uint8_t *name_end(const uint8_t *p, const uint8_t *end, Span *name)
{
    Span last = *name;
    p = text_end(p, end, name);
    bool rises = p != NULL && (last.at == NULL || before(last, *name));
    return rises && ascii(*name) && p < end && *p == ':' ? p + 1 : NULL;
}

static const uint8_t *value_end(const uint8_t *p, const uint8_t *end, int depth, Value *value);

static const uint8_t *nested_end(const uint8_t *p, const uint8_t *end, int depth)
{
    bool map = *p++ == '{';
    uint8_t closing = map ? '}' : ']';
    Span name = {NULL, 0};
    Value item;
    if (p < end && *p == closing) {
        return p + 1;
    }
    while (p != NULL && p < end) {
        p = map ? name_end(p, end, &name) : p;
        p = p != NULL ? value_end(p, end, depth, &item) : NULL;
        if (p == NULL || p >= end || (*p != ',' && *p != closing)) {
            return NULL;
        }
        if (*p++ == closing) {
            return p;
        }
    }
    return NULL;
}

static const uint8_t *value_end(const uint8_t *p, const uint8_t *end, int depth, Value *value)
{
    value->kind = OTHER;
    value->map = false;
    if (p >= end) {
        return NULL;
    }
    switch (*p) {
    case '"':
        value->kind = TEXT;
        return text_end(p, end, &value->text);
    case '{':
    case '[':
        value->map = *p == '{';
        return depth < DEPTH_MAX ? nested_end(p, end, depth + 1) : NULL;
    case 't':
        return end - p > 4 && memcmp(p, "true", 4) == 0 ? p + 4 : NULL;
    case 'f':
        return end - p > 5 && memcmp(p, "false", 5) == 0 ? p + 5 : NULL;
    default:
        value->kind = INTEGER;
        return integer_end(p, end, &value->number);
    }
}

/* --- one record ------------------------------------------------------------------------------- */

/* Text everywhere but in `origin`, which is compared as a whole, has a bound. */
static bool short_text(const Value *value, bool origin)
{
    return value->kind != TEXT || origin || value->text.size <= TEXT_BYTES;
}

/* Reads the members we know; false when the record is not plainly canonical. */
static bool members_of(Span json, Value *members)
{
    const uint8_t *p = json.at, *end = p + json.size;
    Span name = {NULL, 0};
    int known = 0;
    if (json.size < 2 || *p++ != '{') {
        return false;
    }
    for (;;) {
        Value value;
        p = name_end(p, end, &name);
        p = p != NULL ? value_end(p, end, 1, &value) : NULL;
        if (p == NULL || p >= end) {
            return false;
        }
        bool ours = false;
        for (; known < MEMBERS; known++) {
            Span want = {(const uint8_t *)NAMES[known], (Py_ssize_t)strlen(NAMES[known])};
            if (!before(want, name)) {
                ours = same(want, name);
                break;
            }
        }
        if (!short_text(&value, ours && known == ORIGIN)) {
            return false;
        }
        if (ours) {
            members[known] = value;
        }
        if (*p == '}') {
            return p + 1 == end;
        }
        if (*p++ != ',') {
            return false;
        }
    }
}

static bool one_of(const Value *value, const Words *words)
{
    for (int i = 0; is_text(value) && i < words->count; i++) {
        if (same(value->text, words->words[i])) {
            return true;
        }
    }
    return false;
}

static bool decimal(const Value *value, uint64_t *number)
{
    Span text = value->text;
    *number = 0;
    if (!is_text(value) || text.size == 0 || text.size > DIGITS_MAX ||
        (text.at[0] == '0' && text.size > 1)) {
        return false;
    }
    for (Py_ssize_t i = 0; i < text.size; i++) {
        unsigned digit = (unsigned)text.at[i] - '0';
        if (digit > 9) {
            return false;
        }
        *number = *number * 10 + digit;
    }
    return *number <= INT64_MAX;
}

static bool integer(const Value *value, int64_t wanted)
{
    return value->kind == INTEGER && value->number == wanted;
}

static bool word(const Value *value, const char *wanted)
{
    Span want = {(const uint8_t *)wanted, (Py_ssize_t)strlen(wanted)};
    return is_text(value) && same(value->text, want);
}

/* Whether the members are those of the request that comes next, and its times. */
static bool continues(const Chain *chain, const Value *m, uint64_t *wall_ns, uint64_t *mono_ns)
{
    Span prev = {(const uint8_t *)chain->prev_hex, MAC_HEX};
    bool form = integer(&m[VERSION], 1) && word(&m[KIND], "request") && is_text(&m[TRACE_ID]) &&
                is_text(&m[TENANT]) && is_text(&m[QOS]) && m[STATUS].kind == INTEGER &&
                one_of(&m[OUTCOME], &chain->outcomes) && one_of(&m[PHASE], &chain->phases) &&
                m[TIMES_US].map && decimal(&m[WALL_NS], wall_ns) && decimal(&m[MONO_NS], mono_ns);
    bool next = form && integer(&m[SEQ], chain->seq) && is_text(&m[PREV]) &&
                same(m[PREV].text, prev) && is_text(&m[ORIGIN]) &&
                same(m[ORIGIN].text, chain->origin) && is_text(&m[KEY_ID]) &&
                same(m[KEY_ID].text, chain->key_id);
    return next && *wall_ns >= chain->wall_ns && *mono_ns >= chain->mono_ns &&
           (chain->quiet_ns == 0 || *mono_ns - chain->mono_ns <= chain->quiet_ns);
}

/* What a record says of the side file: an entry is 20 bytes and 4 for each id (proxy/audit/ids). */
static void take_ids(Chain *chain, const Value *m)
{
    if (m[IDS_AT].kind != INTEGER || m[IDS_N].kind != INTEGER) {
        return;
    }
    int64_t count = m[IDS_N].number < 0 ? 0 : m[IDS_N].number;
    count = count > (1 << 20) ? 1 << 20 : count;
    int64_t end = m[IDS_AT].number + 20 + 4 * count;
    if (end > chain->ids_end) {
        chain->ids_end = end;
        chain->ids_seq = chain->seq;
    }
}

/* Takes a line without its newline; false: not ours to judge, and nothing has changed. */
static bool take_line(Chain *chain, Span line, uint8_t leaf[HASH_BYTES])
{
    Span json = {line.at, line.size - MAC_HEX - 1};
    uint8_t stated[HASH_BYTES], made[HASH_BYTES];
    Value members[MEMBERS];
    uint64_t wall_ns, mono_ns;
    memset(members, 0, sizeof members);
    if (json.size < 2 || line.size >= LINE_BYTES || json.at[json.size] != '\t' ||
        !hex_read(json.at + json.size + 1, stated) || !members_of(json, members) ||
        !continues(chain, members, &wall_ns, &mono_ns)) {
        return false;
    }
    if (chain->mac != NULL) {
        mac_compute(chain->mac, (Span){chain->prev, HASH_BYTES}, json, made);
        if (memcmp(made, stated, HASH_BYTES) != 0) {
            return false;
        }
    }
    chain->wall_ns = wall_ns;
    chain->mono_ns = mono_ns;
    take_ids(chain, members);
    hash_tagged(0, line, (Span){NULL, 0}, leaf);
    memcpy(chain->prev, stated, HASH_BYTES);
    memcpy(chain->prev_hex, json.at + json.size + 1, MAC_HEX);
    chain->seq++;
    return true;
}

/* --- the call --------------------------------------------------------------------------------- */

static bool span_of(PyObject *bytes, Span *span)
{
    if (!PyBytes_CheckExact(bytes)) {
        PyErr_SetString(PyExc_TypeError, "bytes are needed");
        return false;
    }
    *span = (Span){(const uint8_t *)PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes)};
    return true;
}

static bool words_of(PyObject *tuple, Words *words)
{
    if (!PyTuple_CheckExact(tuple) || PyTuple_GET_SIZE(tuple) > WORDS_MAX) {
        PyErr_SetString(PyExc_TypeError, "a tuple of at most 16 words is needed");
        return false;
    }
    words->count = (int)PyTuple_GET_SIZE(tuple);
    for (int i = 0; i < words->count; i++) {
        if (!span_of(PyTuple_GET_ITEM(tuple, i), &words->words[i])) {
            return false;
        }
    }
    return true;
}

static bool chain_of(PyObject *const *args, Chain *chain)
{
    memset(chain, 0, sizeof *chain);
    Span prev;
    if (args[3] != Py_None && !mac_check(args[3])) {
        PyErr_SetString(PyExc_TypeError, "a Mac, or None, is needed");
        return false;
    }
    if (!span_of(args[4], &chain->origin) || !span_of(args[5], &chain->key_id) ||
        !span_of(args[6], &prev) || !words_of(args[11], &chain->outcomes) ||
        !words_of(args[12], &chain->phases)) {
        return false;
    }
    if (prev.size != MAC_HEX || !hex_read(prev.at, chain->prev)) {
        PyErr_SetString(PyExc_ValueError, "prev is 64 hex characters");
        return false;
    }
    memcpy(chain->prev_hex, prev.at, MAC_HEX);
    chain->mac = args[3] == Py_None ? NULL : (const MacObject *)args[3];
    chain->seq = PyLong_AsLongLong(args[7]);
    chain->wall_ns = PyLong_AsUnsignedLongLong(args[8]);
    chain->mono_ns = PyLong_AsUnsignedLongLong(args[9]);
    chain->quiet_ns = PyLong_AsUnsignedLongLong(args[10]);
    return !PyErr_Occurred();
}

/* take_requests(data, start, stop, mac, origin, key_id, prev, seq, wall_ns, mono_ns, quiet_ns,
 * outcomes, phases) */
PyObject *wire_take_requests(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    Chain chain;
    Span data;
    if (count != 13 || !mac_available()) {
        PyErr_SetString(PyExc_TypeError, "take_requests takes 13 arguments, and a libcrypto");
        return NULL;
    }
    if (!span_of(args[0], &data) || !chain_of(args, &chain)) {
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), stop = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred() || start < 0 || stop > data.size || start > stop) {
        PyErr_Clear();
        PyErr_SetString(PyExc_ValueError, "start and stop lie outside of the data");
        return NULL;
    }
    /* No line that is taken is shorter than 128 bytes: its two MACs alone have as much. */
    size_t room = (size_t)(stop - start) / 128 + 1;
    uint8_t *leaves = PyMem_RawMalloc(room * HASH_BYTES);
    if (leaves == NULL) {
        return PyErr_NoMemory();
    }
    size_t taken = 0;
    const uint8_t *p = data.at + start, *end = data.at + stop;
    Py_BEGIN_ALLOW_THREADS
    while (p < end && taken < room) {
        const uint8_t *newline = memchr(p, '\n', (size_t)(end - p));
        if (newline == NULL ||
            !take_line(&chain, (Span){p, newline - p}, leaves + taken * HASH_BYTES)) {
            break;
        }
        chain.first_mono_ns = taken == 0 ? chain.mono_ns : chain.first_mono_ns;
        taken++;
        p = newline + 1;
    }
    Py_END_ALLOW_THREADS
    PyObject *made = Py_BuildValue(
        "nny#KKKLLy#", (Py_ssize_t)(p - data.at), (Py_ssize_t)taken, chain.prev_hex,
        (Py_ssize_t)MAC_HEX, (unsigned long long)chain.wall_ns, (unsigned long long)chain.mono_ns,
        (unsigned long long)chain.first_mono_ns, (long long)chain.ids_end,
        (long long)chain.ids_seq, (const char *)leaves, (Py_ssize_t)(taken * HASH_BYTES));
    PyMem_RawFree(leaves);
    return made;
}
