"""Which layers to keep: against closed forms, where a layer's error is put there by hand."""

import math

import pytest
import torch
from torch import nn

from layerscope.errors import Unsupported
from layerscope.models import Inputs
from layerscope.models.tiny import tiny_transformer
from layerscope.modes.registry import Mode, copied
from layerscope.modes.sensitivity import OUTSIDE, sensitivity

SIZE = 8


class Adds(nn.Module):
    """A layer that adds a constant, and returns a tuple as decoder layers do."""

    kind = "adds"

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x, *, mask=None):
        return (x + self.bias.to(x.dtype), mask)


class Stack(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList([Adds() for _ in range(depth)])
        self.head = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for layer in self.layers:
            assert layer.kind == "adds"
            x, _ = layer(x, mask=torch.ones(1, dtype=torch.bool))
        return {"logits": x * self.head, "ids": torch.arange(3)}


def off_by(*offsets, head=0.0, dtype=torch.float32):
    """Make a mode that shifts layer i along axis i, so that the errors of layers are orthogonal."""

    def make(model, setting):
        own = copied(model).to(dtype)
        for at, offset in enumerate(offsets):
            own.layers[at].bias.data[at] = offset
        own.head.data += head
        return own

    return Mode("off", "shifts", make)


X = [Inputs((torch.full((1, SIZE), 3.0),)), Inputs((torch.full((1, SIZE), 4.0),))]
NORM = math.sqrt(SIZE * (9 + 16))  # of the outputs of both batches


def test_shares_are_those_of_orthogonal_errors():
    offsets = (1.0, 4.0, 0.0, 2.0)
    found = sensitivity(Stack(), off_by(*offsets), X)
    square = sum(d * d for d in offsets)
    both = math.sqrt(2)  # each batch is off by the same
    assert found.error == pytest.approx(both * math.sqrt(square) / NORM)
    for share, d in zip(found.shares, offsets, strict=False):
        assert share.alone == pytest.approx(both * d / NORM)
        assert share.without == pytest.approx(both * math.sqrt(square - d * d) / NORM)
        assert share.returned == pytest.approx(1 - math.sqrt(1 - d * d / square))
    assert [share.name for share in found.ranking[:3]] == ["layers.1", "layers.3", "layers.0"]
    assert found.kept == ("layers.1", "layers.3", "layers.0")
    assert found.together == pytest.approx(1)
    assert (found.outside.name, found.outside.alone, found.outside.returned) == (OUTSIDE, 0, 0)


def test_an_error_of_one_layer_is_all_that_layers():
    found = sensitivity(Stack(), off_by(0.0, 0.0, 5.0), X)
    assert found.ranking[0].name == "layers.2"
    assert (found.ranking[0].returned, found.ranking[0].alone) == (1, found.error)
    assert {share.returned for share in found.ranking[1:]} == {0}


def test_an_error_in_no_layer_is_said_to_be_outside():
    found = sensitivity(Stack(), off_by(head=0.5), X)
    assert found.ranking[0] == found.outside
    assert found.outside.alone == pytest.approx(0.5)
    assert {share.returned for share in found.layers} == {0}


def test_layers_of_another_dtype_change_places_too():
    found = sensitivity(Stack(), off_by(1.0, 0.0, 0.0, 3.0, dtype=torch.bfloat16), X)
    assert [share.name for share in found.layers[:2]] == ["layers.3", "layers.0"]
    assert found.layers[0].alone == pytest.approx(math.sqrt(2) * 3 / NORM, rel=1e-2)


def test_the_model_is_afterwards_as_it_was():
    model = Stack()
    before = (list(model.named_modules()), {k: v.clone() for k, v in model.state_dict().items()})
    sensitivity(model, off_by(1.0), X)
    assert list(model.named_modules()) == before[0]
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before[1].items())


def test_a_forward_that_raises_leaves_the_model_as_it_was():
    def make(model, setting):
        own = copied(model)
        own.layers[1].forward = None
        return own

    model = Stack()
    modules = list(model.named_modules())
    with pytest.raises(TypeError):
        sensitivity(model, Mode("broken", "x", make), X)
    assert list(model.named_modules()) == modules


def test_a_mode_without_an_error_has_nothing_to_rank():
    with pytest.raises(Unsupported, match="mode 'fp32' gives the very output of the model"):
        sensitivity(Stack(), "fp32", X)


def test_a_variant_without_the_layers_is_refused():
    mode = Mode("other", "another model", lambda model, setting: Stack(depth=2))
    with pytest.raises(Unsupported, match=r"mode 'other' has no layer layers\.2"):
        sensitivity(Stack(), mode, X)


def test_a_model_that_returns_no_number_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    model.forward = lambda x: "text"
    with pytest.raises(Unsupported, match="returns no floating-point tensor"):
        sensitivity(model, Mode("same", "x", lambda model, setting: copied(model)), [Inputs((torch.ones(1, 2),))])


def test_a_real_quantised_model_is_ranked_layer_by_layer():
    told = []
    model = tiny_transformer(layers=3, hidden=32, heads=2)
    batches = [Inputs((torch.arange(12).view(1, 12),))]
    found = sensitivity(model, "int8-dynamic", batches, progress=lambda *now: told.append(now))
    assert [share.name for share in found.shares] == [*(f"model.layers.{i}" for i in range(3)), OUTSIDE]
    assert all(0 < share.alone < 2 * found.error for share in found.shares)
    assert [done for _, done, _ in told] == list(range(told[0][2]))
