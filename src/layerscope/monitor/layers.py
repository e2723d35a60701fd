"""What a Monitor is asked to watch: layers with their aliases, and when each is due.

    layers_of(model, {"encoder.attn": {"alias": "attention", "record_type": "epoch_full"}})

The texts of the errors are part of the Monitor's published interface.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from layerscope.errors import BadText, NoSuchPoint
from layerscope.log import log
from layerscope.patterns import select
from layerscope.points import Moment, Point, unwrapped
from layerscope.runtimes import eager
from layerscope.schedules import Schedule, batches, epochs

RecordType = Literal["single", "epoch_full"]
_TYPES: tuple[RecordType, ...] = get_args(RecordType)

# A condition, and what to say of a moment for which it does not hold.
Term = tuple[Schedule, Callable[[Moment], str]]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer as the caller named it; `place` is the name the recorder has for it, wrappers and sharing undone."""

    name: str
    alias: str
    record_type: RecordType
    place: str

    def answers_to(self, words: Iterable[str]) -> bool:
        """Whether one of the words is its alias or its name."""
        return any(word in (self.alias, self.name) for word in words)


def layers_of(model: torch.nn.Module, wanted: object) -> tuple[Layer, ...]:
    """Read `layers_to_monitor`: a list of names, or name -> alias and record type; patterns stand for what they match.

    Raises ValueError for layers the model does not have, with those it has, for an alias that two layers share, and
    for an unknown record type.
    """
    asked = _asked(wanted)
    if not asked:
        raise ValueError("'layers_to_monitor' is empty; name at least one layer of model.named_modules().")
    names = {name: unwrapped(name) for name, _ in model.named_modules(remove_duplicate=False)}
    shared = eager.modules_of(model).shared
    found: list[Layer] = []
    unknown: list[str] = []
    for name, alias, record_type in asked:
        matches = [name] if name in names else _matching(model, name)
        if not matches:
            unknown.append(name)
        for match in matches:
            place = names.get(match, match)
            found.append(Layer(match, match if alias is None else alias, record_type, shared.get(place, place)))
    if unknown:
        available = [name for name, _ in model.named_modules() if name]
        raise ValueError(
            f"The following layers specified in 'layers_to_monitor' do not exist in the model: {unknown}. "
            f"Available layers: {available}"
        )
    known: set[str] = set()
    for layer in found:
        if layer.alias in known:
            raise ValueError(f"Duplicate alias '{layer.alias}' in layers_to_monitor.")
        known.add(layer.alias)
    return tuple(found)


def whole_numbers(word: str, numbers: Iterable[Any]) -> tuple[int | range, ...]:
    """Return epochs or batches as whole numbers from 0 on, as a schedule takes them; raises ValueError otherwise."""
    if isinstance(numbers, range):
        return (numbers,)
    try:
        found = [int(n.__index__()) if not isinstance(n, bool) else -1 for n in numbers]
    except (TypeError, AttributeError):
        found = [-1]
    if any(n < 0 for n in found):
        raise ValueError(f"{word}={numbers!r} are not numbers of them; give a list of whole numbers from 0 on.")
    return tuple(dict.fromkeys(found))


def choices_of(
    layers: Sequence[Layer],
    wanted: tuple[int | range, ...],
    indices: tuple[int | range, ...],
    when: Schedule | str | None,
) -> dict[str, LayerChoice]:
    """Return each layer's schedule by its alias; raises ValueError when no epoch, or no batch it needs, is named.

    Layers of one record type share one, so that a moment is judged once for all of them.
    """
    if not any(isinstance(each, int) or len(each) for each in wanted):
        raise ValueError("'epochs_to_record' is empty; name at least one epoch to record.")
    single = [layer.name for layer in layers if layer.record_type == "single"]
    if single and not any(isinstance(each, int) or len(each) for each in indices):
        raise ValueError(
            f"'batch_indices' must be given and not empty, because these layers have record_type 'single': {single}."
        )
    more = Schedule.parse(when) if isinstance(when, str) else when
    terms: list[Term] = [(epochs(*wanted), lambda moment: f"epoch {moment.epoch} is not in epochs_to_record")]
    last: list[Term] = [] if more is None else [(more, lambda moment: f"{more} says no")]
    full = [layer.alias for layer in layers if layer.record_type == "epoch_full"]
    found = dict.fromkeys(full, LayerChoice(full, [*terms, *last]))
    if single:
        terms.append((batches(*indices), lambda moment: f"batch {moment.batch} is not in batch_indices"))
        others = [layer.alias for layer in layers if layer.record_type == "single"]
        found |= dict.fromkeys(others, LayerChoice(others, [*terms, *last]))
    return found


class LayerChoice(Schedule):
    """Conditions of some layers, all of which must hold; at DEBUG it tells each moment that it leaves out, and why."""

    __slots__ = ("_aliases", "_seen", "_terms")

    def __init__(self, aliases: Sequence[str], terms: Sequence[Term]) -> None:
        self._aliases = tuple(aliases)
        self._terms = tuple(terms)
        self._seen: tuple[tuple[int | None, int, int], bool] | None = None

    def __call__(self, moment: Moment) -> bool:
        """Tell whether the moment is wanted; a function of the caller's is asked once for each."""
        key, seen = (moment.epoch, moment.step, moment.batch), self._seen
        if seen is not None and seen[0] == key:
            return seen[1]
        why = next((why for schedule, why in self._terms if not schedule(moment)), None)
        self._seen = key, why is None
        if why is not None and log.isEnabledFor(logging.DEBUG):
            for alias in self._aliases:
                log.debug("%s is skipped at %s: %s", alias, moment, why(moment))
        return why is None

    def __str__(self) -> str:
        whole = self._terms[0][0]
        for schedule, _ in self._terms[1:]:
            whole = whole & schedule
        return str(whole)


def _asked(wanted: object) -> list[tuple[str, str | None, RecordType]]:
    if isinstance(wanted, str):
        wanted = [wanted]
    if not isinstance(wanted, Mapping):
        if not isinstance(wanted, Iterable):
            raise ValueError(f"'layers_to_monitor' is a list of layer names or a dict, not {wanted!r}.")
        return [(_text(name), None, "single") for name in wanted]
    return [(_text(name), *_settings(name, said)) for name, said in wanted.items()]


def _settings(name: str, said: Any) -> tuple[str | None, RecordType]:
    said = {} if said is None else said
    if not isinstance(said, Mapping) or not said.keys() <= {"alias", "record_type"}:
        raise ValueError(f"layer {name!r} has {said!r}; give {{'alias': ..., 'record_type': 'single' | 'epoch_full'}}.")
    alias, record_type = said.get("alias"), said.get("record_type", "single")
    if record_type not in _TYPES:
        raise ValueError(f"record_type {record_type!r} of layer {name!r} is not known; use 'single' or 'epoch_full'.")
    if alias is not None and not isinstance(alias, str):
        raise ValueError(f"alias {alias!r} of layer {name!r} is not a text.")
    return alias, record_type


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{name!r} in 'layers_to_monitor' is not the name of a layer.")
    return name


def _matching(model: torch.nn.Module, pattern: str) -> list[str]:
    """Return the modules that a pattern names, none when it names none or is no pattern."""
    try:
        points: list[Point] = select(pattern, eager.points(model))
    except (BadText, NoSuchPoint):
        return []
    if any(point.side != "output" or point.leaf for point in points):
        raise ValueError(f"{pattern!r} asks for more than outputs, and a Monitor keeps those whole; see record().")
    return list(dict.fromkeys(point.name for point in points))
