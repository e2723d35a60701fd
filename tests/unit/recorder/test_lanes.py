"""What a lane does when a step ends or a mark fails; copies themselves need a device (tests/runtimes/test_cuda.py)."""

from __future__ import annotations

from collections import deque

import pytest

from layerscope.recorder import lanes


class Told:
    """Notes what it is asked."""

    def __init__(self, *, is_loading=True):
        self.asked = []
        self.is_loading = is_loading

    def rest(self):
        self.asked.append("rest")

    def depart(self, side):
        raise RuntimeError("no event could be made")

    def finish(self, error=None):
        self.asked.append(error)


@pytest.mark.parametrize(("capturing", "asked"), [(False, ["rest"]), (True, [])])
def test_lanes_hear_that_a_step_has_ended_unless_a_graph_is_captured(capturing, asked, monkeypatch):
    lane = Told()
    monkeypatch.setattr(lanes, "_lanes", {0: lane, 1: Told(is_loading=False)})
    monkeypatch.setattr(lanes, "is_capturing", lambda: capturing)
    lanes.rest()
    assert lane.asked == asked


def test_a_flight_whose_end_cannot_be_marked_is_not_waited_for():
    lane, flight = lanes.Lane.__new__(lanes.Lane), Told()
    lane._flight, lane._flying, lane._side = flight, deque(), None
    with pytest.raises(RuntimeError, match="no event could be made"):
        lane._depart()
    assert [str(error) for error in flight.asked] == ["no event could be made"]
    assert (lane._flight, list(lane._flying)) == (None, [])
