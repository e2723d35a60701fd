from __future__ import annotations

import torch

from layerscope.monitor.alarm_frames import Gathering
from layerscope.points import Moment, Point
from layerscope.rules import ParameterReading
from layerscope.schedules import steps
from layerscope.stats import summarize

A, B = Point("a"), Point("b")


def gathering(**wishes):
    ended = []
    return Gathering(ended=ended.append, **wishes), ended


def tell(gathering, point, moment, tensor):
    gathering.seen(point, moment, tensor, summarize(tensor, level="moments"))


def test_the_readings_of_a_step_keep_the_order_in_which_they_came():
    frames, _ = gathering()
    for point in (B, A, Point("b", "grad_output")):
        tell(frames, point, Moment(step=3), torch.ones(2))
    whole = frames.whole()
    assert whole.moment == Moment(step=3)
    assert [reading.point for reading in whole.readings] == [B, A, Point("b", "grad_output")]


def test_the_calls_of_one_point_become_one_reading_of_all_their_values():
    frames, _ = gathering()
    for call, values in enumerate(([1.0, 2.0], [6.0])):
        tell(frames, A, Moment(step=0, call=call), torch.tensor(values))
    [reading] = frames.whole().readings
    assert (reading.summary.count, reading.summary.mean, reading.summary.tensors) == (3, 3.0, 2)


def test_a_record_of_the_next_step_makes_the_frame_whole():
    frames, ended = gathering()
    tell(frames, A, Moment(step=0), torch.zeros(1))
    assert ended == []
    tell(frames, A, Moment(step=1, batch=1), torch.ones(1))
    assert [(f.moment.step, f.readings[0].summary.mean) for f in ended] == [(0, 0.0)]
    assert frames.whole().moment.step == 1
    assert frames.whole() is None


def test_a_gradient_of_a_step_that_is_over_is_let_go():
    frames, ended = gathering()
    tell(frames, A, Moment(step=0), torch.zeros(1))
    tell(frames, A, Moment(step=1), torch.ones(1))
    tell(frames, Point("a", "grad_output"), Moment(step=0), torch.ones(1))
    tell(frames, B, Moment(step=1), torch.ones(1))
    assert [f.moment.step for f in ended] == [0]
    assert [reading.point for reading in frames.whole().readings] == [A, B]


def test_statistics_that_are_still_on_a_device_are_waited_for_at_the_end():
    frames, _ = gathering()
    asked = []
    frames.seen(A, Moment(), torch.ones(4), lambda: asked.append(1) or summarize(torch.ones(4)))
    assert asked == []
    assert frames.whole().readings[0].summary.count == 4


def test_a_record_without_statistics_is_no_reading():
    frames, _ = gathering()
    frames.seen(A, Moment(), torch.ones(4), None)
    assert frames.whole() is None


def test_a_frame_may_have_parameters_alone():
    frames, _ = gathering()
    parameter = ParameterReading("w", 1.0)
    assert frames.whole((parameter,), at=Moment(step=5)).moment.step == 5
    assert frames.whole((), at=Moment(step=5)) is None


def test_units_are_the_last_axis_and_of_images_the_channels():
    frames, _ = gathering(units={})
    tokens = torch.ones(2, 3, 4)
    tokens[..., 1] = 0
    images = torch.ones(2, 3, 5, 5)
    images[:, 2] = 0
    tell(frames, A, Moment(), tokens)
    tell(frames, B, Moment(), images)
    found = [reading.active.tolist() for reading in frames.whole().readings]
    assert found == [[True, False, True, True], [True, True, False]]


def test_the_type_of_a_module_tells_its_units_and_what_follows_it_is_laid_out_alike():
    frames, _ = gathering(units={"conv": -2, "lin": -1})
    sound = torch.ones(2, 3, 5)
    sound[:, 1] = 0
    for name, values in (("conv", sound), ("relu", sound), ("lin", sound.mT), ("relu2", sound.mT), ("seq", sound)):
        tell(frames, Point(name), Moment(), values)
    silent = [True, False, True]
    found = {reading.point.name: reading.active.tolist() for reading in frames.whole().readings}
    assert found == {"conv": silent, "relu": silent, "lin": silent, "relu2": silent, "seq": [True] * 5}


def test_tensors_are_held_until_the_frame_is_let_go_and_tell_whether_they_were_changed():
    frames, _ = gathering(holds=True)
    kept, changed = torch.ones(2, 3), torch.ones(4)
    tell(frames, A, Moment(step=1, call=2), kept)
    tell(frames, B, Moment(step=1), changed)
    changed.add_(1)
    frames.whole()
    found = {sight.point: (sight.moment.call, sight.intact) for sight in frames.sights}
    assert found == {A: (2, True), B: (0, False)}
    assert frames.sights[0].tensor.data_ptr() == kept.data_ptr()


def test_tensors_are_not_held_unless_it_is_asked_for():
    frames, _ = gathering()
    tell(frames, A, Moment(), torch.ones(2))
    frames.whole()
    assert frames.sights == []


def test_a_tensor_with_fewer_zeros_than_a_silent_unit_makes_has_none():
    frames, _ = gathering(units={})
    values = torch.ones(5, 4)
    values[range(4), range(4)] = 0
    tell(frames, A, Moment(), values)
    assert frames.whole().readings[0].active.tolist() == [True] * 4


def test_a_unit_that_is_active_in_any_call_was_active():
    frames, _ = gathering(units={})
    tell(frames, A, Moment(call=0), torch.tensor([[0.0, 0.0, 1.0]]))
    tell(frames, A, Moment(call=1), torch.tensor([[0.0, 2.0, 0.0]]))
    assert frames.whole().readings[0].active.tolist() == [False, True, True]


def test_maps_of_the_first_sample_are_kept_when_they_are_due_and_are_copies():
    frames, _ = gathering(images=[Point("attn", leaf=(1,))], look=steps(1))
    weights = torch.rand(2, 4, 3, 3)
    first = weights[0].clone()
    for step in (0, 1):
        tell(frames, Point("attn", leaf=(1,)), Moment(step=step), weights)
        if step == 0:
            assert frames.whole().images == {}
    weights.zero_()
    [(name, kept)] = frames.whole().images.items()
    assert name == "attn:output[1]"
    assert torch.equal(kept, first)


def test_ranges_are_put_on_outputs_alone():
    frames, _ = gathering(bounds={"a": (0.0, 1.0)})
    for point in (A, Point("a", "grad_output"), B):
        tell(frames, point, Moment(), torch.ones(2))
    assert [reading.bounds for reading in frames.whole().readings] == [(0.0, 1.0), None, None]
