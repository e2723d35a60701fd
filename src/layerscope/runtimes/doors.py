"""The doors of `native/`: where one may stand, and what is left to do for a call that does not pass.

    hang(door, module)                  # torch calls it in the module's place
    ...
    take_off(door, module)

A forward has run by the time its value turns out not to pass: `run_hooks` does then what torch would have done.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from inspect import getfile
from typing import Any

import torch
import torch.nn.modules.module as everywhere

from layerscope.native import CALL, CALLING, RAISED

__all__ = ["hang", "may_stand", "run_hooks", "take_off"]

_PLACE = "_compiled_call_impl"  # what torch calls in the place of `_call_impl`, where there is something
_IS_KNOWN = (
    CALLING.co_filename == getfile(torch.nn.Module) and CALLING.co_varnames[0] == "self" and not CALLING.co_cellvars
)


def may_stand(module: torch.nn.Module) -> bool:
    """Tell whether torch goes its own way around the forward of a module, and one that a door can stand for."""
    own = type(module)._call_impl is CALL and "_call_impl" not in module.__dict__
    return own and _IS_KNOWN and not module._compiled_call_impl  # a door is false: nothing was compiled


def hang(door: object | None, module: torch.nn.Module) -> None:
    """Have torch call a door in a module's place, if there is one, and it may stand there, and none does."""
    if door is not None and may_stand(module):
        module.__dict__.setdefault(_PLACE, door)


def take_off(door: object | None, module: torch.nn.Module) -> None:
    """Leave nothing of a door on a module; what others have put there stays."""
    if door is not None and module.__dict__.get(_PLACE) is door:
        module.__dict__.pop(_PLACE, None)


def run_hooks(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    value: Any,
    *,
    ours: object,
    see: Callable[[object], None],
) -> Any:
    """Run the hooks that torch would, now that a forward is over; return what they make of its value.

    The value is RAISED where the forward raised. Then, and where a hook raises, those are called that always are. `see`
    is told the value in the place of `ours`.
    """
    called, error = set[int](), None
    hooks = (*everywhere._global_forward_hooks.items(), *module._forward_hooks.items())
    named = {*everywhere._global_forward_hooks_with_kwargs, *module._forward_hooks_with_kwargs}
    always = {*everywhere._global_forward_hooks_always_called, *module._forward_hooks_always_called}

    def run(key: int, hook: Callable[..., Any]) -> Any:
        called.add(key)
        if getattr(hook, "hook", hook) is ours:
            return see(value)
        given = (args, kwargs) if key in named else (args,)
        return hook(module, *given, None if value is RAISED else value)

    try:
        for key, hook in hooks if value is not RAISED else ():
            made = run(key, hook)
            value = value if made is None else made
    except Exception as raised:
        error = raised
    for key, hook in hooks if error is not None or value is RAISED else ():
        if key in always and key not in called:
            try:
                made = run(key, hook)
                value = value if made is None else made
            except Exception as raised:
                said = f"a hook of {type(module).__name__} raised after another error: {raised}"
                warnings.warn(said, stacklevel=2)
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback holds this frame, and that the value
    return value
