from __future__ import annotations

import math

import torch

from framed import frame, looked, parameter, reading
from layerscope.points import Point
from layerscope.rules import nonfinite

NAN, INF = torch.tensor([1.0, math.nan, 2.0]), torch.tensor([1.0, math.inf, -math.inf])


def test_finite_frames_raise_no_alarm():
    frames = [
        frame(n, reading("a:input[0]", 1), reading("a", 1e30), parameters=[parameter("a.weight", gradient=1)])
        for n in range(9)
    ]
    assert looked(nonfinite(), frames) == []


def test_the_layer_that_was_finite_going_in_and_not_coming_out_is_named():
    broken = frame(
        3, reading("a:input[0]", 1), reading("a", 1), reading("b:input[0]", 1), reading("b", NAN), reading("c", NAN)
    )
    [alarm] = nonfinite().look(broken)
    assert (alarm.point, alarm.moment.step, alarm.value, alarm.threshold) == (Point("b"), 3, 1, 0)
    assert "1 NaN of 3 values come out, and what went in is finite" in alarm.because
    assert "1 more in this step, after it" in alarm.because


def test_code_between_two_modules_is_not_blamed_on_the_second():
    broken = frame(0, reading("a", 1), reading("b:input[0]", INF), reading("b", NAN))
    [alarm] = nonfinite().look(broken)
    assert alarm.point == Point("b", "input", (0,))
    assert alarm.value == 2
    assert "1 +inf and 1 -inf" in alarm.because
    assert "made between a:output and it" in alarm.because


def test_inputs_of_the_model_that_are_not_finite_are_said_to_be():
    [alarm] = nonfinite().look(frame(0, reading(".:input[0]", NAN), reading("a", NAN)))
    assert "in the model's own inputs" in alarm.because


def test_a_gradient_that_is_not_finite_is_told_from_a_forward_that_is_not():
    [alarm] = nonfinite().look(frame(0, reading("a", 1), reading("a:grad_output", NAN)))
    assert alarm.point.side == "grad_output"
    assert "the forward was finite" in alarm.because


def test_a_parameters_gradient_is_named_when_nothing_else_is_wrong():
    [alarm] = nonfinite().look(frame(0, reading("a", 1), parameters=[parameter("a.weight", gradient=math.nan)]))
    assert (alarm.parameter, alarm.point, alarm.where) == ("a.weight", Point("a"), "parameter a.weight")


def test_the_last_frames_before_it_come_with_the_alarm():
    frames = [frame(n, reading("a", 10.0**n)) for n in range(5)]
    [alarm] = looked(nonfinite(frames=3), [*frames, frame(5, reading("a", NAN))])
    assert [each.moment.step for each in alarm.frames] == [2, 3, 4]
    assert "largest magnitude in the frames before: 100, 1e+03, 1e+04" in alarm.because


def test_a_mask_of_minus_infinity_going_in_is_no_fault():
    mask = torch.tensor([0.0, -math.inf])
    assert nonfinite().look(frame(0, reading("attn:input[mask]", mask), reading("attn", 1))) == []
    [alarm] = nonfinite().look(frame(0, reading("attn:input[mask]", mask), reading("attn", NAN)))
    assert alarm.point == Point("attn")
    assert "as in a mask" in alarm.because
