from __future__ import annotations

import pytest

from framed import frame, looked, parameter
from layerscope.rules import stuck


def test_a_parameter_that_does_not_move_for_the_window_is_named():
    frames = [
        frame(n, parameters=[parameter("a.bias", ratio=0.0), parameter("a.weight", ratio=1e-9)]) for n in range(3)
    ]
    [alarm] = looked(stuck(window=3), frames)
    assert (alarm.parameter, alarm.moment.step, alarm.value, alarm.threshold) == ("a.bias", 2, 0.0, 0.0)


def test_one_update_begins_the_count_anew():
    ratios = [0.0, 0.0, 1e-3, 0.0, 0.0]
    assert looked(stuck(window=3), [frame(n, parameters=[parameter("w", ratio=r)]) for n, r in enumerate(ratios)]) == []


@pytest.mark.parametrize(
    ("gradient", "reason"), [(None, "no gradient reaches it"), (0.0, "its gradient is zero"), (1.0, "rounding")]
)
def test_the_likely_reason_is_given(gradient, reason):
    [alarm] = stuck(window=1).look(frame(0, parameters=[parameter("w", gradient=gradient, ratio=0.0)]))
    assert reason in alarm.because


def test_a_parameter_whose_update_was_not_measured_is_passed_over():
    assert stuck(window=1).look(frame(0, parameters=[parameter("w", gradient=1.0)])) == []
