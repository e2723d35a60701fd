"""End a forward after a layer, where nothing later is recorded: seconds instead of minutes for a first layer alone.

with ending(model, "model.layers.0"):
    with suppress(Enough):
        model(**inputs)             # the layers after it are not run
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from layerscope.errors import Ambiguous, NoSuchPoint, Unsupported
from layerscope.modes.layer_taps import chosen_layers, stack_of
from layerscope.patterns import select
from layerscope.points import escape
from layerscope.runtimes import find

NEVER = "never"


class Enough(BaseException):
    """Ends a forward of which no more is recorded; no model's own `except Exception` keeps it going."""


@contextmanager
def ending(model: Any, name: str | None) -> Iterator[None]:
    """End each forward when this module has returned; with None nothing ends. Entered after the recording.

    The recorder's own hook on the module came first and has its value.
    """

    def end(module: object, args: object, output: object) -> None:
        raise Enough

    handle = None if name is None else model.get_submodule(name).register_forward_hook(end)
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def stop_of(model: Any, text: str | None, *, alone: str | None = None) -> str | None:
    """Return the module after which a forward may end; None where it runs on.

    `text` is a module's name, a decoder layer as `chosen_layers` knows it, or `never`. Where it is left out and
    `alone`, what is recorded and nothing else, is the first decoder layer, it ends there.
    """
    if text == NEVER:
        return None
    if text is None:
        if alone is None or not _can_end(model):
            return None
        try:
            stack = stack_of(model)
        except (NoSuchPoint, Ambiguous):  # a pattern needs no stack
            return None
        # A stack of one layer may be gone through several times, and there is nothing to save.
        return stack[0] if len(stack) > 1 and chosen_layers(model, alone) == [escape(stack[0])] else None
    if not _can_end(model):
        raise Unsupported(
            f"--stop-after {text} is for models that run in eager mode, and this one runs in {find(model).NAME}: it "
            "cannot be left halfway; leave it out."
        )
    names = dict.fromkeys(p.name for p in select(chosen_layers(model, text), find(model).points(model)))
    if len(names) > 1:
        listed = ", ".join(list(names)[:5])
        raise NoSuchPoint(f"--stop-after {text} names {len(names)} modules ({listed}); a forward ends after one.")
    return next(iter(names))


def _can_end(model: Any) -> bool:
    return find(model).NAME == "eager"
