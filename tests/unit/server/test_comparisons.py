"""Comparisons that are asked for on the page: how far they are, what they found, what the next server knows."""

import shutil
import threading

import pytest
import torch
from torch import nn

from layerscope.compare import comparing
from layerscope.recorder import record
from layerscope.server.comparisons import KEPT, Comparisons


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs that differ in their second layer."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for name in ("good", "bad"):
        with record(model, ["0", "1"], to=folder / name, keep="both"):
            model(torch.ones(2, 4))
        with torch.no_grad():
            model[1].weight *= 2
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def done(comparisons, id):
    """Wait for the end; the worker is a thread."""
    for _ in range(2000):
        if comparisons.stamp(id) == "done":
            return comparisons.page(id)
        threading.Event().wait(0.01)
    pytest.fail(f"not done: {comparisons.stamp(id)}")


def test_how_far_it_is_stands_on_its_page_and_then_what_it_found(folder, monkeypatch):
    real, told, go = comparing.compare, threading.Event(), threading.Event()

    def held(*runs, progress):
        progress("model.layers.3</script>\n", 3, 7)
        told.set()
        assert go.wait(20)
        return real(*runs, progress=progress)

    monkeypatch.setattr(comparing, "compare", held)
    comparisons = Comparisons(folder)
    id = comparisons.start([folder / "good", folder / "bad"])
    assert told.wait(20)
    waiting = comparisons.page(id)
    assert "comparing: 3 of 7, model.layers.3&lt;/script&gt;\\u000a" in waiting
    assert comparisons.start([folder / "good", folder / "bad"]) == id  # asked twice, done once
    go.set()
    assert "bad differs from good" in done(comparisons, id)
    comparisons.close()


def test_the_next_server_of_the_folder_knows_what_was_found_and_no_other(folder, tmp_path):
    first = Comparisons(folder)
    id = first.start([folder / "good", folder / "bad"])
    found = done(first, id)
    first.close()
    again = Comparisons(folder)
    assert done(again, id).partition("<main>")[2] == found.partition("<main>")[2]
    assert [row[1].value for row in again.parts()[1].rows] == ["differs"]
    again.close()
    other = Comparisons(tmp_path)
    assert other.page(id) is None
    other.close()


def test_a_file_that_does_not_read_is_forgotten(folder, cache):
    first = Comparisons(folder)
    done(first, first.start([folder / "good", folder / "bad"]))
    first.close()
    (kept,) = cache.rglob("*.json")
    kept.write_text('{"format": "')
    again = Comparisons(folder)
    for _ in range(2000):
        if not again.parts():
            break
        threading.Event().wait(0.01)
    assert again.parts() == []
    again.close()


def test_what_cannot_be_compared_says_why(folder, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    shutil.copytree(folder / "bad", tmp_path / "bad")
    comparisons = Comparisons(tmp_path)
    said = done(comparisons, comparisons.start([tmp_path / "gone", tmp_path / "bad"]))
    assert "not compared</h1>" in said
    assert "is not a run" in said.partition("<main>")[2]

    def broken(*runs, progress):
        raise RuntimeError("out of ideas")

    monkeypatch.setattr(comparing, "compare", broken)
    said = done(comparisons, comparisons.start([tmp_path / "bad", tmp_path / "gone"]))
    assert "comparing raised RuntimeError: out of ideas" in said
    comparisons.close()


def test_no_more_are_remembered_than_so_many(folder, monkeypatch):
    monkeypatch.setattr(comparing, "compare", None)
    comparisons = Comparisons(folder)
    ids = [comparisons.start([folder / "good", folder / "bad", folder / str(n)]) for n in range(KEPT + 3)]
    assert [comparisons.page(id) is None for id in ids] == [True] * 3 + [False] * KEPT
    comparisons.close()
