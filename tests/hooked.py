"""What plain hooks of PyTorch saw: the oracle of every test that asks whether a record is right.

    clones = Clones(model); clones.call(model, x)       # {(point, step, call): a clone taken in the hook}
    assert_recorded(rec, clones)

Nothing of layerscope's takes part: torch's own hooks, `.detach().clone()` in them, and numpy in float64.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from asserts import assert_same_bits
from layerscope.points import Point

EVERY = [".:input", "**:input", "**:output", ".:output"]


def leaves(value, at=()):
    """Walk a nested value; other objects are left closed."""
    if isinstance(value, torch.Tensor):
        return [(at, value)]
    if isinstance(value, dict):
        inside = [(key if isinstance(key, int) else str(key), child) for key, child in value.items()]
    elif dataclasses.is_dataclass(value):
        inside = list(vars(value).items())
    elif isinstance(value, (tuple, list)):
        inside = list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    else:
        inside = []
    return [leaf for key, child in inside for leaf in leaves(child, (*at, key))]


class Clones(dict):
    """Clones of all inputs and outputs of all modules; a forward that is made by `call` is one step."""

    def __init__(self, model, *, names=None):
        super().__init__()
        self.step, self.refused, self.handles = -1, set(), []
        self.counts, self.open = Counter(), defaultdict(list)
        for name, module in model.named_modules():
            if names is None or name in names:
                self.handles += self.hooks(name, module)

    def hooks(self, name, module):
        def before(m, args, kwargs):
            call = self.counts[name]
            self.counts[name] += 1
            self.open[name].append(call)
            self.keep(name, "input", call, [*leaves(args), *leaves(kwargs)])

        def after(m, args, out):
            self.keep(name, "output", self.open[name].pop(), leaves(out))

        yield module.register_forward_pre_hook(before, with_kwargs=True)
        yield module.register_forward_hook(after)

    def call(self, module, *args, **kwargs):
        self.begin()
        return module(*args, **kwargs)

    def begin(self):
        """Begin another step, whatever became of the last."""
        self.step += 1
        self.counts.clear()
        self.open.clear()

    def keep(self, name, side, call, found):
        for leaf, tensor in found:
            point = str(Point(name, side, leaf))
            if tensor.is_meta or tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
                self.refused.add(point)
                continue
            clone = tensor.detach().clone().resolve_conj().resolve_neg()
            self[point, self.step, call] = clone.as_subclass(torch.Tensor).cpu()

    def remove(self):
        for handle in self.handles:
            handle.remove()


def assert_recorded(run, clones, *, keep="tensor", account=None):
    """Every record is the clone, there is no other, and what is missing has no dense values."""
    assert {(str(e.point), e.moment.step, e.moment.call) for e in run.records()} == set(clones)
    for (point, step, call), clone in clones.items():
        try:
            if keep != "summary":
                assert_same_bits(run.tensor(point, step=step, call=call), clone)
            if keep != "tensor":
                assert_summary(run.summary(point, step=step, call=call), clone)
        except AssertionError as error:
            raise AssertionError(f"{point} at step {step}, call {call}: {error}") from error
    if account is not None:
        assert {missing.point for missing in account.missing} == clones.refused
        assert account.dropped == []


def assert_summary(summary, clone):
    """Counts and extremes exactly, sums as numpy has them in float64."""
    values = clone.to(torch.complex128).abs() if clone.is_complex() else clone.double()
    values = values.numpy().reshape(-1)
    finite = values[np.isfinite(values)]
    assert (summary.shape, summary.dtype) == (tuple(clone.shape), str(clone.dtype).removeprefix("torch."))
    assert (summary.count, summary.nan, summary.zeros) == (values.size, np.isnan(values).sum(), (values == 0).sum())
    assert (summary.posinf, summary.neginf) == ((values == np.inf).sum(), (values == -np.inf).sum())
    if finite.size:
        near = {"rel": 1e-6, "abs": 1e-6 * np.abs(finite).max()}
        assert (summary.min, summary.max) == pytest.approx((finite.min(), finite.max()), rel=1e-7 * clone.is_complex())
        assert (summary.mean, summary.std) == pytest.approx((finite.mean(), finite.std()), **near)
        assert summary.l1 == pytest.approx(np.abs(finite).sum(), rel=1e-6)
        assert summary.l2 == pytest.approx(np.sqrt((finite**2).sum()), rel=1e-6)
