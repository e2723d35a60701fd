"""Hooks that a compiler may trace: they copy what is wanted, and nothing between forwards."""

from __future__ import annotations

import torch
from torch import nn

import zoo
from asserts import assert_no_hooks_left
from layerscope.runtimes.traced_hooks import TracedHook, TracedValues, alone


def test_they_tell_what_ran_in_order_and_copy_it_before_it_changes():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    values = TracedValues()
    hooks = [TracedHook(values, "0", "output", [()]), TracedHook(values, "1", "input", [])]
    handles = [hook.on(model[at]) for at, hook in enumerate(hooks)]
    x = torch.linspace(-2, 2, 8).view(2, 4)
    values.told = []
    model(x)
    [(first, [(leaf, copied)]), (second, nothing)] = values.told
    assert (first, leaf, second, nothing) == (hooks[0], (), hooks[1], [])
    assert torch.equal(copied, model[0](x))
    assert bool((copied < 0).any())
    for handle in handles:
        handle.remove()
    assert_no_hooks_left(model)


def test_between_forwards_they_copy_nothing():
    model, (x,) = zoo.plain()
    values = TracedValues()
    TracedHook(values, "0", "output", [()]).on(model[0])
    model(x)
    assert values.told is None


def test_a_leaf_wants_all_that_is_below_it_and_nothing_beside_it():
    model, args = zoo.tuple_outputs()
    values = TracedValues()
    TracedHook(values, "block", "output", [(2,)]).on(model.block)
    values.told = []
    model(*args)
    [(_, found)] = values.told
    assert [leaf for leaf, _ in found] == [(2, 0)]


def test_a_function_of_its_own_has_its_own_code():
    own = alone(test_between_forwards_they_copy_nothing)
    assert own.__code__ is not test_between_forwards_they_copy_nothing.__code__
