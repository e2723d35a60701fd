"""Go through a forward module by module, with a say in what each is given and what it gives, forwards and backwards.

    with visiting({"layers.0": model.layers[0]}, visitor):
        model(x)

Ours is the first hook to see a module's arguments and the last to see its output, so that whatever the user's own hooks
do lies in between and counts as the module's.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

Key = tuple[str, int]  # a module's name, and which of its calls


@dataclass(slots=True, eq=False)
class HookedCall:
    """One call under way, and the one around it."""

    name: str
    call: int
    above: HookedCall | None

    @property
    def key(self) -> Key:
        """The name and the number of the call."""
        return self.name, self.call


class Visitor(Protocol):
    """What is done at each module; None leaves a value as it is."""

    def enter(self, frame: HookedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """See the arguments, and put others in their place."""

    def leave(self, frame: HookedCall, value: Any) -> Any:
        """See the output, and put another in its place."""


def reseed(seed: int | None, key: Key) -> None:
    """Begin the random numbers of a call anew, so that the same call draws the same in every run and model."""
    if seed is not None:
        torch.manual_seed(seed + zlib.crc32(f"{key[0]}#{key[1]}".encode()))


@contextmanager
def visiting(modules: Mapping[str, nn.Module], visitor: Visitor) -> Iterator[list[HookedCall]]:
    """Call the visitor at every call of these modules until the block ends.

    What is handed out are the calls under way, outermost first: after an exception, where it was raised.
    """
    under_way: list[HookedCall] = []
    counts: Counter[str] = Counter()

    def attach(name: str, module: nn.Module) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            frame = HookedCall(name, counts[name], under_way[-1] if under_way else None)
            counts[name] += 1
            under_way.append(frame)
            return visitor.enter(frame, args, kwargs)

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Any:
            frame = under_way.pop()
            return visitor.leave(frame, value)

        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
        stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)

    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            # What torch.compile has made is run as it was written, or no hook inside it would fire.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in modules.items():
            attach(name, module)
        yield under_way
