/* JSON bodies as byte ranges. `Bodies` has members, view and cut_answer; proxy/http/body.py says
 * what they return. Taken here: an object of at most 64 members, none twice, no name written with
 * an escape, nothing deeper than 64. The rest is the twin's.
 */
#include "bodies.h"

static const char *const NAMES[] = {
    "model", "messages", "prompt", "temperature", "stream", "max_tokens", "max_completion_tokens",
    "choices", "usage", "token_ids", "prompt_token_ids", "index", "message", "text",
    "finish_reason", "content",
    "completion_tokens", "completion_tokens_details", "frequency_penalty", "logprobs", "n",
    "presence_penalty", "prompt_tokens", "prompt_tokens_details", "response_format",
    "return_token_ids", "seed", "stop", "stream_options", "tool_choice", "tools", "top_p",
    "total_tokens", "user",
};
enum { NAMES_COUNT = sizeof NAMES / sizeof *NAMES };

static const char *const VIEW_FIELDS[] = {
    "model", "model_span", "prompt", "temperature", "stream", "max_tokens", "end", "rest",
    "members",
};
static const char *const FACTS_FIELDS[] = {"texts", "finish", "usage", "token_ids", "model"};

static const long long MAX_TOKENS_MAX = (1LL << 53) - 1;

/* The top object's members in order. */
typedef struct {
    Object object;
    const uint8_t *data;
    Py_ssize_t size, closing; /* the closing brace's offset */
    int known[JSON_MEMBERS_MAX];
    Span values[JSON_MEMBERS_MAX];
    unsigned flags[JSON_MEMBERS_MAX];
    int at[NAMED]; /* where a named member is, -1 if absent */
} Walk;

PyObject *name_of(const Bodies *self, Span name)
{
    int known = table_find(&self->names, name.at, name.size, false);
    return known < 0 ? json_str(name, JSON_WIDE) : Py_NewRef(self->strs[known]);
}

long long plain_number(Span text)
{
    if (text.size < 1 || text.size > 18 || (text.at[0] == '0' && text.size > 1)) {
        return -1;
    }
    long long value = 0;
    for (Py_ssize_t i = 0; i < text.size; i++) {
        unsigned unit = text.at[i] - (unsigned)'0';
        if (unit > 9) {
            return -1;
        }
        value = value * 10 + unit;
    }
    return value;
}

const uint8_t *plain_scalar(const uint8_t *p, const uint8_t *end, unsigned *flags)
{
    if (p == end || *p == '{' || *p == '[') {
        return NULL;
    }
    const uint8_t *after = json_value(p, end, flags);
    if (after == NULL || (*flags & JSON_UNPAIRED)) {
        return NULL;
    }
    bool number = *p == '-' || (uint8_t)(*p - '0') < 10;
    return number && plain_number((Span){p, after - p}) < 0 ? NULL : after;
}

static bool walk(const Bodies *self, PyObject *body, Walk *w)
{
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(body);
    const uint8_t *end = data + PyBytes_GET_SIZE(body);
    unsigned names = 0;
    w->data = data;
    w->size = PyBytes_GET_SIZE(body);
    memset(w->at, -1, sizeof w->at);
    if (!object_open(&w->object, json_blank(data, end), end)) {
        return false;
    }
    int more;
    while ((more = object_next(&w->object, &names)) > 0) {
        int i = w->object.count - 1;
        Span name = object_name(&w->object);
        const uint8_t *value = w->object.p;
        w->flags[i] = 0;
        w->object.p = json_value(value, end, &w->flags[i]);
        if (w->object.p == NULL) {
            return false;
        }
        w->values[i] = (Span){value, w->object.p - value};
        w->known[i] = table_find(&self->names, name.at, name.size, false);
        if (w->known[i] >= 0 && w->known[i] < NAMED) {
            w->at[w->known[i]] = i;
        }
    }
    w->closing = w->object.p - data - 1;
    return more == 0 && json_blank(w->object.p, end) == end;
}

static PyObject *pair(Py_ssize_t start, Py_ssize_t end)
{
    PyObject *both = PyTuple_New(2), *first = PyLong_FromSsize_t(start),
             *second = PyLong_FromSsize_t(end);
    if (both == NULL || first == NULL || second == NULL) {
        Py_XDECREF(both);
        Py_XDECREF(first);
        Py_XDECREF(second);
        return NULL;
    }
    PyTuple_SET_ITEM(both, 0, first);
    PyTuple_SET_ITEM(both, 1, second);
    return both;
}

/* The members as a dict. `shared`, if given, gets borrowed ranges of the named ones. */
static PyObject *members_of(const Bodies *self, const Walk *w, PyObject **shared)
{
    PyObject *dict = PyDict_New();
    for (int i = 0; dict != NULL && i < w->object.count; i++) {
        Py_ssize_t start = w->values[i].at - w->data;
        PyObject *range = pair(start, start + w->values[i].size);
        int known = w->known[i];
        PyObject *name = known < 0 ? json_str(w->object.names[i], JSON_WIDE)
                                   : Py_NewRef(self->strs[known]);
        if (range == NULL || name == NULL || PyDict_SetItem(dict, name, range) < 0) {
            Py_CLEAR(dict);
        } else if (shared != NULL && known >= 0 && known < NAMED) {
            shared[known] = range; /* the dict keeps it alive */
        }
        Py_XDECREF(range);
        Py_XDECREF(name);
    }
    return dict;
}

/* All of the body but the values of these members, as ranges in order. */
static PyObject *rest_of(const Walk *w, const int *members, int count)
{
    int cut[3], cuts = 0;
    for (int i = 0; i < count; i++) {
        if (members[i] < 0) {
            continue;
        }
        int to = cuts++;
        for (; to > 0 && cut[to - 1] > members[i]; to--) {
            cut[to] = cut[to - 1];
        }
        cut[to] = members[i];
    }
    PyObject *rest = PyTuple_New(cuts + 1);
    Py_ssize_t from = 0;
    for (int i = 0; rest != NULL && i <= cuts; i++) {
        Py_ssize_t upto = i < cuts ? w->values[cut[i]].at - w->data : w->size;
        PyObject *range = pair(from, upto);
        if (range == NULL) {
            Py_CLEAR(rest);
        } else {
            PyTuple_SET_ITEM(rest, i, range);
            from = i < cuts ? upto + w->values[cut[i]].size : upto;
        }
    }
    return rest;
}

static PyObject *model_of(const Bodies *self, const Walk *w)
{
    int at = w->at[MODEL];
    if (at < 0 || w->values[at].at[0] != '"' || (w->flags[at] & JSON_UNPAIRED)) {
        return Py_NewRef(self->nothing);
    }
    return json_str((Span){w->values[at].at + 1, w->values[at].size - 2}, w->flags[at]);
}

static PyObject *limit_of(const Walk *w)
{
    int at = w->at[MAX_COMPLETION_TOKENS] >= 0 ? w->at[MAX_COMPLETION_TOKENS] : w->at[MAX_TOKENS];
    long long limit = at < 0 ? -1 : plain_number(w->values[at]);
    return limit < 0 || limit > MAX_TOKENS_MAX ? Py_NewRef(Py_None) : PyLong_FromLongLong(limit);
}

static PyObject *range_or_none(PyObject *range)
{
    return Py_NewRef(range == NULL ? Py_None : range);
}

static PyObject *view_of(const Bodies *self, const Walk *w)
{
    int prompt = w->at[MESSAGES] >= 0 ? MESSAGES : PROMPT, stream = w->at[STREAM];
    if (w->at[MODEL] < 0 && w->at[prompt] < 0) {
        Py_RETURN_NONE;
    }
    PyObject *shared[NAMED] = {NULL};
    PyObject *members = members_of(self, w, shared);
    if (members == NULL) {
        return NULL;
    }
    int cut[] = {w->at[MODEL], w->at[prompt], w->at[TEMPERATURE]};
    bool streams = stream >= 0 && w->values[stream].at[0] == 't';
    PyObject *values[] = {
        model_of(self, w),
        range_or_none(shared[MODEL]),
        range_or_none(shared[prompt]),
        range_or_none(shared[TEMPERATURE]),
        PyBool_FromLong(streams),
        limit_of(w),
        PyLong_FromSsize_t(w->closing),
        rest_of(w, cut, 3),
        members,
    };
    return record_make(&self->view, values);
}

/* --- calls ------------------------------------------------------------------------------------ */

static PyObject *bodies_members(PyObject *object, PyObject *body)
{
    Bodies *self = (Bodies *)object;
    Walk w;
    if (PyBytes_CheckExact(body) && walk(self, body, &w)) {
        return members_of(self, &w, NULL);
    }
    return PyObject_CallOneArg(self->pure_members, body);
}

/* True if the twin would look at max_tokens by means that C does not have: -0 is whole, and 0. */
static bool odd_limit(const Walk *w)
{
    int at = w->at[MAX_COMPLETION_TOKENS] >= 0 ? w->at[MAX_COMPLETION_TOKENS] : w->at[MAX_TOKENS];
    return at >= 0 && w->values[at].size == 2 && memcmp(w->values[at].at, "-0", 2) == 0;
}

static PyObject *bodies_view(PyObject *object, PyObject *body)
{
    Bodies *self = (Bodies *)object;
    Walk w;
    if (PyBytes_CheckExact(body) && walk(self, body, &w) && !odd_limit(&w)) {
        return view_of(self, &w);
    }
    return PyObject_CallOneArg(self->pure_view, body);
}

static PyObject *bodies_cut_answer(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                                   PyObject *kwnames)
{
    Bodies *self = (Bodies *)object;
    if (kwnames == NULL && nargs == 2 && PyBytes_CheckExact(args[0]) &&
        PyFrozenSet_CheckExact(args[1])) {
        int cut = PySet_Contains(args[1], self->ids);
        PyObject *both = cut < 0 ? NULL : read_answer(self, args[0], cut == 1);
        if (both != NULL || PyErr_Occurred()) {
            return both;
        }
    }
    return PyObject_Vectorcall(self->pure_cut, args, (size_t)nargs, kwnames);
}

/* --- set-up ----------------------------------------------------------------------------------- */

static PyObject *bodies_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *view, *facts, *ids, *members, *pure_view, *cut;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "Bodies takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "(OO)U(OOO):Bodies", &view, &facts, &ids, &members, &pure_view,
                          &cut)) {
        return NULL;
    }
    Bodies *self = (Bodies *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->ids = Py_NewRef(ids);
    self->pure_members = Py_NewRef(members);
    self->pure_view = Py_NewRef(pure_view);
    self->pure_cut = Py_NewRef(cut);
    self->nothing = PyUnicode_FromString("");
    bool done = self->nothing != NULL && record_bind(&self->view, view, VIEW_FIELDS, 9) == 0 &&
                record_bind(&self->facts, facts, FACTS_FIELDS, 5) == 0;
    for (int i = 0; done && i < NAMES_COUNT; i++) {
        PyObject *bytes = PyBytes_FromString(NAMES[i]);
        done = bytes != NULL && table_add(&self->names, bytes) == i;
        Py_XDECREF(bytes);
        if (done) {
            self->strs[i] = PyUnicode_InternFromString(NAMES[i]);
            done = self->strs[i] != NULL;
        }
    }
    if (!done) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int bodies_traverse(PyObject *object, visitproc visit, void *arg)
{
    Bodies *self = (Bodies *)object;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->view.type);
    Py_VISIT(self->facts.type);
    Py_VISIT(self->pure_members);
    Py_VISIT(self->pure_view);
    Py_VISIT(self->pure_cut);
    return 0;
}

/* Breaks cycles only where they can be: the rest stays whole for a call on its way. */
static int bodies_clear(PyObject *object)
{
    Bodies *self = (Bodies *)object;
    PyObject **pure[] = {&self->pure_members, &self->pure_view, &self->pure_cut};
    for (size_t i = 0; i < sizeof pure / sizeof *pure; i++) {
        PyObject *old = *pure[i];
        *pure[i] = Py_NewRef(Py_None);
        Py_XDECREF(old);
    }
    return 0;
}

static void bodies_dealloc(PyObject *object)
{
    Bodies *self = (Bodies *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->view.type);
    Py_XDECREF(self->facts.type);
    table_clear(&self->names);
    for (int i = 0; i < NAMES_COUNT; i++) {
        Py_XDECREF(self->strs[i]);
    }
    Py_XDECREF(self->nothing);
    Py_XDECREF(self->ids);
    Py_XDECREF(self->pure_members);
    Py_XDECREF(self->pure_view);
    Py_XDECREF(self->pure_cut);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef bodies_methods[] = {
    {"members", bodies_members, METH_O,
     "members(body, /)\n--\n\nReturn the ranges of the top object's values, or ask the twin."},
    {"view", bodies_view, METH_O,
     "view(body, /)\n--\n\nReturn what a request shows, or ask the twin."},
    {"cut_answer", (PyCFunction)(void (*)(void))bodies_cut_answer, METH_FASTCALL | METH_KEYWORDS,
     "cut_answer(body, added)\n--\n\nReturn an answer cut, and its facts, or ask the twin."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot bodies_slots[] = {
    {Py_tp_doc, "Reads JSON bodies into the records it is made with."},
    {Py_tp_new, bodies_new},
    {Py_tp_traverse, bodies_traverse},
    {Py_tp_clear, bodies_clear},
    {Py_tp_dealloc, bodies_dealloc},
    {Py_tp_methods, bodies_methods},
    {0, NULL},
};

PyType_Spec wire_bodies_spec = {
    .name = "kernels.wire._wire.Bodies",
    .basicsize = sizeof(Bodies),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = bodies_slots,
};
