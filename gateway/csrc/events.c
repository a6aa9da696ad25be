/* gateway._events: whole events from an engine's chunks to a client's, as gateway/events.py says.
 *
 * Only the plain case is here. Whatever is not byte for byte plain is left untouched for the parser
 * in Python: a chunk that is not whole, extensions, the last chunk, an event cut in two, [DONE],
 * errors. Everything runs on the event loop's thread and keeps the GIL.
 */
#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <string.h>

enum { LEFT = 0, TAKEN = 1, SLOW = 2 };
enum { MOST_DIGITS = 8, MOST_LINE = MOST_DIGITS + 2 };
/* So many gaps are kept before they are told. */
enum { MOST_GAPS = 32 };

/* --- the framing of a chunked body --- */

typedef struct {
    PyObject_HEAD
    uint64_t missing;     /* of the chunk under way, its line break included */
    char line[MOST_LINE]; /* of a size that has not come whole */
    int line_len;
    char lost;            /* something was not plain, and where chunks begin is not known any more */
} Chunks;

static int between(const Chunks *self)
{
    return !self->lost && !self->missing && !self->line_len;
}

static int digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Length of the line at `p` that says a size above 0; 0 where it is not whole, -1 where it is not
 * plain. */
static int size_line(const char *p, size_t n, uint64_t *size)
{
    size_t i = 0;
    *size = 0;
    for (; i < n && i < MOST_DIGITS && digit(p[i]) >= 0; i++)
        *size = *size << 4 | (uint64_t)digit(p[i]);
    if (i == n)
        return 0;
    if (p[i] != '\r' || !*size)
        return -1;
    if (i + 1 == n)
        return 0;
    return p[i + 1] == '\n' ? (int)i + 2 : -1;
}

/* Follow what the parser reads, so that it is known when a chunk begins. */
static void follow(Chunks *self, const char *p, size_t n)
{
    while (n && !self->lost) {
        if (self->missing) {
            size_t some = self->missing < n ? (size_t)self->missing : n;
            self->missing -= some, p += some, n -= some;
            continue;
        }
        uint64_t size;
        self->line[self->line_len++] = *p++, n--;
        int line = size_line(self->line, (size_t)self->line_len, &size);
        if (line < 0 || (!line && self->line_len == MOST_LINE))
            self->lost = 1;
        else if (line > 0)
            self->missing = size + 2, self->line_len = 0;
    }
}

static PyObject *chunks_seen(PyObject *self, PyObject *data)
{
    char *p;
    Py_ssize_t n;
    if (!PyBytes_Check(data))
        ((Chunks *)self)->lost = 1;
    else if (PyBytes_AsStringAndSize(data, &p, &n) < 0)
        return NULL;
    else
        follow((Chunks *)self, p, (size_t)n);
    Py_RETURN_NONE;
}

/* Whole plain chunks at the start of `p`: how many bytes they are, and of those how many payload. */
static size_t whole_chunks(const char *p, size_t n, size_t *payload)
{
    size_t used = 0;
    *payload = 0;
    while (used < n) {
        uint64_t size;
        int line = size_line(p + used, n - used, &size);
        if (line <= 0 || n - used - (size_t)line < size + 2)
            break;
        const char *end = p + used + line + size;
        if (end[0] != '\r' || end[1] != '\n')
            break;
        used += (size_t)line + (size_t)size + 2;
        *payload += (size_t)size;
    }
    return used;
}

/* Payload of whole chunks, one behind the other; the place after it. */
static char *copy_payload(char *to, const char *p, size_t n)
{
    while (n) {
        uint64_t size;
        int line = size_line(p, n, &size);
        memcpy(to, p + line, (size_t)size);
        to += size, p += (size_t)line + size + 2, n -= (size_t)line + (size_t)size + 2;
    }
    return to;
}

static PyObject *chunks_unpack(PyObject *self, PyObject *data)
{
    char *p;
    Py_ssize_t n;
    size_t used = 0, total = 0;
    if (PyBytes_Check(data)) {
        if (PyBytes_AsStringAndSize(data, &p, &n) < 0)
            return NULL;
        if (between((Chunks *)self))
            used = whole_chunks(p, (size_t)n, &total);
    }
    PyObject *payload = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total);
    if (!payload)
        return NULL;
    if (!used)
        return Py_BuildValue("NO", payload, data);
    copy_payload(PyBytes_AsString(payload), p, used);
    return Py_BuildValue("Ny#", payload, p + used, n - (Py_ssize_t)used);
}

static PyObject *chunks_between(PyObject *self, void *closure)
{
    return PyBool_FromLong(between((Chunks *)self));
}

static void chunks_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* --- the way to a client --- */

typedef struct {
    PyObject_HEAD
    PyObject *write, *is_closing, *now, *note;
    PyObject *gaps;
    double last_at, said_at;
    char open, whole;
} Channel;

/* All of it as one chunk, as bytes; `payload` is where its payload begins. NULL for an error. */
static PyObject *one_chunk(Py_ssize_t total, const char *p, size_t n, char **payload)
{
    int digits = 1;
    for (Py_ssize_t rest = total >> 4; rest; rest >>= 4)
        digits++;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, digits + 2 + total + 2);
    if (!bytes)
        return NULL;
    char *to = PyBytes_AsString(bytes);
    for (int i = digits; i; i--)
        *to++ = "0123456789abcdef"[(total >> (4 * (i - 1))) & 15];
    *to++ = '\r', *to++ = '\n';
    *payload = to;
    to = copy_payload(to, p, n);
    to[0] = '\r', to[1] = '\n';
    return bytes;
}

static int begins(const char *p, const char *end, const char *mark, size_t n)
{
    return (size_t)(end - p) >= n && !memcmp(p, mark, n);
}

/* `data:` events in a payload of whole events; -1 where Python has to look: it ends within an
 * event, or holds what may be the end or an error. */
static Py_ssize_t events_in(const char *p, size_t n)
{
    const char *end = p + n, *at;
    if (!(n >= 2 && !memcmp(end - 2, "\n\n", 2)) && !(n >= 4 && !memcmp(end - 4, "\r\n\r\n", 4)))
        return -1;
    for (at = p; (at = memchr(at, '[', (size_t)(end - at))); at++)
        if (begins(at, end, "[DONE]", 6))
            return -1;
    for (at = p; (at = memchr(at, '{', (size_t)(end - at))); at++)
        if (begins(at, end, "{\"error\"", 8))
            return -1;
    Py_ssize_t events = begins(p, end, "data:", 5);
    for (at = p; (at = memchr(at, '\n', (size_t)(end - at))); at++)
        events += begins(at + 1, end, "data:", 5);
    return events;
}

static int tell(Channel *self)
{
    if (!self->gaps || !PyList_Size(self->gaps))
        return 0;
    PyObject *gaps = self->gaps;
    self->gaps = PyList_New(0);
    PyObject *result = NULL;
    if (self->gaps && self->note)
        result = PyObject_CallFunction(self->note, "Od", gaps, self->last_at);
    Py_DECREF(gaps);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static int count(Channel *self, Py_ssize_t events)
{
    PyObject *now = PyObject_CallNoArgs(self->now);
    if (!now)
        return -1;
    double at = PyFloat_AsDouble(now);
    Py_DECREF(now);
    if (at == -1.0 && PyErr_Occurred())
        return -1;
    PyObject *gap = PyFloat_FromDouble((at - self->last_at) / (double)events);
    if (!gap)
        return -1;
    self->last_at = at;
    for (; events; events--)
        if (PyList_Append(self->gaps, gap) < 0)
            break;
    Py_DECREF(gap);
    if (events)
        return -1;
    return PyList_Size(self->gaps) >= MOST_GAPS ? tell(self) : 0;
}

/* Whether the client can be written to: 1, 0, or -1 for an error. */
static int writable(Channel *self)
{
    PyObject *closing = PyObject_CallNoArgs(self->is_closing);
    if (!closing)
        return -1;
    int is = PyObject_IsTrue(closing);
    Py_DECREF(closing);
    return is < 0 ? -1 : !is;
}

static int write_out(Channel *self, Py_ssize_t events, PyObject *bytes)
{
    if (events && count(self, events) < 0)
        return -1;
    if (!self->write) /* who was told has closed it */
        return LEFT;
    PyObject *written = PyObject_CallFunctionObjArgs(self->write, bytes, NULL);
    Py_XDECREF(written);
    if (!written)
        return -1;
    return self->open ? TAKEN : SLOW;
}

static int take(Channel *self, Chunks *chunks, PyObject *data, double at)
{
    char *p, *payload;
    Py_ssize_t n;
    if (!self->open || !self->whole || !between(chunks) || !self->write || !PyBytes_Check(data))
        return LEFT;
    if (PyBytes_AsStringAndSize(data, &p, &n) < 0)
        return -1;
    size_t total;
    if (!n || whole_chunks(p, (size_t)n, &total) < (size_t)n)
        return LEFT;
    int can = writable(self);
    if (can <= 0)
        return can ? -1 : LEFT;
    PyObject *bytes = one_chunk((Py_ssize_t)total, p, (size_t)n, &payload);
    if (!bytes)
        return -1;
    int result = LEFT;
    Py_ssize_t events = events_in(payload, total);
    if (events >= 0) {
        self->said_at = at;
        result = write_out(self, events, bytes);
    }
    Py_DECREF(bytes);
    return result;
}

static PyObject *channel_take(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    PyObject **types = PyType_GetModuleState(Py_TYPE(self));
    if (!types)
        return NULL;
    if (n != 3 || Py_TYPE(args[0]) != (PyTypeObject *)*types) {
        PyErr_SetString(PyExc_TypeError, "take(chunks, data, at)");
        return NULL;
    }
    double at = PyFloat_AsDouble(args[2]);
    if (at == -1.0 && PyErr_Occurred())
        return NULL;
    Py_INCREF(self); /* writing may come back to us and let go of it */
    int result = take((Channel *)self, (Chunks *)args[0], args[1], at);
    Py_DECREF(self);
    return result < 0 ? NULL : PyLong_FromLong(result);
}

static int channel_clear(PyObject *object)
{
    Channel *self = (Channel *)object;
    Py_CLEAR(self->write);
    Py_CLEAR(self->is_closing);
    Py_CLEAR(self->now);
    Py_CLEAR(self->note);
    Py_CLEAR(self->gaps);
    return 0;
}

static int channel_traverse(PyObject *object, visitproc visit, void *arg)
{
    Channel *self = (Channel *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->write);
    Py_VISIT(self->is_closing);
    Py_VISIT(self->now);
    Py_VISIT(self->note);
    Py_VISIT(self->gaps);
    return 0;
}

static void channel_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    channel_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *channel_close(PyObject *object, PyObject *unused)
{
    Channel *self = (Channel *)object;
    self->open = 0;
    int result = tell(self);
    channel_clear(object);
    if (result < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *channel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *write, *is_closing, *now, *note;
    double last_at;
    static char *names[] = {"", "", "", "", "", NULL};
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOd", names, &write, &is_closing, &now, &note, &last_at))
        return NULL;
    Channel *self = (Channel *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
    self->write = Py_NewRef(write);
    self->is_closing = Py_NewRef(is_closing);
    self->now = Py_NewRef(now);
    self->note = Py_NewRef(note);
    self->gaps = PyList_New(0);
    self->last_at = last_at;
    self->open = self->whole = 1;
    if (!self->gaps) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* --- the module --- */

static PyMethodDef chunks_methods[] = {
    {"seen", chunks_seen, METH_O, NULL},
    {"unpack", chunks_unpack, METH_O, NULL},
    {0},
};
static PyGetSetDef chunks_fields[] = {{"between", chunks_between, NULL, NULL, NULL}, {0}};
static PyType_Slot chunks_slots[] = {
    {Py_tp_methods, chunks_methods},
    {Py_tp_getset, chunks_fields},
    {Py_tp_dealloc, chunks_dealloc},
    {0, NULL},
};
static PyType_Spec chunks_spec = {
    "gateway._events.Chunks", sizeof(Chunks), 0, Py_TPFLAGS_DEFAULT, chunks_slots};

static PyMethodDef channel_methods[] = {
    {"take", (PyCFunction)(void (*)(void))channel_take, METH_FASTCALL, NULL},
    {"close", channel_close, METH_NOARGS, NULL},
    {0},
};
static PyMemberDef channel_fields[] = {
    {"open", T_BOOL, offsetof(Channel, open), 0, NULL},
    {"whole", T_BOOL, offsetof(Channel, whole), 0, NULL},
    {"said_at", T_DOUBLE, offsetof(Channel, said_at), READONLY, NULL},
    {0},
};
static PyType_Slot channel_slots[] = {
    {Py_tp_new, channel_new},
    {Py_tp_methods, channel_methods},
    {Py_tp_members, channel_fields},
    {Py_tp_traverse, channel_traverse},
    {Py_tp_clear, channel_clear},
    {Py_tp_dealloc, channel_dealloc},
    {0, NULL},
};
static PyType_Spec channel_spec = {
    "gateway._events.Channel",
    sizeof(Channel),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    channel_slots,
};

static int module_exec(PyObject *module)
{
    PyObject **chunks = PyModule_GetState(module);
    *chunks = PyType_FromModuleAndSpec(module, &chunks_spec, NULL);
    if (!*chunks || PyModule_AddObjectRef(module, "Chunks", *chunks) < 0)
        return -1;
    PyObject *channel = PyType_FromModuleAndSpec(module, &channel_spec, NULL);
    int result = channel ? PyModule_AddObjectRef(module, "Channel", channel) : -1;
    Py_XDECREF(channel);
    return result;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    PyObject **chunks = PyModule_GetState(module);
    if (chunks)
        Py_VISIT(*chunks);
    return 0;
}

static int module_clear(PyObject *module)
{
    PyObject **chunks = PyModule_GetState(module);
    if (chunks)
        Py_CLEAR(*chunks);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, (void *)module_exec}, {0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "gateway._events",
    .m_size = sizeof(PyObject *),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__events(void)
{
    return PyModuleDef_Init(&module);
}
