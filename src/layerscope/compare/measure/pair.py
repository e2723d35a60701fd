"""Measure one pair of tensors: every metric, in one pass over both.

    metrics = measure(reference, candidate)              # tensors or arrays
    metrics = measure(entry, other, threads=2)           # records, read chunk by chunk

Any dtypes, any strides. Nothing is held but a few chunks of each side at a time; of a tensor on a device, a copy is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

import numpy as np

from layerscope.compare.measure.engine import engine, folded, table
from layerscope.compare.measure.metrics import PERCENTILES, Metrics, NonfiniteCounts, Side, Worst
from layerscope.compare.measure.numpy_sweep import sweep_complex
from layerscope.compare.measure.operands import CHUNK, Operand, chunk_pairs, operand
from layerscope.compare.measure.percentiles import exactly
from layerscope.compare.measure.sets import SetCounts
from layerscope.compare.measure.sums import Alone, Swept, Together, alone, together
from layerscope.compare.measure.token_errors import TokenErrors
from layerscope.errors import Damaged, Unsupported
from layerscope.stats.sketch import Sketch, buckets
from layerscope.stats.tensor_views import Array
from layerscope.store import Entry

if TYPE_CHECKING:
    import torch

EPSILON = 1e-8  # added to |reference| under an elementwise relative error
PERCENTILE_BOUND = 2.0**-7  # of the sketch, relative
_WIDEST_SET = 64
_ROWS = 1 << 12  # of sums, held until they are joined
_AHEAD = 4  # chunks that wait for a thread, lest one waits for a chunk
_TINY = 1 << 13  # bytes that are compared as one text
_SQUARED = 2.0**-400, 2.0**500  # magnitudes whose squares float64 holds, and sums of them

T = TypeVar("T")
S = TypeVar("S")


def measure(
    reference: Operand | Entry | torch.Tensor | Array,
    candidate: Operand | Entry | torch.Tensor | Array,
    *,
    threads: int = 1,
    exact: bool = False,
) -> Metrics:
    """Return every metric of a pair; raises Unsupported when the shapes differ, naming both.

    Sums are over the elements that are finite on both sides, each side's own statistics over its own finite ones.
    Integers are compared as float64: exactly up to 2**53. Percentiles are numpy's linear ones, read from the buckets
    of a sketch: within `percentile_bound` relatively, magnitudes below 2**-126 being read as zero; with `exact`, both
    sides are gone through again where the percentiles lie, and they are numpy's to the bit. No error at all is
    0 relative to anything (SQNR infinite, scale 1); any other ratio to zero is NaN. `worst` is the first of the largest
    in row-major order, None when nothing differs. `nonfinite.first` is the first that differs or, when none does, the
    first.

    Of complex tensors d is complex. Its mean and standard deviation, each side's own statistics and the values of the
    worst element are those of the modulus; correlation, cosine and scale take the real part of the inner product.

    With more `threads` the answer is the same to the bit.
    """
    left, right = operand(reference), operand(candidate)
    if left.shape != right.shape:
        raise Unsupported(
            f"the reference has shape {list(left.shape)} and the candidate {list(right.shape)}; "
            "only tensors of one shape are compared element by element."
        )
    passed = _passed(left, right, threads=threads)
    exponent = 0
    largest = max(abs(x) for side in (passed.reference, passed.candidate) for x in (side.lowest, side.highest, 0.0))
    if largest != 0 and largest != math.inf and not _SQUARED[0] < largest < _SQUARED[1]:
        exponent = math.frexp(largest)[1]
        passed = _passed(left, right, threads=threads, exponent=exponent)
    metrics = _metrics(passed, left, right, exponent=exponent)
    if not exact or metrics.percentile_bound == 0:
        return metrics
    found = exactly(lambda: _magnitudes(left, right, exponent), metrics.compared, PERCENTILES)
    percentiles = tuple(float(np.ldexp(value, exponent)) for value in found)
    return replace(metrics, percentiles=percentiles, percentile_bound=0.0)


def _magnitudes(left: Operand, right: Operand, exponent: int) -> Iterator[Array]:
    """Go through both sides once more, for |d| where both are finite."""
    kind = np.result_type(left.kind, right.kind)
    wide = np.complex128 if kind.kind == "c" else np.float64
    for one, other in chunk_pairs(left, right):
        r, c = (_floats(side, items, kind, exponent) for side, items in ((left, one), (right, other)))
        with np.errstate(all="ignore"):
            size: Array = np.abs(c.astype(wide) - r.astype(wide))
            yield size[np.isfinite(r) & np.isfinite(c)]


class _Passed(NamedTuple):
    """What one pass over a pair leaves."""

    together: Together
    reference: Alone
    candidate: Alone
    bitwise: bool
    differences: Sketch | None  # None where nothing differs
    tokens: TokenErrors | None
    sets: SetCounts | None


def _passed(left: Operand, right: Operand, *, threads: int, exponent: int = 0) -> _Passed:
    """Go through both sides once; with an `exponent`, over the values divided by that power of two."""
    shape, count = left.shape, math.prod(left.shape)
    kind = np.result_type(left.kind, right.kind)
    sweep = sweep_complex if kind.kind == "c" else engine().sweep
    width = shape[-1] if len(shape) >= 3 else 0
    tokens = TokenErrors() if width and count else None
    sets = SetCounts(shape[-1]) if _has_sets(left, right) else None

    def located() -> Iterator[tuple[int, Array, Array]]:
        at = 0
        for one, other in chunk_pairs(left, right):
            if sets is not None:
                sets.add(_integers(left, one), _integers(right, other))
            yield at, one, other
            at += one.size
        if at != count:
            raise Damaged(f"of {count} elements only {at} could be read of both sides; one of them ends too early.")

    tables: list[Array] = []

    def work(chunk: tuple[int, Array, Array]) -> tuple[int, bool, Swept]:
        at, one, other = chunk
        same = left.dtype == right.dtype and _same(one, other)
        r = _floats(left, one, kind, exponent)
        c = r if same else _floats(right, other, kind, exponent)
        try:
            counters = tables.pop()
        except IndexError:  # the other threads have them
            counters = _cleared.pop() if _cleared else table()
        swept = sweep(r, c, buckets=counters, same=same, start=at, epsilon=math.ldexp(EPSILON, -exponent), width=width)
        tables.append(counters)
        return at, same, swept

    bitwise = left.dtype == right.dtype
    rows = _Rows()
    chunks = located()
    for at, same, swept in map(work, chunks) if threads <= 1 or count <= CHUNK else _mapped(work, chunks, threads):
        bitwise &= same
        rows.add(swept)
        if tokens is not None:
            tokens.add(swept.token_errors, swept.token_powers, first=at // width)
    pair, reference, candidate = rows.joined()
    return _Passed(pair, reference, candidate, bitwise, _sketch(tables, pair.largest), tokens, sets)


@final
class _Rows:
    """Rows of sums as they come in; joined when there are many, wherever they came from, so always at the same rows."""

    def __init__(self) -> None:
        self._parts: list[tuple[Array, Array, Array]] = []
        self._size = 0

    def add(self, swept: Swept) -> None:
        self._parts.append(swept[:3])
        self._size += len(swept.together)
        if self._size > _ROWS:
            pairs, reference, candidate = self.joined()
            self._parts = [(np.array([pairs]), np.array([reference]), np.array([candidate]))]
            self._size = 1

    def joined(self) -> tuple[Together, Alone, Alone]:
        if not self._parts:
            return together(np.empty(0)), alone(np.empty(0)), alone(np.empty(0))
        if len(self._parts) == 1:
            pairs, reference, candidate = self._parts[0]
            return together(pairs), alone(reference), alone(candidate)
        pairs, reference, candidate = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        return together(pairs), alone(reference), alone(candidate)


def _mapped(work: Callable[[S], T], chunks: Iterable[S], threads: int) -> Iterator[T]:
    """Map in order with threads, a few chunks ahead and no more."""
    with ThreadPoolExecutor(threads, thread_name_prefix="layerscope-measure") as pool:
        waiting: deque[Future[T]] = deque()
        for chunk in chunks:
            waiting.append(pool.submit(work, chunk))
            if len(waiting) > threads + _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _same(one: Array, other: Array) -> bool:
    """Whether two chunks of one dtype have the same bits; one that differs mostly shows it at once."""
    if one.nbytes <= _TINY:
        return one.tobytes() == other.tobytes()
    words = np.uint64 if one.nbytes % 8 == 0 else np.uint8
    one, other = one.view(words), other.view(words)
    few = 1 << 10
    return np.array_equal(one[:few], other[:few]) and np.array_equal(one[few:], other[few:])


def _floats(side: Operand, items: Array, kind: np.dtype[Any], exponent: int) -> Array:
    """Return values in a common kind, divided by a power of two; real ones stay real beside complex ones."""
    values = side.values(items)
    values = values.astype(np.float64 if kind.kind == "c" != values.dtype.kind else kind, copy=False)
    return np.ldexp(values.view(np.float64), -exponent).view(values.dtype) if exponent else values


# Counters are large and mostly unused: a pair clears what it used of its own, for the next one.
_cleared: deque[Array] = deque(maxlen=4)


def _sketch(tables: list[Array], largest: float) -> Sketch | None:
    """Return what was counted, and clear the counters; nothing is beyond the bucket of the largest."""
    used = 1 if largest <= 0 else int(buckets(np.array([largest]))[0]) + 1
    counts = np.zeros(used, np.int64)
    for counted in tables:
        counts += folded(counted, used)
        for half in counted.reshape(2, -1):
            half[:used] = 0
        _cleared.append(counted)
    if largest <= 0:
        return None
    keys = np.flatnonzero(counts)
    return Sketch(keys.astype(np.int32), counts[keys])


# Sets -------------------------------------------------------------------------------------------


def _has_sets(left: Operand, right: Operand) -> bool:
    whole = all(side.dtype.startswith(("int", "uint")) for side in (left, right))
    return whole and len(left.shape) >= 2 and 0 < left.shape[-1] <= _WIDEST_SET


def _integers(side: Operand, items: Array) -> Array:
    return items.view(side.dtype)  # int8 items are held as bytes


# Metrics ----------------------------------------------------------------------------------------


@np.errstate(all="ignore")
def _metrics(passed: _Passed, left: Operand, right: Operand, *, exponent: int) -> Metrics:
    sums, count = passed.together, int(passed.together.count)

    def unscaled(number: float, power: int = 1) -> float:
        return float(np.ldexp(number, exponent * power)) if exponent else number

    if not count:
        sums = Together._make([*[math.nan] * 14, *sums[14:]])
    differs = sums.largest > 0
    power_r = sums.reference_spread + count * (sums.reference**2 + sums.reference_imaginary**2)
    power_c = sums.candidate_spread + count * (sums.candidate**2 + sums.candidate_imaginary**2)
    power_d = sums.difference_spread + count * sums.difference**2
    means = sums.reference * sums.candidate + sums.reference_imaginary * sums.candidate_imaginary
    inner = sums.product + count * means
    correlation = _cosine(sums.product, sums.reference_spread, sums.candidate_spread, differs=differs)
    mean_of = 1 / count if count else math.nan
    mine = _side(passed.reference, left.dtype, unscaled)
    own: dict[str, Any] = {
        "shape": left.shape,
        "count": math.prod(left.shape),
        "compared": count,
        "bitwise": passed.bitwise,
        "equal": int(sums.equal),
        "reference": mine,
        # Of equal bits both sides are one object: of many small tensors most memory is numbers.
        "candidate": mine if passed.bitwise else _side(passed.candidate, right.dtype, unscaled),
        "correlation": correlation,
        "cosine": _cosine(inner, power_r, power_c, differs=differs),
        "nonfinite": _nonfinite(sums, left.shape),
        "tokens": None if passed.tokens is None else passed.tokens.result(compared=count),
        "sets": None if passed.sets is None else passed.sets.result(),
    }
    if count and not differs:
        return Metrics(**own, **_NO_ERROR)
    found = passed.differences or Sketch(np.empty(0, np.int32), np.empty(0, np.int64))
    index = tuple(int(i) for i in np.unravel_index(int(sums.place), left.shape)) if differs else ()
    return Metrics(
        **own,
        mean=unscaled(sums.difference),
        std=unscaled(math.sqrt(sums.difference_spread * mean_of)),
        mae=unscaled(sums.difference_size * mean_of),
        max_abs=unscaled(sums.largest) if count else math.nan,
        worst=Worst(index, unscaled(sums.worst_reference), unscaled(sums.worst_candidate)) if differs else None,
        mse=unscaled(power_d * mean_of, 2),
        relative_mse=_ratio(power_d, power_r),
        relative_mae=_ratio(sums.difference_size, sums.reference_size),
        max_relative=sums.largest_relative,
        mean_relative=sums.relative * mean_of,
        sqnr=_decibels(power_r, power_d),
        relative_l2=math.sqrt(_ratio(power_d, power_r)),
        scale=inner / power_r if power_r else math.nan,
        percentiles=tuple(map(unscaled, found.quantiles([q / 100 for q in PERCENTILES], high=sums.largest))),
        percentile_bound=PERCENTILE_BOUND if differs else 0.0,
    )


# What is said of two sides without any difference.
_NO_ERROR: dict[str, Any] = {
    **dict.fromkeys(("mean", "std", "mae", "max_abs", "mse", "relative_mse", "relative_mae"), 0.0),
    **dict.fromkeys(("max_relative", "mean_relative", "relative_l2", "percentile_bound"), 0.0),
    "worst": None,
    "sqnr": math.inf,
    "scale": 1.0,
    "percentiles": (0.0,) * len(PERCENTILES),
}


def _side(own: Alone, dtype: str, unscaled: Callable[[float], float]) -> Side:
    counts = (int(own.nan), int(own.posinf), int(own.neginf), int(own.zeros))
    if not own.count:
        nan = math.nan
        return Side(dtype, nan, nan, nan, nan, nan, nan, *counts)
    variance = own.spread / own.count
    rms = math.sqrt(variance + own.mean * own.mean)
    lowest, highest = own.lowest + 0.0, own.highest + 0.0  # of zeros, neither sign is the smaller
    numbers = (own.mean, math.sqrt(variance), lowest, highest, rms, own.size / own.count)
    mean, std, lowest, highest, rms, mean_abs = map(unscaled, numbers)
    return Side(dtype, mean, std, lowest, highest, rms, mean_abs, *counts)


_ALL_FINITE = NonfiniteCounts(0, 0, None)


def _nonfinite(sums: Together, shape: tuple[int, ...]) -> NonfiniteCounts:
    either, differing = int(sums.nonfinite), int(sums.differing)
    if not either:
        return _ALL_FINITE
    place = int(sums.first if differing else sums.first_at_all)
    return NonfiniteCounts(either, differing, tuple(int(i) for i in np.unravel_index(place, shape)))


def _ratio(error: float, whole: float) -> float:
    if error == 0:
        return 0.0
    return error / whole if whole else math.nan


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return float(10 * np.log10(signal / noise))


def _cosine(inner: float, one: float, other: float, *, differs: bool) -> float:
    if not (one and other):
        return math.nan
    if not differs:
        return 1.0 if one > 0 else math.nan
    return min(max(inner / (math.sqrt(one) * math.sqrt(other)), -1.0), 1.0)
