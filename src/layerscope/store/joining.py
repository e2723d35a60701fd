"""A run whose samples went through the model a few at a time, read as if all had gone at once.

    whole = joined(run)
    whole.tensor("backbone.layers.0")       # (samples, tokens, width), of all its steps
    are_samples(run.records("backbone.layers.0"), run.manifest)     # and not, say, steps of a training

Nothing is copied until it is asked for, and `Entry.pieces` never holds more than a piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

from layerscope.errors import Unsupported
from layerscope.points import Moment, Point
from layerscope.store.manifest import Manifest
from layerscope.store.run import Entry, Run
from layerscope.store.source import Item, Items

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary

SAMPLES = "calib_data_num"  # the setting of a run that says how many samples it was recorded on


def joined(run: Run, entries: Iterable[Entry] | None = None) -> Run:
    """Return a view of `run` in which the records of a point are one, joined along their first axis in order.

    `entries` are the records to join, all of the run's where they are left out. Raises Unsupported for records that
    differ in dtype or in another axis. A run of one moment is returned as it is.
    """
    if entries is None:
        if len(run.moments) < 2:
            return run
        entries = run.records()
    of: dict[Point, list[Entry]] = {}
    for entry in entries:
        of.setdefault(entry.point, []).append(entry)
    items = [_item(parts) for parts in of.values()]
    return Run(Items(run.address, items, manifest=run.manifest, layout=run.layout, notes=run.notes))


def are_samples(entries: Sequence[Entry], manifest: Manifest) -> bool:
    """Tell whether the records of a point, together, are the samples that the run was recorded on, each once."""
    wanted = manifest.settings.get(SAMPLES)
    others = {(entry.moment.epoch, entry.moment.call, entry.moment.rank) for entry in entries}
    if type(wanted) is not int or len(others) != 1:
        return False
    return all(entry.shape for entry in entries) and sum((entry.shape or (0,))[0] for entry in entries) == wanted


def _item(parts: list[Entry]) -> Item:
    """Return several records as one."""
    first = parts[0]
    for part in parts[1:]:
        if part.dtype != first.dtype or _rest_of(part) != _rest_of(first):
            raise Unsupported(
                f"{first.point} cannot be read as one tensor: it is {first.dtype}{list(first.shape or ())} at "
                f"{first.moment} and {part.dtype}{list(part.shape or ())} at {part.moment}; choose a moment"
            )
    shape = None if first.shape is None else (sum((part.shape or (0,))[0] for part in parts), *first.shape[1:])
    size = sum(part.nbytes for part in parts)
    moment = Moment(step=first.moment.step, rank=first.moment.rank)

    def load() -> torch.Tensor:
        import torch

        return torch.cat([part.tensor() for part in parts])

    def pieces(items: int) -> Iterator[torch.Tensor]:
        for part in parts:
            yield from part.pieces(items)

    def summary() -> Summary | None:
        """Add summaries up where nothing else was kept; that of a tensor is taken from all of it when asked for."""
        known = [found for part in parts if (found := part.summary) is not None] if first.dtype is None else []
        return reduce(add, known) if known else None

    return Item(first.point, moment, first.dtype, shape, size, load, pieces, summary)


def _rest_of(entry: Entry) -> tuple[int, ...] | None:
    """Return every axis but the first, along which records are joined; a scalar has none to join along."""
    if entry.shape == ():
        raise Unsupported(f"{entry.point} at {entry.moment} is a scalar, and scalars are not joined; choose a moment")
    return None if entry.shape is None else entry.shape[1:]
