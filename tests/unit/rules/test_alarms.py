from __future__ import annotations

from layerscope.points import Moment, Point
from layerscope.rules import Alarm


def test_an_alarm_says_rule_place_moment_reason_value_and_threshold():
    alarm = Alarm("exploding", Point("blocks.3"), Moment(epoch=1, step=40, batch=2), 31.0, 30.0, "it grew")
    assert str(alarm) == "exploding: blocks.3:output at epoch=1 step=40 batch=2: it grew (value 31, threshold 30)"


def test_an_alarm_about_a_parameter_names_the_parameter():
    alarm = Alarm("stuck", Point("fc"), Moment(), 0.0, 0.0, "it did not move", parameter="fc.weight")
    assert alarm.where == "parameter fc.weight"
    assert "stuck: parameter fc.weight at step=0" in str(alarm)
