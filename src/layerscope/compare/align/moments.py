"""Which moment of one run is which of the other.

pairs, ours, theirs = pair_moments(reference, candidate)
"""

from __future__ import annotations

from collections.abc import Sequence

from layerscope.points import Moment


def pair_moments(
    reference: Sequence[Moment], candidate: Sequence[Moment]
) -> tuple[list[tuple[Moment, Moment, str]], list[Moment], list[Moment]]:
    """Pair the moments of two runs, rank by rank; the words say how where they are not the same moment.

    Where no moment is the same: by step and call when one run counts epochs and the other does not, else in order when
    there are equally many. What is left of each side comes back as well.
    """
    pairs: list[tuple[Moment, Moment, str]] = []
    rest = ([*reference], [*candidate])
    for rank in sorted({moment.rank for moment in reference} & {moment.rank for moment in candidate}):
        ours, theirs = (sorted(m for m in side if m.rank == rank) for side in (reference, candidate))
        pairs += _same_moments(ours, theirs) or _same_steps(ours, theirs) or _moments_in_order(ours, theirs)
    for at, side in enumerate(rest):
        paired = {pair[at] for pair in pairs}
        side[:] = [moment for moment in side if moment not in paired]
    order = {moment: at for at, moment in enumerate(reference)}
    return sorted(pairs, key=lambda pair: order[pair[0]]), *rest


def _same_moments(reference: list[Moment], candidate: list[Moment]) -> list[tuple[Moment, Moment, str]]:
    there = set(candidate)
    return [(moment, moment, "") for moment in reference if moment in there]


def _same_steps(reference: list[Moment], candidate: list[Moment]) -> list[tuple[Moment, Moment, str]]:
    epochs = [{moment.epoch is None for moment in side} for side in (reference, candidate)]
    if epochs not in ([{True}, {False}], [{False}, {True}]):
        return []
    tables = [{(m.step, m.call): m for m in side} for side in (reference, candidate)]
    if len(tables[0]) < len(reference) or len(tables[1]) < len(candidate):
        return []  # steps that begin anew in each epoch say nothing without it
    both = [key for key in tables[0] if key in tables[1]]
    return [(tables[0][key], tables[1][key], "by step: one run has no epochs") for key in both]


def _moments_in_order(reference: list[Moment], candidate: list[Moment]) -> list[tuple[Moment, Moment, str]]:
    if len(reference) != len(candidate):
        return []
    return [(ours, theirs, "in order") for ours, theirs in zip(reference, candidate, strict=True)]
