"""Programs of torch.export keep the contract, from their .pt2 file alone."""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile

import pytest
import torch
from torch import nn
from torch.export import Dim

import layerscope as ls
import zoo
from asserts import assert_same_bits
from layerscope.runtimes import exported, find
from runtimes.contract import Contract
from seen import Seen


def reloaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # torch 2.11's own
        return torch.export.load(file)


class TestExported(Contract):
    def prepare(self, model, x):
        shapes = dict(
            zip(range(x.dim() - 1), (Dim("batch", min=1, max=64), Dim("length", min=1, max=64)), strict=False)
        )
        return reloaded(torch.export.export(model, (x,), dynamic_shapes=(shapes,)))

    raises = "Guard failed|shapes cannot be multiplied"


def seen(program, wanted, *args):
    sink = Seen()
    with exported.watch(program, wanted, sink) as call:
        call(*args)
    assert sink.failures == []
    return sink


def texts(sink):
    return [f"{point} {moment}" for moment, point, _ in sink.records]


def made(make, **how):
    model, args = make()
    return model.eval(), reloaded(torch.export.export(model.eval(), args, **how)), args


def test_it_is_found_and_cannot_be_called_but_the_recording_can():
    model, program, (x,) = made(zoo.plain)
    assert find(program) is exported
    with ls.record(program, "0") as rec:
        assert_same_bits(rec.model(x), model(x))
    assert_same_bits(rec["0"], model[0](x))


def test_a_program_that_was_not_saved_is_recorded_too():
    model, (x,) = zoo.plain()
    program = torch.export.export(model, (x,))
    assert texts(seen(program, {"1": {"output"}}, x)) == ["1:output step=0"]


def test_a_shared_layer_has_the_name_it_was_called_by():
    model, program, (x,) = made(zoo.shared)
    sink = seen(program, {"a": {"output"}, "b": {"output"}}, x)
    assert texts(sink) == ["a:output step=0", "b:output step=0"]
    assert_same_bits(sink.records[1][2], model(x))


def test_modules_are_told_around_those_inside_them():
    _, program, (x,) = made(zoo.tuple_outputs)
    sink = seen(program, {"block.layer": {"input", "output"}, "block": {"input", "output"}}, x)
    assert [str(p) for _, p, _ in sink.records] == [
        "block:input[0]", "block.layer:input[0]", "block.layer:output", "block:output[0]", "block:output[1]",
    ]  # fmt: skip


def test_a_result_that_the_caller_threw_away_is_seen():
    """The attention weights of `attn(x, x, x)[0]`; what contains the attention does not return them."""
    model, program, (x,) = made(zoo.attention)
    sink = seen(program, {"attn": {"output"}}, x)
    out, weights = model.attn(x, x, x)
    assert_same_bits(sink.records[0][2], out)
    assert_same_bits(sink.records[1][2], weights)
    outer = zoo.Holder(lambda m, x: m.block(x) + 1, block=model)
    program = reloaded(torch.export.export(outer, (x,)))
    assert texts(seen(program, {"block": {"output"}}, x)) == ["block:output step=0"]


def test_a_signature_that_was_kept_names_the_leaves_as_the_source_does():
    model, program, (x,) = made(zoo.dict_outputs, preserve_module_call_signature=("block",))
    sink = seen(program, {"block": {"output"}}, x)
    value = model.block(x)
    found = {point.leaf: tensor for _, point, tensor in sink.records}
    assert_same_bits(found["hidden",], value["hidden"])
    assert_same_bits(found["odd key/]",], value["odd key/]"])


def test_operations_are_recorded_with_their_module():
    model, program, (x,) = made(zoo.plain)
    sink = Seen()
    with exported.watch(program, {}, sink, ops=lambda op: op if "linear" in op else None) as call:
        call(x)
    assert [str(p) for _, p, _ in sink.records if p.side == "output"] == ["op:aten.linear.default:output"] * 2
    assert [note["within"] for note in sink.notes] == ["0"] * 4 + ["2"] * 4
    assert_same_bits(sink.records[-1][2], model(x))


def test_a_decomposed_program_is_recorded():
    model, program, (x,) = made(zoo.plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of its own
        program = program.run_decompositions()
    sink = seen(program, {"0": {"output"}, "2": {"output"}}, x)
    assert_same_bits(sink.records[1][2], model(x))


def test_weights_have_the_fingerprints_of_the_source(tmp_path):
    model, program, (x,) = made(zoo.plain)
    for name, each in (("source", model), ("program", program)):
        with ls.record(each, "0", to=tmp_path / name) as rec:
            rec.model(x)
    source, exported_run = (ls.open_run(tmp_path / name).manifest for name in ("source", "program"))
    assert source.weights == exported_run.weights
    assert exported_run.runtime == "export"


def test_the_file_is_not_touched(tmp_path):
    model, (x,) = zoo.plain()
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (x,)), path)
    before = path.read_bytes()
    with ls.record(str(path), "0") as rec:
        rec.model(x)
    assert path.read_bytes() == before
    assert_same_bits(rec["0"], model[0](x))


def test_arguments_go_by_name_too_and_wrong_ones_are_told():
    model = zoo.Holder(lambda m, x: m.lin(x), lin=nn.Linear(4, 4))

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x, pair, *, scale):
            return self.inner(x) * scale + pair[0] - pair[1]

    x, y, z = torch.randn(3, 2, 4)
    source = Scaled().eval()
    program = reloaded(torch.export.export(source, (x, (y, z)), {"scale": z}))
    with ls.record(program, "inner") as rec, torch.no_grad():
        first = rec.model(x, (y, z), scale=z)
        assert_same_bits(rec.model(scale=z, pair=(y, z), x=x), first)
        assert_same_bits(rec.model(x, pair=(y, z), scale=z), first)
        assert_same_bits(first, source(x, (y, z), scale=z))
        for wrong in ({"pair": (y, z), "scale": z}, {"x": x, "scale": z}, {"x": x, "pair": (y, z)}):
            with pytest.raises((ValueError, TypeError)):
                rec.model(**wrong)
    assert len(rec.run.moments) == 3


# What stays silent, and what is refused ---------------------------------------------------------


def test_a_module_that_computes_nothing_is_missing_with_the_reason():
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.ReLU())
    program = reloaded(torch.export.export(model, (torch.ones(1, 2),)))
    with ls.record(program, ["0", "1"]) as rec:
        rec.model(torch.ones(1, 2))
    [missing] = rec.missing
    assert missing.point == "1:output"
    assert "it computes nothing (an identity)" in missing.reason


def test_a_dead_output_is_missing_with_the_reason():
    model, (x,) = zoo.never_called()
    model._forward = lambda m, x: (m.unused(x), m.used(x))[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of its own
        program = torch.export.export(model, (x,)).run_decompositions({})
    with ls.record(program, ["used", "unused"]) as rec:
        rec.model(x)
    [missing] = rec.missing
    assert missing.point == "unused:output"
    assert "nothing used what it returned (a dead output)" in missing.reason


def test_gradients_are_refused():
    _, program, _ = made(zoo.plain)
    with pytest.raises(TypeError, match="computes a forward alone"):
        ls.record(program, "0:grad_output")


def test_a_program_without_names_is_refused_with_the_way_that_works():
    _, program, _ = made(zoo.plain)
    for node in program.graph.nodes:
        node.meta.pop("nn_module_stack", None)
    with pytest.raises(TypeError, match=r"lost the names of their modules.*record_layer_outputs=True"):
        ls.record(program, "0")


class _Canary:
    def __reduce__(self):
        return print, ("a pickle was run",)


@pytest.mark.parametrize("kind", ["weights", "inputs"])
def test_an_export_that_needs_a_pickle_is_refused_and_nothing_runs(tmp_path, capsys, kind):
    model, (x,) = zoo.plain()
    path, hostile = tmp_path / "model.pt2", tmp_path / "hostile.pt2"
    torch.export.save(torch.export.export(model, (x,)), path)
    evil = io.BytesIO()
    torch.save(_Canary(), evil)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(hostile, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if kind == "weights" and name.endswith("model_weights_config.json"):
                config = json.loads(content)
                next(iter(config["config"].values()))["use_pickle"] = True
                content = json.dumps(config).encode()
            elif name.endswith("weights/weight_0" if kind == "weights" else "sample_inputs/model.pt"):
                content = evil.getvalue()
            target.writestr(name, content)
    with pytest.raises(TypeError, match="only a pickle can make"):
        ls.record(hostile, "0")
    assert "a pickle was run" not in capsys.readouterr().out
    assert pickle.loads(pickle.dumps(_Canary())) is None  # the canary sings when it is let out
    assert "a pickle was run" in capsys.readouterr().out
