/* The basket. */

static int is_open(Basket *basket)
{
    return basket->step != NULL && !basket->barred && basket->thread == PyThread_get_thread_ident();
}

static int is_on_stream(Basket *basket)
{
    unsigned long long stream;
    if (basket->direct) {
        void *current;
        if (torch_says->current_work_stream(kDLCUDA, basket->place, &current) != 0) return 0;
        stream = (unsigned long long)(uintptr_t)current;
    } else if (!is_address(PyObject_CallFunction(basket->current_stream, "i", basket->place), &stream)) {
        return 0;
    }
    if (stream != basket->stream) return 0;
    if (!stream) return 1; /* the default stream is never captured */
    PyObject *captures = PyObject_CallNoArgs(basket->is_capturing);
    int quiet = captures != NULL && PyObject_Not(captures) == 1;
    Py_XDECREF(captures);
    return quiet;
}

static int is_of(const Size *size, unsigned long long type) { return !size->type || !type || size->type == type; }

/* Whether a tensor may wait, by its pass; it is one of torch's own type. */
static int may_wait(Pass *pass, PyObject *tensor, Part *part)
{
    Basket *basket = pass->basket;
    DLTensor how;
    Lying lying;
    if (pass->requests != basket->requests || !pass->count || !lies(tensor, &how, &lying)) return 0;
    Size *size = pass->sizes, *end = size + pass->count;
    while (size < end && !(size->items == lying.items && is_of(size, lying.type))) size++;
    if (size == end || basket->number > size->until) return 0;
    *part = (Part){pass, tensor, size, lying, NULL};
    return 1;
}

static Held *made(Pass *pass, PyObject *tensor, Lying lying)
{
    long long version = version_in(tensor); /* an inference tensor has none, and raises */
    if (PyErr_Occurred()) return NULL;
    Held *held = (Held *)HeldType.tp_alloc(&HeldType, 0);
    if (held == NULL) return NULL;
    held->pass = (Pass *)Py_NewRef((PyObject *)pass);
    held->tensor = Py_NewRef(tensor);
    held->lying = lying;
    held->version = version;
    return held;
}

static int is_unchanged(Held *held, long long version, Lying lying)
{
    return version == held->version && lying.address == held->lying.address && lying.layout == held->lying.layout;
}

static int is_twin(Held *other, Held *mine) /* of the same tensor */
{
    return is_unchanged(other, mine->version, mine->lying) && other->pass->kind == mine->pass->kind;
}

/* Return the one that waits already for the same tensor, or did, unchanged since. */
static Held *twin_of(Basket *basket, Held *mine)
{
    for (int i = 0; i < RECENT; i++) {
        Held *other = basket->recent[i];
        if (basket->tensors[i] == mine->tensor && other->tensor == mine->tensor && is_twin(other, mine)) return other;
    }
    for (int i = 0; i < TAKEN && basket->taken[i].held != NULL; i++) {
        Held *other = basket->taken[i].held;
        if (refers_to(basket->taken[i].tensor, mine->tensor) && is_twin(other, mine)) return other;
    }
    return NULL;
}

static void forget_taken(Basket *basket)
{
    basket->takings = 0;
    for (int i = 0; i < TAKEN; i++) {
        Py_CLEAR(basket->taken[i].tensor);
        Py_CLEAR(basket->taken[i].held);
    }
}

/* Hold nothing any more; what was held last is known again by its tensor, if that lives so long. */
static PyObject *emptied(Basket *basket)
{
    Held *recent[RECENT];
    PyObject *empty = PyList_New(0);
    if (empty == NULL) return NULL;
    PyObject *held = basket->held; /* ours from here on: what is forgotten below may run anybody's Python */
    memcpy(recent, basket->recent, sizeof recent);
    memset(basket->recent, 0, sizeof basket->recent);
    memset(basket->tensors, 0, sizeof basket->tensors);
    basket->held = empty;
    basket->bytes = 0;
    basket->now = 0;
    for (int i = 0; i < RECENT && basket->step != NULL; i++) {
        if (recent[i] == NULL || recent[i]->tensor == NULL) continue;
        PyObject *weak = PyWeakref_NewRef(recent[i]->tensor, NULL);
        if (weak == NULL) PyErr_Clear();
        if (weak == NULL || basket->step == NULL) { /* to make it may have run the collector */
            Py_XDECREF(weak);
            continue;
        }
        unsigned at = basket->takings++ % TAKEN;
        PyObject *before = basket->taken[at].tensor;
        Held *other = basket->taken[at].held;
        basket->taken[at].tensor = weak;
        basket->taken[at].held = (Held *)Py_NewRef((PyObject *)recent[i]);
        Py_XDECREF(before);
        Py_XDECREF(other);
    }
    return held;
}

/* Hold a tensor back, of which a Held was made. */
static int hold(Basket *basket, Part *part, PyObject *moment)
{
    Held *held = part->held, *twin = twin_of(basket, held);
    held->moment = Py_NewRef(moment);
    if (PyList_Append(basket->held, (PyObject *)held) < 0) return 0;
    if (twin != NULL) {
        held->twin = Py_NewRef((PyObject *)twin);
        Py_CLEAR(held->tensor); /* the other one sees to it */
        basket->now |= part->size->now && twin->tensor != NULL;
    } else {
        unsigned at = basket->count++ % RECENT;
        basket->recent[at] = held;
        basket->tensors[at] = held->tensor;
        basket->bytes += part->size->size;
        basket->now |= part->size->now;
    }
    PyObject *done = PyObject_CallOneArg(basket->keep, (PyObject *)held);
    Py_XDECREF(done);
    return done != NULL;
}

static PyObject *sweep(Basket *basket);

/* Take all that waits, where it is too much or must not wait; 0 with an error set if that failed. */
static int make_room(Basket *basket)
{
    if (basket->bytes + basket->doubted <= basket->most && !basket->now) return 1;
    PyObject *left = sweep(basket), *done = NULL;
    if (left == Py_None) return Py_DECREF(left), 1;
    if (left != NULL) done = PyObject_CallOneArg(basket->rest, left);
    Py_XDECREF(left);
    Py_XDECREF(done);
    return done != NULL;
}

static PyObject *moment_of(Basket *basket, PyObject *number)
{
    long call = PyLong_AsLong(number);
    if (call == -1 && PyErr_Occurred()) return NULL;
    int first = call == 0;
    if (first && basket->moment != NULL) return Py_NewRef(basket->moment);
    PyObject *moment = PyDict_GetItemWithError(basket->moments, number);
    if (moment != NULL)
        Py_INCREF(moment);
    else if (!PyErr_Occurred())
        moment = PyObject_CallMethodOneArg(basket->step, s_at, number);
    if (first && moment != NULL) Py_XSETREF(basket->moment, Py_NewRef(moment));
    return moment;
}

static int Basket_init(Basket *self, PyObject *args, PyObject *given)
{
    static char *names[] = {"place", "keep", "rest", "most", "current_stream", "is_capturing", NULL};
    PyObject *keep, *rest, *current_stream, *is_capturing;
    if (tensor_type == NULL) return PyErr_SetString(PyExc_RuntimeError, "`prepare` comes first"), -1;
    if (!PyArg_ParseTupleAndKeywords(args, given, "iOOnOO", names, &self->place, &keep, &rest, &self->most,
                                     &current_stream, &is_capturing))
        return -1;
    self->direct = current_stream == raw_stream && current_stream != Py_None;
    Py_XSETREF(self->keep, Py_NewRef(keep));
    Py_XSETREF(self->rest, Py_NewRef(rest));
    Py_XSETREF(self->current_stream, Py_NewRef(current_stream));
    Py_XSETREF(self->is_capturing, Py_NewRef(is_capturing));
    Py_XSETREF(self->held, PyList_New(0));
    return self->held == NULL ? -1 : 0;
}

static int Basket_traverse(Basket *self, visitproc visit, void *arg)
{
    Py_VISIT(self->keep);
    Py_VISIT(self->rest);
    Py_VISIT(self->current_stream);
    Py_VISIT(self->is_capturing);
    Py_VISIT(self->held);
    Py_VISIT(self->step);
    Py_VISIT(self->calls);
    Py_VISIT(self->moments);
    Py_VISIT(self->requests);
    Py_VISIT(self->under_way);
    Py_VISIT(self->moment);
    for (int i = 0; i < WAYS; i++) Py_VISIT(self->ways[i]);
    for (int i = 0; i < TAKEN; i++) Py_VISIT(self->taken[i].held);
    return 0;
}

static void shut(Basket *self)
{
    forget_taken(self);
    Py_CLEAR(self->under_way);
    Py_CLEAR(self->moment);
    Py_CLEAR(self->step);
    Py_CLEAR(self->calls);
    Py_CLEAR(self->moments);
    Py_CLEAR(self->requests);
}

static int Basket_clear(Basket *self)
{
    shut(self);
    for (int i = 0; i < WAYS; i++) Py_CLEAR(self->ways[i]);
    Py_CLEAR(self->keep);
    Py_CLEAR(self->rest);
    Py_CLEAR(self->current_stream);
    Py_CLEAR(self->is_capturing);
    Py_CLEAR(self->held);
    return 0;
}

static PyObject *Basket_open(Basket *self, PyObject *args)
{
    PyObject *step;
    long long number;
    unsigned long long stream;
    int alone;
    if (!PyArg_ParseTuple(args, "OLKp", &step, &number, &stream, &alone)) return NULL;
    shut(self);
    self->alone = alone;
    self->barred = 0;
    PyObject *calls = PyObject_GetAttr(step, s_calls),
             *moments = calls == NULL ? NULL : PyObject_GetAttr(step, s_moments),
             *requests = moments == NULL ? NULL : PyObject_GetAttr(step, s_requests);
    if (requests == NULL || !PyDict_Check(moments) || !PyDict_Check(calls)) {
        Py_XDECREF(calls);
        Py_XDECREF(moments);
        Py_XDECREF(requests);
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the calls and the moments of a step are dicts");
        return NULL;
    }
    self->calls = calls;
    self->moments = moments;
    self->requests = requests;
    self->number = number;
    self->stream = stream;
    self->thread = PyThread_get_thread_ident();
    self->step = Py_NewRef(step);
    Py_RETURN_NONE;
}

static PyObject *Basket_shut(Basket *self, PyObject *none)
{
    shut(self);
    Py_RETURN_NONE;
}

static PyObject *Basket_bar(Basket *self, PyObject *none)
{
    self->barred = 1;
    Py_RETURN_NONE;
}

static PyObject *Basket_hold(Basket *self, PyObject *args)
{
    Pass *pass;
    PyObject *tensor, *moment;
    if (!PyArg_ParseTuple(args, "O!OO", &PassType, &pass, &tensor, &moment)) return NULL;
    Part part = {NULL};
    if (pass->basket == self && is_open(self) && (PyObject *)Py_TYPE(tensor) == tensor_type &&
        may_wait(pass, tensor, &part) && is_on_stream(self))
        part.held = made(pass, tensor, part.lying);
    if (part.held == NULL) {
        if (!forgiven()) return NULL;
        Py_RETURN_NONE;
    }
    if (!hold(self, &part, moment) || !make_room(self)) Py_CLEAR(part.held);
    return (PyObject *)part.held;
}

static PyObject *Basket_make(Basket *self, PyObject *args)
{
    Pass *pass;
    PyObject *tensor;
    if (!PyArg_ParseTuple(args, "O!O", &PassType, &pass, &tensor)) return NULL;
    DLTensor how;
    Lying lying;
    Held *held = NULL;
    if ((PyObject *)Py_TYPE(tensor) == tensor_type && lies(tensor, &how, &lying)) held = made(pass, tensor, lying);
    if (held != NULL) return (PyObject *)held;
    if (!forgiven()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *Basket_aim(Basket *self, PyObject *way)
{
    int at = 0;
    if (way == Py_None) {
        for (; at < WAYS; at++) Py_CLEAR(self->ways[at]);
        Py_RETURN_NONE;
    }
    if (!Py_IS_TYPE(way, &WayType)) return PyErr_Format(PyExc_TypeError, "a Way is needed");
    while (at < WAYS - 1 && self->ways[at] != NULL &&
           (self->ways[at]->kind != ((Way *)way)->kind || self->ways[at]->dtype != ((Way *)way)->dtype))
        at++;
    Py_XSETREF(self->ways[at], (Way *)Py_NewRef(way));
    Py_RETURN_NONE;
}

static PyObject *Basket_sweep(Basket *self, PyObject *none) { return sweep(self); }

static PyObject *Basket_make_room(Basket *self, PyObject *none)
{
    if (!make_room(self)) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef Basket_methods[] = {
    {"open", (PyCFunction)Basket_open, METH_VARARGS,
     "Begin a step of this thread: the step, its number, the stream, whether it has one forward."},
    {"bar", (PyCFunction)Basket_bar, METH_NOARGS, "Let no tensor wait in the rest of the step."},
    {"shut", (PyCFunction)Basket_shut, METH_NOARGS, "End it."},
    {"hold", (PyCFunction)Basket_hold, METH_VARARGS,
     "Hold a tensor back, by its pass and at a moment; None if it may not."},
    {"make", (PyCFunction)Basket_make, METH_VARARGS,
     "Make a Held of a tensor that is taken at once as well; None if it does not lie in a way that is known."},
    {"aim", (PyCFunction)Basket_aim, METH_O, "Have all of one kind and dtype taken in one way; None forgets all ways."},
    {"sweep", (PyCFunction)Basket_sweep, METH_NOARGS,
     "Take what waits, where there is a way; return the rest: held, (groups, odd, changed). None if there is none."},
    {"make_room", (PyCFunction)Basket_make_room, METH_NOARGS, "Take what waits, the rest too, where it is too much."},
    {NULL}};

static PyMemberDef Basket_members[] = {
    {"bytes", T_PYSSIZET, offsetof(Basket, bytes), READONLY, "of the tensors that wait"},
    {"doubted", T_PYSSIZET, offsetof(Basket, doubted), 0, "bytes of those that are tried beside them"},
    {"most", T_PYSSIZET, offsetof(Basket, most), 0, "bytes of both together, at which all are taken"},
    {"step", T_OBJECT, offsetof(Basket, step), READONLY, "the one under way"},
    {NULL}};

/* The pass. */

static int Pass_init(Pass *self, PyObject *args, PyObject *given)
{
    static char *names[] = {"basket", "point", "kind", "standing", "requests", NULL};
    PyObject *basket, *point, *kind, *standing, *requests;
    if (!PyArg_ParseTupleAndKeywords(args, given, "O!OOOO", names, &BasketType, &basket, &point, &kind, &standing,
                                     &requests))
        return -1;
    Py_XSETREF(self->basket, (Basket *)Py_NewRef(basket));
    Py_XSETREF(self->point, Py_NewRef(point));
    Py_INCREF(kind);
    if (PyUnicode_CheckExact(kind)) PyUnicode_InternInPlace(&kind); /* so that two are told apart by where they are */
    Py_XSETREF(self->kind, kind);
    Py_XSETREF(self->standing, Py_NewRef(standing));
    Py_XSETREF(self->requests, Py_NewRef(requests));
    return 0;
}

static int Pass_traverse(Pass *self, visitproc visit, void *arg)
{
    Py_VISIT(self->basket);
    Py_VISIT(self->point);
    Py_VISIT(self->kind);
    Py_VISIT(self->standing);
    Py_VISIT(self->requests);
    Py_VISIT(self->dtype);
    return 0;
}

static int Pass_clear(Pass *self)
{
    Py_CLEAR(self->dtype);
    Py_CLEAR(self->basket);
    Py_CLEAR(self->point);
    Py_CLEAR(self->kind);
    Py_CLEAR(self->standing);
    Py_CLEAR(self->requests);
    return 0;
}

static PyObject *Pass_allow(Pass *self, PyObject *args)
{
    Size size = {0}; /* without a type, of any */
    PyObject *dtype;
    if (!PyArg_ParseTuple(args, "LOnLp|K", &size.items, &dtype, &size.size, &size.until, &size.now, &size.type))
        return NULL;
    int at = 0;
    while (at < self->count && !(self->sizes[at].items == size.items && is_of(&self->sizes[at], size.type))) at++;
    if (at == SIZES) Py_RETURN_FALSE;
    if (at == self->count) self->count++;
    self->sizes[at] = size;
    self->typed = 0;
    Py_XSETREF(self->dtype, Py_NewRef(dtype));
    Py_RETURN_TRUE;
}

static PyObject *Pass_deny(Pass *self, PyObject *none)
{
    self->count = 0;
    Py_RETURN_NONE;
}

static PyMethodDef Pass_methods[] = {
    {"allow", (PyCFunction)Pass_allow, METH_VARARGS,
     "Let tensors of so many items, of a dtype and bytes, wait until a step, or be taken at once; of a type or any."},
    {"deny", (PyCFunction)Pass_deny, METH_NOARGS, "Let none wait."},
    {NULL}};

static PyMemberDef Pass_members[] = {{"point", T_OBJECT, offsetof(Pass, point), READONLY, "whose it is"},
                                     {"kind", T_OBJECT, offsetof(Pass, kind), READONLY, "what is taken of its tensors"},
                                     {"standing", T_OBJECT, offsetof(Pass, standing), READONLY, "what is known of it"},
                                     {"count", T_INT, offsetof(Pass, count), READONLY, "sizes that may wait"},
                                     {NULL}};
