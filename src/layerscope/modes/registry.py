"""Modes as values: what each is called, what it changes, whether it fits a model, how the variant is made.

for mode in modes_of(model):
    print(mode.name, why_not(mode, model) or mode.about)
variant(model, "int8-weight")

@mode("rounded", about="weights rounded to steps of 1/64")
def rounded(model):
    for parameter in model.parameters():
        parameter.data = (parameter.data * 64).round() / 64
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn

from layerscope.errors import BadText, LayerscopeError, MissingExtra, NoSuchMode, Unsupported

__all__ = ["GROUPS", "Choice", "Mode", "Setting", "choose", "copied", "mode", "modes_of", "variant", "why_not"]

GROUPS: dict[str, str] = {
    "all": "the reference and every variant of it",
    "fp_only": "floating point alone",
    "quant_only": "the quantised variants alone",
    "essential": "those that tell the most apart",
}

_NAME = re.compile(r"\w[\w.-]*")  # a run's folder is called after its mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the modes of one recording have in common.

    The share of activations that calibration does not clip, and the token ids it is made on (a row of them; None: bytes
    of the text that comes with layerscope).
    """

    percentile_alpha: float = 0.9999
    calibration: torch.Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.percentile_alpha <= 1:
            raise BadText(
                f"percentile_alpha is {self.percentile_alpha:g}: it is the share of activations that is not clipped, "
                "above 0 and at most 1, such as 0.9999"
            )


Make: TypeAlias = Callable[[nn.Module, Setting], nn.Module]
Applies: TypeAlias = Callable[[nn.Module], "str | None"]


def _always(model: nn.Module) -> str | None:
    """Fit any model."""
    return None


@dataclass(frozen=True, slots=True)
class Mode:
    """A named variant of a model.

    `about` says in a line what it changes; `make` returns the variant and leaves the given model as it is. `applies`
    returns None for a model it fits and the reason for one it does not, and runs nothing; it raises MissingExtra where
    a library is not installed. `groups` are those of `GROUPS` it belongs to; `quantised` says that it computes on a
    coarser grid, as those of the group quant_only do, and as runs of it state.
    """

    name: str
    about: str
    make: Make
    applies: Applies = _always
    groups: frozenset[str] = frozenset({"all"})
    quantised: bool = False

    def __post_init__(self) -> None:
        if "quant_only" in self.groups:
            object.__setattr__(self, "quantised", True)
        if not _NAME.fullmatch(self.name) or self.name in GROUPS:
            raise BadText(
                f"{self.name!r} is no name for a mode: letters, digits, dots and dashes are, "
                f"and {', '.join(GROUPS)} are groups"
            )
        if not self.groups <= GROUPS.keys():
            raise BadText(
                f"there is no group {min(self.groups - GROUPS.keys())!r} for mode {self.name!r}; "
                f"there are {', '.join(GROUPS)}"
            )


# What users declare, by name: a file that is run again declares its modes anew.
_DECLARED: dict[str, Mode] = {}


Declared = TypeVar("Declared", bound=Callable[..., "nn.Module | None"])


def mode(
    name: str, *, about: str, groups: Iterable[str] = ("all",), applies: Applies = _always
) -> Callable[[Declared], Declared]:
    """Declare a mode: a function that is given a copy of the model, and returns the variant or changes the copy.

    A function with an argument `setting` is also given the Setting that the variant is made with.
    """

    def declare(function: Declared) -> Declared:
        takes = "setting" in inspect.signature(function).parameters

        def make(model: nn.Module, setting: Setting) -> nn.Module:
            own = copied(model)
            made = function(own, setting=setting) if takes else function(own)
            return own if made is None else made

        if name in _built_in_names():
            raise BadText(f"mode {name!r} is built in already; call yours by another name")
        _DECLARED[name] = Mode(name, about, make, applies, frozenset(groups))
        return function

    return declare


def modes_of(model: nn.Module) -> tuple[Mode, ...]:
    """Return the modes of a model: those of its own kind first, then the generic ones, then what users declared.

    The groups of a kind with modes of its own hold those and fp32; the other generic ones are there by name.
    """
    from layerscope.modes.generic import GENERIC, REFERENCE
    from layerscope.modes.kinds import own_modes

    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise Unsupported(
            f"modes are variants of a torch.nn.Module, and this is a {type(model).__name__}; "
            "make them of the module it came from."
        )
    own = own_modes(model)
    if not own:
        return (*GENERIC, *_DECLARED.values())
    reference = replace(REFERENCE, groups=frozenset(GROUPS) - {"quant_only"})
    others = [replace(one, groups=frozenset()) for one in GENERIC if one is not REFERENCE]
    return (reference, *own, *others, *_DECLARED.values())


def why_not(mode: Mode, model: nn.Module) -> str | None:
    """Say why a mode cannot be made of a model; None when it can."""
    try:
        return _reason(mode, model)
    except MissingExtra as error:
        return str(error)


class Choice(NamedTuple):
    """The modes that were chosen, and those of a group that do not fit the model, with the reason."""

    modes: tuple[Mode, ...]
    left_out: tuple[tuple[Mode, str], ...]


def choose(asked: Sequence[str], model: nn.Module) -> Choice:
    """Return the modes that names and groups stand for, each once, in the order they were asked for.

    Raises NoSuchMode for a word that is neither, and Unsupported or MissingExtra for a mode called by its name that
    does not fit; of a group, such a one is left out, with its reason.
    """
    there = {mode.name: mode for mode in modes_of(model)}
    chosen: dict[str, Mode] = {}
    left_out: dict[str, tuple[Mode, str]] = {}
    for word in asked:
        if word in GROUPS:
            for one in (one for one in there.values() if word in one.groups):
                if (reason := why_not(one, model)) is None:
                    chosen[one.name] = one
                else:
                    left_out[one.name] = (one, reason)
        elif word in there:
            _insist(there[word], model)
            chosen[word] = there[word]
        else:
            raise NoSuchMode(_unknown(word, there, model))
    if asked and not chosen:
        first, reason = next(iter(left_out.values()), (None, "none belongs to it"))
        raise Unsupported(
            f"no mode of {' '.join(asked)} fits {type(model).__name__}: {f'{first.name}: ' if first else ''}{reason}"
        )
    return Choice(tuple(chosen.values()), tuple(left_out.values()))


def variant(model: nn.Module, mode: Mode | str, setting: Setting | None = None) -> nn.Module:
    """Make the variant of a model; the given model stays as it is.

    Raises Unsupported, with the reason, where the mode does not fit or cannot be made.
    """
    one = choose([mode], model).modes[0] if isinstance(mode, str) and mode not in GROUPS else mode
    if isinstance(one, str):
        raise NoSuchMode(f"{one!r} is a group of modes; name one of them: {', '.join(_names(model))}.")
    _insist(one, model)
    try:
        return one.make(model, setting or Setting())
    except LayerscopeError:
        raise
    except Exception as error:
        raise Unsupported(
            f"mode {one.name!r} cannot be made of {type(model).__name__}: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error


def copied(model: nn.Module) -> nn.Module:
    """Copy a model with its weights; raises Unsupported where it cannot be copied."""
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise Unsupported(
            f"a mode works on a copy, and this {type(model).__name__} cannot be copied "
            f"({type(error).__name__}: {' '.join(str(error).split())}); take out what copy.deepcopy stumbles over, "
            "or record each variant by itself"
        ) from error


def _insist(mode: Mode, model: nn.Module) -> None:
    reason = _reason(mode, model)
    if reason is not None:
        raise Unsupported(f"mode {mode.name!r} does not fit {type(model).__name__}: {reason}")


def _reason(mode: Mode, model: nn.Module) -> str | None:
    """Ask the mode; one that fails to answer does not fit, and costs no other mode anything."""
    try:
        return mode.applies(model)
    except MissingExtra:
        raise
    except LayerscopeError as error:
        return str(error)
    except Exception as error:
        return f"asked whether it fits, it failed with {type(error).__name__}: {' '.join(str(error).split())}"


def _unknown(word: str, there: dict[str, Mode], model: nn.Module) -> str:
    near = get_close_matches(word, [*there, *GROUPS], n=3, cutoff=0.5)
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    return (
        f"there is no mode {word!r} of {type(model).__name__}{meant} The modes are {', '.join(there)}, "
        f"and the groups {', '.join(GROUPS)}."
    )


def _names(model: nn.Module) -> list[str]:
    return [one.name for one in modes_of(model)]


def _built_in_names() -> set[str]:
    from layerscope.modes.generic import GENERIC
    from layerscope.modes.kinds import QUAMBA

    return {one.name for one in (*GENERIC, *QUAMBA)}
