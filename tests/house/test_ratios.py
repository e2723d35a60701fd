"""The ratios of `benchmarks/`: every cost is in them, wherever it falls. The clock is played."""

from __future__ import annotations

import importlib.util
import itertools
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

PAIRING = Path(__file__).parents[2] / "benchmarks" / "pairing.py"


@pytest.fixture
def pairing():
    spec = importlib.util.spec_from_file_location("pairing", PAIRING)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Clock:
    """Steps that take a second, but for what the machine adds, and what a step costs that is not plain."""

    def __init__(self, *, in_it=0.0, after_it=0.0, in_every_fifth=0.0):
        self.now, self.steps, self.left, self.slow = 0.0, 0, 0.0, 1.0
        self.costs = in_it, after_it, in_every_fifth

    def plain(self):
        self.now += self.slow * (1 + self.left)
        self.left = 0.0

    def other(self):
        in_it, after_it, in_every_fifth = self.costs
        self.plain()
        self.steps += 1
        self.now += self.slow * (in_it + (in_every_fifth if self.steps % 5 == 0 else 0))
        self.left = after_it

    def laps(self, pairing, count, *, between=lambda: None):
        laps = []
        for _ in range(count):
            self.steps = 0  # each is a recording of its own
            laps.append(pairing.taking_turns(self.other, self.plain, turns=4, of=6))
            between()
        return laps


@pytest.fixture
def played(pairing, monkeypatch):
    """Make a clock that the turns are timed by."""

    def make(**costs):
        clock = Clock(**costs)
        monkeypatch.setattr(pairing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        return clock

    return make


@pytest.mark.parametrize(
    ("costs", "ratio"),
    [
        ({}, 1.0), ({"in_it": 0.02}, 1.02), ({"after_it": 0.02}, 1.02), ({"in_every_fifth": 0.1}, 1.02),
        ({"in_it": 0.5, "after_it": 0.5}, 2.0),
    ],
    ids=["none", "in the step", "in the one after it", "in every fifth", "much, in both"],
)  # fmt: skip
def test_steps_that_take_turns_pay_for_what_they_cost(pairing, played, costs, ratio):
    found = pairing.ratio_of_turns(played(**costs).laps(pairing, 4), of=6)
    assert found.value == pytest.approx(ratio)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_a_step_after_another_kind_of_step_is_left_out(pairing, played):
    laps = played(in_it=0.02).laps(pairing, 4)
    for lap in laps:
        lap[::6] += 0.5
    assert pairing.ratio_of_turns(laps, of=6).value == pytest.approx(1.02)


def test_a_machine_whose_speed_changes_from_lap_to_lap_changes_nothing(pairing, played):
    clock = played(in_it=0.02)

    def between():
        clock.slow *= 1.1

    found = pairing.ratio_of_turns(clock.laps(pairing, 5, between=between), of=6)
    assert found.value == pytest.approx(1.02)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_a_step_in_which_the_machine_stops_is_one_of_many(pairing, played):
    laps = played(in_it=0.02).laps(pairing, 9)
    for number, lap in enumerate(laps[:4]):
        lap[number * 7 : number * 7 + 7] += 9.0
    assert pairing.ratio_of_turns(laps, of=6).value == pytest.approx(1.02)


@pytest.mark.parametrize("period", [3, 4, 5, 7, 9, 12, 16, 24, 40])
def test_a_machine_that_swings_after_each_rest_is_met_at_all_its_hours(pairing, played, period):
    clock = played(in_it=0.02)

    def at(count, step):
        clock.slow = 1 - 0.02 * math.sin(2 * math.pi * next(count) / period)
        step()

    def lap(later):
        count = itertools.count()
        plain, other = (partial(at, count, step) for step in (clock.plain, clock.other))
        for _ in range(later):
            plain()
        return pairing.taking_turns(other, plain, turns=4, of=6)

    found = pairing.ratio_of_turns([lap(5 * number % 12) for number in range(40)], of=6)
    assert found.value == pytest.approx(1.02, abs=0.004)
    assert found.error > abs(found.value - 1.02) / 4
    if period == 12:
        assert pairing.ratio_of_turns([lap(0)] * 40, of=6).value > 1.04  # as all of them did


@pytest.mark.parametrize("count", [8, 9, 21, 40])
def test_two_models_that_are_not_equally_fast_change_nothing_and_are_no_error(pairing, count):
    random, laps = np.random.default_rng(0), []
    for number in range(count):
        lap = np.exp(random.normal(0, 0.002, 54))
        lap.reshape(9, 6)[1::2] *= 1.02 * (1.01 if number % 2 else 1 / 1.01)
        laps.append(lap)
    found = pairing.ratio_of_turns(laps, of=6)
    assert found.value == pytest.approx(1.02, abs=0.001)
    assert found.error < 0.001


def test_the_error_is_that_of_the_laps(pairing):
    random = np.random.default_rng(0)

    def found(count):
        laps = [np.exp(random.normal(0, 0.05, 54)) for _ in range(count)]
        return pairing.ratio_of_turns(laps, of=6)

    many = [found(40) for _ in range(60)]
    spread = np.std([ratio.value for ratio in many])
    assert np.mean([ratio.value for ratio in many]) == pytest.approx(1.0, abs=4 * spread / 60**0.5)
    assert np.mean([ratio.error for ratio in many]) == pytest.approx(spread, rel=0.4)


def test_turns_are_as_long_as_they_are_said_to_be(pairing):
    lap = np.array([9.0, 1.0, 3.0, 9.0, 4.0, 8.0, 9.0, 1.0, 3.0])
    found = pairing.ratio_of_turns([lap, lap], of=3)
    assert found.value == pytest.approx((4 + 8) / 2 / 3**0.5)  # the median of logarithms
    assert pairing.plain_of([lap, lap], of=3) == [1.0, 3.0, 1.0, 3.0] * 2


def test_seconds_are_those_of_the_clock_and_told_when_all_was_asked_for(pairing):
    asked = []
    clock = pairing.Clock(lambda: len(asked), lambda earlier, later: later - earlier + len(asked) / 100)
    seconds = pairing.taking_turns(lambda: asked.extend("oo"), lambda: asked.append("p"), turns=1, of=2, clock=clock)
    assert seconds.tolist() == pytest.approx([1.08, 1.08, 2.08, 2.08, 1.08, 1.08])
    assert "".join(asked) == "ppoooopp"
