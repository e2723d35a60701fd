/* The shortest way past a hook, for tensors on an accelerator that may wait for the end of their step.

   Where a model waits for Python, a hook in Python costs more than the layer's own launch: its code is out of the
   caches by the time it is called again. What is decided once is therefore kept here, and a call that is like the last
   one passes by:

       Pass    what is known of one point: tensors of these sizes may wait, until that step (basket.c)
       Basket  what waits, of one step of one thread (basket.c)
       Held    a tensor that waits (sweep.c)
       Way     how all that waits, of one kind and dtype, is taken in one launch (sweep.c)
       Gate    what torch calls in a hook's place: the passes of the tensors that its value is made of (gate.c)
       Door    what torch calls in a module's place, where such a gate is all that it has (door.c)
       Launch  a kernel's launch on a stream (launch.c)

   A gate leaves everything as it was at anything it has not seen before, and calls the hook: its Python knows what to
   do. How a tensor lies is asked by DLPack's exchange of functions in C, which torch has for this. Nothing here calls
   an operation of torch's or lets go of the interpreter, but for the forward that a door calls. Every function that is
   called, and every object that is looked at, costs a microsecond there: what can be asked when all is taken, in one
   loop, is not asked in the hook. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <ATen/dlpack.h>

#ifdef Py_GIL_DISABLED
#error "the gates count on the interpreter's lock"
#endif

/* The frames of the interpreter, without an object made of each. */
#if PY_VERSION_HEX >= 0x030B0000
#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#else
#include <frameobject.h>
#endif

#if PY_VERSION_HEX >= 0x030D0000
#define FRAME(thread) ((thread)->current_frame)
#define CODE(frame) ((frame)->f_executable)
#elif PY_VERSION_HEX >= 0x030B0000
#define FRAME(thread) ((thread)->cframe->current_frame)
#define CODE(frame) ((PyObject *)(frame)->f_code)
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

/* The version of a dict: no two that differ have the same one. Later interpreters do not keep it in every case, so that
   each look is anew there; the last that does warns of it. */
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
static uint64_t version_of(PyObject *dict) { return ((PyDictObject *)dict)->ma_version_tag; }
#pragma GCC diagnostic pop
#else
static uint64_t version_of(PyObject *dict) { return 0; }
#endif

#define SIZES 8    /* of one point's tensors that are told apart */
#define PARTS 32   /* tensors of one value; more are for the hook */
#define RECENT 8   /* tensors that are looked through for one that waits already */
#define TAKEN 16   /* and, in the middle of a step, for one that was taken already */
#define DIRECTLY 4 /* frames from torch's own to the one of the outer call, where nothing is in between */
#define OTHERS 3   /* kinds of hooks of a module's own that torch looks for before its forward */
#define TORCHS 2   /* frames of torch's own between a module that is called and a hook that is: a door has none */
#define WAYS 8
#define ARGUMENTS 64 /* of one kernel, at most */
#define LINE 64      /* bytes, in units of which copies are laid */
#define AFTER 0      /* among the hooks of all modules, those that torch calls once a forward is over */

/* What `prepare` was given. */
static PyObject *tensor_type, *count_type, *raw_stream, *global_hooks, *call_code, *torchs_call, *hook_raised;
static const DLPackExchangeAPI *torch_says;

/* Functions of torch's, without Python's way to them, which costs as much again as what they do. */
static int (*graph_task)(void);             /* the backward pass that runs on this thread, -1 if none does */
static _Bool (*has_modes)(void);            /* whether somebody changes what torch's functions do */
static void *const *(*tracing_state)(void); /* a shared pointer, NULL where nothing is traced */
static getter get_version;                  /* of a tensor of torch's own type; raises of an inference tensor */
static void *get_version_of;
static PyCFunction is_negative;
static PyObject *s_calls, *s_at, *s_moments, *s_dtype, *s_requests, *s_page, *s_aboard, *s_over,
    *s_table, *s_acquire, *s_release, *s_failed, *s_deepcopy, *s_reduce, *s_late, *s_repeats, *s_forward, *s_call_impl,
    *s_forward_hooks, *s_forward_pre_hooks, *s_backward_hooks, *s_backward_pre_hooks;

/* How a tensor lies: how many items, where, and as what they are seen (dtype, shape and strides in one number). */
typedef struct {
    long long items;
    unsigned long long address, layout, type; /* `type`: code, bits and lanes of an item */
} Lying;

typedef struct {
    PyObject_HEAD
    PyObject *current_stream, *is_capturing, *keep, *rest;
    PyObject *held;                              /* a list */
    PyObject *step, *calls, *moments, *requests; /* of the step under way; NULL between two */
    PyObject *under_way, *moment;                /* the thread's calls, and the moment of a first call, once known */
    struct Way *ways[WAYS];
    unsigned long thread;
    unsigned long long stream;
    int place;                       /* of the device */
    int direct;                      /* whether torch is asked for the current stream without a word of Python */
    long long number;                /* of the step */
    int alone, barred;               /* whether the step ends with this forward; whether nothing passes */
    Py_ssize_t bytes, doubted, most; /* of what waits, of what is tried beside it, and of both together */
    int now;                         /* whether something of it must be taken at once */
    struct Held *recent[RECENT];     /* the last that wait, borrowed from the list, */
    PyObject *tensors[RECENT];       /* and what they wait for: to look there is to look far */
    unsigned count;                  /* of all that were put there */
    struct {
        PyObject *tensor; /* a weak reference */
        struct Held *held;
    } taken[TAKEN];   /* the last that were taken in the middle of the step */
    unsigned takings; /* of all that were put there */
} Basket;

typedef struct {
    long long items, until;
    unsigned long long type; /* 0 is any */
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
    PyObject *point, *kind, *standing, *requests, *dtype; /* the last being that of the tensors that may wait, */
    DLDataType type;                                      /* and what DLPack calls it, */
    int typed;                                            /* once that is known */
    Size sizes[SIZES];
    int count;
} Pass;

typedef struct Held {
    PyObject_HEAD
    Pass *pass;
    PyObject *tensor, *dtype, *moment, *shape;
    PyObject *got, *part; /* what was taken of it and others, and its part of that */
    PyObject *twin;
    long long version, place; /* `place`: where in `got` its part is */
    Lying lying;
} Held;

typedef struct Gate {
    PyObject_HEAD
    vectorcallfunc call;
    const struct Kind *kind; /* of what is seen of a call */
    PyObject *hook;
    Basket *basket;
    PyObject *module, *name, *local;
    PyObject *value, *args, *kwargs; /* what is expected: see `match` */
    int blind;                       /* whether calls pass by, and nothing of them is wanted */
    int closed;                      /* whether nothing passes any more */
    int passes;                      /* whether the last call did */
    int under_way;                   /* calls that went through the door and are not over */
    long away;                       /* frames from torch's own to the one that makes the outer call */
    long long step, counted; /* the last one that calls passed in, and how many nobody but the gate has counted */
    uint64_t own_version, hooks_version; /* of the module's attributes and of its hooks, when the gate was alone, */
    PyObject *hooks, *others[OTHERS];    /* these and its other ones, borrowed for as long as the first holds */
} Gate;

typedef struct {
    Pass *pass;
    PyObject *tensor;
    Size *size;
    Lying lying;
    Held *held;
} Part;

static PyTypeObject BasketType, PassType, HeldType, GateType, WayType;

/* What is asked of torch, each the call of a function in C. */

/* Find how a tensor lies; 0 if it does not (in `functionalize`, or where its memory was given back), with an error set
   if it does not lie in a way that DLPack knows. */
static int lies(PyObject *tensor, DLTensor *how, Lying *lying)
{
    if (torch_says->dltensor_from_py_object_no_sync(tensor, how) != 0) return 0;
    unsigned long long layout = how->dtype.code | how->dtype.bits << 8 | (unsigned long long)how->dtype.lanes << 16;
    lying->type = layout;
    lying->items = 1;
    for (int i = 0; i < how->ndim; i++) {
        lying->items *= how->shape[i];
        layout = (layout ^ (unsigned long long)how->shape[i]) * 0x9E3779B97F4A7C15u;
        layout = (layout ^ layout >> 32 ^ (unsigned long long)how->strides[i]) * 0x9E3779B97F4A7C15u;
    }
    lying->address = (unsigned long long)(uintptr_t)how->data + how->byte_offset;
    lying->layout = layout;
    return lying->address || !lying->items;
}

static int is_contiguous(const DLTensor *how)
{
    long long expected = 1;
    for (int i = how->ndim - 1; i >= 0; i--) {
        if (how->shape[i] != 1 && how->strides[i] != expected) return 0;
        expected *= how->shape[i];
    }
    return 1;
}

static int place_of(const DLTensor *how) /* as torch numbers them: -1 is the host */
{
    return how->device.device_type == kDLCPU ? -1 : how->device.device_id;
}

static long long number_of(PyObject *got) /* steals it; -1 with an error set if it is none */
{
    if (got == NULL) return -1;
    long long number = PyLong_AsLongLong(got);
    Py_DECREF(got);
    return number;
}

static long long version_in(PyObject *tensor) /* how often torch counted a change in place; -1 with an error set */
{
    return number_of(get_version(tensor, get_version_of));
}

static int is_address(PyObject *got, unsigned long long *address)
{
    if (got == NULL) return 0;
    *address = PyLong_AsUnsignedLongLong(got);
    Py_DECREF(got);
    return !PyErr_Occurred();
}

/* Whether a frame is so many away from the one that runs now, counted as `sys._getframe` does. */
static int is_frame(PyObject *frame, long away)
{
#if PY_VERSION_HEX >= 0x030B0000
    struct _PyInterpreterFrame *here = FRAME(PyThreadState_Get());
    for (; here != NULL; here = here->previous)
        if (!_PyFrame_IsIncomplete(here) && away-- == 0) return (PyObject *)here->frame_obj == frame;
    return 0;
#else
    PyFrameObject *here = away < 0 ? NULL : PyThreadState_Get()->frame;
    while (here != NULL && away-- > 0) here = here->f_back;
    return (PyObject *)here == frame;
#endif
}

/* Forget what a question raised; 0 if it was an interrupt, which is nobody's to forget. */
static int forgiven(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return 0;
    PyErr_Clear();
    return 1;
}
