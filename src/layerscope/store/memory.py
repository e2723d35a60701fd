"""A run that is never written: the same reading verbs over tensors in memory.

    run = MemoryRun(Manifest())
    run.add(Point("blocks.3"), Moment(step=3), tensor=x)
    run.tensor("blocks.3")

Adding costs an append to a list, because it happens inside a model's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, final

from layerscope.points import Moment, Point
from layerscope.store.index import Index, Row
from layerscope.store.journal import Record
from layerscope.store.losses import Losses
from layerscope.store.manifest import Completeness, Manifest, Missing
from layerscope.store.reader import Reader
from layerscope.store.strictjson import JSON

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary

__all__ = ["MemoryRun"]


class _Kept(NamedTuple):
    point: Point
    moment: Moment
    tensor: torch.Tensor | None
    summary: Summary | Callable[[], Summary] | None
    note: Mapping[str, JSON]


@final
class MemoryRun(Reader):
    """Records kept in this process. Adding one is an append to a list; the index is made when something is asked."""

    address = "memory"

    def __init__(self, manifest: Manifest | None = None) -> None:
        super().__init__()
        self._manifest = manifest or Manifest()
        self._kept: list[_Kept] = []
        self._table = Index()
        self._indexed = 0
        self._losses = Losses(self.address)
        self._before = 0  # records that were handed over in runs before this one

    def following(self) -> MemoryRun:
        """Return an empty run that goes on counting where this one stops."""
        run = MemoryRun(self._manifest)
        run._losses, run._before = self._losses, self._before + len(self._kept)
        return run

    @property
    def manifest(self) -> Manifest:
        """What the run says about itself; may be replaced while it is recorded."""
        return self._manifest

    @manifest.setter
    def manifest(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def add(
        self,
        point: Point,
        moment: Moment,
        *,
        tensor: torch.Tensor | None = None,
        summary: Summary | Callable[[], Summary] | None = None,
        note: Mapping[str, JSON] | None = None,
    ) -> None:
        """Keep one record; the tensor is kept as it is, so the caller hands over one that nobody else changes.

        A callable `summary` is called when it is asked for, each time.
        """
        self._kept.append(_Kept(point, moment, tensor, summary, note or {}))

    def lose(self, point: Point, moment: Moment, reason: str) -> None:
        """Count a record that could not be made, and say the first of its kind."""
        self._losses.count(str(point), str(moment), reason)

    def close(
        self,
        *,
        forwards: int = 0,
        points: int = 0,
        recomputed: int = 0,
        missing: Iterable[Missing] = (),
        failed: int = 0,
        state: str = "complete",
    ) -> Completeness:
        """State how complete the run is, as `Writer.close` does."""
        completeness = Completeness(
            state,
            forwards,
            points,
            self._before + len(self._kept),
            recomputed,
            list(missing),
            self._losses.dropped,
            failed=failed,
        )
        self._manifest = replace(self._manifest, completeness=completeness)
        return completeness

    @property
    def replaced(self) -> int:
        """How many records gave way to a later one of the same point and moment."""
        return self._ask(lambda index: self._indexed - len(index))

    def _index(self) -> Index:
        end = len(self._kept)
        if self._indexed < end:
            self._table.add(self._row(n) for n in range(self._indexed, end))
            self._indexed = end
        return self._table

    def _forget_index(self) -> None:
        self._table, self._indexed = Index(), 0

    def _row(self, number: int) -> Row:
        kept = self._kept[number]
        m, tensor = kept.moment, kept.tensor
        facts = Record(
            number,
            str(kept.point),
            m.epoch,
            m.step,
            m.batch,
            m.call,
            m.rank,
            None if tensor is None else str(tensor.dtype).removeprefix("torch."),
            None if tensor is None else tuple(tensor.shape),
            None,
        )
        return Row(facts, 0)

    def _tensor(self, row: Row, rows: range | None) -> torch.Tensor:
        tensor = self._kept[row.facts.record].tensor
        assert tensor is not None
        return tensor.cpu() if rows is None else tensor[rows.start : rows.stop : rows.step].cpu()

    def _nbytes(self, row: Row) -> int:
        tensor = self._kept[row.facts.record].tensor
        return 0 if tensor is None else tensor.numel() * tensor.element_size()

    def _rest(self, row: Row) -> tuple[Summary | None, dict[str, Any]]:
        kept = self._kept[row.facts.record]
        return kept.summary() if callable(kept.summary) else kept.summary, dict(kept.note)
