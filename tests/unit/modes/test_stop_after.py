"""A forward ends after the module that was named: what comes later is not run, and what was recorded is the same."""

import torch

from layerscope.models import Inputs
from layerscope.models.mamba import quamba_small, sample_batches
from layerscope.modes import choose, record_modes


class Fails(torch.nn.Module):
    def forward(self, x):
        raise RuntimeError("the second layer ran")


def test_what_comes_after_is_not_run_and_what_came_before_is_the_same():
    model = quamba_small()
    batches = [Inputs((ids,)) for ids in sample_batches(3, 8, split="recorded")]
    modes = choose(["fp32"], model).modes

    def ran(**how):
        (one,) = record_modes(model, modes, batches, "backbone.layers.0:input,output", to=None, **how)
        return one

    whole = ran()
    model.backbone.layers[1] = Fails()
    assert "the second layer ran" in str(ran().error)
    short = ran(stop_after="backbone.layers.0")
    assert short.error is None
    assert short.run.complete
    for side in ("input", "output"):
        for step in range(3):
            point = f"backbone.layers.0:{side}"
            assert torch.equal(short.run.tensor(point, step=step), whole.run.tensor(point, step=step))
