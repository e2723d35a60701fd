"""Metrics go through strict JSON and come back, whatever is in them."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from layerscope.compare.measure import measure
from layerscope.compare.measure.metrics import PERCENTILES, Metrics, Side
from layerscope.store import strictjson

X = np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float32)
BROKEN = X.copy()
BROKEN[1, 2, 3], BROKEN[0, 0, 0] = np.nan, np.inf
PAIRS = {
    "finite": (X, X * np.float32(1.25)),
    "equal, so that the SQNR is infinite and nothing is worst": (X, X.copy()),
    "not finite on one side": (X, BROKEN),
    "a reference of zeros, so that ratios are NaN": (np.zeros_like(X), X),
    "empty": (np.empty((0, 4)), np.empty((0, 4))),
    "a single number": (np.float64(1.5).reshape(()), np.float64(2.5).reshape(())),
    "choices": (np.array([[0, 1], [2, 3]]), np.array([[1, 0], [2, 4]])),
    "two dtypes": (torch.from_numpy(X), torch.from_numpy(X).bfloat16()),
    "complex": (X + 1j * X, X - 1j * X),
}


def same(a, b):
    """Compare field by field; a NaN is itself here."""
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_metrics_read_back_from_strict_json(pair):
    metrics = measure(*map(torch.as_tensor, pair))
    back = Metrics.from_json(strictjson.loads(strictjson.dumps(metrics.to_json())))
    assert same(back, metrics)


def test_what_is_compared_above_would_be_noticed():
    metrics = measure(*PAIRS["finite"])
    assert not same(replace(metrics, mse=0.0), metrics)
    assert not same(replace(metrics, tokens=None), metrics)
    assert not same(replace(metrics, shape=list(metrics.shape)), metrics)


def test_the_special_cases_are_really_there():
    found = {name: measure(*map(torch.as_tensor, pair)) for name, pair in PAIRS.items()}
    assert len(found["finite"].tokens.largest) == 12
    assert found["equal, so that the SQNR is infinite and nothing is worst"].worst is None
    assert math.isinf(found["equal, so that the SQNR is infinite and nothing is worst"].sqnr)
    assert found["not finite on one side"].nonfinite.first == (0, 0, 0)
    assert math.isnan(found["a reference of zeros, so that ratios are NaN"].relative_l2)
    assert (found["choices"].sets.changed, found["choices"].sets.reordered) == (1, 1)


def test_derived_values_stand_beside_the_stored_ones():
    r, c = X.astype(np.float64), (X * np.float32(1.25)).astype(np.float64)
    value = measure(*PAIRS["finite"]).to_json()
    assert value["rmse"] == pytest.approx(np.sqrt(np.mean((c - r) ** 2)), rel=1e-9)
    assert value["mean_abs"] == value["mae"] == pytest.approx(np.mean(abs(c - r)), rel=1e-9)
    assert value["fraction_equal"] == np.mean(r == c)
    assert len(value["percentiles"]) == len(PERCENTILES)


def test_an_empty_tensor_is_equal_throughout():
    assert measure(*PAIRS["empty"]).fraction_equal == 1.0
    assert measure(*PAIRS["choices"]).fraction_equal == 0.25


@pytest.mark.parametrize(
    ("odd", "finite"), [({}, True), ({"nan": 1}, False), ({"posinf": 1}, False), ({"neginf": 1}, False)]
)
def test_a_side_is_finite_unless_something_in_it_is_not(odd, finite):
    counts = {"nan": 0, "posinf": 0, "neginf": 0, "zeros": 3} | odd
    assert Side("float32", 0.0, 1.0, -1.0, 1.0, 1.0, 0.5, **counts).finite is finite


@pytest.mark.parametrize("lost", ["shape", "nonfinite", "tokens", "mse"])
def test_a_value_that_is_not_there_is_an_error(lost):
    value = measure(*PAIRS["finite"]).to_json()
    del value[lost]
    with pytest.raises(KeyError, match=lost):
        Metrics.from_json(value)
