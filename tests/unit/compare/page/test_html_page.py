"""The page of a comparison: what stands on it is what numpy says of the tensors, and nothing is left out unsaid."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from layerscope.compare import compare
from layerscope.compare.page.closeups import CURVES, CloseUps
from layerscope.compare.page.document import document
from layerscope.compare.page.html_page import TALL, curves, page
from layerscope.compare.page.saved import loads
from layerscope.compare.result import Verdict
from layerscope.errors import BadText
from layerscope.recorder import record
from layerscope.report import Curves, Facts, Fold, HeatMap, Histograms, Select, Sentence, Table, html
from layerscope.report import json as as_json


def walk(parts):
    for part in parts:
        yield part
        if isinstance(part, Fold):
            yield from walk(part.parts)
        elif isinstance(part, Select):
            for _, chosen in part.options:
                yield from walk(chosen)


def of(document, kind):
    return [part for part in walk(document.parts) if isinstance(part, kind)]


def text(document):
    return " ".join(part.text for part in of(document, Sentence))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A model of four layers, the same, and one whose third layer is scaled: six tokens of eight channels."""
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    inputs = torch.randn(2, 6, 8)
    for name in ("good", "same", "bad"):
        if name == "bad":
            with torch.no_grad():
                model[2].weight *= 1.5
        with record(model, ["0", "1", "2", "3"], to=folder / name):
            model(inputs)
    return folder


@pytest.fixture(scope="module")
def both(runs):
    return compare(runs / "good", runs / "same", runs / "bad")


@pytest.fixture(scope="module")
def drawn(both):
    return page(both)


def tensors(runs, name):
    from layerscope.store import open_run

    return tuple(open_run(runs / side).tensor(name).double().numpy() for side in ("good", "bad"))


def test_the_verdict_is_said_first_and_names_where_it_begins(drawn, runs):
    first = drawn.parts[0]
    assert isinstance(first, Sentence)
    assert first.text.startswith("1 of 2 candidates differ from good; the first divergence is 2, in bad: ")
    assert " rests on equal bits" in text(drawn)
    alike = page(compare(runs / "good", runs / "same", runs / "same"))
    assert alike.parts[0].text == "no candidate differs from good: 2 equal bit for bit"


def test_the_error_over_depth_is_that_of_the_tensors(both, runs):
    (picture,) = curves(both)
    assert picture.labels == ("0", "1", "2", "3")
    bad = next(line for line in picture.lines if line.name == "bad")
    for at, value in enumerate(bad.values):
        a, b = tensors(runs, str(at))
        assert value == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-6)
    same = next(line for line in picture.lines if line.name == "same")
    assert same.values == (0.0, 0.0, 0.0, 0.0)


def test_candidates_of_one_arithmetic_share_a_band_and_each_other_has_its_own(tmp_path):
    torch.manual_seed(0)
    model, inputs = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), torch.randn(8, 16)
    with record(model, "*", to=tmp_path / "fp32", floors=True):
        model(inputs)
    for name, dtype, scale in (("half", torch.bfloat16, 1.0), ("off", torch.float32, 1.5), ("late", torch.float32, 2)):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other[2 if name == "late" else 0].weight *= scale
        with record(other.to(dtype), "*", to=tmp_path / name):
            other(inputs.to(dtype))
    compared = compare(tmp_path / "fp32", *(tmp_path / name for name in ("half", "off", "late")))
    (picture,) = curves(compared)
    floors = {line.name: line.floor for line in picture.lines}
    assert [bool(floors[name]) for name in ("half", "off", "late")] == [True, True, False]
    known = {str(row): row.floor.error for row in compared["off"].rows if row.floor}
    assert floors["off"] == pytest.approx([known[name] for name in picture.labels])


def test_where_it_cannot_be_told_nothing_is_said_to_agree(both):
    unsure = replace(both.candidates[0], verdict=Verdict("cannot tell", "only statistics were kept"))
    said = page(replace(both, candidates=(unsure, both.candidates[0]))).parts[0]
    assert said == Sentence(
        "whether 1 of 2 candidates agree with good cannot be told: only statistics were kept", "warn"
    )


def test_a_row_says_how_it_was_paired(drawn, runs):
    row = next(part for part in of(drawn, Fold) if part.key)
    assert Sentence("paired with the point of its name", "quiet") in row.parts


def test_the_map_has_a_cell_for_each_layer_and_candidate_by_each_measure(drawn):
    maps = {part.title: part for part in of(drawn, HeatMap)}
    assert {"relative L2", "max abs", "MSE"} <= set(maps)
    for one in maps.values():
        assert (one.rows, one.columns) == (("0", "1", "2", "3"), ("same", "bad"))
        assert one.values[0][0] in (0.0, None)


def test_a_map_taller_than_a_picture_shows_the_worst_of_neighbours_and_says_so(both):
    from layerscope.compare.page.html_page import _map

    values = [(float(n),) for n in range(3 * TALL)]
    said, drawn = _map("x", [f"layer{n}" for n in range(3 * TALL)], ("m",), values, log=False)
    assert "worst of 3" in said.text
    assert [row[0] for row in drawn.values] == [float(3 * n + 2) for n in range(TALL)]


def test_the_tree_has_every_module_with_the_worst_inside(drawn):
    tree = [part for part in of(drawn, Table) if part.key == "tree"][1]
    assert [(row[0].text, row[1].value) for row in tree.rows][2] == ("2", "root")


def test_every_row_stands_in_the_table_and_opens(drawn):
    (rows,) = (part for part in of(drawn, Table) if part.key == "rows")
    assert len(rows.rows) == 8
    folds = {part.key: part.title for part in of(drawn, Fold) if part.key}
    assert sorted(folds) == sorted(rows.opens)
    for row, key in zip(rows.rows, rows.opens, strict=True):
        assert folds[key].startswith(f"{row[0].value} in {row[1].value}: ")


def test_an_open_row_shows_the_histograms_the_worst_elements_and_the_errors_that_numpy_gives(drawn, runs):
    a, b = tensors(runs, "3")
    (fold,) = (part for part in of(drawn, Fold) if part.title.startswith("3 in bad"))
    (pair,) = (part for part in walk(fold.parts) if isinstance(part, Histograms))
    for values, (_, counts) in zip((a, b), pair.counts, strict=True):
        assert counts == tuple(np.histogram(values, pair.edges)[0])
        assert sum(counts) == values.size
    (worst,) = (part for part in walk(fold.parts) if isinstance(part, Facts) and part.key == "worst")
    order = np.argsort(-abs(b - a), axis=None)[:5]
    assert [fact.label for fact in worst.items] == [str([*map(int, np.unravel_index(n, a.shape))]) for n in order]
    errors = {part.title: part.lines[0].values for part in walk(fold.parts) if isinstance(part, Curves)}
    tokens = np.linalg.norm(b - a, axis=-1) / np.linalg.norm(a, axis=-1)
    assert errors["error of each token"] == pytest.approx(tokens.reshape(-1), rel=1e-5)
    channels = np.linalg.norm(b - a, axis=(0, 1)) / np.linalg.norm(a, axis=(0, 1))
    assert errors["error of each channel"] == pytest.approx(channels, rel=1e-5)


def test_what_made_the_runs_stands_at_the_end(drawn, runs):
    facts = [part for part in of(drawn, Facts) if part.key == "provenance"]
    assert [part.title for part in facts] == ["good", "same", "bad"]
    labels = {fact.label: fact.value for fact in facts[0].items}
    assert labels["address"] == str(runs / "good")
    assert labels["taps"]
    assert "layerscope compare" in text(drawn)


def test_what_a_run_lacks_is_listed_with_its_reason(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for name, forward in (("whole", model), ("part", model[0])):
        with record(model, ["0", "1"], to=tmp_path / name):
            forward(torch.ones(2, 4))
    drawn = page(compare(tmp_path / "whole", tmp_path / "part"))
    (lacks,) = (part for part in of(drawn, Fold) if part.title == "what part lacks")
    (table,) = lacks.parts
    assert [[cell.value for cell in row] for row in table.rows] == [["1:output", "never called"]]


def test_runs_that_are_gone_leave_a_page_that_says_what_it_lacks(both):
    from dataclasses import replace

    gone = replace(both, address="/nowhere/at/all")
    drawn = page(gone)
    assert not of(drawn, Histograms)
    assert "8 rows without histograms and worst elements: a run is no longer where it was" in text(drawn)
    assert "is no longer there" in text(drawn)


def test_a_tensor_too_large_for_a_page_is_not_read_and_that_is_said(both, monkeypatch):
    monkeypatch.setattr("layerscope.compare.page.closeups.ELEMENTS", 300)
    assert "too large to be read for a page" in text(page(both))
    monkeypatch.setattr("layerscope.compare.page.closeups.ELEMENTS", 96 * 4)
    assert len(of(page(both), Histograms)) == 4


def test_many_rows_have_histograms_and_few_have_curves(both, monkeypatch):
    monkeypatch.setattr("layerscope.compare.page.closeups.CURVES", 1)
    drawn = page(both)
    assert sum(part.key == "curve" for part in of(drawn, Curves)) == 2
    assert "shown for the first 1 rows" in text(drawn)
    assert CURVES > 1
    assert CloseUps(both)


def test_rows_that_do_not_open_are_said_to(both, monkeypatch):
    monkeypatch.setattr("layerscope.compare.page.html_page.DETAILED", 3)
    drawn = page(both)
    assert "5 rows of 8 do not open" in text(drawn)
    assert sum(bool(part.key) for part in of(drawn, Fold)) == 3


def test_to_html_writes_it_and_a_notebook_shows_its_beginning(both, tmp_path):
    both.to_html(tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text("utf-8").startswith("<!doctype html>")
    shown = both._repr_html_()
    assert "<script" not in shown
    assert "1 of 2 candidates differ" in shown
    assert "<figure" in shown


def test_a_saved_comparison_reads_back_as_it_was(both):
    saved = as_json.render(document(both))
    again = loads(saved)
    assert again == both
    assert html.render(page(again)).replace(saved, "") is not None


@pytest.mark.parametrize("broken", ["", "[]", "{}", '{"reference": 1}', "NaN", "[" * 100_000])
def test_what_is_no_saved_comparison_is_refused_in_a_sentence(broken):
    with pytest.raises(BadText, match="no saved comparison"):
        loads(broken)


def test_a_saved_comparison_of_another_version_is_refused(both):
    value = json.loads(as_json.render(document(both)))
    value["rows"][0]["kind"] = "invented"
    with pytest.raises(BadText, match="invented"):
        loads(json.dumps(value))


def test_numbers_that_json_has_no_word_for_read_back(runs, tmp_path):
    model = nn.Identity()
    for name, value in (("a", 1.0), ("b", float("nan"))):
        with record(model, ".", to=tmp_path / name):
            model(torch.full((2, 3), value))
    found = compare(tmp_path / "a", tmp_path / "b")
    again = loads(as_json.render(document(found)))
    assert repr(again) == repr(found)  # NaN is not equal to itself
    assert "nan" in repr(found)
