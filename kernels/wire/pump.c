/* Pump: the middle of event streams, from one socket to another, on a thread that knows no Python.
 *
 * An event that comes alone costs its wake-up, and most of that is an interpreter that finds cold
 * caches. So a stream whose head has gone out is lent to this thread: it reads, checks the framing,
 * writes, and keeps what passed for whoever observes the stream. It does the ordinary and nothing
 * else: whatever is not whole chunks of data going to a client that takes them at once ends the
 * loan, and the bytes go back to the caller as they came (`why`, `rest`).
 *
 * Bounds: `streams_max` streams, SEEN_BYTES_MAX of passed bytes a stream and at most one read
 * (READ_BYTES) that waits to be taken back. The sockets are duplicates: the caller's may close at
 * any time.
 *
 * Locking: `lock` guards all fields of Pump and of its streams. It is held for no system call that
 * passes bytes, so callers may ask meanwhile; the descriptors of the stream that is served stay
 * open (`serving`): who takes it back waits. The thread never takes the GIL, and wakes the loop
 * when it has served all that one epoll_wait has named: on a core that both share the loop would
 * stand before the other streams.
 */
#include "pump.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>

static void tell(Pump *pump, Stream *stream)
{
    if (!stream->told) {
        stream->told = true;
        pump->told[pump->told_count++] = (uint32_t)(stream - pump->streams);
    }
}

/* Ends a loan; `rest` is copied. */
static void end(Pump *pump, Stream *stream, enum why why, const uint8_t *rest, size_t size)
{
    (void)epoll_ctl(pump->epoll, EPOLL_CTL_DEL, stream->from, NULL);
    stream->why = (uint8_t)why;
    if (size > 0) {
        stream->rest = malloc(size);
        if (stream->rest == NULL) {
            stream->why = LOST;
        } else {
            memcpy(stream->rest, rest, size);
            stream->rest_size = size;
        }
    }
    tell(pump, stream);
}

/* Keeps passed bytes for the observer; false: no room. */
static bool keep(Stream *stream, const uint8_t *data, size_t size)
{
    size_t need = stream->seen_size + size;
    if (need > SEEN_BYTES_MAX) {
        return false;
    }
    if (need > stream->seen_room) {
        size_t room = stream->seen_room ? stream->seen_room : SEEN_BYTES_FIRST;
        while (room < need) {
            room *= 2;
        }
        uint8_t *grown = realloc(stream->seen, room);
        if (grown == NULL) {
            return false;
        }
        stream->seen = grown;
        stream->seen_room = room;
    }
    memcpy(stream->seen + stream->seen_size, data, size);
    stream->seen_size = need;
    return true;
}

/* Gathers the payload of a read at `out`; its size, or -1: not only whole chunks of data. */
static Py_ssize_t gather(const Stream *stream, const uint8_t *data, Py_ssize_t size, uint8_t *out)
{
    if (!stream->chunked_in) {
        memcpy(out, data, (size_t)size);
        return size;
    }
    const uint8_t *p = data, *after;
    Py_ssize_t gathered = 0;
    for (Span payload; (after = wire_whole_chunk(p, data + size, &payload)) != NULL; p = after) {
        memcpy(out + gathered, payload.at, (size_t)payload.size);
        gathered += payload.size;
    }
    return p == data + size ? gathered : -1;
}

/* Passes on what one read gives. Called, and returns, with the lock. */
static void serve(Pump *pump, Stream *stream)
{
    uint8_t *payload = pump->out + FRAME_ROOM;
    pthread_mutex_unlock(&pump->lock);
    ssize_t got = recv(stream->from, pump->read, READ_BYTES, MSG_DONTWAIT);
    bool nothing = got < 0 && (errno == EAGAIN || errno == EINTR);
    Py_ssize_t size = got > 0 ? gather(stream, pump->read, got, payload) : 0;
    pthread_mutex_lock(&pump->lock);
    if (nothing) {
        return;
    }
    if (got <= 0) {
        end(pump, stream, got < 0 ? BROKEN : ENDED, NULL, 0);
        return;
    }
    if (size < 0 || !keep(stream, payload, (size_t)size)) {
        end(pump, stream, UNREAD, pump->read, (size_t)got);
        return;
    }
    pthread_mutex_unlock(&pump->lock);
    uint8_t *out = payload;
    size_t length = (size_t)size;
    if (stream->chunked_out) { /* one chunk a read (RFC 9112 section 7.1) */
        memcpy(payload + length, "\r\n", 2);
        memcpy(out -= 2, "\r\n", 2);
        for (size_t left = length; left != 0; left >>= 4) {
            *--out = (uint8_t)"0123456789abcdef"[left & 15];
        }
        length += (size_t)(payload - out) + 2;
    }
    ssize_t sent = send(stream->to, out, length, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
        sent = 0; /* whatever it was, the caller meets it when it writes the rest */
    }
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    pthread_mutex_lock(&pump->lock);
    stream->last_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    if ((size_t)sent < length) {
        end(pump, stream, UNSENT, out + sent, length - (size_t)sent);
    } else if (stream->seen_size >= pump->wake_bytes) {
        tell(pump, stream);
    }
}

static void *work(void *argument)
{
    Pump *pump = argument;
    struct epoll_event events[EVENTS];
    for (;;) {
        int count = epoll_wait(pump->epoll, events, EVENTS, -1);
        pthread_mutex_lock(&pump->lock);
        for (int i = 0; i < count; i++) {
            uint64_t name = events[i].data.u64;
            if (name == PUMP_CONTROL) {
                pthread_mutex_unlock(&pump->lock);
                return NULL;
            }
            /* It may have been taken back, and lent again, since the kernel named it. */
            Stream *stream = &pump->streams[(uint32_t)name];
            if (stream->lent && stream->why == RUNNING && stream->generation == name >> 32) {
                pump->serving = stream;
                serve(pump, stream);
                pump->serving = NULL;
                if (pump->awaited) {
                    pump->awaited = false;
                    pthread_cond_broadcast(&pump->served);
                }
            }
        }
        bool wake = pump->told_count > 0 && !pump->woken;
        pump->woken |= wake;
        pthread_mutex_unlock(&pump->lock);
        if (wake) {
            (void)eventfd_write(pump->wake, 1);
        }
    }
}

int pump_start(Pump *pump)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    pump->read = pump->read != NULL ? pump->read : malloc(READ_BYTES);
    pump->out = pump->out != NULL ? pump->out : malloc(READ_BYTES + 2 * FRAME_ROOM);
    if (pump->read == NULL || pump->out == NULL) {
        return ENOMEM;
    }
    sigfillset(&all); /* signals are the loop's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    int problem = pthread_create(&pump->thread, &attributes, work, pump);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pump->running = problem == 0;
    return problem;
}

void pump_end(Pump *pump)
{
    if (pump->running) {
        pump->running = false;
        (void)eventfd_write(pump->control, 1);
        pthread_join(pump->thread, NULL);
    }
}
