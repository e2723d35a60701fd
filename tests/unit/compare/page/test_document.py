"""The page of a comparison: the verdict on top, the evidence below, everything in JSON."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.cells import cell_len

from compared import against, comparison, measured, metrics, row
from layerscope.compare.measure.metrics import Metrics
from layerscope.compare.page.bands import PUBLISHED, Bands
from layerscope.compare.page.document import document
from layerscope.compare.result import Against, Verdict
from layerscope.points import Moment, Point
from layerscope.report import Table, markdown, terminal
from layerscope.report import json as as_json


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def data(of, **how) -> dict:
    return json.loads(as_json.render(document(of, **how)), parse_constant=refuse)


def page(of, width: int | None = None, **how) -> str:
    return terminal.render(document(of, **how), width=width)


def healthy(name: str = "bf16", layers: int = 24, error: float = 1e-4):
    return against(name, [row(f"layers.{i}", "noise", error=error * (1 + i)) for i in range(layers)])


def faulty(name: str = "int8", layers: int = 24, at: int = 7):
    kinds = ["noise"] * at + ["root"] + ["inherited"] * (layers - at - 1)
    errors = [1e-4 if i < at else 0.5 for i in range(layers)]
    return against(name, [row(f"layers.{i}", k, error=e) for i, (k, e) in enumerate(zip(kinds, errors, strict=True))])


def lost(name: str = "3") -> Against:
    return Against(name, f"runs/{name}", "", (), Verdict("differs", "runs/3 is not a run: nothing is there"), "nothing")


# The sentences on top ---------------------------------------------------------------------------


def test_the_first_sentence_says_the_verdict_and_where_the_two_part_first():
    text = page(comparison(faulty()))
    assert text.splitlines()[1] == "✗ int8 differs from fp32: layers.7 parts first: because of root"
    assert "24 rows: 7 noise, 16 inherited, 1 root" in text
    assert "the verdict rests on an estimate" in text


def test_noise_is_agreement_and_equality_is_said_to_be_that():
    assert page(comparison(healthy())).splitlines()[1].startswith("✓ bf16 agrees up to noise with fp32: ")
    same = against("copy", [row("layers.0", "same", error=0.0)])
    assert page(comparison(same)).splitlines()[1].startswith("✓ copy is the same as fp32: ")


def test_what_is_partial_is_said_on_top():
    text = page(comparison(against("x", [row("a", "noise")], notes=["the candidate is interrupted, 3 points missing"])))
    assert text.index("! the candidate is interrupted, 3 points missing") < text.index("outputs")


def test_a_first_divergence_that_the_reason_does_not_name_has_its_own_sentence():
    odd = replace(faulty(), verdict=Verdict("differs", "it is wrong"))
    assert "the first divergence is layers.7: because of root" in page(comparison(odd))
    assert "the first divergence is" not in page(comparison(faulty()))


# One candidate ----------------------------------------------------------------------------------


def test_a_few_rows_have_a_block_each_and_many_only_those_one_asks_for_first():
    few = page(comparison(faulty(layers=8)))
    assert [f"Layer {i} - Comparison Results" in few for i in range(8)] == [True] * 8
    assert "--detail all" not in few
    rows = [replace(r, ratio=1e6) if r.name == "layers.15" else r for r in faulty().rows]
    many = page(comparison(against("int8", rows)))
    shown = [int(n) for n in re.findall(r"^Layer (\d+) - Comparison Results$", many, re.MULTILINE)]
    assert shown == [0, 7, 15, 23]
    assert "20 more rows in the same detail: --detail all" in many
    assert "Comparison Results" not in page(comparison(faulty()), detail="none")
    assert page(comparison(faulty()), detail="all").count("Comparison Results") == 24


def test_the_table_covers_every_row_with_its_kind():
    text = page(comparison(faulty()), detail="none")
    for i, kind in enumerate(["noise"] * 7 + ["root"] + ["inherited"] * 16):
        assert re.search(rf"^layers\.{i} +{kind} ", text, re.MULTILINE)


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_line_is_wider_than_the_terminal_and_what_is_left_out_is_said(width):
    for made in (comparison(faulty()), comparison(faulty(), healthy(), lost()), comparison(healthy(layers=3))):
        text = page(made, width)
        assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "left out for want of width: mean abs cosine MSE" in page(comparison(faulty()), 80)


def test_the_error_over_depth_is_drawn_and_zero_and_nan_have_their_own_signs():
    rows = [row(f"layers.{i}", "noise", error=10.0 ** (i - 12)) for i in range(10)]
    rows[0] = row("layers.0", "same", error=0.0)
    rows[5] = row("layers.5", "nonfinite", metrics=metrics(nan=3))
    line = next(x for x in page(comparison(against("x", rows))).splitlines() if x.startswith("relative L2 (log)"))
    drawn = line.split()[3]
    assert (len(drawn), drawn[0], drawn[5]) == (10, "0", "!")
    assert list(drawn[1:5]) == sorted(drawn[1:5])


def test_more_than_a_screen_of_agreement_is_left_out_but_never_what_parts():
    rows = [row(f"m.{i}", "noise") for i in range(300)]
    rows[200] = row("m.200", "root", error=0.5)
    text = page(comparison(against("x", rows)), detail="auto")
    assert re.findall(r"^m\.(\d+) ", text, re.MULTILINE)[:5] == ["0", "199", "200", "201", "299"]
    assert "295 rows that agree are left out; --detail all shows them" in text
    tables = [p for p in document(comparison(against("x", rows)), detail="all").parts if isinstance(p, Table)]
    assert [len(table.rows) for table in tables] == [300]


def test_sides_are_shown_apart():
    rows = [row("a", "noise"), row("a:input", "noise"), row("a:grad_output", "root"), row("a:grad_input", "inherited")]
    text = page(comparison(against("x", rows)))
    titles = ["\noutputs\n", "\ninputs\n", "\ngradients of the outputs\n", "\ngradients of the inputs\n"]
    assert [text.count(t) for t in titles] == [1] * 4
    assert (
        text.index("\noutputs\n")
        < text.index("\ngradients of the outputs\n")
        < text.index("\na  ", text.index("\ngradients of the outputs\n"))
    )


def test_several_moments_are_one_line_a_point_the_worst_of_them():
    rows = [row("a", "noise", error=1e-4, moment=Moment(step=step, batch=step)) for step in range(5)]
    rows[2] = row("a", "root", error=0.5, moment=rows[2].moment)
    text = page(comparison(against("x", rows)), detail="none")
    assert "outputs, the worst of 5 moments each" in text
    assert re.findall(r"^a +step=(\d) +(\w+)", text, re.MULTILINE) == [("2", "root")]
    assert len(data(comparison(against("x", rows)))["rows"]) == 5


def test_what_found_no_partner_is_listed_with_its_reason_and_not_in_the_table():
    rows = [
        row("a", "noise"),
        row("rotary", "unpaired", because="only the reference has it"),
        row("b", "missing", because="damaged"),
    ]
    text = page(comparison(against("x", rows)))
    assert "! rotary: unpaired, only the reference has it" in text
    assert "! b: missing, damaged" in text
    assert not re.search(r"^rotary ", text, re.MULTILINE)


def test_one_reason_of_many_rows_is_said_once():
    lonely = [row(f"m.{i}", "unpaired", because="nobody has it") for i in range(50)]
    text = page(comparison(against("x", [row("a", "noise"), *lonely])))
    assert "! m.0, m.1, m.2 and 47 more: unpaired, nobody has it" in text
    assert text.count("nobody has it") == 1
    assert len(data(comparison(against("x", lonely)))["rows"]) == 50


def test_rows_that_rest_on_statistics_alone_are_in_the_table_without_numbers():
    text = page(comparison(against("x", [row("a", "root", metrics=None, ratio=None, floor=None)])))
    assert re.search(r"^a +root +- +-", text, re.MULTILINE)
    assert "differs from" in text
    assert "Comparison Results" not in text


def test_another_name_or_another_way_of_pairing_is_shown():
    other = row("layers.0", "noise", counterpart=Point("h.0"), method="normalised")
    text = page(comparison(against("x", [other])))
    assert re.search(r"^layers\.0 +h\.0 +noise .* normalised$", text, re.MULTILINE)
    assert "Paired With:" in text
    assert "paired by" not in page(comparison(healthy()))


def test_neuron_dumps_show_absolute_and_relative_difference_and_cosine_first():
    made = comparison(healthy(layers=3), layout="neuron")
    header = next(x for x in page(made, 80).splitlines() if x.startswith("layer "))
    assert header.split("  ")[0] == "layer"
    assert re.sub(r"\s{2,}", "|", header).split("|")[1:7] == [
        "kind",
        "max abs",
        "mean abs",
        "max rel",
        "mean rel",
        "cosine",
    ]


# Several candidates -----------------------------------------------------------------------------


def test_several_modes_have_the_summary_table_with_the_numbers_of_numpy():
    r = np.linspace(-1, 2, 24).reshape(1, 4, 6)
    text = page(comparison(healthy("0", error=1e-4), faulty("2-1"), lost("3")))
    assert "SUMMARY TABLE - All Modes vs fp32" in text
    header, zero, two, three = text[text.index("Mode ") :].splitlines()[:4]
    assert re.sub(r"\s{2,}", "|", header).split("|") == [
        "Mode",
        "Layer 0 MSE",
        "Layer 0 MAE",
        "Last Layer MSE",
        "Last Layer MAE",
        "Avg Corr",
        "Verdict",
        "First Divergence",
    ]
    mse = [float(np.mean((r * e) ** 2)) for e in (1e-4, 24e-4)]
    mae = [float(np.mean(abs(r * e))) for e in (1e-4, 24e-4)]
    cells = zero.split()
    assert cells[0] == "0"
    assert [float(c) for c in cells[1:5]] == pytest.approx([mse[0], mae[0], mse[1], mae[1]], rel=1e-3)
    assert 0.999999 <= float(cells[5]) <= 1.0
    assert cells[6:] == ["noise", "-"]
    assert two.split()[-2:] == ["differs", "layers.7"]
    assert three.split()[:8] == ["3", "-", "-", "-", "-", "-", "not", "compared"]
    assert three.endswith("runs/3 is not a run: nothing is there")


def test_the_lines_over_depth_share_one_scale():
    made = comparison(healthy("low", error=2e-6), healthy("high", error=2e-2))
    text = page(made)
    assert "one logarithmic scale for all, 1e-06 to 1\n" in text
    low, high = (next(x for x in text.splitlines() if re.match(rf"{n} +[▁-█]", x)).split()[1] for n in ("low", "high"))
    assert len(low) == len(high) == 24
    assert max(low) < min(high)


def test_only_the_candidates_that_differ_have_their_table():
    text = page(comparison(healthy("good"), faulty("wrong")))
    assert "wrong: outputs" in text
    assert "good: outputs" not in text
    assert "good: outputs" in page(comparison(healthy("good"), faulty("wrong")), detail="all")


def test_one_candidate_has_the_summary_when_asked():
    assert "SUMMARY TABLE" not in page(comparison(healthy()))
    assert "SUMMARY TABLE - All Modes vs fp32" in page(comparison(healthy()), summary=True)


def test_the_first_and_the_last_layer_are_the_outermost_numbered_modules_in_their_order():
    names = ["model.embed", "model.layers.0.mlp.2", "model.layers.0", "model.layers.10", "model.layers.9", "lm_head"]
    found = data(comparison(against("x", [row(n, "noise") for n in names])))["candidates"][0]
    assert found["first_layer"]["point"] == "model.layers.0"
    assert found["last_layer"]["point"] == "model.layers.10"


# For machines -----------------------------------------------------------------------------------


def test_json_carries_every_row_and_every_metric():
    made = comparison(faulty("a"), healthy("b"))
    found = data(made)
    assert found["verdict"] == "differs"
    assert found["because"] == "layers.7 parts first: because of root"
    assert found["reference"] == {"name": "fp32", "address": "runs/fp32", "layout": "layerscope"}
    assert found["first_divergence"]["point"] == "layers.7:output"
    assert [c["verdict"] for c in found["candidates"]] == ["differs", "noise"]
    assert found["candidates"][0]["kinds"]["inherited"] == 16
    assert Bands.parse("\n".join(found["bands"])) == PUBLISHED
    assert len(found["rows"]) == 48
    for got, want in zip(found["rows"], made.rows, strict=True):
        assert Point.parse(got["point"]) == want.point
        assert Moment(**got["moment"]) == want.moment
        assert (got["kind"], got["because"], got["method"]) == (want.kind, want.because, want.method)
        assert (got["ratio"], got["floor"]["error"]) == (want.ratio, want.floor.error)
        assert Metrics.from_json(got["metrics"]) == want.metrics
        assert got["bands"] == PUBLISHED.of(want.metrics)


def test_json_is_strict_whatever_the_numbers_and_names_are():
    evil = "a\x1b[2J\n</script>\u202e"
    odd = metrics(correlation=math.nan, sqnr=math.inf, relative_l2=math.inf)
    rows = [row("a", "degenerate", metrics=odd, ratio=math.inf, because=evil), row("b", "unpaired")]
    rows[0] = replace(rows[0], point=Point(evil))
    made = comparison(against(evil, rows))
    found = data(made)
    assert found["rows"][0]["metrics"]["correlation"] == "NaN"
    assert found["rows"][0]["ratio"] == "Infinity"
    assert found["rows"][0]["bands"]["correlation"] == "undefined"
    assert found["rows"][1]["metrics"] is None
    assert found["candidates"][0]["candidate"] == evil
    for text in (page(made), page(made, 80), markdown.render(document(made))):
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_what_the_page_leaves_out_json_has_all_the_same():
    made = comparison(faulty())
    assert data(made, detail="none") == data(made, detail="all") | {"sentences": data(made, detail="none")["sentences"]}


def test_an_empty_tensor_has_a_page():
    empty = replace(
        metrics(), shape=(0, 4), count=0, compared=0, equal=0, worst=None, bitwise=True,
        **dict.fromkeys(("mse", "mae", "mean", "std", "max_abs", "relative_mse", "relative_l2", "sqnr"), math.nan),
        percentiles=(math.nan,) * 4,
    )  # fmt: skip
    made = comparison(against("x", [row("a", "same", metrics=empty, ratio=None)]))
    assert "a - Comparison Results" in page(made)
    assert data(made)["candidates"][0]["first_layer"] is None


def test_the_builder_of_these_tests_agrees_with_closed_forms():
    found = measured(np.array([3.0, 4.0]), np.array([3.0, 5.0]))
    assert (found.mse, found.mae, found.max_abs) == (0.5, 0.5, 1.0)
    assert found.relative_l2 == pytest.approx(0.2)
    assert found.sqnr == pytest.approx(10 * math.log10(25))
