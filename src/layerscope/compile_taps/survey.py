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
from layerscope.compile_taps.decoder import Embedding, Stack, followed, head_of, lists_of, stack_of
from layerscope.compile_taps.layer_points import asked
from layerscope.compile_taps.tap_table import TapEntry, TapTable
from layerscope.compile_taps.tapped_model import Tapped, TappedTensor
from layerscope.compile_taps.uses import used_without_a_call
from layerscope.compile_taps.value_forms import FlatValue, Form
from layerscope.errors import NothingRecorded
from layerscope.points import Point
from layerscope.runtimes import eager
from layerscope.runtimes.snapshot import restored
from layerscope.store import Missing

_FUNCTIONALLY = "called functionally: its weights are used without calling it"


class Survey(NamedTuple):
    """The tapped model, what is known of it, the tensors it was tried with, and the classes of what it returns."""

    tapped: Tapped
    table: TapTable
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
            value, taken, ran = _tried(tapped, args, kwargs)
            never_called = {point.name for point in wanted.points} - ran
            used = used_without_a_call(tapped.model, never_called, args, kwargs)
    flat = FlatValue.of(value)
    logits = _in_output(flat.form) if wanted.points else None
    unasked = {head} - {point.name for point in wanted.points} if logits else set()
    needed = [one for one in _states_alone(taken, wanted.states_alone) if one.name not in unasked]
    if len(needed) < len(taken):
        taken, tapped = needed, Tapped(model, dict.fromkeys(one.point for one in needed))
    taps = _entries(taken)
    start, states = _hidden(taps, taken, wanted.points, layers, embedding)
    missing = _missing(tapped.model, wanted.points, taken, never_called, used)
    if missing and len(missing) == len(wanted.points):
        raise NothingRecorded(f"none of the taps fires: {missing[0].point}: {missing[0].reason}.")
    table = TapTable(
        points=tuple(map(str, wanted.points)),
        arguments=arguments,
        output=flat.form,
        outputs=len(flat.tensors),
        taps=tuple(taps),
        hidden=tuple(start + states),
        embedded=bool(start),
        logits=logits or _of_head(taps, head),
        missing=tuple(missing),
        notes=(stack.disorder,) if stack and stack.disorder else (),
    )
    return Survey(tapped, table, tuple(arguments.tensors(args, kwargs)), flat.classes)


def _found(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Stack | None, str | None]:
    """Follow one forward, and return the layers and the head that show in it."""
    lists = lists_of(model)
    with torch.no_grad(), restored(model):
        order = followed(model, lists, args, kwargs)
    stack = stack_of(model, lists, order)
    return stack, head_of(model, stack, order)


def _tried(tapped: Tapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[TappedTensor], set[str]]:
    """Run the tapped model; return its value, what the taps took, and which modules ran."""
    ran: set[str] = set()
    with ExitStack() as stack:
        for name, module in eager.modules_of(tapped.model).by_name.items():
            stack.callback(module.register_forward_hook(lambda *_, name=name: ran.add(name)).remove)
        value, taken = tapped.named(*args, **kwargs)
    return value, taken, ran


def _states_alone(taken: list[TappedTensor], alone: frozenset[str]) -> list[TappedTensor]:
    """Leave out what a layer returns beside its hidden states, where only those are meant."""
    states = {one.name: one.leaf for one in reversed(taken) if _is_state(one, alone)}
    return [one for one in taken if one.side != "output" or one.leaf == states.get(one.name, one.leaf)]


def _is_state(one: TappedTensor, layers: Collection[str]) -> bool:
    return one.name in layers and one.side == "output" and one.tensor.is_floating_point()


def _entries(taken: list[TappedTensor]) -> list[TapEntry]:
    calls: Counter[Point] = Counter()
    entries = []
    for one in taken:
        entries.append(TapEntry(str(one.point), calls[one.point]))
        calls[one.point] += 1
    return entries


def _hidden(
    taps: list[TapEntry], taken: list[TappedTensor], wanted: list[Point], layers: list[str], embedding: Embedding | None
) -> tuple[list[int], list[int]]:
    """Tell which tap is the embedding, and which ones are what each tapped layer gives first.

    Where no list of layers was found, or none of them is tapped, the states are all that was asked for.
    """
    start = [at for at, tap in enumerate(taps) if embedding and tap == TapEntry(str(embedding.point), embedding.call)]
    states: dict[tuple[str, int], int] = {}
    for at, (tap, one) in enumerate(zip(taps, taken, strict=True)):
        if _is_state(one, layers):
            states.setdefault((one.name, tap.call), at)
    asked_for = [at for at, one in enumerate(taken) if any(_is_under(one.point, point) for point in wanted)]
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
    model: nn.Module, wanted: list[Point], taken: list[TappedTensor], never_called: set[str], used: set[str]
) -> list[Missing]:
    silent = [point for point in wanted if not any(_is_under(one.point, point) for one in taken)]
    why = eager.why_silent(model, never_called) | dict.fromkeys(used, _FUNCTIONALLY)
    return [Missing(str(p), why.get(p.name, f"it ran, and its {p.side} holds no such tensor")) for p in silent]


def _is_under(point: Point, above: Point) -> bool:
    return (point.name, point.side, point.leaf[: len(above.leaf)]) == (above.name, above.side, above.leaf)
