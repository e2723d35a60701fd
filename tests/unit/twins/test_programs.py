"""Floors of programs whose graphs are closed: their operations are moved, and the program stays as it was."""

from __future__ import annotations

import pytest
import torch

import layerscope as ls
import zoo
from layerscope.errors import Unsupported

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def net():
    torch.manual_seed(0)
    up, norm, down = torch.nn.Linear(6, 512), torch.nn.LayerNorm(512), torch.nn.Linear(512, 6)
    return torch.nn.Sequential(up, norm, torch.nn.GELU(), down).eval()


@pytest.fixture(scope="module", params=["torchscript", "export"])
def program(request):
    model = net()
    if request.param == "torchscript":
        return torch.jit.trace(model, X)
    return torch.export.export(model, (X,))


def recorded(program, model=None):
    with torch.no_grad(), ls.record(program, "**:io", keep="tensor") as rec:
        (model or rec.model or program)(X)
    return rec.run


def test_its_own_arithmetic_has_floors_and_a_port_is_judged_by_them(program):
    reference = recorded(program)
    floors = ls.measure_floors(program, (X,), reference)
    rows = floors.to_dicts()
    assert {row["class"] for row in rows} == {"float32"}
    by = {row["point"]: row["relative_l2"] for row in rows}
    assert 0 < by["0:output"] < 1e-6
    assert any("coarser arithmetics" in said for said in floors.left_out)
    healthy, faulty = net().double(), net()
    with torch.no_grad(), ls.record(healthy, "**:io", keep="tensor") as rec:
        healthy(X.double())
    result = ls.compare(reference, rec.run)
    assert str(result.verdict) == "noise", result.verdict.because
    assert {row.floor.source for row in result.rows if row.floor is not None} == {"floors"}
    with torch.no_grad():
        faulty[3].weight[1:3] *= 1.0001
    result = ls.compare(reference, recorded(faulty, faulty))
    assert (str(result.verdict), result.first_divergence.name) == ("differs", "3")


def test_the_program_is_left_as_it_was(program):
    before = recorded(program)
    ls.measure_floors(program, (X,), before)
    assert str(ls.compare(before, recorded(program)).verdict) == "same"


def test_other_inputs_than_were_recorded_are_said(program):
    with pytest.raises(Unsupported, match="a replay of the first step is not what was recorded"):
        ls.measure_floors(program, (X + 1,), recorded(program))


def test_a_file_is_read_by_its_path(tmp_path):
    model, args = zoo.plain()
    torch.jit.save(torch.jit.trace(model, args), tmp_path / "script.jit")
    with ls.record(tmp_path / "script.jit", "**", keep="tensor") as rec:
        rec.model(*args)
    assert len(ls.measure_floors(tmp_path / "script.jit", args, rec.run))


def test_a_recording_measures_what_its_own_call_was_given(program, tmp_path):
    with torch.no_grad(), ls.record(program, "**", to=tmp_path / "run", floors=True) as rec:
        rec.model(X)
        rec.model(X + 1)
    run = ls.open_run(tmp_path / "run")
    if rec.model is program:  # TorchScript has no place to look from
        assert "ls.measure_floors(model, inputs, run)" in run.manifest.settings["floors"][0]
    else:
        assert {row["class"] for row in run.floors} == {"float32"}


def test_an_onnx_file_says_why_it_has_none(tmp_path):
    helper = pytest.importorskip("onnx").helper
    x, y = (helper.make_tensor_value_info(name, 1, [4, 6]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], name="/act/Relu")], "g", [x], [y])
    model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 20)])
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with ls.record(tmp_path / "m.onnx", "**", keep="tensor", floors=True) as rec:
        rec.model(X)
    assert "ONNX Runtime shows no operation" in rec.run.manifest.settings["floors"][0]
