/* What Python's os has not: to have the disk begin on what a file was given. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "wire.h"

#include <errno.h>
#include <fcntl.h>

/* begin_write(fd, offset, size): 0, or an errno. sync_file_range(2) that waits for nothing; what
 * goes wrong later comes out at the next fdatasync. */
PyObject *wire_begin_write(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "begin_write takes three arguments");
        return NULL;
    }
    long fd = PyLong_AsLong(args[0]);
    long long offset = PyLong_AsLongLong(args[1]), size = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    int error = ENOSYS;
#ifdef SYNC_FILE_RANGE_WRITE
    Py_BEGIN_ALLOW_THREADS
    error = sync_file_range((int)fd, offset, size, SYNC_FILE_RANGE_WRITE) == 0 ? 0 : errno;
    Py_END_ALLOW_THREADS
#endif
    return PyLong_FromLong(error);
}
