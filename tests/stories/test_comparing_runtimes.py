"""Somebody compares a run of the eager model with a run of its compiled file: equal, or this layer is at fault."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn

import architectures
import layerscope as ls
from artefacts import Logits, change, saved
from asserts import assert_same_bits
from layerscope.cli import main
from layerscope.models.mamba.built_in import quamba_small
from layerscope.models.minimax import MiniMaxM2Config, minimax_m2

# The module that uses the weight, and the weight.
FAULTS = {
    "llama": [("model.model.layers.1.mlp.up_proj", "weight")],
    "mamba": [("model.backbone.layers.1.mixer.in_proj", "weight")],
    "minimax-m2": [("model.model.layers.1.mlp.gate", "weight"), ("model.model.layers.0.mlp.experts", "down_proj")],
}
# What does not depend on the inputs is folded into constants.
FOLDED = {"onnx": {"model.model.rotary_emb"}}

QUICK = [
    ("llama", "torchscript"),
    ("mamba", "torchscript"),
    ("minimax-m2", "torchscript"),
    ("minimax-m2", "export"),
    ("minimax-m2", "onnx"),
]
LONG = [("llama", "export"), ("llama", "onnx"), ("mamba", "export"), ("mamba", "onnx")]


def small(name: str) -> nn.Module:
    """The first two layers of an architecture."""
    model = architectures.make(name)
    model.config.num_hidden_layers = 2
    del (model.backbone if name == "mamba" else model.model).layers[2:]
    if name == "minimax-m2":
        model.set_experts_implementation("batched_mm")  # ONNX has no word for grouped_mm
    return Logits(model).eval()


def recorded(model, ids, to, *, floors=False):
    with torch.no_grad(), ls.record(model, "**", to=to, floors=floors) as rec:
        rec.model(ids)
        rec.model((ids + 3) % 128)
    return to


@pytest.fixture
def compared(capsys):
    """Run `layerscope compare`: its exit code, and what it prints on one line."""

    def compare(*runs):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(["compare", *map(str, runs)])
        return left.value.code or 0, " ".join(capsys.readouterr().out.split())

    return compare


class Made:
    """An architecture recorded eagerly, and the file of it that a compiler made."""

    def __init__(self, name, kind, folder):
        self.name, self.kind, self.folder = name, kind, folder
        self.model, self.ids = small(name), torch.arange(12).reshape(2, 6)
        self.eager = recorded(self.model, self.ids, folder / "eager", floors=True)
        self.file = saved(self.model, self.ids, kind, folder)

    def with_changed(self, module, parameter):
        folder = self.folder / module / "file"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in self.folder.glob(f"{self.file.name}*"):
            shutil.copy(path, folder)
        change(folder / self.file.name, self.model.state_dict()[f"{module}.{parameter}"])
        return recorded(folder / self.file.name, self.ids, self.folder / module / "run")


@pytest.fixture(
    scope="module", params=[*QUICK, *(pytest.param(p, marks=pytest.mark.stress) for p in LONG)], ids="-".join
)
def made(request, tmp_path_factory):
    return Made(*request.param, tmp_path_factory.mktemp("made"))


def test_the_file_and_the_model_do_not_part(made, compared):
    run = recorded(made.file, made.ids, made.folder / made.kind)
    code, said = compared(made.eager, run)
    assert code == 0, said
    result = ls.compare(made.eager, run)
    assert str(result.verdict) == ("noise" if made.kind == "onnx" else "same")
    assert result.first_divergence is None
    modules = {point.name for point in ls.open_run(made.eager).points}
    seen = {row.name for row in result.rows if row.kind in ("same", "noise")}
    assert modules - seen == {name for name in FOLDED.get(made.kind, ()) if name in modules}
    assert {row.name for row in result.rows if row.kind == "missing"} == modules - seen


def test_the_layer_whose_weight_was_changed_in_the_file_is_named(made, compared):
    for module, parameter in FAULTS[made.name]:
        run = made.with_changed(module, parameter)
        code, said = compared(made.eager, run)
        assert code == 1, said
        assert f"{module}" in said.partition("parts first")[0]
        result = ls.compare(made.eager, run)
        assert str(result.verdict) == "differs"
        assert result.first_divergence.name == module


BUILT_IN = {"minimax-m2-tiny": lambda: minimax_m2(MiniMaxM2Config(num_hidden_layers=2)), "quamba-small": quamba_small}


@pytest.mark.parametrize("name", ["minimax-m2-tiny", pytest.param("quamba-small", marks=pytest.mark.stress)])
@pytest.mark.parametrize("kind", ["torchscript", pytest.param("export", marks=pytest.mark.stress)])
def test_the_models_that_come_with_layerscope_agree_with_their_files(name, kind, tmp_path):
    model, ids = BUILT_IN[name]().eval(), torch.arange(12).reshape(2, 6)
    eager = recorded(model, ids, tmp_path / "eager")
    result = ls.compare(eager, recorded(saved(model, ids, kind, tmp_path), ids, tmp_path / kind))
    assert str(result.verdict) == "same", result.verdict.because
    assert result.first_divergence is None


# What a tracer does to a tuple --------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x), self.b(x)


class UsedInAnotherOrder(nn.Module):
    """Its caller needs the second value first, and that is how a tracer numbers them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.two, self.out, self.last = Two(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        a, b = self.two(x)
        return self.last(self.out(b) + a)


def traced(model, x, taps):
    with ls.record(torch.jit.trace(model, (x,)), taps) as rec, torch.no_grad():
        rec.model(x)
    return rec.run


@pytest.mark.parametrize(
    ("taps", "named"), [("**", "two.a"), (["two", "out"], "out")], ids=["everything", "no parts of it"]
)
def test_a_tuple_that_a_tracer_turned_around_is_told_from_two_weights_exchanged(taps, named):
    model, x = UsedInAnotherOrder().eval(), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with ls.record(model, taps) as rec, torch.no_grad():
        model(x)
    assert_same_bits(traced(model, x, taps).tensor("two[0]"), rec.run.tensor("two[1]"))
    healthy = ls.compare(rec.run, traced(model, x, taps))
    assert str(healthy.verdict) == "same", healthy.verdict.because
    model.two.a, model.two.b = model.two.b, model.two.a
    faulty = ls.compare(rec.run, traced(model, x, taps))
    assert str(faulty.verdict) == "differs"
    assert faulty.first_divergence.name == named


# Through the lens of statistics -------------------------------------------------------------------


def test_statistics_alone_pair_the_leaves_of_a_router_too(tmp_path):
    model, ids = minimax_m2(MiniMaxM2Config(num_hidden_layers=1)).eval(), torch.arange(12).reshape(2, 6)
    runs = []
    for name, what in (("eager", model), ("traced", saved(model, ids, "torchscript", tmp_path))):
        with ls.record(what, "**", to=tmp_path / name, keep="summary") as rec, torch.no_grad():
            rec.model(ids)
        runs.append(tmp_path / name)
    result = ls.compare(*runs)
    assert str(result.verdict) == "same", result.verdict.because
    assert {str(row) for row in result.rows if row.kind == "unpaired"} == {"model.layers.0.mlp.gate:output[0]"}
