"""A number that a model returns is a constant only where the inputs had no part in it."""

import pytest
import torch
from torch import nn

import layerscope as ls
import zoo
from layerscope.compile_taps.arguments import Arguments
from layerscope.compile_taps.computed_numbers import checked, is_computed
from layerscope.compile_taps.value_forms import FlatValue, opaque_parts

X = torch.arange(48.0).reshape(2, 3, 8)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x, int(self.calls)


def checked_of(model, x=X):
    example = (x,)
    output = FlatValue.of(model(x)).form
    return checked(model, Arguments.of(model, example), example, output)


@pytest.mark.parametrize(
    "returns",
    [
        lambda m, x: (x, 3, True, 1.5, None, "text"),
        lambda m, x: {"y": x, "layers": [1, {"rate": 0.5}]},
        lambda m, x: (m.inner(x), m.inner.out_features),
    ],
    ids=["plain", "nested", "of the model"],
)
def test_a_number_of_the_model_is_kept(returns):
    model = zoo.Holder(returns, inner=nn.Linear(8, 4))
    output = checked_of(model)
    assert output == FlatValue.of(model(X)).form
    assert not is_computed(output)


@pytest.mark.parametrize(
    ("returns", "left_out"),
    [
        (lambda m, x: (x, x.shape[1], 3), ["computed int"]),
        (lambda m, x: (x, x.shape[1] * 2.0), ["computed float"]),
        (lambda m, x: (x, x.mean().item()), ["computed float"]),
        (lambda m, x: (x, [bool(x.sum() > 0), 3]), ["computed bool", "computed int"]),  # nothing is known of such a run
    ],
    ids=["size", "of a size", "value", "condition"],
)
def test_a_number_that_the_inputs_made_is_left_out(returns, left_out):
    output = checked_of(zoo.Holder(returns))
    assert opaque_parts(output) == left_out
    assert is_computed(output)


def test_a_buffer_is_not_a_constant_and_is_left_as_it_was():
    model = Counting()
    with torch.no_grad():
        output = checked_of(model)
    assert opaque_parts(output) == ["computed int"]
    assert type(model.calls) is torch.Tensor
    assert float(model.calls) == 1.0  # the forward of this test


@pytest.mark.parametrize("backend", ["torchscript", "export"])
def test_a_size_that_is_returned_is_never_the_examples(backend, caplog, tmp_path):
    model = zoo.Holder(lambda m, x: (m.inner(x), x.shape[1], 3), inner=nn.Linear(8, 8))
    compiled = ls.compile(model, (X,), backend=backend, record_layer_outputs="inner")
    said = "the model returns a computed int, which a compiled graph cannot: it is left out"
    assert said in compiled.notes
    assert said in caplog.text
    longer = torch.ones(4, 9, 8)
    for each in (compiled, ls.load_compiled(compiled.save(tmp_path / "saved"))):
        with torch.no_grad():
            value, size, constant = each(longer)
            assert torch.equal(value, model.inner(longer))
        assert constant == 3
        assert repr(size) == "<a computed int that the compiled graph left out>"
        with pytest.raises(TypeError, match="have it return a tensor"):
            int(size)
