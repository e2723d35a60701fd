/* The shortest way past a hook, for tensors on an accelerator that may wait for the end of their step.

   Where a model waits for Python, a hook in Python costs more than the layer's own launch: its code is out of the caches by
   the time it is called again. What is decided once is therefore kept here, and a call that is like the last one passes by:

       Pass    what is known of one point: tensors of these sizes may wait, until that step
       Gate    one of a hook's: the passes of the tensors that its value is made of, and where that value is seen
       Held    a tensor that waits
       Basket  what waits, of one step of one thread

       Way     how all that waits, of one kind and dtype, is taken in one launch

   A gate answers False to anything it has not seen before, and leaves everything as it was: the hook's own Python knows what
   to do. Nothing here calls an operation of torch's, and all of it happens without letting go of the interpreter. Every
   function that is called, and every object that is looked at, costs a microsecond there: what can be asked when all is
   taken, in one loop, is not asked in the hook. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "the gates count on the interpreter's lock"
#endif

#if PY_VERSION_HEX >= 0x030C0000
#define DEPTH(thread) ((thread)->py_recursion_limit - (thread)->py_recursion_remaining)
#elif PY_VERSION_HEX >= 0x030B0000
#define DEPTH(thread) ((thread)->recursion_limit - (thread)->recursion_remaining)
#else
#define DEPTH(thread) ((thread)->recursion_depth)
#endif

#if PY_VERSION_HEX >= 0x030D0000
static int refers_to(PyObject *weak, PyObject *object)
{
    PyObject *found = NULL;
    if (PyWeakref_GetRef(weak, &found) < 0) PyErr_Clear();
    Py_XDECREF(found);
    return found == object;
}
#else
#define refers_to(weak, object) (PyWeakref_GET_OBJECT(weak) == (object))
#endif

#define SIZES 8   /* of one point's tensors that are told apart */
#define PARTS 32  /* tensors of one value; more are for the hook */
#define RECENT 8  /* tensors that are looked through for one that waits already */
#define TAKEN 16  /* and, in the middle of a step, for one that was taken already */
#define NESTED 32 /* calls under way of which it is known how deep they are */
#define WAYS 8

static PyObject *tensor_type, *get_frame, *graph_task, *has_modes, *count_type; /* what `prepare` was given */
static PyObject *s_calls, *s_version, *s_data_ptr, *s_numel, *s_at, *s_moments, *s_shape, *s_contiguous, *s_is_neg,
    *s_is_complex, *s_dtype, *s_requests, *s_get_device, *s_page, *s_aboard, *s_over, *s_table, *s_acquire,
    *s_release, *s_is_meta, *s_is_quantized;

/* How deep in the stack of Python and in that of C. */
typedef struct {
    long python;
    intptr_t c;
} Depth;

typedef struct {
    PyObject_HEAD
    PyObject *place, *current_stream, *is_capturing, *keep, *rest;
    PyObject *held;                                  /* a list */
    PyObject *step, *calls, *moments, *requests;     /* of the step under way; NULL between two */
    PyObject *under_way, *moment;                    /* the thread's calls, and the moment of a first call, once known */
    struct {
        PyObject *call;
        Depth depth;
    } nested[NESTED];
    int nesting;
    struct Way *ways[WAYS];
    unsigned long thread;
    unsigned long long stream;
    long long number;                                /* of the step */
    int alone, barred;                               /* whether the step ends with this forward; whether nothing passes */
    Py_ssize_t bytes, doubted, most;                 /* of what waits, of what is tried beside it, and of both together */
    int now;                                         /* whether something of it must be taken at once */
    struct Held *recent[RECENT];                     /* the last that wait, borrowed from the list, */
    PyObject *tensors[RECENT];                       /* and what they wait for: to look there is to look far */
    unsigned count;                                  /* of all that were put there */
    struct {
        PyObject *tensor;                            /* a weak reference */
        struct Held *held;
    } taken[TAKEN];                                  /* the last that were taken in the middle of the step */
    unsigned takings;                                /* of all that were put there */
} Basket;

typedef struct {
    long long items, until;
    Py_ssize_t size;
    int now; /* whether it is taken as it appears, with all that waits */
} Size;

typedef struct Way {
    PyObject_HEAD
    PyObject *kind, *dtype;
    PyObject *lock, *desk, *launch, *turn; /* `turn` sees to it that the desk has a page with a slot that is free; */
                                           /* where there is no desk, `launch` is given all of them, and does the rest */
    long long slots, tile, most;
} Way;

typedef struct {
    PyObject_HEAD
    Basket *basket;
    PyObject *point, *kind, *standing, *requests, *dtype; /* the last being that of the tensors that may wait */
    Size sizes[SIZES];
    int count;
} Pass;

typedef struct Held {
    PyObject_HEAD
    Pass *pass;
    PyObject *tensor, *dtype, *moment, *shape;
    PyObject *got, *part;            /* what was taken of it and others, and its part of that */
    PyObject *twin;
    long long version, items, place; /* `place`: where in `got` its part is */
    unsigned long long address;      /* once it was looked at to be taken */
} Held;

typedef struct {
    PyObject_HEAD
    Basket *basket;
    PyObject *module, *name, *local;
    PyObject *value, *args, *kwargs; /* what is expected: see `match` */
    int blind;                       /* whether calls pass by, and nothing of them is wanted */
    long away;                       /* frames to the one that makes the outer call */
    Depth inside, here;              /* how much deeper the hook is than the outer call's, and than its own call's, once known */
    long long step, counted;         /* the last one that calls passed in, and how many nobody but the gate has counted */
} Gate;

typedef struct {
    Pass *pass;
    PyObject *tensor;
    Size *size;
    Held *held;
} Part;

static PyTypeObject BasketType, PassType, HeldType, GateType, WayType;

/* What is asked of torch, each the call of a function in C. */

static long long number_of(PyObject *got) /* steals it; -1 with an error set if it is none */
{
    if (got == NULL) return -1;
    long long number = PyLong_AsLongLong(got);
    Py_DECREF(got);
    return number;
}

static int is_address(PyObject *got, unsigned long long *address)
{
    if (got == NULL) return 0;
    *address = PyLong_AsUnsignedLongLong(got);
    Py_DECREF(got);
    return !PyErr_Occurred();
}

static int is_frame(PyObject *frame, long away)
{
    PyObject *depth = PyLong_FromLong(away);
    PyObject *found = depth == NULL ? NULL : PyObject_CallOneArg(get_frame, depth);
    Py_XDECREF(depth);
    if (found == NULL) { /* the stack is not that deep */
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(found);
    return found == frame;
}

/* Forget what a question raised; 0 if it was an interrupt, which is nobody's to forget. */
static int forgiven(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return 0;
    PyErr_Clear();
    return 1;
}

/* The basket. */

static int is_open(Basket *basket)
{
    return basket->step != NULL && !basket->barred && basket->thread == PyThread_get_thread_ident();
}

static int is_on_stream(Basket *basket)
{
    unsigned long long stream;
    if (!is_address(PyObject_CallOneArg(basket->current_stream, basket->place), &stream)) return 0;
    if (stream != basket->stream) return 0;
    if (!stream) return 1; /* the default stream is never captured */
    PyObject *captures = PyObject_CallNoArgs(basket->is_capturing);
    int quiet = captures != NULL && PyObject_Not(captures) == 1;
    Py_XDECREF(captures);
    return quiet;
}

static Size *size_of(Pass *pass, PyObject *tensor)
{
    Basket *basket = pass->basket;
    if (pass->requests != basket->requests || !pass->count) return NULL;
    long long items = number_of(PyObject_CallMethodNoArgs(tensor, s_numel));
    if (items < 0) return NULL;
    for (int i = 0; i < pass->count; i++) {
        Size *size = &pass->sizes[i];
        if (size->items != items) continue;
        return basket->number <= size->until ? size : NULL;
    }
    return NULL;
}

static Held *made(Pass *pass, PyObject *tensor, long long items)
{
    long long version = number_of(PyObject_GetAttr(tensor, s_version)); /* an inference tensor has none, and raises */
    if (PyErr_Occurred()) return NULL;
    Held *held = (Held *)HeldType.tp_alloc(&HeldType, 0);
    if (held == NULL) return NULL;
    held->pass = (Pass *)Py_NewRef((PyObject *)pass);
    held->tensor = Py_NewRef(tensor);
    held->items = items;
    held->version = version;
    return held;
}

/* Return the one that waits already for the same tensor, or did, unchanged since. */
static Held *twin_of(Basket *basket, Held *mine)
{
    for (int i = 0; i < RECENT; i++) {
        Held *other = basket->recent[i];
        if (basket->tensors[i] == mine->tensor && other->tensor == mine->tensor && other->version == mine->version &&
            other->pass->kind == mine->pass->kind)
            return other;
    }
    for (int i = 0; i < TAKEN && basket->taken[i].held != NULL; i++) {
        Held *other = basket->taken[i].held;
        if (refers_to(basket->taken[i].tensor, mine->tensor) && other->version == mine->version &&
            other->pass->kind == mine->pass->kind)
            return other;
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
    for (int i = 0; i < RECENT; i++) {
        if (recent[i] == NULL || recent[i]->tensor == NULL) continue;
        PyObject *weak = PyWeakref_NewRef(recent[i]->tensor, NULL);
        if (weak == NULL) PyErr_Clear();
        if (weak == NULL || basket->step == NULL) {
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
    PyObject *place, *keep, *rest, *current_stream, *is_capturing;
    if (tensor_type == NULL) return PyErr_SetString(PyExc_RuntimeError, "`prepare` comes first"), -1;
    if (!PyArg_ParseTupleAndKeywords(args, given, "O!OOnOO", names, &PyLong_Type, &place, &keep, &rest, &self->most,
                                     &current_stream, &is_capturing))
        return -1;
    if (PyLong_AsLongLong(place) == -1 && PyErr_Occurred()) return -1;
    Py_XSETREF(self->place, Py_NewRef(place));
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
    for (int i = 0; i < self->nesting; i++) Py_VISIT(self->nested[i].call);
    for (int i = 0; i < WAYS; i++) Py_VISIT(self->ways[i]);
    for (int i = 0; i < TAKEN; i++) Py_VISIT(self->taken[i].held);
    return 0;
}

/* Forget how deep the calls are, from one on. */
static void unnest(Basket *self, int from)
{
    while (self->nesting > from) {
        PyObject *call = self->nested[--self->nesting].call;
        self->nested[self->nesting].call = NULL;
        Py_XDECREF(call);
    }
}

static void shut(Basket *self)
{
    unnest(self, 0);
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
    Py_CLEAR(self->place);
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
    Part part = {pass, tensor};
    if (pass->basket == self && is_open(self) && (PyObject *)Py_TYPE(tensor) == tensor_type &&
        (part.size = size_of(pass, tensor)) != NULL && is_on_stream(self))
        part.held = made(pass, tensor, part.size->items);
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
    long long items = number_of(PyObject_CallMethodNoArgs(tensor, s_numel));
    return PyErr_Occurred() ? NULL : (PyObject *)made(pass, tensor, items);
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

static PyMethodDef Basket_methods[] = {
    {"open", (PyCFunction)Basket_open, METH_VARARGS, "Begin a step of this thread: the step, its number, the stream, whether it has one forward."},
    {"bar", (PyCFunction)Basket_bar, METH_NOARGS, "Let no tensor wait in the rest of the step."},
    {"shut", (PyCFunction)Basket_shut, METH_NOARGS, "End it."},
    {"hold", (PyCFunction)Basket_hold, METH_VARARGS, "Hold a tensor back, by its pass and at a moment; None if it may not."},
    {"make", (PyCFunction)Basket_make, METH_VARARGS, "Make a Held of a tensor that is taken at once as well."},
    {"aim", (PyCFunction)Basket_aim, METH_O, "Have all of one kind and dtype taken in one way; None forgets all ways."},
    {"sweep", (PyCFunction)Basket_sweep, METH_NOARGS,
     "Take what waits, where there is a way; return the rest: held, (groups, odd, changed). None if there is none."},
    {NULL}};

static PyMemberDef Basket_members[] = {
    {"bytes", T_PYSSIZET, offsetof(Basket, bytes), READONLY, "of the tensors that wait"},
    {"doubted", T_PYSSIZET, offsetof(Basket, doubted), 0, "bytes of those that are tried beside them"},
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
    Size size;
    PyObject *dtype;
    if (!PyArg_ParseTuple(args, "LOnLp", &size.items, &dtype, &size.size, &size.until, &size.now)) return NULL;
    int at = 0;
    while (at < self->count && self->sizes[at].items != size.items) at++;
    if (at == SIZES) Py_RETURN_FALSE;
    if (at == self->count) self->count++;
    self->sizes[at] = size;
    Py_XSETREF(self->dtype, Py_NewRef(dtype));
    Py_RETURN_TRUE;
}

static PyObject *Pass_deny(Pass *self, PyObject *none)
{
    self->count = 0;
    Py_RETURN_NONE;
}

static PyMethodDef Pass_methods[] = {
    {"allow", (PyCFunction)Pass_allow, METH_VARARGS, "Let tensors of so many items, of a dtype and bytes, wait until a step, or be taken at once."},
    {"deny", (PyCFunction)Pass_deny, METH_NOARGS, "Let none wait."},
    {NULL}};

static PyMemberDef Pass_members[] = {
    {"point", T_OBJECT, offsetof(Pass, point), READONLY, "whose it is"},
    {"kind", T_OBJECT, offsetof(Pass, kind), READONLY, "what is taken of its tensors"},
    {"standing", T_OBJECT, offsetof(Pass, standing), READONLY, "what is known of it"},
    {"count", T_INT, offsetof(Pass, count), READONLY, "sizes that may wait"},
    {NULL}};

/* What waits. */

static int Held_traverse(Held *self, visitproc visit, void *arg)
{
    Py_VISIT(self->pass);
    Py_VISIT(self->tensor);
    Py_VISIT(self->dtype);
    Py_VISIT(self->moment);
    Py_VISIT(self->shape);
    Py_VISIT(self->got);
    Py_VISIT(self->part);
    Py_VISIT(self->twin);
    return 0;
}

static int Held_clear(Held *self)
{
    Py_CLEAR(self->pass);
    Py_CLEAR(self->tensor);
    Py_CLEAR(self->dtype);
    Py_CLEAR(self->moment);
    Py_CLEAR(self->shape);
    Py_CLEAR(self->got);
    Py_CLEAR(self->part);
    Py_CLEAR(self->twin);
    return 0;
}

static int says(PyObject *tensor, PyObject *name, int call) /* what it says of itself; -1 if it raises */
{
    PyObject *answer = call ? PyObject_CallMethodNoArgs(tensor, name) : PyObject_GetAttr(tensor, name);
    int truth = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return truth;
}

/* Whether torch knows of no change, neither of the values nor of the memory; -1 if the tensor cannot be asked (in a
   transform of functions). */
static int is_intact(Held *self)
{
    long long version = number_of(PyObject_GetAttr(self->tensor, s_version)), items = 1;
    if (PyErr_Occurred() || !is_address(PyObject_CallMethodNoArgs(self->tensor, s_data_ptr), &self->address)) return -1;
    PyObject *shape = PyObject_GetAttr(self->tensor, s_shape); /* a nested tensor has none, and raises */
    if (shape == NULL || !PyTuple_Check(shape)) return Py_XDECREF(shape), -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); i++) items *= PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
    int intact = version == self->version && items == self->items && (self->address || !items);
    if (!self->address && items && says(self->tensor, s_is_meta, 0)) intact = -1;
    if (intact == 1)
        Py_XSETREF(self->shape, shape);
    else
        Py_DECREF(shape);
    return PyErr_Occurred() ? -1 : intact;
}

static int lies_plainly(Held *self, long long place)
{
    PyObject *known = self->pass->dtype; /* of tensors that were found to lie plainly before */
    if (known == NULL ? says(self->dtype, s_is_complex, 0) || says(self->tensor, s_is_quantized, 0) : known != self->dtype)
        return 0;
    return self->address % 16 == 0 && self->items > 0 &&
           (PyObject *)Py_TYPE(self->tensor) == tensor_type && number_of(PyObject_CallMethodNoArgs(self->tensor, s_get_device)) == place &&
           says(self->tensor, s_contiguous, 1) == 1 &&
           says(self->tensor, s_is_neg, 1) == 0;
}

static PyMemberDef Held_members[] = {
    {"pass_", T_OBJECT, offsetof(Held, pass), READONLY, "of its point"},
    {"tensor", T_OBJECT, offsetof(Held, tensor), READONLY, "while it waits, and has no twin"},
    {"dtype", T_OBJECT, offsetof(Held, dtype), READONLY, "of the tensor, once it was taken"},
    {"moment", T_OBJECT, offsetof(Held, moment), READONLY, "at which it was seen"},
    {"shape", T_OBJECT, offsetof(Held, shape), READONLY, "of the tensor, once it was taken"},
    {"got", T_OBJECT, offsetof(Held, got), 0, "what was taken of it, with others"},
    {"place", T_LONGLONG, offsetof(Held, place), 0, "of its part in that"},
    {"part", T_OBJECT, offsetof(Held, part), 0, "that part, once somebody asked for it"},
    {"twin", T_OBJECT, offsetof(Held, twin), READONLY, "the first to wait for the same tensor"},
    {"items", T_LONGLONG, offsetof(Held, items), READONLY, "of the tensor"},
    {"address", T_ULONGLONG, offsetof(Held, address), READONLY, "of the tensor"},
    {NULL}};

/* The way. */

static int Way_init(Way *self, PyObject *args, PyObject *given)
{
    static char *names[] = {"kind", "dtype", "lock", "desk", "launch", "turn", "slots", "tile", "most", NULL};
    PyObject *kind, *dtype, *lock, *desk, *launch, *turn;
    if (!PyArg_ParseTupleAndKeywords(args, given, "UOOOOOLLL", names, &kind, &dtype, &lock, &desk, &launch, &turn,
                                     &self->slots, &self->tile, &self->most))
        return -1;
    if (desk != Py_None && (self->tile < 1 || self->most < 1))
        return PyErr_SetString(PyExc_ValueError, "a tile and a program at least"), -1;
    Py_INCREF(kind);
    PyUnicode_InternInPlace(&kind);
    Py_XSETREF(self->kind, kind);
    Py_XSETREF(self->dtype, Py_NewRef(dtype));
    Py_XSETREF(self->lock, Py_NewRef(lock));
    Py_XSETREF(self->desk, Py_NewRef(desk));
    Py_XSETREF(self->launch, Py_NewRef(launch));
    Py_XSETREF(self->turn, Py_NewRef(turn));
    return 0;
}

static int Way_traverse(Way *self, visitproc visit, void *arg)
{
    Py_VISIT(self->kind);
    Py_VISIT(self->dtype);
    Py_VISIT(self->lock);
    Py_VISIT(self->desk);
    Py_VISIT(self->launch);
    Py_VISIT(self->turn);
    return 0;
}

static int Way_clear(Way *self)
{
    Py_CLEAR(self->kind);
    Py_CLEAR(self->dtype);
    Py_CLEAR(self->lock);
    Py_CLEAR(self->desk);
    Py_CLEAR(self->launch);
    Py_CLEAR(self->turn);
    return 0;
}

static PyMemberDef Way_members[] = {{NULL}};
static PyMethodDef Way_methods[] = {{NULL}};

/* The gate. */

/* Find the tensors of a value, where it is made as expected: a pass stands for a tensor, a type for anything of exactly that
   type, and (type, keys, children) for a tuple, list or dict of as many children. */
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
            if (key != known && !(PyUnicode_CheckExact(key) && PyUnicode_CheckExact(known) &&
                                  PyUnicode_Compare(key, known) == 0))
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
    if (!PyArg_ParseTupleAndKeywords(args, given, "O!OOO", names, &BasketType, &basket, &module, &name, &local)) return -1;
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
    return PyTuple_CheckExact(call) && PyTuple_GET_SIZE(call) == 5 && PyTuple_GET_ITEM(call, 1) == basket->step ? calls : NULL;
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

static Depth depth_now(void)
{
    return (Depth){DEPTH(PyThreadState_Get()), (intptr_t)__builtin_frame_address(0)};
}

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
    if (!inside && is_frame(PyTuple_GET_ITEM(call, 3), self->away) && number_of(PyObject_CallNoArgs(graph_task)) == -1 &&
        !PyErr_Occurred()) {
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

/* Return the number of this call within the step. The gate counts by itself as long as no hook has, which is quicker. */
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

/* Make all that can fail before anything is changed: an inference tensor counts no changes, what is sparse lies nowhere. */
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
        if (self->basket->step != NULL)
            call = PyTuple_Pack(5, self->name, self->basket->step, number, frame, Py_None);
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
    if (!self->blind && (self->value == NULL || !match(self->value, value, parts, &count))) return forget(parts, count), 0;
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

static PyObject *Gate_finish(Gate *self, PyObject *value)
{
    return answer(self, finish(self, value, depth_now()));
}

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
    {"value", T_OBJECT, offsetof(Gate, value), 0, "what a value is expected to be made of, None of one that is not known"},
    {"args", T_OBJECT, offsetof(Gate, args), 0, "what arguments are expected to be made of"},
    {"kwargs", T_OBJECT, offsetof(Gate, kwargs), 0, "and those with names"},
    {"blind", T_INT, offsetof(Gate, blind), 0, "whether nothing is wanted of the calls that pass"},
    {"away", T_LONG, offsetof(Gate, away), 0, "frames from the hook to the one that makes the outer call"},
    {NULL}};

#define DEALLOC(Name)                                                                                                      \
    static void Name##_dealloc(Name *self)                                                                                 \
    {                                                                                                                      \
        PyObject_GC_UnTrack(self);                                                                                         \
        Name##_clear(self);                                                                                                \
        Py_TYPE(self)->tp_free((PyObject *)self);                                                                          \
    }
DEALLOC(Basket)
DEALLOC(Pass)
DEALLOC(Held)
DEALLOC(Gate)
DEALLOC(Way)

/* Made whole, or not at all, and once: `__new__` by itself leaves none half made, a second `__init__` changes nothing. */
#define NEW(Name)                                                                                                          \
    static PyObject *Name##_new(PyTypeObject *type, PyObject *args, PyObject *given)                                       \
    {                                                                                                                      \
        Name *self = (Name *)type->tp_alloc(type, 0);                                                                      \
        if (self != NULL && Name##_init(self, args, given) < 0) Py_CLEAR(self);                                            \
        return (PyObject *)self;                                                                                           \
    }
NEW(Basket)
NEW(Pass)
NEW(Gate)
NEW(Way)

#define TYPE(Name, doc, ...)                                                                                               \
    static PyTypeObject Name##Type = {                                                                                     \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "layerscope_gates." #Name,                                                \
        .tp_basicsize = sizeof(Name),                                                                                      \
        .tp_doc = doc,                                                                                                     \
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,                                                               \
        .tp_dealloc = (destructor)Name##_dealloc,                                                                          \
        .tp_traverse = (traverseproc)Name##_traverse,                                                                      \
        .tp_clear = (inquiry)Name##_clear,                                                                                 \
        .tp_members = Name##_members,                                                                                      \
        __VA_ARGS__}
#define MADE(Name) .tp_new = Name##_new, .tp_methods = Name##_methods
TYPE(Basket, "What waits, of one step of one thread.", MADE(Basket));
TYPE(Pass, "What is known of one point.", MADE(Pass));
TYPE(Held, "A tensor that waits.", .tp_new = NULL);
TYPE(Gate, "What lets the usual calls of one hook pass.", MADE(Gate));
TYPE(Way, "How all of one kind and dtype are taken in one launch.", MADE(Way));

/* What is done with all that waits. */

static int is_held(PyObject *held) { return Py_IS_TYPE(held, &HeldType) && ((Held *)held)->tensor != NULL; }

static int group_with(PyObject *groups, Held *one)
{
    PyObject *key = PyTuple_Pack(2, one->pass->kind, one->dtype);
    PyObject *group = key == NULL ? NULL : PyDict_GetItemWithError(groups, key);
    int fine = key != NULL && !PyErr_Occurred();
    if (fine && group == NULL) {
        group = PyList_New(0);
        fine = group != NULL && PyDict_SetItem(groups, key, group) == 0;
        Py_XDECREF(group); /* the dict has it */
    }
    Py_XDECREF(key);
    return fine && PyList_Append(group, (PyObject *)one) == 0;
}

/* Return (groups by kind and dtype of what lies plainly, the odd, what was changed). */
static PyObject *sort(PyObject *held, long long place)
{
    PyObject *groups = PyDict_New(), *odd = PyList_New(0), *changed = PyList_New(0);
    int fine = groups != NULL && odd != NULL && changed != NULL;
    for (Py_ssize_t i = 0; fine && i < PyList_GET_SIZE(held); i++) {
        PyObject *item = PyList_GET_ITEM(held, i);
        Held *one = (Held *)item;
        if (Py_IS_TYPE(item, &HeldType) && one->twin != NULL) {
            if (((Held *)one->twin)->shape == NULL) fine = PyList_Append(changed, item) == 0; /* as it was */
            continue;
        }
        if (!is_held(item)) continue;
        int intact = is_intact(one);
        if (intact != 1) {
            fine = forgiven() && PyList_Append(intact ? odd : changed, item) == 0;
            continue;
        }
        Py_XSETREF(one->dtype, PyObject_GetAttr(one->tensor, s_dtype));
        if (one->dtype != NULL && lies_plainly(one, place)) {
            fine = group_with(groups, one);
        } else {
            fine = forgiven() && PyList_Append(odd, item) == 0;
        }
    }
    if (fine) return Py_BuildValue("NNN", groups, odd, changed);
    Py_XDECREF(groups);
    Py_XDECREF(odd);
    Py_XDECREF(changed);
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

static PyObject *sorted(PyObject *module, PyObject *args)
{
    PyObject *held;
    long long place;
    if (!PyArg_ParseTuple(args, "O!L", &PyList_Type, &held, &place)) return NULL;
    return sort(held, place);
}

static int is_range(PyObject *held, Py_ssize_t first, Py_ssize_t last)
{
    int fine = 0 <= first && first <= last && last <= PyList_GET_SIZE(held);
    for (Py_ssize_t i = first; fine && i < last; i++) fine = is_held(PyList_GET_ITEM(held, i));
    if (!fine) PyErr_SetString(PyExc_ValueError, "not all of these wait");
    return fine;
}

/* Return some of these in a list of our own: to let go of what was taken of them before may run anybody's Python. */
static PyObject *range_of(PyObject *held, Py_ssize_t first, Py_ssize_t last)
{
    return is_range(held, first, last) ? PyList_GetSlice(held, first, last) : NULL;
}

/* Write where some of these lie, and tell them where their numbers will be; return how many programs the largest takes. */
static long long entered(PyObject *held, Py_ssize_t from, Py_ssize_t to, unsigned long long address, long long tile,
                         long long most, PyObject *got, long long place)
{
    long long *entry = (long long *)(uintptr_t)address, largest = 1;
    for (Py_ssize_t i = from; i < to; i++, entry += 3) {
        Held *one = (Held *)PyList_GET_ITEM(held, i);
        long long tiles = (one->items + tile - 1) / tile, each = tiles > most ? (tiles + most - 1) / most : 1;
        entry[0] = (long long)one->address;
        entry[1] = one->items;
        entry[2] = each;
        if ((tiles + each - 1) / each > largest) largest = (tiles + each - 1) / each;
        one->place = place++;
        Py_XSETREF(one->got, Py_NewRef(got));
    }
    return largest;
}

static int set_number(PyObject *to, PyObject *name, long long number)
{
    PyObject *value = PyLong_FromLongLong(number);
    int fine = value != NULL && PyObject_SetAttr(to, name, value) == 0;
    Py_XDECREF(value);
    return fine;
}

/* Take as many as there are slots for on the desk's page; return how many, -1 with an error set. The desk is ours. */
static Py_ssize_t take_some(Way *way, PyObject *held, Py_ssize_t from)
{
    PyObject *page = PyObject_GetAttr(way->desk, s_page);
    if (page == NULL || page == Py_None) return Py_XDECREF(page), page == NULL ? -1 : 0;
    long long first = number_of(PyObject_GetAttr(page, s_aboard)), count = PyList_GET_SIZE(held) - from;
    unsigned long long table = 0;
    Py_ssize_t taken = 0;
    if (PyErr_Occurred() || !is_address(PyObject_GetAttr(page, s_table), &table)) {
        taken = -1;
    } else if (table && first < way->slots) {
        if (count > way->slots - first) count = way->slots - first;
        table += 24 * first;
        if (set_number(page, s_aboard, first + count) && PyObject_SetAttr(page, s_over, Py_False) == 0) {
            long long largest = entered(held, from, from + count, table, way->tile, way->most, page, first);
            PyObject *done = PyObject_CallFunction(way->launch, "LKLL", first, table, count, largest);
            taken = done == NULL ? -1 : count;
            Py_XDECREF(done);
            for (Py_ssize_t i = from; taken < 0 && i < from + count; i++) Py_CLEAR(((Held *)PyList_GET_ITEM(held, i))->got);
        } else {
            taken = -1;
        }
    }
    Py_DECREF(page);
    return taken;
}

/* Return how many of these, from the first on, were taken. */
static Py_ssize_t taken_of(PyObject *held)
{
    Py_ssize_t done = 0;
    while (done < PyList_GET_SIZE(held) && Py_IS_TYPE(PyList_GET_ITEM(held, done), &HeldType) &&
           ((Held *)PyList_GET_ITEM(held, done))->got != NULL)
        done++;
    return done;
}

/* Take all of these, as long as the way is free; return how many, -1 with an error set. */
static Py_ssize_t go(Way *way, PyObject *held)
{
    Py_ssize_t done = 0, taken = 1;
    if (way->desk == Py_None) {
        PyObject *told = PyObject_CallOneArg(way->launch, held);
        Py_XDECREF(told);
        return told == NULL ? -1 : taken_of(held);
    }
    while (taken > 0 && done < PyList_GET_SIZE(held)) {
        PyObject *ours = PyObject_CallMethodOneArg(way->lock, s_acquire, Py_False);
        Py_XDECREF(ours);
        if (ours != Py_True) return ours == NULL ? -1 : done;
        taken = take_some(way, held, done);
        PyObject *kind, *value, *trace;
        PyErr_Fetch(&kind, &value, &trace);
        Py_XDECREF(PyObject_CallMethodNoArgs(way->lock, s_release));
        PyErr_Restore(kind, value, trace);
        if (taken < 0) return -1;
        done += taken;
        if (taken == 0 || done < PyList_GET_SIZE(held)) { /* the page is full, or there is none */
            PyObject *turned = PyObject_CallNoArgs(way->turn);
            int again = turned == NULL ? -1 : PyObject_IsTrue(turned);
            Py_XDECREF(turned);
            if (again <= 0) return again < 0 ? -1 : done;
            taken = 1;
        }
    }
    return done;
}

static void release_all(PyObject *held)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(held); i++)
        if (Py_IS_TYPE(PyList_GET_ITEM(held, i), &HeldType)) Py_CLEAR(((Held *)PyList_GET_ITEM(held, i))->tensor);
}

static Way *way_of(Basket *basket, PyObject *key)
{
    for (int i = 0; i < WAYS && basket->ways[i] != NULL; i++)
        if (basket->ways[i]->kind == PyTuple_GET_ITEM(key, 0) && basket->ways[i]->dtype == PyTuple_GET_ITEM(key, 1))
            return basket->ways[i];
    return NULL;
}

static PyObject *sweep(Basket *basket)
{
    if (basket->held == NULL || !PyList_GET_SIZE(basket->held)) Py_RETURN_NONE;
    PyObject *held = emptied(basket);
    if (held == NULL) return NULL;
    PyObject *sorted = sort(held, PyLong_AsLongLong(basket->place));
    PyObject *groups = sorted == NULL ? NULL : PyTuple_GET_ITEM(sorted, 0), *key, *group;
    int rest = sorted == NULL || PyList_GET_SIZE(PyTuple_GET_ITEM(sorted, 1)) || PyList_GET_SIZE(PyTuple_GET_ITEM(sorted, 2));
    Py_ssize_t at = 0;
    int here = sorted != NULL && basket->ways[0] != NULL && is_on_stream(basket);
    if (sorted != NULL && !here && !forgiven()) { /* but any other error: whoever takes the rest meets it again */
        Py_CLEAR(sorted);
        rest = 1;
    }
    while (sorted != NULL && PyDict_Next(groups, &at, &key, &group)) {
        Way *way = here ? way_of(basket, key) : NULL;
        Py_ssize_t done = 0;
        if (way != NULL) {
            Py_INCREF(way);
            done = go(way, group);
            Py_DECREF(way);
            if (done < 0 && !PyErr_ExceptionMatches(PyExc_Exception)) { /* an interrupt */
                release_all(held);
                Py_DECREF(held);
                Py_DECREF(sorted);
                return NULL;
            }
            if (done < 0) { /* whoever takes the rest meets it again, and says so */
                PyErr_Clear();
                done = taken_of(group);
            }
            if (PyList_SetSlice(group, 0, done, NULL) < 0) PyErr_Clear();
        }
        rest |= PyList_GET_SIZE(group) > 0;
    }
    if (!rest) {
        release_all(held);
        Py_DECREF(held);
        Py_DECREF(sorted);
        Py_RETURN_NONE;
    }
    if (sorted == NULL) {
        release_all(held);
        Py_DECREF(held);
        return NULL;
    }
    return Py_BuildValue("NN", held, sorted);
}

static PyObject *swept(PyObject *module, PyObject *args)
{
    PyObject *held, *got;
    Py_ssize_t from, to;
    unsigned long long address;
    long long tile, most, place;
    if (!PyArg_ParseTuple(args, "O!nnKLLOL", &PyList_Type, &held, &from, &to, &address, &tile, &most, &got, &place))
        return NULL;
    if (tile < 1 || most < 1) return PyErr_Format(PyExc_ValueError, "a tile and a program at least");
    if ((held = range_of(held, from, to)) == NULL) return NULL;
    long long largest = entered(held, 0, to - from, address, tile, most, got, place);
    Py_DECREF(held);
    return PyLong_FromLongLong(largest);
}

static long long aligned(long long size) { return (size + 63) & -64; }

static PyObject *room_for(PyObject *module, PyObject *args)
{
    PyObject *held;
    long long width, size, largest = 0;
    if (!PyArg_ParseTuple(args, "O!L", &PyList_Type, &held, &width) || !is_range(held, 0, PyList_GET_SIZE(held))) return NULL;
    size = aligned(24 * PyList_GET_SIZE(held));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(held); i++) {
        long long mine = width * ((Held *)PyList_GET_ITEM(held, i))->items;
        size += aligned(mine);
        if (mine > largest) largest = mine;
    }
    return Py_BuildValue("LL", size, largest);
}

static PyObject *ferried(PyObject *module, PyObject *args)
{
    PyObject *held, *got;
    unsigned long long address;
    long long width, largest = 1;
    if (!PyArg_ParseTuple(args, "O!LKO", &PyList_Type, &held, &width, &address, &got)) return NULL;
    if ((held = range_of(held, 0, PyList_GET_SIZE(held))) == NULL) return NULL;
    long long *entry = (long long *)(uintptr_t)address, place = aligned(24 * PyList_GET_SIZE(held));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(held); i++, entry += 3) {
        Held *one = (Held *)PyList_GET_ITEM(held, i);
        long long size = width * one->items;
        entry[0] = (long long)one->address;
        entry[1] = (long long)address + place;
        entry[2] = size;
        if (size > largest) largest = size;
        one->place = place;
        place += aligned(size);
        Py_XSETREF(one->got, Py_NewRef(got));
    }
    Py_DECREF(held);
    return PyLong_FromLongLong(largest);
}

typedef int (*Copy)(void *to, unsigned long long from, size_t size, void *stream);

static PyObject *copied(PyObject *module, PyObject *args)
{
    PyObject *held, *got;
    unsigned long long copy, address, stream;
    long long width, place;
    if (!PyArg_ParseTuple(args, "O!LKOKK", &PyList_Type, &held, &width, &address, &got, &copy, &stream)) return NULL;
    if ((held = range_of(held, 0, PyList_GET_SIZE(held))) == NULL) return NULL;
    place = aligned(24 * PyList_GET_SIZE(held));
    int code = 0;
    for (Py_ssize_t i = 0; !code && i < PyList_GET_SIZE(held); i++) {
        Held *one = (Held *)PyList_GET_ITEM(held, i);
        size_t size = (size_t)(width * one->items);
        code = ((Copy)(uintptr_t)copy)((void *)(uintptr_t)(address + place), one->address, size, (void *)(uintptr_t)stream);
        if (code) {
            PyErr_Format(PyExc_RuntimeError, "the driver refused a copy of %zu bytes: CUDA error %d", size, code);
            break;
        }
        one->place = place;
        place += aligned((long long)size);
        Py_XSETREF(one->got, Py_NewRef(got));
    }
    Py_DECREF(held);
    if (code) return NULL;
    Py_RETURN_NONE;
}

static PyObject *release(PyObject *module, PyObject *held)
{
    if (!PyList_Check(held)) return PyErr_Format(PyExc_TypeError, "a list of what waits is needed");
    release_all(held);
    Py_RETURN_NONE;
}

static PyObject *prepare(PyObject *module, PyObject *args)
{
    PyObject *tensor, *frame, *task, *modes, *count;
    if (!PyArg_ParseTuple(args, "OOOOO", &tensor, &frame, &task, &modes, &count)) return NULL;
    Py_XSETREF(tensor_type, Py_NewRef(tensor));
    Py_XSETREF(get_frame, Py_NewRef(frame));
    Py_XSETREF(graph_task, Py_NewRef(task));
    Py_XSETREF(has_modes, Py_NewRef(modes));
    Py_XSETREF(count_type, Py_NewRef(count));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"prepare", prepare, METH_VARARGS, "Tell what torch and Python call a tensor, a frame, a backward pass, modes, and a counter."},
    {"sorted", sorted, METH_VARARGS, "Sort what waits: by (kind, dtype) where it lies plainly on a device, odd, changed."},
    {"swept", swept, METH_VARARGS, "Write where these lie, for one sweep over all of them; return the most programs."},
    {"room_for", room_for, METH_VARARGS, "Return the bytes that copies of these take, with the entries of `ferried`, and those of the largest."},
    {"ferried", ferried, METH_VARARGS, "Write where these lie and go to, for one kernel; return the largest's bytes."},
    {"copied", copied, METH_VARARGS, "Have the driver copy each of these, as `ferried` would lay them, on a stream."},
    {"release", release, METH_O, "Let go of the tensors."},
    {NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "layerscope_gates", .m_size = -1,
                                        .m_methods = functions};

PyMODINIT_FUNC PyInit_layerscope_gates(void)
{
    static const struct {
        PyObject **to;
        const char *name;
    } names[] = {{&s_calls, "calls"}, {&s_version, "_version"}, {&s_data_ptr, "data_ptr"}, {&s_numel, "numel"},
                 {&s_at, "at"}, {&s_moments, "moments"}, {&s_shape, "shape"}, {&s_contiguous, "is_contiguous"},
                 {&s_is_neg, "is_neg"}, {&s_is_complex, "is_complex"},
                 {&s_dtype, "dtype"}, {&s_requests, "requests"},
                 {&s_get_device, "get_device"}, {&s_page, "page"}, {&s_aboard, "aboard"}, {&s_over, "over"},
                 {&s_table, "table"}, {&s_acquire, "acquire"}, {&s_release, "release"},
                 {&s_is_meta, "is_meta"}, {&s_is_quantized, "is_quantized"}};
    static PyTypeObject *const types[] = {&BasketType, &PassType, &HeldType, &GateType, &WayType};
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((*names[i].to = PyUnicode_InternFromString(names[i].name)) == NULL) return NULL;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (PyModule_AddType(module, types[i]) < 0) return NULL;
    return module;
}
