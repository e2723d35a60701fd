"""Porting: the layers of a compiled model are seen, for this input, in another process, and against the eager ones."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import architectures
import layerscope as ls
from artefacts import change
from asserts import assert_no_hooks_left, assert_same_bits
from layerscope.cli import main
from layerscope.models.minimax import MiniMaxM2Config, minimax_m2

# The same operations give the same bits; another compiler's order of additions costs a few units of the last place.
ROUNDING = {"torchscript": 0.0, "export": 0.0, "onnx": 2e-6, "aoti": 2e-6, "inductor": 2e-6}
FILES = ("torchscript", "export", "onnx")


def ids(seed, length=7):
    return torch.randint(0, 128, (2, length), generator=torch.Generator().manual_seed(seed))


def states_by_hooks(model, x):
    """The oracle: PyTorch's own hooks on the eager model."""
    kept = []
    modules = [model.model.embed_tokens, *model.model.layers]
    hooks = [m.register_forward_hook(lambda m, a, out: kept.append(out.clone())) for m in modules]
    logits = model(x)
    for hook in hooks:
        hook.remove()
    return kept, logits


def assert_close(found, expected, *, rounding):
    if rounding == 0:
        assert_same_bits(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=rounding * max(1.0, float(expected.abs().max())))


def assert_every_layer_for_two_inputs(backend, layers):
    model = minimax_m2(MiniMaxM2Config(num_hidden_layers=layers))
    rounding = ROUNDING[backend] * layers
    compiled = ls.compile(model, (ids(0),), backend=backend, observer="skip")
    assert_no_hooks_left(model)
    seen = []
    for x in (ids(1), ids(2)):
        expected, logits = states_by_hooks(model, x)
        assert_close(compiled(x), logits, rounding=rounding)
        found = ls.get_layer_hidden_states()
        assert len(found) == layers + 1
        for state, eager in zip(found, expected, strict=True):
            assert_close(state, eager, rounding=rounding)
        assert_close(compiled.taps()["logits"], logits, rounding=rounding)
        seen.append(found[-1])
    assert not torch.equal(*seen)
    return compiled, model


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def test_62_layers_of_torchscript_give_63_states_of_this_input():
    compiled, _ = assert_every_layer_for_two_inputs("torchscript", 62)
    assert len(compiled.table.hidden) == 63


@pytest.mark.parametrize("backend", ["export", "onnx"])
def test_every_layer_of_an_exported_graph_and_of_another_size(backend):
    compiled, model = assert_every_layer_for_two_inputs(backend, 3)
    x = ids(3, length=12)[:, :11].repeat(2, 1)
    assert_close(compiled(x), model(x), rounding=ROUNDING[backend] * 3)


@pytest.mark.stress
@pytest.mark.parametrize("backend", ["export", "onnx"])
def test_62_layers_of_an_exported_graph_give_63_states_of_this_input(backend):
    compiled, _ = assert_every_layer_for_two_inputs(backend, 62)
    assert len(compiled.table.hidden) == 63


@pytest.mark.stress
@pytest.mark.parametrize("backend", ["inductor", "aoti"])
def test_every_layer_of_what_inductor_makes(backend, tmp_path):
    compiled, model = assert_every_layer_for_two_inputs(backend, 2)
    if backend == "aoti":
        loaded = ls.load_compiled(compiled.save(tmp_path / "package"))
        assert_close(loaded(ids(4)), model(ids(4)), rounding=ROUNDING[backend])
        assert len(ls.get_layer_hidden_states()) == 3


@pytest.mark.stress
def test_half_precision_in_inductor_tells_what_the_taps_change_and_can_be_faithful():
    model = minimax_m2(MiniMaxM2Config(num_hidden_layers=2)).bfloat16()
    compiled = ls.compile(model, (ids(0),), backend="inductor", precision_faithful=True)
    compiled(ids(1))
    assert compiled.observer_effect.identical
    compiled = ls.compile(model, (ids(0),), backend="inductor")
    compiled(ids(1))
    assert compiled.observer_effect.max_abs is not None


# Another process ----------------------------------------------------------------------------------

SOURCE = """
    from dataclasses import dataclass
    import torch
    from torch import nn

    @dataclass
    class Answer:
        logits: torch.Tensor
        tokens: torch.Tensor

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)
        def forward(self, x):
            return x + self.mix(self.norm(x)), None

    class Secret(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(128, 8)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(8, 128)
        def forward(self, tokens, mask=None):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)[0]
            logits = self.head(x)
            return Answer(logits, logits.argmax(-1))
"""

SAVING = """
    import sys, torch
    import layerscope as ls
    from secret_source import Secret

    model, folder = Secret().eval(), sys.argv[1]
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randint(0, 128, (2, 7), generator=generator) for _ in range(3)]
    for backend in ("torchscript", "export", "onnx"):
        compiled = ls.compile(model, {"tokens": inputs[0]}, backend=backend, observer="skip")
        compiled.save(f"{folder}/{backend}")
    expected = []
    for x in inputs[1:]:
        states = [model.embed(x)]
        for block in model.blocks:
            states.append(block(states[-1])[0])
        expected.append({"x": x, "states": states, "logits": model(x).logits})
    torch.save(expected, f"{folder}/expected.pt")
"""


@pytest.fixture(scope="module")
def abroad(tmp_path_factory):
    """What a process that has ended saved of a model whose source is nowhere any more."""
    work = tmp_path_factory.mktemp("abroad")
    (work / "secret_source.py").write_text(textwrap.dedent(SOURCE))
    (work / "saving.py").write_text(textwrap.dedent(SAVING))
    (work / "out").mkdir()
    command = [sys.executable, work / "saving.py", work / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (work / "secret_source.py").unlink()
    return work / "out"


@pytest.mark.parametrize("backend", FILES)
def test_what_an_ended_process_saved_is_loaded_without_the_models_source(abroad, backend, tmp_path):
    assert importlib.util.find_spec("secret_source") is None
    loaded = ls.load_compiled(abroad / backend)
    for case in torch.load(abroad / "expected.pt", weights_only=True):
        answer = loaded(tokens=case["x"])
        found = ls.get_layer_hidden_states()
        assert len(found) == 4
        for state, expected in zip(found, case["states"], strict=True):
            assert_close(state, expected, rounding=ROUNDING[backend])
        assert_close(answer.logits, case["logits"], rounding=ROUNDING[backend])
        assert_close(loaded.taps()["logits"], case["logits"], rounding=ROUNDING[backend])
        assert answer.tokens.shape == (2, 7)
    with ls.record(loaded, "blocks.*", to=tmp_path / "run") as rec:
        loaded(tokens=case["x"])
    assert rec.missing == []
    assert_close(rec["blocks.2"], found[-1], rounding=0)


# Against the eager model --------------------------------------------------------------------------


class Pair:
    """An architecture recorded eagerly, and compiled with taps on every layer."""

    def __init__(self, name, backend, folder):
        self.backend, self.folder = backend, folder
        self.model = architectures.make(name, attention="sdpa")
        if (name, backend) == ("minimax-m2", "onnx"):
            self.model.set_experts_implementation("batched_mm")  # ONNX has no word for grouped_mm
        self.inputs = {"input_ids": ids(1, length=6), "use_cache": False}
        with torch.no_grad():
            self.compiled = ls.compile(self.model, self.inputs, backend=backend, observer="skip")
            self.layers = [text.removesuffix(":output") for text in self.compiled.table.points]
            with ls.record(self.model, self.layers, to=folder / "eager", floors=True):
                self.model(**self.inputs)

    def recorded(self, compiled, name):
        with ls.record(compiled, self.layers, to=self.folder / name) as rec:
            compiled(**self.inputs)
        assert rec.missing == []
        return ls.compare(self.folder / "eager", self.folder / name)


QUICK = [("llama", "torchscript"), ("mamba", "torchscript"), ("minimax-m2", "torchscript"), ("llama", "onnx")]
LONG = [("mamba", "onnx"), ("minimax-m2", "onnx")]


@pytest.fixture(
    scope="module", params=[*QUICK, *(pytest.param(p, marks=pytest.mark.stress) for p in LONG)], ids="-".join
)
def pair(request, tmp_path_factory):
    return Pair(*request.param, tmp_path_factory.mktemp("pair"))


def exit_code(*args):
    with pytest.raises(SystemExit) as left:
        main([str(each) for each in args])
    return left.value.code or 0


def test_eager_and_compiled_do_not_part(pair):
    result = pair.recorded(pair.compiled, "compiled")
    assert exit_code("compare", pair.folder / "eager", pair.folder / "compiled") == 0
    assert len(result.rows) == 3
    assert str(result.verdict) in ("same", "noise")
    assert result.first_divergence is None


def test_a_weight_that_was_changed_in_the_artefact_names_its_layer(pair):
    folder = pair.compiled.save(pair.folder / "artefact")
    changed = pair.folder / "changed"
    shutil.copytree(folder, changed)
    layer = pair.model.get_submodule(pair.layers[1]).state_dict()
    weight = next(value for name, value in layer.items() if name.endswith("proj.weight"))
    change(changed / ("model.pt" if pair.backend == "torchscript" else "model.onnx"), weight)
    result = pair.recorded(ls.load_compiled(changed), "after")
    assert exit_code("compare", pair.folder / "eager", pair.folder / "after") == 1
    assert str(result.verdict) == "differs"
    assert result.first_divergence.name == pair.layers[1]
    again = pair.recorded(ls.load_compiled(folder), "before")
    assert again.first_divergence is None


# The layer-by-layer scripts -----------------------------------------------------------------------

SCRIPTS = Path(__file__).parents[2] / "scripts"
BROKEN = """
    import torch
    from layerscope.models.tiny import tiny_transformer

    def make():
        model = tiny_transformer(layers=4, hidden=16, heads=2)
        with torch.no_grad():
            model.model.layers[2].mlp.down_proj.weight[0, 0] = float("nan")
        return model, (torch.arange(12).reshape(2, 6),)
"""


@pytest.fixture
def script(tmp_path, capsys, monkeypatch):
    """Run a script in this process, in a folder of its own."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.chdir(tmp_path)

    def run(name, *args):
        found = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *args])
        try:
            code = module.main()
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return run


def test_the_two_scripts_write_the_same_files_and_compare_finds_them_equal(script, tmp_path):
    code, out, _ = script("test_layer_by_layer_v2", "--model", "tiny-transformer")
    assert code == 0
    assert "test_layers/full_model: 9 hidden states" in out
    assert re.search(r"middle layer +layer_4 +\[1, 85, 64\]  mean ", out)
    assert "layers with NaN: none" in out
    assert "observer effect: the taps change nothing in the output" in out
    assert script("test_layer_by_layer_gpu", "--model", "tiny-transformer", "--device", "cpu")[0] == 0
    ours, reference = tmp_path / "test_layers/full_model", tmp_path / "gpu_reference/full_model"
    names = sorted(path.name for path in ours.iterdir())
    assert names == sorted(path.name for path in reference.iterdir())
    layers = [f"layer_{n}_output.pt" for n in range(1, 9)]
    assert names == sorted(["embedding_output.pt", "logits_output.pt", "statistics.pt", "metadata.pt", *layers])
    result = ls.compare(reference, ours)
    assert str(result.verdict) == "same"
    assert len(result.rows) == 10
    for folder in (ours, reference):
        said = torch.load(folder / "metadata.pt")
        assert bytes(said["input_ids"][0].tolist()).decode() == said["prompt"]
        assert said["prompt"].startswith("The quick brown fox")
        stats = torch.load(folder / "statistics.pt")
        layer = torch.load(folder / "layer_3_output.pt")
        assert stats["layer_3"]["std"] == pytest.approx(float(layer.float().std()), rel=1e-5)
    assert script("test_layer_by_layer_v2", "--model", "tiny-transformer", "--skip-compile")[0] == 0
    assert torch.load(ours / "metadata.pt")["prompt"] == said["prompt"]


def test_a_compiled_model_is_run_again_without_compiling(script, tmp_path):
    code, _, err = script("test_layer_by_layer", "--model", "tiny-transformer", "--skip-compile")
    assert code == 2
    assert "run once without --skip-compile" in err
    script("test_layer_by_layer", "--model", "tiny-transformer")
    first = torch.load(tmp_path / "test_layers/full_model/layer_8_output.pt", weights_only=True)
    again = ("--model", "tiny-transformer", "--skip-compile", "--output_dir", "test_layers/again")
    assert script("test_layer_by_layer", *again)[0] == 0
    assert_same_bits(torch.load(tmp_path / "test_layers/again/layer_8_output.pt", weights_only=True), first)
    assert script("test_layer_by_layer", *again, "--prompt", "something else")[0] == 0
    other = torch.load(tmp_path / "test_layers/again/layer_8_output.pt", weights_only=True)
    assert other.shape == (1, len("something else"), 64)


def test_a_compiled_model_of_another_seed_is_refused_and_the_seed_is_kept_with_the_outputs(script, tmp_path):
    again = ("--model", "tiny-transformer", "--skip-compile", "--output_dir", "test_layers/again")
    assert script("test_layer_by_layer", "--model", "tiny-transformer", "--seed", "3")[0] == 0
    code, _, err = script("test_layer_by_layer", *again, "--seed", "5", "--prompt", "hello")
    assert code == 2
    assert "was compiled from --seed 3, and --seed 5 is asked for; run once without --skip-compile" in err
    assert not (tmp_path / "test_layers/again").exists()
    for seed in ((), ("--seed", "3")):  # left out, it is the one that was compiled
        assert script("test_layer_by_layer", *again, *seed, "--prompt", "hello")[0] == 0
        said = torch.load(tmp_path / "test_layers/again/metadata.pt", weights_only=True)
        assert (said["model"], said["seed"]) == ("tiny-transformer", 3)
    reference = ("--model", "tiny-transformer", "--seed", "3", "--prompt", "hello", "--device", "cpu")
    assert script("test_layer_by_layer_gpu", *reference)[0] == 0
    assert torch.load(tmp_path / "gpu_reference/full_model/metadata.pt", weights_only=True)["seed"] == 3
    result = ls.compare(tmp_path / "gpu_reference/full_model", tmp_path / "test_layers/again")
    assert str(result.verdict) == "same"


def test_a_compiled_model_of_other_weights_or_of_nobody_knows_what_is_refused(script, tmp_path):
    source = tmp_path / "own.py"
    source.write_text(textwrap.dedent(BROKEN).replace("2].mlp", "1].mlp"))
    again = ("--model", "own.py:make", "--skip-compile", "--output_dir", "test_layers/again")
    assert script("test_layer_by_layer", "--model", "own.py:make")[0] == 0
    assert script("test_layer_by_layer", *again)[0] == 0
    source.write_text(textwrap.dedent(BROKEN))
    code, _, err = script("test_layer_by_layer", *again)
    assert code == 2
    assert "compiled from other weights than own.py:make has now; run once without --skip-compile" in err
    source.unlink()  # the source is not needed; what cannot be checked is said
    code, _, err = script("test_layer_by_layer", *again)
    assert code == 0
    assert "the weights are not compared with those that were compiled" in err
    (tmp_path / "test_layers/compiled/own.py_make-torchscript/source.json").unlink()
    code, _, err = script("test_layer_by_layer", *again)
    assert code == 2
    assert "does not say what was compiled there" in err


def test_layers_that_are_not_finite_are_listed(script, tmp_path):
    (tmp_path / "broken.py").write_text(textwrap.dedent(BROKEN))
    code, out, _ = script("test_layer_by_layer", "--model", "broken.py:make")
    assert code == 0
    assert "layers with NaN: layer_3, layer_4\n" in out


def test_a_backend_that_is_not_installed_is_refused_in_a_sentence(script):
    code, _, err = script("test_layer_by_layer", "--model", "tiny-transformer", "--backend", "neuron")
    assert code == 2
    assert "AWS Neuron SDK" in err
