/* Adds the type of sealed streams to the module, which has InvalidTag when one is made. */
#ifndef TONGGUAN_SM4_FRAMES_H
#define TONGGUAN_SM4_FRAMES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

int sm4_frames_add(PyObject *module);

#endif
