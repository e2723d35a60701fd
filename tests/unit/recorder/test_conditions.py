"""`if_value`: what meets its condition is recorded, bit for bit; what does not leaves no trace but a count."""

import math
import operator

import numpy as np
import pytest
import torch

import layerscope as ls
from layerscope.errors import BadText, Incomplete
from layerscope.recorder.conditions import Threshold, condition_of

SIGNS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne}
VALUES = [[1.0, -3.0, 0.5], [math.nan, 2.0, 0.0], [math.inf, -math.inf, 1.0], [], [math.nan]]


def by_numpy(statistic, values):
    whole = np.array(values, np.float64)
    finite = whole[np.isfinite(whole)]
    if statistic in ("count", "finite", "nan", "zeros", "inf", "nonfinite"):
        return {
            "count": whole.size,
            "finite": finite.size,
            "nan": np.isnan(whole).sum(),
            "zeros": (whole == 0).sum(),
            "inf": np.isinf(whole).sum(),
            "nonfinite": whole.size - finite.size,
        }[statistic]
    if statistic in ("l1", "l2"):
        return np.abs(finite).sum() if statistic == "l1" else np.sqrt((finite**2).sum())
    if not finite.size:
        return math.nan
    return {
        "absmax": np.abs(finite).max(),
        "max": finite.max(),
        "min": finite.min(),
        "mean": finite.mean(),
        "std": finite.std(),
        "rms": np.sqrt((finite**2).mean()),
    }[statistic]


def test_a_condition_is_what_numpy_says_of_the_statistic():
    moments = ("absmax", "max", "min", "mean", "std", "rms", "l1", "l2")
    for statistic in (*moments, "count", "finite", "nan", "zeros", "inf", "nonfinite"):
        for sign, compares in SIGNS.items():
            for number in (-1.5, 0.0, 1.0, 2.75):
                condition = Threshold.parse(f"{statistic}{sign}{number}")
                assert Threshold.parse(str(condition)) == condition
                for values in VALUES:
                    expected = bool(compares(by_numpy(statistic, values), number))
                    assert condition(torch.tensor(values)) is expected, (str(condition), values)


@pytest.mark.parametrize(
    "text", ["", "absmax", "absmax > ", "absmax > x", "median > 1", "absmax => 1", "1 < absmax", 3]
)
def test_what_is_no_condition_is_refused_in_a_sentence(text):
    with pytest.raises(BadText, match="is no condition"):
        ls.Tap("0", if_value=text)
    assert condition_of(None) is None


INPUTS = [torch.tensor([[float(at)] * 2]) for at in (1, 200, 3, 400)]


def ran(taps, *, hooks=(), **how):
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU())
    with ls.record(model, taps, **how) as rec:
        for value in INPUTS:
            model(value)
    return rec


@pytest.mark.parametrize("condition", ["absmax > 100", lambda tensor: tensor.max() > 100])
@pytest.mark.parametrize("keep", ["tensor", "summary", "both", lambda tensor: tensor * 2])
def test_only_what_meets_it_is_recorded_in_memory_and_on_disk(tmp_path, condition, keep):
    for to in (None, tmp_path / "run"):
        run = ran(ls.Tap("0", keep=keep, if_value=condition), to=to).run
        entries = list(run.records("0"))
        assert [entry.moment.step for entry in entries] == [1, 3]
        for entry, value in zip(entries, INPUTS[1::2], strict=True):
            if keep != "summary":
                assert torch.equal(entry.tensor(), value * 2 if callable(keep) else value)
            if keep in ("summary", "both"):
                assert entry.summary.absmax == float(value.max())


def test_taps_of_one_point_are_asked_each_for_itself(tmp_path):
    taps = [ls.Tap("0", keep="summary"), ls.Tap("0", keep="tensor", if_value="max >= 400")]
    run = ran(taps, to=tmp_path / "run").run
    entries = list(run.records("0"))
    assert [entry.summary is not None for entry in entries] == [True] * 4
    assert [entry.dtype is not None for entry in entries] == [False, False, False, True]


def test_a_condition_that_nothing_met_is_said_and_is_no_empty_recording():
    rec = ran([ls.Tap("0", if_value="nonfinite > 0")])
    assert [(m.point, m.reason) for m in rec.missing] == [("0:output", "its value did not meet `if_value` once in 4")]
    with pytest.raises(Incomplete, match="did not meet"):
        ran([ls.Tap("0", if_value="nonfinite > 0")], on_error="raise")


def test_a_condition_that_raises_costs_its_records_and_nothing_else():
    def broken(tensor):
        raise ValueError("no idea")

    rec = ran([ls.Tap("0", if_value=broken), "1"])
    assert [(m.point, m.reason) for m in rec.missing] == [("0:output", "ValueError: no idea")]
    assert len(list(rec.run.records("1"))) == 4


def test_a_schedule_is_asked_first_and_a_tap_prints_its_condition():
    asked = []

    def large(tensor):
        asked.append(tensor)
        return tensor.max() > 100

    tap = ls.Tap("0", when="steps(0, 1)", if_value=large)
    assert [entry.moment.step for entry in ran(tap).run.records("0")] == [1]
    assert len(asked) == 2
    assert str(tap) == "0 (when steps(0, 1), if large)"
    assert str(ls.Tap("0", if_value=" absmax>1e2")) == "0 (if absmax > 100)"
    named = ran({"big": ls.Tap("0", if_value="absmax > 100")})
    assert len(list(named.run.records("big"))) == 2


def test_gradients_and_half_precision_and_modes_are_asked_too():
    model = torch.nn.Linear(2, 2).bfloat16()
    taps = [ls.Tap(".:grad_output", if_value="absmax > 0.5"), ls.Tap(".:output", if_value="finite > 0")]
    with ls.record(model, taps) as rec:
        for scale in (0.1, 1.0):
            (model(torch.ones(1, 2).bfloat16()) * scale).sum().backward()
        with torch.inference_mode():
            model(torch.ones(1, 2).bfloat16())
    found = [(str(entry.point), entry.moment.step) for entry in rec.run.records()]
    assert sorted(found) == [(".:grad_output", 1), (".:output", 0), (".:output", 1), (".:output", 2)]
