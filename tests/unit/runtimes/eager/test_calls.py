"""What a thread knows of the calls under way, by the frames that make them."""

from __future__ import annotations

import sys
import threading
from weakref import WeakValueDictionary

from layerscope.points import Moment
from layerscope.runtimes.eager.calls import Local, RunningCall
from layerscope.runtimes.sink import Step

STEP = Step(Moment())


def call(name, frame):
    return RunningCall(name, STEP, 0, frame)


def ended_frame():
    return sys._getframe()


def test_a_call_whose_frame_is_gone_is_no_longer_under_way():
    local = Local(WeakValueDictionary())
    local.calls += [call("outer", sys._getframe()), call("interrupted", ended_frame())]
    innermost = local.innermost()
    assert innermost is not None
    assert innermost.name == "outer"
    assert [each.name for each in local.calls] == ["outer"]


def test_the_end_of_a_call_takes_off_what_was_left_above_it_and_nothing_below():
    local = Local(WeakValueDictionary())
    local.calls += [call(name, None) for name in ("a", "b", "a", "c")]
    ended = local.ended("a")
    assert ended is not None
    assert [each.name for each in local.calls] == ["a", "b"]
    assert local.ended("never seen") is None
    assert len(local.calls) == 2


def test_each_thread_has_its_own_and_all_are_known():
    everywhere: WeakValueDictionary = WeakValueDictionary()
    local = Local(everywhere)
    local.calls.append(call("here", None))
    seen = []
    thread = threading.Thread(target=lambda: seen.append((len(local.calls), len(everywhere))))
    thread.start()
    thread.join()
    assert seen == [(0, 2)]


def test_our_own_operations_are_told_from_the_models_however_deep():
    local = Local(WeakValueDictionary())
    with local.ours:
        with local.ours:
            pass
        assert local.ours
    assert not local.ours
