/* What the pump's two files share: its streams, and what its thread does (pump.c). */
#ifndef TONGGUAN_PUMP_H
#define TONGGUAN_PUMP_H

#include "wire.h"

#include <pthread.h>

enum {
    STREAMS_MAX = 1 << 16,
    READ_BYTES = 64 << 10,
    SEEN_BYTES_MAX = 64 << 10,
    SEEN_BYTES_FIRST = 4 << 10,
    FRAME_ROOM = 24, /* a chunk's size line before, its CR LF behind */
    EVENTS = 64,
    STACK_BYTES = 64 << 10,
};
#define PUMP_CONTROL UINT64_MAX /* what epoll calls the descriptor that ends the thread */

/* Why a loan has ended. The values are the caller's too (proxy/lending.py). */
enum why {
    RUNNING = 0,
    UNREAD = 1, /* `rest` is what was read and not passed on */
    ENDED = 2,  /* the source has ended: the caller reads that itself */
    UNSENT = 3, /* `rest` is what the client did not take at once, framed */
    LOST = 4,   /* no memory: the stream cannot go on */
    BROKEN = 5, /* the source failed: a socket tells that once, and has told it here */
};

typedef struct {
    int from, to;
    uint32_t generation;
    bool lent, chunked_in, chunked_out, told;
    uint8_t why;
    uint64_t last_ns; /* CLOCK_MONOTONIC of the last bytes that passed */
    uint8_t *seen, *rest;
    size_t seen_size, seen_room, rest_size;
} Stream;

typedef struct {
    PyObject_HEAD
    pthread_mutex_t lock;
    pthread_t thread;
    pthread_cond_t served; /* with `lock`: `serving` has changed, for who waits */
    bool running, awaited, woken; /* `woken`: the loop has been told, and has not asked yet */
    Stream *serving; /* what the thread reads and writes now; NULL: none */
    int epoll, control, wake;
    int loop; /* the epoll descriptor the loop waits on, -1: unknown */
    size_t wake_bytes;
    uint32_t streams_max, top; /* `top`: streams from here on were never used */
    uint32_t free_count, told_count;
    Stream *streams;
    uint32_t *free, *told;
    uint8_t *read, *out; /* the thread's alone */
} Pump;

/* Starts the thread, with every signal blocked; 0, or an errno. */
int pump_start(Pump *pump);
/* Ends it, if it runs. Without the GIL. */
void pump_end(Pump *pump);

#endif
