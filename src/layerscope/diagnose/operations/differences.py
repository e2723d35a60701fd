"""Set two logs of a module's own code against each other, operation by operation.

    differences(reference, candidate, floor)[0].because      # "it multiplies by 0.3 where the reference ..."

The floor is the reference's code in the candidate's dtype: the same operations, so that what the candidate has besides
or lacks stands out, and rounding is measured at each of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from layerscope.diagnose.judge.measurement import apart
from layerscope.diagnose.operations.operation import (
    Operation,
    tell_exchanged,
    tell_extra,
    tell_gone,
    tell_numbers,
    tell_result,
)
from layerscope.diagnose.operations.trace import Called

# More operations without a counterpart than a few, and than this share: other code, not to be set against this one.
_FEW, _OTHER = 8, 0.4
# Two roundings of the same kind are 1.4 times one of them apart.
_LIMIT = 3.0
# What another order of summation takes: units in the last place where nothing was measured; in float32 at any rate.
_UNITS, _LEAST = 8, 1e-6
# They give what another operation shows.
_IDLE = frozenset({"view", "slice", "unsqueeze", "squeeze", "select", "full", "arange", "scalar_tensor", "zeros"})


@dataclass(frozen=True, slots=True)
class _CallPair:
    """Two calls that stand for each other, and what lies between their results."""

    ours: Called
    theirs: Called
    error: float
    floor: float

    @classmethod
    def of(cls, ours: Called, theirs: Called, exact: Called | None) -> _CallPair:
        """Measure a pair; `exact` is the reference's own call, by which rounding is measured."""
        unit = max((torch.finfo(t.dtype).eps for t in theirs.outputs if t.is_floating_point()), default=0.0)
        floor = max(_LEAST, _UNITS * unit if exact is None else unit) / _LIMIT
        if exact is not None:
            rounded = apart(ours.outputs, exact.outputs)
            floor = max(floor, rounded if math.isfinite(rounded) else 0.0)
        return cls(ours, theirs, apart(theirs.outputs, ours.outputs), floor)

    @property
    def differs(self) -> bool:
        """Whether rounding does not explain it."""
        return not self.error <= _LIMIT * self.floor


def differences(
    reference: Sequence[Called], candidate: Sequence[Called], floor: Sequence[Called] | None = None
) -> tuple[Operation, ...]:
    """Return the operations that make a difference, the first one first; none where rounding explains everything."""
    ours = floor if floor else reference
    exact = {a: reference[b] for a, b in aligned(ours, reference) if a is not None and b is not None} if floor else {}
    places = aligned(ours, candidate)
    pairs = [_CallPair.of(ours[a], candidate[b], exact.get(a)) for a, b in places if a is not None and b is not None]
    if len(places) - len(pairs) > max(_FEW, _OTHER * len(places)):
        return ()
    off = [pair for pair in pairs if pair.differs]
    idle = _IDLE if floor else _IDLE | {"to"}
    gone = _that_matter(ours, [p.ours.index for p in pairs], [p.ours.index for p in off], idle)
    extra = _that_matter(candidate, [p.theirs.index for p in pairs], [p.theirs.index for p in off], idle)
    found = list(_unlike(places, ours, candidate, {p.theirs.index: p for p in off}, gone, extra))
    if not found:
        found = [tell_result(p.ours, p.theirs, ours, p.error, p.floor) for p in off if _made_here(p, off)]
    return tuple(found)


def _unlike(
    places: Sequence[tuple[int | None, int | None]],
    ours: Sequence[Called],
    theirs: Sequence[Called],
    off: Mapping[int, _CallPair],
    gone: Collection[int],
    extra: Collection[int],
) -> Iterator[Operation]:
    """Yield operations with other numbers, and those that one side lacks, in order."""
    for paired, run in groupby(places, key=lambda place: None not in place):
        run_of = list(run)
        if paired:
            different = [off[b] for _, b in run_of if b is not None and b in off]
            told = (tell_numbers(pair.ours, pair.theirs, ours, pair.error, pair.floor) for pair in different)
            yield from (one for one in told if one is not None)
            continue
        had = [ours[a] for a, _ in run_of if a is not None and a in gone]
        got = [theirs[b] for _, b in run_of if b is not None and b in extra]
        if len(had) == len(got):
            yield from (tell_exchanged(one, two, ours) for one, two in zip(had, got, strict=True))
        else:
            yield from (tell_gone(call, ours) for call in had)
            yield from (tell_extra(call, theirs) for call in got)


def _that_matter(
    calls: Sequence[Called], paired: Collection[int], off: Collection[int], idle: Collection[str]
) -> set[int]:
    """Return the unpaired calls that change what they are given and feed, at last, a result that differs."""
    users: dict[int, list[int]] = {}
    for call in calls:
        for source in call.sources:
            if source is not None:
                users.setdefault(source, []).append(call.index)
    known, different = set(paired), set(off)
    feeding: set[int] = set()
    for call in reversed(calls):
        if call.index in known:
            continue
        used = users.get(call.index, [])
        if not used or any(user in different or user in feeding for user in used):
            feeding.add(call.index)
    return {index for index in feeding if calls[index].name not in idle and not _neutral(calls[index])}


def _neutral(call: Called) -> bool:
    """Whether a call gives back what it was given: a cache that was empty, a factor of 1."""
    result = call.outputs[0] if call.outputs else None
    return result is not None and any(
        result.shape == tensor.shape and result.dtype == tensor.dtype and torch.equal(result, tensor)
        for tensor in call.inputs
    )


def _made_here(pair: _CallPair, off: Sequence[_CallPair]) -> bool:
    """Whether a difference came from no operation before: the same inputs, or inputs that stand for no others."""
    before = {(other.ours.index, other.theirs.index) for other in off}
    return not any(source in before for source in zip(pair.ours.sources, pair.theirs.sources, strict=False))


_NEAR = 0.05  # norms that are closer are taken for the same result


def aligned(ours: Sequence[Called], theirs: Sequence[Called]) -> list[tuple[int | None, int | None]]:
    """Return pairs of indices in order; None on one side is an operation that only the other has.

    The longest common subsequence, weighted: where two additions stand for one, the one that gives the same stays.
    """
    one, two = [_sized(call) for call in ours], [_sized(call) for call in theirs]
    head = 0
    while head < min(len(one), len(two)) and _alike(one[head], two[head]) == _SAME:
        head += 1
    tail = 0
    while tail < min(len(one), len(two)) - head and _alike(one[-1 - tail], two[-1 - tail]) == _SAME:
        tail += 1
    middle = _matched(one[head : len(one) - tail], two[head : len(two) - tail])
    return [
        *((at, at) for at in range(head)),
        *((a if a is None else a + head, b if b is None else b + head) for a, b in middle),
        *((len(one) - at, len(two) - at) for at in range(tail, 0, -1)),
    ]


class _Sized(NamedTuple):
    """What an operation is known by: its name, its shape, the norms of its result and of what went in."""

    name: str
    shape: tuple[int, ...]
    norm: float
    inputs: tuple[float, ...]


_SAME = 5


def _sized(call: Called) -> _Sized:
    return _Sized(call.name, call.shape, _norm(*call.outputs[:1]), tuple(_norm(tensor) for tensor in call.inputs))


def _norm(*tensors: torch.Tensor) -> float:
    """Return the norm of what is finite and no mask."""
    values = [tensor.detach().to(torch.float32) for tensor in tensors]
    values = [one.masked_fill(~one.isfinite() | (one.abs() > 1e30), 0.0) for one in values]
    return float(sum(torch.linalg.vector_norm(one) for one in values))


def _alike(one: _Sized, two: _Sized) -> int:
    """How well two operations go together; 0: not at all."""
    if one.name != two.name:
        return 0
    if one.shape != two.shape:
        return 1
    fed = any(map(_close, one.inputs, two.inputs)) if one.inputs else True
    return 2 + 2 * _close(one.norm, two.norm) + fed


def _close(one: float, two: float) -> bool:
    return abs(one - two) <= _NEAR * max(one, two)


def _matched(one: Sequence[_Sized], two: Sequence[_Sized]) -> list[tuple[int | None, int | None]]:
    best = [[0] * (len(two) + 1) for _ in range(len(one) + 1)]
    for a in range(len(one) - 1, -1, -1):
        for b in range(len(two) - 1, -1, -1):
            score = _alike(one[a], two[b])
            best[a][b] = max(best[a + 1][b], best[a][b + 1], score and score + best[a + 1][b + 1])
    pairs: list[tuple[int | None, int | None]] = []
    a = b = 0
    while a < len(one) and b < len(two):
        score = _alike(one[a], two[b])
        if score and best[a][b] == score + best[a + 1][b + 1]:
            pairs.append((a, b))
            a, b = a + 1, b + 1
        elif best[a][b] == best[a + 1][b]:
            pairs.append((a, None))
            a += 1
        else:
            pairs.append((None, b))
            b += 1
    return [*pairs, *((at, None) for at in range(a, len(one))), *((None, at) for at in range(b, len(two)))]
