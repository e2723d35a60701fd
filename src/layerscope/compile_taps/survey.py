"""One forward before compiling: which taps fire, what the model returns, where hidden states and logits are.

survey = surveyed(model, example_inputs, record=True)
survey.tapped; survey.table

What fires here is what every later call must give; what does not is listed as missing, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from layerscope.compile_taps.arguments import Arguments, split
from layerscope.compile_taps.embedding import Embedding
from layerscope.compile_taps.forward_order import followed
from layerscope.compile_taps.head import head_of
from layerscope.compile_taps.layer_points import asked
from layerscope.compile_taps.stack import Stack, lists_of, stack_of
from layerscope.compile_taps.tap_table import Table, TapEntry
from layerscope.compile_taps.tapped_model import Look, Tapped
from layerscope.compile_taps.uses import used_without_a_call
from layerscope.compile_taps.value_forms import Form, Taken
from layerscope.errors import NothingRecorded
from layerscope.points import Point
from layerscope.runtimes import eager
from layerscope.runtimes.snapshot import restored
from layerscope.store import Missing

__all__ = ["Survey", "surveyed"]

_FUNCTIONALLY = "called functionally: its weights are used without calling it"


class Survey(NamedTuple):
    """The tapped model, what is known of it, the tensors it was tried with, and the classes of what it returns."""

    tapped: Tapped
    table: Table
    example: tuple[torch.Tensor, ...]
    classes: dict[str, type]


def surveyed(model: nn.Module, example_inputs: object, *, record: Any) -> Survey:
    """Put the taps that are asked for on a copy of the model, and run it once."""
    args, kwargs = split(example_inputs)
    arguments = Arguments.of(model, example_inputs)
    stack, head = _found(model, args, kwargs) if record is not False else (None, None)
    layers, embedding = (stack.layers, stack.embedding) if stack else ([], None)
    wanted = asked(model, record, layers)
    with torch.no_grad(), restored(model):
        along = [point for point in (embedding and embedding.point, head and Point(head)) if point]
        tapped = Tapped(model, dict.fromkeys([*wanted.points, *along]))
        with restored(tapped):
            value, looks, ran = _tried(tapped, args, kwargs)
            never_called = {point.name for point in wanted.points} - ran
            used = used_without_a_call(tapped.model, never_called, args, kwargs)
    taken = Taken.of(value)
    logits = _in_output(taken.form) if wanted.points else None
    unasked = {head} - {point.name for point in wanted.points} if logits else set()
    needed = [look for look in _states_alone(looks, wanted.states_alone) if look.name not in unasked]
    if len(needed) < len(looks):
        looks, tapped = needed, Tapped(model, dict.fromkeys(look.point for look in needed))
    taps = _entries(looks)
    start, states = _hidden(taps, looks, wanted.points, layers, embedding)
    missing = _missing(tapped.model, wanted.points, looks, never_called, used)
    if missing and len(missing) == len(wanted.points):
        raise NothingRecorded(f"none of the taps fires: {missing[0].point}: {missing[0].reason}.")
    table = Table(
        points=tuple(map(str, wanted.points)),
        arguments=arguments,
        output=taken.form,
        outputs=len(taken.tensors),
        taps=tuple(taps),
        hidden=tuple(start + states),
        embedded=bool(start),
        logits=logits or _of_head(taps, head),
        missing=tuple(missing),
        notes=(stack.disorder,) if stack and stack.disorder else (),
    )
    return Survey(tapped, table, tuple(arguments.tensors(args, kwargs)), taken.classes)


def _found(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Stack | None, str | None]:
    """Follow one forward, and return the layers and the head that show in it."""
    lists = lists_of(model)
    with torch.no_grad(), restored(model):
        way = followed(model, lists, args, kwargs)
    stack = stack_of(model, lists, way)
    return stack, head_of(model, stack, way)


def _tried(tapped: Tapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Look], set[str]]:
    """Run the tapped model; return its value, what the taps took, and which modules ran."""
    ran: set[str] = set()
    with ExitStack() as stack:
        for name, module in eager.modules_of(tapped.model).by_name.items():
            stack.callback(module.register_forward_hook(lambda *_, name=name: ran.add(name)).remove)
        value, looks = tapped.looked(*args, **kwargs)
    return value, looks, ran


def _states_alone(looks: list[Look], alone: frozenset[str]) -> list[Look]:
    """Leave out what a layer returns beside its hidden states, where only those are meant."""
    states = {look.name: look.leaf for look in reversed(looks) if _is_state(look, alone)}
    return [look for look in looks if look.side != "output" or look.leaf == states.get(look.name, look.leaf)]


def _is_state(look: Look, layers: Collection[str]) -> bool:
    return look.name in layers and look.side == "output" and look.tensor.is_floating_point()


def _entries(looks: list[Look]) -> list[TapEntry]:
    calls: Counter[Point] = Counter()
    entries = []
    for look in looks:
        entries.append(TapEntry(str(look.point), calls[look.point]))
        calls[look.point] += 1
    return entries


def _hidden(
    taps: list[TapEntry], looks: list[Look], wanted: list[Point], layers: list[str], embedding: Embedding | None
) -> tuple[list[int], list[int]]:
    """Tell which tap is the embedding, and which ones are what each tapped layer gives first.

    Where no list of layers was found, or none of them is tapped, the states are all that was asked for.
    """
    start = [at for at, tap in enumerate(taps) if embedding and tap == TapEntry(str(embedding.point), embedding.call)]
    states: dict[tuple[str, int], int] = {}
    for at, (tap, look) in enumerate(zip(taps, looks, strict=True)):
        if _is_state(look, layers):
            states.setdefault((look.name, tap.call), at)
    asked_for = [at for at, look in enumerate(looks) if any(_is_under(look.point, point) for point in wanted)]
    return start, list(states.values()) or [at for at in asked_for if at not in start]


def _in_output(output: Form) -> tuple[str, int] | None:
    """Tell which tensor of the output is called logits."""
    named = [part["tensor"] for name, part in output.get("fields", ()) if name == "logits" and "tensor" in part]
    return ("output", named[0]) if named else None


def _of_head(taps: list[TapEntry], head: str | None) -> tuple[str, int] | None:
    """Tell which tap has what the head gave last: the logits of a model that returns token ids, or a bare tensor."""
    given = [at for at, tap in enumerate(taps) if head is not None and tap.point == str(Point(head))]
    return ("tap", given[-1]) if given else None


def _missing(
    model: nn.Module, wanted: list[Point], looks: list[Look], never_called: set[str], used: set[str]
) -> list[Missing]:
    silent = [point for point in wanted if not any(_is_under(look.point, point) for look in looks)]
    why = eager.why_silent(model, never_called) | dict.fromkeys(used, _FUNCTIONALLY)
    return [Missing(str(p), why.get(p.name, f"it ran, and its {p.side} holds no such tensor")) for p in silent]


def _is_under(point: Point, above: Point) -> bool:
    return (point.name, point.side, point.leaf[: len(above.leaf)]) == (above.name, above.side, above.leaf)
