"""Which code does the counting: `numba_engine` where it works, else `numpy_engine`, with the same verbs.

    backend()        # "numba", or "numpy (numba is not installed)"

The choice is made once per process, on first use, and only if both agree on a few numbers.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Protocol, cast

import numpy as np

from layerscope.stats.channels import Adding
from layerscope.stats.tensor_views import Array


class Sweep(NamedTuple):
    """What one pass over some items leaves; sums are over the finite ones.

    `signed`, `largest` and `smallest` are the extremes of the items' bits as float32 (float64 for float64), taken
    as signed and as unsigned integers: the largest and smallest value follow from them without comparing floats.
    """

    sum: float
    squares: float
    magnitude: float
    signed: int
    largest: int
    smallest: int
    zeros: int
    nan: int
    posinf: int
    neginf: int
    free: int = 0
    placed: int = 0


NOTHING = Sweep(0.0, 0.0, 0.0, -(1 << 63), 0, (1 << 64) - 1, 0, 0, 0, 0)


def joined(a: Sweep, b: Sweep) -> Sweep:
    """Return what one pass over the items of both would have left."""
    if a is NOTHING:
        return b
    return Sweep(
        sum=a.sum + b.sum,
        squares=a.squares + b.squares,
        magnitude=a.magnitude + b.magnitude,
        signed=max(a.signed, b.signed),
        largest=max(a.largest, b.largest),
        smallest=min(a.smallest, b.smallest),
        zeros=a.zeros + b.zeros,
        nan=a.nan + b.nan,
        posinf=a.posinf + b.posinf,
        neginf=a.neginf + b.neginf,
        free=(a.free + b.free) % 2**64,
        placed=(a.placed + b.placed) % 2**64,
    )


class Engine(Protocol):
    """The verbs of `numba_engine` and `numpy_engine`; items are contiguous and held as `tensor_views.ITEMS` says."""

    def moments(self, items: Array) -> Sweep: ...  # noqa: D102
    def careful(self, items: Array, centre: float) -> Sweep: ...  # noqa: D102
    def full(self, items: Array, start: int, tables: Array, adding: Adding | None = None) -> Sweep: ...  # noqa: D102
    def fingerprints(self, words: Array, start: int) -> tuple[int, int]: ...  # noqa: D102
    def tally(self, items: Array) -> Array: ...  # noqa: D102
    def channels(self, values: Array, start: int, adding: Adding, *, clean: bool) -> None: ...  # noqa: D102
    def tables(self, *, wide: bool) -> Array: ...  # noqa: D102
    def drain(self, tables: Array, swept: Sweep, *, finite: int, wide: bool) -> tuple[Array, Array]: ...  # noqa: D102


def engine() -> Engine:
    """Return the code that counts, chosen once per process."""
    return _chosen()[0]


def backend() -> str:
    """Say which code counts, and why where it is not the fast one."""
    return _chosen()[1]


@cache
def _chosen() -> tuple[Engine, str]:
    from layerscope.stats import numpy_engine

    slow = cast(Engine, numpy_engine)
    try:
        from layerscope.stats import numba_engine
    except ImportError:
        return slow, "numpy (numba is not installed)"
    except Exception as error:  # a numba that does not fit this numpy, Python or machine
        return slow, f"numpy (numba failed: {_sentence(error)})"
    fast = cast(Engine, numba_engine)
    try:
        works = _answer(fast) == _answer(slow)
    except Exception as error:
        return slow, f"numpy (numba failed: {_sentence(error)})"
    return (fast, "numba") if works else (slow, "numpy (numba gave other numbers)")


def _answer(counting: Engine) -> tuple[Sweep, list[int], list[int]]:
    """Sweep a few numbers whose sums have no rounding: every engine must agree on them to the bit."""
    items = np.array([1.0, -2.5, 0.0, 0.5, np.inf, 3.0, 1.0, 1.0, np.nan, 64.0], np.float32)
    tables = counting.tables(wide=False)
    swept = counting.full(items, 1020, tables)
    keys, counts = counting.drain(tables, swept, finite=8, wide=False)
    return swept, keys.tolist(), counts.tolist()


def _sentence(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
