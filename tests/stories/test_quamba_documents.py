"""The command lines and snippets that users of Quamba's tools know: they run, and leave what was promised.

In the quick form the small model stands in for the 130m one, on a few tokens; the `stress` form is to the letter.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from shutil import copytree
from typing import NamedTuple

import numpy as np
import pytest
import torch

import checkpoints
from layerscope import open_run
from layerscope.models import load_model
from layerscope.models.mamba import load_mamba, quamba_small, sample_batches
from layerscope.modes import preparing, variant

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
DIR = "pretrained_models/Quamba1-pa9999/pa-0.9999"
QUANTISED = ["0", "2-0", "2-1", "2-2", "2-3", "2-4", "3"]
EVERY = ["fp32", *QUANTISED]
ESSENTIAL = ["fp32", "0", "2-1", "2-2", "2-4"]

SAVING = [
    f"save_layer_outputs.py quamba-130m-w8a8 --pretrained_dir {DIR} {rest}"
    for rest in (
        "--mode fp32 --output_dir layer_outputs --calib_data_num 10",
        "--mode 2-1 --quantize --output_dir layer_outputs",
        "--mode 0 --quantize --output_dir layer_outputs",
        "--mode 2-1 --quantize",
        "--mode fp32 --calib_data_num 100 --calib_seqlen 1024",
    )
]
CAPTURING = {
    f"save_first_layer_io.py --pretrained_dir {DIR}": ("first_layer_io_all_modes", EVERY),
    f"save_first_layer_io.py --pretrained_dir {DIR} --modes fp32 0 2-1 2-4": (
        "first_layer_io_all_modes",
        ["fp32", "0", "2-1", "2-4"],
    ),
    f"save_first_layer_io.py --pretrained_dir {DIR} --output_file custom_output.npz --seq_len 1024": (
        "custom_output",
        EVERY,
    ),
}
BUILT_IN = "the weights that come with layerscope"
PAGE = Path(__file__).with_name("quamba_snippets.md").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"^## (\w+)\n\n```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


class Answer(NamedTuple):
    code: int
    out: str
    err: str


def shell(command: str, folder: Path, *, cache: Path) -> Answer:
    """Run a command line as a user does."""
    done = subprocess.run(
        shlex.split(command),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "LAYERSCOPE_CACHE": str(cache), "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Run a Python script of these documents in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(SCRIPTS)

    def run(command: str) -> Answer:
        name, *arguments = shlex.split(command)
        found = spec_from_file_location(name.removesuffix(".py"), SCRIPTS / name)
        module = module_from_spec(found)
        found.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capsys.readouterr()
        try:
            code = module.main()
        except SystemExit as left:
            code = left.code
        return Answer(code, *capsys.readouterr())

    return run


def quickly(command: str) -> str:
    """The same command on the small model, of which few tokens are asked for."""
    if "save_first_layer_io" in command:
        return f"{command} --model quamba-small" + ("" if "--seq_len" in command else " --seq_len 16")
    return f"{command.replace('quamba-130m-w8a8', 'quamba-small')} --calib_data_num 2 --calib_seqlen 16"


def files_of(modes: list[str]) -> set[str]:
    return {f"mode_{mode}_{rest}" for mode in modes for rest in ("layer_0.npy", "layer_23.npy", "stats.json")}


def read(file: Path) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(file.read_text(), parse_constant=refuse)


def assert_describes(entry: dict, array: np.ndarray) -> None:
    values = array.astype(np.float64)
    assert entry["shape"] == list(array.shape)
    expected = (values.mean(), values.std(), values.min(), values.max())
    assert [entry[key] for key in ("mean", "std", "min", "max")] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert entry["first_10"] == pytest.approx(values.ravel()[:10])


# Layer outputs --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout whose owner has edited the variables at the top of the shell scripts, as the documents tell."""
    root = tmp_path_factory.mktemp("a checkout")
    copytree(SCRIPTS, root / "scripts")
    (root / ".venv").symlink_to(sys.prefix)
    edits = {"MODEL": "quamba-small", "CALIB_DATA_NUM": 2, "CALIB_SEQLEN": 16, "SEQ_LEN": 16}
    for name in ("save_all_modes.sh", "capture_first_layer.sh"):
        script = root / "scripts" / name
        text = script.read_text()
        for variable, value in edits.items():
            text = re.sub(rf"(?m)^{variable}=.*$", f"{variable}={value}", text)
        script.write_text(text)
    return root / "scripts"


@pytest.fixture(scope="module")
def saved(checkout, tmp_path_factory):
    """What `./save_all_modes.sh` leaves, and says."""
    answer = shell("./save_all_modes.sh", checkout, cache=tmp_path_factory.getbasetemp() / "cache")
    assert answer.code == 0, answer.err
    return checkout / "layer_outputs", answer


def test_saving_all_modes_leaves_the_files_of_each_and_says_whose_weights_they_are(saved):
    folder, answer = saved
    assert {path.name for path in folder.iterdir()} == files_of(EVERY)
    assert [line.split()[1] for line in answer.out.splitlines() if line.startswith("mode")] == [f"{m}:" for m in EVERY]
    assert answer.err == f"save_layer_outputs: {DIR} is not there: quamba-small runs with {BUILT_IN}\n"


def test_the_statistics_are_those_of_the_arrays(saved):
    folder, _ = saved
    for mode in EVERY:
        said = read(folder / f"mode_{mode}_stats.json")
        assert (said["mode"], said["model"], said["weights"]) == (mode, "quamba-small", "built-in")
        assert (said["pretrained_dir"], said["percentile_alpha"]) == (DIR, 0.9999)
        assert (said["calib_data_num"], said["calib_seqlen"]) == (2, 16)
        for layer in ("layer_0", "layer_23"):
            array = np.load(folder / f"mode_{mode}_{layer}.npy")
            assert array.shape == (2, 16, 128)
            assert_describes(said[layer], array)


def test_fp32_is_what_torchs_own_hooks_see(saved):
    folder, _ = saved
    model = load_model("quamba-small").model
    seen = {}
    for at in (0, 23):
        model.backbone.layers[at].register_forward_hook(lambda _, __, output, at=at: seen.update({at: output}))
    with torch.no_grad():
        model(torch.cat(sample_batches(2, 16, split="recorded")))
    for at, expected in seen.items():
        assert np.array_equal(np.load(folder / f"mode_fp32_layer_{at}.npy"), expected.numpy())


@pytest.mark.parametrize("command", SAVING)
def test_every_save_command_leaves_its_files(run, tmp_path, command):
    answer = run(quickly(command))
    assert answer.code == 0
    mode = re.search("--mode ([^ ]+)", command)[1]
    assert {path.name for path in (tmp_path / "layer_outputs").iterdir()} == files_of([mode])


@pytest.mark.parametrize(
    ("words", "modes"),
    [("fp_only", ["fp32"]), ("quant_only", QUANTISED), ("essential", ESSENTIAL), ("fp32 0 2-4", ["fp32", "0", "2-4"])],
)
def test_groups_and_several_modes_load_the_model_once(run, tmp_path, monkeypatch, words, modes):
    import variants

    loads = []
    prepare = variants.prepare
    monkeypatch.setattr(variants, "prepare", lambda *args, **how: loads.append(args) or prepare(*args, **how))
    answer = run(f"save_layer_outputs.py quamba-small --calib_data_num 1 --calib_seqlen 8 --mode {words}")
    assert (answer.code, len(loads)) == (0, 1)
    assert answer.err == f"save_layer_outputs: no --pretrained_dir: quamba-small runs with {BUILT_IN}\n"
    assert {path.name for path in (tmp_path / "layer_outputs").iterdir()} == files_of(modes)
    assert len({read(file)["inputs"] for file in (tmp_path / "layer_outputs").glob("*_stats.json")}) == 1


def test_components_are_what_torchs_own_hooks_see_and_codes_are_floats(run, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "TOKENS_AT_ONCE", 8)  # two forwards
    command = "save_layer_outputs.py quamba-small --components conv,ssm --calib_data_num 2 --calib_seqlen 8 --mode"
    answer = run(f"{command} fp32 0")
    assert answer.code == 0, answer.err
    names = [f"layer_{at}_{word}_{side}" for at in (0, 23) for word in ("conv", "ssm") for side in ("input", "output")]
    there = {path.name for path in (tmp_path / "layer_outputs").iterdir()}
    assert there == files_of(["fp32", "0"]) | {f"mode_{mode}_{name}.npy" for mode in ("fp32", "0") for name in names}
    model = load_model("quamba-small").model
    ids = torch.cat(sample_batches(2, 8, split="recorded"))
    for mode in ("fp32", "0"):
        seen = {}
        own = variant(model, mode, preparing.prepare("quamba-small").setting)
        for at in (0, 23):
            mixer = own.backbone.layers[at].mixer
            for word, module in (("conv", mixer.conv1d), ("ssm", mixer.scan)):

                def keep(module, args, output, at=at, word=word, seen=seen):
                    for side, value in (("input", args[0]), ("output", output)):
                        floats = value if isinstance(value, torch.Tensor) else value.codes.float() * value.scale
                        seen[f"layer_{at}_{word}_{side}"] = floats

                module.register_forward_hook(keep)
        with torch.no_grad():
            own(ids)
        for name in names:
            saved = np.load(tmp_path / "layer_outputs" / f"mode_{mode}_{name}.npy")
            np.testing.assert_allclose(saved, seen[name].numpy(), rtol=1e-4, atol=1e-4)
    table = run("compare_with_fp.py --all").out  # of layers, whatever of their insides is there
    said = float(
        next(line for line in table[table.index("SUMMARY TABLE") :].splitlines() if line[:2] == "0 ").split()[5]
    )
    arrays = [
        [np.load(f"layer_outputs/mode_{mode}_layer_{at}.npy").ravel() for mode in ("fp32", "0")] for at in (0, 23)
    ]
    assert said == pytest.approx(np.mean([np.corrcoef(pair)[0, 1] for pair in arrays]), abs=2e-6)
    assert run("save_layer_outputs.py quamba-small --mode fp32 --components gate").code == 2


def test_saving_a_mode_again_replaces_it_and_leaves_the_others(run, tmp_path):
    run(quickly(SAVING[0]))
    run("save_layer_outputs.py quamba-small --mode 0 --quantize --calib_data_num 1 --calib_seqlen 8")
    kept = (tmp_path / "layer_outputs" / "mode_fp32_layer_0.npy").read_bytes()
    run("save_layer_outputs.py quamba-small --mode 0 --quantize --calib_data_num 2 --calib_seqlen 16")
    assert np.load(tmp_path / "layer_outputs" / "mode_0_layer_0.npy").shape == (2, 16, 128)
    assert (tmp_path / "layer_outputs" / "mode_fp32_layer_0.npy").read_bytes() == kept


def test_many_samples_go_through_a_few_at_a_time_and_are_saved_as_one_array(run, tmp_path, monkeypatch):
    command = "save_layer_outputs.py quamba-small --mode fp32 0 2-4 --calib_data_num 5 --calib_seqlen 12 --output_dir"
    run(f"{command} at_once")
    monkeypatch.setattr(preparing, "TOKENS_AT_ONCE", 2 * 12)
    run(f"{command} sliced")
    for mode in ("fp32", "0", "2-4"):
        said = [read(tmp_path / folder / f"mode_{mode}_stats.json") for folder in ("at_once", "sliced")]
        for layer in ("layer_0", "layer_23"):
            at_once, sliced = (
                np.load(tmp_path / folder / f"mode_{mode}_{layer}.npy") for folder in ("at_once", "sliced")
            )
            assert sliced.shape == (5, 12, 128)
            if mode == "fp32":  # the order of a float product's sums is the library's, which looks at its size
                np.testing.assert_allclose(sliced, at_once, rtol=1e-4, atol=1e-4)
            else:
                assert np.array_equal(sliced, at_once)
            assert_describes(said[1][layer], sliced)


def test_quantize_says_so_where_it_changes_nothing(run):
    answer = run("save_layer_outputs.py quamba-small --mode fp32 --quantize --calib_data_num 1 --calib_seqlen 8")
    assert answer.code == 0
    assert "mode fp32 is in floating point: --quantize changes nothing of it" in answer.err


def test_weights_of_ones_own_are_used(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=256, hidden_size=16, num_hidden_layers=3, state_size=4, pad_token_id=0)
    theirs = transformers.MambaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "pa-0.995")
    answer = run(
        "save_layer_outputs.py quamba-small --pretrained_dir pa-0.995 --mode fp32 0 --calib_data_num 1 --calib_seqlen 8"
    )
    assert answer.code == 0
    ran = "quamba-small runs with the weights in pa-0.995"
    assert answer.err.splitlines() == [
        f"save_layer_outputs: {ran}",
        "save_layer_outputs: token ids are the bytes of the text",
    ]
    said = read(tmp_path / "layer_outputs" / "mode_0_stats.json")
    assert said["ran"] == ran
    assert (said["weights"], said["percentile_alpha"]) == ("pa-0.995", 0.995)
    seen = []
    theirs.backbone.layers[2].register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.no_grad():
        theirs(torch.cat(sample_batches(1, 8, split="recorded")))
    last = np.load(tmp_path / "layer_outputs" / "mode_fp32_layer_2.npy")
    np.testing.assert_allclose(last, seen[0].numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("save_layer_outputs.py quamba-130m --mode 0", "did you mean quamba-130m-w8a8"),
        ("save_layer_outputs.py quamba-small --mode 9", "there is no mode '9' of Mamba"),
        ("save_layer_outputs.py quamba-small --mode 0 --pretrained_dir mine", "'mine' is not there; leave it out"),
        ("save_layer_outputs.py quamba-small --mode 0 --calib_seqlen -1", "there is at least 1 of each"),
        ("save_first_layer_io.py --model quamba-small --modes 9", "there is no mode '9' of Mamba"),
        ("save_first_layer_io.py --pretrained_dir mine", "'mine' is not there; leave it out"),
    ],
)
def test_wrong_use_is_one_sentence_and_2_and_leaves_nothing(run, tmp_path, command, said):
    answer = run(command)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


NETS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
def net():
    return Net(), torch.arange(16.0).view(2, 8)
def bare():
    return Net()
"""


def test_the_first_layer_of_a_model_of_ones_own_is_that_of_its_own_inputs(run, tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    answer = run("save_first_layer_io.py --model nets.py:net --modes fp32 bf16")
    assert (answer.code, answer.err) == (0, "")
    with np.load(tmp_path / "first_layer_io_all_modes.npz") as file:
        assert np.array_equal(file["mode_fp32_input"], np.arange(16, dtype=np.float32).reshape(2, 8))
        assert file["mode_bf16_output"].shape == (2, 8)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nets.py:net --seq_len 7", "samples of text are cut for built-in models, which 'nets.py:net' is not"),
        ("nets.py:bare", "'nets.py:bare' came without inputs; return (model, inputs) from the function."),
        ("nets.py:net --pretrained_dir .", "--pretrained_dir is for models with modes of their own"),
    ],
)
def test_what_is_said_of_such_a_model_names_no_flag_that_the_script_lacks(run, tmp_path, words, said):
    (tmp_path / "nets.py").write_text(NETS)
    answer = run(f"save_first_layer_io.py --modes fp32 --model {words}")
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    known = run("save_first_layer_io.py --help").out
    assert [flag for flag in re.findall(r"--\w+", answer.err) if flag not in known] == []


# Comparing them -------------------------------------------------------------------------------------


def test_the_compare_commands_work_on_what_was_saved(run, saved, tmp_path):
    copytree(saved[0], tmp_path / "layer_outputs")
    run(quickly("save_layer_outputs.py quamba-130m-w8a8 --mode fp16"))
    reference, mode = (np.load(saved[0] / f"mode_{m}_layer_0.npy").astype(np.float64) for m in ("fp32", "2-1"))
    mse = ((mode - reference) ** 2).mean()
    plain = run("compare_with_fp.py 2-1 --reference fp32 --output_dir layer_outputs")
    assert plain.code == 0
    assert "Layer 0 - Comparison Results" in plain.out
    assert f"{mse:.6e}" in plain.out
    assert run("compare_with_fp.py 2-1 --reference fp16").code == 0
    assert run("compare_with_fp.py 2-1 --save_comparison results/mode_2-1_comparison.json").code == 0
    written = read(tmp_path / "results" / "mode_2-1_comparison.json")
    assert written["rows"][0]["metrics"]["mse"] == pytest.approx(mse, rel=1e-6)
    table = run("compare_with_fp.py --all").out
    rows = table[table.index("SUMMARY TABLE - All Modes vs fp32") :].splitlines()[2:10]
    assert [row.split()[0] for row in rows] == [*QUANTISED, "fp16"]


def test_quick_run_measures_the_modes_on_a_text(checkout, tmp_path):
    text = "The quick brown fox jumps over the lazy dog."
    (tmp_path / "text.txt").write_text(text)
    script = checkout / "QUICK_RUN.sh"
    answer = shell(f"env MODEL=quamba-small TEXT=text.txt {shlex.quote(str(script))} fp32,0", tmp_path, cache=tmp_path)
    assert answer.code == 0, answer.err
    model = load_model("quamba-small").model
    ids = torch.tensor([list(text.encode())])
    with torch.no_grad():
        logits = model(ids)[0, :-1].double()
    perplexity = float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).exp())
    rows = {line.split()[0]: line.split() for line in answer.out.splitlines() if line[:1] in ("f", "0")}
    assert float(rows["fp32"][4]) == pytest.approx(perplexity, rel=1e-3)
    assert rows.keys() == {"fp32", "0"}


# The first layer ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def captured(checkout, tmp_path_factory):
    """What `./capture_first_layer.sh` leaves, and says."""
    answer = shell("./capture_first_layer.sh", checkout, cache=tmp_path_factory.getbasetemp() / "cache")
    assert answer.code == 0, answer.err
    return checkout, answer


def test_capturing_the_first_layer_leaves_both_files_and_prints_each_mode(captured):
    folder, answer = captured
    stats = read(folder / "first_layer_io_all_modes_stats.json")
    assert {"timestamp", "model", "pretrained_dir", "seq_len", "modes"} <= stats.keys()
    assert (stats["model"], stats["pretrained_dir"], stats["seq_len"]) == ("quamba-small", DIR, 16)
    assert list(stats["modes"]) == EVERY
    with np.load(folder / "first_layer_io_all_modes.npz") as data:
        assert data.files == [f"mode_{mode}_{side}" for mode in EVERY for side in ("input", "output")]
        for mode in EVERY:
            for side in ("input", "output"):
                assert data[f"mode_{mode}_{side}"].shape == (1, 16, 128)
                assert_describes(stats["modes"][mode][side], data[f"mode_{mode}_{side}"])
            assert np.array_equal(data[f"mode_{mode}_input"], data["mode_fp32_input"])
            said = open_run(f"{folder}/first_layer_io_all_modes.npz:{mode}").manifest.settings
            assert said.get("quantised") == (None if mode == "fp32" else f"mode {mode}")
    entry = stats["modes"]["2-1"]["output"]
    line = "=" * 98
    assert f"{line}\nMODE 2-1\n{line}\n\n📥 INPUT (Shape: [1, 16, 128]):\n  First 10 values: ['" in answer.out
    assert (
        f"📤 OUTPUT (Shape: [1, 16, 128]):\n"
        f"  First 10 values: {[f'{value:.6f}' for value in entry['first_10']]}\n"
        f"  Mean: {entry['mean']:.6f}\n"
        f"  Std:  {entry['std']:.6f}\n"
        f"  Range: [{entry['min']:.6f}, {entry['max']:.6f}]\n"
    ) in answer.out
    assert f"{DIR} is not there: quamba-small runs with {BUILT_IN}" in answer.err


def test_the_first_layer_is_what_torchs_own_hooks_see(captured):
    model = load_model("quamba-small").model
    seen = {}
    model.backbone.layers[0].register_forward_hook(lambda _, args, output: seen.update(input=args[0], output=output))
    with torch.no_grad():
        model(torch.cat(sample_batches(1, 16, split="recorded")))
    with np.load(captured[0] / "first_layer_io_all_modes.npz") as data:
        for side, expected in seen.items():
            assert np.array_equal(data[f"mode_fp32_{side}"], expected.numpy())


@pytest.fixture
def snippet(tmp_path, monkeypatch, capsys):
    """Run a snippet of the documents beside the files it reads; return what it prints and what it leaves in names."""

    def snippet(title: str, folder: Path) -> tuple[str, dict]:
        for file in folder.iterdir():
            if file.name.startswith(("first_layer_io", "layer_outputs")):
                (tmp_path / file.name).symlink_to(file)
        monkeypatch.chdir(tmp_path)
        names: dict = {}
        capsys.readouterr()
        exec(compile(SNIPPETS[title], title, "exec"), names)
        return capsys.readouterr().out, names

    return snippet


def test_the_first_layer_snippet_finds_the_difference_between_modes(captured, snippet):
    out, names = snippet("first_layer", captured[0])
    assert names["mode0_input"].shape == names["mode21_output"].shape == (1, 16, 128)
    assert np.array_equal(names["mode0_input"], names["mode21_input"])
    assert out.endswith(f"Max difference: {np.max(np.abs(names['mode21_output'] - names['mode0_output']))}\n")


def test_the_statistics_snippet_prints_a_mean_for_every_mode(captured, snippet):
    out, names = snippet("statistics", captured[0])
    said = read(captured[0] / "first_layer_io_all_modes_stats.json")["modes"]
    assert names["mode0_stats"] == said["0"]
    assert out.splitlines()[2:] == [f"Mode {mode}: output mean = {said[mode]['output']['mean']:.6f}" for mode in EVERY]


def test_the_histogram_snippet_measures_and_draws(captured, snippet, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    out, names = snippet("histogram", captured[0])
    names["plt"].close("all")
    for mode, name in (("0", "diff_0"), ("2-1", "diff_21")):
        with np.load(captured[0] / "first_layer_io_all_modes.npz") as data:
            difference = data[f"mode_{mode}_output"] - data["mode_fp32_output"]
        assert np.array_equal(names[name], difference)
        assert f"Mode {mode} vs FP32:\n  MSE: {np.mean(difference**2):.6e}\n" in out
        assert 0 < np.mean(difference**2) < np.mean(names["fp32_output"] ** 2)
    assert (tmp_path / "first_layer_output_diff.png").read_bytes().startswith(b"\x89PNG")


def test_the_layer_snippet_finds_the_difference_between_modes(saved, snippet):
    out, names = snippet("layers", saved[0].parent)
    assert 0 < np.max(np.abs(names["diff"])) < np.max(np.abs(names["fp32_layer0"]))
    assert out == f"Max diff: {np.max(np.abs(names['diff']))}\n"


@pytest.mark.parametrize("command", CAPTURING)
def test_every_capture_command_leaves_its_files(run, tmp_path, command):
    name, modes = CAPTURING[command]
    (tmp_path / f"{name}.npz").write_bytes(b"what was here before")
    assert run(quickly(command)).code == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.npz", f"{name}_stats.json"}
    stats = read(tmp_path / f"{name}_stats.json")
    assert list(stats["modes"]) == modes
    assert stats["seq_len"] == (1024 if "1024" in command else 16)
    with np.load(tmp_path / f"{name}.npz") as data:
        assert len(data.files) == 2 * len(modes)


# With a checkpoint of one's own where the documents put it ------------------------------------------

MODEL = "quamba-130m-w8a8"
WRITERS = {
    "mamba_ssm": checkpoints.state_spaces,
    "transformers": checkpoints.transformers_folder,
    "quamba": checkpoints.quamba,
}


@pytest.fixture(params=WRITERS)
def there(request, tmp_path, monkeypatch):
    """The trained small model where the documents say, in the format of the parameter."""
    monkeypatch.chdir(tmp_path)
    return request.param, WRITERS[request.param](quamba_small(), tmp_path / DIR / MODEL)


def short(command: str) -> str:
    """The same command on fewer tokens."""
    if "save_first" in command:
        return command.replace("--seq_len 1024", "--seq_len 16") + ("" if "--seq_len" in command else " --seq_len 16")
    return f"{re.sub('--calib_.*', '', command)} --calib_data_num 1 --calib_seqlen 16"


def test_every_save_and_capture_command_runs_on_the_folder_and_says_so(there, run, tmp_path):
    kind, folder = there
    place = f"{DIR}/{MODEL}"
    for command in [*SAVING, *CAPTURING]:
        answer = run(short(command))
        assert answer.code == 0, answer.err
        assert f"{MODEL} runs with the weights in {place}" in answer.err
        assert ("which are INT8" in answer.err) == (kind == "quamba")
        if command in CAPTURING:
            name, modes = CAPTURING[command]
            assert list(read(tmp_path / f"{name}_stats.json")["modes"]) == modes
    assert {path.name for path in (tmp_path / "layer_outputs").iterdir()} == files_of(["fp32", "0", "2-1"])
    assert run("compare_with_fp.py 2-1 --reference fp32 --output_dir layer_outputs").code == 0
    said = json.loads((tmp_path / "layer_outputs" / "mode_2-1_stats.json").read_text())
    assert (said["weights"], said["layer_23"]["shape"]) == (place, [1, 16, 128])
    assert said["ran"].startswith(f"{MODEL} runs with the weights in {place}")
    seen = []
    model = quamba_small() if kind != "quamba" else load_mamba(folder)
    model.backbone.layers[0].register_forward_hook(lambda _, __, out: seen.append(out))
    with torch.no_grad():
        model(torch.cat(sample_batches(1, 16, split="recorded")))
    got = np.load(tmp_path / "layer_outputs" / "mode_fp32_layer_0.npy")
    np.testing.assert_allclose(got, seen[0].numpy(), rtol=1e-5, atol=1e-5)


# To the letter --------------------------------------------------------------------------------------


@pytest.mark.stress
@pytest.mark.parametrize("kind", [None, *WRITERS])
def test_every_command_line_of_the_documents_runs_as_it_is_written(tmp_path, kind):
    """Without a checkpoint folder, and with the small trained model in it in each of the three formats."""
    if kind is not None:
        WRITERS[kind](quamba_small(), tmp_path / DIR / MODEL)
    width = 768 if kind is None else 128
    for script in SCRIPTS.iterdir():
        (tmp_path / script.name).symlink_to(script)
    *saving, many_samples = (f"{sys.executable} {command}" for command in SAVING)
    comparing = [
        "./comparewithfp 2-1",
        f"{sys.executable} compare_with_fp.py 2-1 --reference fp32 --output_dir layer_outputs",
        f"{sys.executable} compare_with_fp.py 2-1 --save_comparison results/mode_2-1_comparison.json",
        "./compare_all_modes.sh",
        f"{sys.executable} save_layer_outputs.py quamba-130m-w8a8 --mode fp16 --calib_seqlen 512"
        + (f" --pretrained_dir {DIR}" if kind is not None else ""),
        f"{sys.executable} compare_with_fp.py 2-1 --reference fp16",
    ]
    words = ("", "fp_only", "quant_only", "essential", "fp32 0 2-1 2-4")
    for command in [*saving, *(f"./save_all_modes.sh {each}" for each in words), *comparing]:
        answer = shell(command, tmp_path, cache=tmp_path / "cache")
        assert answer.code == 0, f"{command}: {answer.err}"
        if kind is not None and "save" in command.split("--save")[0]:
            assert f"{MODEL} runs with the weights in {DIR}/{MODEL}" in answer.err
    assert {path.name for path in (tmp_path / "layer_outputs").iterdir()} == files_of([*EVERY, "fp16"])
    assert np.load(tmp_path / "layer_outputs" / "mode_2-1_layer_23.npy").shape == (10, 512, width)
    assert len(list((tmp_path / "comparisons").iterdir())) == len(QUANTISED)
    for each in ("", "essential", "quant_only", "fp32 0 2-1 2-4", "fp32 0 2-1"):
        answer = shell(f"./capture_first_layer.sh {each}", tmp_path, cache=tmp_path / "cache")
        assert answer.code == 0, answer.err
    for command, (name, modes) in CAPTURING.items():
        assert shell(f"{sys.executable} {command}", tmp_path, cache=tmp_path / "cache").code == 0
        with np.load(tmp_path / f"{name}.npz") as data:
            assert data[f"mode_{modes[-1]}_output"].shape == (1, 1024 if "1024" in command else 512, width)
    if kind is None:  # 3 GB in memory
        assert shell(many_samples, tmp_path, cache=tmp_path / "cache").code == 0
        assert np.load(tmp_path / "layer_outputs" / "mode_fp32_layer_0.npy").shape == (100, 1024, 768)
