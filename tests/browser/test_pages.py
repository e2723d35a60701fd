"""Every kind of page, made of real runs, in a real browser: in light and dark, on a telephone and on a wall."""

import copy
import re

import pytest
import torch
from torch import nn

from browser.checks import ACCESS, CONTRAST
from layerscope.compare import compare
from layerscope.diagnose import diagnose
from layerscope.monitor import watch
from layerscope.recorder import record
from layerscope.rules import nonfinite
from layerscope.store import open_run

WIDE = "a_layer_with_a_name_that_is_longer_than_any_column_of_a_telephone"


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=True, average_attn_weights=False)[0]


def net():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(4)]
    return nn.Sequential(*blocks[:3], nn.ModuleDict({WIDE: blocks[3]})[WIDE])


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A folder with a report of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    reference, x = net(), torch.randn(2, 6, 8)
    models = {"fp32": reference}
    for name, fault in (("scaled", 1.5), ("broken", float("nan")), ("same", 1.0)):
        models[name] = copy.deepcopy(reference)
        with torch.no_grad():
            models[name][2][0].weight *= fault
    for name, model in models.items():
        with record(model, "**", to=folder / name, keep="both", statistics="channels", floors=name == "fp32"):
            model(x)
    compare(folder / "fp32", *(folder / name for name in ("scaled", "broken", "same"))).to_html(
        folder / "comparison.html"
    )
    compare(folder / "fp32", folder / "scaled").to_html(folder / "pair.html")
    diagnose(reference, models["scaled"], x).to_html(folder / "diagnosis.html")
    open_run(folder / "fp32").to_html(folder / "run.html")
    model = Attending()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, to=folder / "train", attention="attn", rules=[nonfinite(frames=3)]) as watching:
        for at in range(6):
            if at == 4:
                with torch.no_grad():
                    model.attn.out_proj.weight.fill_(float("nan"))
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    watching.to_html(folder / "training.html")
    return folder


KINDS = ["comparison", "pair", "diagnosis", "run", "training"]


def unfold(page):
    page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")


@pytest.mark.parametrize("kind", KINDS)
def test_every_page_can_be_read_in_light_and_in_dark(look, pages, kind):
    for scheme in ("light", "dark"):
        page = look(pages / f"{kind}.html", scheme=scheme)
        unfold(page)
        assert page.evaluate(CONTRAST) == [], scheme
        assert page.evaluate(ACCESS) == []


@pytest.mark.parametrize("kind", KINDS)
def test_no_page_is_wider_than_the_window(look, pages, kind):
    for width in (360, 400, 1280, 3840):
        page = look(pages / f"{kind}.html", width=width)
        unfold(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page = look(pages / f"{kind}.html", width=718)  # A4 with the margins of a browser
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.scrollWidth") <= 718


LABELS = """() => [...document.querySelectorAll('.xaxis:not(.slant)')].flatMap((axis) => {
  const texts = [...axis.children].filter((text) => text.checkVisibility() && text.getAttribute('y') === '18');
  const boxes = texts.map((text) => text.getBoundingClientRect());
  return boxes.slice(1).filter((box, at) => box.left < boxes[at].right).map((box) => axis.textContent);
})"""


@pytest.mark.parametrize("kind", KINDS)
def test_no_label_below_a_picture_lies_on_another(look, pages, kind):
    for width in (360, 400, 720, 1201):
        assert look(pages / f"{kind}.html", width=width).evaluate(LABELS) == [], width


def test_names_beside_a_map_and_below_a_picture_stay_on_the_page(look, pages):
    for width in (360, 1280):
        page = look(pages / "comparison.html", width=width)
        lefts = page.evaluate(
            """() => [...document.querySelectorAll('.names, .xaxis')].filter((svg) => svg.checkVisibility())
              .map((svg) => getComputedStyle(svg).overflow === 'hidden' ? svg.getBoundingClientRect().left
                : Math.min(...[...svg.querySelectorAll('text')].map((text) => text.getBoundingClientRect().left)))"""
        )
        assert lefts
        assert min(lefts) >= 0


def test_the_verdict_and_the_fault_are_the_first_things_one_reads(look, pages):
    page = look(pages / "pair.html")
    first = page.locator("main > p").first
    assert "2.0" in first.inner_text()
    assert first.bounding_box()["y"] < 100
    lit = page.locator("table.tree tbody tr", has=page.locator("td.bad")).all_inner_texts()
    assert any(re.match(r"[\u25be\u25b8\u2003 ]*0\t", line) for line in lit)
    page = look(pages / "diagnosis.html")
    assert "2.0" in page.locator("main > p").first.inner_text()


def test_heads_of_a_map_stand_side_by_side_and_the_whole_row_of_a_telephone_each(look, pages):
    for width, beside in ((1280, True), (360, False)):
        page = look(pages / "training.html", width=width)
        maps = page.locator("figure.square")
        maps.first.scroll_into_view_if_needed()
        one, two = (maps.nth(n).bounding_box() for n in (0, 1))
        assert (one["y"] == two["y"]) is beside
        assert abs(page.locator("figure.square .plot").first.bounding_box()["width"] - one["width"]) < 1
