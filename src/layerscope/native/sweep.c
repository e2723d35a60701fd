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

/* Whether torch counts no change of the values, and they lie as they did; -1 if the tensor cannot be asked (in a
   transform of functions). */
static int is_intact(Held *self, DLTensor *how)
{
    Lying now;
    long long version = version_in(self->tensor);
    if (PyErr_Occurred() || !lies(self->tensor, how, &now)) return PyErr_Occurred() ? -1 : 0;
    return is_unchanged(self, version, now);
}

static int is_shaped(Held *self, const DLTensor *how)
{
    PyObject *shape = PyTuple_New(how->ndim);
    for (int i = 0; shape != NULL && i < how->ndim; i++) {
        PyObject *size = PyLong_FromLongLong(how->shape[i]);
        if (size == NULL)
            Py_CLEAR(shape);
        else
            PyTuple_SET_ITEM(shape, i, size);
    }
    Py_XSETREF(self->shape, shape);
    return shape != NULL;
}

/* Find the dtype of a tensor; whether what has it may be taken with others. */
static int is_typed(Held *self, DLDataType type)
{
    Pass *pass = self->pass;
    if (pass->typed && memcmp(&pass->type, &type, sizeof type) == 0) {
        Py_XSETREF(self->dtype, Py_NewRef(pass->dtype));
        return 1;
    }
    Py_XSETREF(self->dtype, PyObject_GetAttr(self->tensor, s_dtype));
    if (self->dtype == NULL) return 0;
    if (pass->dtype != self->dtype) return type.code != kDLComplex;
    pass->type = type;
    pass->typed = type.bits != 8 || (type.code != kDLInt && type.code != kDLUInt); /* uint4 is called as uint8 is */
    return 1;
}

static int lies_plainly(Held *self, const DLTensor *how, long long place)
{
    if (self->lying.address % 16 || !self->lying.items || place_of(how) != place || !is_contiguous(how)) return 0;
    PyObject *negative = is_negative(self->tensor, NULL);
    Py_XDECREF(negative);
    return negative == Py_False;
}

static PyMemberDef Held_members[] = {
    {"pass_", T_OBJECT, offsetof(Held, pass), READONLY, "of its point"},
    {"tensor", T_OBJECT, offsetof(Held, tensor), READONLY, "while it waits, and has no twin"},
    {"dtype", T_OBJECT, offsetof(Held, dtype), READONLY, "of the tensor, once it was taken"},
    {"moment", T_OBJECT, offsetof(Held, moment), READONLY, "at which it was seen"},
    {"shape", T_OBJECT, offsetof(Held, shape), READONLY, "of the tensor, a tuple, once it was taken"},
    {"got", T_OBJECT, offsetof(Held, got), 0, "what was taken of it, with others"},
    {"place", T_LONGLONG, offsetof(Held, place), 0, "of its part in that"},
    {"part", T_OBJECT, offsetof(Held, part), 0, "that part, once somebody asked for it"},
    {"twin", T_OBJECT, offsetof(Held, twin), READONLY, "the first to wait for the same tensor"},
    {"items", T_LONGLONG, offsetof(Held, lying.items), READONLY, "of the tensor"},
    {"type", T_ULONGLONG, offsetof(Held, lying.type), READONLY, "of its items, as DLPack has it"},
    {"address", T_ULONGLONG, offsetof(Held, lying.address), READONLY, "of the tensor"},
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
        DLTensor how;
        int intact = is_intact(one, &how);
        if (intact == 0)
            fine = PyList_Append(changed, item) == 0;
        else if (intact == 1 && is_shaped(one, &how) && is_typed(one, how.dtype) && lies_plainly(one, &how, place))
            fine = group_with(groups, one);
        else
            fine = forgiven() && PyList_Append(odd, item) == 0;
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

/* Write where some of these lie, and tell them where their numbers will be; return how many programs the largest takes.
 */
static long long entered(PyObject *held, Py_ssize_t from, Py_ssize_t to, unsigned long long address, long long tile,
                         long long most, PyObject *got, long long place)
{
    long long *entry = (long long *)(uintptr_t)address, largest = 1;
    for (Py_ssize_t i = from; i < to; i++, entry += 3) {
        Held *one = (Held *)PyList_GET_ITEM(held, i);
        long long tiles = (one->lying.items + tile - 1) / tile, each = tiles > most ? (tiles + most - 1) / most : 1;
        entry[0] = (long long)one->lying.address;
        entry[1] = one->lying.items;
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
            for (Py_ssize_t i = from; taken < 0 && i < from + count; i++)
                Py_CLEAR(((Held *)PyList_GET_ITEM(held, i))->got);
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

static PyObject *Way_take(Way *self, PyObject *held)
{
    if (!PyList_Check(held)) return PyErr_Format(PyExc_TypeError, "a list of what waits is needed");
    if ((held = range_of(held, 0, PyList_GET_SIZE(held))) == NULL) return NULL;
    Py_ssize_t done = go(self, held);
    Py_DECREF(held);
    return done < 0 ? NULL : PyLong_FromSsize_t(done);
}

static PyMemberDef Way_members[] = {{NULL}};
static PyMethodDef Way_methods[] = {
    {"take", (PyCFunction)Way_take, METH_O, "Take these, as long as the way is free; return how many."}, {NULL}};

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
    PyObject *sorted = sort(held, basket->place), *key, *group;
    int fine = sorted != NULL;
    int here = fine && basket->ways[0] != NULL && is_on_stream(basket);
    fine = fine && forgiven(); /* whoever takes the rest meets any error but an interrupt again, and says so */
    int rest = fine && (PyList_GET_SIZE(PyTuple_GET_ITEM(sorted, 1)) || PyList_GET_SIZE(PyTuple_GET_ITEM(sorted, 2)));
    Py_ssize_t at = 0;
    while (fine && PyDict_Next(PyTuple_GET_ITEM(sorted, 0), &at, &key, &group)) {
        Way *way = here ? way_of(basket, key) : NULL;
        if (way != NULL) {
            Py_INCREF(way);
            Py_ssize_t done = go(way, group);
            Py_DECREF(way);
            fine = forgiven();
            if (fine && PyList_SetSlice(group, 0, done < 0 ? taken_of(group) : done, NULL) < 0) PyErr_Clear();
        }
        rest |= PyList_GET_SIZE(group) > 0;
    }
    if (fine && rest) return Py_BuildValue("NN", held, sorted);
    release_all(held);
    Py_DECREF(held);
    Py_XDECREF(sorted);
    if (!fine) return NULL;
    Py_RETURN_NONE;
}

static long long aligned(long long size) { return (size + LINE - 1) & -LINE; }

static PyObject *room_for(PyObject *module, PyObject *args)
{
    PyObject *held;
    long long width, size = 0, largest = 0;
    if (!PyArg_ParseTuple(args, "O!L", &PyList_Type, &held, &width) || !is_range(held, 0, PyList_GET_SIZE(held)))
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(held); i++) {
        long long mine = width * ((Held *)PyList_GET_ITEM(held, i))->lying.items;
        size += aligned(mine);
        if (mine > largest) largest = mine;
    }
    return Py_BuildValue("LLL", aligned(24 * PyList_GET_SIZE(held)), size, largest);
}

static PyObject *ferried(PyObject *module, PyObject *args)
{
    PyObject *held, *got;
    unsigned long long address, target;
    long long width, largest = 1;
    if (!PyArg_ParseTuple(args, "O!LKKO", &PyList_Type, &held, &width, &address, &target, &got)) return NULL;
    if ((held = range_of(held, 0, PyList_GET_SIZE(held))) == NULL) return NULL;
    long long *entry = (long long *)(uintptr_t)address, entries = aligned(24 * PyList_GET_SIZE(held)), place = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(held); i++, entry += 3) {
        Held *one = (Held *)PyList_GET_ITEM(held, i);
        long long size = width * one->lying.items;
        entry[0] = (long long)one->lying.address;
        entry[1] = (long long)target + place;
        entry[2] = size;
        if (size > largest) largest = size;
        one->place = entries + place;
        place += aligned(size);
        Py_XSETREF(one->got, Py_NewRef(got));
    }
    Py_DECREF(held);
    return PyLong_FromLongLong(largest);
}

static PyObject *release(PyObject *module, PyObject *held)
{
    if (!PyList_Check(held)) return PyErr_Format(PyExc_TypeError, "a list of what waits is needed");
    release_all(held);
    Py_RETURN_NONE;
}
