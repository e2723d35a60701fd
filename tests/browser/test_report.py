"""A report in a real browser: what is under the pointer, what the keys do, what hostile names can do (nothing)."""

import math

import pytest

from browser.checks import ACCESS, CONTRAST
from layerscope.report import (
    Cell,
    Column,
    Curves,
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
    Select,
    Sentence,
    Table,
    Timeline,
    html,
)

HOSTILE = "</script><img src=x onerror=alert(1)><svg onload=alert(2)>\u202e\x1b[31m'\"&amp;"
LABELS = tuple(f"model.layers.{n}" for n in range(24))
LINE = tuple(None if n == 5 else math.nan if n == 20 else 0.0 if n == 2 else 10.0 ** (-6 + n / 7) for n in range(24))
MODES = tuple(f"mode {n}" for n in range(8))
MAP = tuple(tuple(math.inf if (r, c) == (4, 4) else 1e-6 * 3.0**r / (c + 1) for c in range(8)) for r in range(24))
EDGES = (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0)
COUNTS = (("fp32", (1, 0, 30, 7, 2)), ("int8", (0, 4, 3, 2, 1)))


def document(name: str) -> Document:
    rows = [(f"{name} {n}", Cell("root" if n == 3 else "same", "bad" if n == 3 else "good"), n / 7) for n in range(24)]
    rows[11] = (f"{name} 11", Cell("same", "good"), math.nan)
    columns = [Column("point", "point", "name"), Column("kind", "kind"), Column("error", "error", "number")]
    tree = [("model", 0), ("layers", 1), ("0", 2), ("1", 2), ("norm", 1)]
    return Document(
        name,
        (
            Sentence(f"{name} differs", "bad"),
            Notes("notes", (Sentence("a note", "warn"),)),
            Facts("facts", (Fact("label", name), Fact("value", 1 / 3, "number")), "title"),
            Heading("pictures"),
            Curves("c", f"curves {name}", LABELS, (Line(name, LINE, (1e-6,) * 24), Line("b", LINE)), True, "x", "y"),
            Select(
                "measure",
                (
                    ("first", (HeatMap("h", "the map", LABELS, MODES, MAP, log=True),)),
                    ("second", (Sentence("another panel"),)),
                ),
            ),
            Histograms("hi", "values", EDGES, COUNTS),
            Timeline("t", "alarms", (0, 100), tuple(Event(n, f"{name} {n}") for n in (3, 50, 50, 99))),
            Heading("rows"),
            Table.of("rows", columns, rows, opens=[str(n) if n < 5 else "" for n in range(24)]),
            Table.of(
                "tree",
                [Column("m", "module", "name"), Column("k", "kind")],
                [(Cell(t, depth=d), "same") for t, d in tree],
            ),
            Fold("details", tuple(Fold(f"row {n}", (Sentence(f"all about {n}"),), str(n)) for n in range(5))),
        ),
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    to = tmp_path_factory.mktemp("report") / "report.html"
    html.save(document("layer"), to)
    return to


def cells(page, column):
    return page.locator("table").first.locator(f"tbody td:nth-child({column})").all_inner_texts()


def test_hostile_names_are_text_and_ask_for_nothing(look, tmp_path):
    to = tmp_path / "hostile.html"
    html.save(document(HOSTILE), to)
    page = look(to)
    assert page.locator("img").count() == 0
    assert page.locator("h1").inner_text() == HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\u001b")
    page.locator("svg[data-figure]").first.hover(position={"x": 5, "y": 40})
    assert "<img src=x onerror=alert(1)>" in page.locator("#tip").inner_text()
    page.get_by_role("searchbox").first.fill("<img")
    assert len(cells(page, 1)) == 24


def test_what_is_under_the_pointer_is_the_number_in_the_data(look, report):
    page = look(report)
    plot = page.locator("figure.curves svg[data-figure]")
    box = plot.bounding_box()
    for at in (0, 2, 5, 13, 20, 23):
        page.mouse.move(box["x"] + 1 + (box["width"] - 2) * at / 23, box["y"] + 50)
        place, value, _ = page.locator("#tip").inner_text().split("\n")
        assert place == LABELS[at]
        expected = LINE[at]
        said = value.removeprefix("layer: ")
        assert said == "not measured" if expected is None else float(said) == expected or math.isnan(float(said))
    heat = page.locator("figure.heatmap svg[data-figure]")
    heat.scroll_into_view_if_needed()
    box = heat.bounding_box()
    for row, column in ((0, 0), (4, 4), (23, 7), (10, 3)):
        page.mouse.move(box["x"] + box["width"] * (column + 0.5) / 8, box["y"] + box["height"] * (row + 0.5) / 24)
        place, value = page.locator("#tip").inner_text().split("\n")
        assert place == LABELS[row]
        assert value.startswith(f"{MODES[column]}: ")
        assert float(value.partition(": ")[2].replace("Infinity", "inf")) == MAP[row][column]
    bars = page.locator("figure.histograms svg[data-figure]")
    bars.scroll_into_view_if_needed()
    box = bars.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
    assert page.locator("#tip").inner_text() == "-0.5 to 0.5\nfp32: 30\nint8: 3"


def test_the_arrow_keys_do_what_the_pointer_does(look, report):
    page = look(report)
    heat = page.locator("figure.heatmap svg[data-figure]")
    heat.focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    place, value = page.locator("#tip").inner_text().split("\n")
    assert (place, value.partition(": ")[0]) == (LABELS[3], MODES[1])
    assert float(value.partition(": ")[2]) == MAP[3][1]
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_a_table_sorts_by_number_and_what_has_none_comes_last(look, report):
    page = look(report)
    page.get_by_role("button", name="error", exact=True).click()
    head = page.get_by_role("columnheader", name="error")
    assert head.get_attribute("aria-sort") == "descending"
    numbers = [float(text) for text in cells(page, 3)]
    assert numbers[:-1] == sorted(numbers[:-1], reverse=True)
    assert math.isnan(numbers[-1])
    page.get_by_role("button", name="error", exact=True).press("Enter")
    numbers = [float(text) for text in cells(page, 3)]
    assert numbers[:-1] == sorted(numbers[:-1])
    assert math.isnan(numbers[-1])
    page.get_by_role("button", name="point", exact=True).click()
    assert cells(page, 1) == [f"layer {n}" for n in range(24)]  # 2 before 10


def test_a_filter_finds_rows_and_says_how_many_and_a_slash_goes_there(look, report):
    page = look(report)
    page.keyboard.press("/")
    page.keyboard.type("root")
    assert cells(page, 1) == ["layer 3"]
    assert page.locator(".tools").first.inner_text() == "1 of 24 rows"
    page.get_by_role("searchbox").first.fill("")
    assert len(cells(page, 1)) == 24


def test_a_row_opens_and_its_address_opens_it_again(look, report):
    page = look(report)
    page.get_by_role("link", name="layer 3", exact=True).click()
    page.wait_for_url("**#row=3")
    assert page.get_by_text("all about 3").is_visible()
    assert page.locator("#row-2").get_attribute("open") is None
    again = look(str(page.url))
    assert again.get_by_text("all about 3").is_visible()


def test_the_tree_closes_and_opens(look, report):
    page = look(report)
    tree = page.locator("table.tree")

    def names():
        return [text.strip("\u25be\u25b8\u2003 ") for text in tree.locator("tbody td:first-child").all_inner_texts()]

    assert names() == ["model", "layers", "0", "1", "norm"]
    twig = tree.get_by_role("button", name="what is inside layers")
    twig.press("Enter")
    assert names() == ["model", "layers", "norm"]
    assert twig.get_attribute("aria-expanded") == "false"
    twig.press("Enter")
    assert names() == ["model", "layers", "0", "1", "norm"]


def test_a_long_tree_begins_with_what_is_in_order_closed(look, tmp_path):
    columns = [Column("m", "module", "name"), Column("k", "kind")]

    def tree(wrong):
        lines = [(Cell("model", depth=0), Cell("root", "bad") if wrong else "same")]
        for n in range(10):
            kind = Cell("root", "bad") if n == wrong else "same"
            lines += [
                (Cell(f"layer{n}", depth=1), kind),
                (Cell(f"a{n}", depth=2), kind),
                (Cell(f"b{n}", depth=2), "same"),
            ]
        return Document("tree", (Table.of("tree", columns, lines),))

    html.save(tree(7), tmp_path / "wrong.html")
    html.save(tree(None), tmp_path / "right.html")
    page = look(tmp_path / "wrong.html")
    told = [text.strip("\u25be\u25b8\u2003 ") for text in page.locator("tbody td:first-child").all_inner_texts()]
    assert told == ["model", *(f"layer{n}" for n in range(8)), "a7", "b7", "layer8", "layer9"]
    assert page.locator(".tools").inner_text() == "13 of 31 rows"
    page.get_by_role("searchbox").fill("b3")
    assert page.locator("tbody tr").count() == 1
    assert look(tmp_path / "right.html").locator("tbody tr").count() == 31


def test_a_choice_shows_one_panel(look, report):
    page = look(report)
    assert page.get_by_text("another panel").is_hidden()
    page.get_by_label("second").check(force=True)
    assert page.get_by_text("another panel").is_visible()
    assert page.locator("figure.heatmap").is_hidden()


def test_every_panel_of_a_long_choice_can_be_looked_at(look, tmp_path):
    options = tuple((f"option {n}", (Sentence(f"panel {n}"),)) for n in range(20))
    html.save(Document("x", (Select("which", options),)), tmp_path / "x.html")
    page = look(tmp_path / "x.html", script=False)
    panels = page.locator("fieldset p")
    for n in (0, 12, 19):
        page.get_by_text(f"option {n}", exact=True).click()
        assert [n for n in range(20) if panels.nth(n).is_visible()] == [n]


def test_what_is_not_finite_has_a_sign_besides_its_colour_on_any_page(look, report):
    for width in (360, 1280):
        page = look(report, width=width)
        heat = page.locator("figure.heatmap svg[data-figure]")
        heat.scroll_into_view_if_needed()
        signs = [text for text in heat.locator("text.broken").all() if text.is_visible()]
        assert [text.text_content() for text in signs] == [{360: "\u2715", 1280: "inf"}[width]]
        box, sign = heat.bounding_box(), signs[0].bounding_box()
        assert abs(sign["x"] + sign["width"] / 2 - box["x"] - box["width"] * 4.5 / 8) < 3
        assert abs(sign["y"] + sign["height"] / 2 - box["y"] - box["height"] * 4.5 / 24) < 6


def test_a_telephone_shows_where_two_long_names_differ(look, tmp_path):
    columns = [Column("point", "point", "name"), *(Column(str(n), f"measure {n}", "number") for n in range(6))]
    for many in (20, 2000):
        names = [f"model.language_model.layers.{n}.self_attn.q_proj" for n in range(many)]
        html.save(Document("x", (Table.of("t", columns, [(n, *range(6)) for n in names]),)), tmp_path / "x.html")
        page = look(tmp_path / "x.html", width=360)
        cell = page.locator("tbody td:first-child", has_text="layers.3.self").first
        seen = cell.evaluate(
            """(cell) => {
              const box = cell.getBoundingClientRect(), range = document.createRange();
              const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), node = walker.nextNode();
              return [...node.textContent].filter((_, at) => {
                range.setStart(node, at); range.setEnd(node, at + 1);
                const char = range.getBoundingClientRect();
                return char.left >= box.left - 1 && char.right <= box.right + 1;
              }).join("");
            }"""
        )
        assert seen.endswith("3.self_attn.q_proj")


def test_without_scripts_everything_but_the_comfort_is_there(look, report):
    page = look(report, script=False)
    assert page.locator("figure svg path.line").count() == 4  # two lines, and two in the legend
    assert page.locator("figure.heatmap text", has_text="mode 7").is_visible()
    assert len(cells(page, 1)) == 24
    page.get_by_text("second").click()
    assert page.get_by_text("another panel").is_visible()
    page.get_by_text("details").click()
    assert page.get_by_text("row 4").is_visible()


def test_ten_thousand_rows_are_all_there_and_few_of_them_drawn(look, tmp_path):
    columns = [Column("point", "point", "name"), Column("error", "error", "number"), Column("bar", "", "bar")]
    rows = ((f"model.layers.{n}", 1.0 / (n + 1), 1.0 / (n + 1)) for n in range(10_000))
    to = tmp_path / "long.html"
    html.save(Document("long", (Table.of("t", columns, rows),)), to)
    page = look(to)
    drawn = page.locator("tbody tr")
    assert drawn.count() < 150
    assert page.locator(".tools").inner_text() == "10,000 rows"
    page.get_by_role("button", name="error", exact=True).click()
    page.get_by_role("button", name="error", exact=True).click()
    assert "model.layers.9999" in drawn.nth(1).inner_text()
    page.get_by_role("button", name="point", exact=True).click()
    page.locator(".table").evaluate("box => { box.scrollTop = box.scrollHeight; }")
    page.locator("tbody", has_text="model.layers.9999").wait_for()
    assert drawn.count() < 150
    page.get_by_role("searchbox").fill("layers.777")
    assert page.locator(".tools").inner_text() == "11 of 10,000 rows"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read_against_what_is_behind_it(look, report, scheme):
    page = look(report, scheme=scheme)
    assert page.evaluate(CONTRAST) == []
    page.evaluate("document.querySelector('main p').style.color = getComputedStyle(document.body).backgroundColor")
    assert page.evaluate(CONTRAST) != []  # the check can fail


@pytest.mark.parametrize("width", [360, 1280, 3840])
def test_nothing_is_wider_than_the_window(look, report, width):
    page = look(report, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_it_can_be_used_by_ear_and_by_keyboard(look, report):
    page = look(report)
    assert page.evaluate(ACCESS) == []
    page.evaluate("""() => {
      document.querySelector('button').textContent = '';
      document.querySelector('svg[role=img]').removeAttribute('aria-label');
      document.querySelector('th').removeAttribute('scope');
      document.querySelector('main').append(Object.assign(document.createElement('p'), {id: 'tip'}));
    }""")
    wrong = {line.partition(":")[0] for line in page.evaluate(ACCESS)}  # the check can fail
    assert wrong == {"no name", "a head of nothing", "an id twice"}


def test_all_rows_of_a_long_table_are_printed(look, tmp_path):
    rows = ((f"model.layers.{n}", n) for n in range(1000))
    columns = [Column("point", "point", "name"), Column("n", "n", "count")]
    html.save(Document("long", (Table.of("t", columns, rows),)), tmp_path / "x.html")
    page = look(tmp_path / "x.html", scheme="dark")
    assert page.locator("tbody tr").count() < 150
    printed = []
    page.expose_function("printed", lambda rows: printed.append(rows))
    page.evaluate("addEventListener('beforeprint', () => printed(document.querySelectorAll('tbody tr').length))")
    page.pdf()
    assert printed == [1000]
    assert page.locator("tbody tr").count() < 150
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate(CONTRAST) == []


def test_on_paper_nothing_is_cut_off_and_no_tool_is_printed(look, report):
    page = look(report)
    page.emulate_media(media="print")
    assert page.locator(".tools").first.is_hidden()
    assert page.locator(".table").first.evaluate("box => getComputedStyle(box).overflow") == "visible"


def test_a_tree_of_ten_thousand_lines_closes_too(look, tmp_path):
    columns = [Column("module", "module", "name"), Column("kind", "kind")]
    lines = [(Cell("model", depth=0), "same")]
    for n in range(100):
        lines += [(Cell(f"layer{n}", depth=1), "same"), *((Cell(f"part{n}.{k}", depth=2), "same") for k in range(100))]
    to = tmp_path / "tree.html"
    html.save(Document("tree", (Table.of("tree", columns, lines),)), to)
    page = look(to)
    assert page.locator(".tools").inner_text() == "101 of 10,101 rows"
    first = page.locator("tbody td:first-child")
    assert "layer1" in first.nth(3).inner_text()  # all of them would be too many to begin with
    page.get_by_role("button", name="what is inside layer0").click()
    assert "part0.0" in first.nth(3).inner_text()
    page.get_by_role("button", name="what is inside layer0").click()
    assert "layer1" in first.nth(3).inner_text()
    page.get_by_role("button", name="what is inside model").click()
    assert page.locator("tbody tr").count() == 3  # the model, and the room above and below it


JUPYTER = """<style>  /* as JupyterLab 4 and nbconvert have it */
.jp-RenderedHTMLCommon tbody tr:nth-child(odd) { background: #fff; }
:not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon td { text-align: right; }
.jp-RenderedHTMLCommon td { padding: 0.5em; white-space: normal; vertical-align: middle; max-width: none; }
</style><main class="jp-RenderedHTMLCommon"><div class="jp-RenderedHTMLCommon jp-RenderedHTML">"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_notebooks_own_style_makes_no_table_unreadable(look, tmp_path, scheme):
    to = tmp_path / "book.html"
    to.write_text(f"<!doctype html><meta charset=utf-8>{JUPYTER}{html.fragment(document('layer'))}</div></main>")
    page = look(to, scheme=scheme)
    assert page.evaluate(CONTRAST) == []
    tree = page.locator("table.tree td:first-child")
    assert tree.first.evaluate("(cell) => getComputedStyle(cell).textAlign") == "left"
