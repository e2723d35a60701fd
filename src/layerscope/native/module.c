/* The types and functions that Python sees. */

#define DEALLOC(Name)                             \
    static void Name##_dealloc(Name *self)        \
    {                                             \
        PyObject_GC_UnTrack(self);                \
        Name##_clear(self);                       \
        Py_TYPE(self)->tp_free((PyObject *)self); \
    }
DEALLOC(Basket)
DEALLOC(Pass)
DEALLOC(Held)
DEALLOC(Gate)
DEALLOC(Door)
DEALLOC(Way)
DEALLOC(Launch)

/* Made whole, or not at all, and once: `__new__` by itself leaves none half made, a second `__init__` changes nothing.
 */
#define NEW(Name)                                                                    \
    static PyObject *Name##_new(PyTypeObject *type, PyObject *args, PyObject *given) \
    {                                                                                \
        Name *self = (Name *)type->tp_alloc(type, 0);                                \
        if (self != NULL && Name##_init(self, args, given) < 0) Py_CLEAR(self);      \
        return (PyObject *)self;                                                     \
    }
NEW(Basket)
NEW(Pass)
NEW(Gate)
NEW(Way)
NEW(Launch)

#define TYPE(Name, doc, flags, ...)                                                                       \
    static PyTypeObject Name##Type = {PyVarObject_HEAD_INIT(NULL, 0).tp_name = "layerscope_gates." #Name, \
                                      .tp_basicsize = sizeof(Name),                                       \
                                      .tp_doc = doc,                                                      \
                                      .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | flags,        \
                                      .tp_dealloc = (destructor)Name##_dealloc,                           \
                                      .tp_traverse = (traverseproc)Name##_traverse,                       \
                                      .tp_clear = (inquiry)Name##_clear,                                  \
                                      .tp_members = Name##_members,                                       \
                                      __VA_ARGS__}
#define MADE(Name) .tp_new = Name##_new, .tp_methods = Name##_methods
TYPE(Basket, "What waits, of one step of one thread.", 0, MADE(Basket));
TYPE(Pass, "What is known of one point.", 0, MADE(Pass));
TYPE(Held, "A tensor that waits.", 0, .tp_new = NULL);
TYPE(Gate, "What torch calls in a hook's place: it lets the usual calls pass.", Py_TPFLAGS_HAVE_VECTORCALL, MADE(Gate),
     .tp_call = PyVectorcall_Call, .tp_vectorcall_offset = offsetof(Gate, call));
TYPE(Door, "What torch calls in a module's place, where a gate is its only hook.", 0, .tp_methods = Door_methods,
     .tp_call = (ternaryfunc)Door_call, .tp_as_number = &Door_number);
TYPE(Way, "How all of one kind and dtype are taken in one launch.", 0, MADE(Way));
TYPE(Launch, "A kernel's launch on a stream: takes its numbers, and how many programs run it.",
     Py_TPFLAGS_HAVE_VECTORCALL, MADE(Launch), .tp_call = PyVectorcall_Call,
     .tp_vectorcall_offset = offsetof(Launch, call));

/* Find the functions in C behind what torch shows of a tensor. */
static int are_found(PyObject *version, PyObject *negative)
{
    int fine = Py_IS_TYPE(version, &PyGetSetDescr_Type) && Py_IS_TYPE(negative, &PyMethodDescr_Type) &&
               ((PyMethodDescrObject *)negative)->d_method->ml_flags == METH_NOARGS;
    if (!fine) return PyErr_SetString(PyExc_ImportError, "torch tells of a tensor in another way"), 0;
    get_version = ((PyGetSetDescrObject *)version)->d_getset->get;
    get_version_of = ((PyGetSetDescrObject *)version)->d_getset->closure;
    is_negative = ((PyMethodDescrObject *)negative)->d_method->ml_meth;
    return 1;
}

static PyObject *prepare(PyObject *module, PyObject *args)
{
    PyObject *tensor, *exchange, *version, *negative, *stream, *count, *spelt, *hooks, *code, *call, *raised, *door;
    unsigned long long task, modes, tracing;
    if (!PyArg_ParseTuple(args, "OOOOKKKOOOO!OOOO", &tensor, &exchange, &version, &negative, &task, &modes, &tracing,
                          &stream, &count, &spelt, &PyTuple_Type, &hooks, &code, &call, &raised, &door))
        return NULL;
    const DLPackExchangeAPI *known = PyCapsule_GetPointer(exchange, "dlpack_exchange_api");
    if (known == NULL || !are_found(version, negative)) return NULL;
    if (known->header.version.major != DLPACK_MAJOR_VERSION || known->dltensor_from_py_object_no_sync == NULL)
        return PyErr_Format(PyExc_ImportError, "torch speaks DLPack %u", known->header.version.major);
    graph_task = (int (*)(void))(uintptr_t)task;
    has_modes = (_Bool(*)(void))(uintptr_t)modes;
    tracing_state = (void *const *(*)(void))(uintptr_t)tracing;
    torch_says = known;
    /* What a compiler reads: it would not know what to do with a call in C. Nobody else calls these. */
    if (PyDict_SetItemString(GateType.tp_dict, "__call__", spelt) < 0 ||
        PyDict_SetItemString(DoorType.tp_dict, "__call__", door) < 0)
        return NULL;
    PyType_Modified(&GateType);
    PyType_Modified(&DoorType);
    Py_XSETREF(tensor_type, Py_NewRef(tensor));
    Py_XSETREF(raw_stream, Py_NewRef(stream));
    Py_XSETREF(count_type, Py_NewRef(count));
    Py_XSETREF(global_hooks, Py_NewRef(hooks));
    Py_XSETREF(call_code, Py_NewRef(code));
    Py_XSETREF(torchs_call, Py_NewRef(call));
    Py_XSETREF(hook_raised, Py_NewRef(raised));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"prepare", prepare, METH_VARARGS,
     "Tell what torch and Python call a tensor, its exchange with others, its version and whether it is negated; where "
     "torch tells the backward pass, the modes and the trace of a thread; the current stream, a counter, and what a "
     "gate does, in Python; for doors, the hooks of all modules, the code that calls a module and the function that it "
     "calls, what stands for the value of one that raised, and what a door does, in Python."},
    {"sorted", sorted, METH_VARARGS,
     "Sort what waits: by (kind, dtype) where it lies plainly on a device, odd, changed."},
    {"room_for", room_for, METH_VARARGS,
     "Return the bytes that the entries of these take for `ferried`, those of their copies, and of the largest one."},
    {"ferried", ferried, METH_VARARGS,
     "Write where these lie and go to, for one kernel; return the largest's bytes. Their places are counted from the "
     "entries on, as if the copies came behind them."},
    {"fly_on", fly_on, METH_VARARGS,
     "Launch the kernel of `ferried` into a berth, once that is empty, and another that brings what is there to the "
     "host beside the model: the launch, where the entries are, programs to each and in all; the other, where to, how "
     "many bytes; the berth."},
    {"release", release, METH_O, "Let go of the tensors."},
    {NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "layerscope_gates", .m_size = -1,
                                        .m_methods = functions};

PyMODINIT_FUNC PyInit_layerscope_gates(void)
{
    static const struct {
        PyObject **to;
        const char *name;
    } names[] = {{&s_calls, "calls"},
                 {&s_at, "at"},
                 {&s_moments, "moments"},
                 {&s_dtype, "dtype"},
                 {&s_requests, "requests"},
                 {&s_page, "page"},
                 {&s_aboard, "aboard"},
                 {&s_over, "over"},
                 {&s_table, "table"},
                 {&s_acquire, "acquire"},
                 {&s_release, "release"},
                 {&s_failed, "failed"},
                 {&s_deepcopy, "__deepcopy__"},
                 {&s_reduce, "__reduce__"},
                 {&s_late, "late"},
                 {&s_repeats, "repeats"},
                 {&s_forward, "forward"},
                 {&s_call_impl, "_call_impl"},
                 {&s_forward_hooks, "_forward_hooks"},
                 {&s_forward_pre_hooks, "_forward_pre_hooks"},
                 {&s_backward_hooks, "_backward_hooks"},
                 {&s_backward_pre_hooks, "_backward_pre_hooks"}};
    static PyTypeObject *const types[] = {&BasketType, &PassType, &HeldType,  &GateType,
                                          &DoorType,   &WayType,  &LaunchType};
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((*names[i].to = PyUnicode_InternFromString(names[i].name)) == NULL) return NULL;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (PyModule_AddType(module, types[i]) < 0) return NULL;
    return module;
}
