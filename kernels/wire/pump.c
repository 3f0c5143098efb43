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
 * Locking: `lock` guards all fields of Pump and of its streams; the thread holds it while it serves
 * what one epoll_wait has named, callers while they ask. The thread never takes the GIL.
 */
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    STREAMS_MAX = 1 << 16,
    READ_BYTES = 64 << 10,
    SEEN_BYTES_MAX = 64 << 10,
    SEEN_BYTES_FIRST = 4 << 10,
    FRAME_ROOM = 24, /* a chunk's size line before, its CR LF behind */
    EVENTS = 64,
    STACK_BYTES = 64 << 10,
};
#define CONTROL UINT64_MAX

/* Why a loan has ended. The values are the caller's too (proxy/express.py). */
enum why {
    RUNNING = 0,
    UNREAD = 1, /* `rest` is what was read and not passed on */
    ENDED = 2,  /* the source has ended or failed: the caller reads that itself */
    UNSENT = 3, /* `rest` is what the client did not take at once, framed */
    LOST = 4,   /* no memory: the stream cannot go on */
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
    bool running;
    int epoll, control, wake;
    size_t wake_bytes;
    uint32_t streams_max, top; /* `top`: streams from here on were never used */
    uint32_t free_count, told_count;
    Stream *streams;
    uint32_t *free, *told;
    uint8_t *read, *out; /* the thread's alone */
} Pump;

/* --- the thread ------------------------------------------------------------------------------ */

static void tell(Pump *pump, Stream *stream)
{
    if (!stream->told) {
        stream->told = true;
        pump->told[pump->told_count++] = (uint32_t)(stream - pump->streams);
        if (pump->told_count == 1) {
            (void)eventfd_write(pump->wake, 1);
        }
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

static void serve(Pump *pump, Stream *stream)
{
    ssize_t got = recv(stream->from, pump->read, READ_BYTES, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
    }
    if (got <= 0) {
        end(pump, stream, ENDED, NULL, 0);
        return;
    }
    uint8_t *payload = pump->out + FRAME_ROOM;
    Py_ssize_t size = gather(stream, pump->read, got, payload);
    if (size < 0 || !keep(stream, payload, (size_t)size)) {
        end(pump, stream, UNREAD, pump->read, (size_t)got);
        return;
    }
    uint8_t *out = payload;
    size_t length = (size_t)size;
    if (stream->chunked_out) { /* one chunk a read (RFC 9112 section 7.1) */
        char line[FRAME_ROOM];
        int digits = snprintf(line, sizeof line, "%zx\r\n", length);
        out -= digits;
        memcpy(out, line, (size_t)digits);
        memcpy(payload + length, "\r\n", 2);
        length += (size_t)digits + 2;
    }
    ssize_t sent = send(stream->to, out, length, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
        sent = 0; /* whatever it was, the caller meets it when it writes the rest */
    }
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
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
            if (name == CONTROL) {
                pthread_mutex_unlock(&pump->lock);
                return NULL;
            }
            /* It may have been taken back, and lent again, since the kernel named it. */
            Stream *stream = &pump->streams[(uint32_t)name];
            if (stream->lent && stream->why == RUNNING && stream->generation == name >> 32) {
                serve(pump, stream);
            }
        }
        pthread_mutex_unlock(&pump->lock);
    }
}

/* --- the caller ------------------------------------------------------------------------------ */

static void lock(Pump *pump)
{
    if (pthread_mutex_trylock(&pump->lock) != 0) {
        Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&pump->lock);
        Py_END_ALLOW_THREADS
    }
}

/* The lent stream of a ticket, with the lock held; NULL without it, with ValueError. */
static Stream *find(Pump *pump, PyObject *ticket)
{
    uint64_t name = PyLong_AsUnsignedLongLong(ticket);
    if (name == (uint64_t)-1 && PyErr_Occurred()) {
        return NULL;
    }
    lock(pump);
    uint32_t at = (uint32_t)name;
    if (at < pump->top && pump->streams[at].lent && pump->streams[at].generation == name >> 32) {
        return &pump->streams[at];
    }
    pthread_mutex_unlock(&pump->lock);
    PyErr_SetString(PyExc_ValueError, "no such stream is lent");
    return NULL;
}

static PyObject *take_seen(Stream *stream)
{
    PyObject *seen =
        PyBytes_FromStringAndSize((const char *)stream->seen, (Py_ssize_t)stream->seen_size);
    stream->seen_size = 0;
    return seen;
}

static int begin_thread(Pump *pump)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    pump->read = malloc(READ_BYTES);
    pump->out = malloc(READ_BYTES + 2 * FRAME_ROOM);
    if (pump->read == NULL || pump->out == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    sigfillset(&all); /* signals are the loop's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    int problem = pthread_create(&pump->thread, &attributes, work, pump);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (problem != 0) {
        errno = problem;
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    pump->running = true;
    return 0;
}

static PyObject *pump_lend(Pump *pump, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "lend takes two descriptors and two flags");
        return NULL;
    }
    int from = PyObject_AsFileDescriptor(args[0]), to = PyObject_AsFileDescriptor(args[1]);
    if (from < 0 || to < 0 || (!pump->running && begin_thread(pump) < 0)) {
        return NULL;
    }
    lock(pump);
    bool fits = pump->free_count > 0 || pump->top < pump->streams_max;
    uint32_t at = 0;
    if (fits) {
        at = pump->free_count > 0 ? pump->free[--pump->free_count] : pump->top++;
    }
    pthread_mutex_unlock(&pump->lock);
    if (!fits) {
        return PyLong_FromLong(-1);
    }
    Stream *stream = &pump->streams[at]; /* nobody's yet: the thread looks at lent ones only */
    uint32_t generation = stream->generation;
    *stream = (Stream){
        .from = fcntl(from, F_DUPFD_CLOEXEC, 0),
        .to = fcntl(to, F_DUPFD_CLOEXEC, 0),
        .generation = generation,
        .chunked_in = args[2] == Py_True,
        .chunked_out = args[3] == Py_True,
    };
    struct epoll_event event = {.events = EPOLLIN,
                                .data.u64 = (uint64_t)generation << 32 | at};
    lock(pump);
    stream->lent = stream->from >= 0 && stream->to >= 0 &&
                   epoll_ctl(pump->epoll, EPOLL_CTL_ADD, stream->from, &event) == 0;
    if (stream->lent) {
        pthread_mutex_unlock(&pump->lock);
        return PyLong_FromUnsignedLongLong(event.data.u64);
    }
    int problem = errno;
    pump->free[pump->free_count++] = at;
    pthread_mutex_unlock(&pump->lock);
    if (stream->from >= 0) {
        close(stream->from);
    }
    if (stream->to >= 0) {
        close(stream->to);
    }
    errno = problem;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *pump_look(Pump *pump, PyObject *ticket)
{
    Stream *stream = find(pump, ticket);
    if (stream == NULL) {
        return NULL;
    }
    PyObject *seen = take_seen(stream);
    int why = stream->why;
    pthread_mutex_unlock(&pump->lock);
    return seen == NULL ? NULL : Py_BuildValue("(Ni)", seen, why);
}

static PyObject *pump_last_ns(Pump *pump, PyObject *ticket)
{
    Stream *stream = find(pump, ticket);
    if (stream == NULL) {
        return NULL;
    }
    uint64_t last_ns = stream->last_ns;
    pthread_mutex_unlock(&pump->lock);
    return PyLong_FromUnsignedLongLong(last_ns);
}

static PyObject *pump_take_back(Pump *pump, PyObject *ticket)
{
    Stream *stream = find(pump, ticket);
    if (stream == NULL) {
        return NULL;
    }
    if (stream->why == RUNNING) {
        (void)epoll_ctl(pump->epoll, EPOLL_CTL_DEL, stream->from, NULL);
    }
    Stream taken = *stream;
    uint32_t at = (uint32_t)(stream - pump->streams);
    if (taken.told) {
        for (uint32_t i = 0; i < pump->told_count; i++) {
            if (pump->told[i] == at) {
                pump->told[i] = pump->told[--pump->told_count];
                break;
            }
        }
    }
    *stream = (Stream){.generation = taken.generation + 1};
    pump->free[pump->free_count++] = at;
    pthread_mutex_unlock(&pump->lock);
    close(taken.from);
    close(taken.to);
    PyObject *seen = take_seen(&taken);
    PyObject *result = seen == NULL ? NULL
                                    : Py_BuildValue("(Niy#K)", seen, (int)taken.why,
                                                    taken.rest != NULL ? (char *)taken.rest : "",
                                                    (Py_ssize_t)taken.rest_size,
                                                    (unsigned long long)taken.last_ns);
    free(taken.seen);
    free(taken.rest);
    return result;
}

static PyObject *pump_told(Pump *pump, PyObject *unused)
{
    (void)unused;
    eventfd_t ignored;
    (void)eventfd_read(pump->wake, &ignored);
    PyObject *tickets = PyList_New(0);
    if (tickets == NULL) {
        return NULL;
    }
    lock(pump);
    while (pump->told_count > 0) {
        uint32_t at = pump->told[pump->told_count - 1];
        uint64_t name = (uint64_t)pump->streams[at].generation << 32 | at;
        PyObject *ticket = PyLong_FromUnsignedLongLong(name);
        if (ticket == NULL || PyList_Append(tickets, ticket) < 0) {
            Py_XDECREF(ticket);
            Py_CLEAR(tickets);
            break;
        }
        Py_DECREF(ticket);
        pump->streams[at].told = false;
        pump->told_count--;
    }
    pthread_mutex_unlock(&pump->lock);
    return tickets;
}

static PyObject *pump_fileno(Pump *pump, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(pump->wake);
}

static void stop(Pump *pump)
{
    if (pump->running) {
        pump->running = false;
        (void)eventfd_write(pump->control, 1);
        Py_BEGIN_ALLOW_THREADS
        pthread_join(pump->thread, NULL);
        Py_END_ALLOW_THREADS
    }
}

static PyObject *pump_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"streams_max", "wake_bytes", NULL};
    int streams_max, wake_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ii", names, &streams_max, &wake_bytes)) {
        return NULL;
    }
    if (streams_max < 1 || streams_max > STREAMS_MAX || wake_bytes < 1 ||
        wake_bytes > SEEN_BYTES_MAX) {
        PyErr_Format(PyExc_ValueError, "streams_max: 1 to %d, wake_bytes: 1 to %d", STREAMS_MAX,
                     SEEN_BYTES_MAX);
        return NULL;
    }
    Pump *pump = (Pump *)type->tp_alloc(type, 0);
    if (pump == NULL) {
        return NULL;
    }
    pthread_mutex_init(&pump->lock, NULL);
    pump->streams_max = (uint32_t)streams_max;
    pump->wake_bytes = (size_t)wake_bytes;
    pump->epoll = epoll_create1(EPOLL_CLOEXEC);
    pump->control = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pump->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = CONTROL};
    if (pump->epoll < 0 || pump->control < 0 || pump->wake < 0 ||
        epoll_ctl(pump->epoll, EPOLL_CTL_ADD, pump->control, &event) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(pump);
        return NULL;
    }
    size_t count = (size_t)streams_max; /* untouched pages of these cost nothing */
    pump->streams = calloc(count, sizeof *pump->streams);
    pump->free = calloc(count, sizeof *pump->free);
    pump->told = calloc(count, sizeof *pump->told);
    if (pump->streams == NULL || pump->free == NULL || pump->told == NULL) {
        Py_DECREF(pump);
        return PyErr_NoMemory();
    }
    return (PyObject *)pump;
}

static PyObject *pump_close(Pump *pump, PyObject *unused)
{
    (void)unused;
    stop(pump);
    Py_RETURN_NONE;
}

static void pump_dealloc(Pump *pump)
{
    PyTypeObject *type = Py_TYPE(pump);
    stop(pump);
    for (uint32_t at = 0; at < pump->top; at++) {
        Stream *stream = &pump->streams[at];
        if (stream->lent) {
            close(stream->from);
            close(stream->to);
            free(stream->seen);
            free(stream->rest);
        }
    }
    int descriptors[] = {pump->epoll, pump->control, pump->wake};
    for (size_t i = 0; i < sizeof descriptors / sizeof *descriptors; i++) {
        if (descriptors[i] > 0) {
            close(descriptors[i]);
        }
    }
    free(pump->streams);
    free(pump->free);
    free(pump->told);
    free(pump->read);
    free(pump->out);
    pthread_mutex_destroy(&pump->lock);
    type->tp_free((PyObject *)pump);
    Py_DECREF(type);
}

static PyMethodDef pump_methods[] = {
    {"fileno", (PyCFunction)pump_fileno, METH_NOARGS,
     "fileno()\n--\n\nReturn a descriptor that is readable when `told` has something."},
    {"lend", (PyCFunction)(void (*)(void))pump_lend, METH_FASTCALL,
     "lend(source, client, chunked_in, chunked_out, /)\n--\n\n"
     "Begin to pass bytes on; return a ticket, -1 when `streams_max` are lent. Raises OSError."},
    {"look", (PyCFunction)pump_look, METH_O,
     "look(ticket, /)\n--\n\nReturn (what passed since the last look, why it ended or 0)."},
    {"last_ns", (PyCFunction)pump_last_ns, METH_O,
     "last_ns(ticket, /)\n--\n\nReturn when bytes passed last, monotonic ns; 0: none yet."},
    {"take_back", (PyCFunction)pump_take_back, METH_O,
     "take_back(ticket, /)\n--\n\nEnd it; return (passed since the last look, why, rest, last ns)."},
    {"told", (PyCFunction)pump_told, METH_NOARGS,
     "told()\n--\n\nReturn the tickets that are to be looked at."},
    {"close", (PyCFunction)pump_close, METH_NOARGS, "close()\n--\n\nEnd the thread."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot pump_slots[] = {
    {Py_tp_new, pump_new},
    {Py_tp_dealloc, pump_dealloc},
    {Py_tp_methods, pump_methods},
    {Py_tp_doc, "Pump(streams_max, wake_bytes)\n--\n\nPasses event streams on (see pump.c)."},
    {0, NULL},
};

PyType_Spec wire_pump_spec = {
    .name = "kernels.wire._wire.Pump",
    .basicsize = sizeof(Pump),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = pump_slots,
};
