"""A run on the side leaves no trace."""

import random

import numpy as np
import torch
from torch import nn

from layerscope.runtimes.snapshot import kept


def test_random_state_and_buffers_are_put_back():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    with kept(model):
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
    with kept(model):
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
    with kept(model):
        model(torch.randn(8, 3))
    assert [buffer._version for buffer in model.buffers()] == versions


def test_the_random_state_of_python_and_numpy_is_put_back():
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    with kept(None):
        random.random()
        np.random.random(1000)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_an_error_in_the_block_passes_and_all_is_put_back():
    model = nn.BatchNorm1d(3).train()
    before = model.running_mean.clone()
    try:
        with kept(model):
            model(torch.randn(8, 3) + 5)
            raise KeyError
    except KeyError:
        assert torch.equal(model.running_mean, before)
    else:
        raise AssertionError("the error was swallowed")
