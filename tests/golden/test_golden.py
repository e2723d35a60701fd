"""Runs written by released format versions: today's code reads them. Every value here is written by hand."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from layerscope.errors import Ambiguous
from layerscope.points import Moment, Point
from layerscope.store import Missing, open_run, recover

V1 = Path(__file__).with_name("v1")


@pytest.fixture(params=["as the kill left it", "recovered"])
def run(request, tmp_path):
    shutil.copytree(V1, tmp_path / "v1")
    if request.param == "recovered":
        done = recover(tmp_path / "v1")
        assert (done.sealed, done.records, len(done.lost)) == (1, 7, 1)
    return open_run(tmp_path / "v1")


def test_the_manifest(run):
    manifest = run.manifest
    assert (manifest.model, manifest.mode, manifest.seed) == ({"class": "Tiny", "layers": 2}, "fp32", 7)
    assert manifest.settings == {"threshold": math.inf, "text": "NaN"}
    assert manifest.weights == {"blocks.0": "0123456789abcdef0123456789abcdef"}
    assert manifest.started == "2026-11-15T06:00:00+00:00"
    assert run.missing == [Missing("blocks.1:output", "never called")]
    assert run.state in ("recording", "recovered")


def test_the_points_in_recorded_order(run):
    kinds = ["float32", "bfloat16", "float16", "float64", "int8", "int64", "bool", "complex64"]
    assert run.points == [
        *(Point("kinds", leaf=(kind,)) for kind in kinds),
        Point("blocks.0"),
        Point("blocks.1", "input", ("hidden_states", 0)),
        Point("replaced"),
        Point("../../x</script>\n"),
        Point("aten.softmax", op=True),
    ]
    assert len(run) == 16
    assert run.replaced == 1


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float64", "int8", "int64", "bool", "complex64"])
def test_the_dtypes(run, kind):
    tensor = run.tensor(f"kinds[{kind}]")
    assert tensor.dtype == getattr(torch, kind)
    expected = [[False, True, True], [True, True, True]] if kind == "bool" else [[0, 1, 2], [3, 4, 5]]
    assert tensor.tolist() == expected
    assert run.tensor(f"kinds[{kind}]", rows=slice(1, 2)).tolist() == expected[1:]


def test_the_moments(run):
    assert run.tensor("blocks.0", step=2).tolist() == [20, 21, 22, 23]
    assert run.tensor("first", epoch=1, step=1).tolist() == [10, 11, 12, 13]
    assert run.tensor("blocks.0", rank=1).tolist() == [0, -1, -2, -3]
    with pytest.raises(Ambiguous, match="4 moments"):
        run.tensor("blocks.0")
    assert run.tensor("blocks.1:input", call=2).item() == 2.5
    assert Moment(epoch=1, step=2, batch=2) in run.moments


def test_the_later_record_counts(run):
    assert run.tensor("replaced").tolist() == [1, 1]


def test_the_hostile_name(run):
    assert run.tensor("../../x</script>\n").shape == (0, 3)


def test_the_summaries_and_notes(run):
    entry = next(run.records("blocks.0", step=0, rank=0))
    assert (entry.summary.count, entry.summary.mean, entry.summary.min, entry.summary.max) == (4, 1.5, 0, 3)
    assert math.isnan(entry.note["scale"])
    assert entry.note["text"] == "NaN"
    softmax = run.summary("op:aten.softmax")
    assert (softmax.count, softmax.nan, softmax.mean) == (2, 1, 1.0)
    assert run.summary("blocks.0", step=2).mean == 21.5
    assert run.summary("kinds[int64]").max == 5


def test_the_torn_line_is_named_until_it_is_recovered(run):
    torn = [note for note in run.notes if "torn" in note]
    assert len(torn) == (1 if run.state == "recording" else 0)
    assert run.damaged == []
