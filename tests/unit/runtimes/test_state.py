"""A model is as it was, whatever its forward does to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from layerscope.runtimes.state import RandomState, kept


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
    with kept(model) as restore:
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
    with kept(model):
        model.weight.grad = None
        model(torch.ones(2)).sum().backward()
    assert model.weight.grad is grad


def test_running_statistics_that_leave_no_version_behind_are_put_back():
    model = nn.BatchNorm1d(3)
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    with kept(model):
        model(torch.randn(8, 3))
        assert not torch.equal(model.running_mean, before["running_mean"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_buffers())


def test_it_is_put_back_after_an_exception_too():
    model = Restless()
    model.register_forward_hook(lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"), kept(model):
        model(torch.ones(2))
    assert float(model.count) == 0


def test_random_numbers_go_on_as_if_nothing_had_been_drawn():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    state = RandomState()
    assert not state.moved()
    with kept(Restless()):
        torch.rand(100)
        assert state.moved()
    assert torch.equal(torch.rand(3), expected)
