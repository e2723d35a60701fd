"""The plain tensor behind whatever a hook is given, and our own operations on it hidden from the user's modes.

values, said = plain(tensor)              # detached, dense, conjugation resolved
with undisturbed():                       # no flop counter, default device or transform notices
    values.clone()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch._C import _functorch as functorch

from layerscope.errors import Unsupported


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name for a dtype without its prefix.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def plain(tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, str]]:
    """Return a detached, dense, ordinary tensor with the same values, and what had to be said about it.

    Lazy conjugation and negation are resolved. A distributed tensor gives this rank's shard, with its placements. What
    has no dense values of its own is refused, with the way out.
    """
    note: dict[str, str] = {}
    kind = type(tensor).__name__
    if kind == "AsyncCollectiveTensor":
        tensor = tensor.wait()  # type: ignore[attr-defined]
    elif kind == "DTensor":
        note = {"placements": str(tensor.placements), "whole_shape": str(list(tensor.shape))}  # type: ignore[attr-defined]
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    if torch._is_functional_tensor(tensor):
        raise Unsupported("inside torch.func.functionalize a tensor has no memory of its own; record a run without it")
    if tensor.is_meta or kind == "FakeTensor":
        raise Unsupported(f"a {kind} on the meta device has no values; record a run with real tensors")
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise Unsupported(f"a {layout} tensor is not stored; keep=lambda t: t.to_dense() (or a function of its own)")
    if tensor.is_quantized:
        raise Unsupported(f"a legacy {tensor.dtype} tensor is not stored; keep=lambda t: t.dequantize()")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor, note


def unwrapped(tensor: torch.Tensor) -> tuple[torch.Tensor, dict[str, str]]:
    """Return the value behind a tensor of a functional transform, and what had to be said about it.

    Inside `vmap` a model sees one sample, and computes all: the value is that of all, along the first axes. Inside
    `grad`, `vjp` and `jvp` it is the tensor itself. To be called outside of all transforms: see `undisturbed`.
    """
    axes: list[int] = []  # of the samples, the innermost `vmap` first; each counts within what the next one sees
    while functorch.is_functorch_wrapped_tensor(tensor) and not torch._is_functional_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            axes.append(functorch.maybe_get_bdim(tensor))
        tensor = functorch.get_unwrapped(tensor)
    if not axes:
        return tensor, {}
    for outside, axis in enumerate(reversed(axes)):
        tensor = tensor.movedim(axis + outside, outside)
    first = "the first axis is" if len(axes) == 1 else f"the first {len(axes)} axes are"
    return tensor, {"vmap": f"{first} the samples of torch.func.vmap"}


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hide our own tensor operations from the user's modes: a flop counter, a default device, transforms, inference."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    watched = torch._C._len_torch_dispatch_stack() > 0
    overridden = torch._C._len_torch_function_stack() > 0
    with (
        nullcontext() if functorch.peek_interpreter_stack() is None else temporarily_clear_interpreter_stack(),
        _disable_current_modes() if watched else nullcontext(),
        torch._C.DisableTorchFunction() if overridden else nullcontext(),
        torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext(),
        torch.no_grad(),
    ):
        yield
