/* The gate. */

/* Find the tensors of a value, where it is made as expected: a pass stands for a tensor, a type for anything of exactly
   that type, and (type, keys, children) for a tuple, list or dict of as many children. */
static int match(PyObject *expected, PyObject *value, Part *parts, int *count)
{
    if (Py_IS_TYPE(expected, &PassType)) {
        if ((PyObject *)Py_TYPE(value) != tensor_type || *count == PARTS) return 0;
        if (!may_wait((Pass *)expected, value, &parts[*count])) return 0;
        Py_INCREF(expected);
        Py_INCREF(value);
        ++*count;
        return 1;
    }
    if (PyType_Check(expected)) return (PyObject *)Py_TYPE(value) == expected;
    if (!PyTuple_CheckExact(expected) || PyTuple_GET_SIZE(expected) != 3) return 0;
    if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(expected, 0)) return 0;
    PyObject *keys = PyTuple_GET_ITEM(expected, 1), *children = PyTuple_GET_ITEM(expected, 2);
    if (!PyTuple_CheckExact(keys) || !PyTuple_CheckExact(children)) return 0;
    Py_ssize_t size = PyTuple_GET_SIZE(children);
    if (PyDict_CheckExact(value)) {
        if (PyDict_GET_SIZE(value) != size || PyTuple_GET_SIZE(keys) != size) return 0;
        PyObject *key, *child;
        Py_ssize_t at = 0;
        for (Py_ssize_t i = 0; PyDict_Next(value, &at, &key, &child); i++) {
            PyObject *known = PyTuple_GET_ITEM(keys, i);
            if (key != known &&
                !(PyUnicode_CheckExact(key) && PyUnicode_CheckExact(known) && PyUnicode_Compare(key, known) == 0))
                return 0;
            if (!match(PyTuple_GET_ITEM(children, i), child, parts, count)) return 0;
        }
        return 1;
    }
    PyObject **items;
    if (PyTuple_CheckExact(value) && PyTuple_GET_SIZE(value) == size)
        items = ((PyTupleObject *)value)->ob_item;
    else if (PyList_CheckExact(value) && PyList_GET_SIZE(value) == size)
        items = ((PyListObject *)value)->ob_item;
    else
        return 0;
    for (Py_ssize_t i = 0; i < size; i++)
        if (!match(PyTuple_GET_ITEM(children, i), items[i], parts, count)) return 0;
    return 1;
}

static int begins(Gate *, PyObject *const *), finishes(Gate *, PyObject *const *), ends(Gate *, PyObject *const *);

static const struct Kind {
    const char *name;
    int (*passes)(Gate *, PyObject *const *); /* whether a usual call does: 0 if not, -1 if it could not be finished */
    Py_ssize_t given;                         /* to the hook: module, args, kwargs, and the value at the end */
} kinds[] = {{"begin", begins, 3}, {"finish", finishes, 4}, {"end", ends, 4}};

static PyObject *Gate_call(PyObject *, PyObject *const *, size_t, PyObject *);

static int Gate_init(Gate *self, PyObject *args, PyObject *given)
{
    static char *names[] = {"basket", "kind", "hook", "module", "name", "local", NULL};
    const char *kind;
    PyObject *basket, *hook, *module, *name, *local;
    if (!PyArg_ParseTupleAndKeywords(args, given, "O!sOOOO", names, &BasketType, &basket, &kind, &hook, &module, &name,
                                     &local))
        return -1;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strcmp(kind, kinds[i].name) == 0) self->kind = &kinds[i];
    if (self->kind == NULL) return PyErr_Format(PyExc_ValueError, "there is no gate called %s", kind), -1;
    self->call = Gate_call;
    Py_XSETREF(self->hook, Py_NewRef(hook));
    Py_XSETREF(self->basket, (Basket *)Py_NewRef(basket));
    Py_XSETREF(self->module, Py_NewRef(module));
    Py_XSETREF(self->name, Py_NewRef(name));
    Py_XSETREF(self->local, Py_NewRef(local));
    return 0;
}

static int Gate_traverse(Gate *self, visitproc visit, void *arg)
{
    Py_VISIT(self->hook);
    Py_VISIT(self->basket);
    Py_VISIT(self->module);
    Py_VISIT(self->name);
    Py_VISIT(self->local);
    Py_VISIT(self->value);
    Py_VISIT(self->args);
    Py_VISIT(self->kwargs);
    return 0;
}

static int Gate_clear(Gate *self)
{
    self->closed = 1;
    Py_CLEAR(self->hook);
    Py_CLEAR(self->basket);
    Py_CLEAR(self->module);
    Py_CLEAR(self->name);
    Py_CLEAR(self->local);
    Py_CLEAR(self->value);
    Py_CLEAR(self->args);
    Py_CLEAR(self->kwargs);
    return 0;
}

/* Whether calls of this thread's step pass here at all: nobody changes what torch's functions do. */
static int is_passable(Gate *self)
{
    return !self->closed && is_open(self->basket) && !has_modes();
}

/* Return the calls under way, if the innermost is of the step; borrowed from the basket. */
static PyObject *calls_of(Gate *self, Py_ssize_t least)
{
    Basket *basket = self->basket;
    if (basket->under_way == NULL) basket->under_way = PyObject_GetAttr(self->local, s_calls);
    PyObject *calls = basket->under_way;
    if (calls == NULL || !PyList_Check(calls) || PyList_GET_SIZE(calls) < least) return NULL;
    PyObject *call = PyList_GET_ITEM(calls, PyList_GET_SIZE(calls) - 1);
    return PyTuple_CheckExact(call) && PyTuple_GET_SIZE(call) == 5 && PyTuple_GET_ITEM(call, 1) == basket->step ? calls
                                                                                                                : NULL;
}

static PyObject *innermost(PyObject *calls) { return PyList_GET_ITEM(calls, PyList_GET_SIZE(calls) - 1); }

/* Whether the call is made by the innermost one under way: an interrupt may have ended that one without a word. Where a
   backward pass repeats a call, there are frames of that in between. */
static int is_inside(Gate *self, PyObject *calls, long away)
{
    if (!is_frame(PyTuple_GET_ITEM(innermost(calls), 3), away)) return 0;
    return self->away <= DIRECTLY || graph_task() == -1;
}

/* Count where the hooks count, from a number on. */
static PyObject *counter_from(Gate *self, long long number)
{
    PyObject *calls = Py_NewRef(self->basket->calls), *counter = PyObject_CallFunction(count_type, "L", number);
    if (counter != NULL && PyDict_SetItem(calls, self->name, counter) < 0) Py_CLEAR(counter);
    Py_DECREF(calls);
    return counter;
}

/* Return the number of this call within the step. The gate counts by itself as long as no hook has, which is quicker.
 */
static PyObject *next_number(Gate *self)
{
    Basket *basket = self->basket;
    if (self->step == basket->number && self->counted) return PyLong_FromLongLong(self->counted++);
    PyObject *counter = PyDict_GetItemWithError(basket->calls, self->name), *number;
    if (counter != NULL) return PyIter_Check(counter) ? PyIter_Next(counter) : NULL;
    if (PyErr_Occurred()) return NULL;
    if (basket->alone) {
        self->step = basket->number;
        self->counted = 1;
        return PyLong_FromLong(0);
    }
    if ((counter = counter_from(self, 0)) == NULL) return NULL;
    number = PyIter_Next(counter);
    Py_DECREF(counter);
    return number;
}

/* Tell the hooks what the gate has counted, before one of them sees a call. */
static void tell_number(Gate *self)
{
    Basket *basket = self->basket;
    if (basket->step != NULL && self->step == basket->number && self->counted) {
        Py_XDECREF(counter_from(self, self->counted));
        self->counted = 0;
    }
}

/* Make all that can fail before anything is changed: an inference tensor counts no changes. */
static int ready(Gate *self, Part *parts, int count)
{
    if (count && !is_on_stream(self->basket)) return 0;
    for (int i = 0; i < count; i++) {
        Part *part = &parts[i];
        part->held = made(part->pass, part->tensor, part->lying);
        if (part->held == NULL) return 0;
    }
    return is_open(self->basket); /* to make them may have run the collector, and that anybody's Python */
}

/* Hold all tensors of a value; -1 with an error set if that could not be finished. */
static int hold_all(Gate *self, Part *parts, int count, PyObject *number)
{
    if (!count) return 1;
    if (self->basket->step == NULL) return -1; /* to count may have run the collector as well: see `ready` */
    PyObject *moment = moment_of(self->basket, number);
    int fine = moment != NULL;
    for (int i = 0; fine && i < count; i++) fine = hold(self->basket, &parts[i], moment);
    Py_XDECREF(moment);
    return fine && make_room(self->basket) ? 1 : -1;
}

static void forget(Part *parts, int count)
{
    for (int i = 0; i < count; i++) {
        Py_DECREF(parts[i].pass);
        Py_DECREF(parts[i].tensor);
        Py_XDECREF(parts[i].held);
    }
}

/* Have the hook say what went wrong, unless it was an interrupt. */
static PyObject *failed(Gate *self)
{
    PyObject *kind, *error, *trace;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    PyObject *said = PyObject_CallMethodOneArg(self->hook, s_failed, error == NULL ? Py_None : error);
    Py_XDECREF(kind);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return said;
}

static PyObject *Gate_call(PyObject *self, PyObject *const *given, size_t many, PyObject *names)
{
    Gate *gate = (Gate *)self;
    int usual = names == NULL && PyVectorcall_NARGS(many) == gate->kind->given && given[0] == gate->module;
    int passed = usual && is_passable(gate) ? gate->kind->passes(gate, given) : 0;
    gate->passes = passed == 1;
    if (passed == 1 || gate->hook == NULL) Py_RETURN_NONE; /* it has none in the middle of being collected */
    if (passed == -1 && PyErr_Occurred()) return failed(gate);
    if (!forgiven()) return NULL;
    if (!passed) tell_number(gate);
    return forgiven() ? PyObject_Vectorcall(gate->hook, given, many, names) : NULL;
}

static int begins(Gate *self, PyObject *const *given)
{
    Part parts[PARTS];
    int count = 0;
    if (!self->blind) {
        if (self->args == NULL || self->kwargs == NULL) return 0;
        if (!match(self->args, given[1], parts, &count) || !match(self->kwargs, given[2], parts, &count))
            return forget(parts, count), 0;
    }
    PyObject *calls = calls_of(self, 1), *frame = NULL, *step = NULL, *number = NULL, *call = NULL;
    int passed = 0;
    if (calls != NULL && is_inside(self, calls, self->away) &&
        (frame = Py_XNewRef((PyObject *)PyEval_GetFrame())) != NULL && ready(self, parts, count) &&
        (number = next_number(self)) != NULL) {
        step = Py_XNewRef(self->basket->step);
        if (step != NULL) call = PyTuple_Pack(5, self->name, step, number, frame, Py_None);
        passed = call != NULL && PyList_Append(calls, call) == 0 ? 1 : -1;
        if (passed == 1) passed = hold_all(self, parts, count, number);
    }
    Py_XDECREF(step);
    Py_XDECREF(frame);
    Py_XDECREF(number);
    Py_XDECREF(call);
    forget(parts, count);
    return passed;
}

static int finishes(Gate *self, PyObject *const *given)
{
    Part parts[PARTS];
    int count = 0;
    if (given[3] == Py_None) return 0;   /* it may have raised */
    PyObject *calls = calls_of(self, 2); /* the outermost is for the hook: with it the step ends */
    if (calls == NULL || PyTuple_GET_ITEM(innermost(calls), 0) != self->name ||
        PyTuple_GET_ITEM(innermost(calls), 4) != Py_None || !is_frame(PyTuple_GET_ITEM(innermost(calls), 3), 0))
        return 0;
    if (!self->blind && (self->value == NULL || !match(self->value, given[3], parts, &count)))
        return forget(parts, count), 0;
    int passed = 0;
    if (ready(self, parts, count)) {
        Py_ssize_t size = PyList_GET_SIZE(calls);
        PyObject *call = Py_NewRef(innermost(calls));
        passed = PyList_SetSlice(calls, size - 1, size, NULL) == 0 ? 1 : -1;
        if (passed == 1) passed = hold_all(self, parts, count, PyTuple_GET_ITEM(call, 2));
        Py_DECREF(call);
    }
    forget(parts, count);
    return passed;
}

/* See the end of a call that is so many frames away from the outer one. */
static int end_of(Gate *self, PyObject *const *given, long away)
{
    Part parts[PARTS];
    int count = 0;
    if (given[3] == Py_None) return 0;
    if (self->value == NULL || !match(self->value, given[3], parts, &count)) return forget(parts, count), 0;
    PyObject *calls = calls_of(self, 1), *number = NULL;
    int passed = 0;
    if (calls != NULL && is_inside(self, calls, away) && ready(self, parts, count) &&
        (number = next_number(self)) != NULL)
        passed = hold_all(self, parts, count, number);
    Py_XDECREF(number);
    forget(parts, count);
    return passed;
}

static int ends(Gate *self, PyObject *const *given) { return end_of(self, given, self->away); }

static PyObject *Gate_close(Gate *self, PyObject *none)
{
    self->closed = 1;
    Py_RETURN_NONE;
}

static PyObject *Gate_deepcopy(Gate *self, PyObject *memo)
{
    return self->hook == NULL ? Py_NewRef(Py_None) : PyObject_CallMethodOneArg(self->hook, s_deepcopy, memo);
}

static PyObject *Gate_reduce(Gate *self, PyObject *none)
{
    if (self->hook == NULL) return PyErr_Format(PyExc_ReferenceError, "its hook is gone");
    return PyObject_CallMethodNoArgs(self->hook, s_reduce);
}

static PyObject *Gate_door(Gate *, PyObject *);

static PyMethodDef Gate_methods[] = {
    {"door", (PyCFunction)Gate_door, METH_NOARGS, "Return what torch may call in the module's place."},
    {"close", (PyCFunction)Gate_close, METH_NOARGS, "Let nothing pass any more."},
    {"__deepcopy__", (PyCFunction)Gate_deepcopy, METH_O, "Be copied as the hook is."},
    {"__reduce__", (PyCFunction)Gate_reduce, METH_NOARGS, "Be pickled as the hook is."},
    {NULL}};

static PyMemberDef Gate_members[] = {
    {"hook", T_OBJECT, offsetof(Gate, hook), READONLY, "what is called where nothing passes"},
    {"module", T_OBJECT, offsetof(Gate, module), READONLY, "whose calls these are"},
    {"value", T_OBJECT, offsetof(Gate, value), 0,
     "what a value is expected to be made of, None of one that is not known"},
    {"args", T_OBJECT, offsetof(Gate, args), 0, "what arguments are expected to be made of"},
    {"kwargs", T_OBJECT, offsetof(Gate, kwargs), 0, "and those with names"},
    {"blind", T_INT, offsetof(Gate, blind), 0, "whether nothing is wanted of the calls that pass"},
    {"away", T_LONG, offsetof(Gate, away), 0, "frames from torch's own to the one that makes the outer call"},
    {NULL}};
