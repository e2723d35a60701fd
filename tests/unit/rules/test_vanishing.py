from __future__ import annotations

from framed import frame, looked, parameter, reading
from layerscope.points import Point
from layerscope.rules import vanishing


def gradients(step, *sizes):
    return frame(step, *(reading(f"{n}:grad_output", size) for n, size in enumerate(sizes)))


def test_a_gradient_that_is_nothing_beside_the_largest_fires_after_the_window():
    found = looked(vanishing(limit=1e-6, window=3), [gradients(n, 1e-9, 1e-5, 1.0) for n in range(3)])
    [alarm] = found
    assert (alarm.point, alarm.moment.step) == (Point("0", "grad_output"), 2)
    assert (f"{alarm.value:.0e}", alarm.threshold) == ("1e-09", 1e-6)


def test_the_scale_of_the_loss_does_not_matter():
    for scale in (1e-20, 1.0, 1e15):
        assert looked(vanishing(window=1), [gradients(0, 1e-5 * scale, scale)]) == []
        assert len(looked(vanishing(window=1), [gradients(0, 1e-7 * scale, scale)])) == 1


def test_one_frame_with_a_gradient_begins_the_count_anew():
    frames = [gradients(0, 0, 1), gradients(1, 0, 1), gradients(2, 1, 1), gradients(3, 0, 1), gradients(4, 0, 1)]
    assert looked(vanishing(window=3), frames) == []


def test_where_every_gradient_is_zero_every_one_is_named():
    found = looked(vanishing(window=1), [gradients(0, 0, 0)])
    assert [alarm.point.name for alarm in found] == ["0", "1"]
    assert all("as every gradient is" in alarm.because for alarm in found)


def test_parameters_are_judged_among_themselves():
    weights = [parameter("a.weight", gradient=1e-9), parameter("b.weight", gradient=1e-8), parameter("c.weight")]
    assert vanishing(window=1).look(frame(0, reading("a:grad_output", 1.0), parameters=weights)) == []
    weights.append(parameter("d.weight", gradient=1.0))
    found = vanishing(window=1).look(frame(0, parameters=weights))
    assert [alarm.parameter for alarm in found] == ["a.weight", "b.weight"]
