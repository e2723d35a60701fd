"""An hour of it all (`make stress`), and a little of it: nothing lost, nothing wrong, nothing that grows."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from faults.soaking import STEPS, Soak, small_disk

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory and files are counted in /proc")


@pytest.fixture
def place(tmp_path):
    with small_disk(tmp_path):
        yield tmp_path


def test_a_little_of_it_all(place):
    soak = Soak(place, every=0.2)
    counts = soak.run(lambda: soak.counts["kills"] and soak.counts["recordings"] > 2)
    assert counts["frames"] == counts["recordings"] * STEPS
    assert counts["reads"] > 2


@pytest.mark.stress
def test_an_hour_of_it_all(place):
    end = time.monotonic() + 3600
    counts = Soak(place).run(lambda: time.monotonic() > end)
    assert counts["kills"] > 100
    for what, by in counts["grown"].items():
        assert by < (2 << 20 if "resident" in what else 1), (what, by)
