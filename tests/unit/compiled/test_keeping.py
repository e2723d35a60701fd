"""A run on the side leaves no trace."""

import torch
from torch import nn

from layerscope.compiled.keeping import kept


def test_random_state_and_buffers_are_put_back():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    with kept(model):
        model(torch.randn(8, 3) + 5)
        assert not torch.equal(model[0].running_mean, before["0.running_mean"])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
