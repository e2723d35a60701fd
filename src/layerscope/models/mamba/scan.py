"""The selective scan: a linear recurrence along time, without a step of Python for each token.

    y = selective_scan(u, delta, A, B, C, D)

State n of channel d obeys `h[t] = exp(delta[t] A) h[t-1] + delta[t] B[t] u[t]`, and `y[t] = C[t] h[t] + D u[t]`.
"""

# ruff: noqa: N803, N806 (A, B, C and D are the letters of the equation)

from __future__ import annotations

from math import isqrt
from typing import Any

import torch

# Two tensors of so many float32 stay in a core's cache; of eight times as many the scan took half as long again.
_NUMBERS_AT_ONCE = 1 << 18
_SHORTEST = 4  # tokens of a chunk, however wide the model


def selective_scan(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    *,
    chunk: int | None = None,
) -> torch.Tensor:
    """Return y, like u: (batch, length, channels); delta too, A is (channels, state), B and C (batch, length, state).

    Half precision is computed in float32. `chunk` tokens are in memory at once; on a CPU as many of one sample as its
    cache holds unless told, elsewhere all of them. A sample's result has the same bits whatever it is batched with.
    """
    if u.device.type == "cpu" and len(u) > 1:  # as fast as all at once, and the chunks are those of a sample alone
        each = zip(*(torch.split(tensor, 1) for tensor in (u, delta, B, C)), strict=True)
        return torch.cat([selective_scan(x, step, A, b, c, D, chunk=chunk) for x, step, b, c in each])
    work = torch.promote_types(u.dtype, torch.float32)
    delta, A, B, C, D = (tensor.to(work) for tensor in (delta, A, B, C, D))
    inflow = delta * u
    rates = A.t().contiguous()  # channels last: the inner loops of every operation below run over them
    pieces, state = [], None
    for now in _chunks(u, numbers=A.numel(), chunk=chunk):
        decay = (delta[:, now, None, :] * rates).exp_()
        drive = inflow[:, now, None, :] * B[:, now, :, None]
        if state is not None:
            drive[:, 0].addcmul_(decay[:, 0], state)
        states = linear_recurrence(decay, drive)
        state = states[:, -1]
        pieces.append((C[:, now, None, :] @ states).squeeze(2))
    return torch.addcmul(torch.cat(pieces, dim=1), u.to(work), D).to(u.dtype)


def linear_recurrence(decay: torch.Tensor, drive: torch.Tensor) -> torch.Tensor:
    """Return h with `h[:, t] = decay[:, t] * h[:, t-1] + drive[:, t]`, starting at `drive[:, 0]`.

    Without gradients both arguments are overwritten, and the result is `drive`.
    """
    if torch.is_grad_enabled() and (decay.requires_grad or drive.requires_grad):
        states: torch.Tensor = _Recurrence.apply(decay, drive)  # type: ignore[no-untyped-call]
        return states
    return _recur(decay, drive)


def _chunks(u: torch.Tensor, *, numbers: int, chunk: int | None) -> list[slice]:
    """Cut the time into chunks; a token has `numbers` states."""
    length = u.shape[1]
    if chunk is None:
        chunk = max(_SHORTEST, _NUMBERS_AT_ONCE // numbers) if u.device.type == "cpu" else length
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _recur(decay: torch.Tensor, drive: torch.Tensor) -> torch.Tensor:
    """Cut the time into runs and step through all of them at once, then carry each run's last state into the next.

    About 2 sqrt(length) steps. Only products of decays occur, never quotients: with decays in [0, 1] nothing can
    overflow, however large delta is.
    """
    batch, length, *rest = drive.shape
    run = isqrt(length)
    runs = length // run
    a, h = (tensor[:, : runs * run].view(batch, runs, run, *rest) for tensor in (decay, drive))
    for t in range(1, run):
        h[:, :, t].addcmul_(a[:, :, t], h[:, :, t - 1])
        a[:, :, t].mul_(a[:, :, t - 1])
    for r in range(1, runs):
        h[:, r, -1].addcmul_(a[:, r, -1], h[:, r - 1, -1])
    h[:, 1:, :-1].addcmul_(a[:, 1:, :-1], h[:, :-1, -1:])
    for t in range(runs * run, length):
        drive[:, t].addcmul_(decay[:, t], drive[:, t - 1])
    return drive


class _Recurrence(torch.autograd.Function):
    """The recurrence with its gradient, which is the same recurrence backwards in time."""

    @staticmethod
    def forward(ctx: Any, decay: torch.Tensor, drive: torch.Tensor) -> torch.Tensor:
        states = _recur(decay.clone(), drive.clone())
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        decay, states = ctx.saved_tensors
        # What reaches h[t] is its own gradient and, through decay[t+1], what reaches h[t+1].
        later = decay.flip(1).roll(1, 1)
        reaching = _recur(later, grads[0].flip(1)).flip(1)
        by_decay = torch.zeros_like(decay)
        torch.mul(reaching[:, 1:], states[:, :-1], out=by_decay[:, 1:])
        return by_decay, reaching
