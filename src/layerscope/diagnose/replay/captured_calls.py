"""What the reference gave each of its modules, and what they gave back.

    captured = capture(model, run)
    captured.calls["model.layers.0", 0].outputs[()]

Tensors are kept by reference, which costs nothing; one that an in-place operation changes afterwards is copied in a
second pass. Beyond a budget, what lies on a device goes to the host until it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from layerscope.checks import rows_kept
from layerscope.diagnose.replay.gradients import Gradients, boundary
from layerscope.diagnose.replay.module_hooks import HookedCall, Key, reseed, visiting
from layerscope.points import Leaf
from layerscope.runtimes.eager import modules_of
from layerscope.runtimes.values import argument_leaves, leaves, replaced


@dataclass(slots=True, eq=False)
class HeldTensor:
    """One tensor as it was when it passed."""

    tensor: torch.Tensor
    version: int

    @property
    def stale(self) -> bool:
        """Whether it was written to since."""
        return self.version >= 0 and self.tensor._version != self.version


@dataclass(slots=True, eq=False)
class CapturedCall:
    """One call of a module: what went in, what came out, and which call it was made from."""

    key: Key
    above: Key | None
    inputs: dict[Leaf, HeldTensor] = field(default_factory=dict)
    outputs: dict[Leaf, HeldTensor] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Captured:
    """Every call of one forward, in the order they began; the model's output; the gradients where asked for.

    `tokens` are those that count, (batch, length), where a mask among the inputs hides others: the values of padding
    mean nothing, and kernels differ in them.
    """

    calls: dict[Key, CapturedCall]
    output: Any
    gradients: Gradients | None = None
    tokens: torch.Tensor | None = None

    def counted(self, wanted: torch.Tensor, got: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what of a pair of values belongs to tokens that count."""
        rows = self._rows(wanted, got)
        return (wanted, got) if rows is None else (wanted[rows.to(wanted.device)], got[rows.to(got.device)])

    def padded_alike(self, wanted: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        """Return `got` with the values of `wanted` where the tokens are padding."""
        rows = self._rows(wanted, got)
        if rows is None:
            return got
        made = got.clone()
        made[~rows.to(got.device)] = wanted[~rows.to(wanted.device)].to(made)
        return made

    def _rows(self, wanted: torch.Tensor, got: torch.Tensor) -> torch.Tensor | None:
        if self.tokens is None or wanted.shape != got.shape or wanted.shape == self.tokens.shape:
            return self.tokens if wanted.shape == got.shape else None
        rows = rows_kept(self.tokens, tuple(wanted.shape))
        return None if rows is None else rows.view(wanted.shape[:-1])


def capture(
    model: nn.Module,
    run: Callable[[], Any],
    restore: Callable[[], None],
    *,
    seed: int | None = None,
    budget: int | None = None,
    backward: bool = False,
) -> Captured:
    """Run the model once, or twice where it writes into values that were handed on, and keep what passed.

    `restore` puts the model back as it was before a second run.
    """
    captured = _once(model, run, _Capturing(seed=seed, budget=budget, backward=backward))
    stale = {(key, side, leaf) for key, side, leaf, held in _all(captured.calls.values()) if held.stale}
    if stale:
        restore()
        captured = _once(model, run, _Capturing(seed=seed, budget=budget, backward=backward, copied=stale))
    return captured


def _once(model: nn.Module, run: Callable[[], Any], seen: _Capturing) -> Captured:
    modules = modules_of(model).by_name
    with visiting(modules, seen):
        output = run()
    if seen.gradients is not None:
        seen.gradients.take_parameters(modules)
    return Captured(seen.calls, output, seen.gradients)


def _all(calls: Iterable[CapturedCall]) -> Iterable[tuple[Key, str, Leaf, HeldTensor]]:
    for call in calls:
        for leaf, held in call.inputs.items():
            yield call.key, "input", leaf, held
        for leaf, held in call.outputs.items():
            yield call.key, "output", leaf, held


class _Capturing:
    """The visitor that keeps."""

    def __init__(
        self,
        *,
        seed: int | None,
        budget: int | None,
        backward: bool,
        copied: Collection[tuple[Key, str, Leaf]] = (),
    ) -> None:
        self.calls: dict[Key, CapturedCall] = {}
        self.seed = seed
        self.gradients = Gradients() if backward else None
        self.copied = copied
        self.left = budget
        self.known: dict[int, HeldTensor] = {}

    def enter(self, frame: HookedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        reseed(self.seed, frame.key)
        call = CapturedCall(frame.key, frame.above.key if frame.above else None)
        self.calls[frame.key] = call
        for leaf, tensor in argument_leaves(args, kwargs):
            call.inputs[leaf] = self.hold(tensor, (frame.key, "input", leaf))
        if self.gradients is None:
            return None
        return self.bounded(args, (frame.key, "input")), self.bounded(kwargs, (frame.key, "input"))

    def leave(self, frame: HookedCall, value: Any) -> Any:
        call = self.calls[frame.key]
        for leaf, tensor in leaves(value):
            call.outputs[leaf] = self.hold(tensor, (frame.key, "output", leaf))
        return None if self.gradients is None else self.bounded(value, (frame.key, "output"))

    def bounded(self, value: Any, at: tuple[Key, str]) -> Any:
        gradients = self.gradients
        assert gradients is not None

        def follow(leaf: Leaf, tensor: torch.Tensor) -> torch.Tensor:
            return boundary(tensor, lambda grad: gradients.keep((*at, leaf), grad))

        return replaced(value, follow)

    def hold(self, tensor: torch.Tensor, at: tuple[Key, str, Leaf]) -> HeldTensor:
        tensor = tensor.detach()
        if at in self.copied or tensor.is_inference():
            return HeldTensor(tensor.clone(), -1)
        known = self.known.get(tensor.data_ptr())
        if known is not None and _same(known.tensor, tensor) and not known.stale:
            return known
        if self.left is not None and tensor.device.type != "cpu":
            self.left -= tensor.nbytes
            if self.left < 0:
                return HeldTensor(tensor.to("cpu"), -1)
        held = self.known[tensor.data_ptr()] = HeldTensor(tensor, tensor._version)
        return held


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and a._version == b._version
