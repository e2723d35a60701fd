"""What a device leaves, read as the summaries it stands for.

Results.read(buffer)[0].summary("bfloat16", (4, 8))          # once the device has written it
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from layerscope.stats.device.slots import ResultBuffer
from layerscope.stats.device.sweeping import HEAD
from layerscope.stats.sketch import LOWEST, STEPS, Sketch
from layerscope.stats.summary import Summary
from layerscope.stats.tensor_views import Array


class _Buckets(NamedTuple):
    """Occupied places of a bucket table, ascending, and their counts: first the positive half, then the negative."""

    places: Array
    counts: Array
    wide: bool

    def sketch(self, finite: int) -> Sketch:
        """Read as a sketch; what no bucket counts lies around zero."""
        half = 1 << (17 if self.wide else 14)
        before = ((1023 if self.wide else 127) + LOWEST) * STEPS - 1
        split = int(np.searchsorted(self.places, half))
        positive, negative = self.places[:split] - before, before + half - self.places[split:][::-1]
        counts = self.counts.astype(np.int64)
        around = finite - int(counts.sum())
        zero = [0] if around else []
        return Sketch(
            np.concatenate([negative, np.array(zero, np.int32), positive], dtype=np.int32),
            np.concatenate([counts[split:][::-1], np.array([around] * len(zero), np.int64), counts[:split]]),
        )


class Numbers(NamedTuple):
    """What is known of one tensor: its head, and its buckets where they were asked for."""

    head: Array
    buckets: _Buckets | None

    def summary(self, dtype: str, shape: tuple[int, ...]) -> Summary:
        """Make the summary of the tensor that was swept."""
        whole, real = self.head.tolist(), self.head.view(np.float64).tolist()
        finite = whole[3]
        zeros, nan, posinf, neginf = whole[6:10]
        count = finite + nan + posinf + neginf
        lowest, highest = (real[4], real[5]) if finite else (math.nan, math.nan)
        mean, std, magnitude = math.nan, math.nan, 0.0
        if finite:
            mean, magnitude = _scaled(real[0], -whole[12]), _scaled(real[2], -whole[12])
            std = _scaled(math.sqrt(real[1] / finite), -whole[12])
            if lowest == highest:
                mean, std = highest, 0.0
        full = self.buckets is not None
        return Summary(
            count, nan, posinf, neginf, zeros,
            mean, std, lowest, highest, magnitude,
            tuple(real[16 : 16 + min(count, 10)]), dtype, shape, 1,
            None if self.buckets is None else self.buckets.sketch(finite),
            whole[10] % 2**64 if full else None, whole[11] % 2**64 if full else None,
        )  # fmt: skip


class Results:
    """The numbers of all tensors on a buffer; each is taken apart when it is asked for."""

    def __init__(self, words: Array, used: int, buckets: int) -> None:
        self._heads = words[: HEAD * used].reshape(used, HEAD)
        self._listed = words[HEAD * used :].view(np.int32).reshape(-1, 2) if buckets else None  # place and count
        self._wide = buckets > 1 << 15

    @classmethod
    def read(cls, buffer: ResultBuffer) -> Results:
        """Copy a buffer's heads, and of the list as much as there is; the device has written them."""
        words, used, buckets, _ = buffer
        there: Array = words.numpy()
        listed = int(there[13 : HEAD * used : HEAD].sum()) if buckets else 0  # which does not let go of the interpreter
        return cls(there[: HEAD * used + listed].copy(), used, buckets)

    def __len__(self) -> int:
        return len(self._heads)

    def __getitem__(self, index: int) -> Numbers:
        head = self._heads[index]
        if self._listed is None:
            return Numbers(head, None)
        size, begin = head[13:15].tolist()
        places, counts = self._listed[begin : begin + size].T
        return Numbers(head, _Buckets(places, counts, self._wide))


def _scaled(value: float, power: int) -> float:
    if not power:
        return value
    with np.errstate(over="ignore"):
        return float(np.ldexp(value, power))
