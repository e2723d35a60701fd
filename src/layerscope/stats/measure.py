"""How a tensor is summarised: one pass over its bits.

    summarize(tensor)                      # everything
    summarize(tensor, level="moments")     # without the sketch and the fingerprints
    summarize(tensor, later=True)()        # the numbers are taken now, the summary is made of them when it is called
    fingerprint(weight)                    # 32 hexadecimal digits

One thread, bounded memory, nothing of torch's state touched: it is called in the middle of somebody's forward.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from layerscope.stats.bits import FIRST, Array, Bits, byte_values, is_wide, item_of, lying, read
from layerscope.stats.engine import NOTHING, Engine, Sweep, engine, joined, row
from layerscope.stats.sketch import Sketch
from layerscope.stats.summary import Summary

if TYPE_CHECKING:
    import torch

__all__ = ["Later", "fingerprint", "prepare", "summarize"]

_DRAIN = 1 << 30  # items after which the buckets are emptied: their counters are 32 bits wide


Level = Literal["moments", "full"]


@overload
def summarize(tensor: torch.Tensor | Array, *, level: Level = ..., later: Literal[False] = ...) -> Summary: ...
@overload
def summarize(tensor: torch.Tensor | Array, *, level: Level = ..., later: Literal[True]) -> Callable[[], Summary]: ...
def summarize(
    tensor: torch.Tensor | Array, *, level: Level = "full", later: bool = False
) -> Summary | Callable[[], Summary]:
    """Summarise a CPU tensor or a numpy array of any dtype, shape and strides.

    "moments" leaves out the sketch and the fingerprints. What has no plain values (a sparse, nested, quantised or
    meta tensor) raises Unsupported, with the way out. With `later`, nothing more is asked of the tensor either, but
    the summary is made when the result is called: a hook must be brief.
    """
    if level != "moments" and level != "full":
        raise ValueError(f'level is "moments" or "full", not {level!r}.')
    full = level == "full"
    if not later:
        return _summary(read(tensor), full=full)
    lies = lying(tensor)
    if lies is not None:
        taken = engine().whole(*lies, full=full)
        if taken is not None:
            return Later((lies[0], tensor.shape, *taken))
    return Later(_summary(read(tensor), full=full))


class Later:
    """A summary that is made when it is first called for; in any thread, in two at once if need be."""

    __slots__ = ("_state",)

    def __init__(self, state: Any) -> None:
        self._state = state

    def __call__(self) -> Summary:
        """Make the summary, or return the one that was made before."""
        state = self._state
        if not isinstance(state, Summary):
            state = self._state = _made(*state)
        return state


def _made(
    dtype: str, shape: Sequence[int], rows: Array, start: int, keys: Array | None, counts: Array | None
) -> Summary:
    count = math.prod(shape)
    swept, first = row(dtype, rows, start, count=count)
    sketch = None if keys is None or counts is None else Sketch(keys, counts)
    return _concluded(swept, dtype, tuple(shape), count=count, first=first, sketch=sketch)


def fingerprint(tensor: torch.Tensor | Array) -> str:
    """Return the order-free and the position-weighted fingerprint of the stored bits, 16 hexadecimal digits each.

    Equal bits in the same order give equal fingerprints, whatever the strides and the shape; -0.0
    differs from 0.0, and one NaN from another with a different payload.
    """
    bits = read(tensor)
    free = placed = at = 0
    for items in bits.pieces():
        more_free, more_placed = engine().prints(bits.words(items), at)
        free, placed, at = free + more_free, placed + more_placed, at + items.size
    return f"{free % 2**64:016x}{placed % 2**64:016x}"


def prepare(*dtypes: str) -> None:
    """Compile the kernels for these dtypes now, or load them from numba's cache, lest the first tensor wait for it."""
    for dtype in dtypes:
        one = Bits(dtype, (1,), np.zeros(1, item_of(dtype)), None)
        for full in (True, False):
            _summary(one, full=full)
            if one.kernel_ready:
                engine().whole(dtype, one.items.ctypes.data, 1, full=full)
        if not one.byte_wide:
            engine().careful(one.floats(one.items), 0.0)
        engine().prints(one.words(one.items), 0)


def _summary(bits: Bits, *, full: bool) -> Summary:
    whole = bits.whole()
    head = bits.head(FIRST) if whole is None else whole[:FIRST]
    first = tuple(bits.values(head)[:FIRST].tolist())
    if bits.byte_wide:
        return _summary_of_bytes(bits, first, full=full)
    counting = engine()
    sketch = None
    if full:
        swept, sketch = _swept_with_sketch(bits, counting)
    else:
        swept = counting.moments(whole) if whole is not None else _swept(bits, counting)
    return _concluded(swept, bits.dtype, bits.shape, count=bits.count, first=first, sketch=sketch, bits=bits)


def _concluded(
    swept: Sweep,
    dtype: str,
    shape: tuple[int, ...],
    *,
    count: int,
    first: tuple[float, ...],
    sketch: Sketch | None,
    bits: Bits | None = None,
) -> Summary:
    """Make the summary of a sweep; without `bits` it is known that the sums are accurate enough."""
    finite = count - swept.nan - swept.posinf - swept.neginf
    lowest, highest = _extremes(swept, wide=is_wide(dtype)) if finite else (math.nan, math.nan)
    mean, std, magnitude = math.nan, math.nan, 0.0
    if finite and lowest == highest:
        mean, std, magnitude = highest, 0.0, swept.magnitude
    elif finite:
        mean, std, magnitude = _moments(bits, swept, finite=finite, largest=max(-lowest, highest))
    full = sketch is not None
    return Summary(
        count, swept.nan, swept.posinf, swept.neginf, swept.zeros,
        mean, std, lowest, highest, magnitude,
        first, dtype, shape, 1,
        sketch, swept.free if full else None, swept.placed if full else None,
    )  # fmt: skip


def _swept(bits: Bits, counting: Engine) -> Sweep:
    pieces = bits.pieces(ordered=False)
    return reduce(joined, (counting.moments(bits.floats(items)) for items in pieces), NOTHING)


def _swept_with_sketch(bits: Bits, counting: Engine) -> tuple[Sweep, Sketch]:
    total, undrained = NOTHING, NOTHING
    drained: list[Sketch] = []
    at = since = 0
    tables = counting.tables(wide=bits.wide)

    def drain() -> None:
        finite = since - undrained.nan - undrained.posinf - undrained.neginf
        drained.append(Sketch(*counting.drain(tables, undrained, finite=finite, wide=bits.wide)))

    for items in bits.pieces():
        if since + items.size > _DRAIN and since:
            drain()
            tables, undrained, since = counting.tables(wide=bits.wide), NOTHING, 0
        swept = counting.full(bits.floats(items), at, tables)
        if not bits.kernel_ready:  # the buckets are of the values, the fingerprints of the bits
            free, placed = counting.prints(bits.words(items), at)
            swept = swept._replace(free=free, placed=placed)
        at, since = at + items.size, since + items.size
        total, undrained = joined(total, swept), joined(undrained, swept)
    drain()
    return total, reduce(Sketch.__add__, drained)


def _extremes(swept: Sweep, *, wide: bool) -> tuple[float, float]:
    """Smallest and largest value, from the extremes of the bits: unsigned, the negative come last, reversed."""
    sign = 1 << (63 if wide else 31)
    lowest = swept.largest if swept.largest >= sign else swept.smallest
    highest = swept.signed if swept.signed >= 0 else swept.smallest
    words, floats = ("=2Q", "=2d") if wide else ("=2I", "=2f")
    low, high = struct.unpack(floats, struct.pack(words, lowest, highest))
    return low, high


def _moments(bits: Bits | None, swept: Sweep, *, finite: int, largest: float) -> tuple[float, float, float]:
    """Mean, std and sum of magnitudes; looks at the tensor again where one pass is not accurate enough."""

    def again(centre: float, prepared: Callable[[Array], Array] = lambda values: values) -> Sweep:
        assert bits is not None
        counting = engine()
        pieces = bits.pieces(ordered=False)
        sweeps = (counting.careful(prepared(bits.floats(items)), centre) for items in pieces)
        return reduce(joined, sweeps, NOTHING)

    if bits is not None and bits.wide and not 2.0**-700 < swept.squares < math.inf:  # squares left the range of float64
        exponent = math.frexp(largest)[1]
        with np.errstate(all="ignore"):
            swept = again(0.0, lambda values: np.ldexp(values, -exponent))
            centre = swept.sum / finite
            mean, variance = _centred(again(centre, lambda values: np.ldexp(values, -exponent)), centre, finite)
            mean, std, magnitude = np.ldexp([mean, math.sqrt(variance), swept.magnitude], exponent).tolist()
        return mean, std, magnitude
    mean = swept.sum / finite
    variance = swept.squares / finite - mean * mean
    if variance < 1e-3 * mean * mean:  # most digits of the difference are lost
        mean, variance = _centred(again(mean), mean, finite)
    return mean, math.sqrt(variance), swept.magnitude


def _centred(swept: Sweep, centre: float, finite: int) -> tuple[float, float]:
    offset = swept.sum / finite
    return centre + offset, max(swept.squares / finite - offset * offset, 0.0)


def _summary_of_bytes(bits: Bits, first: tuple[float, ...], *, full: bool) -> Summary:
    """256 counters say everything but the order."""
    counting = engine()
    counts = np.zeros(256, np.int64)
    free = placed = at = 0
    for items in bits.pieces(ordered=full):
        counts += counting.tally(items)
        if full:
            more_free, more_placed = counting.prints(items, at)
            free, placed, at = free + more_free, placed + more_placed, at + items.size
    values = byte_values(bits.dtype)
    values, counts = values.reshape(-1), counts.repeat(values.size // 256)
    occurring = counts > 0
    values, counts = values[occurring], counts[occurring]
    plain = np.isfinite(values)
    exact, weights = values[plain], counts[plain]
    finite = int(weights.sum())
    mean = std = lowest = highest = math.nan
    if finite:
        lowest, highest = float(exact.min()), float(exact.max())
        mean = highest if lowest == highest else float((exact * weights).sum()) / finite
        std = math.sqrt(float(((exact - mean) ** 2 * weights).sum()) / finite)
    return Summary(
        count=bits.count,
        nan=int(counts[np.isnan(values)].sum()),
        posinf=int(counts[values == math.inf].sum()),
        neginf=int(counts[values == -math.inf].sum()),
        zeros=int(counts[values == 0].sum()),
        mean=mean,
        std=std,
        min=lowest,
        max=highest,
        l1=float((np.abs(exact) * weights).sum()),
        first=first,
        dtype=bits.dtype,
        shape=bits.shape,
        sketch=Sketch.of(exact, weights) if full else None,
        fingerprint=free % 2**64 if full else None,
        placed=placed % 2**64 if full else None,
    )
