"""`layerscope record`: what is on disk afterwards is what the model computed."""

import json
import warnings

import numpy as np
import pytest
import torch

from layerscope.cli.record import sided, withdraw
from layerscope.errors import BadText
from layerscope.models.tiny import tiny_transformer
from layerscope.store import Manifest, Writer, open_run

SEVERAL = """
import torch
def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()), [torch.full((1, 3), float(i)) for i in range(6)]
def failing():
    def boom(x): raise RuntimeError("mat1 and\\nmat2")
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    net[1].forward = boom
    return net, torch.ones(1, 3)
def bad_inputs():
    def batches():
        yield torch.ones(1, 3)
        raise ValueError("no more data")
    return torch.nn.ReLU(), batches()
def ints():
    return torch.nn.Identity(), torch.ones(3, dtype=torch.long)
"""


@pytest.fixture
def several(tmp_path):
    (tmp_path / "several.py").write_text(SEVERAL)
    return "several.py"


def test_the_tensors_of_the_run_are_those_of_the_model(cli, tmp_path):
    answer = cli("record", "tiny-transformer", "model.layers.*", "lm_head", "-o", "runs/tiny", "--prompt", "hello")
    assert answer.code == 0
    assert "✓ complete: 1 forward, 9 points, 9 records" in answer.out
    assert "layerscope show runs/tiny" in answer.out
    logits = tiny_transformer()(torch.tensor([list(b"hello")]))
    assert torch.equal(open_run(tmp_path / "runs/tiny").tensor("lm_head"), logits)


def test_the_seed_is_the_models(cli, tmp_path):
    for seed in (0, 1):
        assert cli("record", "tiny-transformer", "lm_head", "-o", f"run{seed}", "--seed", seed).code == 0
    a, b = (open_run(tmp_path / f"run{seed}") for seed in (0, 1))
    assert not torch.equal(a.tensor("lm_head"), b.tensor("lm_head"))
    assert (a.manifest.seed, b.manifest.seed) == (0, 1)


def test_sides_are_those_of_the_pattern_or_of_the_option(cli, tmp_path):
    args = (
        "record",
        "tiny-transformer",
        "model.layers.0",
        "model.norm:output",
        "--side",
        "input,grad_output",
        "-o",
        "run",
    )
    assert cli(*args).code == 0
    points = {str(p) for p in open_run(tmp_path / "run").points}
    assert points == {"model.layers.0:input[0]", "model.layers.0:grad_output", "model.norm:output"}


def test_gradients_are_those_of_the_mean_square_of_the_output(cli, tmp_path):
    assert cli("record", "tiny-transformer", "lm_head:grad_output", "-o", "run", "--prompt", "abc").code == 0
    logits = tiny_transformer()(torch.tensor([list(b"abc")]))
    expected = 2 * logits.detach() / logits.numel()
    torch.testing.assert_close(open_run(tmp_path / "run").tensor("lm_head:grad_output"), expected)


def test_several_inputs_are_several_steps_and_a_schedule_chooses_among_them(cli, several, tmp_path):
    assert cli("record", f"{several}:make", "0", "-o", "run", "--when", "every(2) | first(2)").code == 0
    assert [m.step for m in open_run(tmp_path / "run").moments] == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("keep", "tensor", "summary"), [("tensor", True, False), ("summary", False, True), ("both", True, True)]
)
def test_what_is_kept_is_what_was_asked_for(cli, tmp_path, keep, tensor, summary):
    assert cli("record", "tiny-transformer", "model.norm", "-o", "run", "--keep", keep).code == 0
    (entry,) = open_run(tmp_path / "run").records()
    assert (entry.dtype is not None, entry.summary is not None) == (tensor, summary)


@pytest.mark.parametrize(("which", "axis"), [("channels", -1), ("channels(axis=1)", 1)])
def test_statistics_of_channels_are_those_of_the_tensors(cli, tmp_path, which, axis):
    args = ("record", "tiny-transformer", "model.layers.0", "--prompt", "hello", "--statistics", which)
    assert cli(*args, "-o", "run").code == 0
    assert cli(*args, "-o", "modes", "--mode", "fp32").code == 0
    for run in (open_run(tmp_path / "run"), open_run(tmp_path / "modes/fp32")):
        values = run.tensor("model.layers.0").numpy()
        channels = run.summary("model.layers.0").channels
        assert channels.axis == axis
        assert channels.absmax.tolist() == np.abs(np.moveaxis(values, axis, -1)).max(axis=(0, 1)).tolist()


def test_without_channels_there_are_none_and_moments_leave_out_more(cli, tmp_path):
    for which, sketch in (("full", True), ("moments", False)):
        assert cli("record", "tiny-transformer", "lm_head", "-o", which, "--statistics", which).code == 0
        summary = open_run(tmp_path / which).summary("lm_head")
        assert (summary.channels, summary.sketch is not None) == (None, sketch)


def test_an_existing_run_is_left_alone_unless_steps_are_to_be_added(cli, tmp_path):
    args = ("record", "tiny-transformer", "model.norm", "-o", "run")
    assert cli(*args).code == 0
    before = sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*"))
    again = cli(*args)
    assert again.code == 2
    assert "append" in again.err
    assert sorted((p.name, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*")) == before
    assert cli(*args, "--append").code == 0
    assert [m.step for m in open_run(tmp_path / "run").moments] == [0, 1]


def test_inputs_come_from_a_file(cli, several, tmp_path):
    np.savez(tmp_path / "x.npz", input=np.full((2, 3), 7.0, dtype=np.float32))
    assert cli("record", f"{several}:make", ":input", "-o", "bad").code == 2
    assert cli("record", f"{several}:make", "0:input", "-o", "run", "--inputs", "x.npz").code == 0
    assert open_run(tmp_path / "run").tensor("0:input[0]").tolist() == [[7.0] * 3] * 2


@pytest.mark.parametrize(
    ("function", "pattern", "said"),
    [
        ("failing", "0", "the forward of 'several.py:failing' raised RuntimeError: mat1 and mat2"),
        ("bad_inputs", ".", "the inputs of 'several.py:bad_inputs' raised ValueError: no more data"),
        ("ints", ".:grad_output", "a gradient is asked for"),
        ("make", "nothing.*", "'nothing.*' matches no module"),
        ("make", "0:sideways", "no side called 'sideways'"),
    ],
)
def test_what_goes_wrong_is_one_sentence(cli, several, function, pattern, said):
    answer = cli("record", f"{several}:{function}", pattern, "-o", "run")
    assert answer.code == 2
    assert said in answer.err
    assert answer.err.count("\n") == 1


def test_what_was_recorded_before_a_failure_is_there(cli, several, tmp_path):
    assert cli("record", f"{several}:failing", "0", "-o", "run").code == 2
    assert [str(p) for p in open_run(tmp_path / "run").points] == ["0:output"]


@pytest.mark.parametrize(
    "option",
    [
        ("--when", "evry(3)"),
        ("--side", "output,up"),
        ("--keep", "all"),
        ("--seed", "x"),
        ("--statistics", "channels(1)"),
    ],
)
def test_options_that_do_not_read_are_exit_code_2_and_leave_nothing(cli, tmp_path, option):
    answer = cli("record", "tiny-transformer", "**", "-o", "run", *option)
    assert answer.code == 2
    assert not (tmp_path / "run").exists()


def test_json_says_what_was_recorded_and_what_is_missing(cli):
    page = json.loads(cli("record", "tiny-transformer", "model.layers.*:grad_input", "-o", "run", "--json").out)
    assert page["recorded"]["run"] == "run"
    assert page["sentences"][0]["tone"] == "good"


def test_a_checkpoint_folder_is_recorded_by_its_own_names(cli, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "llama")
    assert cli("record", "llama", "model.layers.*", "lm_head", "-o", "run", "--prompt", "hi").code == 0
    with torch.no_grad():
        expected = model(torch.tensor([list(b"hi")])).logits
    assert torch.equal(open_run(tmp_path / "run").tensor("lm_head"), expected)


def test_side_fills_in_what_a_pattern_leaves_out_and_nothing_else():
    patterns = ["a", "b:output", "c:input", "!d", r"e\:output", "f[0]", "g:output[0]"]
    assert [str(p) for p in sided(patterns, "input,output")] == [
        *("a:input,output", "b", "c:input", "!d", r"e\:output:input,output", "f:input,output[0]", "g[0]")
    ]
    with pytest.raises(BadText, match="'up'"):
        sided(["a"], "up")


def test_a_run_that_holds_no_record_is_not_left_in_the_way(cli, tmp_path):
    assert cli("record", "tiny-transformer", "op:aten.zzz", "-o", "run").code == 2
    assert not (tmp_path / "run").exists()
    assert cli("record", "tiny-transformer", "model.norm", "-o", "run").code == 0


def test_a_folder_that_was_there_before_stays(cli, tmp_path):
    (tmp_path / "run").mkdir()
    assert cli("record", "tiny-transformer", "op:aten.zzz", "-o", "run").code == 2
    assert (tmp_path / "run").is_dir()


def test_nothing_is_removed_when_steps_were_to_be_added(cli, tmp_path):
    assert cli("record", "tiny-transformer", "op:aten.zzz", "-o", "run", "--append").code == 2
    assert (tmp_path / "run/rank-00000/lock").exists()


def test_what_somebody_else_put_into_the_folder_stays_with_all_of_it(tmp_path):
    Writer(tmp_path / "run", Manifest()).close()
    (tmp_path / "run/notes.txt").write_text("mine")
    files = sorted(tmp_path.rglob("*"))
    withdraw(tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == files
    (tmp_path / "run/notes.txt").unlink()
    withdraw(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_leaves_is_one_sentence_and_exit_code_2(cli, tmp_path):
    (tmp_path / "leaving.py").write_text(
        "import sys, torch\ndef make(): sys.exit(7)\n"
        "class Net(torch.nn.Module):\n    def forward(self, x): sys.exit(0)\n"
        "def net(): return Net(), torch.ones(1)\n"
    )
    for function in ("make", "net"):
        answer = cli("record", f"leaving.py:{function}", "**", "-o", "run")
        assert answer.code == 2
        assert "raised SystemExit" in answer.err
        assert answer.err.count("\n") == 1


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1])
def test_a_seed_that_torch_does_not_take_is_exit_code_2(cli, tmp_path, seed):
    answer = cli("record", "tiny-transformer", "**", "-o", "run", f"--seed={seed}")
    assert answer.code == 2
    assert "is not in the range" in answer.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seed", [(1 << 64) - 1, -(1 << 63)])
def test_a_seed_at_the_end_of_the_range_is_taken(cli, seed):
    assert cli("record", "tiny-transformer", "model.norm", "-o", "run", f"--seed={seed}").code == 0


# --mode ---------------------------------------------------------------------------------------


def test_each_mode_is_a_run_of_its_own_on_the_same_inputs(cli, tmp_path):
    args = (
        "record",
        "tiny-transformer",
        "--mode",
        "fp32,bf16",
        "--mode",
        "int8-weight",
        "--layers",
        "first,last",
        "-o",
        "runs",
    )
    answer = cli(*args, "--side", "input,output", "--prompt", "hello")
    assert answer.code == 0
    assert "✓ 3 modes recorded, all on the same inputs" in answer.out
    assert "layerscope compare runs/fp32 runs/bf16 runs/int8-weight" in answer.out
    runs = {path.name: open_run(path) for path in (tmp_path / "runs").iterdir()}
    assert sorted(runs) == ["bf16", "fp32", "int8-weight"]
    assert {run.manifest.mode for run in runs.values()} == set(runs)
    assert len({run.manifest.settings["inputs"] for run in runs.values()}) == 1
    points = {"model.layers.0:input[0]", "model.layers.0:output", "model.layers.7:input[0]", "model.layers.7:output"}
    assert {str(p) for p in runs["fp32"].points} == points
    hidden = tiny_transformer().model.embed_tokens(torch.tensor([list(b"hello")]))
    assert torch.equal(runs["fp32"].tensor("model.layers.0:input"), hidden)
    assert torch.equal(runs["bf16"].tensor("model.layers.0:input"), hidden.bfloat16())


def test_words_after_mode_that_are_modes_are_meant_as_modes(cli, tmp_path):
    assert cli("record", "tiny-transformer", "--mode", "fp32", "fp16", "fp_only", "lm_head", "-o", "runs").code == 0
    runs = {path.name: open_run(path) for path in (tmp_path / "runs").iterdir()}
    assert sorted(runs) == ["bf16", "fp16", "fp32"]
    assert {str(p) for run in runs.values() for p in run.points} == {"lm_head:output"}


def test_a_module_called_like_a_number_stays_a_pattern(cli, several, tmp_path):
    assert cli("record", f"{several}:make", "--mode", "fp32", "fp16", "0", "-o", "runs").code == 0
    assert [str(p) for p in open_run(tmp_path / "runs/fp16").points] == ["0:output"]


def test_the_modes_of_the_documents_are_recorded_in_one_command(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("layerscope.modes.kinds.CALIBRATION", (1, 32))
    args = ("--layers", "first,last", "--side", "input,output", "--calib_data_num", 2, "--calib_seqlen", 16)
    answer = cli("record", "quamba-small", "--mode", "0", "2-1", "fp32", *args, "-o", "layer_outputs")
    assert answer.code == 0
    run = open_run(tmp_path / "layer_outputs/2-1")
    assert run.tensor("backbone.layers.23").shape == (2, 16, 128)
    settings = run.manifest.settings
    assert (settings["weights"], settings["calib_data_num"], settings["calib_seqlen"]) == ("built-in", 2, 16)


def test_the_documents_folder_that_is_not_there_is_said_on_stderr_and_stored(cli, tmp_path):
    folder = "pretrained_models/Quamba1-pa9999/pa-0.9999"
    args = ("record", "quamba-small", "--pretrained_dir", folder, "--layers", "0", "--prompt", "abc", "-o")
    answer = cli(*args, "runs", "--mode", "fp32")
    assert answer.code == 0
    assert (
        answer.err
        == f"layerscope: {folder} is not there: quamba-small runs with the weights that come with layerscope\n"
    )
    settings = open_run(tmp_path / "runs/fp32").manifest.settings
    assert (settings["weights"], settings["pretrained_dir"], settings["percentile_alpha"]) == (
        "built-in",
        folder,
        0.9999,
    )
    assert cli(*args, "plain").code == 0
    assert open_run(tmp_path / "plain").manifest.settings["weights"] == "built-in"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--mode", "fp61", "--layers", "all"), "there is no mode 'fp61' of TinyTransformer; did you mean fp16"),
        (("--mode", "fp32", "int8", "--layers", "all"), "there is no mode 'int8' of TinyTransformer; did you mean"),
        (("--mode", "fp32", "nothing.*"), "'nothing.*' matches no module"),
        (("--mode", "fp32", "--layers", "9"), "there is no layer 9 among the 8"),
        (("--mode", "fp32"), "say what to record: PATTERN..., or --layers first,last"),
        (("--mode", "fp32", "--layers", "all", "--pretrained_dir", "x"), "--pretrained_dir"),
        (("--mode", "fp32", "--layers", "all", "--prompt", "a", "--calib_seqlen", "3"), "--calib_seqlen"),
        (("--layers", "all", "--calib_data_num", "0"), "--calib_data_num"),
        (("--layers", "all", "--percentile_alpha", "0"), "--percentile_alpha"),
    ],
)
def test_modes_that_cannot_be_recorded_are_exit_code_2_and_leave_nothing(cli, tmp_path, args, said):
    answer = cli("record", "tiny-transformer", *args, "-o", "runs")
    assert answer.code == 2
    assert said in answer.err
    assert not (tmp_path / "runs").exists()


def test_a_folder_of_weights_that_is_not_there_is_exit_code_2(cli):
    answer = cli("record", "quamba-small", "--mode", "fp32", "--layers", "0", "--pretrained_dir", "mine", "-o", "runs")
    assert answer.code == 2
    assert answer.err == (
        "layerscope: --pretrained_dir 'mine' is not there; leave it out, and quamba-small runs with the weights that "
        "come with layerscope.\n"
    )


PICKY = """
import torch, layerscope
class Picky(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
    def forward(self, x):
        if x.dtype == torch.float16: raise RuntimeError("no halves")
        return self.fc(x)
def net(): return Picky(), torch.ones(1, 4)
"""


def test_a_mode_that_fails_does_not_cost_the_others_and_is_exit_code_2(cli, tmp_path):
    (tmp_path / "picky.py").write_text(PICKY)
    answer = cli("record", "picky.py:net", "fc", "--mode", "fp_only", "-o", "runs")
    assert answer.code == 2
    assert "✗ 2 of 3 modes recorded" in answer.out
    assert "fp16: the forward of 'picky.py:net' raised RuntimeError: no halves" in answer.out
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["bf16", "fp32"]


def test_one_mode_that_fails_is_one_sentence(cli, tmp_path):
    (tmp_path / "picky.py").write_text(PICKY)
    answer = cli("record", "picky.py:net", "fc", "--mode", "fp16", "-o", "runs")
    assert answer.code == 2
    assert answer.err.startswith("layerscope: the forward of 'picky.py:net' raised RuntimeError: no halves")
    assert answer.err.count("\n") == 1


def test_of_a_group_what_does_not_fit_is_left_out_and_said(cli, tmp_path):
    (tmp_path / "picky.py").write_text(PICKY)
    answer = cli("record", "picky.py:net", "fc", "--mode", "quant_only", "-o", "runs", "--json")
    page = json.loads(answer.out)
    assert answer.code == 0
    assert [row["mode"] for row in page["runs"]] == ["int8-weight", "int8-dynamic", "fp8"]
    assert page["left_out"][0]["text"].startswith("int4-weight is left out: no Linear layer is a multiple of 32 wide")
    assert page["recorded"]["inputs"] == open_run(tmp_path / "runs/fp8").manifest.settings["inputs"]


def test_runs_of_modes_that_are_there_are_left_alone(cli, tmp_path):
    args = ("record", "tiny-transformer", "lm_head", "-o", "runs", "--mode")
    assert cli(*args, "fp16").code == 0
    again = cli(*args, "fp32,fp16")
    assert again.code == 2
    assert "runs/fp16 holds a run already" in again.err
    assert not (tmp_path / "runs/fp32").exists()
    assert cli(*args, "fp16", "--append").code == 0
    assert len(open_run(tmp_path / "runs/fp16").moments) == 2


def test_gradients_are_recorded_in_every_mode_that_has_them(cli, tmp_path):
    assert cli("record", "tiny-transformer", "lm_head:grad_output", "--mode", "fp32,bf16", "-o", "runs").code == 0
    for mode, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        assert open_run(tmp_path / "runs" / mode).tensor("lm_head:grad_output").dtype == dtype


def test_layers_are_found_without_a_mode_too(cli, tmp_path):
    assert cli("record", "tiny-transformer", "--layers", "last", "-o", "run").code == 0
    assert [str(p) for p in open_run(tmp_path / "run").points] == ["model.layers.7:output"]


def test_runs_of_other_inputs_are_told_apart_when_they_are_compared(cli):
    for to, prompt in (("a", "hello"), ("b", "jello"), ("c", "hello")):
        assert cli("record", "tiny-transformer", "lm_head", "--mode", "fp32", "-o", to, "--prompt", prompt).code == 0
    assert "the two were run on different inputs" in cli("compare", "a/fp32", "b/fp32").out
    assert "different inputs" not in cli("compare", "a/fp32", "c/fp32").out


def test_mixed_sequence_lengths_are_one_sentence_with_what_to_do(cli):
    for to, prompt in (("a", "hello"), ("b", "hello there")):
        assert cli("record", "tiny-transformer", "lm_head", "--mode", "fp32", "-o", to, "--prompt", prompt).code == 0
    answer = cli("compare", "a/fp32", "b/fp32")
    assert answer.code == 2
    assert "shapes differ, [1, 5, 256] against [1, 11, 256]; record both on the same inputs" in answer.err
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize("kind", ["torchscript", "export", "onnx"])
def test_the_file_of_a_compiled_model_is_recorded_like_its_source(cli, tmp_path, kind):
    model = tiny_transformer(layers=2, hidden=16, heads=2).eval()
    ids = torch.arange(6).view(1, 6)
    if kind == "torchscript":
        file = "model.pt"
        torch.jit.save(torch.jit.trace(model, (ids,)), tmp_path / file)
    elif kind == "export":
        file = "model.pt2"
        torch.export.save(torch.export.export(model, (ids,)), tmp_path / file)
    else:
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
        file = "model.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter, about itself
            torch.onnx.export(model, (ids,), tmp_path / file, dynamo=True, verbose=False)
    other = ids.flip(1)
    torch.save([(ids,), (other,)], tmp_path / "inputs.pt")
    answer = cli("record", file, "model.layers.*", "lm_head", "-o", "run", "--inputs", "inputs.pt")
    assert answer.code == 0, answer.err
    assert "complete: 2 forwards, 3 points, 6 records" in answer.out
    run = open_run(tmp_path / "run")
    assert run.manifest.runtime == kind
    for step, given in enumerate((ids, other)):
        torch.testing.assert_close(run.tensor("lm_head", step=step), model(given), rtol=1e-5, atol=1e-5)


COMPILED = """
import torch
def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    return torch.compile(model, backend="aot_eager"), torch.ones(1, 3)
"""


def test_what_the_taps_change_in_a_compiled_model_is_measured_unless_it_is_left_out(cli, tmp_path):
    (tmp_path / "compiled.py").write_text(COMPILED)
    torch._dynamo.reset()
    assert cli("record", "compiled.py:make", "0", "-o", "measured").code == 0
    assert cli("record", "compiled.py:make", "0", "-o", "skipped", "--observer", "skip").code == 0
    assert "the taps change nothing in the output" in cli("show", "measured").out
    assert "not measured: observer='skip'" in cli("show", "skipped").out


def test_options_for_compiled_models_are_refused_where_they_have_nothing_to_do(cli, tmp_path, several):
    (tmp_path / "compiled.py").write_text(COMPILED)
    answer = cli("record", f"{several}:make", "0", "-o", "run", "--precision-faithful")
    assert answer.code == 2
    assert "precision_faithful=True is for models that torch.compile runs, and this one runs in eager" in answer.err
    answer = cli("record", "compiled.py:make", "0", "-o", "run", "--precision-faithful")
    assert answer.code == 2
    assert "is compiled by another backend" in answer.err
    assert not (tmp_path / "run").exists()
    answer = cli("record", "tiny-transformer", "lm_head", "--mode", "fp32", "-o", "run", "--precision-faithful")
    assert answer.code == 2
    assert "leave out --mode" in answer.err


LAZY = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    def forward(self, x):
        x = self.layers[0](x)
        with open("went_on", "a") as file:
            file.write("x")
        return self.layers[2](self.layers[1](x))
def net():
    torch.manual_seed(0)
    return Net(), [torch.ones(1, 4), torch.zeros(1, 4)]
"""


@pytest.mark.parametrize(
    ("asked", "went_on"),
    [
        (["--layers", "first"], 0),
        (["--layers", "first", "--mode", "fp32,bf16"], 0),
        (["--layers", "first", "--stop-after", "never"], 2),
        (["--layers", "first", "--side", "output,grad_output"], 2),
        (["--layers", "first,last"], 2),
        (["layers.0"], 2),
        (["layers.0", "--stop-after", "first"], 0),
    ],
)
def test_a_forward_of_which_the_first_layer_alone_is_recorded_ends_there(cli, tmp_path, asked, went_on):
    (tmp_path / "lazy.py").write_text(LAZY)
    answer = cli("record", "lazy.py:net", "-o", "run", "--no-floors", *asked)
    assert answer.code == 0, answer.err
    path = tmp_path / "went_on"
    assert len(path.read_text() if path.exists() else "") == went_on
    assert ("stop_after" in answer.out) is (went_on == 0)
    run = open_run(tmp_path / ("run/fp32" if "--mode" in asked else "run"))
    assert (run.state, run.manifest.settings.get("stop_after")) == ("complete", None if went_on else "layers.0")
    net = torch.nn.Linear(4, 4)
    net.load_state_dict(_first_of(tmp_path / "lazy.py"))
    for step, value in enumerate((torch.ones(1, 4), torch.zeros(1, 4))):
        assert torch.equal(run.tensor("layers.0", step=step), net(value))


def _first_of(file):
    made: dict = {}
    exec(file.read_text(), made)
    return made["net"]()[0].layers[0].state_dict()


def test_what_comes_after_the_stop_is_missing_and_a_gradient_needs_the_rest(cli, tmp_path):
    (tmp_path / "lazy.py").write_text(LAZY)
    answer = cli("record", "lazy.py:net", "layers.*", "-o", "run", "--stop-after", "1")
    assert answer.code == 0
    assert [m.point for m in open_run(tmp_path / "run").missing] == ["layers.2:output"]
    answer = cli("record", "lazy.py:net", "layers.*:grad_output", "-o", "other", "--stop-after", "1")
    assert answer.code == 2
    assert "a gradient needs the rest of it" in answer.err


def test_components_of_layers_are_recorded_beside_them_and_converted(cli, tmp_path):
    args = ("--layers", "first", "--components", "ssm", "--calib_data_num", "1", "--calib_seqlen", "8", "-o", "runs")
    answer = cli("record", "quamba-small", "--mode", "fp32,0", *args)
    assert answer.code == 0, answer.err
    scan = "backbone.layers.0.mixer.scan"
    run = open_run(tmp_path / "runs" / "0")
    codes = {f"{scan}:input[0][codes]", f"{scan}:input[0][scale]"}
    assert {str(point) for point in run.points} == {"backbone.layers.0:output", f"{scan}:output", *codes}
    for mode in ("fp32", "0"):
        assert cli("convert", f"runs/{mode}", "layer_outputs", "--to", "quamba").code == 0
    floats = open_run(tmp_path / "layer_outputs", mode="0").tensor("layers.0.ssm:input")
    scale = run.tensor(f"{scan}:input[0][scale]")
    assert torch.equal(floats, run.tensor(f"{scan}:input[0][codes]").float() * scale)
    assert json.loads(cli("compare", "layer_outputs:fp32", "layer_outputs:0", "--json").out)["rows"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("quamba-small", "**", "--components", "ssm"), "say which, as --layers first,last"),
        (
            ("quamba-small", "--layers", "first", "--components", "gate"),
            "--components has no 'gate'; there are conv, ssm",
        ),
        (("tiny-transformer", "--layers", "first", "--components", "conv"), "has no conv: a module conv1d or conv"),
    ],
)
def test_components_that_are_not_there_are_one_sentence(cli, tmp_path, args, said):
    answer = cli("record", *args, "-o", "run")
    assert (answer.code, said in answer.err) == (2, True), answer.err
    assert not (tmp_path / "run").exists()
