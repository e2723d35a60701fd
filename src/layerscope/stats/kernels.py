"""The fused pass over a tensor's items, compiled by numba (the extra `fast`).

    moments(items)               # counts, sums and extremes
    full(items, 0, tables)       # and the buckets of the sketch, and both fingerprints
    whole("float32", address, size, full=True)      # the same of a tensor that lies in one piece, in a single call

One pass, one thread, no GIL. LLVM's vectoriser leaves a loop that also counts buckets scalar, so the loop body
is spelled out in vectors of eight lanes: the arithmetic then runs beside the counting instead of after it (9.0
against 5.4 GB/s on float32). `fallback` has the same verbs and gives the same numbers without numba.

numba's cache on disk notices changes of this file only. So all compiled code is here, and the constants that come
from elsewhere are part of the names under which it is kept.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np

from layerscope.stats.bits import FIRST, ITEMS, Array
from layerscope.stats.engine import Sweep, Taken
from layerscope.stats.prints import BLOCK, MIX_ADD, MIX_FIRST, MIX_SECOND, WEIGHTS
from layerscope.stats.sketch import LOWEST, STEPS

__all__ = ["careful", "drain", "full", "moments", "prints", "tables", "tally", "whole"]

# Imported as Any: what numba compiles is not Python to a type checker.
numba: Any = import_module("numba")
ir: Any = import_module("llvmlite.ir")
cgutils: Any = import_module("numba.core.cgutils")
intrinsic: Any = import_module("numba.extending").intrinsic
types: Any = numba.types
Builder: TypeAlias = Any
Value: TypeAlias = Any
Kind: TypeAlias = Any


_CONSTANTS = zlib.crc32(repr((BLOCK, MIX_FIRST, MIX_ADD, MIX_SECOND, LOWEST, STEPS, FIRST)).encode())


def _compiled(function: Callable[..., Any]) -> Any:
    """Compile on first use, kept on disk where there is a place for it."""
    function.__qualname__ += f"_{_CONSTANTS:08x}"
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # numba found no cache directory it may write to
        return numba.njit(nogil=True, error_model="numpy")(function)


# Vectors of lanes -------------------------------------------------------------------------------

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_F32, _F64 = ir.FloatType(), ir.DoubleType()


class _Lanes:
    """A vector of LLVM values that is written like a number; a Python number stands for all its lanes."""

    def __init__(self, builder: Builder, value: Value) -> None:
        self.builder, self.value = builder, value

    def _with(self, value: Value) -> _Lanes:
        return _Lanes(self.builder, value)

    def _other(self, other: _Lanes | int | float) -> Value:
        if isinstance(other, _Lanes):
            return other.value
        return _splat(self.value.type, other)

    @property
    def real(self) -> bool:
        """Whether the lanes are floating-point numbers."""
        return self.value.type.element in (_F32, _F64)

    def __add__(self, other: _Lanes | int | float) -> _Lanes:
        add = self.builder.fadd if self.real else self.builder.add
        return self._with(add(self.value, self._other(other), flags=("contract",) if self.real else ()))

    def __sub__(self, other: _Lanes | int | float) -> _Lanes:
        sub = self.builder.fsub if self.real else self.builder.sub
        return self._with(sub(self.value, self._other(other)))

    def __mul__(self, other: _Lanes | int | float) -> _Lanes:
        mul = self.builder.fmul if self.real else self.builder.mul
        return self._with(mul(self.value, self._other(other), flags=("contract",) if self.real else ()))

    def __xor__(self, other: _Lanes | int) -> _Lanes:
        return self._with(self.builder.xor(self.value, self._other(other)))

    def __or__(self, other: _Lanes | int) -> _Lanes:
        return self._with(self.builder.or_(self.value, self._other(other)))

    def __and__(self, other: _Lanes | int) -> _Lanes:
        return self._with(self.builder.and_(self.value, self._other(other)))

    def __rshift__(self, bits: int) -> _Lanes:
        return self._with(self.builder.lshr(self.value, self._other(bits)))

    def __lshift__(self, bits: int) -> _Lanes:
        return self._with(self.builder.shl(self.value, self._other(bits)))

    def test(self, relation: str, other: _Lanes | int, *, signed: bool = False) -> _Lanes:
        compare = self.builder.icmp_signed if signed else self.builder.icmp_unsigned
        return self._with(compare(relation, self.value, self._other(other)))

    def where(self, mask: _Lanes, other: _Lanes | int | float) -> _Lanes:
        return self._with(self.builder.select(mask.value, self.value, self._other(other)))

    def cast(self, how: str, element: Kind) -> _Lanes:
        lanes = ir.VectorType(element, self.value.type.count)
        return self._with(getattr(self.builder, how)(self.value, lanes))

    def absolute(self) -> _Lanes:
        kind = self.value.type
        name = f"llvm.fabs.v{kind.count}f64"
        function = cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(kind, [kind]), name)
        return self._with(self.builder.call(function, [self.value]))

    def reduced(self, how: str) -> Value:
        """All lanes as one scalar: add, fadd, smax, umax or umin."""
        kind = self.value.type
        start = [ir.Constant(_F64, -0.0)] if how == "fadd" else []
        suffix = "f64" if how == "fadd" else f"i{kind.element.width}"
        signature = ir.FunctionType(kind.element, [value.type for value in start] + [kind])
        name = f"llvm.vector.reduce.{how}.v{kind.count}{suffix}"
        function = cgutils.get_or_insert_function(self.builder.module, signature, name)
        return self.builder.call(function, [*start, self.value], fastmath=("reassoc",) if start else ())


def _splat(kind: Kind, number: int | float) -> Value:
    return ir.Constant(kind, [ir.Constant(kind.element, number)] * kind.count)


def _float_bits(items: _Lanes, dtype: Kind) -> _Lanes:
    """The items as the bits of float32 (of float64, for float64), exactly; int16 is float16, uint16 bfloat16."""
    if dtype in (types.float32, types.float64):
        return items
    wide = items.cast("zext", _I32)
    if dtype == types.uint16:
        return wide << 16
    magnitude, sign = (wide & 0x7FFF) << 13, (wide & 0x8000) << 16
    exponent = magnitude & (0x1F << 23)
    normal = magnitude + (112 << 23)
    special = magnitude + (224 << 23)
    # A subnormal half is a fraction of 2**-14: put it under an implied one, then take that one away.
    small = ((magnitude + (113 << 23)).cast("bitcast", _F32) - 2.0**-14).cast("bitcast", _I32)
    return small.where(exponent.test("==", 0), special.where(exponent.test("==", 0x1F << 23), normal)) | sign


def _mixed(items: _Lanes) -> _Lanes:
    """`prints.mixed`, lane by lane."""
    x = items if items.value.type.element.width == 64 else items.cast("zext", _I64)
    x = x * MIX_FIRST + MIX_ADD
    x = (x ^ (x >> 32)) * MIX_SECOND
    return x ^ (x >> 32)


# The loop ---------------------------------------------------------------------------------------

_MOMENTS, _FULL, _CAREFUL = 0, 1, 2
_LANES = 8
_PAD = 16  # counters between two tables, lest the same bucket of both share the low bits of its address


def _stride(wide: bool) -> int:
    return (1 << (18 if wide else 15)) + _PAD


# sum, sum of squares, sum of magnitudes; largest as signed, largest and smallest as unsigned bits;
# zeros, nan, +inf, -inf; order-free and position-weighted fingerprint.
_RESULT = types.Tuple(
    (types.float64,) * 3 + (types.int64, types.uint64, types.uint64) + (types.int64,) * 4 + (types.uint64,) * 2
)


def _sweep_of(
    typing: Any, plan: Any, lanes: Any, items: Any, start: Any, stop: Any, centre: Any, weights: Any, tables: Any
) -> Any:
    """Sweep items[start:stop], a multiple of `lanes`, and return what `_RESULT` lists.

    `_MOMENTS` and `_FULL` take every item for finite (extremes tell when one was not); `_CAREFUL` leaves the
    others out, counts them, and takes sums and squares of the distance from `centre`. `_FULL` also counts
    buckets into `tables` and makes fingerprints, `weights` being those of the items from `start` on.
    """
    signature = _RESULT(plan, lanes, items, types.uint64, types.uint64, types.float64, weights, tables)
    arguments = (plan.literal_value, lanes.literal_value, items.dtype)
    return signature, lambda context, builder, sig, args: _emit(context, builder, sig, args, *arguments)


_sweep: Any = intrinsic(prefer_literal=True)(_sweep_of)


def _emit(context: Any, b: Builder, signature: Any, args: Any, plan: int, lanes: int, dtype: Kind) -> Value:
    at_items, at_weights, at_tables = (
        b.bitcast(context.make_array(signature.args[place])(context, b, args[place]).data, item.as_pointer())
        for place, item in ((2, ir.IntType(dtype.bitwidth)), (6, _I64), (7, _I32))
    )
    start, stop, centre = args[3:6]
    wide = _I64 if dtype == types.float64 else _I32
    identity = {
        "sum": (_F64, -0.0), "squares": (_F64, 0.0), "magnitude": (_F64, 0.0),
        "signed": (wide, -(1 << wide.width - 1)), "largest": (wide, 0), "smallest": (wide, (1 << wide.width) - 1),
        "zeros": (wide, 0), "nan": (wide, 0), "posinf": (wide, 0), "neginf": (wide, 0),
        "free": (_I64, 0), "placed": (_I64, 0),
    }  # fmt: skip

    entry, head, body, done = b.block, *(b.append_basic_block(name) for name in ("head", "body", "done"))
    b.branch(head)
    b.position_at_end(head)
    index = b.phi(_I64)
    index.add_incoming(start, entry)
    carried: dict[str, _Lanes] = {}
    for name, (element, number) in identity.items():
        phi = b.phi(ir.VectorType(element, lanes))
        phi.add_incoming(_splat(phi.type, number), entry)
        carried[name] = _Lanes(b, phi)
    b.cbranch(b.icmp_unsigned("<", index, stop), body, done)

    b.position_at_end(body)
    items = _loaded(b, b.gep(at_items, [index]), lanes)
    bits = _float_bits(items, dtype)
    now = _step(carried, bits, _spread(b, centre, lanes) if plan == _CAREFUL else None)
    if plan == _FULL:
        mixed = _mixed(items)
        now["free"] += mixed
        now["placed"] += mixed * _loaded(b, b.gep(at_weights, [b.sub(index, start)]), lanes)
        _count(b, _keys(b, bits, b.gep(at_items, [index]), dtype), at_tables, _stride(wide is _I64))
    index.add_incoming(b.add(index, ir.Constant(_I64, lanes)), body)
    for name, vector in carried.items():
        vector.value.add_incoming(now[name].value, body)
    b.branch(head)

    b.position_at_end(done)
    how = {"signed": "smax", "largest": "umax", "smallest": "umin"}
    scalars = {
        name: vector.reduced("fadd" if vector.real else how.get(name, "add")) for name, vector in carried.items()
    }
    if wide is _I32:
        for name in ("largest", "smallest", "zeros", "nan", "posinf", "neginf"):
            scalars[name] = b.zext(scalars[name], _I64)
        scalars["signed"] = b.sext(scalars["signed"], _I64)
    return context.make_tuple(b, signature.return_type, list(scalars.values()))


def _step(carried: dict[str, _Lanes], bits: _Lanes, centre: _Lanes | None) -> dict[str, _Lanes]:
    """Take one group of lanes into counts, sums and extremes; with a centre, leave out what is not finite."""
    now = dict(carried)
    wide = bits.value.type.element
    value = bits.cast("bitcast", _F64) if wide is _I64 else bits.cast("bitcast", _F32).cast("fpext", _F64)
    above = bits.test(">", carried["signed"], signed=True)
    over = bits.test(">", carried["largest"])
    under = bits.test("<", carried["smallest"])
    absolute = value.absolute()
    if centre is not None:
        magnitude = bits & ((1 << wide.width - 1) - 1)
        infinity = 0x7FF << 52 if wide is _I64 else 0xFF << 23
        finite = magnitude.test("<", infinity)
        above, over, under = above & finite, over & finite, under & finite
        now["nan"] += magnitude.test(">", infinity).cast("zext", wide)
        now["posinf"] += bits.test("==", infinity).cast("zext", wide)
        now["neginf"] += bits.test("==", infinity | 1 << wide.width - 1).cast("zext", wide)
        absolute = absolute.where(finite, 0.0)
        value = (value - centre).where(finite, 0.0)
    now["sum"] += value
    now["squares"] += value * value
    now["magnitude"] += absolute
    now["signed"] = bits.where(above, carried["signed"])
    now["largest"] = bits.where(over, carried["largest"])
    now["smallest"] = bits.where(under, carried["smallest"])
    now["zeros"] += (bits + bits).test("==", 0).cast("zext", wide)  # the sum drops the sign
    return now


def _loaded(b: Builder, place: Value, lanes: int) -> _Lanes:
    item = place.type.pointee
    vector = b.bitcast(place, ir.VectorType(item, lanes).as_pointer())
    return _Lanes(b, b.load(vector, align=item.width // 8))


def _spread(b: Builder, scalar: Value, lanes: int) -> _Lanes:
    vector = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    for lane in range(lanes):
        vector = b.insert_element(vector, scalar, ir.Constant(_I32, lane))
    return _Lanes(b, vector)


def _keys(b: Builder, bits: _Lanes, at_items: Value, dtype: Kind) -> list[Value]:
    """Each lane's bucket: sign, exponent and six bits of the fraction.

    Read from memory once more where the stored bits have them in place, 64 bits at a time: cheaper than taking a
    vector apart, and the empty assembly keeps LLVM from doing just that.
    """
    width, lanes = dtype.bitwidth, bits.value.type.count
    mask = (1 << (18 if width == 64 else 15)) - 1
    if lanes == 1 or dtype == types.int16:
        vector = (bits >> (46 if width == 64 else 17)).value
        keys = [b.extract_element(vector, ir.Constant(_I32, lane)) for lane in range(lanes)]
        return keys if width == 64 else [b.zext(key, _I64) for key in keys]
    keys = []
    address = b.bitcast(at_items, _I64.as_pointer())
    at_words = b.asm(ir.FunctionType(address.type, [address.type]), "", "=r,0", [address], False)
    drop = {16: 1, 32: 17, 64: 46}[width]
    for place in range(lanes * width // 64):
        word = b.load(b.gep(at_words, [ir.Constant(_I64, place)]), align=width // 8)
        for shift in range(drop, 64, width):
            keys.append(b.and_(b.lshr(word, ir.Constant(_I64, shift)), ir.Constant(_I64, mask)))
    return keys


def _count(b: Builder, keys: list[Value], tables: Value, stride: int) -> None:
    """Add one to each key's bucket. Neighbours go to different tables, lest equal values wait for each other."""
    for lane, key in enumerate(keys):
        bucket = b.gep(tables, [b.add(key, ir.Constant(_I64, lane % 2 * stride))])
        b.store(b.add(b.load(bucket), ir.Constant(_I32, 1)), bucket)


# The pass ---------------------------------------------------------------------------------------

_BLOCK = np.uint64(BLOCK)
_WHOLE = np.uint64(_LANES)
_STRETCH = np.uint64(1 << 12)  # items between two looks at whether something was not finite
_HALF, _ONE = np.uint64(32), np.uint64(1)
_FIRST, _ADD, _SECOND = np.uint64(MIX_FIRST), np.uint64(MIX_ADD), np.uint64(MIX_SECOND)


@_compiled
def _joined(a: Any, b: Any) -> Any:
    return (
        a[0] + b[0], a[1] + b[1], a[2] + b[2],
        max(a[3], b[3]), max(a[4], b[4]), min(a[5], b[5]),
        a[6] + b[6], a[7] + b[7], a[8] + b[8], a[9] + b[9],
        a[10] + b[10], a[11] + b[11],
    )  # fmt: skip


@_compiled
def _scrambled(number: Any) -> Any:
    x = number * _FIRST + _ADD
    x = (x ^ (x >> _HALF)) * _SECOND
    return x ^ (x >> _HALF)


@_compiled
def _spoiled(part: Any, items: Any) -> Any:
    """Whether something was not finite: then it is among the extremes of the bits."""
    if items.itemsize == 8:
        return part[3] >= 0x7FF << 52 or part[4] >= np.uint64(0xFFF << 52)
    return part[3] >= 0xFF << 23 or part[4] >= np.uint64(0x1FF << 23)


@_compiled
def _careful_part(items: Any, start: Any, stop: Any, centre: Any) -> Any:
    whole = stop - (stop - start) % _WHOLE
    return _joined(
        _sweep(_CAREFUL, _LANES, items, start, whole, centre, items, items),
        _sweep(_CAREFUL, 1, items, whole, stop, centre, items, items),
    )


@_compiled
def _moments_part(items: Any, start: Any, stop: Any) -> Any:
    whole = stop - (stop - start) % _WHOLE
    part = _joined(
        _sweep(_MOMENTS, _LANES, items, start, whole, 0.0, items, items),
        _sweep(_MOMENTS, 1, items, whole, stop, 0.0, items, items),
    )
    return _careful_part(items, start, stop, 0.0) if _spoiled(part, items) else part


@_compiled
def _full_part(items: Any, start: Any, stop: Any, weights: Any, tables: Any) -> Any:
    whole = stop - (stop - start) % _WHOLE
    part = _joined(
        _sweep(_FULL, _LANES, items, start, whole, 0.0, weights, tables),
        _sweep(_FULL, 1, items, whole, stop, 0.0, weights[np.int64(whole - start) :], tables),
    )
    return _careful_part(items, start, stop, 0.0)[:10] + part[10:] if _spoiled(part, items) else part


@_compiled
def _moments(items: Any) -> Any:
    end = np.uint64(items.size)
    total = _moments_part(items, end, end)
    at = np.uint64(0)
    while at < end:
        stop = min(end, at + _STRETCH)
        total = _joined(total, _moments_part(items, at, stop))
        at = stop
    return total


@_compiled
def _careful(items: Any, centre: Any) -> Any:
    end = np.uint64(items.size)
    total = _careful_part(items, end, end, centre)
    at = np.uint64(0)
    while at < end:
        stop = min(end, at + _STRETCH)
        total = _joined(total, _careful_part(items, at, stop, centre))
        at = stop
    return total


@_compiled
def _full(items: Any, start: Any, weights: Any, tables: Any) -> Any:
    end = np.uint64(items.size)
    total = _moments_part(items, end, end)
    at = np.uint64(0)
    while at < end:
        position = np.uint64(start) + at
        lead = position % _BLOCK
        stop = min(end, at + (_BLOCK - lead))
        part = _full_part(items, at, stop, weights[np.int64(lead) :], tables)
        placed = part[11] * (_scrambled(position // _BLOCK) | _ONE)
        total = _joined(total, (*part[:11], placed))
        at = stop
    return total


@_compiled
def _prints(words: Any, start: Any, weights: Any) -> Any:
    free, placed = np.uint64(0), np.uint64(0)
    at = 0
    while at < words.size:
        lead = (start + at) % BLOCK
        part = words[at : at + BLOCK - lead]
        weight = weights[lead : lead + part.size]
        block = np.uint64(0)
        for i in range(part.size):
            mixed = _scrambled(np.uint64(part[i]))
            free += mixed
            block += mixed * weight[i]
        placed += block * (_scrambled(np.uint64((start + at) // BLOCK)) | _ONE)
        at += part.size
    return free, placed


@_compiled
def _tally(items: Any, counts: Any) -> Any:
    tables = np.zeros((4, 256), np.int64)
    one, two, three, four = tables[0], tables[1], tables[2], tables[3]
    rest = items.size % 4
    for i in range(items.size // 4):
        one[items[4 * i]] += 1
        two[items[4 * i + 1]] += 1
        three[items[4 * i + 2]] += 1
        four[items[4 * i + 3]] += 1
    for i in range(items.size - rest, items.size):
        one[items[i]] += 1
    counts += one + two + three + four


@_compiled
def _drain(tables: Any, wide: Any, signed: Any, largest: Any, finite: Any, spoiled: Any, keys: Any, counts: Any) -> Any:
    """Move the counts into `keys` (ascending) and `counts`, leave the tables zero, return how many there are."""
    stride = tables.size // 2
    negative = stride - _PAD >> 1
    first = 1023 + LOWEST if wide else 127 + LOWEST
    shift = np.uint64(52 if wide else 23)
    top = 0x7FF if wide else 0xFF
    highest = np.int64(np.uint64(signed) >> shift) if signed >= 0 else -1
    lowest = np.int64(largest >> shift) - (top + 1)
    size = seen = np.int64(0)
    for exponent in range(lowest, first - 1, -1):
        place = negative + exponent * STEPS
        one, two = tables[place : place + STEPS], tables[stride + place : stride + place + STEPS]
        occupied = np.uint32(0)
        for i in range(STEPS):
            occupied |= one[i] | two[i]
        if occupied:
            for i in range(STEPS - 1, -1, -1):
                count = np.int64(one[i]) + np.int64(two[i])
                if count:
                    keys[size], counts[size] = -((exponent - first) * STEPS + i + 1), count
                    size += 1
                    seen += count
            one[:] = 0
            two[:] = 0
    zero = size
    size += 1
    for exponent in range(first, highest + 1):
        place = exponent * STEPS
        one, two = tables[place : place + STEPS], tables[stride + place : stride + place + STEPS]
        occupied = np.uint32(0)
        for i in range(STEPS):
            occupied |= one[i] | two[i]
        if occupied:
            for i in range(STEPS):
                count = np.int64(one[i]) + np.int64(two[i])
                if count:
                    keys[size], counts[size] = (exponent - first) * STEPS + i + 1, count
                    size += 1
                    seen += count
            one[:] = 0
            two[:] = 0
    near_zero = finite - seen
    if near_zero:
        keys[zero], counts[zero] = 0, near_zero
    else:
        size -= 1
        for i in range(zero, size):
            keys[i], counts[i] = keys[i + 1], counts[i + 1]
    for part in (0, negative, stride, stride + negative):
        if near_zero:
            tables[part : part + first * STEPS] = 0
        if spoiled:
            tables[part + top * STEPS : part + (top + 1) * STEPS] = 0
    return size


# A whole tensor in one call ---------------------------------------------------------------------
#
# Between two matrix products Python itself has left the caches, and every line of it that a hook touches costs a
# miss. So the usual tensor is not made an array first: the compiled code takes addresses, and leaves its numbers in a
# row of memory, to be read when there is time: the twelve of `_RESULT`, and then the tensor's first items.

_WIDE, _NARROW = 2 * _stride(True), 2 * _stride(False)  # counters
_SUMS = 96  # bytes of a row before the first items
_ROW, _ROWS = _SUMS + 8 * FIRST, 64  # bytes of a row, and rows on a sheet
_SURE = 1.1e-3  # `measure` looks again below 1e-3; no rounding makes up for the difference


def _pointer_of(typing: Any, kind: Any, address: Any) -> Any:
    """Take a number for the address of items; `kind` is any number of their type."""
    pointer = types.CPointer(kind)

    def code(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        return builder.inttoptr(args[1], context.get_value_type(pointer))

    return pointer(kind, address), code


_pointer: Any = intrinsic(_pointer_of)


@_compiled
def _left(swept: Any, items: Any, row: Any) -> Any:
    """Write the row; return whether the sums are accurate enough for mean and std."""
    sums = numba.carray(_pointer(0.0, row), 3)
    sums[0], sums[1], sums[2] = swept[0], swept[1], swept[2]
    words = numba.carray(_pointer(_ONE, row + np.uint64(24)), 9)
    words[0], words[1], words[2] = np.uint64(swept[3]), swept[4], swept[5]
    words[3], words[4], words[5] = np.uint64(swept[6]), np.uint64(swept[7]), np.uint64(swept[8])
    words[6], words[7], words[8] = np.uint64(swept[9]), swept[10], swept[11]
    first = numba.carray(_pointer(items[0], row + np.uint64(_SUMS)), FIRST)
    for i in range(min(FIRST, items.size)):
        first[i] = items[i]
    finite = items.size - swept[7] - swept[8] - swept[9]
    mean = swept[0] / finite
    if items.itemsize == 8 and not 2.0**-700 < swept[1] < np.inf:
        return finite == 0 or swept[4] == swept[5]
    return swept[4] == swept[5] or not swept[1] / finite - mean * mean < _SURE * mean * mean


@_compiled
def _moments_of(kind: Any, address: Any, size: Any, row: Any) -> Any:
    items = numba.carray(_pointer(kind, address), size)
    return 0 if _left(_moments(items), items, row) else -1


@_compiled
def _full_of(
    kind: Any, address: Any, size: Any, row: Any, at_weights: Any, at_tables: Any, at_keys: Any, at_counts: Any
) -> Any:
    items = numba.carray(_pointer(kind, address), size)
    weights = numba.carray(_pointer(_ONE, at_weights), BLOCK)
    wide = items.itemsize == 8
    room = _WIDE if wide else _NARROW
    tables = numba.carray(_pointer(np.uint32(0), at_tables), room)
    keys = numba.carray(_pointer(np.int32(0), at_keys), room)
    counts = numba.carray(_pointer(np.int64(0), at_counts), room)
    swept = _full(items, 0, weights, tables)
    lost = swept[7] + swept[8] + swept[9]
    buckets = _drain(tables, wide, swept[3], swept[4], items.size - lost, lost > 0, keys, counts)
    return buckets if _left(swept, items, row) else -1


# The verbs --------------------------------------------------------------------------------------


class _Scratch(threading.local):
    """One thread's counters, zero between uses; several threads may summarise at once."""

    def __init__(self) -> None:
        self.tables: dict[bool, Array] = {}
        self.drained: dict[bool, tuple[Array, Array]] = {}


_scratch = _Scratch()


class _Desk:
    """Where compiled code leaves what it finds, for one caller at a time; with the addresses it takes."""

    def __init__(self, dtype: str, *, full: bool) -> None:
        # The compiled function itself, without the dispatcher that would look at its arguments' types first.
        function, numbers = (_full_of, 7) if full else (_moments_of, 3)
        self.sweep = function.compile((numba.from_dtype(ITEMS[dtype]),) + (types.uint64,) * numbers)
        self.turn()
        room = (_WIDE if dtype == "float64" else _NARROW) if full else 0
        self.tables = np.zeros(room, np.uint32)
        self.keys, self.counts = np.empty(room, np.int32), np.empty(room, np.int64)
        self.addresses = tuple(array.ctypes.data for array in (WEIGHTS, self.tables, self.keys, self.counts))

    def turn(self) -> None:
        """Take a new sheet of rows; the old one belongs to those who have yet to read it."""
        self.rows = np.zeros(_ROWS * _ROW, np.uint8)
        self.at_rows, self.start = self.rows.ctypes.data, 0


_desks: dict[tuple[str, bool], list[_Desk]] = {}  # idle ones; a list's pop and append need no lock


def whole(dtype: str, address: int, size: int, *, full: bool) -> Taken | None:
    """Sweep all of a tensor that lies in one piece; None when the sums alone are not accurate enough."""
    idle = _desks.get((dtype, full)) or _desks.setdefault((dtype, full), [])
    try:
        desk = idle.pop()
    except IndexError:
        desk = _Desk(dtype, full=full)
    rows, start = desk.rows, desk.start
    keys = counts = None
    if full:
        buckets = desk.sweep(0, address, size, desk.at_rows + start, *desk.addresses)
        if buckets >= 0:
            keys, counts = desk.keys[:buckets].copy(), desk.counts[:buckets].copy()
    else:
        buckets = desk.sweep(0, address, size, desk.at_rows + start)
    desk.start = start + _ROW
    if desk.start == _ROWS * _ROW:
        desk.turn()
    idle.append(desk)
    return (rows, start, keys, counts) if buckets >= 0 else None


def moments(items: Array) -> Sweep:
    """Sweep contiguous items for counts, sums and extremes."""
    return Sweep(*_moments(items))


def careful(items: Array, centre: float) -> Sweep:
    """Sweep the finite items for sums and squares of their distance from `centre`."""
    return Sweep(*_careful(items, centre))


def full(items: Array, start: int, tables: Array) -> Sweep:
    """Sweep for everything: `moments`, buckets counted into `tables`, fingerprints from position `start` on."""
    return Sweep(*_full(items, start, WEIGHTS, tables))


def prints(words: Array, start: int) -> tuple[int, int]:
    """Return both fingerprints of words that stand at positions `start`, `start` + 1 and so on."""
    free, placed = _prints(words, start, WEIGHTS)
    return free, placed


def tally(items: Array) -> Array:
    """Count each of the 256 bytes."""
    counts = np.zeros(256, np.int64)
    _tally(items, counts)
    return counts


def tables(*, wide: bool) -> Array:
    """Return bucket counters, all zero: for float64 when `wide`, else for float32 and narrower.

    They are this thread's until `drain` takes them back; if that never happens, the next caller gets new ones.
    """
    kept = _scratch.tables.pop(wide, None)
    return np.zeros(2 * _stride(wide), np.uint32) if kept is None else kept


def drain(tables: Array, swept: Sweep, *, finite: int, wide: bool) -> tuple[Array, Array]:
    """Return keys and counts of the occupied buckets, ascending, and take the tables back."""
    if wide not in _scratch.drained:
        most = tables.size // 2 + 1
        _scratch.drained[wide] = np.empty(most, np.int32), np.empty(most, np.int64)
    keys, counts = _scratch.drained[wide]
    spoiled = swept.nan + swept.posinf + swept.neginf > 0
    size = _drain(tables, wide, swept.signed, np.uint64(swept.largest), finite, spoiled, keys, counts)
    _scratch.tables[wide] = tables
    return keys[:size].copy(), counts[:size].copy()
