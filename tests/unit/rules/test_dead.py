from __future__ import annotations

import torch

from framed import frame, looked, reading
from layerscope.rules import dead


def units(step, *active):
    return frame(step, reading("relu", 1, active=torch.tensor(active)))


def test_units_that_were_zero_for_the_whole_window_are_counted():
    found = looked(dead(window=3, limit=0.5), [units(n, False, False, True) for n in range(3)])
    [alarm] = found
    assert (alarm.moment.step, round(alarm.value, 6), alarm.threshold) == (2, round(2 / 3, 6), 0.5)
    assert "2 of its 3 units" in alarm.because


def test_a_unit_that_wakes_up_is_not_dead():
    frames = [units(0, False, False), units(1, True, False), units(2, False, True), units(3, False, False)]
    assert looked(dead(window=3), frames) == []


def test_a_share_that_only_reaches_the_limit_does_not_fire():
    frames = [units(n, False, True) for n in range(9)]
    assert looked(dead(window=2, limit=0.5), frames) == []
    assert looked(dead(window=2, limit=0.4), frames) != []


def test_a_layer_whose_units_were_not_asked_for_is_passed_over():
    assert dead(window=1).look(frame(0, reading("relu", 0))) == []
