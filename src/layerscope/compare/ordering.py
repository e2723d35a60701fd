"""Choices that two runs list in another order, and what lies in that order: scores, and the rows of chosen experts.

    again = follow_choices({job: job.measured() for job in jobs})
    again[job].metrics                                 # measured once more, in the order of the reference

A token goes to experts 3 and 1, or to 1 and 3: nothing depends on it but the order of what belongs to them, which is no
difference. What comes after the experts, token by token, is never read in another order, so that a fault shows there.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from layerscope.compare.floors import Step, rounding, step_of
from layerscope.compare.jobs import Job
from layerscope.compare.measure import measure
from layerscope.compare.measure.metrics import Metrics
from layerscope.errors import LayerscopeError
from layerscope.store import Entry

if TYPE_CHECKING:
    import torch

__all__ = ["Followed", "follow_choices", "order_of", "order_of_rows"]

_OFF = 0.1  # a row this far from its other side, relatively, may be another row
_MOST_ROWS = 4096  # that may be other ones: each is held against each


class Followed(NamedTuple):
    """What was measured once more, in the order of a choice."""

    metrics: Metrics
    choice: Job


def follow_choices(found: Mapping[Job, Metrics]) -> dict[Job, Followed]:
    """Measure once more what lies in the order of choices that the candidate lists in another order.

    That is numbers of the choices' own shape beside them, and rows of what lies beside or within what they choose from,
    in the same step; only where it explains most of a difference.
    """
    together: dict[Step, list[Job]] = defaultdict(list)
    for job in found:
        together[step_of(job.reference.moment)].append(job)
    again: dict[Job, Followed] = {}
    for choice, metrics in found.items():
        if metrics.sets is None or not metrics.sets.reordered:
            continue
        jobs = together[step_of(choice.reference.moment)]
        if not any(_scores(job, choice) for job in jobs):
            continue  # token ids, say: their order matters
        for job in jobs:
            if job in again or not _follows(job, choice) or found[job].equal == found[job].count:
                continue
            with contextlib.suppress(LayerscopeError):  # what cannot be read a second time was measured once
                ordered = _measured(job, choice)
                if ordered is not None and ordered.relative_l2 < found[job].relative_l2 / 2:
                    again[job] = Followed(ordered, choice)
    return again


def _scores(job: Job, choice: Job) -> bool:
    """Tell whether a pair holds numbers beside a choice, as many rows of them."""
    mine, its = job.reference, choice.reference
    beside = (mine.point.name, mine.point.side, mine.moment) == (its.point.name, its.point.side, its.moment)
    return beside and rounding(mine.dtype or "") > 0 and prod((mine.shape or ())[:-1]) == prod((its.shape or ())[:-1])


def _follows(job: Job, choice: Job) -> bool:
    """Tell whether a pair may lie in the order of a choice: beside it, or within the module that it chooses in."""
    whole = job.pair.reference_cut is None and job.pair.candidate_cut is None and job.shapes[0] == job.shapes[1]
    if not whole or not rounding(job.reference.dtype or "") or not prod(job.shapes[0]):
        return False
    name, chooser = job.reference.point.name, choice.reference.point.name
    return name == chooser or name.startswith(f"{chooser.rpartition('.')[0]}.".lstrip("."))


def _measured(job: Job, choice: Job) -> Metrics | None:
    shape, chosen = job.shapes[0], choice.shapes[0]
    if shape[: len(chosen)] == chosen:
        order = order_of(choice.reference.tensor(), choice.candidate.tensor())
    elif len(shape) == 2 and job.reference.point.name != choice.reference.point.name:
        order = order_of_rows(job.reference.tensor(), job.candidate.tensor())[None]
    else:
        return None
    where = job.candidate
    ordered = _Ordered(where.point, where.moment, where.dtype, where.shape, where.nbytes, where._run, where._at, order)
    return measure(job.reference, ordered)


def order_of(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Return where in a row of the candidate each choice of the reference stands, as rows of positions.

    Rows that do not hold the same choices stay as they are.
    """
    ours = reference.long().reshape(-1, reference.shape[-1])
    theirs = candidate.long().reshape(ours.shape)
    ranks = ours.argsort(dim=1, stable=True).argsort(dim=1, stable=True)
    order = theirs.argsort(dim=1, stable=True).gather(1, ranks)
    same = (theirs.gather(1, order) == ours).all(dim=1, keepdim=True)
    return order.where(same, order.new_tensor(range(ours.shape[1])))


def order_of_rows(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """Return which row of the candidate is which of the reference, by their values; each is used once.

    Rows that agree stay where they are, and so does everything when there are too many others to look at.
    """
    import torch

    ours, theirs = reference.double(), candidate.double()
    order = ours.new_tensor(range(len(ours))).long()
    off = ((ours - theirs).norm(dim=1) > _OFF * ours.norm(dim=1)).nonzero().flatten()
    if not 0 < len(off) <= _MOST_ROWS:
        return order
    nearest = torch.cdist(ours[off], theirs[off]).argmin(dim=1)
    if len(set(nearest.tolist())) == len(off):
        order[off] = off[nearest]
    return order


@dataclass(frozen=True, eq=False)
class _Ordered(Entry):
    """A record of which every row's parts are read in another order."""

    order: torch.Tensor

    def pieces(self, items: int) -> Iterator[torch.Tensor]:
        """Go through the values, as the reference has them."""
        rows, width = self.order.shape
        values = self.tensor().reshape(rows, width, -1)
        flat = values.gather(1, self.order[:, :, None].expand_as(values)).reshape(-1)
        for start in range(0, flat.numel(), items):
            yield flat[start : start + items]
