"""Summary: what it derives, how it adds up, how it is written."""

import json
import math

import numpy as np
import pytest
import torch

from layerscope.errors import BadText, Unsupported
from layerscope.stats import Summary, summarize

HOSTILE = [
    torch.randn(2000),
    torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45, 3.4e38]),
    torch.full((5,), math.nan),
    torch.empty(0, 3),
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.tensor([1e308, -1e308], dtype=torch.float64),
    torch.arange(300, dtype=torch.int16),
    torch.tensor([1 + 2j, math.nan]),
]


@pytest.mark.parametrize("level", ["moments", "full"])
@pytest.mark.parametrize("tensor", HOSTILE, ids=lambda t: f"{t.dtype}-{tuple(t.shape)}")
def test_json_is_strict_and_reads_back_to_the_bit(tensor, level):
    summary = summarize(tensor, level=level)
    text = json.dumps(summary.to_json(), allow_nan=False)
    back = Summary.from_json(json.loads(text))
    assert back == summary
    for name in ("mean", "std", "min", "max", "l1"):
        assert np.float64(getattr(back, name)).tobytes() == np.float64(getattr(summary, name)).tobytes()
    assert (back.sketch, back.fingerprint, back.placed) == (summary.sketch, summary.fingerprint, summary.placed)
    assert back.row().keys() == summary.row().keys()


def test_numbers_json_does_not_have_are_named():
    data = summarize(torch.tensor([math.nan, math.inf, -math.inf])).to_json()
    assert data["first"] == ["NaN", "Infinity", "-Infinity"]
    assert data["mean"] == "NaN"
    assert len(data["fingerprint"]) == 16


@pytest.mark.parametrize("data", [{}, {"count": 1}, {**summarize(np.ones(2)).to_json(), "mean": "x"}])
def test_what_is_no_summary_is_refused(data):
    with pytest.raises(BadText, match="not a summary"):
        Summary.from_json(data)


def test_a_damaged_sketch_inside_a_summary_is_refused():
    with pytest.raises(BadText, match="is not a sketch"):
        Summary.from_json({**summarize(np.ones(2)).to_json(), "sketch": "AAAA"})


def test_summaries_are_equal_when_every_bit_is():
    a, b = torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan])
    assert summarize(a) == summarize(b)
    assert hash(summarize(a)) == hash(summarize(b))
    assert summarize(a) != summarize(-b)
    assert summarize(a) != summarize(a, level="moments")
    assert summarize(torch.tensor([0.0])) != summarize(torch.tensor([-0.0]))
    assert summarize(a) != "a summary"


def test_the_sum_is_the_summary_of_both():
    a, b = torch.randn(1000) * 3 + 1, torch.randn(400) - 100
    both, merged = summarize(torch.cat([a, b])), summarize(a) + summarize(b)
    assert merged.sketch == both.sketch
    assert merged.fingerprint == both.fingerprint
    assert (merged.count, merged.min, merged.max, merged.tensors) == (1400, both.min, both.max, 2)
    for name in ("mean", "std", "l1", "l2", "rms"):
        assert getattr(merged, name) == pytest.approx(getattr(both, name), rel=1e-13, abs=0.0)
    assert merged.percentiles == both.percentiles


def test_two_constant_halves_have_the_spread_between_them():
    merged = summarize(torch.full((10,), 5.0)) + summarize(torch.full((10,), -5.0))
    assert (merged.mean, merged.std, merged.rms) == (0.0, 5.0, 5.0)


def test_adding_a_constant_to_itself_keeps_it_exact():
    summary = sum(summarize(torch.full((n,), 0.1)) for n in (3, 7, 11, 1))
    assert (summary.mean, summary.std) == (np.float32(0.1), 0.0)


def test_sum_starts_from_nothing():
    parts = [summarize(torch.randn(5)) for _ in range(3)]
    assert sum(parts) == parts[0] + parts[1] + parts[2]
    with pytest.raises(TypeError):
        parts[0] + 3
    with pytest.raises(TypeError):
        3 + parts[0]


def test_huge_values_merge_without_overflow():
    a, b = (summarize(torch.tensor([x, x / 2], dtype=torch.float64)) for x in (1e308, -1e308))
    assert (a + b).mean == 0.0
    assert (a + b).std == pytest.approx(1e308 * math.sqrt(0.625), rel=1e-14)


def test_what_the_parts_do_not_share_is_not_kept():
    a, b, c = torch.ones(2, 3), torch.ones(3, 2), torch.zeros(2, 3)
    assert (summarize(a) + summarize(b)).shape is None
    assert (summarize(a) + summarize(c)).shape == (2, 3)
    assert (summarize(a) + summarize(a.half())).dtype == "mixed"
    assert (summarize(a) + summarize(b)).first == (1.0,) * 6
    assert (summarize(a) + summarize(c)).first == ()
    assert (summarize(a) + summarize(torch.empty(0))).first == (1.0,) * 6
    nan = torch.tensor([math.nan, 2.0])
    assert (summarize(nan) + summarize(nan)).first[1] == 2.0


def test_a_cheap_summary_makes_the_sum_cheap():
    merged = summarize(torch.ones(3)) + summarize(torch.ones(3), level="moments")
    assert (merged.sketch, merged.fingerprint, merged.placed, merged.percentiles) == (None, None, None, {})
    assert merged.mean == 1.0
    with pytest.raises(Unsupported, match='level="full"'):
        merged.percentile(50)
    with pytest.raises(Unsupported, match='level="full"'):
        merged.histogram()
    assert merged.row()["p50"] is None


@pytest.mark.parametrize("q", [-1, 101])
def test_a_percentile_outside_0_and_100_is_refused(q):
    with pytest.raises(ValueError, match="between 0 and 100"):
        summarize(torch.ones(3)).percentile(q)


def test_percentiles_are_numpys_within_the_bound():
    values = torch.randn(10_000).exp()
    summary = summarize(values)
    for q in (0, 1, 5, 50, 95, 99, 100):
        assert summary.percentile(q) == pytest.approx(np.percentile(values.double().numpy(), q), rel=2**-7, abs=0.0)
    assert (summary.percentile(0), summary.percentile(100)) == (summary.min, summary.max)


def test_a_row_is_flat_and_names_everything():
    row = summarize(torch.arange(20.0)).row()
    assert {
        *(
            "count",
            "finite",
            "nan",
            "posinf",
            "neginf",
            "zeros",
            "mean",
            "std",
            "min",
            "max",
            "absmax",
            "l1",
            "l2",
            "rms",
        ),
        *("has_nan", "has_inf", "p1", "p5", "p50", "p95", "p99", "first_10", "fingerprint", "placed", "dtype", "shape"),
        "tensors",
    } == set(row)
    assert row["first_10"] == [float(i) for i in range(10)]
    assert row["absmax"] == 19.0
    assert len(row["fingerprint"]) == len(row["placed"]) == 16


def test_a_summary_cannot_be_changed():
    with pytest.raises(AttributeError):
        summarize(torch.ones(2)).mean = 3.0
