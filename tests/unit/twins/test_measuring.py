"""A reference measures its floors and is left as it was; what cannot be measured is said."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import layerscope as ls
from layerscope.errors import Damaged, Unsupported
from layerscope.twins.begun import Begun

COLUMNS = ["point", "class", "relative_l2", "median", "p90", "worst", "column", "factor", "checked"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        return x + self.down(torch.nn.functional.gelu(self.norm(self.up(x))))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


X = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1))


def test_floors_have_a_row_for_each_point_and_class_and_checks_for_weighted_modules(net, tmp_path):
    with torch.no_grad(), ls.record(net, "**:io", to=tmp_path / "run", floors=True):
        net(X)
    run = ls.open_run(tmp_path / "run")
    rows = run.floors.to_dicts()
    assert list(rows[0]) == COLUMNS
    assert {row["class"] for row in rows} == {"float32", "float16", "bfloat16"}
    by = {(row["point"], row["class"]): row for row in rows}
    assert by["up:output", "float32"]["relative_l2"] < 1e-6 < by["up:output", "bfloat16"]["relative_l2"] < 0.02
    assert by["up:output", "bfloat16"]["checked"] > by["up:output", "float32"]["checked"] > 0
    assert by[".:output", "float32"]["checked"] is None
    assert any("floors of" in said for said in run.manifest.settings["floors"])
    assert run.complete


def test_nothing_of_the_user_s_is_changed(net):
    alike = Net().eval()
    alike.load_state_dict(net.state_dict())
    torch.manual_seed(5)
    expected = [alike(X), torch.rand(3)]
    expected[0].square().mean().backward()
    torch.manual_seed(5)
    with ls.record(net, "**:io", floors=True) as rec:
        out = net(X)
        out.square().mean().backward()
    assert rec.run.floors.points
    assert torch.equal(out, expected[0])
    assert torch.equal(torch.rand(3), expected[1])
    assert torch.equal(net.seen, alike.seen)
    for mine, theirs in zip(net.parameters(), alike.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine.grad, theirs.grad)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_floors_are_added_to_a_finished_run_and_other_inputs_are_refused(net, tmp_path):
    with torch.no_grad(), ls.record(net, "**:io", to=tmp_path / "run"):
        net(X)
    assert len(ls.open_run(tmp_path / "run").floors) == 0
    with pytest.raises(Unsupported, match="a replay of the first step is not what was recorded"):
        ls.measure_floors(net, X + 1, tmp_path / "run")
    assert len(ls.open_run(tmp_path / "run").floors) == 0
    ls.measure_floors(net, (X,), tmp_path / "run")
    assert len(ls.open_run(tmp_path / "run").floors) > 0


def test_weights_are_left_out_when_asked(net, tmp_path):
    with torch.no_grad(), ls.record(net, "**:io", to=tmp_path / "run", floors="no-weights"):
        net(X)
    floors = ls.open_run(tmp_path / "run").floors
    assert (dict(floors.checks), dict(floors.weights)) == ({}, {})
    assert any("check rows" in said for said in floors.left_out)
    with pytest.raises(ValueError, match="no-weights"):
        ls.record(net, "**", floors="yes")


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(8)])
def test_active_dropout_and_updating_statistics_are_refused_in_a_sentence(layer, caplog):
    model = nn.Sequential(nn.Linear(16, 16), layer)
    with ls.record(model, "**", floors=True) as rec:
        model(X)
    assert "model.eval()" in caplog.text
    assert len(rec.run.floors) == 0


def test_an_interrupt_leaves_the_run_as_it_was(net, tmp_path):
    def stop(what, done, total):
        if done == 2:
            raise KeyboardInterrupt

    told = {"to": tmp_path / "run", "floors": True, "options": ls.RecordOptions(progress=stop)}
    with pytest.raises(KeyboardInterrupt), torch.no_grad(), ls.record(net, "**:io", **told):
        net(X)
    run = ls.open_run(tmp_path / "run")
    assert (run.complete, len(run.floors)) == (True, 0)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_damaged_or_exchanged_file_is_said_and_its_floors_are_left_out(net, tmp_path):
    for name in ("one", "other"):
        with torch.no_grad(), ls.record(net, "**:io", to=tmp_path / name, floors=True):
            net(X)
    file = tmp_path / "one" / "floors.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(Damaged, match="checksum"):
        _ = ls.open_run(tmp_path / "one").floors
    result = ls.compare(tmp_path / "one", tmp_path / "other")
    assert any("its floors are left out" in note for note in result.candidates[0].notes)


def test_a_run_at_any_address_carries_them(net):
    with torch.no_grad(), ls.record(net, "**:io", to="memory://floors/run", floors=True):
        net(X)
    assert len(ls.open_run("memory://floors/run").floors) > 0


def test_what_cannot_be_copied_is_the_reason():
    begun = Begun(Net())
    begun.take((iter([1]), open), {"x": (n for n in [1])})
    assert "cannot be copied" in begun.failed


def test_a_twin_is_held_to_the_worst_of_three(net):
    with torch.no_grad(), ls.record(net, "**:io", floors=True) as rec:
        net(X)
    floors = rec.run.floors
    twins = floors.twins["float32"]
    assert len(twins) == 3
    at = floors.points.index("down:output")
    worst = max(twin[at].relative_l2 for twin in twins.values())
    found = next(r for r in floors.to_dicts() if (r["point"], r["class"]) == ("down:output", "float32"))
    assert math.isclose(found["relative_l2"], worst)
