"""Any way of giving the same arguments comes to the same tensors; another call is refused in a sentence."""

import pytest
import torch
from torch import nn

import zoo
from layerscope.compiled.arguments import Arguments, split
from layerscope.errors import Unsupported

X, Y = torch.zeros(2), torch.ones(2)


class Two(nn.Module):
    def forward(self, x, mask=None, *, scale=1.0):
        return x if mask is None else x * mask * scale


def test_positions_and_names_are_the_same():
    arguments = Arguments.of(Two(), (X, Y))
    for args, kwargs in [((X, Y), {}), ((X,), {"mask": Y}), ((), {"mask": Y, "x": X})]:
        found = arguments.tensors(args, kwargs)
        assert found[0] is X
        assert found[1] is Y
    assert arguments.call([X, Y]) == ([], {"x": X, "mask": Y})


def test_a_forward_without_names_keeps_its_positions():
    arguments = Arguments.of(zoo.Holder(lambda m, *a: a), (X, Y))
    args, kwargs = arguments.call([X, Y])
    assert args[0] is X
    assert args[1] is Y
    assert kwargs == {}


def test_what_is_no_tensor_may_be_left_out_but_not_changed():
    arguments = Arguments.of(Two(), {"x": X, "mask": Y, "scale": 2.0})
    assert arguments.tensors((X, Y), {})[1] is Y
    with pytest.raises(Unsupported, match=r"compiled for the arguments x, mask, scale=2\.0.*x, mask, scale=3\.0"):
        arguments.tensors((X, Y), {"scale": 3.0})


def test_a_tensor_more_or_less_is_refused():
    arguments = Arguments.of(Two(), (X,))
    with pytest.raises(Unsupported, match="compiled for the arguments x; it was called with x, mask"):
        arguments.tensors((X, Y), {})
    with pytest.raises(Unsupported, match="it was called with none"):
        arguments.tensors((), {})
    assert arguments.tensors((X,), {"mask": None}) == [X]


def test_an_argument_given_twice_is_refused():
    with pytest.raises(Unsupported, match="x is given twice"):
        Arguments.of(Two(), (X,)).tensors((X,), {"x": X})


def test_nested_arguments_keep_their_structure():
    arguments = Arguments.of(zoo.Holder(lambda m, *a, **k: a), {"cache": ((X, Y), [X])})
    assert len(arguments.tensors((), {"cache": ((X, Y), [X])})) == 3
    assert arguments.call([X, Y, X])[1] == {"cache": ((X, Y), [X])}


def test_examples_that_cannot_be_compiled_for_are_refused():
    with pytest.raises(Unsupported, match="holds no tensor"):
        Arguments.of(Two(), {"scale": 2.0})
    with pytest.raises(Unsupported, match="holds a object"):
        Arguments.of(Two(), (X, object()))
    with pytest.raises(Unsupported, match="example_inputs is a int"):
        split(3)
