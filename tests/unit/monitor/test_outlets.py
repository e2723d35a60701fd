from __future__ import annotations

from framed import frame, reading
from layerscope.monitor.outlets import Outlet
from layerscope.points import Moment, Point
from layerscope.rules import Alarm

ALARM = Alarm("loud", Point("a"), Moment(), 1.0, 0.0, "it is")


class Weak:
    """A sink that fails in some of the attempts, and counts them."""

    def __init__(self, *, fails=lambda attempt: True, alarms=False, closes=True):
        self.fails, self.alarms, self.closes = fails, alarms, closes
        self.attempts, self.frames, self.told = 0, [], 0

    def write(self, given):
        self.attempts += 1
        if self.fails(self.attempts):
            raise OSError("disk full")
        self.frames.append(given.moment.step)

    def alarm(self, alarm):
        self.told += 1
        if self.alarms:
            raise OSError("no voice")

    def close(self):
        if not self.closes:
            raise ValueError("stuck")


def handed(sink, frames):
    outlet = Outlet(sink)
    for step in range(frames):
        outlet.write(frame(step, reading("a", 1)))
    return outlet


def test_a_sink_that_works_gets_everything_and_nothing_is_said(caplog):
    sink = Weak(fails=lambda attempt: False)
    outlet = handed(sink, 5)
    outlet.alarm(ALARM)
    outlet.close()
    assert (sink.frames, sink.told, caplog.messages) == ([0, 1, 2, 3, 4], 1, [])


def test_a_sink_that_fails_is_said_once_and_tried_less_and_less_often(caplog):
    sink = Weak()
    outlet = handed(sink, 1000)
    assert sink.attempts == 11  # after 1, 2, 4 ... 256 frames, and then every 257th
    assert len(caplog.messages) == 1
    assert "Weak.write raised OSError: disk full; the training goes on" in caplog.messages[0]
    outlet.close()
    assert "Weak did not take 1000 of 1000 frames and 0 alarms; it failed 11 times" in caplog.messages[1]


def test_a_sink_that_recovers_gets_every_frame_again_and_what_it_missed_is_said(caplog):
    sink = Weak(fails=lambda attempt: attempt <= 2)
    outlet = handed(sink, 10)
    assert sink.frames == [5, 6, 7, 8, 9]  # tried at 0, 2 and 5
    outlet.close()
    assert "did not take 5 of 10 frames" in caplog.text


def test_alarms_are_always_tried(caplog):
    sink = Weak(alarms=True)
    outlet = handed(sink, 3)
    for _ in range(4):
        outlet.alarm(ALARM)
    outlet.close()
    assert sink.told == 4
    assert "3 of 3 frames and 4 alarms" in caplog.text


def test_a_sink_that_cannot_be_closed_is_said(caplog):
    handed(Weak(fails=lambda attempt: False, closes=False), 1).close()
    assert "Weak.close raised ValueError: stuck" in caplog.text
