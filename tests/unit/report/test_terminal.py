"""Documents on a terminal: at any width, in any encoding, whatever the names are."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

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
from layerscope.report.terminal import UNLIMITED, draw, render

ANSI = re.compile(r"\x1b\[[0-9;]*m")
LONG = "model.layers.11.self_attn.attention_weights_of_the_query_projection:output"


def page(*names: str) -> Document:
    columns = [
        Column("point", "point", "name"),
        Column("shape", "shape", rank=2),
        Column("mean", "mean", "number", rank=3),
        Column("rms", "rms", "number"),
        Column("bar", "over depth", "bar", audience="page"),
        Column("secret", "secret", audience="data"),
    ]
    rows = [(name, "1x64x64", -0.5 * i, 10.0**i, 10.0**i, "hidden") for i, name in enumerate(names)]
    return Document(
        "runs/x",
        (
            Sentence("complete: 2 points", "good"),
            Facts("run", (Fact("model", "tiny"), Fact("seed", 0, "count"))),
            Heading("outputs"),
            Table.of("points", columns, rows),
            Profile("loss", "loss", ("step 0", "step 1"), (2.0, 1.0)),
            Notes("missing", (Sentence("lm_head: never called", "warn"),)),
        ),
    )


def test_full_width_shows_everything_but_what_is_for_machines():
    text = render(page(LONG, "b"))
    assert LONG in text
    assert "left out" not in text
    assert "hidden" not in text
    assert "secret" not in text
    assert "✓ complete: 2 points" in text
    assert "! lm_head: never called" in text


@pytest.mark.parametrize("width", [20, 33, 40, 60, 80, 120, 300])
def test_no_line_is_wider_than_the_terminal(width):
    text = render(page(LONG, "b", "层" * 60), width=width)
    assert max(cell_len(line) for line in text.splitlines()) <= width


def test_a_narrow_page_gives_up_columns_by_rank_and_says_which():
    text = render(page("model.layers.0"), width=44)
    assert "left out for want of width: shape mean" in text
    assert "model.layers.0" in text
    assert "rms" in text


def test_names_are_shortened_only_after_the_columns_are_gone():
    text = render(page(LONG), width=48)
    assert LONG not in text
    assert "…" in text
    assert ":output" in text


@pytest.mark.parametrize("width", [None, 80, 20])
def test_no_control_character_of_a_name_reaches_the_terminal(width):
    evil = "a\x1b[2J\x1b]0;t\x07\x9b31m\r\nb\x08\u202e\ud800"
    document = Document(evil, (Sentence(evil), Heading(evil), Facts("f", (Fact(evil, evil),)), *page(evil).parts[3:4]))
    text = render(document, width=width)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text)
    assert "a\\u001b[2J" in text.replace("\n", "")


def test_colour_never_lets_a_control_character_through_either():
    text = render(page("a\x1b[2J"), color=True)
    assert ANSI.search(text)
    assert "\x1b" not in ANSI.sub("", text)
    assert "\x1b[2J" not in text


@pytest.mark.parametrize(
    "name", ["[bold]x[/bold]", "[/]", "[link=http://evil]x[/link]", ":smile:", "a[0]", "x[red", "\\[a]"]
)
def test_markup_in_a_name_is_text(name):
    table = Table.of("t", [Column("a", name, "name")], [(name,), (Cell(1, text=name),)])
    document = Document(name, (Sentence(name), Facts("f", (Fact(name, name),)), table, Notes("n", (Sentence(name),))))
    assert render(document).count(name) == 8
    assert "\x1b" not in render(document)


def test_plain_output_has_no_colour_codes_and_no_trailing_space():
    text = render(page("a", "b"))
    assert "\x1b" not in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_an_ascii_terminal_gets_ascii_drawings():
    text = render(page("a", "b"), ascii_only=True, width=80)
    assert text.isascii()
    assert "####" in text


def test_a_console_that_is_not_a_terminal_is_drawn_in_its_own_encoding():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii", errors="backslashreplace")
    draw(page("层"), Console(file=file, width=UNLIMITED))
    file.flush()
    text = raw.getvalue().decode("ascii")
    assert "\\u5c42" in text
    assert "#" in text
    assert "+ complete" in text


def test_numbers_of_a_column_stand_point_under_point():
    table = Table.of("t", [Column("x", "x", "number")], [(1.5,), (-100.25,), (float("nan"),)])
    lines = render(Document("t", (table,))).splitlines()[-3:]
    assert lines[0].index(".") == lines[1].index(".")
    assert lines[2].strip() == "nan"


def test_a_tree_is_drawn_with_branches():
    cells = [(Cell(n, depth=d),) for n, d in (("root", 0), ("a", 1), ("b", 2), ("c", 2), ("d", 1))]
    lines = render(Document("t", (Table.of("t", [Column("m", "module", "name")], cells),))).splitlines()[-5:]
    assert lines == ["root", "├ a", "│ ├ b", "│ └ c", "└ d"]


def test_an_empty_table_and_an_empty_profile_are_drawn():
    document = Document("t", (Table.of("t", [Column("a", "alpha")], []), Profile("p", "p", (), ())))
    assert "alpha" in render(document, width=20)


def test_facts_under_titles_stand_together_with_labels_of_one_width():
    one = Facts("f", (Fact("MSE:", "1"), Fact("Relative MSE:", "2")), "Error Metrics:", audience="page")
    two = Facts("f", (Fact("50th:", "3"),), "Percentiles:", audience="page")
    assert render(Document("t", (one, two, Sentence("end")))).splitlines() == [
        "t",
        "",
        "Error Metrics:",
        "  MSE:           1",
        "  Relative MSE:  2",
        "Percentiles:",
        "  50th:          3",
        "",
        "end",
    ]


def test_what_is_for_machines_alone_is_not_on_the_page():
    hidden = (Data("d", "secret"), Sentence("secret", audience="data"), Facts("f", (), "secret", audience="data"))
    table = Table.of("t", [Column("a", "secret")], [("secret",)], audience="data")
    line = Profile("p", "secret", ("secret",), (1.0,), audience="data")
    notes = Notes("n", (Sentence("secret"),), audience="data")
    assert render(Document("t", (*hidden, table, line, notes))) == "t\n"


def test_profiles_of_one_span_are_drawn_on_one_scale_and_say_their_peak():
    labels = ("a", "b", "c")
    low = Profile("x", "low", labels, (1e-8, 1e-7, None), log=True, span=(1e-8, 1.0), audience="page")
    high = Profile("x", "higher", labels, (1e-2, 1.0, 0.0), log=True, span=(1e-8, 1.0), audience="page")
    assert render(Document("t", (low, high))).splitlines()[2:] == [
        "low     ▁▂   1.000e-8 (a) → 1.000e-7 (b)",
        "higher  ▆█0  0.01000 (a) → 0 (c), at most 1.000 (b)",
    ]


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_a_profile_with_a_long_title_stays_within_the_page(width):
    line = Profile("x", LONG, ("a" * 30, "b" * 30), (1.0, 2.0), log=True)
    text = render(Document("t", (line,)), width=width)
    assert max(cell_len(drawn) for drawn in text.splitlines()) <= width


def test_pictures_are_lines_of_heights_on_one_scale():
    parts = (
        Curves("c", "error", ("a", "b"), (Line("int8", (1.0, 8.0)), Line("long name", (4.0, None)))),
        HeatMap("h", "rms", ("a", "b"), ("0", "1"), ((0.0, 7.0), (None, None))),
        Histograms("v", "values", (-1.0, 0.0, 1.0), (("fp32", (3, 400)),)),
        Timeline("t", "alarms", (0, 9), (Event(3, "dead", "warn"),)),
        Select("by", (("mse", (Sentence("one"),)), ("cosine", (Sentence("two"),)))),
        Fold("more", (Sentence("three"),)),
    )
    text = render(Document("x", parts), width=60)
    assert "int8       ▁█" in text
    assert "long name  ▄" in text
    assert "a  ▁█" in text
    assert "b: not measured" in text
    assert "! step 3: dead" in text
    assert "by: cosine\ntwo" in text
    assert "more\nthree" in text
