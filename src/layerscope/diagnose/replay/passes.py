"""Every run of the two models that a diagnosis takes, each from the same state and the same random numbers.

    passes = Passes.begin(reference, candidate, restore, rules=())
    passes.candidate(); passes.floor()

Modules are paired as points of runs are: by declared rule, by name, by what a name means, by order and shape
(`compare/alignment.py`). What finds no partner is judged through the module around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from layerscope.checks import mask_of
from layerscope.compare.align.alignment import align
from layerscope.compare.align.pairing import PairingRule
from layerscope.compare.align.run_points import RunPoint
from layerscope.diagnose.judge.measurement import measured, rounding
from layerscope.diagnose.replay.captured_calls import Captured, capture
from layerscope.diagnose.replay.module_hooks import HookedCall, Key, reseed, visiting
from layerscope.diagnose.replay.replay import Guidance, Guided, ModulePart, Nudge, Site, cast, guide
from layerscope.diagnose.replay.sides import LOWERED, Casting, ModelSide, cast_weights, casting_of, castings, main_dtype
from layerscope.errors import BadModel, LayerscopeError
from layerscope.points import Leaf, Point
from layerscope.runtimes.eager import compiled_parts
from layerscope.runtimes.snapshot import RandomState
from layerscope.runtimes.values import leaves, replaced

SEED = 20_261_115
_RETRIES = 8  # modules that may be left out of the guidance because they cannot be run on another's values

Outputs = Mapping[Key, Mapping[Leaf, torch.Tensor]]


@dataclass(slots=True)
class Passes:
    """The models, what the reference did, and who is whose partner.

    `restore` puts both models back as they were, and is called after every run. `seed` is None where nothing is drawn.
    `error` is that of the candidate's output when it runs on its own values, `raised` what it raises instead. `drew`
    tells that the candidate draws random numbers. `lowered` is the dtype that it computes in under autocast.
    """

    ours: ModelSide
    theirs: ModelSide
    restore: Callable[[], None]
    captured: Captured
    pairing: Pairing
    seed: int | None
    drew: bool
    raised: Exception | None
    error: float | None = None
    castings: list[Casting] = field(default_factory=list)
    lowered: torch.dtype | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def begin(
        cls, ours: ModelSide, theirs: ModelSide, restore: Callable[[], None], *, rules: Sequence[PairingRule]
    ) -> Passes:
        """Run each model once by itself, and pair their modules."""
        random = RandomState()
        capturing = partial(
            capture, ours.model, ours.run, restore, backward=ours.backward, budget=_budget(ours, theirs)
        )
        try:
            captured = capturing()
        except LayerscopeError:
            raise
        except Exception as error:
            raise BadModel(
                f"the reference raises {told(error)} on these inputs; to diagnose anything takes a run of it."
            ) from error
        drawn = random.moved()
        restore()
        shapes, output, raised = _shapes(theirs)
        drew = random.moved()
        restore()
        tokens = mask_of(ours.inputs.kwargs)
        seed = SEED if drawn or drew else None
        if drawn:
            captured = capturing(seed=seed)
            restore()
        captured.tokens = tokens
        gave = {
            name: next((tuple(held.tensor.shape) for held in call.outputs.values()), None)
            for (name, number), call in captured.calls.items()
            if number == 0
        }
        passes = cls(ours, theirs, restore, captured, pair(gave, shapes, rules=rules), seed, drew, raised)
        if tokens is not None:
            hidden = f"{int((~tokens).sum()):,} of {tokens.numel():,}"
            passes.notes.append(f"a mask among the inputs hides {hidden} tokens: they are padding, and are not judged.")
        default = main_dtype(theirs.model)
        passes.castings = castings(ours.modules, theirs.modules, names=passes.pairing.names, default=default)
        if raised is None:
            as_it_is = seed is None and not compiled_parts(theirs.model)
            passes.error = passes.error_of(output) if as_it_is else passes.final(theirs)
        return passes

    # Guided

    def candidate(self, guidance: Guidance | None = None) -> Guided:
        """Run the candidate on the reference's values; a module that cannot be is left to the one around it."""
        for _ in range(_RETRIES):
            guided = self._guide(self.theirs, self.pairing.candidate, guidance)
            tried = guidance is not None and guidance.supplied
            if guided.raised is None or tried or self.raised is not None or not guided.at or not guided.at[0]:
                break
            self._leave_out(guided.at[0], guided.raised)
        return guided

    def floor(self, guidance: Guidance | None = None) -> Guided:
        """Run the reference in the candidate's dtypes on its own values."""
        nudge = Nudge(guidance.again) if guidance is not None and guidance.again is not None else None
        with cast_weights(self.castings, nudge=nudge):
            return self._guide(self.ours, self.pairing.reference, guidance, as_theirs=True)

    def reference(self, guidance: Guidance) -> Guided:
        """Run the reference as it is on its own values."""
        return self._guide(self.ours, self.pairing.reference, guidance)

    # Unguided

    def final(
        self, side: ModelSide, outputs: Outputs | None = None, *, run: Callable[[], Any] | None = None
    ) -> float | None:
        """Run a model with the outputs of some calls replaced and return its final error; None where it raises.

        `outputs` go by the reference's names, whichever model it is.
        """
        outputs = outputs or {}
        run = run or side.run
        partners = self.pairing.candidate if side is self.theirs else self.pairing.reference
        names = {own: parts[0].reference for own, parts in partners.items()}
        wanted = {key[0] for key in outputs}
        visited = {own for own, name in names.items() if self.seed is not None or name in wanted}
        try:
            if visited:
                with visiting({own: side.modules.by_name[own] for own in visited}, _Swap(outputs, names, self.seed)):
                    output = run()
            else:
                output = run()
        except Exception:
            return None
        finally:
            self.restore()
        return self.error_of(output)

    def final_floor(self, dtype: torch.dtype | None = None) -> float | None:
        """Return how far off the reference is at its end in the candidate's dtypes, or all in one dtype."""
        run = self.run_as_theirs if dtype is None else partial(self.ours.run, dtype=dtype)
        with cast_weights(self.castings if dtype is None else casting_of(self.ours.modules, dtype)):
            return self.final(self.ours, run=run)

    def error_of(self, output: Any) -> float | None:
        """Return the relative L2 error of a model's output: of its worst floating-point tensor.

        It is infinite where values are finite on one side only.
        """
        theirs = dict(leaves(output))
        measures = [
            measured(*self.captured.counted(wanted, theirs[leaf]))
            for leaf, wanted in leaves(self.captured.output)
            if wanted.is_floating_point() and leaf in theirs and wanted.numel() == theirs[leaf].numel()
        ]
        return max((math.inf if measure.nonfinite else measure.error for measure in measures), default=None)

    def run_as_theirs(self) -> Any:
        """Run the reference on inputs in the candidate's dtype, under autocast where the candidate is."""
        return self.ours.run(dtype=main_dtype(self.theirs.model), lowered=self.lowered)

    @property
    def other_dtypes(self) -> bool:
        """Whether the candidate computes in other dtypes than the reference."""
        return bool(self.castings) or self.lowered is not None

    def partner_of(self, name: str) -> nn.Module:
        """Return the candidate's module; one that is never called has the place in its parent's partner."""
        inner: list[str] = []
        while name not in self.pairing.names:
            name, _, last = name.rpartition(".")
            inner.insert(0, last)
        return self.theirs.modules.by_name[self.pairing.names[name]].get_submodule(".".join(inner))

    def uncalled_in(self, name: str) -> tuple[str, ...]:
        """Return the modules inside that never ran by themselves: their weights are the own code's."""
        called = {key[0] for key in self.captured.calls}
        prefix = f"{name}." if name else ""
        inside = (other for other in self.ours.modules.by_name if other.startswith(prefix) and other not in called)
        return tuple(other.removeprefix(prefix) for other in inside)

    def learn(self, guided: Guided) -> None:
        """Note whether the candidate computes in a coarser dtype than its weights have: it runs under autocast.

        One module that does is a cast in its code, and to be found; most of them do under autocast.
        """
        main = main_dtype(self.theirs.model)
        gave = [
            measure.dtype
            for place, measure in guided.measured.items()
            if place.into is None and isinstance(self.ours.modules.by_name[place.owner[0]], LOWERED)
        ]
        lower = [dtype for dtype in gave if main is not None and rounding(dtype) > rounding(main)]
        self.lowered = lower[0] if len(lower) * 2 > len(gave) else None

    def _guide(
        self,
        side: ModelSide,
        partners: Mapping[str, tuple[ModulePart, ...]],
        guidance: Guidance | None,
        *,
        as_theirs: bool = False,
    ) -> Guided:
        guidance = guidance or Guidance()
        if guidance.seed is None:
            guidance = replace(guidance, seed=self.seed)
        try:
            run = self.run_as_theirs if as_theirs else side.run
            guided = guide(side.modules.by_name, run, self.captured, partners, guidance)
            if side.backward and guided.raised is None:
                self._measure_parameters(guided, side, partners, guidance)
        finally:
            self.restore()
        return guided

    def _measure_parameters(
        self, guided: Guided, side: ModelSide, partners: Mapping[str, tuple[ModulePart, ...]], guidance: Guidance
    ) -> None:
        """Measure the gradients of parameters: each module's came from the reference's values on both sides."""
        assert self.captured.gradients is not None
        for own, (part, *others) in partners.items():
            if others or part.reference_cut:
                continue
            for key, parameter in side.modules.by_name[own].named_parameters(recurse=False):
                wanted = self.captured.gradients.parameters.get((part.reference, key))
                place = Site((part.reference, 0), None, ("parameter", key), gradient=True)
                reached = any(name == part.reference for name, _ in guided.reached)
                if wanted is None or not (reached and parameter.requires_grad) or wanted.shape != parameter.shape:
                    continue
                if guidance.only is None or place in guidance.only:
                    got = parameter.grad
                    guided.measured[place] = measured(wanted, torch.zeros_like(parameter) if got is None else got)

    def _leave_out(self, name: str, error: BaseException) -> None:
        kept = {own: parts for own, parts in self.pairing.candidate.items() if name not in {p.reference for p in parts}}
        reference = {own: parts for own, parts in self.pairing.reference.items() if own != name}
        self.pairing = self.pairing._replace(candidate=kept, reference=reference)
        self.notes.append(
            f"{name} cannot be run on the reference's values ({told(error)}); "
            "it is judged through the module around it."
        )


class _Swap:
    """A visitor that puts given outputs in the place of some calls' own."""

    def __init__(self, outputs: Outputs, names: Mapping[str, str], seed: int | None) -> None:
        self.outputs = outputs
        self.names = names
        self.seed = seed

    def enter(self, frame: HookedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reseed(self.seed, (self.names[frame.name], frame.call))

    def leave(self, frame: HookedCall, value: Any) -> Any:
        others = self.outputs.get((self.names[frame.name], frame.call))
        if others is None:
            return None
        return replaced(value, lambda leaf, own: cast(others[leaf], like=own) if leaf in others else own)


class _Shapes:
    """A visitor that notes the shape of the first tensor each module gives."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[int, ...] | None] = {}

    def enter(self, frame: HookedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen.setdefault(frame.name, None)

    def leave(self, frame: HookedCall, value: Any) -> None:
        if self.seen[frame.name] is None:
            self.seen[frame.name] = next((tuple(tensor.shape) for _, tensor in leaves(value)), None)


def _shapes(side: ModelSide) -> tuple[dict[str, tuple[int, ...] | None], Any, Exception | None]:
    """Run a model and note which modules ran; after an exception, those it did not reach count as if they had."""
    shapes = _Shapes()
    try:
        with visiting(side.modules.by_name, shapes):
            output = side.run()
    except Exception as error:
        return {**dict.fromkeys(side.modules.by_name), **shapes.seen}, None, error
    return shapes.seen, output, None


def _budget(ours: ModelSide, theirs: ModelSide) -> int:
    """Return how many bytes of a device may be held: a quarter of what the weights take, and some for small models."""
    weights = sum(tensor.nbytes for side in (ours, theirs) for tensor in side.model.parameters())
    return max(weights // 4, 256 << 20)


def told(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


class Pairing(NamedTuple):
    """The candidate's modules with their partners; the reference's with themselves, cut alike; and who has none."""

    candidate: dict[str, tuple[ModulePart, ...]]
    reference: dict[str, tuple[ModulePart, ...]]
    names: dict[str, str]  # of the reference's modules in the candidate
    alone: dict[str, str]  # the reference's modules without a partner, with the reason


def pair(
    reference: Mapping[str, tuple[int, ...] | None],
    candidate: Mapping[str, tuple[int, ...] | None],
    *,
    rules: Sequence[PairingRule] = (),
) -> Pairing:
    """Pair the modules of two models that have run; each is given with the shape of its first output."""
    sides = [[RunPoint(Point(name), shape, 1) for name, shape in side.items()] for side in (reference, candidate)]
    alignment = align(*sides, rules=rules)
    parts: dict[str, list[ModulePart]] = {}
    cuts: dict[str, list[ModulePart]] = {}
    names: dict[str, str] = {}
    for found in alignment.pairs:
        ours, theirs = found.reference.name, found.candidate.name
        parts.setdefault(theirs, []).append(ModulePart(ours, found.reference_cut, found.candidate_cut))
        cuts.setdefault(ours, []).append(ModulePart(ours, found.reference_cut, found.reference_cut))
        names.setdefault(ours, theirs)
    return Pairing(
        {name: tuple(each) for name, each in parts.items()},
        {name: tuple(each) for name, each in cuts.items()},
        names,
        {point.name: why for point, why in alignment.only_reference},
    )
