"""Choices that two runs list in another order, and what lies in that order: scores, and the rows of chosen experts.

    follow_choices(pairs)
    pair.metrics, pair.choice                          # measured once more, in the order of the reference

A token goes to experts 3 and 1, or to 1 and 3: nothing depends on it but the order of what belongs to them, which is no
difference. What comes after the experts, token by token, is never read in another order, so that a fault shows there.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from layerscope.compare.measure import measure
from layerscope.compare.measure.metrics import Metrics
from layerscope.compare.noise_floor import Step, rounding, step_of
from layerscope.compare.record_pair import RecordPair
from layerscope.errors import LayerscopeError
from layerscope.store import Entry

if TYPE_CHECKING:
    import torch


_OFF = 0.1  # a row this far from its other side, relatively, may be another row
_MOST_ROWS = 4096  # that may be other ones: each is held against each


def follow_choices(pairs: Sequence[RecordPair]) -> None:
    """Measure once more what lies in the order of choices that the candidate lists in another order.

    That is numbers of the choices' own shape beside them, and rows of what lies beside or within what they choose from,
    in the same step; only where it explains most of a difference.
    """
    together: dict[Step, list[RecordPair]] = defaultdict(list)
    for one in pairs:
        if one.metrics is not None:
            together[step_of(one.moment)].append(one)
    for choice in pairs:
        if choice.metrics is None or choice.metrics.sets is None or not choice.metrics.sets.reordered:
            continue
        beside = together[step_of(choice.moment)]
        if not any(_scores(one, choice) for one in beside):
            continue  # token ids, say: their order matters
        for one in beside:
            if one.choice is not None or not _follows(one, choice) or one.metrics is None or one.metrics.bitwise:
                continue
            with contextlib.suppress(LayerscopeError):  # what cannot be read a second time was measured once
                ordered = _measured(one, choice)
                if ordered is not None and ordered.relative_l2 < one.metrics.relative_l2 / 2:
                    one.metrics, one.choice, choice.leads = ordered, choice, True
                    one.because = f"read in the order of {choice.point}"


def _scores(one: RecordPair, choice: RecordPair) -> bool:
    """Tell whether a pair holds numbers beside a choice, as many rows of them."""
    mine, its = one.reference, choice.reference
    beside = (mine.point.name, mine.point.side, mine.moment) == (its.point.name, its.point.side, its.moment)
    return beside and rounding(mine.dtype or "") > 0 and prod((mine.shape or ())[:-1]) == prod((its.shape or ())[:-1])


def _follows(one: RecordPair, choice: RecordPair) -> bool:
    """Tell whether a pair may lie in the order of a choice: beside it, or within the module that it chooses in."""
    whole = one.cuts == (None, None) and one.shapes[0] == one.shapes[1]
    if not whole or not rounding(one.reference.dtype or "") or not prod(one.shapes[0]):
        return False
    name, chooser = one.reference.point.name, choice.reference.point.name
    return name == chooser or name.startswith(f"{chooser.rpartition('.')[0]}.".lstrip("."))


def _measured(one: RecordPair, choice: RecordPair) -> Metrics | None:
    shape, chosen = one.shapes[0], choice.shapes[0]
    if shape[: len(chosen)] == chosen:
        order = order_of(choice.reference.tensor(), choice.candidate.tensor())
    elif len(shape) == 2 and one.reference.point.name != choice.reference.point.name:
        order = order_of_rows(one.reference.tensor(), one.candidate.tensor())[None]
    else:
        return None
    where = one.candidate
    ordered = _Ordered(where.point, where.moment, where.dtype, where.shape, where.nbytes, where._run, where._at, order)
    return measure(one.reference, ordered)


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
