"""A module whose weights are used without a call is told from one that nothing uses."""

import torch

import architectures
import layerscope as ls
import zoo
from layerscope.compile_taps.uses import used_without_a_call


def test_the_convolution_of_mamba_is_used_and_never_called():
    model, inputs = architectures.make("mamba"), {"input_ids": torch.arange(4)[None], "use_cache": False}
    taps = ["backbone.layers.0", "backbone.layers.0.mixer.conv1d", "backbone.layers.0.mixer.dt_proj"]
    compiled = ls.compile(model, inputs, backend=lambda m, e: m, record_layer_outputs=taps)
    assert [missing.point for missing in compiled.missing] == [f"{tap}:output" for tap in taps[1:]]
    reason = "called functionally: its weights are used without calling it"
    assert {missing.reason for missing in compiled.missing} == {reason}


def test_a_module_that_nothing_uses_is_not_among_them():
    model, args = zoo.never_called()
    assert used_without_a_call(model, {"unused"}, args, {}) == set()
    taking = zoo.Holder(lambda m, x: x @ m.layer.weight, layer=model.unused)
    assert used_without_a_call(taking, {"layer"}, args, {}) == {"layer"}


def test_reading_an_attribute_of_a_weight_is_no_use():
    model = zoo.Holder(lambda m, x: x.to(m.layer.weight.dtype), layer=torch.nn.Linear(4, 4))
    assert used_without_a_call(model, {"layer"}, (torch.zeros(1, 4),), {}) == set()
