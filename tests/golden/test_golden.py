"""Runs written by released format versions: today's code reads them. Every value here is written by hand."""

from __future__ import annotations

import json
import math
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from layerscope.errors import Ambiguous, NotARun
from layerscope.points import Moment, Point
from layerscope.store import Dropped, Missing, open_run, recover

V2 = Path(__file__).with_name("v2")


@pytest.fixture(params=["as the kill left it", "recovered"])
def run(request, tmp_path):
    shutil.copytree(V2, tmp_path / "v2")
    if request.param == "recovered":
        done = recover(tmp_path / "v2")
        assert (done.sealed, done.records, done.verified) == (1, 9, 17)
        assert [damage.acknowledged for damage in done.lost] == [False]
    return open_run(tmp_path / "v2")


def test_the_manifest(run):
    manifest = run.manifest
    assert (manifest.model, manifest.mode, manifest.seed) == ({"class": "Tiny", "layers": 2}, "fp32", 7)
    assert manifest.settings == {"threshold": math.inf, "text": "NaN"}
    assert manifest.weights == {"blocks.0": "0123456789abcdef0123456789abcdef"}
    assert manifest.started == "2026-11-18T06:00:00+00:00"
    assert run.missing == [Missing("blocks.1:output", "never called")]
    assert run.state in ("recording", "recovered")


def test_the_points_in_recorded_order(run):
    kinds = ["float32", "bfloat16", "float16", "float64", "int8", "int64", "bool", "complex64"]
    assert run.points == [
        *(Point("kinds", leaf=(kind,)) for kind in kinds),
        Point("blocks.0"),
        Point("seen.again", "input"),
        Point("blocks.1", "input", ("hidden_states", 0)),
        Point("replaced"),
        Point("../../x</script>\n"),
        Point("aten.softmax", op=True),
    ]
    assert len(run) == 17
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


def test_a_tensor_that_was_stored_once_and_seen_twice(run):
    assert run.tensor("seen.again:input").tolist() == [20, 21, 22, 23]
    assert run.tensor("seen.again:input", rows=slice(1, 3)).tolist() == [21, 22]


def test_the_losses(run):
    if run.state == "recovered":  # until then they are in the journal
        assert run.dropped == [Dropped("blocks.1:output", 3, "there was no room", "step=0")]
    assert not run.complete


def test_the_table_with_nothing_but_safetensors(tmp_path):
    with safe_open(V2 / "rank-00000/segment-00000.safetensors", "np") as file:
        assert file.metadata() == {"format": "layerscope", "version": "2", "rank": "0"}
        assert file.get_tensor("table.record").tolist() == list(range(8))
        assert json.loads(zlib.decompress(file.get_tensor("table.points").tobytes()))[:2] == [
            "kinds:output[float32]",
            "kinds:output[bfloat16]",
        ]
        assert file.get_tensor("00000003").tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("made", ["run.json", "journal"])
def test_the_first_format_was_never_released_and_is_refused_in_a_sentence(tmp_path, made):
    (tmp_path / "rank-00000").mkdir()
    (tmp_path / "rank-00000/journal").write_text('{"format":"layerscope","version":1,"rank":0,"run":"a","check":"0"}\n')
    (tmp_path / "run.json").write_text('{\n "format": "layerscope",\n "version": 1,\n "mode": null\n}\n')
    if made == "journal":
        (tmp_path / "run.json").unlink()
    with pytest.raises(NotARun) as told:
        open_run(tmp_path)
    assert "\n" not in str(told.value)
    if made == "run.json":
        assert "written by format 1, which was never released; record it again" in str(told.value)


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


def test_the_channels(run):
    channels = next(run.records("blocks.0", step=1)).summary.channels
    assert (channels.axis, channels.mean.tolist()) == (0, [10, 11, 12, 13])


def test_the_torn_frame_is_named_until_it_is_recovered(run):
    torn = [note for note in run.notes if "torn" in note]
    assert len(torn) == (1 if run.state == "recording" else 0)
    assert run.damaged == []
