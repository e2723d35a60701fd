"""Somebody has an .onnx file that an older exporter wrote, or ONNX Runtime quantised, and asks which layer is off.

Such files have no metadata of modules: names of nodes, or their order, are what is left. Quantised tensors are whole
numbers; what they are worth stands in the graph.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import layerscope as ls
import zoo

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
quantization = pytest.importorskip("onnxruntime.quantization")

WIDTH = 32


def block():
    step = {"norm": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, 2 * WIDTH), "down": nn.Linear(2 * WIDTH, WIDTH)}
    return zoo.Holder(lambda m, x: x + m.down(m.act(m.up(m.norm(x)))), act=nn.GELU(), **step)


def forward(model, ids):
    x = model.embedding(ids)
    for layer in model.layers:
        x = model.mix(layer(x))
    return model.head(x)


def made(*, fault=""):
    torch.manual_seed(0)
    layers = nn.ModuleList([block() for _ in range(4)])
    parts = {"embedding": nn.Embedding(50, WIDTH), "mix": nn.Linear(WIDTH, WIDTH), "head": nn.Linear(WIDTH, 50)}
    model = zoo.Holder(forward, layers=layers, **parts).eval()
    if fault:
        with torch.no_grad():
            model.get_submodule(fault).weight.mul_(1.5)
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 50, (4, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def reference(ids):
    model = made()
    with torch.no_grad(), ls.record(model, "**:io", floors=True) as rec:
        model(ids)
    return rec.run


@pytest.fixture(scope="module")
def exported(ids, tmp_path_factory):
    """Export a model once, with metadata or with names alone."""
    folder = tmp_path_factory.mktemp("onnx")

    def exported(*, dynamo=False, fault=""):
        path = folder / f"{'metadata' if dynamo else 'names'}{fault}.onnx"
        if not path.exists():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.onnx.export(
                    made(fault=fault), (ids,), path, dynamo=dynamo, **({"verbose": False} if dynamo else {})
                )
        return path

    return exported


class Reader(quantization.CalibrationDataReader):
    def __init__(self, path, ids):
        name = onnx.load(path).graph.input[0].name
        self.batches = iter([{name: ids.numpy()}])

    def get_next(self):
        return next(self.batches, None)


def quantised(path, ids, how):
    there = path.with_name(f"{path.stem}-{how}.onnx")
    if how == "dynamic":
        quantization.quantize_dynamic(path, there)
    else:
        form = quantization.QuantFormat.QDQ if how == "QDQ" else quantization.QuantFormat.QOperator
        quantization.quantize_static(path, there, Reader(path, ids), quant_format=form, per_channel=True)
    return there


def recorded(path, ids, taps="**:io"):
    with ls.record(path, taps) as rec:
        rec.model(ids)
    return rec.run


def nameless(path):
    proto = onnx.load(path)
    for at, node in enumerate(proto.graph.node):
        node.name = f"node{at}"
        del node.metadata_props[:]
    onnx.save(proto, path.with_name(f"{path.stem}-nameless.onnx"))
    return path.with_name(f"{path.stem}-nameless.onnx")


def test_a_file_of_the_older_exporter_is_read_by_the_names_of_its_nodes(reference, exported, ids):
    run = recorded(exported(), ids)
    result = ls.compare(reference, run)
    assert str(result.verdict) == "noise", result.verdict.because
    assert {row.kind for row in result.rows} <= {"same", "noise"}
    assert [row.moment.call for row in result.rows if str(row.point) == "mix:output"] == [0, 1, 2, 3]
    assert any("read from the names of its nodes" in note for note in result.candidates[0].notes)


def test_a_fault_in_such_a_file_is_named_in_the_model_s_words(reference, exported, ids):
    path = exported(fault="layers.2.up")
    assert ls.compare(reference, recorded(path, ids)).first_divergence.name == "layers.2.up"


def test_a_file_without_names_is_read_by_its_operations(exported, ids):
    path = nameless(exported(fault="layers.2.up"))
    model = made()
    with torch.no_grad(), ls.record(model, "type:Linear", floors=True) as rec:
        model(ids)
    result = ls.compare(rec.run, recorded(path, ids, "type:MatMul"))
    assert result.first_divergence.name == "layers.2.up"
    assert any("numbered in the order they run" in note for note in result.candidates[0].notes)
    float_file = nameless(exported())
    result = ls.compare(recorded(float_file, ids), recorded(path, ids))
    assert result.first_divergence.name == "MatMul6"


@pytest.mark.parametrize("dynamo", [True, False], ids=["metadata", "names"])
@pytest.mark.parametrize("how", ["QDQ", "QOperator", "dynamic"])
def test_a_healthy_quantised_file_is_quantised_and_its_tensors_are_compared_by_what_they_are_worth(
    reference, exported, ids, how, dynamo
):
    path = quantised(exported(dynamo=dynamo), ids, how)
    result = ls.compare(reference, recorded(path, ids))
    assert str(result.verdict) == "quantised", result.verdict.because
    compared = [row for row in result.rows if row.metrics is not None]
    assert len(compared) >= 30
    assert all(row.metrics.relative_l2 < 0.1 for row in compared)
    assert all(row.counterpart is None for row in result.rows if row.kind == "unpaired")


@pytest.mark.parametrize("how", ["QDQ", "dynamic"])
def test_of_a_quantised_file_the_layer_with_a_wrong_weight_stands_out(reference, exported, ids, how):
    path = quantised(exported(fault="layers.2.up"), ids, how)
    result = ls.compare(reference, recorded(path, ids))
    assert (str(result.verdict), result.first_divergence.name) == ("differs", "layers.2.up")
