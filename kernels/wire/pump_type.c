/* Pump as Python sees it: lending streams to the thread of pump.c, looking, taking back. */
#include "pump.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

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

/* Waits, with the lock, until the thread does not serve this stream. Nobody else takes it back
 * meanwhile: those who ask are one loop. */
static void await_served(Pump *pump, Stream *stream)
{
    if (pump->serving == stream) {
        Py_BEGIN_ALLOW_THREADS
        while (pump->serving == stream) {
            pump->awaited = true;
            pthread_cond_wait(&pump->served, &pump->lock);
        }
        Py_END_ALLOW_THREADS
    }
}

static PyObject *take_seen(Stream *stream)
{
    PyObject *seen =
        PyBytes_FromStringAndSize((const char *)stream->seen, (Py_ssize_t)stream->seen_size);
    stream->seen_size = 0;
    return seen;
}

static PyObject *pump_lend(Pump *pump, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "lend takes two descriptors and two flags");
        return NULL;
    }
    int from = PyObject_AsFileDescriptor(args[0]), to = PyObject_AsFileDescriptor(args[1]);
    if (from < 0 || to < 0) {
        return NULL;
    }
    int begun = pump->running ? 0 : pump_start(pump);
    if (begun != 0) {
        errno = begun;
        return PyErr_SetFromErrno(PyExc_OSError);
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
        if (pump->loop >= 0) { /* where it is not watched any more, nothing is lost */
            (void)epoll_ctl(pump->loop, EPOLL_CTL_DEL, from, NULL);
        }
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
    await_served(pump, stream);
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
    pump->woken = false;
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
    Py_BEGIN_ALLOW_THREADS
    pump_end(pump);
    Py_END_ALLOW_THREADS
}

static size_t rows_bytes(const Pump *pump)
{
    return pump->streams_max * (sizeof *pump->streams + sizeof *pump->free + sizeof *pump->told);
}

static PyObject *pump_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"streams_max", "wake_bytes", "loop", NULL};
    int streams_max, wake_bytes, loop = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ii|i", names, &streams_max, &wake_bytes,
                                     &loop)) {
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
    pthread_cond_init(&pump->served, NULL);
    pump->streams_max = (uint32_t)streams_max;
    pump->wake_bytes = (size_t)wake_bytes;
    pump->loop = loop;
    pump->epoll = epoll_create1(EPOLL_CLOEXEC);
    pump->control = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pump->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = PUMP_CONTROL};
    if (pump->epoll < 0 || pump->control < 0 || pump->wake < 0 ||
        epoll_ctl(pump->epoll, EPOLL_CTL_ADD, pump->control, &event) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(pump);
        return NULL;
    }
    /* Pages of their own: untouched they cost nothing, where calloc may clear what it reuses. */
    void *rows = mmap(NULL, rows_bytes(pump), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                      -1, 0);
    if (rows == MAP_FAILED) {
        Py_DECREF(pump);
        return PyErr_NoMemory();
    }
    pump->streams = rows;
    pump->free = (uint32_t *)(pump->streams + pump->streams_max);
    pump->told = pump->free + pump->streams_max;
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
    if (pump->streams != NULL) {
        munmap(pump->streams, rows_bytes(pump));
    }
    free(pump->read);
    free(pump->out);
    pthread_cond_destroy(&pump->served);
    pthread_mutex_destroy(&pump->lock);
    type->tp_free((PyObject *)pump);
    Py_DECREF(type);
}

static PyMethodDef pump_methods[] = {
    {"fileno", (PyCFunction)pump_fileno, METH_NOARGS,
     "fileno()\n--\n\nReturn a descriptor that is readable when `told` has something."},
    {"lend", (PyCFunction)(void (*)(void))pump_lend, METH_FASTCALL,
     "lend(source, client, chunked_in, chunked_out, /)\n--\n\n"
     "Begin to pass bytes on; return a ticket, -1 when `streams_max` are lent. Raises OSError.\n\n"
     "The caller has stopped reading the source."},
    {"look", (PyCFunction)pump_look, METH_O,
     "look(ticket, /)\n--\n\nReturn (what passed since the last look, why it ended or 0)."},
    {"last_ns", (PyCFunction)pump_last_ns, METH_O,
     "last_ns(ticket, /)\n--\n\nReturn when bytes passed last, monotonic ns; 0: none yet."},
    {"take_back", (PyCFunction)pump_take_back, METH_O,
     "take_back(ticket, /)\n--\n\n"
     "End it; return (passed since the last look, why, rest, last ns)."},
    {"told", (PyCFunction)pump_told, METH_NOARGS,
     "told()\n--\n\nReturn the tickets that are to be looked at."},
    {"close", (PyCFunction)pump_close, METH_NOARGS, "close()\n--\n\nEnd the thread."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot pump_slots[] = {
    {Py_tp_new, pump_new},
    {Py_tp_dealloc, pump_dealloc},
    {Py_tp_methods, pump_methods},
    {Py_tp_doc, "Pump(streams_max, wake_bytes, loop=-1)\n--\n\n"
                "Passes event streams on (see pump.c). `loop`: the epoll descriptor of the\n"
                "caller's loop, which forgets a source that it does not read."},
    {0, NULL},
};

PyType_Spec wire_pump_spec = {
    .name = "kernels.wire._wire.Pump",
    .basicsize = sizeof(Pump),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = pump_slots,
};
