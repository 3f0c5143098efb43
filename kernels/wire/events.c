/* The plain events of a completion's stream, many in one go: one choice, number 0, that says a
 * piece of text and nothing else of note (proxy/http/sse.py has the reader of all the rest).
 *
 * Taken here: `data: `, one JSON object on one line, a blank line, all line ends LF. A finish
 * reason, token ids, usage, several choices, an unpaired surrogate or anything doubtful ends it.
 */
#include "json.h"

typedef struct {
    const uint8_t *end;
    unsigned flags; /* of strings that nobody keeps */
    Span text, model;
    unsigned text_flags, model_flags;
    int choices;
} Event;

static bool is(Span name, const char *what)
{
    size_t size = strlen(what);
    return (size_t)name.size == size && memcmp(name.at, what, size) == 0;
}

static const uint8_t *null_at(const uint8_t *p, const uint8_t *end)
{
    return end - p >= 4 && memcmp(p, "null", 4) == 0 ? p + 4 : NULL;
}

/* A string, whose inside it returns too, or null. */
static const uint8_t *string_or_null(const uint8_t *p, const uint8_t *end, Span *inner,
                                     unsigned *flags)
{
    if (p == end || *p != '"') {
        return null_at(p, end);
    }
    const uint8_t *close = json_string(p + 1, end, flags);
    if (close == NULL || (*flags & JSON_UNPAIRED)) {
        return NULL;
    }
    *inner = (Span){p + 1, close - p - 1};
    return close + 1;
}

static const uint8_t *read_delta(Event *event, const uint8_t *p)
{
    Object object;
    if (!object_open(&object, p, event->end)) {
        return NULL;
    }
    int more;
    while ((more = object_next(&object, &event->flags)) > 0) {
        object.p = is(object_name(&object), "content")
                       ? string_or_null(object.p, event->end, &event->text, &event->text_flags)
                       : json_value(object.p, event->end, &event->flags);
        if (object.p == NULL) {
            return NULL;
        }
    }
    return more < 0 ? NULL : object.p;
}

static const uint8_t *read_choice(Event *event, const uint8_t *p)
{
    Object object;
    if (!object_open(&object, p, event->end)) {
        return NULL;
    }
    Span text = {NULL, 0};
    unsigned text_flags = 0;
    bool delta = false;
    int more;
    while ((more = object_next(&object, &event->flags)) > 0) {
        Span name = object_name(&object);
        const uint8_t *at = object.p;
        if (is(name, "delta")) {
            delta = at < event->end && *at == '{';
            object.p = delta ? read_delta(event, at) : null_at(at, event->end);
        } else if (is(name, "text")) {
            object.p = string_or_null(at, event->end, &text, &text_flags);
        } else if (is(name, "index")) {
            object.p = event->end - at >= 2 && at[0] == '0' && (at[1] == ',' || at[1] == '}')
                           ? at + 1
                           : NULL;
        } else if (is(name, "finish_reason") || is(name, "token_ids") ||
                   is(name, "prompt_token_ids")) {
            object.p = null_at(at, event->end);
        } else {
            object.p = json_value(at, event->end, &event->flags);
        }
        if (object.p == NULL) {
            return NULL;
        }
    }
    if (!delta) { /* as a text completion says it */
        event->text = text;
        event->text_flags = text_flags;
    }
    return more < 0 ? NULL : object.p;
}

/* A list of one choice. */
static const uint8_t *read_choices(Event *event, const uint8_t *p)
{
    if (p == event->end || *p != '[') {
        return NULL;
    }
    p = read_choice(event, json_blank(p + 1, event->end));
    if (p == NULL) {
        return NULL;
    }
    p = json_blank(p, event->end);
    event->choices++;
    return p < event->end && *p == ']' ? p + 1 : NULL;
}

static bool read_event(Event *event, const uint8_t *p)
{
    Object object;
    if (!object_open(&object, p, event->end)) {
        return false;
    }
    int more;
    while ((more = object_next(&object, &event->flags)) > 0) {
        Span name = object_name(&object);
        if (is(name, "choices")) {
            object.p = read_choices(event, object.p);
        } else if (is(name, "model")) {
            object.p = string_or_null(object.p, event->end, &event->model, &event->model_flags);
        } else if (is(name, "usage") || is(name, "token_ids") || is(name, "prompt_token_ids")) {
            object.p = null_at(object.p, event->end);
        } else {
            object.p = json_value(object.p, event->end, &event->flags);
        }
        if (object.p == NULL) {
            return false;
        }
    }
    /* The twin's decoder refuses an unpaired surrogate wherever it is. */
    return more == 0 && event->choices == 1 && !(event->flags & JSON_UNPAIRED) &&
           json_blank(object.p, event->end) == event->end;
}

/* What is behind the event at `p`; NULL when it is not a plain one. */
static const uint8_t *take(const uint8_t *p, const uint8_t *end, Py_ssize_t event_bytes,
                           Event *event)
{
    static const char field[] = "data: ";
    const Py_ssize_t begins = sizeof field - 1;
    if (end - p < begins || memcmp(p, field, (size_t)begins) != 0) {
        return NULL;
    }
    const uint8_t *payload = p + begins;
    const uint8_t *line = memchr(payload, '\n', (size_t)(end - payload));
    if (line == NULL || line + 1 == end || line[1] != '\n' || line + 2 - p > event_bytes ||
        memchr(payload, '\r', (size_t)(line - payload)) != NULL) {
        return NULL;
    }
    memset(event, 0, sizeof *event);
    event->end = line;
    return read_event(event, payload) ? line + 2 : NULL;
}

/* Writes what a string says, in UTF-8; what is behind it, NULL with an exception. */
static uint8_t *write_text(const Event *event, uint8_t *to)
{
    if (!(event->text_flags & JSON_ESCAPE)) {
        memcpy(to, event->text.at, (size_t)event->text.size);
        return to + event->text.size;
    }
    PyObject *text = json_str(event->text, event->text_flags);
    Py_ssize_t size;
    const char *bytes = text == NULL ? NULL : PyUnicode_AsUTF8AndSize(text, &size);
    if (bytes != NULL) { /* never longer than with its escapes */
        memcpy(to, bytes, (size_t)size);
        to += size;
    }
    Py_XDECREF(text);
    return bytes == NULL ? NULL : to;
}

/* plain_events(data, event_bytes): (where the first other event begins, the texts joined in UTF-8,
 * the first model named or None). */
PyObject *wire_plain_events(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 2 || !PyBytes_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "plain_events takes bytes and a number");
        return NULL;
    }
    Py_ssize_t event_bytes = PyLong_AsSsize_t(args[1]);
    if (event_bytes == -1 && PyErr_Occurred()) {
        return NULL;
    }
    const uint8_t *begin = (const uint8_t *)PyBytes_AS_STRING(args[0]), *p = begin, *after;
    const uint8_t *end = begin + PyBytes_GET_SIZE(args[0]);
    PyObject *texts = PyBytes_FromStringAndSize(NULL, end - begin), *model = NULL;
    if (texts == NULL) {
        return NULL;
    }
    uint8_t *to = (uint8_t *)PyBytes_AS_STRING(texts);
    for (Event event; (after = take(p, end, event_bytes, &event)) != NULL; p = after) {
        if (event.text.size > 0 && (to = write_text(&event, to)) == NULL) {
            break;
        }
        if (model == NULL && event.model.size > 0 &&
            (model = json_str(event.model, event.model_flags)) == NULL) {
            to = NULL;
            break;
        }
    }
    if (to == NULL || _PyBytes_Resize(&texts, (char *)to - PyBytes_AS_STRING(texts)) < 0) {
        Py_XDECREF(texts);
        Py_XDECREF(model);
        return NULL;
    }
    return Py_BuildValue("nNN", (Py_ssize_t)(p - begin), texts,
                         model == NULL ? Py_NewRef(Py_None) : model);
}
