"""A run that is never written: records kept in this process, under the same reading verbs.

    run = MemoryRun(Manifest())
    run.add(Point("blocks.3"), Moment(step=3), tensor=x)
    run.tensor("blocks.3")

Adding costs an append to a list, because it happens inside a model's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, final

from layerscope.points import Moment, Point
from layerscope.store.losses import Losses
from layerscope.store.manifest import Completeness, Manifest, Missing
from layerscope.store.run import Run
from layerscope.store.source import Item, Items
from layerscope.store.strictjson import JSON

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary


class _Added(NamedTuple):
    point: Point
    moment: Moment
    tensor: torch.Tensor | None
    summary: Summary | Callable[[], Summary] | None
    note: Mapping[str, JSON]


@final
class _Memory(Items):
    """What was added; it becomes an item when it is asked for."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__("memory", (), manifest=manifest)
        self.added: list[_Added] = []

    @property
    def _size(self) -> int:
        return len(self.added)

    def _where(self, at: int) -> tuple[Point, Moment]:
        return self.added[at][:2]

    def _item(self, at: int) -> Item:
        point, moment, tensor, summary, note = self.added[at]
        if tensor is None:
            return Item(point, moment, None, None, 0, None, summary=summary, note=note)
        dtype, size = str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()
        return Item(point, moment, dtype, tuple(tensor.shape), size, tensor.cpu, summary=summary, note=note)


@final
class MemoryRun(Run):
    """Records kept in this process. Adding one is an append to a list; the table is made when something is asked."""

    def __init__(self, manifest: Manifest | None = None) -> None:
        self._memory = _Memory(manifest or Manifest())
        super().__init__(self._memory)
        self._losses = Losses(self.address)
        self._before = 0  # records that were handed over in runs before this one

    def following(self) -> MemoryRun:
        """Return an empty run that goes on counting where this one stops."""
        run = MemoryRun(self.manifest)
        run._losses, run._before = self._losses, self._before + len(self._memory.added)
        return run

    @property
    def manifest(self) -> Manifest:
        """What the run says about itself; may be replaced while it is recorded."""
        return self._memory.manifest

    @manifest.setter
    def manifest(self, manifest: Manifest) -> None:
        self._memory.manifest = manifest

    def add(
        self,
        point: Point,
        moment: Moment,
        *,
        tensor: torch.Tensor | None = None,
        summary: Summary | Callable[[], Summary] | None = None,
        note: Mapping[str, JSON] | None = None,
    ) -> None:
        """Keep one record; the tensor is kept as it is, so the caller hands over one that no other code changes.

        A callable `summary` is called when it is asked for, each time.
        """
        self._memory.added.append(_Added(point, moment, tensor, summary, note or {}))

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
        records = self._before + len(self._memory.added)
        completeness = Completeness(
            state, forwards, points, records, recomputed, list(missing), self._losses.dropped, failed=failed
        )
        self.manifest = replace(self.manifest, completeness=completeness)
        return completeness
