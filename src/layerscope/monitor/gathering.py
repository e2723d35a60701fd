"""Gather what a recording sees into captures, by layer, epoch and batch.

    gathered = Gathered(layers, choices, room=512 << 20, begins=lambda: None, losses=losses)
    with record(model, taps, to="out/run", options=RecordOptions(listener=gathered)): ...
    gathered.of(layer)

A tensor is copied to memory while there is room; beyond that the run alone has it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import final

import torch

from layerscope.log import log
from layerscope.monitor.captures import CapturedOutput, Held, held_in, shape_of
from layerscope.monitor.layers import Layer, LayerChoice
from layerscope.points import Leaf, Moment, Point
from layerscope.recorder.host_memory import Arena
from layerscope.recorder.tensors import plain
from layerscope.runtimes.values import rebuilt
from layerscope.store.losses import Losses


@final
class Gathered:
    """The captures of the epoch under way, and which of them are not saved yet; a recording's listener.

    `begins` is asked before each forward, and gives the reason why it does not count, None when it does; `keeps` is
    asked of each output. `samples` are those of the batch under way, where they are known.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        choices: Mapping[str, LayerChoice],
        *,
        room: int,
        begins: Callable[[], str | None],
        losses: Losses,
        keeps: Callable[[object], bool] = lambda output: True,
    ) -> None:
        self.samples: tuple[int, ...] | None = None
        self._choices = choices
        self._begins = begins
        self._losses = losses
        self._keeps = keeps
        self._room = room
        self._held = 0
        self._arena = Arena()
        self._lock = threading.RLock()
        self._local = threading.local()
        self._data: dict[str, dict[tuple[int, int], CapturedOutput]] = {}
        self._unsaved: dict[str, set[tuple[int, int]]] = {}
        self._at: dict[str, list[Layer]] = {}
        for layer in layers:
            self._at.setdefault(layer.place, []).append(layer)
            self.forget([layer])

    # What the recording tells -------------------------------------------------------------------

    def wants(self) -> bool:
        """Tell whether the forward that begins is recorded at all."""
        why = self._begins()
        if why is not None:
            log.debug("a forward is skipped: %s", why)
        return why is None

    def seen(self, point: Point, moment: Moment, tensor: torch.Tensor, summary: object) -> None:
        """Keep a copy of one tensor of an output while there is room; the run has it in any case."""
        values, _ = plain(tensor)
        with self._lock:
            fits = self._held + values.nbytes <= self._room
            self._held += values.nbytes if fits else 0
        copy = self._arena.copy(values) if fits else None
        self._leaves()[point.leaf] = Held(point, moment, values.dtype, tuple(values.shape), values.nbytes, copy)

    def whole(self, point: Point, moment: Moment, value: object) -> None:
        """Take down an output whose tensors have been seen, with its structure, for each layer that is due."""
        leaves, self._local.leaves = self._leaves(), {}
        assert moment.epoch is not None
        taken = False
        try:
            if not self._keeps(value):
                log.debug("%s is skipped at %s: _custom_condition says no", point.name, moment)
                return
            try:
                tree = rebuilt(value, lambda leaf, _: leaves[leaf])
            except KeyError as leaf:
                log.debug("%s is skipped at %s: its leaf %s cannot be recorded", point.name, moment, leaf)
                return
            capture = CapturedOutput(moment.epoch, moment.batch, moment, tree, self.samples)
            for layer in self._at.get(point.name, ()):
                if self._choices[layer.alias](moment):
                    self._take(layer, capture)
                    taken = True
        finally:
            if not taken:
                with self._lock:
                    self._held -= sum(held.nbytes for held in leaves.values() if held.copy is not None)

    def _leaves(self) -> dict[Leaf, Held]:
        found: dict[Leaf, Held] | None = getattr(self._local, "leaves", None)
        if found is None:
            found = self._local.leaves = {}
        return found

    def _take(self, layer: Layer, capture: CapturedOutput) -> None:
        with self._lock:
            data = self._data[layer.alias]
            before = data.pop(capture.key, None)
            data[capture.key] = capture
            self._unsaved[layer.alias].add(capture.key)
            if before is not None:
                self._held -= before.held
        if before is not None and before.moment.step == capture.moment.step:
            self._losses.say(
                f"{layer.name} was called more than once in a batch (epoch {capture.epoch}, batch {capture.batch}): "
                "the Monitor keeps the last call, the run has them all.",
                once=f"calls of {layer.name}",
            )
        if log.isEnabledFor(logging.DEBUG):
            where = "in memory" if capture.in_memory else "in the run"
            log.debug("%s is captured at %s: shape %s, %s", layer.alias, capture.moment, shape_of(capture.tree), where)

    # What there is --------------------------------------------------------------------------------

    def of(self, layer: Layer) -> list[CapturedOutput]:
        """Return the captures of a layer in the order they came."""
        with self._lock:
            return list(self._data[layer.alias].values())

    def unsaved(self, layer: Layer) -> set[tuple[int, int]]:
        """Return the epochs and batches of a layer that are not saved yet."""
        with self._lock:
            return set(self._unsaved[layer.alias])

    def saved(self, layer: Layer, captures: Iterable[CapturedOutput]) -> None:
        """Take down that captures are saved."""
        with self._lock:
            self._unsaved[layer.alias] -= {capture.key for capture in captures}

    def forget(self, layers: Iterable[Layer]) -> None:
        """Let go of what was captured of these layers."""
        with self._lock:
            for layer in layers:
                self._data[layer.alias] = {}
                self._unsaved[layer.alias] = set()
            left = {id(h): h for data in self._data.values() for c in data.values() for h in held_in(c.tree)}
            self._held = sum(held.nbytes for held in left.values() if held.copy is not None)
