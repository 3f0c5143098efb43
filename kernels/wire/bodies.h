/* What the two files of `Bodies` share. */
#ifndef TONGGUAN_WIRE_BODIES_H
#define TONGGUAN_WIRE_BODIES_H

#include "json.h"

/* Member names that mean something here; those behind NAMED are common, and kept as one str. */
enum {
    MODEL, MESSAGES, PROMPT, TEMPERATURE, STREAM, MAX_TOKENS, MAX_COMPLETION_TOKENS,
    CHOICES, USAGE, TOKEN_IDS, PROMPT_TOKEN_IDS, INDEX, MESSAGE, TEXT, FINISH_REASON, CONTENT,
    NAMED
};

typedef struct {
    PyObject_HEAD
    Record view, facts;
    Table names;
    PyObject *strs[TABLE_NAMES_MAX]; /* by index in the table */
    PyObject *nothing, *ids;         /* "", the name of what is asked for on audit's behalf */
    PyObject *pure_members, *pure_view, *pure_cut;
} Bodies;

/* The str of a member's name, a new reference. */
PyObject *name_of(const Bodies *self, Span name);

/* Passes `null`, `true`, `false`, a string without an unpaired surrogate, or a number of at most 18
 * digits and nothing else; NULL for all else. */
const uint8_t *plain_scalar(const uint8_t *p, const uint8_t *end, unsigned *flags);

/* The value of 1 to 18 digits without a leading zero; -1 when `text` is something else. */
long long plain_number(Span text);

/* (answer less what was asked for, facts); NULL without an exception when not sure. */
PyObject *read_answer(Bodies *self, PyObject *body, bool cut);

#endif
