/* The gate. */

/* Find the tensors of a value, where it is made as expected: a pass stands for a tensor, a type for anything of exactly
   that type, and (type, keys, children) for a tuple, list or dict of as many children. */
static int match(PyObject *expected, PyObject *value, Part *parts, int *count)
{
    if (Py_IS_TYPE(expected, &PassType)) {
        if ((PyObject *)Py_TYPE(value) != tensor_type || *count == PARTS) return 0;
        Size *size = size_of((Pass *)expected, value);
        if (size == NULL) return 0;
        parts[(*count)++] = (Part){(Pass *)Py_NewRef(expected), Py_NewRef(value), size, NULL};
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

static int Gate_init(Gate *self, PyObject *args, PyObject *given)
{
    static char *names[] = {"basket", "module", "name", "local", NULL};
    PyObject *basket, *module, *name, *local;
    if (!PyArg_ParseTupleAndKeywords(args, given, "O!OOO", names, &BasketType, &basket, &module, &name, &local))
        return -1;
    Py_XSETREF(self->basket, (Basket *)Py_NewRef(basket));
    Py_XSETREF(self->module, Py_NewRef(module));
    Py_XSETREF(self->name, Py_NewRef(name));
    Py_XSETREF(self->local, Py_NewRef(local));
    return 0;
}

static int Gate_traverse(Gate *self, visitproc visit, void *arg)
{
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
    if (!is_open(self->basket)) return 0;
    PyObject *modes = PyObject_CallNoArgs(has_modes);
    Py_XDECREF(modes);
    return modes == Py_False; /* which lives for ever */
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

/* Take down how deep a call is: as its hooks are, or what amounts to the same. */
static void nest(Basket *basket, PyObject *call, Depth depth)
{
    if (basket->nesting == NESTED) return;
    basket->nested[basket->nesting].call = Py_NewRef(call);
    basket->nested[basket->nesting++].depth = depth;
}

static int nested_at(Basket *basket, PyObject *call) /* -1 if it is not known how deep it is */
{
    int at = basket->nesting - 1;
    while (at >= 0 && basket->nested[at].call != call) at--;
    return at;
}

static Depth depth_now(void) { return (Depth){DEPTH(PyThreadState_Get()), (intptr_t)__builtin_frame_address(0)}; }

static Depth less(Depth a, Depth b) { return (Depth){a.python - b.python, a.c - b.c}; }

static int same(Depth a, Depth b) { return a.python == b.python && a.c == b.c; }

/* Whether the call is made by the innermost one under way, and not by a backward pass that repeats it. Its frame tells,
   which takes long to find: where it was found before, to be as much deeper as then will do, in Python and in C. An
   interrupt may have ended that call without a word, and whatever is called next is hardly as deep in both. */
static int is_inside(Gate *self, PyObject *calls, Depth depth)
{
    Basket *basket = self->basket;
    PyObject *call = Py_NewRef(innermost(calls)); /* what is forgotten here may run anybody's Python */
    unnest(basket, nested_at(basket, call) + 1);
    int at = nested_at(basket, call);
    int inside = at >= 0 && same(less(depth, basket->nested[at].depth), self->inside);
    if (!inside && is_frame(PyTuple_GET_ITEM(call, 3), self->away) &&
        number_of(PyObject_CallNoArgs(graph_task)) == -1 && !PyErr_Occurred()) {
        inside = 1;
        if (at >= 0)
            self->inside = less(depth, basket->nested[at].depth);
        else
            nest(basket, call, less(depth, self->inside));
    }
    Py_DECREF(call);
    return inside;
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

/* Make all that can fail before anything is changed: an inference tensor counts no changes, what is sparse lies
 * nowhere. */
static int ready(Gate *self, Part *parts, int count)
{
    if (count && !is_on_stream(self->basket)) return 0;
    for (int i = 0; i < count; i++) {
        Part *part = &parts[i];
        part->held = made(part->pass, part->tensor, part->size->items);
        if (part->held == NULL) return 0;
    }
    return is_open(self->basket); /* to make them may have run the collector, and that anybody's Python */
}

/* Hold all tensors of a value; -1 with an error set if that could not be finished. */
static int hold_all(Gate *self, Part *parts, int count, PyObject *number)
{
    if (!count) return 1;
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

static PyObject *answer(Gate *self, int passed)
{
    if (passed == -1 && PyErr_Occurred()) return NULL; /* the hook says what went wrong */
    if (!forgiven()) return NULL;
    if (!passed) tell_number(self);
    return forgiven() ? PyBool_FromLong(passed == 1) : NULL;
}

static int begin(Gate *self, PyObject *module, PyObject *args, PyObject *kwargs, Depth depth)
{
    Part parts[PARTS];
    int count = 0;
    if (module != self->module || !is_passable(self)) return 0;
    if (!self->blind) {
        if (self->args == NULL || self->kwargs == NULL) return 0;
        if (!match(self->args, args, parts, &count) || !match(self->kwargs, kwargs, parts, &count))
            return forget(parts, count), 0;
    }
    PyObject *calls = calls_of(self, 1), *one = NULL, *frame = NULL, *number = NULL, *call = NULL;
    int passed = 0;
    if (calls != NULL && is_inside(self, calls, depth) && (one = PyLong_FromLong(1)) != NULL &&
        (frame = PyObject_CallOneArg(get_frame, one)) != NULL && ready(self, parts, count) &&
        (number = next_number(self)) != NULL) {
        if (self->basket->step != NULL) call = PyTuple_Pack(5, self->name, self->basket->step, number, frame, Py_None);
        passed = call != NULL && PyList_Append(calls, call) == 0 ? 1 : -1;
        if (passed == 1) {
            nest(self->basket, call, depth);
            passed = hold_all(self, parts, count, number);
        }
    }
    Py_XDECREF(one);
    Py_XDECREF(frame);
    Py_XDECREF(number);
    Py_XDECREF(call);
    forget(parts, count);
    return passed;
}

static PyObject *Gate_begin(Gate *self, PyObject *const *given, Py_ssize_t many)
{
    return answer(self, many == 3 ? begin(self, given[0], given[1], given[2], depth_now()) : 0);
}

/* Whether the frame that runs the hook is the one that makes the innermost call. */
static int is_made_here(Gate *self, PyObject *call, Depth depth)
{
    int at = nested_at(self->basket, call);
    if (at >= 0 && same(less(depth, self->basket->nested[at].depth), self->here)) return 1;
    if (!is_frame(PyTuple_GET_ITEM(call, 3), 1)) return 0;
    at = nested_at(self->basket, call);
    if (at >= 0) self->here = less(depth, self->basket->nested[at].depth);
    return 1;
}

static int finish(Gate *self, PyObject *value, Depth depth)
{
    Part parts[PARTS];
    int count = 0;
    if (value == Py_None || !is_passable(self)) return 0;
    PyObject *calls = calls_of(self, 2); /* the outermost is for the hook: with it the step ends */
    if (calls == NULL || PyTuple_GET_ITEM(innermost(calls), 0) != self->name ||
        PyTuple_GET_ITEM(innermost(calls), 4) != Py_None || !is_made_here(self, innermost(calls), depth))
        return 0;
    if (!self->blind && (self->value == NULL || !match(self->value, value, parts, &count)))
        return forget(parts, count), 0;
    int passed = 0;
    if (ready(self, parts, count)) {
        Py_ssize_t size = PyList_GET_SIZE(calls);
        PyObject *call = Py_NewRef(innermost(calls));
        passed = PyList_SetSlice(calls, size - 1, size, NULL) == 0 ? 1 : -1;
        int at = nested_at(self->basket, call);
        if (at >= 0) unnest(self->basket, at);
        if (passed == 1) passed = hold_all(self, parts, count, PyTuple_GET_ITEM(call, 2));
        Py_DECREF(call);
    }
    forget(parts, count);
    return passed;
}

static PyObject *Gate_finish(Gate *self, PyObject *value) { return answer(self, finish(self, value, depth_now())); }

static int end(Gate *self, PyObject *module, PyObject *value, Depth depth)
{
    Part parts[PARTS];
    int count = 0;
    if (module != self->module || value == Py_None || !is_passable(self)) return 0;
    if (self->value == NULL || !match(self->value, value, parts, &count)) return forget(parts, count), 0;
    PyObject *calls = calls_of(self, 1), *number = NULL;
    int passed = 0;
    if (calls != NULL && is_inside(self, calls, depth) && ready(self, parts, count) &&
        (number = next_number(self)) != NULL)
        passed = hold_all(self, parts, count, number);
    Py_XDECREF(number);
    forget(parts, count);
    return passed;
}

static PyObject *Gate_end(Gate *self, PyObject *const *given, Py_ssize_t many)
{
    return answer(self, many == 2 ? end(self, given[0], given[1], depth_now()) : 0);
}

static PyMethodDef Gate_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))Gate_begin, METH_FASTCALL, "Let a call begin: module, args, kwargs."},
    {"finish", (PyCFunction)Gate_finish, METH_O, "Let a call end that was seen to begin: its value."},
    {"end", (PyCFunction)(void (*)(void))Gate_end, METH_FASTCALL, "Let a call end: module, value."},
    {NULL}};

static PyMemberDef Gate_members[] = {
    {"value", T_OBJECT, offsetof(Gate, value), 0,
     "what a value is expected to be made of, None of one that is not known"},
    {"args", T_OBJECT, offsetof(Gate, args), 0, "what arguments are expected to be made of"},
    {"kwargs", T_OBJECT, offsetof(Gate, kwargs), 0, "and those with names"},
    {"blind", T_INT, offsetof(Gate, blind), 0, "whether nothing is wanted of the calls that pass"},
    {"away", T_LONG, offsetof(Gate, away), 0, "frames from the hook to the one that makes the outer call"},
    {NULL}};
