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

import torch

from layerscope.diagnose.operations.aligning import aligned
from layerscope.diagnose.operations.distances import apart
from layerscope.diagnose.operations.operation import Operation
from layerscope.diagnose.operations.telling import tell_exchanged, tell_extra, tell_gone, tell_numbers, tell_result
from layerscope.diagnose.operations.tracing import Called

# More operations without a counterpart than a few, and than this share: other code, not to be set against this one.
_FEW, _OTHER = 8, 0.4
# Two roundings of the same kind are 1.4 times one of them apart.
_LIMIT = 3.0
# What another order of summation takes: units in the last place where nothing was measured; in float32 at any rate.
_UNITS, _LEAST = 8, 1e-6
# They give what another operation shows.
_IDLE = frozenset({"view", "slice", "unsqueeze", "squeeze", "select", "full", "arange", "scalar_tensor", "zeros"})


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two calls that stand for each other, and what lies between their results."""

    ours: Called
    theirs: Called
    error: float
    floor: float

    @classmethod
    def of(cls, ours: Called, theirs: Called, exact: Called | None) -> _Pair:
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
    pairs = [_Pair.of(ours[a], candidate[b], exact.get(a)) for a, b in places if a is not None and b is not None]
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
    off: Mapping[int, _Pair],
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


def _made_here(pair: _Pair, off: Sequence[_Pair]) -> bool:
    """Whether a difference came from no operation before: the same inputs, or inputs that stand for no others."""
    before = {(other.ours.index, other.theirs.index) for other in off}
    return not any(source in before for source in zip(pair.ours.sources, pair.theirs.sources, strict=False))
