"""The block of one row has the labels that people search for, and numpy's numbers behind them."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from compared import measured, metrics, row
from layerscope.compare.measure.metrics import Sets, Tokens
from layerscope.compare.page.bands import PUBLISHED
from layerscope.compare.page.blocks import block
from layerscope.points import Point
from layerscope.report import Document, terminal

# As the published tool prints them, in its order.
LABELS = [
    "FP32 Reference Statistics:",
    "Mean:",
    "Std:",
    "Range:",
    "Mode Output Statistics:",
    "Mean:",
    "Std:",
    "Range:",
    "Difference (Mode - FP32):",
    "Mean Diff:",
    "Std Diff:",
    "Mean Abs Diff:",
    "Max Abs Diff:",
    "Error Metrics:",
    "MSE:",
    "RMSE:",
    "MAE:",
    "Relative Metrics:",
    "Relative MSE:",
    "Relative MAE:",
    "Correlation:",
    "Absolute Difference Percentiles:",
    "50th (Median):",
    "90th:",
    "95th:",
    "99th:",
]


def page(of, **how) -> str:
    return terminal.render(Document("t", tuple(block(of, str(of), reference="fp32", bands=PUBLISHED))), **how)


def said(text: str, label: str, *, nth: int = 0) -> str:
    return re.findall(rf"^ +{re.escape(label)} +(.*)$", text, re.MULTILINE)[nth]


def test_every_published_label_is_there_in_its_order_at_the_start_of_its_line():
    lines = iter(page(row("layers.0", "noise"), width=80).splitlines())
    assert "Layer 0 - Comparison Results" in lines
    for label in LABELS:
        assert any(line.strip().startswith(label) for line in lines), label


def test_the_numbers_are_those_of_numpy():
    rng = np.random.default_rng(0)
    r = rng.normal(size=(2, 5, 7))
    c = r + 0.01 * rng.normal(size=r.shape)
    d = c - r
    text = page(row("layers.0", "noise", metrics=measured(r, c)))
    assert float(said(text, "Mean:")) == pytest.approx(r.mean(), abs=1e-6)
    assert float(said(text, "Std:", nth=1)) == pytest.approx(c.std(), abs=1e-6)
    assert [float(x) for x in said(text, "Range:")[1:-1].split(",")] == pytest.approx([r.min(), r.max()], abs=1e-6)
    assert float(said(text, "Max Abs Diff:")) == pytest.approx(abs(d).max(), abs=1e-6)
    assert float(said(text, "MSE:")) == pytest.approx((d**2).mean(), rel=1e-6)
    assert float(said(text, "RMSE:")) == pytest.approx(math.sqrt((d**2).mean()), rel=1e-3)
    assert float(said(text, "Correlation:")) == pytest.approx(np.corrcoef(r.ravel(), c.ravel())[0, 1], abs=1e-8)
    assert float(said(text, "99th:")) == pytest.approx(np.percentile(abs(d), 99), abs=1e-6)
    at = np.unravel_index(abs(d).argmax(), d.shape)
    assert said(text, "Worst Element:") == f"[{', '.join(map(str, at))}]: {r[at]:.6f} → {c[at]:.6f}"


def test_relative_errors_have_their_percent_beside_them():
    text = page(row("a", "noise", metrics=metrics(relative_mse=1.234567e-3, relative_mae=0.05)))
    assert said(text, "Relative MSE:") == "1.234567e-03 ( 0.123%)"
    assert said(text, "Relative MAE:") == "5.000000e-02 ( 5.000%)"


def test_the_bound_of_the_percentiles_is_said():
    assert said(page(row("a", "noise", metrics=metrics(percentile_bound=0.0))), "Bound:") == "exact"
    assert "within 0.78%" in said(page(row("a", "noise", metrics=metrics(percentile_bound=0.0078))), "Bound:")


def test_the_judgement_its_reason_and_the_bands_come_first():
    text = page(row("a", "root", error=0.5, because="it is 500 times the floor", metrics=metrics(mse=5e-4)))
    assert said(text, "Kind:") == "root"
    assert said(text, "Reason:") == "it is 500 times the floor"
    assert said(text, "Ratio to Floor:") == "500.0 (floor 0.001000, estimate)"
    assert said(text, "Bands:").startswith("MSE good, correlation ")


def test_what_is_not_finite_is_counted_on_its_side():
    text = page(row("a", "nonfinite", metrics=metrics(nan=2)))
    assert said(text, "Not Finite:") == "2 of 8 elements, 2 differ, first at [0]"
    assert said(text, "Not Finite:", nth=1) == "2 NaN"
    assert "Not Finite:" not in page(row("a", "noise"))


def test_tokens_sets_dtypes_and_other_names_are_shown_where_there_are_any():
    m = metrics(tokens=Tokens(64, 27, 0.5, 0.001, 0.002), sets=Sets(32, 3, 1, 0.97))
    m = replace(m, candidate=replace(m.candidate, dtype="bfloat16"))
    text = page(row("a", "root", metrics=m, counterpart=Point("b"), method="order"))
    assert said(text, "Worst Token:") == "number 27 of 64, relative L2 0.5000 (median 0.001000, 90th 0.002000)"
    assert said(text, "Changed Sets:") == "3 of 32, 1 more in another order; 97.0% shared"
    assert said(text, "Shape:") == "8, float32 and bfloat16"
    assert said(text, "Paired With:") == "b:output (order)"
    plain = page(row("a", "noise", metrics=metrics()))
    assert not any(word in plain for word in ("Worst Token:", "Changed Sets:", "Paired With:"))


def test_what_is_undefined_is_written_as_nan_and_infinity_as_inf():
    text = page(row("a", "same", metrics=metrics(correlation=math.nan, sqnr=math.inf, max_relative=math.inf)))
    assert said(text, "Correlation:") == "nan"
    assert said(text, "SQNR:") == "inf dB"
    assert said(text, "Max Relative Diff:") == "inf"
