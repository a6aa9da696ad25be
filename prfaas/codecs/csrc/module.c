/* prfaas.codecs._native: checks every size against its buffer, then works without the GIL. */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <stdlib.h>

#include "native.h"

enum { MOST_ITEMS = 1 << 27, MOST_DIM = 4096 };

typedef struct {
    Py_buffer views[8];
    int count;
} Buffers;

static void release(Buffers *b)
{
    for (int i = 0; i < b->count; i++)
        PyBuffer_Release(&b->views[i]);
}

/* Whether buffer `i` is there with exactly so many bytes, or at least so many. */
static int exactly(Buffers *b, int i, size_t nbytes)
{
    return (size_t)b->views[i].len == nbytes;
}

static PyObject *bad(Buffers *b, const char *what)
{
    release(b);
    PyErr_Format(PyExc_ValueError, "%s: sizes do not agree", what);
    return NULL;
}

static PyObject *no_memory(Buffers *b)
{
    release(b);
    return PyErr_NoMemory();
}

static int fits(Py_ssize_t rows, Py_ssize_t cols)
{
    return rows > 0 && cols > 0 && rows <= MOST_ITEMS && cols <= MOST_ITEMS / rows;
}

static PyObject *status(Buffers *b, ptrdiff_t result)
{
    release(b);
    return PyLong_FromSsize_t((Py_ssize_t)result);
}

static PyObject *py_exponent_encode(PyObject *self, PyObject *args)
{
    Buffers b = {.count = 2};
    Py_ssize_t rows, cols, item;
    if (!PyArg_ParseTuple(args, "y*w*nnn", &b.views[0], &b.views[1], &rows, &cols, &item))
        return NULL;
    if (!fits(rows, cols) || (item != 2 && item != 4)
        || !exactly(&b, 0, (size_t)rows * cols * item))
        return bad(&b, "exponent_encode");
    uint8_t *scratch = malloc((size_t)rows * cols * 2 + 64);
    if (!scratch)
        return no_memory(&b);
    ptrdiff_t n;
    Py_BEGIN_ALLOW_THREADS
    n = exponent_encode(b.views[0].buf, rows, cols, item, b.views[1].buf, b.views[1].len, scratch);
    Py_END_ALLOW_THREADS
    free(scratch);
    return status(&b, n);
}

static PyObject *py_exponent_decode(PyObject *self, PyObject *args)
{
    Buffers b = {.count = 2};
    Py_ssize_t rows, cols, item;
    if (!PyArg_ParseTuple(args, "y*w*nnn", &b.views[0], &b.views[1], &rows, &cols, &item))
        return NULL;
    if (!fits(rows, cols) || (item != 2 && item != 4)
        || !exactly(&b, 1, (size_t)rows * cols * item))
        return bad(&b, "exponent_decode");
    uint8_t *scratch = malloc((size_t)rows * cols * 2 + 64);
    if (!scratch)
        return no_memory(&b);
    int n;
    Py_BEGIN_ALLOW_THREADS
    n = exponent_decode(b.views[0].buf, b.views[0].len, rows, cols, item, b.views[1].buf, scratch);
    Py_END_ALLOW_THREADS
    free(scratch);
    return status(&b, n);
}

static PyObject *py_int8(PyObject *args, int encode)
{
    Buffers b = {.count = 2};
    Py_ssize_t rows, heads, dim;
    if (!PyArg_ParseTuple(args, "y*w*nnn", &b.views[0], &b.views[1], &rows, &heads, &dim))
        return NULL;
    if (heads <= 0 || dim <= 0 || dim > MOST_DIM || heads > 65535 || !fits(rows, heads * dim)
        || !exactly(&b, encode ? 0 : 1, (size_t)rows * heads * dim * 4)
        || !exactly(&b, encode ? 1 : 0, int8_size(rows, heads, dim)))
        return bad(&b, "int8");
    int n = 0;
    Py_BEGIN_ALLOW_THREADS
    if (encode)
        n = int8_encode(b.views[0].buf, rows, heads, dim, b.views[1].buf);
    else
        int8_decode(b.views[0].buf, rows, heads, dim, b.views[1].buf);
    Py_END_ALLOW_THREADS
    return status(&b, n);
}

static PyObject *py_int8_encode(PyObject *self, PyObject *args) { return py_int8(args, 1); }
static PyObject *py_int8_decode(PyObject *self, PyObject *args) { return py_int8(args, 0); }

static PyObject *py_int8_size(PyObject *self, PyObject *args)
{
    Py_ssize_t rows, heads, dim;
    if (!PyArg_ParseTuple(args, "nnn", &rows, &heads, &dim))
        return NULL;
    if (heads <= 0 || dim <= 0 || dim > MOST_DIM || heads > 65535 || !fits(rows, heads * dim)) {
        PyErr_SetString(PyExc_ValueError, "int8_size: sizes are out of range");
        return NULL;
    }
    return PyLong_FromSize_t(int8_size(rows, heads, dim));
}

static PyObject *py_rans_bound(PyObject *self, PyObject *args)
{
    Py_ssize_t rows, cols;
    if (!PyArg_ParseTuple(args, "nn", &rows, &cols))
        return NULL;
    if (!fits(rows, cols)) {
        PyErr_SetString(PyExc_ValueError, "rans_bound: sizes are out of range");
        return NULL;
    }
    return PyLong_FromSize_t(rans_bound(rows, cols));
}

static PyObject *py_rans(PyObject *args, int encode)
{
    Buffers b = {.count = 2};
    Py_ssize_t rows, cols;
    if (!PyArg_ParseTuple(args, "y*w*nn", &b.views[0], &b.views[1], &rows, &cols))
        return NULL;
    if (!fits(rows, cols) || !exactly(&b, encode ? 0 : 1, (size_t)rows * cols * 2))
        return bad(&b, "rans");
    uint8_t *scratch = malloc((encode ? (size_t)rows * cols : 2 * (size_t)rows) + 64);
    if (!scratch)
        return no_memory(&b);
    ptrdiff_t n;
    Py_BEGIN_ALLOW_THREADS
    n = encode
        ? rans_encode(b.views[0].buf, rows, cols, b.views[1].buf, b.views[1].len, scratch)
        : rans_decode(b.views[0].buf, b.views[0].len, rows, cols, b.views[1].buf, scratch);
    Py_END_ALLOW_THREADS
    free(scratch);
    return status(&b, n);
}

static PyObject *py_rans_encode(PyObject *self, PyObject *args) { return py_rans(args, 1); }
static PyObject *py_rans_decode(PyObject *self, PyObject *args) { return py_rans(args, 0); }

/* (items, turns or empty, mean, x, rows, heads, dim, kind, stride, offset) */
static PyObject *py_rows(PyObject *args, int load)
{
    Buffers b = {.count = 4};
    Py_ssize_t rows, heads, dim, kind, stride, offset;
    if (!PyArg_ParseTuple(args, load ? "y*y*y*w*nnnnnn" : "w*y*y*y*nnnnnn", &b.views[0], &b.views[1],
                          &b.views[2], &b.views[3], &rows, &heads, &dim, &kind, &stride, &offset))
        return NULL;
    Py_ssize_t width = heads * dim;
    if (heads <= 0 || dim <= 0 || dim > MOST_DIM || heads > 65535 || kind < 0 || kind > 2
        || !fits(rows, width) || !fits(rows, stride) || offset < 0 || offset > stride - width
        || !exactly(&b, 0, (size_t)rows * width * (kind == 0 ? 4 : 2))
        || !(exactly(&b, 1, 0) || (dim % 2 == 0 && exactly(&b, 1, (size_t)rows * dim * 4)))
        || !exactly(&b, 2, (size_t)width * 4) || !exactly(&b, 3, (size_t)rows * stride * 4))
        return bad(&b, "rows");
    const float *turns = b.views[1].len ? b.views[1].buf : NULL;
    float *x = (float *)b.views[3].buf + offset;
    int n = 0;
    Py_BEGIN_ALLOW_THREADS
    if (load)
        n = load_rows(b.views[0].buf, rows, heads, dim, kind, turns, b.views[2].buf, x, stride);
    else
        store_rows(x, stride, rows, heads, dim, kind, turns, b.views[2].buf, b.views[0].buf);
    Py_END_ALLOW_THREADS
    return status(&b, n);
}

static PyObject *py_load_rows(PyObject *self, PyObject *args) { return py_rows(args, 1); }
static PyObject *py_store_rows(PyObject *self, PyObject *args) { return py_rows(args, 0); }

static size_t packed(Py_ssize_t rows, Py_ssize_t cols)
{
    return (size_t)((cols + 15) / 16) * 16 * rows * sizeof(float);
}

static PyObject *py_forward(PyObject *self, PyObject *args)
{
    Buffers b = {.count = 3};
    Py_ssize_t rows, width, cols;
    float scale, dead;
    if (!PyArg_ParseTuple(args, "y*y*w*nnnff", &b.views[0], &b.views[1], &b.views[2], &rows, &width,
                          &cols, &scale, &dead))
        return NULL;
    if (!fits(rows, width) || !fits(rows, cols) || !fits(width, cols)
        || !exactly(&b, 0, (size_t)rows * width * 4)
        || (size_t)b.views[1].len < packed(width, cols)
        || !exactly(&b, 2, (size_t)rows * cols * 2))
        return bad(&b, "forward");
    int n;
    Py_BEGIN_ALLOW_THREADS
    n = forward(b.views[0].buf, rows, width, b.views[1].buf, cols, scale, dead, b.views[2].buf);
    Py_END_ALLOW_THREADS
    return status(&b, n);
}

static PyObject *py_inverse(PyObject *self, PyObject *args)
{
    Buffers b = {.count = 3};
    Py_ssize_t rows, cols, depth, width;
    float step;
    if (!PyArg_ParseTuple(args, "y*y*w*nnnnf", &b.views[0], &b.views[1], &b.views[2], &rows, &cols,
                          &depth, &width, &step))
        return NULL;
    if (!fits(rows, width) || !fits(rows, cols) || !fits(width, depth) || cols > depth
        || !exactly(&b, 0, (size_t)rows * cols * 2) || !exactly(&b, 1, packed(depth, width))
        || !exactly(&b, 2, (size_t)rows * width * 4))
        return bad(&b, "inverse");
    float *scratch = malloc((size_t)cols * 48 * sizeof(float));
    if (!scratch)
        return no_memory(&b);
    Py_BEGIN_ALLOW_THREADS
    inverse(b.views[0].buf, rows, cols, b.views[1].buf, depth, width, step, b.views[2].buf, scratch);
    Py_END_ALLOW_THREADS
    free(scratch);
    return status(&b, 0);
}

static PyObject *py_quantise(PyObject *self, PyObject *args)
{
    Buffers b = {.count = 3};
    Py_ssize_t rows, cols;
    float dead;
    if (!PyArg_ParseTuple(args, "y*y*w*nnf", &b.views[0], &b.views[1], &b.views[2], &rows, &cols,
                          &dead))
        return NULL;
    if (!fits(rows, cols) || !exactly(&b, 0, (size_t)rows * cols * 4)
        || !exactly(&b, 1, (size_t)cols * 4) || !exactly(&b, 2, (size_t)rows * cols * 2))
        return bad(&b, "quantise");
    int n;
    Py_BEGIN_ALLOW_THREADS
    n = quantise(b.views[0].buf, rows, cols, b.views[1].buf, dead, b.views[2].buf);
    Py_END_ALLOW_THREADS
    return status(&b, n);
}

/* (items, coefficients, steps, turns or empty, mean, rows, heads, dim, kind) */
static PyObject *py_restore(PyObject *self, PyObject *args)
{
    Buffers b = {.count = 5};
    Py_ssize_t rows, heads, dim, kind;
    if (!PyArg_ParseTuple(args, "w*y*y*y*y*nnnn", &b.views[0], &b.views[1], &b.views[2],
                          &b.views[3], &b.views[4], &rows, &heads, &dim, &kind))
        return NULL;
    Py_ssize_t width = heads * dim;
    if (heads <= 0 || dim <= 0 || dim > MOST_DIM || heads > 65535 || kind < 0 || kind > 2
        || !fits(rows, width) || !exactly(&b, 0, (size_t)rows * width * (kind == 0 ? 4 : 2))
        || !exactly(&b, 1, (size_t)rows * width * 2) || !exactly(&b, 2, (size_t)width * 4)
        || !(exactly(&b, 3, 0) || (dim % 2 == 0 && exactly(&b, 3, (size_t)rows * dim * 4)))
        || !exactly(&b, 4, (size_t)width * 4))
        return bad(&b, "restore");
    float *x = malloc((size_t)width * BLOCK * sizeof(float));
    if (!x)
        return no_memory(&b);
    Py_BEGIN_ALLOW_THREADS
    restore(b.views[1].buf, rows, heads, dim, kind, b.views[2].buf,
            b.views[3].len ? b.views[3].buf : NULL, b.views[4].buf, b.views[0].buf, x);
    Py_END_ALLOW_THREADS
    free(x);
    return status(&b, 0);
}

static PyObject *py_unpack(PyObject *self, PyObject *args)
{
    Buffers b = {.count = 2};
    if (!PyArg_ParseTuple(args, "y*w*", &b.views[0], &b.views[1]))
        return NULL;
    size_t n = (size_t)b.views[1].len / 2;
    if (n % 4 || !exactly(&b, 1, 2 * n) || !exactly(&b, 0, n + n / 4 * 3))
        return bad(&b, "unpack");
    Py_BEGIN_ALLOW_THREADS
    unpack(b.views[0].buf, n, b.views[1].buf);
    Py_END_ALLOW_THREADS
    return status(&b, 0);
}

static PyObject *py_simd(PyObject *self, PyObject *args)
{
    int most;
    if (!PyArg_ParseTuple(args, "i", &most))
        return NULL;
    return PyLong_FromLong(rans_level(most < 0 ? 0 : most));
}

static PyMethodDef methods[] = {
    {"simd", py_simd, METH_VARARGS, NULL},
    {"unpack", py_unpack, METH_VARARGS, NULL},
    {"exponent_encode", py_exponent_encode, METH_VARARGS, NULL},
    {"exponent_decode", py_exponent_decode, METH_VARARGS, NULL},
    {"int8_size", py_int8_size, METH_VARARGS, NULL},
    {"int8_encode", py_int8_encode, METH_VARARGS, NULL},
    {"int8_decode", py_int8_decode, METH_VARARGS, NULL},
    {"rans_bound", py_rans_bound, METH_VARARGS, NULL},
    {"rans_encode", py_rans_encode, METH_VARARGS, NULL},
    {"rans_decode", py_rans_decode, METH_VARARGS, NULL},
    {"load_rows", py_load_rows, METH_VARARGS, NULL},
    {"store_rows", py_store_rows, METH_VARARGS, NULL},
    {"forward", py_forward, METH_VARARGS, NULL},
    {"inverse", py_inverse, METH_VARARGS, NULL},
    {"quantise", py_quantise, METH_VARARGS, NULL},
    {"restore", py_restore, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    rans_setup();
    return PyModule_Create(&module);
}
