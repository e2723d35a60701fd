"""Documents as Markdown; the oracle is markdown-it, an independent reader of it."""

import math
from itertools import pairwise

import pytest
from markdown_it import MarkdownIt

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
from layerscope.report.markdown import render
from layerscope.report.writing import printable

HOSTILE = [
    "a|b",
    r"a\|b",
    r"a\\|b\\",
    "`code`",
    "``a` |`",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[bold]x[/bold](http://evil)",
    "*star* _under_ __dunder__ self_attn_q",
    "&amp; &lt;",
    "# not a title",
    "- not a list",
    "1. not a list",
    "+ 2) = -",
    "> no quote",
    "~~gone~~ $x$",
    "a\nb\r\n| c |",
    "evil\x1b[2J\x07",
    " padded ",
    "层.注意力 🙂",
    "x" * 300,
]


def tokens(text: str) -> list:
    found = []
    for token in MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text):
        found.append(token)
        found.extend(token.children or [])
    return found


def cells(text: str) -> list[str]:
    """The table cells as a reader would see them."""
    parsed = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)
    inside = [t for before, t in pairwise(parsed) if before.type in ("td_open", "th_open")]
    for token in inside:
        assert {c.type for c in token.children or []} <= {"text", "code_inline", "text_special"}, token.children
    return ["".join(c.content for c in token.children or []) for token in inside]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("kind", ["name", "text"])
def test_a_table_shows_every_name_as_it_is(name, kind):
    table = Table.of("t", [Column("a", "a", kind), Column("b", "b", "count")], [(name, 1), ("plain", 2)])
    shown = cells(render(Document("t", (table,))))
    assert [s.strip() for s in shown] == ["a", "b", printable(name).strip(), "1", "plain", "2"]


@pytest.mark.parametrize("text", HOSTILE)
def test_titles_sentences_and_facts_are_text_and_nothing_else(text):
    document = Document(
        text, (Heading(text), Sentence(text), Notes("n", (Sentence(text),)), Facts("f", (Fact(text, text),)))
    )
    found = tokens(render(document))
    assert {t.type for t in found if t.type.startswith(("html", "link", "image", "fence", "code_block", "hr"))} == set()
    assert [t.tag for t in found if t.type == "heading_open"] == ["h1", "h2"]
    assert sum(t.type == "bullet_list_open" for t in found) in (1, 2)
    assert sum(t.type == "ordered_list_open" for t in found) == 0
    paragraphs = [t for before, t in pairwise(found) if before.type == "paragraph_open"]
    read = ["".join(c.content for c in p.children or []) for p in paragraphs]
    assert read[0].strip() == printable(text).strip()


def test_nothing_is_shortened_or_left_out():
    name = "model." + "x" * 400
    table = Table.of(
        "t",
        [Column("a", "a", "name"), *(Column(str(i), str(i), "number", rank=i) for i in range(30))],
        [(name, *range(30))],
    )
    page = render(Document("t", (table,)))
    assert name in page
    assert "| 29 |" in page


def test_data_columns_stay_out_and_bars_are_drawn():
    columns = [Column("a", "a", audience="data"), Column("b", "size", "bar", audience="page")]
    assert cells(render(Document("t", (Table.of("t", columns, [(7, 1.0), (7, 2.0)]),)))) == ["size", "█" * 6, "█" * 12]


def test_tones_have_signs_and_bad_cells_stand_out():
    table = Table.of("t", [Column("a", "a", "number")], [(Cell(float("nan"), "bad"),)])
    page = render(Document("t", (Sentence("fine", "good"), Sentence("broken", "bad"), table)))
    assert "✓ fine" in page
    assert "✗ broken" in page
    assert "**nan**" in page


def test_a_profile_names_both_its_ends():
    page = render(Document("t", (Profile("loss", "loss", ("step 0", "step 9"), (2.0, 1.0)),)))
    assert "`█▁` from 2.000 (step 0) to 1.000 (step 9)" in page


def test_facts_have_their_title_above_them_and_one_colon():
    page = render(Document("t", (Facts("f", (Fact("MSE:", "1e-4"), Fact("seed", 0)), "Error Metrics:"),)))
    assert "Error Metrics:\n\n- **MSE:** 1e-4\n- **seed**: 0\n" in page


def test_what_is_for_machines_alone_is_not_on_the_page():
    hidden = (Data("d", "secret"), Sentence("secret", audience="data"), Facts("f", (), "secret", audience="data"))
    table = Table.of("t", [Column("a", "secret")], [("secret",)], audience="data")
    line = Profile("p", "secret", ("secret",), (1.0,), audience="data")
    notes = Notes("n", (Sentence("secret"),), audience="data")
    assert render(Document("t", (*hidden, table, line, notes))) == "# t\n"


def test_a_logarithmic_profile_says_where_its_peak_is():
    page = render(Document("t", (Profile("e", "error", ("a", "b", "c"), (1e-6, 1e-2, 1e-4), log=True),)))
    assert "`▁█▅` from 1.000e-6 (a) to 1.000e-4 (c), at most 0.01000 (b)" in page


def test_pictures_are_tables_of_all_their_numbers():
    parts = (
        Curves("c", "error", ("a", "b"), (Line("int8", (1.0, math.nan), (0.5, None)),)),
        HeatMap("h", "rms", ("a|b",), ("0", "1"), ((1.0, math.inf),)),
        Histograms("v", "values", (-1.0, 0.0, 1.0), (("fp32", (3, 4)),)),
        Timeline("t", "alarms", (0, 9), (Event(3, "dead", "warn"),)),
        Select("by", (("mse", (Sentence("one"),)), ("cosine", (Sentence("two"),)))),
        Fold("more", (Sentence("three"),)),
    )
    text = render(Document("x", parts))
    for line in (
        "|  | int8 | floor of int8 |",
        "| `b` | nan | - |",
        "| a&#124;b | 1.000 | inf |",
        "| `-1 to 0` | 3 |",
        "| 3 | **dead** |",
        "**by: cosine**",
        "### more",
        "three",
    ):
        assert line in text.splitlines(), line
