"""Choices that two runs list in another order, and what lies in that order: scores, and the rows of chosen experts.

    follow_choices(pairs)
    pair.metrics, pair.choice                          # measured once more, in the order of the reference

A token goes to experts 3 and 1, or to 1 and 3: nothing depends on it but the order of what belongs to them, which is no
difference. What comes after the experts, token by token, is never read in another order, so that a fault shows there.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from layerscope.compare.align.experts import order_of_rows
from layerscope.compare.align.positions import Rows
from layerscope.compare.measure import measure
from layerscope.compare.measure.metrics import Metrics
from layerscope.compare.noise_floor import Step, rounding, step_of
from layerscope.compare.record_pair import RecordPair
from layerscope.errors import LayerscopeError

if TYPE_CHECKING:
    import torch


def follow_choices(pairs: Sequence[RecordPair]) -> None:
    """Measure once more what lies in the order of choices that the candidate lists in another order.

    That is numbers of the choices' own shape beside them, and rows of what lies beside or within what they choose from,
    in the same step; only where it explains most of a difference. Experts may have their rows in another order though
    the choices have not.
    """
    together: dict[Step, list[RecordPair]] = defaultdict(list)
    for one in pairs:
        if one.metrics is not None:
            together[step_of(one.moment)].append(one)
    for choice in pairs:
        if choice.metrics is None or choice.metrics.sets is None:
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
    reordered = choice.metrics is not None and choice.metrics.sets is not None and choice.metrics.sets.reordered
    if not reordered and (len(shape) != 2 or shape[0] == prod(chosen[:-1])):
        return None  # a row is a token's, in the order of the tokens
    of = one.candidate
    if reordered and shape[: len(chosen)] == chosen:
        order = order_of(choice.reference.tensor(), choice.candidate.tensor())

        def read() -> torch.Tensor:
            values = of.tensor().reshape(*order.shape, -1)
            return values.gather(1, order[:, :, None].expand_as(values)).reshape(shape)

    elif len(shape) == 2 and one.reference.point.name != choice.reference.point.name:
        rows = order_of_rows(one.reference.tensor(), of.tensor())

        def read() -> torch.Tensor:
            return of.tensor()[rows]

    else:
        return None
    return measure(one.reference, Rows.of(of, read, shape))


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
