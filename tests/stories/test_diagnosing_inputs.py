"""What goes between modules: positions, masks, padding. The one that drops or changes it is named, with what it was."""

from __future__ import annotations

import re
import types

import pytest
import torch
from torch import nn

import architectures
import layerscope as ls
import planted
from planted import Case

IDS = torch.randint(0, 128, (2, 18), generator=torch.Generator().manual_seed(1))
RIGHT = torch.ones_like(IDS)
RIGHT[1, 12:] = 0
LEFT = RIGHT.flip(1)


def llama(**how):
    return architectures.make("llama", **how)


def diagnosed(candidate, *, mask=None, reference=None):
    inputs = {"input_ids": IDS} if mask is None else {"input_ids": IDS, "attention_mask": mask}
    return ls.diagnose(reference or llama(), candidate, inputs)


def names(finding):
    return [blame.name for blame in finding.roots]


# Positions --------------------------------------------------------------------------------------


def at_positions(model, positions):
    right = model.model.forward
    model.model.forward = lambda *args, position_ids=None, **more: right(*args, position_ids=positions, **more)
    return model


def test_positions_of_every_sample_instead_of_one_for_all_are_no_fault():
    finding = diagnosed(at_positions(llama(), torch.arange(18).expand(2, 18)))
    assert finding.root is None, finding.verdict.because
    assert str(finding.verdict) == "same"


def test_positions_that_are_off_by_one_show_their_first_values_and_the_step():
    finding = diagnosed(at_positions(llama(), torch.arange(1, 19).expand(2, 18)))
    assert names(finding) == ["model"]
    because = finding.cause.because
    assert "is 1, 2, 3 and 4 where the reference's is 0, 1, 2 and 3" in because
    assert "36 of 36 differ, all by +1" in because


# Masks ------------------------------------------------------------------------------------------


def without_a_mask(model):
    """The model's own code, in which the mask is never made."""
    code = type(model.model).forward
    while hasattr(code, "__wrapped__"):
        code = code.__wrapped__
    known = {**code.__globals__, "create_causal_mask": lambda *args, **more: None}
    own = types.FunctionType(code.__code__, known, code.__name__, code.__defaults__, code.__closure__)
    own.__kwdefaults__ = code.__kwdefaults__
    model.model.forward = types.MethodType(own, model.model)
    return model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_mask_that_the_model_drops_is_the_models_fault_and_not_that_of_its_attentions(attention, dtype):
    finding = diagnosed(without_a_mask(llama(attention=attention, dtype=dtype)), mask=LEFT)
    assert names(finding) == ["model"], finding.verdict.because
    assert finding.cause.kind == "operation"
    assert "hands no attention_mask to model.layers.0 and 2 more" in finding.cause.because
    assert finding.cause.evidence["operation"] == "where"
    assert finding.roots[0].removed == pytest.approx(1, abs=0.05)
    assert diagnosed(llama(attention=attention, dtype=dtype), mask=LEFT).root is None


def test_a_mask_that_one_layer_drops_is_that_layers_fault():
    candidate = llama()
    layer, right = candidate.model.layers[1], candidate.model.layers[1].forward
    layer.forward = lambda *args, attention_mask=None, **more: right(*args, attention_mask=None, **more)
    assert names(diagnosed(candidate, mask=RIGHT)) == ["model.layers.1"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", ["mask-forward", "mask-hook"])
def test_a_mask_that_is_wrong_inside_a_module_is_told_by_its_operation(fault, dtype):
    candidate, blamed = planted.planted(Case("llama", dtype, fault))
    finding = ls.diagnose(llama(), candidate, architectures.inputs("llama"))
    assert finding.root == blamed
    assert finding.cause.kind == "operation"
    assert finding.cause.evidence["what"] == "mask"


# Padding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [LEFT, RIGHT], ids=["left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_another_kernel_makes_of_padding_is_no_fault(mask, dtype):
    finding = diagnosed(llama(attention="sdpa", dtype=dtype), mask=mask)
    assert finding.root is None, finding.verdict.because
    assert any("6 of 36 tokens" in note and "padding" in note for note in finding.notes)


class Padded(nn.Module):
    """Three layers; the middle one does as it likes with some tokens."""

    def __init__(self, spoilt=None, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.spoilt, self.factor = spoilt, factor

    def forward(self, x, attention_mask=None):
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        if self.spoilt is not None:
            x = torch.where(self.spoilt[..., None], x * self.factor + 3.0, x)
        return self.last(x)


def test_padding_is_left_out_where_a_mask_tells_it_and_nowhere_else():
    x = torch.randn(2, 18, 8, generator=torch.Generator().manual_seed(2))
    spoilt = Padded(RIGHT == 0)
    finding = ls.diagnose(Padded(), spoilt, {"x": x, "attention_mask": RIGHT})
    assert finding.root is None, finding.verdict.because
    assert not finding.final.error
    assert ls.diagnose(Padded(), spoilt, {"x": x}).root == ""
    with torch.no_grad():
        spoilt.middle.weight.mul_(1.05)
    finding = ls.diagnose(Padded(), spoilt, {"x": x, "attention_mask": RIGHT})
    assert names(finding) == ["middle"]
    assert "times 1.050" in finding.cause.because
    with torch.no_grad():
        outputs = [model(x)[RIGHT == 1] for model in (Padded(), spoilt)]
    assert finding.final.error == pytest.approx(float((outputs[1] - outputs[0]).norm() / outputs[0].norm()), rel=1e-4)


# Classes, and what a healthy pair costs ---------------------------------------------------------


def with_activation(model, **how):
    for layer in model.encoder.layer:
        layer.intermediate.intermediate_act_fn = nn.GELU(**how)
    return model


def test_another_activation_is_said_with_how_far_the_two_functions_are_apart():
    reference = architectures.make("bert")
    candidate = with_activation(architectures.make("bert"), approximate="tanh")
    finding = diagnosed(candidate, reference=reference)
    assert names(finding) == [f"encoder.layer.{at}.intermediate.intermediate_act_fn" for at in range(3)]
    assert "GELU(approximate='tanh') where the reference has GELUActivation" in finding.cause.because
    x = torch.linspace(-8, 8, 4097, dtype=torch.float64)
    exact = x * torch.special.ndtr(x)
    tanh = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    assert finding.cause.evidence["apart"] == pytest.approx(float((exact - tanh).abs().max()), rel=1e-2)
    assert diagnosed(with_activation(architectures.make("bert")), reference=reference).root is None


def final_error(candidate):
    with torch.no_grad():
        wanted, got = (model(IDS).logits.double() for model in (llama(), candidate))
    return float((got - wanted).norm() / wanted.norm())


def test_a_healthy_pair_says_its_final_error_and_what_of_half_precision_that_is():
    half = final_error(llama(dtype=torch.bfloat16))
    sentence = diagnosed(llama(dtype=torch.bfloat16)).verdict.because
    assert sentence.endswith(" of what bf16 costs")
    error, share = (float(found) for found in re.findall(r"final error is (\S+), (\S+) of", sentence)[0])
    assert (error, share) == (pytest.approx(half, rel=1e-3), pytest.approx(1, abs=0.02))
    other = llama(attention="sdpa")
    error, share = (
        float(found)
        for found in re.findall(r"final error is (\S+), (\S+) of what bf16", diagnosed(other).verdict.because)[0]
    )
    assert error == pytest.approx(final_error(other), rel=0.05)
    assert share == pytest.approx(final_error(other) / half, rel=0.6)  # one digit is printed
    assert "final error" not in diagnosed(llama()).verdict.because
