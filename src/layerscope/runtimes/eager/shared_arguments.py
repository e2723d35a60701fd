"""The gradient of each of several arguments that are one tensor: `attn(x, x, x)`.

    aside = Aside(module, args, kwargs, {(0,), (1,), (2,)})      # before the call
    aside.follow(watcher, call, value)                           # after it

In the graph one tensor is one place, whichever argument it came by, and a module may ask whether two are one and
compute something else. So the call is left alone, and made once more before it, on the side, where each argument is a
tensor of its own: what flows back to the outputs of the one is sent through the other.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from layerscope.errors import Unsupported
from layerscope.points import Leaf, Moment
from layerscope.runtimes.eager.calls import Calls, RunningCall
from layerscope.runtimes.eager.gradient_hooks import Gradient
from layerscope.runtimes.sink import Step
from layerscope.runtimes.snapshot import copied, restored, why_not_again
from layerscope.runtimes.values import leaves, replaced

if TYPE_CHECKING:
    from layerscope.runtimes.eager.watcher import Watcher

_NOTHING_DUE = Step(Moment(), idle=True)


class Aside:
    """A call that was made on the side, and the gradients that arrived for its outputs."""

    def __init__(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        alike: Collection[Leaf],
        calls: Calls,
    ) -> None:
        if why := why_not_again(module):
            raise Unsupported(
                f"one tensor is several of its arguments, and telling their gradients apart takes a second call: {why}"
            )
        self.alike: dict[Leaf, torch.Tensor] = {}
        given, named = copied(args, kwargs, module)

        def apart(leaf: Leaf, tensor: torch.Tensor) -> torch.Tensor:
            if leaf not in alike:
                return tensor
            self.alike[leaf] = own = tensor.detach().clone().requires_grad_()
            return own.clone()  # a leaf could not be changed in place

        given, named = replaced(given, apart), replaced(named, apart)
        # What the modules inside are called for here belongs to no step: as below a call in which nothing is due.
        depth = len(calls)
        calls.append(RunningCall("aside", _NOTHING_DUE, 0, sys._getframe()))
        try:
            with restored(module):
                self.outputs = dict(leaves(module.forward(*given, **named)))
        finally:
            del calls[depth:]
        self.gradients: dict[Leaf, torch.Tensor] = {}
        self.expected = 0

    def follow(self, watcher: Watcher, call: RunningCall, value: object) -> None:
        """Wait for the gradients of what the call itself returned."""
        tell = {leaf: Gradient(watcher, call, "grad_input", leaf) for leaf in self.alike}
        for leaf, tensor in leaves(value):
            made = self.outputs.get(leaf)
            if tensor.requires_grad and made is not None and made.requires_grad:
                self.expected += 1
                tensor.register_hook(partial(self.arrive, watcher, tell, leaf))  # type: ignore[no-untyped-call]

    def arrive(self, watcher: Watcher, tell: Mapping[Leaf, Gradient], leaf: Leaf, gradient: torch.Tensor) -> None:
        """Keep the gradient of an output; when all are there, or the backward pass ends, send them through."""
        try:
            if not self.gradients:
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(partial(self.done, watcher, tell))
            self.gradients[leaf] = gradient.detach()
        except Exception as error:
            next(iter(tell.values())).failed(error)
        if len(self.gradients) == self.expected:
            self.done(watcher, tell)

    def done(self, watcher: Watcher, tell: Mapping[Leaf, Gradient]) -> None:
        """Tell the gradient of each argument."""
        gradients, self.gradients = self.gradients, {}
        if not gradients or not watcher.live:
            return
        try:
            with watcher.local.ours:
                found = torch.autograd.grad(
                    [self.outputs[leaf] for leaf in gradients],
                    list(self.alike.values()),
                    list(gradients.values()),
                    retain_graph=True,
                    allow_unused=True,
                )
        except Exception as error:
            for each in tell.values():
                each.failed(error)
            return
        for each, share in zip(tell.values(), found, strict=True):
            if share is not None:
                each(share)
