"""A document as an HTML page: the standard library's parser is the oracle of what a browser would see."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

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
from layerscope.report.html import STATIC, fragment, render, save

HOSTILE = "</script></title><img src=x onerror=alert(1)>\x1b[2J\u202e'\"&\ud800"
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "script", "h1", "h2", "h3", "p", "ul", "li", "b", "a"),
    *(
        "i",
        "section",
        "dl",
        "div",
        "dt",
        "dd",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "span",
        "details",
        "summary",
    ),
    *("fieldset", "legend", "input", "label", "figure", "figcaption", "svg", "g", "path", "rect", "text", "circle"),
    "line",
}


class Run(HTMLParser):
    """Collects tags, attributes, text, and what stands in script and style."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text, self.raw = [], [], "", {}
        self._open = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "input"):
            self._open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag in ("script", "style"):
            self.raw[attributes.get("id", tag)] = data
        else:
            self.text += data

    def values(self, tag, name):
        return [value for t, n, value in self.attributes if (t, n) == (tag, name)]


def every_part(name: str) -> Document:
    curves = Curves(
        "c", name, (name, "b"), (Line(name, (1.0, math.nan), (0.5, 0.5)),), log=True, across=name, unit=name
    )
    heat = HeatMap("h", name, (name, "r"), (name,), ((1e-3,), (math.inf,)), log=True, unit=name)
    return Document(
        name,
        (
            Heading(name),
            Sentence(name, "bad"),
            Notes("n", (Sentence(name, "warn"),)),
            Facts("f", (Fact(name, name), Fact("v", math.inf, "number")), name),
            Profile("p", name, (name, "b"), (1.0, 2.0)),
            curves,
            Select(name, ((name, (heat,)), ("other", (Sentence("two"),)))),
            Histograms("hi", name, (-1.0, 0.0, 1.0), ((name, (3, 4)), ("other", (1, 0)))),
            Timeline("t", name, (0, 9), (Event(3, name),), unit=name),
            Table.of("t2", [Column("a", name, "name"), Column("b", name, "bar")], [(Cell(name, depth=1), 2.0)]),
            Fold(name, (Sentence(name),), key="3"),
            Data("d", name),
        ),
    )


def test_hostile_text_is_text_everywhere_and_nothing_but_our_tags_is_there():
    page = Run(render(every_part(HOSTILE)))
    assert set(page.tags) <= TAGS
    shown = "</script></title><img src=x onerror=alert(1)>\\u001b[2J\\u202e'\"&\\ud800"
    assert page.text.count(shown) > 15
    assert not [a for a in page.attributes if a[1].startswith("on") or a[1] in ("style", "src")]
    assert json.loads(page.raw["data"])["figures"][0]["lines"][0][0] == HOSTILE
    assert "\x1b" not in render(every_part(HOSTILE))


def test_the_check_for_hostile_text_can_fail():
    assert {"img"} == set(Run("<img src=x onerror=alert(1)>").tags) - TAGS


def test_every_address_in_a_page_is_its_own():
    page = Run(render(every_part("a")))
    assert all(value.startswith("#") for value in page.values("a", "href"))
    assert "http" not in page.raw["style"]
    assert "url(" not in page.raw["style"]
    assert "innerHTML" not in page.raw["script"]


def test_the_policy_allows_the_style_and_the_script_that_stand_there_by_hash_and_nothing_else():
    text = render(every_part("a"))
    page = Run(text)
    policy = next(value for value in page.values("meta", "content") if "default-src" in value)
    hashes = {
        kind: base64.b64encode(hashlib.sha256(page.raw[kind].encode()).digest()).decode()
        for kind in ("style", "script")
    }
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{hashes['style']}'",
        f"script-src 'sha256-{hashes['script']}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def test_the_data_is_strict_json_with_every_number_as_it_was():
    values = (1 / 3, math.nan, math.inf, None, 5e-324)
    page = Run(render(Document("x", (Curves("c", "c", tuple("abcde"), (Line("l", values),)),))))
    read = json.loads(page.raw["data"], parse_constant=lambda c: pytest.fail(c))
    assert read["figures"] == [{"labels": list("abcde"), "lines": [["l", [1 / 3, "NaN", "Infinity", None, 5e-324]]]}]


def test_a_long_table_has_all_its_rows_in_the_data_and_says_how_many_stand_there():
    rows = [(f"layer{i}", float(i)) for i in range(STATIC + 1)]
    page = Run(render(Document("x", (Table.of("t", [Column("a", "a", "name"), Column("b", "b", "number")], rows),))))
    assert page.tags.count("tr") == STATIC + 1  # and the head
    assert f"the first {STATIC:,} of {STATIC + 1:,} rows" in page.text
    table = json.loads(page.raw["data"])["tables"][0]
    assert [[cells[0], cells[1][1]] for cells, _, _ in table] == [[name, value] for name, value in rows]


def test_a_short_table_stands_in_the_page_whole():
    rows = [(f"layer{i}",) for i in range(STATIC)]
    page = Run(render(Document("x", (Table.of("t", [Column("a", "a", "name")], rows),))))
    assert page.tags.count("tr") == STATIC + 1
    assert json.loads(page.raw["data"])["tables"] == []
    assert "of" not in page.text


def test_a_row_links_to_the_fold_that_tells_more_of_it():
    table = Table.of("t", [Column("a", "a", "name")], [("one",), ("two",)], opens=["", "7"])
    page = Run(render(Document("x", (table, Fold("two", (Sentence("more"),), key="7")))))
    assert page.values("a", "href") == ["#row-7"]
    assert page.values("details", "id") == ["row-7"]


def test_a_fragment_is_for_a_page_that_is_not_ours():
    page = Run(fragment(every_part(HOSTILE)))
    assert not {"script", "html", "body", "main"} & set(page.tags)
    assert "h3" in page.tags


def test_a_picture_of_anything_is_drawn_without_a_number_that_is_none():
    for values in ((), (None,), (0.0,), (math.nan,), (math.inf, -math.inf), (1e308, -1e308), (5e-324, 1.0), (2.0, 2.0)):
        for log in (False, True):
            labels = tuple(map(str, range(len(values))))
            page = render(
                Document(
                    "x",
                    (
                        Curves("c", "c", labels, (Line("l", values, values),), log=log),
                        HeatMap("h", "h", labels, ("m",), tuple((v,) for v in values), log=log),
                    ),
                )
            )
            drawn = Run(page)
            numbers = [value for _, name, value in drawn.attributes if name in ("d", "x", "y", "cx", "cy", "height")]
            assert not [value for value in numbers if "nan" in value or "inf" in value], (values, log)


def test_no_two_of_many_lines_look_alike():
    lines = tuple(Line(str(n), (1.0, 2.0)) for n in range(40))
    drawn = render(Document("x", (Curves("c", "t", ("a", "b"), lines),)))
    looks = re.findall(r'class="(line c\d d\d)"', drawn)
    assert len(looks) == 2 * 40  # each in the picture and in the legend
    assert len(set(looks)) == 40


def test_what_is_not_finite_is_marked_once_for_neighbours():
    nan, inf = math.nan, math.inf
    rows = ((1.0, nan, nan, 1.0), (1.0, inf, nan, 1.0), (nan, 1.0, 1.0, None))
    heat = HeatMap("h", "t", ("a", "b", "c"), tuple("wxyz"), rows)
    drawn = render(Document("x", (heat,)))
    signs = re.findall(r'<text class="broken" x="([^"]+)" y="([^"]+)">\u2715', drawn)
    assert signs == [("12.5%", "83.3%"), ("50.0%", "33.3%")]


def test_commands_in_a_sentence_are_told_from_its_words():
    said = fragment(Document("", (Sentence("run `layerscope show <b>` now, or `"),)))
    assert "run <code>layerscope show &lt;b&gt;</code> now, or `" in said


def test_a_page_is_written_whole_or_not_at_all(tmp_path):
    to = tmp_path / "deep" / "report.html"
    save(Document("x", ()), to)
    assert to.read_text("utf-8") == render(Document("x", ()))
    with pytest.raises(ValueError, match="called"):
        save(Document("x", (Data("a", 1), Data("a", 2))), to)
    assert [p.name for p in to.parent.iterdir()] == ["report.html"]
    with pytest.raises(OSError, match="report"):
        save(Document("x", ()), to / "in-a-file.html")


def test_cells_carry_the_exact_number_they_are_sorted_by():
    table = Table.of("t", [Column("a", "a", "number")], [(1 / 3,), (math.inf,), (None,), (True,)])
    page = Run(render(Document("x", (table,))))
    assert page.values("td", "data-v") == [repr(1 / 3), "Infinity", "True"]
