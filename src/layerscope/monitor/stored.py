"""Read captures back: from memory, or from the run that is being written.

    stored = Stored(recording, Path("out/run"), losses)
    stored.fetch(held)          # a tensor of its own

A run that is gone, or has lost records to a full disk, costs what it held and nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import torch

from layerscope.errors import LayerscopeError, NoSuchPoint, NotARun
from layerscope.monitor.captures import CapturedOutput, Held, held_in
from layerscope.monitor.layers import Layer
from layerscope.points import Moment, Point
from layerscope.recorder import Recording
from layerscope.recorder.tensors import undisturbed
from layerscope.store import Run, open_run
from layerscope.store.losses import Losses
from layerscope.store.run import Entry

_PIECE = 1 << 20  # values at a time


@final
class Stored:
    """The run of a recording, opened once and read on as it grows."""

    def __init__(self, recording: Recording, path: Path, losses: Losses) -> None:
        self.path = path
        self._recording = recording
        self._losses = losses
        self._run: Run | None = None

    @property
    def run(self) -> Run:
        """The run with all that was recorded so far; raises NotARun when it is not there any more."""
        self._recording.flush()
        if self._run is None:
            found = open_run(self.path)
            assert isinstance(found, Run)
            self._run = found
        else:
            self._run.refresh()
        if not self.path.is_dir():
            raise NotARun(f"{self.path} is not there any more")
        return self._run

    def readable(self, layer: Layer, captures: Sequence[CapturedOutput]) -> list[CapturedOutput]:
        """Return the captures without those that a full disk or a removed folder has taken."""
        if all(capture.in_memory for capture in captures):
            return list(captures)
        there: set[tuple[Point, Moment]] = set()
        try:
            run = self.run
            with contextlib.suppress(LookupError):
                there = {(entry.point, entry.moment) for entry in run.records(Point(layer.place))}
        except (LayerscopeError, OSError) as error:
            self._losses.say(f"what was captured cannot be read back: {error}")
        kept = [capture for capture in captures if all(_found(held, there) for held in held_in(capture.tree))]
        if len(kept) < len(captures):
            lost = len(captures) - len(kept)
            self._losses.say(f"{lost} outputs of {layer.alias} are lost: {self.path} does not have them")
        return kept

    def fetch(self, held: Held) -> torch.Tensor:
        """Return a tensor of its own; raises a LayerscopeError or OSError when it cannot be read any more."""
        with undisturbed():
            if held.copy is not None:
                return held.copy().clone()
            return self._entry(held).tensor().clone()  # it is mapped, and saving it would save the whole file

    def pieces(self, held: Held) -> Iterator[torch.Tensor]:
        """Go through the values of a tensor in row-major order, in flat pieces that are only for now."""
        if held.copy is not None:
            yield held.copy().reshape(-1)
        else:
            yield from self._entry(held).pieces(_PIECE)

    def _entry(self, held: Held) -> Entry:
        when, run = held.moment, self._run or self.run
        found = run.records(
            held.point, epoch=when.epoch, step=when.step, batch=when.batch, call=when.call, rank=when.rank
        )
        entry = next(found, None)
        if entry is None:
            raise NoSuchPoint(f"{self.path} has no {held.point} at {when}")
        return entry


def _found(held: Held, there: set[tuple[Point, Moment]]) -> bool:
    return held.copy is not None or (held.point, held.moment) in there
