"""Which code goes through a pair: `numba_sweep` where it works, else `numpy_sweep`, with the same verb.

    engine().sweep(reference, candidate, buckets=buckets)

The choice is made once per process, on first use, and only if both agree on a few numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol, cast

import numpy as np

from layerscope.compare.measure.sums import Swept
from layerscope.stats import backend
from layerscope.stats.sketch import LOWEST, STEPS
from layerscope.stats.tensor_views import Array

_BUCKETS = (1024 - LOWEST) * STEPS + 1  # of the sketch, for magnitudes: those below 2**LOWEST are the first


class SweepEngine(Protocol):
    """The verb of `numba_sweep` and `numpy_sweep`."""

    def sweep(  # noqa: D102
        self, reference: Array, candidate: Array, *, buckets: Array, same: bool = False, start: int = 0,
        epsilon: float = 1e-8, width: int = 0,
    ) -> Swept: ...  # fmt: skip


def table() -> Array:
    """Return counters of buckets, all zero: two of each, lest equal neighbours wait for each other."""
    return np.zeros(2 * _BUCKETS, np.int64)


def folded(counted: Array, used: int = _BUCKETS) -> Array:
    """Return the count of each bucket, or of the first few."""
    counts: Array = counted[:used] + counted[_BUCKETS : _BUCKETS + used]
    return counts


@cache
def engine() -> SweepEngine:
    """Return the code that goes through pairs: numba's where it works for single tensors, and for these."""
    from layerscope.compare.measure import numpy_sweep

    slow = cast(SweepEngine, numpy_sweep)
    if backend() != "numba":
        return slow
    try:
        from layerscope.compare.measure import numba_sweep

        fast = cast(SweepEngine, numba_sweep)
        return fast if _answer(fast) == _answer(slow) else slow
    except Exception:  # a numba that does not fit this numpy, Python or machine
        return slow


def _answer(sweeping: SweepEngine) -> list[list[float]]:
    """Sweep a few numbers whose sums have no rounding: every engine must agree on them to the bit."""
    inf, nan = np.inf, np.nan
    reference = np.array([1.0, -2.0, nan, 0.5, 4.0, inf, 1.0, 8.0, inf, 2.0, -1.0], np.float32)
    candidate = np.array([1.0, -2.5, nan, 1.0, 0.0, inf, 1.5, 8.5, -inf, 4.0, 1.0], np.float32)
    buckets = table()
    swept = sweeping.sweep(reference, candidate, buckets=buckets, start=5, epsilon=0.0, width=4)
    return [*(part.ravel().tolist() for part in swept), folded(buckets).tolist()]
