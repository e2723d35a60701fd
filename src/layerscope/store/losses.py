"""What could not be recorded: counted by point and reason, and said once.

    losses = Losses("runs/fp32")
    losses.count("blocks.3:output", "step=7", "the disk refused it: No space left on device")
    losses.dropped          # [Dropped(point='blocks.3:output', count=1, ...)]

The log hears the first of each kind; the rest is in `run.json`, where it cannot scroll away.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import final

from layerscope.store.manifest import Dropped

log = logging.getLogger("layerscope")

# Reasons that differ from record to record are all counted, but no more of them than this are listed.
_MOST_SAID = 20


@final
class Losses:
    """Counts for one run; may be used by several threads."""

    def __init__(self, address: str, heard: Callable[[Dropped], None] = lambda loss: None) -> None:
        """`heard` is told of each loss, with the count of all of its kind."""
        self._address, self._heard = address, heard
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}
        self._firsts: dict[tuple[str, str], str] = {}
        self._said: set[str] = set()

    @property
    def dropped(self) -> list[Dropped]:
        """What was lost until now; takes no lock, so that a forked child can ask too."""
        counts = list(self._counts.items())
        return [Dropped(point, n, reason, self._firsts[point, reason]) for (point, reason), n in counts]

    def count(self, point: str, moment: str, reason: str) -> None:
        """Count one record, and say so if it is the first for this reason."""
        with self._lock:
            self._firsts.setdefault((point, reason), moment)
            counted = self._counts[point, reason] = self._counts.get((point, reason), 0) + 1
        self._heard(Dropped(point, counted, reason, self._firsts[point, reason]))
        self.say(
            f"{point} at {moment} is not recorded: {reason}. Recording goes on; further losses of this kind are "
            "counted under `dropped` and not said again.",
            once=reason,
        )

    def say(self, sentence: str, *, once: str = "") -> None:
        """Say a thing the first time it happens; no handler of the user's logging can get in the way."""
        with self._lock:
            if (once or sentence) in self._said or len(self._said) >= _MOST_SAID:
                return
            self._said.add(once or sentence)
        with contextlib.suppress(Exception):
            log.warning("%s: %s", self._address, sentence)
