"""The page of a run: its numbers are the tensors', and what is not drawn is said."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from layerscope.monitor import watch
from layerscope.pages import alarm_timeline as alarms
from layerscope.pages.run import page, summary
from layerscope.recorder import record
from layerscope.report import Curves, Fold, HeatMap, Histograms, Select, Sentence, Table, Timeline
from layerscope.rules import exploding, nonfinite
from layerscope.store import open_run


def walk(parts):
    for part in parts:
        yield part
        if isinstance(part, Fold):
            yield from walk(part.parts)
        elif isinstance(part, Select):
            for _, chosen in part.options:
                yield from walk(chosen)


def of(document, kind, **what):
    found = [part for part in walk(document.parts) if isinstance(part, kind)]
    return [part for part in found if all(getattr(part, key) == value for key, value in what.items())]


def text(document):
    return " ".join(part.text for part in of(document, Sentence))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Five steps of three layers, with tensors and full statistics; the input doubles each step."""
    to = tmp_path_factory.mktemp("runs") / "trained"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    with record(model, ["0", "1", "2"], to=to, keep="both", statistics="full"):
        for step in range(5):
            model(torch.full((4, 8), 2.0**step))
    return open_run(to)


def values(run, name, step):
    return run.tensor(name, step=step).double().numpy()


def rms(array):
    return float(np.sqrt((array**2).mean()))


def test_statistics_over_depth_are_those_of_the_latest_tensors(trained):
    drawn = page(trained, "x")
    curves = {part.title: part for part in of(drawn, Curves, key="depth")}
    assert curves["rms, outputs"].labels == ("0", "1", "2")
    assert curves["rms, outputs"].lines[0].values == pytest.approx(
        [rms(values(trained, n, 4)) for n in "012"], rel=1e-6
    )
    largest = [float(abs(values(trained, n, 4)).max()) for n in "012"]
    assert curves["absmax, outputs"].lines[0].values == pytest.approx(largest, rel=1e-6)


def test_another_moment_and_some_points_can_be_asked_for(trained):
    drawn = page(trained, "x", patterns=["1"], given={"step": 2})
    (table,) = of(drawn, Table, key="every")
    assert [row[0].value for row in table.rows] == ["1"]
    at = [column.key for column in table.columns].index("rms")
    assert table.rows[0][at].value == pytest.approx(rms(values(trained, "1", 2)), rel=1e-6)


def test_layers_and_steps_are_a_map_of_every_record(trained):
    drawn = page(trained, "x")
    heat = next(part for part in of(drawn, HeatMap) if part.title == "rms, outputs")
    assert (heat.rows, heat.columns) == (("0", "1", "2"), ("0", "1", "2", "3", "4"))
    expected = [[rms(values(trained, name, step)) for step in range(5)] for name in "012"]
    assert np.allclose(heat.values, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("statistic", "of_numpy"),
    [
        ("mean", np.mean),
        ("std", np.std),
        ("min", np.min),
        ("max", np.max),
        ("l1", lambda a: abs(a).sum()),
        ("l2", lambda a: np.sqrt((a**2).sum())),
        ("p50", lambda a: np.percentile(a, 50)),
    ],
)
def test_any_statistic_is_a_map_and_a_curve(trained, statistic, of_numpy):
    drawn = page(trained, "x")
    within = 8e-3 if statistic == "p50" else 1e-6
    heat = next(part for part in of(drawn, HeatMap) if part.title == f"{statistic}, outputs")
    expected = [[of_numpy(values(trained, name, step)) for step in range(5)] for name in "012"]
    assert np.allclose(heat.values, expected, rtol=within, atol=1e-9)
    curve = next(part for part in of(drawn, Curves, key="depth") if part.title == f"{statistic}, outputs")
    assert np.allclose(curve.lines[0].values, [row[4] for row in expected], rtol=within, atol=1e-9)


def test_what_was_not_kept_and_what_is_nowhere_is_not_offered(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with record(model, ["0", "1"], to=tmp_path / "run", keep="summary", statistics="moments"):
        for _ in range(2):
            model(torch.ones(4, 8))
    titles = {part.title for part in (*of(page(open_run(tmp_path / "run"), "x"), HeatMap, key="steps"),)}
    assert {"rms, outputs", "l1, outputs"} <= titles
    assert not titles & {"p50, outputs", "share of zeros, outputs", "not finite, outputs"}


def test_growth_follows_the_layers_and_not_what_is_inside_them(tmp_path):
    torch.manual_seed(0)
    blocks = nn.ModuleDict({"layers": nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))})
    with record(blocks, ["layers.*", "layers.*.*"], to=tmp_path / "run", keep="both"):
        blocks["layers"](torch.ones(2, 4))
    run = open_run(tmp_path / "run")
    (growth,) = of(page(run, "x"), Curves, key="growth")
    assert growth.labels == ("layers.1", "layers.2")
    sizes = [rms(run.tensor(f"layers.{n}").double().numpy()) for n in range(3)]
    assert growth.lines[0].values == pytest.approx([sizes[1] / sizes[0], sizes[2] / sizes[1]], rel=1e-6)


def test_the_whole_model_has_a_name_in_pictures(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with record(model, "**", to=tmp_path / "run", keep="summary"):
        for _ in range(2):
            model(torch.ones(2, 4))
    drawn = page(open_run(tmp_path / "run"), "x")
    assert of(drawn, Curves, key="depth")[0].labels[-1] == "the model"
    assert of(drawn, HeatMap, key="steps")[0].rows[-1] == "the model"


def test_of_many_steps_and_points_some_are_drawn_and_that_is_said(trained, monkeypatch):
    monkeypatch.setattr("layerscope.pages.training.RECORDS", 6)
    monkeypatch.setattr("layerscope.pages.training.DOWN", 2)
    drawn = page(trained, "x")
    assert "3 of 5 steps are drawn, evenly spread" in text(drawn)
    assert "2 of 3 points are drawn, evenly spread" in text(drawn)
    heat = next(part for part in of(drawn, HeatMap) if part.title == "rms, outputs")
    assert (heat.rows, heat.columns) == (("0", "2"), ("0", "2", "4"))


def test_each_point_has_the_histogram_that_numpy_counts(trained):
    (histogram,) = of(page(trained, "x", patterns=["2"]), Histograms)
    ((_, counts),) = histogram.counts
    assert counts == tuple(np.histogram(values(trained, "2", 4), histogram.edges)[0])


def test_points_beyond_those_that_open_are_said(trained, monkeypatch):
    monkeypatch.setattr("layerscope.pages.run.DETAILED", 1)
    drawn = page(trained, "x")
    assert "the first 1 of 3 points open" in text(drawn)
    assert len(of(drawn, Histograms)) == 1


def test_tensors_without_statistics_are_read_up_to_a_bound_and_that_is_said(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with record(model, ["0", "1"], to=tmp_path / "bare", keep="tensor"):
        model(torch.ones(4, 8))
    run = open_run(tmp_path / "bare")
    assert next(run.records()).summary is None
    assert len(of(page(run, "x"), Fold)) == 3  # one for each point, and the one that holds them
    monkeypatch.setattr("layerscope.pages.run.READ", 4 * 8 * 4)
    drawn = page(run, "x")
    assert "1 tensor without statistics left out" in text(drawn)
    assert len(of(drawn, Fold)) == 2


def test_channels_are_shown_where_they_were_kept(tmp_path):
    model = nn.Linear(8, 8)
    with torch.no_grad():
        model.weight[3] *= 1000
    for name, statistics in (("with", "channels"), ("without", "full")):
        with record(model, ".", to=tmp_path / name, keep="both", statistics=statistics):
            model(torch.randn(16, 8))
    run = open_run(tmp_path / "with")
    drawn = page(run, "x")
    (grid,) = of(drawn, Table, key="outliers")
    assert [row[1].value for row in grid.rows] == [3]
    (channels,) = of(drawn, Curves, key="curve")
    assert channels.lines[0].values == pytest.approx(abs(run.tensor(".").numpy()).max(0), rel=1e-5)
    assert "the run has no statistics of channels" in text(page(open_run(tmp_path / "without"), "x"))
    assert "the run has no statistics of channels" not in text(drawn)


def test_what_is_not_finite_stands_on_top_and_in_the_map(tmp_path):
    model = nn.Identity()
    with record(model, ".", to=tmp_path / "run", keep="summary"):
        model(torch.ones(4))
        model(torch.tensor([1.0, float("nan")]))
    drawn = page(open_run(tmp_path / "run"), "x")
    assert "not finite: first in" in text(drawn)
    heat = of(drawn, HeatMap)[0]
    assert heat.values[0][0] == 1.0
    assert np.isnan(heat.values[0][1])


def test_an_empty_run_and_one_without_statistics_have_a_page(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with record(model, ["0"], to=tmp_path / "run", keep="summary"):
        model(torch.empty(0, 2))
    drawn = page(open_run(tmp_path / "run"), "x")
    assert of(drawn, Table, key="every")
    assert of(summary(open_run(tmp_path / "run")), Table, key="tree")


def test_an_unfinished_run_says_what_is_there_and_whether_more_is_to_come(tmp_path):
    model = nn.Linear(2, 2)
    with record(model, ".", to=tmp_path / "run", keep="summary") as rec:
        for _ in range(3):
            model(torch.ones(1, 2))
        rec.flush()
        shutil.copytree(tmp_path / "run", tmp_path / "killed")
        assert "being written now: 1 point, 3 records so far" in text(page(open_run(tmp_path / "run"), "x"))
    said = text(page(open_run(tmp_path / "killed"), "x"))
    assert "its writer is gone, it was killed or has crashed: 1 point, 3 records are there; `layerscope recover" in said


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=True, average_attn_weights=False)


def test_attention_maps_are_drawn_head_by_head(tmp_path):
    torch.manual_seed(0)
    model = Attending()
    with record(model, ["attn"], to=tmp_path / "run", keep="both") as rec:
        for epoch in range(2):
            rec.moment(epoch=epoch)
            model(torch.randn(2, 6, 8))
    run = open_run(tmp_path / "run")
    maps = of(page(run, "x"), HeatMap, key="attention")
    assert len(maps) == 4  # two heads at each of two epochs
    point = next(p for p in run.points if p.leaf == (1,))
    weights = run.tensor(point, epoch=1)[0, 1].numpy()
    assert np.allclose(maps[3].values, weights, rtol=1e-5)
    assert all(one.square for one in maps)
    given = of(page(run, "x"), HeatMap, key="given")[1]
    assert given.rows == ("head 0", "head 1")
    assert np.allclose(given.values, run.tensor(point, epoch=1)[0].numpy().mean(axis=1), rtol=1e-5)


def test_a_long_attention_map_shows_the_largest_of_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr("layerscope.pages.training.TOKENS", 3)
    model = Attending()
    with record(model, ["attn"], to=tmp_path / "run", keep="both"):
        model(torch.randn(1, 7, 8))
    run = open_run(tmp_path / "run")
    first = of(page(run, "x"), HeatMap, key="attention")[0]
    weights = run.tensor(next(p for p in run.points if p.leaf == (1,)))[0, 0].numpy()
    expected = [[weights[a : a + 3, b : b + 3].max() for b in (0, 3, 6)] for a in (0, 3, 6)]
    assert np.allclose(first.values, expected, rtol=1e-5)
    assert first.rows == ("token 0", "token 3", "token 6")


def test_a_watched_training_keeps_its_alarms_beside_its_run_and_shows_them(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, to=tmp_path / "run", rules=[nonfinite(frames=3), exploding()]) as watching:
        for step in range(6):
            if step == 4:
                with torch.no_grad():
                    model.weight.fill_(float("nan"))
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    run = open_run(tmp_path / "run")
    (line,) = of(page(run, "x"), Timeline)
    assert [event.at for event in line.events] == [alarm.moment.step for alarm in watching.alarms]
    assert "nonfinite" in line.events[0].text
    first = page(run, "x").parts[0]
    assert isinstance(first, Sentence)
    assert first.text.startswith("1 alarm; the first, at step 4: nonfinite: .:output: ")
    (frames,) = of(page(run, "x"), HeatMap, key="frames")
    assert frames.columns == ("step 1", "step 2", "step 3")
    at = frames.rows.index(".:output")
    sizes = [run.summary(".", step=step).l2 / 2 / 2**0.5 for step in range(1, 4)]
    assert frames.values[at] == pytest.approx(sizes, rel=1e-6)
    watching.to_html(tmp_path / "x.html")
    shown = (tmp_path / "x.html").read_text("utf-8")
    assert "the frames before step 4" in shown
    assert shown.count('class="timeline"') == 1


def test_alarms_that_do_not_read_are_passed_over(tmp_path):
    model = nn.Linear(2, 2)
    with record(model, ".", to=tmp_path / "run", keep="summary"):
        model(torch.ones(1, 2))
    run = open_run(tmp_path / "run")
    assert alarms.kept(run) == []
    alarms.keep(str(tmp_path / "run"), {"step": 3, "value": float("nan")})
    torn = {"step": 3, "frames": [{"rms": 3}, 7, {"rms": {"0": "x", "1": "Infinity", "2": [], "3": 2.5}}]}
    alarms.keep(str(tmp_path / "run"), torn)
    (drawn,) = of(page(run, "x"), HeatMap, key="frames")
    assert drawn.values == ((None,), (float("inf"),), (None,), (2.5,))
    with (tmp_path / "run" / alarms.FILE).open("a") as file:
        file.write('[]\n{"step": "x"}\n\x00\n{"step": 4, "rule": "torn')
    assert alarms.kept(run) == [{"step": 3, "value": "NaN"}, torn]
    assert json.dumps(alarms.kept(run))


def test_a_figure_has_the_statistic_that_is_asked_for(trained):
    figure = trained.plot("absmax", "0", "2", step=1)
    (axis,) = figure.axes
    expected = [float(abs(values(trained, name, 1)).max()) for name in "02"]
    assert axis.lines[0].get_ydata() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="there is no statistic 'x'; there is rms"):
        trained.plot("x")
