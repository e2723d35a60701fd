"""How a tensor is summarised: one pass over its bits.

    summarize(tensor)                      # everything
    summarize(tensor, level="moments")     # without the sketch and the fingerprints
    summarize(tensor, channels=-1)         # and statistics of each channel, along the last axis
    fingerprint(weight)                    # 32 hexadecimal digits

One thread, bounded memory, nothing of torch's state touched: it is called in the middle of the user's forward.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Literal

import numpy as np

from layerscope.stats.channels import Adding
from layerscope.stats.engine import NOTHING, Engine, Sweep, engine, joined
from layerscope.stats.sketch import Sketch
from layerscope.stats.summary import Summary
from layerscope.stats.tensor_views import FIRST, Array, Bits, byte_values, item_of, read

if TYPE_CHECKING:
    import torch

_DRAIN = 1 << 30  # items after which the buckets are emptied: their counters are 32 bits wide


Level = Literal["moments", "full"]


def summarize(tensor: torch.Tensor | Array, *, level: Level = "full", channels: int | None = None) -> Summary:
    """Summarise a CPU tensor or a numpy array of any dtype, shape and strides.

    "moments" leaves out the sketch and the fingerprints; `channels` is the axis whose channels get statistics of their
    own, beside the full ones of all. What has no plain values (a sparse, nested, quantised or
    meta tensor) raises Unsupported, with the way out.
    """
    if level != "moments" and level != "full":
        raise ValueError(f'level is "moments" or "full", not {level!r}.')
    return _summary(read(tensor), full=level == "full" or channels is not None, axis=channels)


def fingerprint(tensor: torch.Tensor | Array) -> str:
    """Return the order-free and the position-weighted fingerprint of the stored bits, 16 hexadecimal digits each.

    Equal bits in the same order give equal fingerprints, whatever the strides and the shape; -0.0
    differs from 0.0, and one NaN from another with a different payload.
    """
    bits = read(tensor)
    free = placed = at = 0
    for items in bits.pieces():
        more_free, more_placed = engine().fingerprints(bits.words(items), at)
        free, placed, at = free + more_free, placed + more_placed, at + items.size
    return f"{free % 2**64:016x}{placed % 2**64:016x}"


def prepare(*dtypes: str, channels: bool = False) -> None:
    """Compile the kernels for these dtypes now, or load them from numba's cache, lest the first tensor wait for it."""
    for dtype in dtypes:
        one = Bits(dtype, (1,), np.zeros(1, item_of(dtype)), None)
        for full in (True, False):
            _summary(one, full=full)
        if not one.byte_wide:
            engine().careful(one.floats(one.items), 0.0)
        engine().fingerprints(one.words(one.items), 0)
        if channels:
            _summary(one, full=True, axis=-1)


def _summary(bits: Bits, *, full: bool, axis: int | None = None) -> Summary:
    adding = None if axis is None else Adding(bits.value_shape, axis)
    whole = bits.whole()
    head = bits.head(FIRST) if whole is None else whole[:FIRST]
    first = tuple(bits.values(head)[:FIRST].tolist())
    if bits.byte_wide:
        return _summary_of_bytes(bits, first, full=full, adding=adding)
    counting = engine()
    sketch = None
    if full:
        swept, sketch = _swept_with_sketch(bits, counting, adding)
    else:
        swept = counting.moments(whole) if whole is not None else _swept(bits, counting)
    finite = bits.count - swept.nan - swept.posinf - swept.neginf
    lowest, highest = _extremes(swept, wide=bits.wide) if finite else (math.nan, math.nan)
    mean, std, magnitude = math.nan, math.nan, 0.0
    if finite and lowest == highest:
        mean, std, magnitude = highest, 0.0, swept.magnitude
    elif finite:
        mean, std, magnitude = _moments(bits, swept, finite=finite, largest=max(-lowest, highest))
    return Summary(
        bits.count, swept.nan, swept.posinf, swept.neginf, swept.zeros,
        mean, std, lowest, highest, magnitude,
        first, bits.dtype, bits.shape, 1,
        sketch, swept.free if full else None, swept.placed if full else None,
        None if adding is None else adding.channels(),
    )  # fmt: skip


def _swept(bits: Bits, counting: Engine) -> Sweep:
    pieces = bits.pieces(ordered=False)
    return reduce(joined, (counting.moments(bits.floats(items)) for items in pieces), NOTHING)


def _swept_with_sketch(bits: Bits, counting: Engine, adding: Adding | None) -> tuple[Sweep, Sketch]:
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
        swept = counting.full(bits.floats(items), at, tables, adding)
        if not bits.kernel_ready:  # the buckets are of the values, the fingerprints of the bits
            free, placed = counting.fingerprints(bits.words(items), at)
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


def _moments(bits: Bits, swept: Sweep, *, finite: int, largest: float) -> tuple[float, float, float]:
    """Mean, std and sum of magnitudes; looks at the tensor again where one pass is not accurate enough."""

    def again(centre: float, prepared: Callable[[Array], Array] = lambda values: values) -> Sweep:
        counting = engine()
        pieces = bits.pieces(ordered=False)
        sweeps = (counting.careful(prepared(bits.floats(items)), centre) for items in pieces)
        return reduce(joined, sweeps, NOTHING)

    if bits.wide and not 2.0**-700 < swept.squares < math.inf:  # squares left the range of float64
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


def _summary_of_bytes(bits: Bits, first: tuple[float, ...], *, full: bool, adding: Adding | None) -> Summary:
    """256 counters say everything but the order."""
    counting = engine()
    counts = np.zeros(256, np.int64)
    free = placed = at = valued = 0
    for items in bits.pieces(ordered=full):
        counts += counting.tally(items)
        if adding is not None:
            for start in range(0, items.size, adding.block):
                values = bits.values(items[start : start + adding.block])
                counting.channels(values, valued, adding, clean=bool(np.isfinite(values).all()))
                valued += values.size
        if full:
            more_free, more_placed = counting.fingerprints(items, at)
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
        channels=None if adding is None else adding.channels(),
    )
