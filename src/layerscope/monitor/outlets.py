"""Hand frames and alarms to a sink that may fail, without the training noticing.

    outlet = Outlet(TensorBoard("board"))
    outlet.write(frame)         # never raises
    outlet.close()              # says what did not arrive

A sink that fails is warned about once and then tried less and less often: what is wrong with it (a full disk, a server
that is gone) mostly stays wrong for a while, and every attempt costs the training time.
"""

from __future__ import annotations

from typing import final

from layerscope.log import log
from layerscope.monitor.alarm_frames import FrameSink
from layerscope.rules import Alarm
from layerscope.rules.frames import Frame

_LONGEST = 256  # frames that are passed over between two attempts


@final
class Outlet:
    """One sink, how much it took, and how much it did not."""

    def __init__(self, sink: FrameSink) -> None:
        self._sink = sink
        self._name = type(sink).__name__
        self._frames = self._lost = self._alarms = self._failures = 0
        self._pause = 0  # how many frames were passed over after the last failure
        self._wait = 0  # how many are still to be
        self._because = ""

    def write(self, frame: Frame) -> None:
        """Hand over a frame, or pass it over when the sink has failed a moment ago."""
        self._frames += 1
        if self._wait:
            self._wait -= 1
            self._lost += 1
            return
        try:
            self._sink.write(frame)
            self._pause = 0
        except Exception as error:
            self._lost += 1
            self._pause = self._wait = min(2 * self._pause or 1, _LONGEST)
            self._failed("write", error)

    def alarm(self, alarm: Alarm) -> None:
        """Hand over an alarm, whatever happened before: there are few of them."""
        try:
            self._sink.alarm(alarm)
        except Exception as error:
            self._alarms += 1
            self._failed("alarm", error)

    def close(self) -> None:
        """Close the sink, and say what it did not take."""
        try:
            self._sink.close()
        except Exception as error:
            self._failed("close", error)
        if self._lost or self._alarms:
            log.warning(
                "%s did not take %d of %d frames and %d alarms; it failed %d times, at last with %s",
                self._name, self._lost, self._frames, self._alarms, self._failures, self._because,
            )  # fmt: skip

    def _failed(self, verb: str, error: Exception) -> None:
        self._failures += 1
        self._because = f"{type(error).__name__}: {error}"
        if self._failures == 1:
            log.warning(
                "%s.%s raised %s; the training goes on, and it is tried again now and then",
                self._name, verb, self._because,
            )  # fmt: skip
