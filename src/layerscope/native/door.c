/* The door: what torch calls in a module's place, where a gate at its end is the only hook there is.

   Around a module with a hook, torch goes a way in Python that takes longer than the gate. Where a call will most
   likely pass, the door has the forward called by itself and looks at what came of it. Every other call goes torch's
   way. */

typedef struct {
    PyObject_HEAD
    Gate *gate;
} Door;

static PyTypeObject DoorType;

static PyObject *Gate_door(Gate *self, PyObject *none)
{
    if (self->kind->passes != ends)
        return PyErr_Format(PyExc_ValueError, "only a gate that sees calls end by itself has a door, not %s",
                            self->kind->name);
    Door *door = (Door *)DoorType.tp_alloc(&DoorType, 0);
    if (door != NULL) door->gate = (Gate *)Py_NewRef((PyObject *)self);
    return (PyObject *)door;
}

static int Door_traverse(Door *self, visitproc visit, void *arg)
{
    Py_VISIT(self->gate);
    return 0;
}

static int Door_clear(Door *self)
{
    Py_CLEAR(self->gate);
    return 0;
}

/* Return the module that is called, borrowed from torch's frame; NULL if that is not who calls. It need not be the one
   that the door was made for: what was copied of that, such as `DataParallel`'s replicas, has the same door. */
static PyObject *called_module(void)
{
#if PY_VERSION_HEX >= 0x030B0000
    struct _PyInterpreterFrame *here = FRAME(PyThreadState_Get());
    while (here != NULL && _PyFrame_IsIncomplete(here)) here = here->previous;
    return here != NULL && CODE(here) == call_code ? here->localsplus[0] : NULL;
#else
    PyFrameObject *here = PyThreadState_Get()->frame;
    return here != NULL && (PyObject *)here->f_code == call_code ? here->f_localsplus[0] : NULL;
#endif
}

static PyObject *dict_of(PyObject *own, PyObject *name) /* among a module's own attributes; NULL if there is none */
{
    PyObject *found = PyDict_GetItemWithError(own, name);
    return found != NULL && PyDict_Check(found) ? found : NULL;
}

/* Find that the gate is the only hook that torch calls once a forward of its module is over, and nobody has put
   something else in torch's place on the module; remember where its other hooks would be. */
static int is_found_alone(Gate *gate, PyObject *own)
{
    static PyObject **const names[] = {&s_forward_pre_hooks, &s_backward_hooks, &s_backward_pre_hooks};
    PyObject *hooks = dict_of(own, s_forward_hooks), *key, *hook = NULL;
    Py_ssize_t at = 0;
    gate->own_version = 0;
    if (hooks == NULL || PyDict_GET_SIZE(hooks) != 1 || PyDict_GetItemWithError(own, s_call_impl) != NULL) return 0;
    PyDict_Next(hooks, &at, &key, &hook);
    if (hook != (PyObject *)gate) return 0;
    for (int i = 0; i < OTHERS; i++)
        if ((gate->others[i] = dict_of(own, *names[i])) == NULL) return 0;
    gate->hooks = hooks;
    gate->hooks_version = version_of(hooks);
    gate->own_version = version_of(own);
    return 1;
}

/* Whether it is. To look there again is to look far: a dict that has the version it had holds what it held. */
static int is_alone(Gate *gate)
{
    PyObject *own = PyObject_GenericGetDict(gate->module, NULL);
    if (own == NULL) return 0;
    int is_as_it_was =
        gate->own_version && gate->own_version == version_of(own) && gate->hooks_version == version_of(gate->hooks);
    int is = is_as_it_was || is_found_alone(gate, own);
    Py_DECREF(own); /* the module has it */
    return is;
}

/* Whether the gate is all that torch would call around a forward that begins now. */
static int is_only_hook(Gate *gate)
{
    if (_PyType_Lookup(Py_TYPE(gate->module), s_call_impl) != torchs_call) return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(global_hooks); i++)
        if (PyDict_GET_SIZE(PyTuple_GET_ITEM(global_hooks, i))) return 0;
    if (!is_alone(gate)) return 0;
    for (int i = 0; i < OTHERS; i++)
        if (PyDict_GET_SIZE(gate->others[i])) return 0;
    return 1;
}

/* Whether it is all that torch would call now that the forward is over, which may have registered hooks. Those of other
   kinds are for the next call. */
static int is_still_only_hook(Gate *gate)
{
    return !PyDict_GET_SIZE(PyTuple_GET_ITEM(global_hooks, AFTER)) && is_alone(gate);
}

/* Whether a call that begins now will most likely pass. Of one inside another of the same module the hook hears first:
   calls are numbered as they begin, and it may have to see that from now on. */
static int is_likely(Gate *gate)
{
    if (!gate->passes || gate->closed || !is_open(gate->basket) || !is_only_hook(gate) || *tracing_state()) return 0;
    if (gate->under_way) {
        tell_number(gate);
        if (forgiven()) Py_XDECREF(PyObject_CallMethodNoArgs(gate->hook, s_repeats));
        return forgiven() && !gate->closed;
    }
    return 1;
}

/* Have the hooks called that torch would call now; `value` is NULL, with an error set, if the forward raised. */
static PyObject *late(Gate *gate, PyObject *args, PyObject *kwargs, PyObject *value)
{
    PyObject *kind = NULL, *error = NULL, *trace = NULL, *said = NULL;
    if (value == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
        PyErr_Fetch(&kind, &error, &trace);
    }
    tell_number(gate);
    if (forgiven()) {
        PyObject *given[] = {gate->hook, gate->module, args, kwargs, value == NULL ? hook_raised : value};
        said = PyObject_VectorcallMethod(s_late, given, 5, NULL);
    }
    if (value == NULL && (said != NULL || PyErr_ExceptionMatches(PyExc_Exception))) {
        Py_XDECREF(said);
        PyErr_Restore(kind, error, trace); /* what the forward raised is what counts, but for an interrupt */
        return NULL;
    }
    Py_XDECREF(kind);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return said;
}

/* Call the forward, and see what it returns. */
static PyObject *go_through(Gate *gate, PyObject *args, PyObject *kwargs)
{
    PyObject *forward = PyObject_GetAttr(gate->module, s_forward);
    if (forward == NULL) return NULL;
    gate->under_way++;
    PyObject *value = PyObject_Call(forward, args, kwargs), *said = NULL;
    gate->under_way--;
    Py_DECREF(forward);
    PyObject *const given[] = {gate->module, args, kwargs, value};
    int passed =
        value != NULL && is_still_only_hook(gate) && is_passable(gate) ? end_of(gate, given, gate->away - TORCHS) : 0;
    if (passed == 1) return value;
    gate->passes = 0;
    if (passed == -1 && PyErr_Occurred()) {
        said = failed(gate);
        if (said != NULL) Py_SETREF(said, Py_NewRef(value));
    } else if (value == NULL || forgiven()) {
        said = late(gate, args, kwargs, value);
    }
    Py_XDECREF(value);
    return said;
}

static PyObject *Door_call(Door *self, PyObject *args, PyObject *kwargs)
{
    PyObject *module = called_module(), *none = NULL, *value = NULL;
    Gate *gate = (Gate *)Py_XNewRef((PyObject *)self->gate);
    if (module == NULL && gate != NULL) module = gate->module;
    if (module == NULL || (kwargs == NULL && (kwargs = none = PyDict_New()) == NULL)) {
        if (module == NULL) PyErr_SetString(PyExc_ReferenceError, "its module is gone");
    } else if (gate != NULL && module == gate->module && is_likely(gate)) {
        value = go_through(gate, args, kwargs);
    } else if (forgiven()) {
        PyObject *way = PyObject_GetAttr(module, s_call_impl);
        if (way != NULL) value = PyObject_Call(way, args, kwargs);
        Py_XDECREF(way);
    }
    Py_XDECREF(none);
    Py_XDECREF((PyObject *)gate);
    return value;
}

/* False, for it is nothing that was compiled. */
static int Door_is(PyObject *self) { return 0; }

static PyNumberMethods Door_number = {.nb_bool = Door_is};

static PyObject *Door_deepcopy(Door *self, PyObject *memo) { Py_RETURN_NONE; }

static PyObject *Door_reduce(Door *self, PyObject *none) { return Py_BuildValue("O()", Py_TYPE(Py_None)); }

static PyObject *Door_close(Door *self, PyObject *none)
{
    Door_clear(self);
    Py_RETURN_NONE;
}

static PyMethodDef Door_methods[] = {
    {"close", (PyCFunction)Door_close, METH_NOARGS, "Let go of the gate: every call goes torch's way from now on."},
    {"__deepcopy__", (PyCFunction)Door_deepcopy, METH_O, "Be None in a copy: torch goes its own way then."},
    {"__reduce__", (PyCFunction)Door_reduce, METH_NOARGS, "Be None where it is loaded again."},
    {NULL}};

static PyMemberDef Door_members[] = {{"gate", T_OBJECT, offsetof(Door, gate), READONLY, "at the end of the calls"},
                                     {NULL}};
