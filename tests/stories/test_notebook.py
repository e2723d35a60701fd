"""A notebook that records, compares and diagnoses: everything it shows draws itself, also in the exported page."""

import base64
import os
import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

SRC = Path(__file__).parents[2] / "src"
CELLS = [
    """
import copy, torch, layerscope as ls
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
bad = copy.deepcopy(model)
with torch.no_grad():
    bad[2].weight *= 1.5
x = torch.randn(4, 8)
with ls.record(model, ["0", "2"], to="good", keep="both", statistics="full") as rec:
    model(x)
with ls.record(bad, ["0", "2"], to="bad"):
    bad(x)
rec
""",
    "ls.open_run('good')",
    "ls.open_run('good').summary('0')",
    "result = ls.compare('good', 'bad'); result",
    "ls.diagnose(model, bad, x)",
    """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ls.watch(model, optimizer) as watching:
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
watching
""",
    """
import layerscope.report.notebook as notebook
from IPython.display import DisplayHandle
notebook.PATIENCE = notebook.EVERY = 0
told, update = [], DisplayHandle.update
DisplayHandle.update = lambda self, shown, **kwargs: (told.append(shown.data), update(self, shown, **kwargs))
ls.compare('good', 'bad'); ls.diagnose(model, bad, x)
'\\n'.join(told)
""",
    "result.plot()",
    "ls.record(model, '0')",
]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": str(SRC), "JUPYTER_PLATFORM_DIRS": "1", "IPYTHONDIR": str(folder)}
    try:
        nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return book


def html_of(notebook, cell):
    shown = [output for output in notebook.cells[cell].outputs if "data" in output]
    assert shown, notebook.cells[cell].outputs
    return shown[-1]["data"]


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (0, "complete: 1 forward, 2 points"),
        (1, "complete: 1 forward, 2 points"),
        (2, "absmax"),
        (3, "bad differs from good: 2 parts first"),
        (4, "2 makes the difference"),
        (5, "no rule has raised an alarm"),
        (8, "nothing is recorded before the block begins"),
    ],
)
def test_what_a_cell_gives_draws_itself(notebook, cell, says):
    shown = html_of(notebook, cell)["text/html"]
    assert says in shown
    assert "<script" not in shown
    assert not re.search(r"(src|href)=\"(?!#)", shown)


def test_pictures_are_there_where_there_is_something_to_draw(notebook):
    assert 'class="histograms"' in html_of(notebook, 2)["text/html"]
    assert 'class="curves"' in html_of(notebook, 3)["text/html"]


def test_a_figure_for_a_paper_is_one_of_matplotlibs(notebook):
    assert base64.b64decode(html_of(notebook, 7)["image/png"]).startswith(b"\x89PNG")


def test_long_work_shows_a_bar_that_goes_when_it_is_done(notebook):
    told = html_of(notebook, 6)["text/plain"]
    assert re.search(r'comparing [02] <progress value="2" max="2">', told)
    assert "diagnosing: looking into 0, 2 <progress>" in told
    bars = [one for one in notebook.cells[6].outputs if one.output_type == "display_data"]
    assert len(bars) == 2
    assert {one["data"].get("text/html") for one in bars} == {""}


def test_the_exported_notebook_shows_the_same(notebook):
    exporter = pytest.importorskip("nbconvert").HTMLExporter()
    page, _ = exporter.from_notebook_node(notebook)
    assert "bad differs from good: 2 parts first" in page
    assert page.count('class="layerscope"') >= 6
