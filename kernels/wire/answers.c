/* Chat and text completions: what is cut out of them, and what they say (cut_answer).
 *
 * Taken here: an object whose members of note are what OpenAI's API says, none twice. Numbers that
 * are looked at are short and whole. All else is the twin's.
 *
 * Functions that read return what is behind, or NULL: an exception if one is set, else not sure.
 */
#include "bodies.h"

enum { CUTS_MAX = 64, INDEX_END = 128, TEXT_MAX = 256, USAGE_DEPTH_MAX = 4 };

typedef struct {
    Bodies *self;
    const uint8_t *end;
    PyObject *texts, *finish, *usage, *token_ids, *model;
    unsigned flags;
    int cuts_count;
    Span cuts[CUTS_MAX]; /* in order */
} Answer;

/* The ranges to cut of one object's members, each with the comma it needs no more. */
typedef struct {
    const uint8_t *first_key, *last_end;
    int leads; /* members to cut before any other */
    bool leading;
} Cutter;

static bool add_cut(Answer *answer, const uint8_t *from, const uint8_t *upto)
{
    if (answer->cuts_count == CUTS_MAX) {
        return false;
    }
    answer->cuts[answer->cuts_count++] = (Span){from, upto - from};
    return true;
}

static bool cut_before(Answer *answer, Cutter *cutter, const uint8_t *key, bool cut)
{
    if (!cutter->leading) {
        return true;
    }
    if (cut) {
        if (cutter->leads++ == 0) {
            cutter->first_key = key;
        }
        return true;
    }
    cutter->leading = false;
    return cutter->leads == 0 || add_cut(answer, cutter->first_key, key);
}

static bool cut_after(Answer *answer, Cutter *cutter, const uint8_t *end, bool cut)
{
    const uint8_t *before = cutter->last_end;
    cutter->last_end = end;
    return !cut || cutter->leading || add_cut(answer, before, end);
}

static bool cut_close(Answer *answer, Cutter *cutter)
{
    return !cutter->leading || cutter->leads == 0 ||
           add_cut(answer, cutter->first_key, cutter->last_end);
}

/* A member's value, if it was a string. */
typedef struct {
    Span inner;
    unsigned flags;
} Text;

static const uint8_t *read_scalar(const uint8_t *p, const uint8_t *end, Text *text)
{
    const uint8_t *after = plain_scalar(p, end, &text->flags);
    if (after != NULL && *p == '"') {
        text->inner = (Span){p + 1, after - p - 2};
    }
    return after;
}

/* True if there is a text of at most `most` bytes or none. */
static bool bounded(const Text *text, Py_ssize_t most)
{
    return text->inner.at == NULL || text->inner.size <= most;
}

static const uint8_t *read_null(const uint8_t *p, const uint8_t *end)
{
    return end - p >= 4 && memcmp(p, "null", 4) == 0 ? p + 4 : NULL;
}

/* A list of 32-bit numbers. */
static const uint8_t *read_ids(const uint8_t *p, const uint8_t *end, PyObject **out)
{
    PyObject *list = PyList_New(0);
    if (list == NULL) {
        return NULL;
    }
    p = json_blank(p + 1, end);
    bool more = p < end && *p != ']';
    while (more) {
        const uint8_t *digits = p;
        while (p < end && (uint8_t)(*p - '0') < 10) {
            p++;
        }
        long long id = plain_number((Span){digits, p - digits});
        p = json_blank(p, end);
        if (id < 0 || id > UINT32_MAX || p == end || (*p != ',' && *p != ']')) {
            Py_DECREF(list);
            return NULL;
        }
        PyObject *number = PyLong_FromLongLong(id);
        if (number == NULL || PyList_Append(list, number) < 0) {
            Py_XDECREF(number);
            Py_DECREF(list);
            return NULL;
        }
        Py_DECREF(number);
        more = *p == ',';
        if (more) {
            p = json_blank(p + 1, end);
        }
    }
    if (p == end) {
        Py_DECREF(list);
        return NULL;
    }
    *out = list;
    return p + 1;
}

static int set_by_index(PyObject *dict, long long index, const Text *text)
{
    if (text->inner.at == NULL) {
        return 0;
    }
    PyObject *key = PyLong_FromLongLong(index), *value = json_str(text->inner, text->flags);
    int result = key == NULL || value == NULL ? -1 : PyDict_SetItem(dict, key, value);
    Py_XDECREF(key);
    Py_XDECREF(value);
    return result;
}

static const uint8_t *read_message(Answer *answer, const uint8_t *p, Text *content)
{
    Object object;
    int more = object_open(&object, p, answer->end) ? 1 : -1;
    while (more > 0 && (more = object_next(&object, &answer->flags)) > 0) {
        Span name = object_name(&object);
        if (table_find(&answer->self->names, name.at, name.size, false) == CONTENT) {
            object.p = read_scalar(object.p, answer->end, content);
        } else {
            object.p = json_value(object.p, answer->end, &answer->flags);
        }
        if (object.p == NULL) {
            return NULL;
        }
    }
    return more < 0 ? NULL : object.p;
}

typedef struct {
    Text content, text, finish;
    bool has_message;
    long long index;
    PyObject *ids;
} Choice;

static const uint8_t *read_choice_member(Answer *answer, Choice *choice, int name, const uint8_t *p)
{
    const uint8_t *end = answer->end, *after;
    Text ignored = {{NULL, 0}, 0};
    switch (name) {
    case MESSAGE:
        choice->has_message = p < end && *p == '{';
        return choice->has_message ? read_message(answer, p, &choice->content) : read_null(p, end);
    case TEXT:
        return read_scalar(p, end, &choice->text);
    case FINISH_REASON:
        after = read_scalar(p, end, &choice->finish);
        return bounded(&choice->finish, TEXT_MAX) ? after : NULL;
    case INDEX:
        after = plain_scalar(p, end, &answer->flags);
        choice->index = after == NULL ? -1 : plain_number((Span){p, after - p});
        return choice->index < 0 ? NULL : after;
    case TOKEN_IDS:
        if (p < end && *p == '[') {
            return read_ids(p, end, &choice->ids);
        }
        return read_scalar(p, end, &ignored);
    default:
        return json_value(p, end, &answer->flags);
    }
}

static const uint8_t *read_choice(Answer *answer, const uint8_t *p)
{
    Object object;
    Choice choice = {.index = 0};
    Cutter cutter = {NULL, NULL, 0, true};
    int more = object_open(&object, p, answer->end) ? 1 : -1;
    while (more > 0 && (more = object_next(&object, &answer->flags)) > 0) {
        Span name = object_name(&object);
        int known = table_find(&answer->self->names, name.at, name.size, false);
        bool cut = known == TOKEN_IDS || known == PROMPT_TOKEN_IDS;
        if (!cut_before(answer, &cutter, name.at - 1, cut) ||
            (object.p = read_choice_member(answer, &choice, known, object.p)) == NULL ||
            !cut_after(answer, &cutter, object.p, cut)) {
            more = -1;
        }
    }
    if (more == 0 && !cut_close(answer, &cutter)) {
        more = -1;
    }
    if (more == 0 && choice.index < INDEX_END) {
        const Text *text = choice.has_message ? &choice.content : &choice.text;
        if (set_by_index(answer->texts, choice.index, text) < 0 ||
            set_by_index(answer->finish, choice.index, &choice.finish) < 0) {
            more = -1;
        } else if (choice.index == 0 && choice.ids != NULL) {
            Py_XSETREF(answer->token_ids, choice.ids);
            choice.ids = NULL;
        }
    }
    Py_XDECREF(choice.ids);
    return more < 0 ? NULL : object.p;
}

static const uint8_t *read_choices(Answer *answer, const uint8_t *p)
{
    const uint8_t *end = answer->end;
    if (p == end || *p != '[') {
        return read_null(p, end);
    }
    p = json_blank(p + 1, end);
    if (p < end && *p == ']') {
        return p + 1;
    }
    for (;;) {
        if ((p = read_choice(answer, p)) == NULL) {
            return NULL;
        }
        p = json_blank(p, end);
        if (p == end || (*p != ',' && *p != ']')) {
            return NULL;
        }
        if (*p == ']') {
            return p + 1;
        }
        p = json_blank(p + 1, end);
    }
}

static const uint8_t *read_counts(Answer *answer, const uint8_t *p, int depth, PyObject **out);

/* One value of `usage`: a scalar, or an object of such. */
static const uint8_t *read_count(Answer *answer, const uint8_t *p, int depth, PyObject **out)
{
    if (p < answer->end && *p == '{') {
        return read_counts(answer, p, depth + 1, out);
    }
    Text text = {{NULL, 0}, 0};
    const uint8_t *after = read_scalar(p, answer->end, &text);
    if (after == NULL) {
        return NULL;
    }
    if (text.inner.at != NULL) {
        *out = json_str(text.inner, text.flags);
    } else if (*p == 't' || *p == 'f') {
        *out = PyBool_FromLong(*p == 't');
    } else if (*p == 'n') {
        *out = Py_NewRef(Py_None);
    } else {
        *out = PyLong_FromLongLong(plain_number((Span){p, after - p}));
    }
    return *out == NULL ? NULL : after;
}

static const uint8_t *read_counts(Answer *answer, const uint8_t *p, int depth, PyObject **out)
{
    Object object;
    if (depth > USAGE_DEPTH_MAX || !object_open(&object, p, answer->end)) {
        return NULL;
    }
    PyObject *dict = PyDict_New();
    if (dict == NULL) {
        return NULL;
    }
    int more;
    while ((more = object_next(&object, &answer->flags)) > 0) {
        PyObject *value = NULL;
        Span name = object_name(&object);
        object.p = read_count(answer, object.p, depth, &value);
        PyObject *key = value == NULL ? NULL : name_of(answer->self, name);
        if (key == NULL || PyDict_SetItem(dict, key, value) < 0) {
            more = -1;
        }
        Py_XDECREF(key);
        Py_XDECREF(value);
        if (more < 0) {
            break;
        }
    }
    if (more < 0) {
        Py_DECREF(dict);
        return NULL;
    }
    *out = dict;
    return object.p;
}

static const uint8_t *read_top_member(Answer *answer, int name, const uint8_t *p)
{
    Text text = {{NULL, 0}, 0};
    const uint8_t *end = answer->end, *after;
    switch (name) {
    case CHOICES:
        return read_choices(answer, p);
    case USAGE:
        if (p < end && *p == '{') {
            return read_counts(answer, p, 0, &answer->usage);
        }
        return read_scalar(p, end, &text);
    case MODEL:
        after = read_scalar(p, end, &text);
        if (after == NULL || text.inner.at == NULL) {
            return after;
        }
        if (!bounded(&text, TEXT_MAX)) {
            return NULL;
        }
        answer->model = json_str(text.inner, text.flags);
        return answer->model == NULL ? NULL : after;
    default:
        return json_value(p, end, &answer->flags);
    }
}

/* True when the whole body is taken. */
static bool read_top(Answer *answer, const uint8_t *p)
{
    Object object;
    Cutter cutter = {NULL, NULL, 0, true};
    if (!object_open(&object, json_blank(p, answer->end), answer->end)) {
        return false;
    }
    int more;
    while ((more = object_next(&object, &answer->flags)) > 0) {
        Span name = object_name(&object);
        int known = table_find(&answer->self->names, name.at, name.size, false);
        bool cut = known == TOKEN_IDS || known == PROMPT_TOKEN_IDS;
        if (!cut_before(answer, &cutter, name.at - 1, cut) ||
            (object.p = read_top_member(answer, known, object.p)) == NULL ||
            !cut_after(answer, &cutter, object.p, cut)) {
            return false;
        }
    }
    /* The twin's decoder refuses an unpaired surrogate wherever it is. */
    return more == 0 && cut_close(answer, &cutter) && !(answer->flags & JSON_UNPAIRED) &&
           json_blank(object.p, answer->end) == answer->end;
}

static PyObject *without_cuts(const Answer *answer, const uint8_t *data, Py_ssize_t size)
{
    Py_ssize_t left = size;
    for (int i = 0; i < answer->cuts_count; i++) {
        left -= answer->cuts[i].size;
    }
    PyObject *kept = PyBytes_FromStringAndSize(NULL, left);
    if (kept == NULL) {
        return NULL;
    }
    char *to = PyBytes_AS_STRING(kept);
    const uint8_t *from = data;
    for (int i = 0; i < answer->cuts_count; i++) {
        const Span *cut = &answer->cuts[i];
        memcpy(to, from, (size_t)(cut->at - from));
        to += cut->at - from;
        from = cut->at + cut->size;
    }
    memcpy(to, from, (size_t)(data + size - from));
    return kept;
}

PyObject *read_answer(Bodies *self, PyObject *body, bool cut)
{
    const uint8_t *data = (const uint8_t *)PyBytes_AS_STRING(body);
    Py_ssize_t size = PyBytes_GET_SIZE(body);
    Answer answer;
    memset(&answer, 0, offsetof(Answer, cuts));
    answer.self = self;
    answer.end = data + size;
    answer.texts = PyDict_New();
    answer.finish = PyDict_New();
    if (answer.texts == NULL || answer.finish == NULL || !read_top(&answer, data)) {
        Py_XDECREF(answer.texts);
        Py_XDECREF(answer.finish);
        Py_XDECREF(answer.usage);
        Py_XDECREF(answer.token_ids);
        Py_XDECREF(answer.model);
        return NULL;
    }
    PyObject *values[] = {
        answer.texts,
        answer.finish,
        answer.usage == NULL ? Py_NewRef(Py_None) : answer.usage,
        answer.token_ids == NULL ? Py_NewRef(Py_None) : answer.token_ids,
        answer.model == NULL ? Py_NewRef(self->nothing) : answer.model,
    };
    PyObject *facts = record_make(&self->facts, values);
    if (facts == NULL) {
        return NULL;
    }
    cut = cut && answer.cuts_count > 0;
    PyObject *kept = cut ? without_cuts(&answer, data, size) : Py_NewRef(body);
    PyObject *both = kept == NULL ? NULL : PyTuple_Pack(2, kept, facts);
    Py_XDECREF(kept);
    Py_DECREF(facts);
    return both;
}
