"""Documents as strict JSON; the oracle is the standard library's parser."""

import json
import math

import pytest

from layerscope.report import (
    Cell,
    Column,
    Curves,
    Data,
    Document,
    Event,
    Fact,
    Facts,
    Fold,
    Heading,
    HeatMap,
    Histograms,
    Line,
    Notes,
    Profile,
    Select,
    Sentence,
    Table,
    Timeline,
)
from layerscope.report.json import render

HOSTILE = "a\x1b[2J\n</script>\u202e\ud800|`层"


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def read(document: Document) -> dict:
    return json.loads(render(document), parse_constant=refuse)


def test_every_part_with_a_key_is_found_under_it_with_its_bare_values():
    columns = [
        Column("point", "point", "name"),
        Column("mean", "the mean", "number"),
        Column("b", "", "bar", audience="page"),
    ]
    page = read(
        Document(
            "runs/x",
            (
                Heading("outputs"),
                Sentence("complete", "good"),
                Facts("run", (Fact("seed", 0), Fact("model", "m"))),
                Notes("missing", tuple(Sentence(str(i), "warn") for i in range(30))),
                Table.of("points", columns, [("a", 0.1234567891, 1.0), (Cell("b", text="shown"), 2, 2.0)]),
                Profile("loss", "loss", ("0", "1"), (1.5, 0.5)),
            ),
        )
    )
    assert page["title"] == "runs/x"
    assert page["sentences"] == [{"text": "complete", "tone": "good"}]
    assert page["run"] == {"seed": 0, "model": "m"}
    assert len(page["missing"]) == 30
    assert page["points"] == [{"point": "a", "mean": 0.1234567891}, {"point": "b", "mean": 2}]
    assert page["loss"] == {"labels": ["0", "1"], "values": [1.5, 0.5]}


def test_tables_of_one_key_are_one_list():
    one, two = (Table.of("points", [Column("a", "a")], [(i,)]) for i in (1, 2))
    assert read(Document("t", (one, Heading("more"), two)))["points"] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(("value", "named"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_what_json_has_no_number_for_is_a_named_string_wherever_it_stands(value, named):
    table = Table.of("t", [Column("a", "a", audience="data")], [(Cell([value, [value]]),)])
    page = read(Document("d", (table, Facts("f", (Fact("x", value),)), Profile("p", "p", ("",), (value,)))))
    assert page["t"] == [{"a": [named, [named]]}]
    assert page["f"] == {"x": named}
    assert page["p"]["values"] == [named]


def test_hostile_text_reads_back_unchanged_and_is_ascii_on_the_way():
    document = Document(HOSTILE, (Facts("f", (Fact(HOSTILE, HOSTILE),)),))
    text = render(document)
    assert text.isascii()
    assert "\x1b" not in text
    assert json.loads(text) == {"title": HOSTILE, "sentences": [], "f": {HOSTILE: HOSTILE}}


def test_data_is_found_under_its_key_as_deep_as_it_is():
    value = {"a": [1, {"b": math.nan, HOSTILE: None}], "c": (True, "x")}
    page = read(Document("d", (Data("rows", value), Data("later", lambda: [math.inf]))))
    assert page["later"] == ["Infinity"]
    assert page["rows"] == {"a": [1, {"b": "NaN", HOSTILE: None}], "c": [True, "x"]}


def test_what_is_for_eyes_alone_is_not_in_json_and_what_was_not_measured_is_null():
    table = Table.of("t", [Column("a", "a")], [(1,)], audience="page")
    facts = Facts("f", (Fact("x", 1),), "Title:", audience="page")
    line = Profile("p", "p", ("a", "b"), (None, 1.0))
    notes = Notes("n", (Sentence("one"),), audience="page")
    page = read(Document("d", (Sentence("hint", audience="page"), Sentence("fact"), table, facts, notes, line)))
    assert page == {
        "title": "d",
        "sentences": [{"text": "fact", "tone": "plain"}],
        "p": {"labels": ["a", "b"], "values": [None, 1.0]},
    }


def test_pictures_are_their_numbers_and_what_is_for_eyes_is_not_there():
    page = read(
        Document(
            "runs/x",
            (
                Curves(
                    "c", "error", ("a", "b"), (Line("int8", (1.0, math.nan), (0.5, None)), Line("int4", (2.0, None)))
                ),
                HeatMap("h", "rms", ("a",), ("0", "1"), ((1.0, math.inf),)),
                Histograms("v", "values", (-1.0, 0.0, 1.0), (("fp32", (3, 4)),)),
                Timeline("t", "alarms", (0, 9), (Event(3, "dead", "warn"),)),
                Select("by", (("mse", (Sentence("one"),)),)),
                Fold("more", (Sentence("two"),)),
            ),
        )
    )
    assert page == {
        "title": "runs/x",
        "sentences": [],
        "c": {
            "labels": ["a", "b"],
            "lines": [
                {"name": "int8", "values": [1.0, "NaN"], "floor": [0.5, None]},
                {"name": "int4", "values": [2.0, None], "floor": []},
            ],
        },
        "h": {"rows": ["a"], "columns": ["0", "1"], "values": [[1.0, "Infinity"]]},
        "v": {"edges": [-1.0, 0.0, 1.0], "counts": {"fp32": [3, 4]}},
        "t": [{"at": 3, "text": "dead", "tone": "warn"}],
    }
