"""What is written in C, because every call of a module passes by it.

    gates = load()          # the module, None where it cannot be built: `why_not` says why

It is compiled once, by the C compiler that Triton needs for itself, and lies in Triton's cache from then on. It is used
for tensors on a GPU alone, and nothing but speed is lost without it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.modules.module as modules

__all__ = ["CALL", "CALLING", "FILES", "RAISED", "load", "why_not"]

# In the order in which they know each other.
FILES = ("types.h", "basket.c", "sweep.c", "gate.c", "door.c", "launch.c", "module.c")

CALL = torch.nn.Module._call_impl  # torch's way around a forward
CALLING = torch.nn.Module._wrapped_call_impl.__code__  # where torch goes it, or calls a door in its place
RAISED = object()  # what a hook is told behind a door, of a forward that returned nothing

_KINDS = ("forward", "forward_pre", "backward_pre", "backward")  # of hooks that all modules have: see `AFTER`


def load() -> Any | None:
    """Return the module, compiled if need be."""
    return _tried()[0]


def why_not() -> str:
    """Say why there is none; empty when there is."""
    return _tried()[1]


def _called(gate: Any, *given: Any) -> Any:
    """Say in Python what the call of a gate comes to, for compilers that read it."""
    return gate.hook(*given)


def _entered(door: Any, *args: Any, **kwargs: Any) -> Any:
    """Say in Python what the call of a door comes to."""
    return door.gate.module._call_impl(*args, **kwargs)


def _addresses() -> list[int]:
    """Find functions of torch's by the names that a C++ compiler gives them."""
    library = ctypes.CDLL(torch._C.__file__)  # and all that it stands on
    names = (
        "_ZN5torch8autograd25get_current_graph_task_idEv",
        "_ZN2at4impl27torch_function_mode_enabledEv",
        "_ZN5torch3jit6tracer15getTracingStateEv",
    )
    return [ctypes.cast(library[name], ctypes.c_void_p).value or 0 for name in names]


@cache
def _tried() -> tuple[Any, str]:
    here = Path(__file__).parent
    parts = [f'#line 1 "{name}"\n{(here / name).read_text("utf-8")}' for name in FILES]
    source = "\n".join([f"/* for torch {torch.__version__}, whose header it includes */", *parts])
    try:
        build: Any = import_module("triton.runtime.build")
        gates = build.compile_module_from_src(
            src=source, name="layerscope_gates", include_dirs=[str(Path(torch.__file__).parent / "include")]
        )
        gates.prepare(
            torch.Tensor,
            torch.Tensor.__dlpack_c_exchange_api__,
            torch.Tensor._version,
            torch.Tensor.is_neg,
            *_addresses(),
            getattr(torch._C, "_cuda_getCurrentRawStream", None),  # a build without CUDA has none
            count,
            _called,
            tuple(getattr(modules, f"_global_{kind}_hooks") for kind in _KINDS),
            CALLING,
            CALL,
            RAISED,
            _entered,
        )
    except Exception as error:  # no Triton, no compiler, no header, an interpreter without its lock
        return None, f"{type(error).__name__}: {error}"
    return gates, ""
