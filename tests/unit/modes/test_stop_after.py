"""A forward ends after the module that was named: what comes later is not run, and what was recorded is the same."""

import pytest
import torch

from layerscope.errors import NoSuchPoint, Unsupported
from layerscope.models import Inputs
from layerscope.models.mamba import quamba_small, sample_batches
from layerscope.models.tiny import tiny_transformer
from layerscope.modes import choose, record_modes
from layerscope.modes.stopping import stop_of


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
    assert "stop_after" not in whole.run.manifest.settings
    assert short.run.manifest.settings["stop_after"] == "backbone.layers.0"
    assert not model.backbone.layers[0]._forward_hooks


@pytest.mark.parametrize(
    ("text", "alone", "expected"),
    [
        (None, "first", "model.layers.0"),
        (None, "0", "model.layers.0"),
        (None, "first,last", None),
        (None, "model.layers.0", "model.layers.0"),
        (None, "1", None),
        (None, None, None),
        ("never", "first", None),
        ("1", "first", "model.layers.1"),
        ("model.embed_tokens", None, "model.embed_tokens"),
    ],
)
def test_where_a_forward_ends_is_what_was_said_or_the_first_layer_where_it_is_all_that_is_recorded(
    text, alone, expected
):
    assert stop_of(tiny_transformer(layers=3, hidden=16, heads=2), text, alone=alone) == expected


def test_a_stack_of_one_layer_is_run_to_its_end_as_it_may_be_gone_through_several_times():
    assert stop_of(tiny_transformer(layers=1, hidden=16, heads=2), None, alone="first") is None


def test_a_model_without_layers_is_run_to_its_end():
    model = torch.nn.Module()
    model.only = torch.nn.ReLU()
    assert stop_of(model, None, alone="only") is None
    assert stop_of(model, "only") == "only"


def test_what_cannot_end_is_said():
    model = tiny_transformer(layers=3, hidden=16, heads=2)
    with pytest.raises(NoSuchPoint, match="nearest"):
        stop_of(model, "model.layer.0")
    with pytest.raises(NoSuchPoint, match=r"names 3 modules \(model.layers.0, model.layers.1"):
        stop_of(model, "model.layers.*")
    scripted = torch.jit.trace(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(1))
    with pytest.raises(Unsupported, match="runs in torchscript"):
        stop_of(scripted, "0")
    assert stop_of(scripted, None, alone="first") is None
