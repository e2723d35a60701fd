"""The reference in the candidate's dtypes, and inputs in each model's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from layerscope.diagnose.replay.sides import LOSS_SCALE, ModelSide, cast_weights, castings, loss_of, main_dtype
from layerscope.errors import BadModel
from layerscope.runtimes.eager import modules_of


class Holder:
    """Something a forward is given that holds tensors, as a key-value cache does."""

    def __init__(self, tensor):
        self.layers = [{"keys": tensor}]


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x, holder=None):
        if holder is not None:
            holder.layers[0]["keys"].mul_(0)
        self.seen = x, holder
        return x * self.weight


@pytest.mark.parametrize(
    "inputs", [{"x": torch.ones(2)}, (torch.ones(2),), torch.ones(2)], ids=["dict", "tuple", "tensor"]
)
def test_inputs_are_cast_to_the_models_dtype_and_the_callers_stay(inputs):
    model = Takes().to(torch.bfloat16)
    output = ModelSide.of(model, inputs).run()
    assert output.dtype == torch.bfloat16
    given = inputs["x"] if isinstance(inputs, dict) else inputs[0] if isinstance(inputs, tuple) else inputs
    assert given.dtype == torch.float32


def test_what_an_argument_holds_is_copied_and_cast_too():
    model = Takes().to(torch.float16)
    holder = Holder(torch.ones(3))
    side = ModelSide.of(model, {"x": torch.ones(2), "holder": holder})
    side.run()
    assert torch.equal(holder.layers[0]["keys"], torch.ones(3))
    assert model.seen[1].layers[0]["keys"].dtype == torch.float16


def test_the_reference_has_the_candidates_dtypes_for_a_while_and_its_own_tensors_after():
    reference = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.LSTM(2, 2))
    candidate = nn.Sequential(nn.Linear(2, 2).bfloat16(), nn.LayerNorm(2), nn.LSTM(2, 2).bfloat16())
    before = dict(reference.named_parameters())
    which = castings(modules_of(reference), modules_of(candidate), names={}, default=torch.bfloat16)
    with cast_weights(which):
        assert [p.dtype for p in reference[0].parameters()] == [torch.bfloat16] * 2
        assert [p.dtype for p in reference[1].parameters()] == [torch.float32] * 2
        assert {w.dtype for w in reference[2]._flat_weights} == {torch.bfloat16}
    assert all(parameter is before[name] for name, parameter in reference.named_parameters())
    assert {w.dtype for w in reference[2]._flat_weights} == {torch.float32}


def test_tied_weights_stay_tied():
    reference = nn.ModuleDict({"a": nn.Embedding(3, 2), "b": nn.Linear(2, 3, bias=False)})
    reference["b"].weight = reference["a"].weight
    candidate = nn.ModuleDict({"a": nn.Embedding(3, 2), "b": nn.Linear(2, 3, bias=False)}).half()
    with cast_weights(castings(modules_of(reference), modules_of(candidate), names={}, default=None)):
        assert reference["a"].weight is reference["b"].weight
        assert reference["a"].weight.dtype == torch.float16


def test_nothing_changes_when_the_dtypes_are_the_same():
    assert not castings(modules_of(Takes()), modules_of(Takes()), names={}, default=torch.float32)


def test_the_main_dtype_is_that_of_most_weights():
    model = nn.Sequential(nn.Linear(64, 64).bfloat16(), nn.LayerNorm(64))
    assert main_dtype(model) == torch.bfloat16
    assert main_dtype(nn.ReLU()) is None


def test_the_loss_is_the_models_own_or_a_projection_that_depends_on_every_element():
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    assert loss_of({"logits": value, "loss": value.sum()}).item() == 3.0 * LOSS_SCALE
    (gradient,) = torch.autograd.grad(loss_of((value, value * 2)), value)
    assert bool((gradient != 0).all())
    assert float(gradient[0]) != float(gradient[1])
    with pytest.raises(BadModel, match="gradient"):
        loss_of(torch.ones(2))
