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
from runtimes.contract import Contract
from seen import Seen

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


# Modules that are called several times ----------------------------------------------------------


def block():
    return zoo.Holder(
        lambda m, x: x + m.act(m.mix(m.norm(x))), mix=nn.Linear(8, 8), norm=nn.LayerNorm(8), act=nn.ReLU()
    )


def looped(step, times=3):
    def forward(m, x):
        for _ in range(times):
            x = step(m, x)
        return x

    return forward


def check_calls(model, tmp_path, *, missing=(), **inputs):
    """Record every module, and hold each record against the same call of the hooks on the eager model."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    path = exported(model, () if inputs else (torch.randn(2, 5, 8),), tmp_path / "m.onnx", kwargs=inputs or None)
    expected: dict[str, list] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _, given, out, name=name: expected.setdefault(name, []).append(
                out if torch.is_tensor(out) else out[0]
            )
        )
    with torch.no_grad():
        model(**inputs) if inputs else model(x)
    with ls.record(path, "**") as rec:
        rec.model(**inputs) if inputs else rec.model(x)
    found: dict[str, list] = {}
    for record in rec.run.records():
        if record.point.name:
            assert record.moment.call == len(found.setdefault(record.point.name, []))
            found[record.point.name].append(record.tensor())
    for name, tensors in found.items():
        assert len(tensors) == len(expected[name]), name
        for one, other in zip(tensors, expected[name], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    told = {each.point.partition(":")[0]: each.reason for each in rec.missing}
    assert set(told) == set(missing)
    assert all("its calls cannot be told apart: the same runs" in reason for reason in told.values())
    return {name: len(tensors) for name, tensors in found.items()}


def test_calls_in_a_row_of_a_transformer_layer_of_torch_are_told_apart(tmp_path):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = zoo.Holder(looped(lambda m, x: m.layer(x), times=2), layer=layer)
    path = exported(model, (torch.randn(2, 5, 8),), tmp_path / "m.onnx")
    x = torch.randn(2, 5, 8)
    sink = seen(path, {"layer": {"output"}}, x)
    assert [m.call for m, _, _ in sink.records] == [0, 1]
    torch.testing.assert_close(sink.records[0][2], layer(x), rtol=0, atol=1e-5)
    torch.testing.assert_close(sink.records[1][2], layer(layer(x)), rtol=0, atol=1e-5)


def side_by_side(cases):
    """One model of several, one export for all; each has an input of its own, lest the exporter merge norms alike."""
    return zoo.Holder(lambda m, x: sum(getattr(m, name)(x + at) for at, name in enumerate(cases)), **cases)


def test_calls_are_told_apart_by_what_lies_between(tmp_path):
    def of_blocks(forward):
        return zoo.Holder(forward, block=block(), last=nn.LayerNorm(8))

    grouped = zoo.Holder(lambda m, x: x + m.second(x + m.first(x)), first=block(), second=block())
    cases = {
        "torchs": zoo.Holder(looped(lambda m, x: m.body(x)), body=nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
        "residual": of_blocks(looped(lambda m, x: x + m.block(x))),
        "beside": of_blocks(lambda m, x: m.block(x) + m.block(x * 2)),
        "between": of_blocks(lambda m, x: m.last(m.block(m.last(m.block(x))))),
        "once": of_blocks(lambda m, x: m.last(m.block(x))),
        "acts": zoo.Holder(
            lambda m, x: m.act(m.a(x)) + m.act(m.b(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 8), act=nn.Tanh()
        ),
        "twice": zoo.Holder(lambda m, x: m.act(m.act(m.a(x))), a=nn.Linear(8, 8), act=nn.Tanh()),
        "groups": zoo.Holder(looped(lambda m, x: m.norm(m.group(x)), times=2), group=grouped, norm=nn.LayerNorm(8)),
    }
    loops = ["torchs", "residual", "beside", "between", "groups"]  # themselves, not what they call
    calls = check_calls(side_by_side(cases), tmp_path, missing=loops)
    assert [calls[f"torchs.{name}"] for name in ("body", "body.0", "body.1")] == [3] * 3
    for case, times in (("residual", 3), ("beside", 2), ("between", 2), ("once", 1)):
        assert [calls[f"{case}.{name}"] for name in ("block", "block.mix", "block.norm", "block.act")] == [times] * 4
    assert (calls["acts.a"], calls["acts.b"], calls["acts.act"]) == (1, 1, 2)
    assert (calls["twice.a"], calls["twice.act"]) == (1, 2)
    parts = ("group", "group.first", "group.second", "group.first.act")
    assert [calls[f"groups.{name}"] for name in parts] == [2] * 4


def written(path):
    """All that the file tells of its nodes, but for the lines of the source."""
    return [
        (n.op_type, n.input, n.output, [(p.key, p.value) for p in n.metadata_props if "stack_trace" not in p.key])
        for n in onnx.load(path).graph.node
    ]


def test_a_block_called_in_a_row_is_missing_because_one_that_loops_gives_the_same_file(tmp_path):
    """Three calls of a block, or one of a block that loops: no more than the weights' values differ in the files."""
    x = torch.randn(2, 5, 8)
    (tmp_path / "loop").mkdir()
    called = zoo.Holder(looped(lambda m, x: m.block(x)), block=block())
    inside = block()
    inside._forward = looped(inside._forward)
    loop = zoo.Holder(lambda m, x: m.block(x), block=inside)
    files = [exported(model, (x,), tmp_path / f"{at}.onnx") for at, model in enumerate((called, loop))]
    assert written(files[0]) == written(files[1])
    for model, folder in ((called, tmp_path), (loop, tmp_path / "loop")):
        calls = check_calls(model, folder, missing=["block"])
        assert calls == {"block.mix": 3, "block.norm": 3, "block.act": 3}


def test_the_reason_names_the_way_that_works_and_that_way_works(tmp_path):
    torch.manual_seed(0)
    model = zoo.Holder(looped(lambda m, x: m.block(x)), block=block())
    x = torch.randn(2, 5, 8)
    with ls.record(exported(model, (x,), tmp_path / "m.onnx"), ["block", "block.mix"]) as rec:
        rec.model(x)
    [missing] = rec.missing
    assert missing.point == "block:output"
    assert "the same runs 3 times in a row" in missing.reason
    assert "record the program of torch.export (.pt2)" in missing.reason
    expected = [model.block(x), model.block(model.block(x)), model(x)]
    with ls.record(torch.export.export(model, (x,)), "block") as rec:
        rec.model(x)
    found = [record.tensor() for record in rec.run.records()]
    assert [torch.equal(one, other) for one, other in zip(found, expected, strict=True)] == [True] * 3


def test_of_groups_in_groups_what_runs_in_a_row_is_missing(tmp_path):
    group = zoo.Holder(lambda m, x: m.second(m.first(m.first(x))), first=block(), second=block())
    model = zoo.Holder(looped(lambda m, x: m.group(x), times=2), group=group)
    calls = check_calls(model, tmp_path, missing=["group", "group.first"])
    assert calls["group.second"] == 2
    assert calls["group.first.mix"] == 4


def test_a_block_that_takes_the_same_memory_in_each_call_is_not_taken_for_one_call(tmp_path):
    """The optimiser merges what is computed of the memory, so that its weights are used once."""
    read = zoo.Holder(lambda m, x, memory: x + m.q(x) * m.k(memory), q=nn.Linear(8, 8), k=nn.Linear(8, 8))
    model = zoo.Holder(lambda m, x: m.read(m.read(x, m.e(x)), m.e(x)), read=read, e=nn.Linear(8, 8))
    x = torch.randn(2, 5, 8)
    path = exported(model, (x,), tmp_path / "m.onnx")
    with ls.record(path, ["read", "read.q"]) as rec:
        rec.model(x)
    assert [each.point for each in rec.missing] == ["read:output"]
    assert len(list(rec.run.records())) == 2


def test_the_shared_layer_of_albert_is_missing_and_all_else_is_as_eager_has_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=50,
        embedding_size=8,
        hidden_size=16,
        num_hidden_layers=3,
        intermediate_size=16,
        num_attention_heads=2,
    )
    model = transformers.AlbertModel(config).eval()
    group = "encoder.albert_layer_groups.0"
    layer = f"{group}.albert_layers.0"
    ids = torch.arange(1, 7).view(1, 6)
    calls = check_calls(model, tmp_path, missing=[group, layer], input_ids=ids)
    assert calls[f"{layer}.ffn"] == calls[f"{layer}.attention"] == 3
    assert calls["encoder.embedding_hidden_mapping_in"] == 1


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


class Turned(nn.Module):
    """A layer that makes a table of positions for itself, as the others do."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x):
        return self.mix(x) + torch.arange(x.shape[1]).float().sin()[:, None]


def test_what_the_exporter_merged_is_the_output_of_no_layer(tmp_path):
    """Each layer makes the same table; the optimiser keeps the first layer's, and the others take it from there."""
    torch.manual_seed(0)
    model = nn.Sequential(Turned(), Turned(), Turned()).eval()
    x = torch.randn(2, 5, 4)
    sizes = ({1: Dim("length", min=2, max=64)},)
    path = exported(model, (x,), tmp_path / "m.onnx", dynamic_shapes=sizes)
    assert [node.op_type for node in onnx.load(path).graph.node].count("Sin") == 1
    sink = seen(path, {str(at): {"input", "output"} for at in range(3)}, x)
    expected = [x, model[0](x), model[:2](x), model(x)]
    found = {str(point): tensor for _, point, tensor in sink.records}
    for at in range(3):
        torch.testing.assert_close(found[f"{at}:input[0]"], expected[at], rtol=0, atol=1e-6)
        torch.testing.assert_close(found[f"{at}:output"], expected[at + 1], rtol=0, atol=1e-6)
    assert set(found) == {text for at in range(3) for text in (f"{at}:input[0]", f"{at}:output")}


def test_two_results_that_others_use_are_both_outputs(tmp_path):
    torch.manual_seed(0)
    block = zoo.Holder(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    user = zoo.Holder(lambda m, a, b: a * b)
    model = zoo.Holder(lambda m, x: m.user(*m.block(x)) + m.other(*m.block(x * 2)), block=block, user=user, other=user)
    x = torch.randn(2, 4)
    sink = seen(exported(model, (x,), tmp_path / "m.onnx"), {"block": {"output"}}, x)
    assert texts(sink)[:2] == ["block:output[0] step=0", "block:output[1] step=0"]
    torch.testing.assert_close(sink.records[1][2], block.b(x), rtol=0, atol=1e-6)


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


def test_a_norm_that_was_folded_into_a_convolution_has_no_input_of_its_own(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(1, 3, 6, 6)
    path = exported(model, (x,), tmp_path / "m.onnx")
    assert "BatchNormalization" not in [node.op_type for node in onnx.load(path).graph.node]
    found = {text: tensor for _, text, tensor in ((m, str(p), t) for m, p, t in seen_of(path, x).records)}
    assert "1:input[0]" not in found
    torch.testing.assert_close(found["1:output"], model[:2](x), rtol=0, atol=1e-5)


def seen_of(path, x):
    sink = Seen()
    with runtime.watch(opened(path), {"1": {"input", "output"}}, sink) as call:
        call(x)
    return sink


def test_a_dead_output_is_not_in_the_file(made):
    """Export keeps the attention weights that nobody uses; the ONNX exporter takes them out."""
    _, path, (x,) = made(zoo.attention)
    assert texts(seen(path, {"attn": {"output"}}, x)) == ["attn:output step=0"]
    with pytest.raises(RuntimeError, match="it has no such leaf"), ls.record(path, "attn:output[1]") as rec:
        rec.model(x)


def test_a_file_without_names_is_its_operations_and_says_so_with_the_way_to_modules(made, tmp_path):
    model, path, (x,) = made(zoo.plain)
    proto = onnx.load(path)
    for node in proto.graph.node:
        del node.metadata_props[:]
    onnx.save(proto, tmp_path / "stripped.onnx")
    with pytest.raises(LookupError, match=r"numbered in the order they run.*record_layer_outputs=True"):
        ls.record(tmp_path / "stripped.onnx", "0")
    with ls.record(tmp_path / "stripped.onnx", "**") as rec:
        rec.model(x)
    first = next(iter(rec.run.records()))
    torch.testing.assert_close(first.tensor(), model[0](x), rtol=0, atol=1e-6)
    assert rec.run.manifest.settings["names"].startswith("its points are its operations")


@pytest.mark.parametrize("odd", ["not a list", "[1, 2]", "[["])
def test_metadata_that_cannot_be_read_has_nothing_to_say(made, tmp_path, odd):
    _, path, (x,) = made(zoo.plain)
    proto = onnx.load(path)
    for each in proto.graph.node[0].metadata_props:
        each.value = odd
    onnx.save(proto, tmp_path / "odd.onnx")
    assert {place.name for place in runtime.points(opened(tmp_path / "odd.onnx"))} == {"", "0", "1", "2"}
    assert texts(seen(tmp_path / "odd.onnx", {"2": {"output"}}, x)) == ["2:output step=0"]


def test_gradients_are_refused(made):
    with pytest.raises(TypeError, match="gradients are not seen in ONNX Runtime"):
        ls.record(made(zoo.plain)[1], "0:grad_input")


def test_what_is_not_onnx_is_told(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"not a model at all")
    with pytest.raises(ValueError, match="is text that begins with 'not a model at all', not an ONNX model"):
        ls.record(tmp_path / "m.onnx", "0")
