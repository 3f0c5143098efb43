/* RFC 8259 in one pass over bytes, UTF-8 checked on the way: strict, or "not sure". */
#ifndef TONGGUAN_WIRE_JSON_H
#define TONGGUAN_WIRE_JSON_H

#include "wire.h"

enum {
    JSON_DEPTH_MAX = 64,  /* of one value; deeper is the twin's */
    JSON_MEMBERS_MAX = 64 /* of an object that is walked */
};

/* What a string, or any string in a value, holds. */
enum { JSON_ESCAPE = 1, JSON_WIDE = 2, JSON_UNPAIRED = 4 };

/* `p` is behind the opening quote; returns the closing quote's place, NULL when not sure. */
const uint8_t *json_string(const uint8_t *p, const uint8_t *end, unsigned *flags);

/* `p` is at the value; returns what is behind it, NULL when not sure. Adds to `flags`. */
const uint8_t *json_value(const uint8_t *p, const uint8_t *end, unsigned *flags);

/* Returns the str of a string that json_string has passed with these flags, none JSON_UNPAIRED. */
PyObject *json_str(Span inner, unsigned flags);

static inline const uint8_t *json_blank(const uint8_t *p, const uint8_t *end)
{
    while (p < end && *p <= ' ' && (*p == ' ' || *p == '\n' || *p == '\r' || *p == '\t')) {
        p++;
    }
    return p;
}

/* One object, member by member. */
typedef struct {
    const uint8_t *p, *end;
    uint64_t bloom;
    int count;
    Span names[JSON_MEMBERS_MAX];
} Object;

/* Begins at an opening brace; false when there is none. */
bool object_open(Object *object, const uint8_t *p, const uint8_t *end);

/* Goes to the next member: 1 and its name is names[count - 1], p at its value, which the caller
 * passes; 0 at the end, p behind the closing brace; -1 not sure, also when a name comes twice or
 * is written with an escape. */
int object_next(Object *object, unsigned *flags);

static inline Span object_name(const Object *object)
{
    return object->names[object->count - 1];
}

#endif
