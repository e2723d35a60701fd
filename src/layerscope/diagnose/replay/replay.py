"""Run a model on the reference's values, module by module, and measure what each makes of them.

    guided = guide(candidate, run, captured, partners)
    guided.measured[Site(("model.layers.0.mlp", 0))].error

Whatever a module is handed is measured, then replaced by what the reference handed its own: a difference there was made
by the code around it. Whatever it gives is measured, then replaced by what the reference's gave: a difference there was
made inside. As every module in it is put right, what a parent gets wrong is its own code's doing. One forward does it
all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from layerscope.diagnose.judge.measurement import MASKED, Distance, bits, measured
from layerscope.diagnose.operations import Called, traced
from layerscope.diagnose.replay.captured_calls import Captured, CapturedCall, HeldTensor
from layerscope.diagnose.replay.gradients import Backwards
from layerscope.diagnose.replay.module_hooks import HookedCall, Key, reseed, visiting
from layerscope.points import Leaf, leaf_text
from layerscope.runtimes.values import argument_leaves, leaves, replaced

Cut = tuple[int, int]


class ModulePart(NamedTuple):
    """The reference's module that a module is, or is one part of; cuts are along the last axis of the output."""

    reference: str
    reference_cut: Cut | None = None
    own_cut: Cut | None = None


class Site(NamedTuple):
    """A value that the own code of one call makes: its output, or what it hands to a call inside it (`into`).

    `gradient` is for what comes back; its leaf begins with `input`, `output` or `parameter`.
    """

    owner: Key
    into: Key | None = None
    leaf: Leaf = ()
    cut: tuple[int, int] | None = None
    gradient: bool = False

    def __str__(self) -> str:
        side, leaf = ("", self.leaf) if not self.gradient else (str(self.leaf[0]), self.leaf[1:])
        path = leaf_text(leaf) if leaf else ""
        if side == "parameter":
            return f"gradient of {leaf[0]}"
        if side == "lost":
            return f"gradient that should come back to its output{path}"
        if side == "input":
            return f"gradient of its input{path}"
        inner = self.into[0] if self.into else ""
        if side == "output":
            return f"gradient of the output{path} of {inner}"
        return f"input{path} of {inner}" if self.into else f"output{path}"


@dataclass(slots=True)
class Guided:
    """What one guided forward showed: the measure of every place, and what was to be kept.

    `outputs` are those of the calls that ran on their own, `missing` the arguments that the reference's code handed to
    a call and this model's did not.
    """

    measured: dict[Site, Distance] = field(default_factory=dict)
    kept: dict[Site, torch.Tensor] = field(default_factory=dict)
    outputs: dict[Key, dict[Leaf, torch.Tensor]] = field(default_factory=dict)
    missing: dict[Key, list[Leaf]] = field(default_factory=dict)
    raised: BaseException | None = None
    at: Key | None = None  # where it was raised
    entered: set[Key] = field(default_factory=set)
    reached: set[Key] = field(default_factory=set)  # by a gradient
    traced: list[Called] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Guidance:
    """How to guide: what is left out of it, what is kept, what is changed on the way.

    Inside a call of `whole` nothing is replaced, so that its output is all its own, and is kept. `keep` are places
    whose value is kept. `again` hands values on with a change of one unit in the last place, drawn from that seed, one
    in `every`. `only` are the places worth measuring. `known` are the measures of another model: a value with the same
    bits has the same measure, and one with others is kept. `seed` is set anew at every call. `trace` is the call whose
    own code is logged, operation by operation. `supplied` are missing arguments to hand to calls all the same. `until`
    are the calls after which nothing is left to be seen: the run ends there.
    """

    whole: Collection[str] = ()
    again: int | None = None
    every: int = 1
    only: Collection[Site] | None = None
    known: Mapping[Site, Distance] = field(default_factory=dict)
    seed: int | None = None
    keep: Collection[Site] = ()
    trace: Key | None = None
    supplied: Collection[tuple[Key, Leaf]] = ()
    until: Collection[Key] = ()


SPARE = 256 << 20  # bytes of values that may be kept because they are not what another model gave


def guide(
    modules: Mapping[str, nn.Module],
    run: Callable[[], Any],
    captured: Captured,
    partners: Mapping[str, tuple[ModulePart, ...]],
    guidance: Guidance | None = None,
) -> Guided:
    """Run a model once, guided by what was captured; what it raises is kept, with the call it came from."""
    guiding = _Guiding(captured, partners, guidance or Guidance())

    def until_enough() -> None:
        with suppress(_Enough):
            run()

    with visiting({name: modules[name] for name in partners}, guiding) as under_way:
        guiding.under_way = under_way
        try:
            if guiding.guidance.trace is None:
                until_enough()
            else:
                guiding.result.traced = traced(until_enough, inside=guiding.is_traced)
        except Exception as error:
            guiding.result.raised = error
            guiding.result.at = guiding.key(under_way[-1]) if under_way else None
    if guiding.backwards is not None and guiding.result.raised is None:
        guiding.backwards.settle()
        guiding.result.reached = {(partners[name][0].reference, call) for name, call in guiding.backwards.reached}
    return guiding.result


class _Enough(BaseException):
    """Ends a run that has shown what it was made for."""


class _Guiding:
    """The visitor that puts the reference's values in."""

    def __init__(self, captured: Captured, partners: Mapping[str, tuple[ModulePart, ...]], guidance: Guidance) -> None:
        self.captured = captured
        self.partners = partners
        self.guidance = guidance
        self.result = Guided()
        self.under_way: list[HookedCall] = []
        self.busy = False
        self.spare = SPARE
        self.backwards = None if captured.gradients is None else Backwards(captured.gradients, self.measure)
        self.waiting = set(guidance.until)
        self.nudge = None if guidance.again is None else Nudge(guidance.again, every=guidance.every)

    def key(self, frame: HookedCall) -> Key:
        return self.partners[frame.name][0].reference, frame.call

    def is_traced(self) -> bool:
        """Whether the own code of the call to be traced is running, and not ours."""
        return not self.busy and bool(self.under_way) and self.key(self.under_way[-1]) == self.guidance.trace

    def enter(self, frame: HookedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        self.busy = True
        try:
            return self.entered(frame, args, kwargs)
        finally:
            self.busy = False

    def leave(self, frame: HookedCall, value: Any) -> Any:
        self.busy = True
        try:
            value = self.left(frame, value)
        finally:
            self.busy = False
        if self.waiting:
            self.waiting.discard(self.key(frame))
            if not self.waiting:
                raise _Enough
        return value

    def entered(self, frame: HookedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        key = self.key(frame)
        self.result.entered.add(key)
        reseed(self.guidance.seed, key)
        call = self.captured.calls.get(key)
        if call is None or self.is_inside(frame) or frame.above is None:
            return None
        owner = self.key(frame.above)
        pairs = paired(argument_leaves(args, kwargs), call.inputs)

        def put(leaf: Leaf, own: torch.Tensor) -> torch.Tensor:
            if leaf not in pairs:
                return own
            place = Site(owner, key, pairs[leaf])
            wanted = call.inputs[pairs[leaf]].tensor
            self.measure(place, wanted, own)
            passing = (key, "input", pairs[leaf])
            value = cast(wanted, like=own, nudge=self.nudge)
            if self.backwards is None or value.shape != own.shape:
                return value
            # What comes back through an argument has passed this module.
            back = Site(key, None, ("input", *pairs[leaf]), gradient=True)
            return self.backwards.hand(frame.key, passing, own, value, place=back)

        args, kwargs = replaced(args, put), replaced(kwargs, put)
        missing = [leaf for leaf in call.inputs if leaf not in pairs.values() and _is_none(leaf, args, kwargs)]
        if missing:
            self.result.missing[key] = missing
        like = next((t for _, t in argument_leaves(args, kwargs) if t.is_floating_point()), None)
        for leaf in missing:
            if like is None or (key, leaf) not in self.guidance.supplied:
                continue
            place, value = Site(owner, key, leaf), call.inputs[leaf].tensor
            self.result.measured[place] = Distance(math.inf, shape=False, there=False, dtype=value.dtype)
            value = value.to(like.device)
            value = cast(value, like=value.to(like.dtype) if value.is_floating_point() else value)
            at = leaf[0]
            if isinstance(at, int):
                args = (*args[:at], value, *args[at + 1 :])
            else:
                kwargs = {**kwargs, at: value}
        return args, kwargs

    def left(self, frame: HookedCall, value: Any) -> Any:
        key = self.key(frame)
        parts = [(part, self.captured.calls.get((part.reference, frame.call))) for part in self.partners[frame.name]]
        if parts[0][1] is None or self.is_inside(frame):
            return None
        own = leaves(value)
        if key[0] in self.guidance.whole:
            self.result.outputs[key] = {leaf: tensor.detach().clone() for leaf, tensor in own}
        owner = None if frame.above is None else self.key(frame.above)
        pairs = paired(own, parts[0][1].outputs)

        def put(leaf: Leaf, tensor: torch.Tensor) -> torch.Tensor:
            if leaf not in pairs:
                return tensor
            pieces = [p for p in (_piece(part, call, pairs[leaf]) for part, call in parts) if p is not None]
            if len(pieces) < len(parts):
                return tensor
            for (part, _), wanted in zip(parts, pieces, strict=True):
                place = Site((part.reference, frame.call), None, pairs[leaf], part.reference_cut)
                got = tensor if part.own_cut is None else tensor[..., slice(*part.own_cut)]
                self.measure(place, wanted, got)
            value = cast(pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1), like=tensor, nudge=self.nudge)
            if self.backwards is None or len(pieces) > 1 or value.shape != tensor.shape:
                return value
            passing = (key, "output", pairs[leaf])
            # What comes back to an output has passed the code around this module.
            back = Site(owner, key, ("output", *pairs[leaf]), gradient=True) if owner else None
            lost = Site(key, None, ("lost", *pairs[leaf]), gradient=True)
            return self.backwards.give(frame.key, passing, tensor, value, place=back, lost=lost)

        return replaced(value, put)

    def is_inside(self, frame: HookedCall) -> bool:
        whole, above = self.guidance.whole, frame.above
        while whole and above is not None:
            if self.key(above)[0] in whole:
                return True
            above = above.above
        return False

    def measure(self, place: Site, wanted: torch.Tensor, got: torch.Tensor) -> None:
        if place in self.guidance.keep:
            self.result.kept[place] = got.detach().clone()
        if self.guidance.only is not None and place not in self.guidance.only:
            return
        known, whole = self.guidance.known.get(place), got
        wanted, got = self.captured.counted(wanted, got)
        with torch.no_grad():
            if known is not None and known.dtype == got.dtype and known.digest == bits(got):
                self.result.measured[place] = known
                return
            # The model's own output is its user's; what passes inside may broadcast.
            self.result.measured[place] = measured(
                wanted, got, broadcast=place.into is not None or bool(place.owner[0])
            )
            if known is not None and whole.nbytes <= self.spare:
                self.spare -= whole.nbytes
                self.result.kept[place] = whole.detach().clone()


def _is_none(leaf: Leaf, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an argument is None, or was not given."""
    if len(leaf) != 1:
        return False
    at = leaf[0]
    return kwargs.get(at) is None if isinstance(at, str) else at < len(args) and args[at] is None


def paired(own: Iterable[tuple[Leaf, torch.Tensor]], reference: Mapping[Leaf, HeldTensor]) -> dict[Leaf, Leaf]:
    """Tell which of the reference's leaves each of one's own is: by its path, else the next of its kind and size."""
    found: dict[Leaf, Leaf] = {}
    rest: list[tuple[Leaf, torch.Tensor]] = []
    for leaf, tensor in own:
        if leaf in reference and _alike(tensor, reference[leaf].tensor):
            found[leaf] = leaf
        elif leaf not in reference:
            rest.append((leaf, tensor))
    free = [leaf for leaf in reference if leaf not in found.values()]
    for leaf, tensor in rest:
        match = next((f for f in free if _fits(tensor, reference[f].tensor)), None)
        if match is not None:
            found[leaf] = match
            free.remove(match)
    return found


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two values are of one kind: a mask of truth values is not one of numbers to add."""
    kinds = [(t.is_floating_point(), t.is_complex(), t.dtype == torch.bool) for t in (a, b)]
    return kinds[0] == kinds[1]


def _fits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _alike(a, b) and a.numel() == b.numel() and a.shape[-1:] == b.shape[-1:]


def _piece(part: ModulePart, call: CapturedCall | None, leaf: Leaf) -> torch.Tensor | None:
    if call is None or leaf not in call.outputs:
        return None
    tensor = call.outputs[leaf].tensor
    return tensor if part.reference_cut is None else tensor[..., slice(*part.reference_cut)]


def cast(value: torch.Tensor, *, like: torch.Tensor, nudge: Nudge | None = None) -> torch.Tensor:
    """Return a copy in another's dtype, on its device and, where as many elements fit, in its shape.

    A finite number stays finite: what float16 cannot hold becomes the largest it can, as in a mask of its own.
    """
    made = value.detach().to(device=like.device, dtype=like.dtype, copy=True)
    if made.is_floating_point():
        if nudge is not None:
            made = nudge(made, max(torch.finfo(t.dtype).eps for t in (value, like)))
        if like.dtype != value.dtype and made.numel() and not math.isfinite(sum(end.item() for end in made.aminmax())):
            info = torch.finfo(like.dtype)
            given = value.detach().to(like.device)
            lost = given.isfinite() & ~made.isfinite()
            made = torch.where(lost, torch.where(given > 0, info.max, info.min).to(like.dtype), made)
    return made.reshape(like.shape) if made.shape != like.shape and made.numel() == like.numel() else made


class Nudge:
    """Moves one in so many numbers by about one unit in the last place, up or down.

    Every eighth is moved by as much as rounding to nearest is off, in the root mean square. Signs are drawn once for
    the largest tensor, and each tensor begins somewhere else among them.
    """

    def __init__(self, seed: int, *, every: int = 1) -> None:
        self._drawing = torch.Generator().manual_seed(seed)
        self._every = every
        self._signs = torch.empty(0)
        self._turn = 0

    def __call__(self, value: torch.Tensor, unit: float) -> torch.Tensor:
        """Return the moved numbers; masked ones and those that would not stay finite stay as they are."""
        wide = value if value.dtype == torch.float64 else value.float()
        moved = torch.addcmul(wide, wide, self._like(wide), value=0.75 * unit).to(value.dtype)
        ends = [end.item() for end in moved.aminmax()] if moved.numel() else []
        if all(map(math.isfinite, ends)) and (not ends or ends[0] > MASKED):
            return moved
        return torch.where(moved.isfinite() & (value > MASKED), moved, value)

    def _like(self, value: torch.Tensor) -> torch.Tensor:
        count = value.numel()
        if self._signs.numel() < 2 * count or self._signs.device != value.device:
            drawn = torch.randint(0, 2 * self._every, (2 * count,), generator=self._drawing, dtype=torch.int8)
            drawn = torch.where(drawn < 2, 2 * drawn - 1, 0)
            self._signs = drawn.to(value.device, torch.float32)
        self._turn += 1
        start = self._turn * 7919 % (self._signs.numel() - count + 1)
        return self._signs[start : start + count].view(value.shape).to(value.dtype)
