"""`layerscope report` and `--html`: one file to look at, from every command that has a page."""

import json
import re

import pytest

from layerscope.recorder import record
from layerscope.store import open_run


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    import torch
    from torch import nn

    folder = tmp_path_factory.mktemp("pair")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    for name in ("a", "b"):
        with record(model, ["0", "2"], to=folder / name, keep="both"):
            model(torch.ones(2, 4))
        with torch.no_grad():
            model[2].weight *= 2
    return folder


def torch_version() -> str:
    import torch

    return torch.__version__


def page(path) -> str:
    text = path.read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert "default-src 'none'" in text
    return text


def test_a_report_needs_no_torch(fresh, cli, pair, trained, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is not installed')\n")
    answer = fresh("report", trained, "-o", "x.html")
    assert (answer.code, answer.out, answer.err) == (0, "the report is x.html\n", "")
    assert "layers and steps" in page(tmp_path / "x.html")
    cli("compare", pair / "a", pair / "b", "--save_comparison", "c.json")
    assert fresh("report", "c.json", "-o", "y.html").code == 0
    text = page(tmp_path / "y.html")
    assert "b differs from a" in text
    assert "2 rows without histograms and worst elements: its tensors are read with torch, which is not" in text


def test_a_report_of_a_saved_comparison_is_that_of_the_comparison(cli, pair, tmp_path):
    answer = cli("compare", pair / "a", pair / "b", "--save_comparison", "c.json", "--html", "deep/now.html")
    assert answer.code == 1
    assert answer.err == "layerscope: the report is deep/now.html\n"
    assert cli("report", "c.json", "-o", "later.html").code == 0
    now, later = page(tmp_path / "deep" / "now.html"), page(tmp_path / "later.html")
    assert f"layerscope compare {pair / 'a'} {pair / 'b'} --save_comparison c.json --html deep/now.html" in now
    made = re.compile(r'<section class="facts"><ul><li class="long"><b>made with</b>.*?</section>|choice\d+')
    assert made.sub("", now) == made.sub("", later)


def test_a_report_says_which_command_made_a_run(cli, tmp_path):
    (tmp_path / "models.py").write_text(
        "import torch\ndef net():\n    return torch.nn.Linear(4, 4), torch.ones(2, 4)\n"
    )
    assert cli("record", "models.py:net", ".", "-o", "the run", "--no-floors").code == 0
    assert cli("report", "the run").code == 0
    text = page(tmp_path / "report.html")
    assert (
        "layerscope record models.py:net . -o &#x27;the run&#x27; --no-floors" in text.partition("provenance</h2>")[2]
    )


def test_several_stand_on_one_page_under_their_first_sentence(cli, pair, tmp_path):
    cli("compare", pair / "a", pair / "b", "--save_comparison", "c.json")
    assert cli("report", "c.json", pair / "a", pair / "b").code == 0
    text = page(tmp_path / "report.html")
    assert "<h1>3 reports</h1>" in text
    ids = re.findall(r' id="(row-[^"]+)"', text)
    assert len(ids) == len(set(ids)) > 6
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)


def test_what_cannot_be_reported_is_a_sentence(cli, tmp_path):
    (tmp_path / "x.json").write_text("{}")
    for what in ("nowhere", "x.json"):
        answer = cli("report", what)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.startswith("layerscope: ")
        assert what in answer.err
    assert not (tmp_path / "report.html").exists()


def test_show_writes_what_it_shows(cli, pair, tmp_path):
    answer = cli("show", pair / "a", "0", "--html", "x.html")
    assert answer.code == 0
    assert "mean" in answer.out
    text = page(tmp_path / "x.html")
    mean = open_run(pair / "a").summary("0").mean
    assert f'data-v="{mean!r}"' in text
    assert ">2<" not in text.split("in detail")[0].split("points</h2>")[-1]
    assert cli("show", pair / "a", "--over", "steps", "--point", "0", "--html", "y.html").code == 0
    assert page(tmp_path / "y.html")
    assert cli("show", pair / "a", "--adjacent", "--html", "z.html").code == 0
    assert "change from each layer to the next" in page(tmp_path / "z.html")


def test_json_still_goes_to_stdout_alone(cli, pair):
    answer = cli("compare", pair / "a", pair / "b", "--json", "--html", "x.html")
    assert json.loads(answer.out)["verdict"] == "differs"


def test_a_diagnosis_is_a_report(cli, tmp_path):
    (tmp_path / "models.py").write_text(
        "import torch\n"
        "def net(scale):\n"
        "    torch.manual_seed(0)\n"
        "    m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))\n"
        "    with torch.no_grad():\n"
        "        m[2].weight *= scale\n"
        "    return m, torch.ones(3, 8)\n"
        "def good():\n    return net(1.0)\n"
        "def bad():\n    return net(1.05)\n"
    )
    assert cli("diagnose", "models.py:good", "models.py:bad", "--html", "x.html").code == 1
    text = page(tmp_path / "x.html")
    assert "evidence: 2, " in text
    assert "each module on what the reference gave it, against its floor" in text
    assert "goes with 2 alone" in text
    made = text.partition("provenance</h2>")[2]
    assert made.count("torch.nn.modules.container.Sequential, 144 parameters, float32, cpu") == 2
    assert "3\u00d78 float32" in made
    assert f"torch {torch_version()}" in made
    assert "layerscope diagnose models.py:good models.py:bad --html x.html" in made
