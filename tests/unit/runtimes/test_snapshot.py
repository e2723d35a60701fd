"""A run on the side leaves no trace: a model is as it was, whatever its forward does to it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from layerscope.runtimes.snapshot import RandomState, restored


def test_random_state_and_buffers_are_put_back():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    with restored(model):
        model(torch.randn(8, 3) + 5)
        assert not torch.equal(model[0].running_mean, before["0.running_mean"])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_modules_remember_is_put_back():
    model = nn.Sequential(nn.Linear(2, 2))
    inner = model[0]
    inner.calls, inner.last, inner.seen, inner.named = 0, None, [1], {"a": torch.zeros(2)}
    inner.state = torch.zeros(2)
    inner.register_buffer("table", torch.zeros(2))
    table, named = inner.table, inner.named["a"]
    with restored(model):
        inner.calls += 1
        inner.last, inner.new = torch.ones(2), 3
        inner.seen.append(2)
        inner.named["a"].add_(1)
        inner.named["b"] = 5
        inner.state.add_(1)
        inner.table = torch.ones(3)
        del model[0]
    assert model[0] is inner
    assert (inner.calls, inner.last, inner.seen, hasattr(inner, "new")) == (0, None, [1], False)
    assert inner.named == {"a": named}
    assert inner.table is table
    assert [float(t.sum()) for t in (named, inner.state, table)] == [0, 0, 0]


def test_what_was_not_changed_is_not_written():
    model = nn.BatchNorm1d(3).eval()
    versions = [buffer._version for buffer in model.buffers()]
    with restored(model):
        model(torch.randn(8, 3))
    assert [buffer._version for buffer in model.buffers()] == versions


def test_the_random_state_of_python_and_numpy_is_put_back():
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    with restored():
        random.random()
        np.random.random(1000)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_an_error_in_the_block_passes_and_all_is_put_back():
    model = nn.BatchNorm1d(3).train()
    before = model.running_mean.clone()
    try:
        with restored(model):
            model(torch.randn(8, 3) + 5)
            raise KeyError
    except KeyError:
        assert torch.equal(model.running_mean, before)
    else:
        raise AssertionError("the error was swallowed")


class Restless(nn.Module):
    """A forward that leaves a trace wherever a module can keep one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.loose = torch.ones(3)
        self.seen = []
        self.cache = {"a": 1}
        self.names = {"x"}
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        self.count += 1
        self.loose.add_(1)
        self.seen.append(x)
        self.cache["b"] = x
        self.names.add("y")
        self.last = x
        return x * self.weight


def test_everything_a_module_holds_is_put_back():
    model = Restless()
    buffer, loose, seen, cache = model.count, model.loose, model.seen, model.cache
    with restored(model) as restore:
        model(torch.ones(2))
        restore()
        model(torch.ones(2))
        assert float(model.count) == 1
    assert model.count is buffer
    assert float(buffer) == 0
    assert torch.equal(loose, torch.ones(3))
    assert (model.seen, model.cache, model.names) == ([], {"a": 1}, {"x"})
    assert model.seen is seen
    assert model.cache is cache
    assert not hasattr(model, "last")


def test_gradients_come_back_as_the_same_tensors():
    model = Restless()
    model.weight.grad = grad = torch.full((2,), 5.0)
    with restored(model):
        model.weight.grad = None
        model(torch.ones(2)).sum().backward()
    assert model.weight.grad is grad


def test_running_statistics_that_leave_no_version_behind_are_put_back():
    model = nn.BatchNorm1d(3)
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    with restored(model):
        model(torch.randn(8, 3))
        assert not torch.equal(model.running_mean, before["running_mean"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_buffers())


def test_it_is_put_back_after_an_exception_too():
    model = Restless()
    model.register_forward_hook(lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"), restored(model):
        model(torch.ones(2))
    assert float(model.count) == 0


def test_random_numbers_go_on_as_if_nothing_had_been_drawn():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    state = RandomState()
    assert not state.moved()
    with restored(Restless()):
        torch.rand(100)
        assert state.moved()
    assert torch.equal(torch.rand(3), expected)
