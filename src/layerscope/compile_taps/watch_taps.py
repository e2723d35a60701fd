"""How `record` watches a compiled model: it is told what the taps took, after each call.

    with record(compiled, "model.layers.*", to="runs/torchscript"):
        compiled(**inputs)

What can be recorded is what was tapped when the model was compiled, its inputs and outputs, and its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from layerscope.compile_taps.compiled_model import PRECISE, Compiled
from layerscope.errors import Unsupported
from layerscope.patterns import Place
from layerscope.points import Point
from layerscope.runtimes import eager
from layerscope.runtimes.forwards import Forwards
from layerscope.runtimes.observer_effect import NOT_CALLED, SKIPPED
from layerscope.runtimes.runtime import Wanted, Weights
from layerscope.runtimes.sink import RuntimeSink

LOGITS = "logits"


class Watching:
    """The verbs of a runtime for one compiled model."""

    def __init__(self, name: str, *, measure: bool) -> None:
        self.NAME = name
        self._measure = measure

    def points(self, model: Compiled) -> list[Place]:
        """List what is tapped, and the model itself."""
        known = {place.name: place for place in eager.points(model.source.model)} if model.source else {}
        asked = [Point.parse(text).name for text in (*model.table.points, *(tap.point for tap in model.table.taps))]
        places = [known.get(name, Place(name)) for name in dict.fromkeys(["", *asked])]
        return places if model.table.logits is None else [*places, Place(LOGITS)]

    def remark(self, model: Compiled) -> str:
        """Say which points these are."""
        return "these were tapped when the model was compiled; layerscope.compile(...) again for others"

    def shared(self, model: Compiled) -> dict[str, str]:
        """Return nothing: a shared module is tapped under its first name."""
        return {}

    def parameters(self, model: Compiled) -> list[torch.Tensor]:
        """Return the source's parameters, where it is at hand."""
        return eager.parameters(model.source.model) if model.source else []

    def weights(self, model: Compiled) -> Weights:
        """Return the source's weights, where it is at hand."""
        return eager.weights(model.source.model) if model.source else {}

    def notes(self, model: Compiled) -> dict[str, Any]:
        """Say what belongs into the run's settings, once it is over: what the taps do to the output."""
        effect = model.observer_effect or (NOT_CALLED if self._measure else SKIPPED)
        said = {"observer_effect": str(effect)}
        return {**said, "precision_faithful": True} if PRECISE in model.notes else said

    def check(self, model: Compiled, wanted: Wanted, *, ops: bool) -> None:
        """Refuse what was not compiled in."""
        if ops:
            raise Unsupported("a compiled model has no operations to watch; name what was tapped when it was compiled.")
        sides = {(point.name, point.side) for point in (Point.parse(tap.point) for tap in model.table.taps)}
        sides |= {("", "input"), ("", "output"), (LOGITS, "output")}
        sides |= {(point.name, point.side) for point in (Point.parse(each.point) for each in model.table.missing)}
        lacking = [f"{name}:{side}" for name, those in wanted.items() for side in those if (name, side) not in sides]
        if lacking:
            raise Unsupported(
                f"{lacking[0]} was not tapped when the model was compiled; "
                f"compile it again with it: record_layer_outputs=[..., {lacking[0]!r}]."
            )

    @contextmanager
    def watch(
        self, model: Compiled, wanted: Wanted, sink: RuntimeSink, *, ops: Callable[[str], str | None] | None = None
    ) -> Iterator[Callable[..., Any]]:
        """Tell `sink` what the wanted taps took until the block ends."""
        forwards = Forwards(sink)
        before = model.redirect(None)
        own = model.run if self._measure else model.run_unmeasured
        compute = before or own  # another recording of the same object goes on

        def run(*args: Any, **kwargs: Any) -> Any:
            value = compute(*args, **kwargs)
            forwards.safely(told)
            return value

        def told() -> None:
            for tap, tensor in model.taken():
                point = Point.parse(tap.point)
                if point.name and point.side in wanted.get(
                    point.name, ()
                ):  # the model's own ends are told by `forwards`
                    forwards.tell_leaves(point.name, point.side, [(point.leaf, tensor)], call=tap.call)
            if LOGITS in wanted:
                forwards.tell_leaves(LOGITS, "output", [((), model.taps()[LOGITS])], call=0)

        def call(*args: Any, **kwargs: Any) -> Any:
            return forwards.run(run, compute, wanted.get("", ()), args, kwargs)

        model.redirect(call)
        try:
            yield model
        finally:
            model.redirect(before)

    def why_silent(self, model: Compiled, names: Iterable[str]) -> dict[str, str]:
        """Say why these were never seen, from what the forward before compiling showed."""
        reasons = {Point.parse(each.point).name: each.reason for each in model.missing}
        return {name: reasons.get(name, "never called") for name in names}
