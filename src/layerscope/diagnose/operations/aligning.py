"""Pair the operations of two logs: by name first, then by shape, then by what they give.

aligned(reference, candidate)      # [(0, 0), (1, 1), (2, None), (3, 2)]: the candidate lacks the third
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from layerscope.diagnose.operations.tracing import Called

_NEAR = 0.05  # norms that are closer are taken for the same result


def aligned(ours: Sequence[Called], theirs: Sequence[Called]) -> list[tuple[int | None, int | None]]:
    """Return pairs of indices in order; None on one side is an operation that only the other has.

    The longest common subsequence, weighted: where two additions stand for one, the one that gives the same stays.
    """
    one, two = [_sized(call) for call in ours], [_sized(call) for call in theirs]
    head = 0
    while head < min(len(one), len(two)) and _alike(one[head], two[head]) == _SAME:
        head += 1
    tail = 0
    while tail < min(len(one), len(two)) - head and _alike(one[-1 - tail], two[-1 - tail]) == _SAME:
        tail += 1
    middle = _matched(one[head : len(one) - tail], two[head : len(two) - tail])
    return [
        *((at, at) for at in range(head)),
        *((a if a is None else a + head, b if b is None else b + head) for a, b in middle),
        *((len(one) - at, len(two) - at) for at in range(tail, 0, -1)),
    ]


class _Sized(NamedTuple):
    """What an operation is known by: its name, its shape, the norms of its result and of what went in."""

    name: str
    shape: tuple[int, ...]
    norm: float
    inputs: tuple[float, ...]


_SAME = 5


def _sized(call: Called) -> _Sized:
    return _Sized(call.name, call.shape, _norm(*call.outputs[:1]), tuple(_norm(tensor) for tensor in call.inputs))


def _norm(*tensors: torch.Tensor) -> float:
    """Return the norm of what is finite and no mask."""
    values = [tensor.detach().to(torch.float32) for tensor in tensors]
    values = [one.masked_fill(~one.isfinite() | (one.abs() > 1e30), 0.0) for one in values]
    return float(sum(torch.linalg.vector_norm(one) for one in values))


def _alike(one: _Sized, two: _Sized) -> int:
    """How well two operations go together; 0: not at all."""
    if one.name != two.name:
        return 0
    if one.shape != two.shape:
        return 1
    fed = any(map(_close, one.inputs, two.inputs)) if one.inputs else True
    return 2 + 2 * _close(one.norm, two.norm) + fed


def _close(one: float, two: float) -> bool:
    return abs(one - two) <= _NEAR * max(one, two)


def _matched(one: Sequence[_Sized], two: Sequence[_Sized]) -> list[tuple[int | None, int | None]]:
    best = [[0] * (len(two) + 1) for _ in range(len(one) + 1)]
    for a in range(len(one) - 1, -1, -1):
        for b in range(len(two) - 1, -1, -1):
            score = _alike(one[a], two[b])
            best[a][b] = max(best[a + 1][b], best[a][b + 1], score and score + best[a + 1][b + 1])
    pairs: list[tuple[int | None, int | None]] = []
    a = b = 0
    while a < len(one) and b < len(two):
        score = _alike(one[a], two[b])
        if score and best[a][b] == score + best[a + 1][b + 1]:
            pairs.append((a, b))
            a, b = a + 1, b + 1
        elif best[a][b] == best[a + 1][b]:
            pairs.append((a, None))
            a += 1
        else:
            pairs.append((None, b))
            b += 1
    return [*pairs, *((at, None) for at in range(a, len(one))), *((None, at) for at in range(b, len(two)))]
