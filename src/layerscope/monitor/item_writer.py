"""Save captures as items, numbered by epoch; what the disk refuses is said, and stops nothing.

writer = ItemWriter(Path("out"), stored, format="pt", losses=losses)
writer.put(layer, captures)         # out/single_epoch_1_000.pt, or None
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from layerscope.errors import LayerscopeError
from layerscope.log import log
from layerscope.monitor.captures import CapturedOutput, shape_of
from layerscope.monitor.items import Format, next_number, write_item
from layerscope.monitor.layers import Layer
from layerscope.monitor.stored import Stored
from layerscope.monitor.streaming import joined, write_epoch
from layerscope.recorder.tensors import undisturbed
from layerscope.store.losses import Losses


@final
class ItemWriter:
    """A folder of items. Numbers go on behind those that are there, so that no earlier run's item is replaced."""

    def __init__(self, folder: Path, stored: Stored, *, format: Format, losses: Losses) -> None:
        self.folder = folder
        self._stored = stored
        self._format: Format = format
        self._losses = losses
        self._next: dict[str, int] = {}
        self._epochs: dict[tuple[str, int], int] = {}  # the item that holds a layer's epoch so far

    def forget(self, layer: Layer) -> None:
        """Begin a new item for the layer's epoch instead of replacing the one there is."""
        self._epochs = {key: number for key, number in self._epochs.items() if key[0] != layer.alias}

    def put(self, layer: Layer, captures: Sequence[CapturedOutput], *, format: Format | None = None) -> Path | None:
        """Save one batch of a `single` layer, or the epoch so far of an `epoch_full` one; None when it cannot be."""
        put = self._put_epoch if layer.record_type == "epoch_full" else self._put_single
        whole = layer.record_type == "epoch_full"
        epoch = captures[0].epoch
        stem = f"epoch_{epoch}" if whole else f"single_epoch_{epoch}"
        try:
            stem = f"{stem}_{self._number(stem, (layer.alias, epoch) if whole else None):03d}"
            with undisturbed():  # a forward may have brought us here
                path = put(stem, layer, captures, format or self._format)
        except (OSError, RuntimeError, LayerscopeError) as error:  # torch's writer raises RuntimeError on a full disk
            self._losses.say(f"{layer.alias} could not be saved as {stem}: {error}", once=f"{layer.alias} {error}")
            return None
        log.debug("%s is saved as %s", layer.alias, path)
        return path

    def _put_single(self, stem: str, layer: Layer, captures: Sequence[CapturedOutput], format: Format) -> Path:
        [capture] = captures
        output = capture.output(self._stored.fetch)
        about = {"epoch": capture.epoch, "batch_idx": capture.batch, "layer": layer.name, "alias": layer.alias}
        samples = {} if capture.samples is None else {"sample_indices": list(capture.samples)}
        item: dict[str, Any] = {**about, **samples, "output_shape": shape_of(output), "output": output}
        return write_item(self.folder, stem, item, format=format)

    def _put_epoch(self, stem: str, layer: Layer, captures: Sequence[CapturedOutput], format: Format) -> Path:
        numbers = [capture.batch for capture in captures]
        about = {"epoch": captures[0].epoch, "batch_idx": numbers, "layer": layer.name, "alias": layer.alias}
        samples = [None if capture.samples is None else list(capture.samples) for capture in captures]
        known = {"sample_indices": samples} if any(each is not None for each in samples) else {}
        output, pieces = joined(captures), self._stored.pieces
        return write_epoch(self.folder, stem, {**about, **known}, output, pieces, format=format)

    def _number(self, stem: str, epoch: tuple[str, int] | None) -> int:
        if epoch is not None and epoch in self._epochs:
            return self._epochs[epoch]
        number = self._next.get(stem)
        if number is None:
            number = next_number(self.folder, stem)
        self._next[stem] = number + 1
        if epoch is not None:
            self._epochs[epoch] = number
        return number
