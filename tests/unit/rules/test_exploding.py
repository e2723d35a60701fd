from __future__ import annotations

import pytest
import torch

from framed import frame, looked, parameter, reading
from layerscope.errors import BadText
from layerscope.points import Point
from layerscope.rules import exploding


def test_a_root_mean_square_beyond_the_limit_fires_at_once():
    [alarm] = exploding(limit=50).look(frame(4, reading("a", 49), reading("b", 51)))
    assert (alarm.point, alarm.moment.step, alarm.value, alarm.threshold) == (Point("b"), 4, 51, 50)


def test_growth_beyond_the_recent_median_fires_below_the_limit():
    rule = exploding(growth=10, window=3)
    steady = [frame(n, reading("a", 2 + n)) for n in range(3)]  # 2, 3, 4: the median is 3
    assert looked(rule, [*steady, frame(3, reading("a", 29))]) == []
    [alarm] = looked(exploding(growth=10, window=3), [*steady, frame(3, reading("a", 31))])
    assert (alarm.value, alarm.threshold) == (31, 30)


def test_growth_is_not_judged_before_the_window_is_full():
    assert looked(exploding(growth=10, window=3), [frame(0, reading("a", 1)), frame(1, reading("a", 1000))]) == []


def test_an_output_that_grows_from_nearly_nothing_is_no_explosion():
    frames = [frame(n, reading("a", 1e-8)) for n in range(3)] + [frame(3, reading("a", 0.9))]
    assert looked(exploding(window=3), frames) == []


def test_gradients_explode_at_any_size():
    frames = [
        frame(n, reading("a:grad_output", 1e-6), parameters=[parameter("a.weight", gradient=1e-6)]) for n in range(3)
    ]
    spike = frame(3, reading("a:grad_output", 1e-3), parameters=[parameter("a.weight", gradient=1e-3)])
    found = looked(exploding(window=3), [*frames, spike])
    assert [alarm.where for alarm in found] == ["a:grad_output", "parameter a.weight"]


def test_token_ids_and_inputs_are_not_judged():
    ids = frame(0, reading("embed:input[0]", torch.tensor([50_000])), reading("route", torch.tensor([50_000])))
    assert exploding().look(ids) == []


@pytest.mark.parametrize("settings", [{"limit": 0}, {"growth": 1}, {"window": 0}, {"action": "shout"}])
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(BadText, match=next(iter(settings))):
        exploding(**settings)
