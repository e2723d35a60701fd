"""What tapping does to the output, as a number and a sentence."""

import math

import torch

from layerscope.compiled.observing import ObserverEffect


def test_equal_outputs_are_unchanged():
    effect = ObserverEffect.between({"a": torch.ones(3)}, {"a": torch.ones(3)})
    assert effect.identical
    assert (effect.max_abs, effect.sqnr_db) == (0.0, math.inf)
    assert str(effect) == "the taps change nothing in the output"


def test_a_difference_is_its_largest_element_and_its_sqnr():
    effect = ObserverEffect.between((torch.tensor([3.0, 4.0]),), (torch.tensor([3.0, 4.5]),))
    assert not effect.identical
    assert effect.max_abs == 0.5
    assert math.isclose(effect.sqnr_db, 20.0)  # 25 over 0.25
    assert str(effect) == "the taps change the output: max abs 5.00e-01, 20.0 dB"


def test_where_nothing_can_be_measured_it_says_so():
    effect = ObserverEffect.between(torch.tensor([1]), torch.tensor([2]))
    assert not effect.identical
    assert str(effect) == "not measured: the model returns no floating tensor"
