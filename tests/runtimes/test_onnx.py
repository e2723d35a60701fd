"""ONNX files keep the contract in ONNX Runtime, within its rounding: it orders sums its own way."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import layerscope as ls
import zoo
from layerscope.runtimes import find, opened
from layerscope.runtimes import onnx as runtime
from layerscope.runtimes.sink import Seen
from runtimes.contract import Contract

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def exported(model: nn.Module, args: tuple, path: Path, **how) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        torch.onnx.export(model.eval(), args, path, dynamo=True, verbose=False, **how)
    return path


class TestOnnx(Contract):
    rtol = 1e-6
    raises = "Got invalid dimensions"

    def prepare(self, model, x):
        shapes = dict(
            zip(range(x.dim() - 1), (Dim("batch", min=1, max=64), Dim("length", min=1, max=64)), strict=False)
        )
        path = Path(tempfile.mkdtemp()) / "model.onnx"
        return opened(exported(model, (x,), path, dynamic_shapes=(shapes,)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Export a model of the zoo once."""
    files: dict[str, tuple] = {}

    def made(make):
        if make.__name__ not in files:
            model, args = make()
            path = tmp_path_factory.mktemp("onnx") / f"{make.__name__}.onnx"
            files[make.__name__] = model, exported(model, args, path), args
        return files[make.__name__]

    return made


def seen(path, wanted, *args, **how):
    sink = Seen()
    model = opened(path)
    with runtime.watch(model, wanted, sink, **how) as call:
        call(*args)
    assert sink.failures == []
    return sink


def texts(sink):
    return [f"{point} {moment}" for moment, point, _ in sink.records]


def test_it_is_found_by_its_path_and_the_recording_is_what_to_call(made):
    model, path, (x,) = made(zoo.plain)
    assert find(path) is runtime
    with ls.record(str(path), "0") as rec:
        out = rec.model(x)
    torch.testing.assert_close(out, model(x), rtol=0, atol=1e-6)
    torch.testing.assert_close(rec["0"], model[0](x), rtol=0, atol=1e-6)


def test_the_run_says_that_its_weights_have_no_fingerprints(made, tmp_path):
    _, path, (x,) = made(zoo.plain)
    with ls.record(path, "0", to=tmp_path / "run") as rec:
        rec.model(x)
    manifest = ls.open_run(tmp_path / "run").manifest
    assert manifest.settings["weights"].startswith("not fingerprinted: onnx")
    assert manifest.model["parameters"] == 67


def test_neither_the_file_nor_its_weights_are_touched(made):
    _, path, (x,) = made(zoo.plain)
    files = sorted(path.parent.iterdir())
    before = [file.read_bytes() for file in files]
    assert texts(seen(path, {"0": {"output"}}, x)) == ["0:output step=0"]
    assert [file.read_bytes() for file in sorted(path.parent.iterdir())] == before


def test_inputs_go_by_name_or_by_position_and_wrong_ones_are_told(made):
    _, path, (x,) = made(zoo.plain)
    with ls.record(path, "0") as rec:
        first = rec.model(x)
        assert torch.equal(rec.model(input=x), first)
        with pytest.raises(TypeError, match="the ONNX graph takes input; given were 0 tensors by position and wrong"):
            rec.model(wrong=x)


def test_calls_of_one_layer_are_told_apart_by_the_use_of_its_weights(made):
    model, path, (x,) = made(zoo.called_thrice)
    sink = seen(path, {"layer": {"output"}}, x)
    assert [m.call for m, _, _ in sink.records] == [0, 1, 2]
    torch.testing.assert_close(sink.records[1][2], model.layer(model.layer(x)), rtol=0, atol=1e-6)


def test_calls_of_a_module_without_weights_are_told_apart_by_what_lies_between(tmp_path):
    torch.manual_seed(0)
    model = zoo.Holder(lambda m, x: m.act(m.b(m.act(m.a(x)))), a=nn.Linear(4, 4), b=nn.Linear(4, 4), act=nn.Tanh())
    x = torch.randn(2, 4)
    sink = seen(exported(model, (x,), tmp_path / "m.onnx"), {"act": {"output"}}, x)
    assert [m.call for m, _, _ in sink.records] == [0, 1]
    torch.testing.assert_close(sink.records[0][2], model.a(x).tanh(), rtol=0, atol=1e-6)


def test_operations_are_those_of_torch_with_their_module(made):
    model, path, (x,) = made(zoo.plain)
    sink = seen(path, {}, x, ops=lambda op: op if "linear" in op else None)
    assert texts(sink) == [
        "op:aten.linear.default:input[0] step=0", "op:aten.linear.default:output step=0",
        "op:aten.linear.default:input[0] step=0 call=1", "op:aten.linear.default:output step=0 call=1",
    ]  # fmt: skip
    assert [note["within"] for note in sink.notes] == ["0", "0", "2", "2"]
    torch.testing.assert_close(sink.records[-1][2], model(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.bool])
def test_every_kind_of_number_goes_in_and_out(tmp_path, dtype):
    model = zoo.Holder(lambda m, x: m.inner(x), inner=zoo.Holder(lambda m, x: torch.cat([x, x])))
    x = torch.tensor([[0, 1, 2]]).to(dtype)
    sink = seen(exported(model, (x,), tmp_path / "m.onnx"), {"inner": {"output"}}, x)
    assert torch.equal(sink.records[0][2], torch.cat([x, x]))


# What stays silent, and what is refused ---------------------------------------------------------


def test_a_module_folded_into_a_constant_is_missing_with_the_reason(tmp_path):
    torch.manual_seed(0)
    table = zoo.Holder(lambda m: (m.weight * 2).cos())
    table.register_buffer("weight", torch.randn(4))
    model = zoo.Holder(lambda m, x: m.lin(x) + m.table(), table=table, lin=nn.Linear(4, 4))
    path = exported(model, (torch.ones(2, 4),), tmp_path / "m.onnx")
    proto = onnx.load(path)
    assert not any("table" in name for node in proto.graph.node for name in node.input)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table.weight.numpy(), "table.weight"))
    onnx.save(proto, path)
    with ls.record(path, ["lin", "table"]) as rec:
        rec.model(torch.ones(2, 4))
    [missing] = rec.missing
    assert missing.point == "table:output"
    assert "it was folded into a constant" in missing.reason


def test_a_dead_output_is_not_in_the_file(made):
    """Export keeps the attention weights that nobody uses; the ONNX exporter takes them out."""
    _, path, (x,) = made(zoo.attention)
    assert texts(seen(path, {"attn": {"output"}}, x)) == ["attn:output step=0"]
    with pytest.raises(RuntimeError, match="it has no such leaf"), ls.record(path, "attn:output[1]") as rec:
        rec.model(x)


def test_a_file_without_names_is_refused_with_the_way_that_works(made, tmp_path):
    _, path, _ = made(zoo.plain)
    proto = onnx.load(path)
    for node in proto.graph.node:
        del node.metadata_props[:]
    onnx.save(proto, tmp_path / "stripped.onnx")
    with pytest.raises(TypeError, match=r"keeps no names of modules.*record_layer_outputs=True"):
        ls.record(tmp_path / "stripped.onnx", "0")


def test_gradients_are_refused(made):
    with pytest.raises(TypeError, match="gradients are not seen in ONNX Runtime"):
        ls.record(made(zoo.plain)[1], "0:grad_input")


def test_what_is_not_onnx_is_told(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"not a model at all")
    with pytest.raises(ValueError, match="cannot be read as an ONNX model"):
        ls.record(tmp_path / "m.onnx", "0")
