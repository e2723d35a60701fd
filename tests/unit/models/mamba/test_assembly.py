"""Sizes and weights put together: every weight in its place, in float32, or one sentence."""

import pytest
import torch

from layerscope.errors import BadModel
from layerscope.models.mamba import MambaConfig
from layerscope.models.mamba.assembly import assembled, shapes
from layerscope.models.mamba.drawing import drawn_weights

TINY = MambaConfig(hidden_size=8, num_hidden_layers=1, state_size=3, time_step_rank=2, vocab_size=10)


def test_the_shapes_are_those_of_the_paper():
    mixer = "backbone.layers.0.mixer."
    assert shapes(TINY) == {
        "backbone.embeddings.weight": (10, 8),
        "backbone.layers.0.norm.weight": (8,),
        mixer + "A_log": (16, 3),
        mixer + "D": (16,),
        mixer + "in_proj.weight": (32, 8),
        mixer + "conv1d.weight": (16, 1, 4),
        mixer + "conv1d.bias": (16,),
        mixer + "x_proj.weight": (2 + 3 + 3, 16),
        mixer + "dt_proj.weight": (16, 2),
        mixer + "dt_proj.bias": (16,),
        mixer + "out_proj.weight": (8, 16),
        "backbone.norm_f.weight": (8,),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_any_precision_become_float32_with_their_values(dtype):
    weights = {name: weight.to(dtype) for name, weight in drawn_weights(TINY, seed=0).items()}
    model = assembled(TINY, weights, source="a test")
    assert not model.training
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert torch.equal(parameter, weights[name].float())


def test_the_source_is_named_when_the_weights_do_not_fit():
    weights = drawn_weights(TINY, seed=0)
    assert assembled(TINY, weights, source="here")
    with pytest.raises(BadModel, match=r"'here' lacks backbone\.norm_f\.weight of a Mamba with 1 layers of width 8"):
        assembled(TINY, {name: w for name, w in weights.items() if "norm_f" not in name}, source="here")
