"""Assertions that several rooms share."""

from __future__ import annotations

import torch


def hooks_on(model: torch.nn.Module) -> int:
    """Count every hook on a model, whoever registered it."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def assert_no_hooks_left(model: torch.nn.Module) -> None:
    assert hooks_on(model) == 0, "a hook was left behind"
    for module in model.modules():
        for flags in ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"):
            assert not getattr(module, flags), f"{flags} was left behind"


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert (
        a.detach().contiguous().view(torch.uint8).equal(b.detach().contiguous().view(torch.uint8))
        if (a.numel() and a.dim())
        else torch.equal(a, b) or bool((a != a).all() and (b != b).all())
    )
