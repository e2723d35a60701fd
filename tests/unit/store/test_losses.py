"""losses.py: counted always, said once."""

from __future__ import annotations

import threading

from layerscope.store import Dropped
from layerscope.store.losses import Losses


def test_losses_are_counted_by_point_and_reason_with_the_first_moment():
    losses = Losses("runs/x")
    for moment in ("step=1", "step=2"):
        losses.count("a:output", moment, "full")
    losses.count("b:output", "step=3", "full")
    losses.count("a:output", "step=4", "other")
    assert losses.dropped == [
        Dropped("a:output", 2, "full", "step=1"),
        Dropped("b:output", 1, "full", "step=3"),
        Dropped("a:output", 1, "other", "step=4"),
    ]


def test_each_reason_is_said_once_with_the_run_the_point_and_the_moment(caplog):
    losses = Losses("runs/x")
    for n in range(5):
        losses.count("a:output", f"step={n}", "full")
    losses.count("a:output", "step=9", "other")
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("runs/x: a:output at step=0 is not recorded: full. Recording goes on")
    assert "step=9" in second


def test_reasons_without_end_are_counted_without_end_and_said_twenty_times(caplog):
    losses = Losses("runs/x")
    for n in range(100):
        losses.count("a:output", "step=0", f"reason {n}")
    assert len(losses.dropped) == 100
    assert len(caplog.records) == 20


def test_threads_count_together():
    losses = Losses("runs/x")

    def count() -> None:
        for _ in range(500):
            losses.count("a:output", "step=0", "full")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert losses.dropped == [Dropped("a:output", 2000, "full", "step=0")]
