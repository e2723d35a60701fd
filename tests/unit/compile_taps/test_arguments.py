"""Any way of giving the same arguments comes to the same tensors; another call is refused in a sentence."""

import pytest
import torch
from torch import nn

import zoo
from layerscope.compile_taps.arguments import Arguments, split
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


class Scaled(nn.Module):
    def forward(self, x, scale=2.0, mode=("sum", None)):
        return x * (1.0 if scale is None else scale)


@pytest.mark.parametrize("compiled_for", [None, 2.0, 1, True, float("nan"), "text"], ids=repr)
def test_a_constant_is_what_it_was_compiled_with_and_none_is_one_of_them(compiled_for):
    arguments = Arguments.of(Scaled(), (X, compiled_for))
    assert repr(arguments.call([X])[1]["scale"]) == repr(compiled_for)
    assert arguments.tensors((X, compiled_for), {}) == [X]
    for other in [each for each in (None, 3.0, 1.0, False) if each is not compiled_for]:
        with pytest.raises(Unsupported, match=f"called with x, scale={other!r}"):
            arguments.tensors((X,), {"scale": other})


def test_what_the_example_left_out_may_be_given_as_its_default_alone():
    arguments = Arguments.of(Scaled(), (X,))
    assert arguments.tensors((X, 2.0), {"mode": ("sum", None)}) == [X]
    for name, value, told in [("scale", None, "None"), ("scale", 2, "2"), ("mode", ["sum", None], r"\['sum', None\]")]:
        with pytest.raises(Unsupported, match=f"compiled for the arguments x; it was called with x, {name}={told}"):
            arguments.tensors((X,), {name: value})


def test_none_keeps_its_place_among_arguments_without_names():
    arguments = Arguments.of(zoo.Holder(lambda m, *a: a), (X, None, Y))
    assert arguments.call([X, Y]) == ([X, None, Y], {})
    assert arguments.tensors((X, None, Y), {}) == [X, Y]
    for other in [(X, Y), (X, Y, None), (X, None, Y, None)]:
        with pytest.raises(Unsupported, match="compiled for the arguments 0, 1=None, 2;"):
            arguments.tensors(other, {})


class Rest(nn.Module):
    def forward(self, x, *rest, scale=1.0):
        return x


def test_a_name_before_arguments_without_names_goes_by_position():
    args, kwargs = Arguments.of(Rest(), (X, Y, X)).call([X, Y, X])
    assert [each is other for each, other in zip(args, (X, Y, X), strict=True)] == [True] * 3
    assert kwargs == {}


def test_tensors_are_named_by_their_place():
    arguments = Arguments.of(zoo.Holder(lambda m, *a, **k: a), {"x": X, "cache": ((X, None), [{"k": Y}])})
    assert arguments.names() == ["x", "cache[0][0]", "cache[1][0]['k']"]


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
