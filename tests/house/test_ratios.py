"""The ratios of `benchmarks/`: every cost is in them, wherever it falls. The clock is played."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

PAIRING = Path(__file__).parents[2] / "benchmarks" / "pairing.py"


@pytest.fixture
def pairing():
    spec = importlib.util.spec_from_file_location("pairing", PAIRING)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Clock:
    """Steps that take a second, and what a step costs that is not plain."""

    def __init__(self, *, in_it=0.0, after_it=0.0, in_every_fifth=0.0):
        self.now, self.steps, self.left = 0.0, 0, 0.0
        self.costs = in_it, after_it, in_every_fifth

    def plain(self):
        self.now += 1 + self.left
        self.left = 0.0

    def other(self):
        in_it, after_it, in_every_fifth = self.costs
        self.plain()
        self.steps += 1
        self.now += in_it + (in_every_fifth if self.steps % 5 == 0 else 0)
        self.left = after_it


@pytest.mark.parametrize(
    ("costs", "ratio"),
    [({}, 1.0), ({"in_it": 0.02}, 1.02), ({"after_it": 0.02}, 1.02), ({"in_every_fifth": 0.1}, 1.02)],
    ids=["none", "in the step", "in the plain one after it", "in every fifth"],
)
def test_steps_that_take_turns_pay_for_what_they_cost(pairing, monkeypatch, costs, ratio):
    clock = Clock(**costs)
    monkeypatch.setattr(pairing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    assert pairing.alternating(clock.plain, clock.other, turns=4) == pytest.approx(ratio)


def test_a_turn_in_which_the_machine_stops_is_one_of_many(pairing, monkeypatch):
    clock = Clock(in_it=0.02)

    def other():
        clock.other()
        clock.now += 9.0 if clock.steps == 7 else 0.0

    monkeypatch.setattr(pairing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    assert pairing.alternating(clock.plain, other, turns=4) == pytest.approx(1.02)


def test_a_lap_is_set_against_the_plain_ones_before_and_after_it(pairing):
    plain, other = iter([1.0, 3.0, 2.0]), iter([3.0, 5.0])
    ratios, laps = pairing.paired(lambda: next(plain), {"other": lambda: next(other)}, rounds=2)
    assert ratios == {"other": [1.5, 2.0]}
    assert laps == [1.0, 3.0, 2.0]
