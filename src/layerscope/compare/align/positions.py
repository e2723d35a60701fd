"""Which token each row of a step belongs to, as the step's inputs tell, and the rows that two steps share.

    ours, theirs = positions_of(reference), positions_of(candidate)
    SharedRows(ours[step], theirs[step]).of(entry, other)      # two records of as many rows, token by token

One run computes a whole sequence, the other keeps a cache and computes one token at a time; one pads on the left, the
other on the right: rows of the same token are compared, wherever they stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from layerscope.checks.tokens import MASKS
from layerscope.compare.noise_floor import rounding
from layerscope.errors import LayerscopeError
from layerscope.points import Moment, Point
from layerscope.store import Entry

if TYPE_CHECKING:
    import torch

Matched: TypeAlias = "tuple[Moment, Moment, str]"
Numbers: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int64]]"
StepKey: TypeAlias = "tuple[int | None, int, int, int]"  # epoch, step, batch, rank

_POSITIONS = ("cache_position", "position_ids")
_TOKENS = {"input_ids": 2, "inputs_embeds": 3}  # what is one for each token, and its axes
_SUM = 1e-2  # of attention weights, which add up to one


@dataclass(frozen=True, eq=False)
class Positions:
    """The token of each row of one step, and of each key that rows attend to: batch by rows; -1 is padding.

    `tokens` is the record of what the step was given, one for each row, where that is among its inputs.
    """

    rows: Numbers
    keys: Numbers
    tokens: Entry | None = None

    def alike(self, other: Positions) -> bool:
        """Tell whether rows stand in the same places: by position, or because the same tokens were given."""
        if np.array_equal(self.rows, other.rows) and np.array_equal(self.keys, other.keys):
            return True
        if self.tokens is None or other.tokens is None or self.tokens.shape != other.tokens.shape:
            return False
        return bool((self.tokens.tensor() == other.tokens.tensor()).all())

    def share(self, other: Positions) -> bool:
        """Tell whether both have rows of a token."""
        return bool(np.intersect1d(self.rows[self.rows >= 0], other.rows[other.rows >= 0]).size)


def step_key(moment: Moment) -> StepKey:
    """Return the step of a moment, whatever the call."""
    return moment.epoch, moment.step, moment.batch, moment.rank


def positions_of(records: Mapping[Point, Mapping[Moment, Entry]]) -> dict[StepKey, Positions]:
    """Return the positions of each step that tells them: by its padding mask, else by the positions it was given."""
    told: dict[StepKey, dict[str, Entry]] = {}
    for point, entries in records.items():
        name = str(point.leaf[-1]) if point.leaf and point.side == "input" else ""
        if name not in _POSITIONS and (point.name or name not in (*MASKS, *_TOKENS)):
            continue
        for moment, entry in entries.items():
            told.setdefault(step_key(moment), {}).setdefault(name, entry)
    found = {}
    for step, given in told.items():
        try:
            positions = _positions(given)
        except LayerscopeError:  # a damaged record tells nothing
            continue
        if positions is not None:
            found[step] = positions
    return found


def _positions(given: Mapping[str, Entry]) -> Positions | None:
    tokens = next((e for name, axes in _TOKENS.items() if (e := given.get(name)) and len(e.shape or ()) == axes), None)
    batch, length = (tokens.shape or (1, 0))[:2] if tokens is not None else (1, 0)
    mask, stated = (next((given[n] for n in names if n in given), None) for names in (MASKS, _POSITIONS))
    if mask is not None and len(size := mask.shape or ()) == 2 and 0 < length <= size[1]:
        seen = mask.tensor().numpy() != 0
        keys = np.where(seen, seen.cumsum(1) - 1, -1)
        return Positions(keys[:, -length:], keys, tokens)
    if stated is None or len(size := stated.shape or ()) not in (1, 2) or 0 in size:
        return None
    rows = stated.tensor().numpy().astype(np.int64).reshape(-1, size[-1])
    rows = np.broadcast_to(rows, (max(batch, len(rows)), rows.shape[-1]))
    return Positions(rows, np.broadcast_to(np.arange(rows.max() + 1), (len(rows), rows.max() + 1)), tokens)


def by_position(
    found: tuple[list[Matched], list[Moment], list[Moment]], share: Callable[[Moment, Moment], bool | None]
) -> tuple[list[Matched], list[Moment], list[Moment]]:
    """Give the moments that `pair_moments` left alone, or paired without a common token, a step that has theirs.

    One run computes at once what the other computes in several steps: a moment may then belong to several. `share`
    tells whether two moments have a token in common, None where they are not known.
    """
    matched, lone, other = found
    here, there = [*(m for m, _, _ in matched), *lone], [*(c for _, c, _ in matched), *other]
    ours, theirs = sorted(here), sorted(there)
    kept = [pair for pair in matched if share(pair[0], pair[1]) is not False]
    used = {mine for mine, _, _ in kept}
    taken = {its for _, its, _ in kept}
    for mine in (moment for moment in ours if moment not in used):
        its = next((c for c in theirs if c.call == mine.call and c.rank == mine.rank and share(mine, c)), None)
        if its is not None:
            kept.append((mine, its, "by token position"))
            used.add(mine)
            taken.add(its)
    for its in (moment for moment in theirs if moment not in taken):
        first = next((m for m in ours if m.call == its.call and m.rank == its.rank and share(m, its)), None)
        # Its row stands at its own moment, where no row of another pair may stand.
        if first is not None and its not in used:
            kept.append((first, its, "by token position"))
            taken.add(its)
    return kept, [moment for moment in here if moment not in used], [moment for moment in there if moment not in taken]


# The rows that two steps share ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rows(Entry):
    """Rows of a record, picked or put in order; `whole` is the record, or the first of several."""

    whole: Entry
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, whole: Entry, read: Callable[[], torch.Tensor], shape: tuple[int, ...]) -> Rows:
        """Make a record of the rows that `read` gives."""
        size = whole.nbytes * math.prod(shape) // max(1, math.prod(whole.shape or ()))
        return cls(whole.point, whole.moment, whole.dtype, shape, size, whole._run, whole._at, whole, read)

    def tensor(self) -> torch.Tensor:
        """Return those rows."""
        return self.read()

    def pieces(self, items: int) -> Iterator[torch.Tensor]:
        """Go through their values."""
        flat = self.read().reshape(-1)
        for start in range(0, flat.numel(), items):
            yield flat[start : start + items]


class SharedRows:
    """Where the tokens that two steps have in common stand in each of them."""

    def __init__(self, ours: Positions, theirs: Positions) -> None:
        self.both = ours, theirs
        batch = max(len(positions.rows) for positions in self.both)
        rows = [np.broadcast_to(p.rows, (batch, p.rows.shape[1])) for p in self.both]
        keys = [np.broadcast_to(p.keys, (batch, p.keys.shape[1])) for p in self.both]
        self.batch = batch
        self.sequence, *self.rows = _places(*rows)
        self.columns = _columns(*keys)
        self.alike = all(bool((each == each[:1]).all()) for each in rows)
        counts = np.bincount(self.sequence, minlength=batch)
        self.even = bool((counts == counts[0]).all())

    def of(self, mine: Entry, other: Entry) -> tuple[Entry, Entry] | None:
        """Return the rows of two records that belong to the same tokens; None where no axis holds the tokens."""
        one, two = mine.shape or (), other.shape or ()
        axis = self._axis(one, two, whole=not rounding(mine.dtype or ""))
        if axis is None or not len(self.sequence):
            return None
        keys = [positions.keys.shape[1] for positions in self.both]
        attends = axis == 2 and [one[3], two[3]] == keys and _attends(mine)
        if one[3:] != two[3:] and not attends:
            return None
        return self._side(0, mine, axis, attends=attends), self._side(1, other, axis, attends=attends)

    def _axis(self, one: tuple[int, ...], two: tuple[int, ...], *, whole: bool) -> int | None:
        """Return the axis of the tokens, 0 where batch and tokens are one; None where none is of their number."""
        lengths = tuple(positions.rows.shape[1] for positions in self.both)
        if len(one) != len(two) or len(one) < 2:
            return None
        if len(one) == 2 and not whole:
            fits = (one[0], two[0]) == (self.batch * lengths[0], self.batch * lengths[1]) and one[1] == two[1]
            return 0 if fits else None
        if one[0] != two[0] or not (one[0] == self.batch or (one[0] == 1 and self.alike)):
            return None
        weights = len(one) == 4 and one[3] == self.both[0].keys.shape[1]
        for axis in (2, 1) if weights else (1, 2):
            others = one[1:axis] + one[axis + 1 : 3], two[1:axis] + two[axis + 1 : 3]
            if (axis == 1 or len(one) == 4) and (one[axis], two[axis]) == lengths and others[0] == others[1]:
                return axis
        return None

    def _side(self, which: int, entry: Entry, axis: int, *, attends: bool) -> Rows:
        shape = entry.shape or ()
        batch = 1 if axis and shape[0] == 1 else self.batch
        kept = self.sequence < batch
        sequence, at = self.sequence[kept], self.rows[which][kept]
        columns = self.columns[which] if attends else None
        length = self.both[which].rows.shape[1]
        parts = batch if self.even else 1

        def read() -> torch.Tensor:
            import torch

            value = entry.tensor()
            b, row = torch.from_numpy(sequence), torch.from_numpy(at)
            if axis == 0:
                return value[b * length + row]
            found = value.movedim(axis, 1)[b, row]
            if columns is not None:
                of = torch.from_numpy(columns)[b]
                of = of.reshape(len(of), *[1] * (found.ndim - 2), -1).expand(*found.shape[:-1], of.shape[-1])
                found = found.gather(-1, of.clamp_min(0)).masked_fill(of < 0, 0)
            return found.reshape(parts, -1, *found.shape[1:]).movedim(1, axis)

        if axis == 0:
            made: tuple[int, ...] = (len(at), *shape[1:])
        else:
            made = (parts, *shape[1:axis], len(at) // parts, *shape[axis + 1 :])
            made = made if columns is None else (*made[:-1], columns.shape[1])
        return Rows.of(entry, read, made)


def _attends(entry: Entry) -> bool:
    """Tell whether the last axis of a record is that of the keys: weights that add up to one, or a mask."""
    if any("mask" in str(part) for part in entry.point.leaf):
        return True
    values = entry.tensor()
    sums = values.double().sum(-1)
    return bool((values >= 0).all()) and bool(((sums - 1).abs() < _SUM).double().mean() > 0.5)


def _places(ours: Numbers, theirs: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return sequence, row here and row there of each token that both have."""
    found = []
    for b, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        there = {int(p): at for at, p in enumerate(two) if p >= 0}
        found += [(b, at, there[int(p)]) for at, p in enumerate(one) if int(p) in there]
    table = np.array(found, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _columns(ours: Numbers, theirs: Numbers) -> tuple[Numbers, Numbers]:
    """Return where the keys that both have stand on each side; -1 fills up what has fewer."""
    tables = [_places(ours[b : b + 1], theirs[b : b + 1])[1:] for b in range(len(ours))]
    width = max(len(table[0]) for table in tables)
    made = np.full((2, len(ours), width), -1, np.int64)
    for b, table in enumerate(tables):
        made[:, b, : len(table[0])] = table
    return made[0], made[1]
