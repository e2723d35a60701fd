/* The launch of a kernel: numbers go where the driver looks for them, and the driver is called.

   By `ctypes` that takes twenty microseconds in the middle of a forward. */

/* The driver's cuLaunchKernelEx, cuStreamWaitEvent and cuEventRecord. */
typedef int (*Start)(void *config, void *function, void **arguments, void **extra);
typedef int (*Follow)(void *stream, void *event, unsigned flags);
typedef int (*Mark)(void *event, void *stream);

static PyTypeObject LaunchType;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Start start;
    void *config, *function, **pointers;
    long long *room;      /* for the arguments, 64 bits each, and behind them how many programs, 32 bits */
    Py_ssize_t arguments; /* how many there are */
    PyObject *refused;    /* is told the driver's code, and how many programs */
    PyObject *memory;     /* that the addresses are in */
} Launch;

/* Read whole numbers, all of them before any is written. */
static int are_whole(PyObject *const *given, Py_ssize_t count, long long *numbers)
{
    for (Py_ssize_t i = 0; i < count; i++)
        if ((numbers[i] = PyLong_AsLongLong(given[i])) == -1 && PyErr_Occurred()) return 0;
    return 1;
}

/* Launch with these arguments, and as many programs as the last one says; 0 with an error set if that failed. */
static int launched(Launch *self, const long long *numbers)
{
    Py_ssize_t count = self->arguments;
    if (numbers[count] < 0 || numbers[count] > UINT32_MAX)
        return PyErr_Format(PyExc_OverflowError, "%lld programs cannot be launched", numbers[count]), 0;
    memcpy(self->room, numbers, (size_t)count * sizeof *numbers);
    *(uint32_t *)(self->room + count) = (uint32_t)numbers[count];
    int code = self->start(self->config, self->function, self->pointers, NULL);
    if (!code) return 1;
    PyObject *told = PyObject_CallFunction(self->refused, "iL", code, numbers[count]);
    Py_XDECREF(told);
    return told != NULL;
}

static int takes(Launch *self, Py_ssize_t count) /* so many numbers; with an error set if it does not */
{
    if (count == self->arguments + 1 && self->memory != NULL) return 1;
    PyErr_Format(PyExc_TypeError, "a launch takes %zd numbers, and how many programs", self->arguments);
    return 0;
}

static PyObject *Launch_call(PyObject *launch, PyObject *const *given, size_t many, PyObject *names)
{
    Launch *self = (Launch *)launch;
    Py_ssize_t count = PyVectorcall_NARGS(many);
    long long numbers[ARGUMENTS + 1];
    if (!takes(self, names == NULL ? count : -1) || !are_whole(given, count, numbers)) return NULL;
    return launched(self, numbers) ? Py_NewRef(Py_None) : NULL;
}

static int Launch_init(Launch *self, PyObject *args, PyObject *given)
{
    static char *names[] = {"start", "config", "function", "pointers", "room", "arguments", "refused", "memory", NULL};
    unsigned long long start, config, function, pointers, room;
    PyObject *refused, *memory;
    if (!PyArg_ParseTupleAndKeywords(args, given, "KKKKKnOO", names, &start, &config, &function, &pointers, &room,
                                     &self->arguments, &refused, &memory))
        return -1;
    if (self->arguments < 0 || self->arguments > ARGUMENTS)
        return PyErr_Format(PyExc_ValueError, "a kernel of %zd arguments is not known here", self->arguments), -1;
    self->call = Launch_call;
    self->start = (Start)(uintptr_t)start;
    self->config = (void *)(uintptr_t)config;
    self->function = (void *)(uintptr_t)function;
    self->pointers = (void **)(uintptr_t)pointers;
    self->room = (long long *)(uintptr_t)room;
    self->refused = Py_NewRef(refused);
    self->memory = Py_NewRef(memory);
    return 0;
}

static int Launch_traverse(Launch *self, visitproc visit, void *arg)
{
    Py_VISIT(self->refused);
    Py_VISIT(self->memory);
    return 0;
}

static int Launch_clear(Launch *self)
{
    Py_CLEAR(self->refused);
    Py_CLEAR(self->memory);
    return 0;
}

static PyMemberDef Launch_members[] = {{NULL}};
static PyMethodDef Launch_methods[] = {{NULL}};

static void *at(unsigned long long address) { return (void *)(uintptr_t)address; }

/* Fill a berth by a launch, once what was in it has left, and have another bring it to the host on the side stream. */
static PyObject *fly_on(PyObject *module, PyObject *args)
{
    PyObject *launch, *carry;
    unsigned long long follow, mark, stream, side, filled, left;
    long long fill[5] = {0}, bring[4];
    if (!PyArg_ParseTuple(args, "O!LLLO!LL(KKKKKKLL)", &LaunchType, &launch, &fill[2], &fill[3], &fill[4], &LaunchType,
                          &carry, &bring[1], &bring[2], &follow, &mark, &stream, &side, &filled, &left, &bring[0],
                          &bring[3]) ||
        !takes((Launch *)launch, 5) || !takes((Launch *)carry, 4))
        return NULL;
    bring[2] /= LINE;
    int code = ((Follow)at(follow))(at(stream), at(left), 0);
    if (!code && !launched((Launch *)launch, fill)) return NULL;
    if (!code) code = ((Mark)at(mark))(at(filled), at(stream));
    if (!code) code = ((Follow)at(follow))(at(side), at(filled), 0);
    if (!code && !launched((Launch *)carry, bring)) return NULL;
    if (!code) code = ((Mark)at(mark))(at(left), at(side));
    if (code)
        return PyErr_Format(PyExc_RuntimeError, "the driver refused to go on beside the model: CUDA error %d", code);
    Py_RETURN_NONE;
}
