"""A tapped copy gives what PyTorch's hooks see, and leaves the model alone."""

import pytest
import torch
from torch import nn

import zoo
from asserts import assert_no_hooks_left, assert_same_bits
from layerscope.compile_taps.arguments import Arguments
from layerscope.compile_taps.tapped_model import Tapped, copied, flattened
from layerscope.errors import Unsupported
from layerscope.points import Point


def test_the_copy_has_its_own_modules_and_the_models_tensors():
    model, _ = zoo.plain()
    copy = copied(model)
    assert copy[0] is not model[0]
    assert copy[0].weight is model[0].weight


def test_taps_come_in_the_order_they_run_with_every_call_and_leaf():
    model, args = zoo.called_thrice()
    value, taken = Tapped(model, [Point("layer"), Point("layer", "input")]).named(*args)
    x = args[0]
    assert [(each.side, each.leaf) for each in taken] == [("input", (0,)), ("output", ())] * 3
    for each in taken:
        assert_same_bits(each.tensor, x if each.side == "input" else model.layer(x))
        x = each.tensor
    assert_same_bits(value, x)
    assert_no_hooks_left(model)


def test_a_leaf_that_is_named_is_the_only_one_taken():
    model, args = zoo.dict_outputs()
    _, taken = Tapped(model, [Point("block", "output", ("hidden",))]).named(*args)
    assert [each.leaf for each in taken] == [("hidden",)]


def test_values_are_taken_before_they_are_changed_in_place():
    model, args = zoo.in_place()
    _, taken = Tapped(model, [Point("0")]).named(*args)
    assert bool((taken[0].tensor < 0).any())


def test_an_exception_leaves_nothing_under_way():
    tapped = Tapped(zoo.plain()[0], [Point("0")])
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        tapped.named(torch.zeros(1, 3))
    value, taps = tapped(torch.zeros(1, 4))
    assert (value.shape, len(taps)) == ((1, 3), 1)


def test_the_flat_form_takes_and_gives_tensors_alone():
    model, args = zoo.named_outputs()
    flat = flattened(Tapped(model, [Point("first")]), Arguments.of(model, args))
    out = flat(*args)
    assert isinstance(out, tuple)
    assert_same_bits(out[0], model(*args))
    assert_same_bits(out[1], model.first(*args).hidden)


def test_no_two_flat_forms_share_their_code():
    model, args = zoo.plain()
    arguments = Arguments.of(model, args)
    one, two = (flattened(Tapped(model, ()), arguments) for _ in range(2))
    assert type(one).forward.__code__ is not type(two).forward.__code__


def test_what_cannot_be_copied_is_refused_with_the_reason():
    model = nn.Linear(2, 2)
    model.lines = (line for line in ())
    with pytest.raises(Unsupported, match=r"Linear cannot be copied.*generator"):
        copied(model)
