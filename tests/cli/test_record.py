"""`layerscope record`: what is on disk afterwards is what the model computed."""

import json

import numpy as np
import pytest
import torch

from layerscope.cli.record import _withdraw, sided
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
        assert cli("record", "demo", "lm_head", "-o", f"run{seed}", "--seed", seed).code == 0
    a, b = (open_run(tmp_path / f"run{seed}") for seed in (0, 1))
    assert not torch.equal(a.tensor("lm_head"), b.tensor("lm_head"))
    assert (a.manifest.seed, b.manifest.seed) == (0, 1)


def test_sides_are_those_of_the_pattern_or_of_the_option(cli, tmp_path):
    args = ("record", "demo", "model.layers.0", "model.norm:output", "--side", "input,grad_output", "-o", "run")
    assert cli(*args).code == 0
    points = {str(p) for p in open_run(tmp_path / "run").points}
    assert points == {"model.layers.0:input[0]", "model.layers.0:grad_output", "model.norm:output"}


def test_gradients_are_those_of_the_mean_square_of_the_output(cli, tmp_path):
    assert cli("record", "demo", "lm_head:grad_output", "-o", "run", "--prompt", "abc").code == 0
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
    assert cli("record", "demo", "model.norm", "-o", "run", "--keep", keep).code == 0
    (entry,) = open_run(tmp_path / "run").records()
    assert (entry.dtype is not None, entry.summary is not None) == (tensor, summary)


def test_an_existing_run_is_left_alone_unless_steps_are_to_be_added(cli, tmp_path):
    args = ("record", "demo", "model.norm", "-o", "run")
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


@pytest.mark.parametrize("option", [("--when", "evry(3)"), ("--side", "output,up"), ("--keep", "all"), ("--seed", "x")])
def test_options_that_do_not_read_are_exit_code_2_and_leave_nothing(cli, tmp_path, option):
    answer = cli("record", "demo", "**", "-o", "run", *option)
    assert answer.code == 2
    assert not (tmp_path / "run").exists()


def test_json_says_what_was_recorded_and_what_is_missing(cli):
    page = json.loads(cli("record", "demo", "model.layers.*:grad_input", "-o", "run", "--json").out)
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
    assert cli("record", "demo", "op:aten.zzz", "-o", "run").code == 2
    assert not (tmp_path / "run").exists()
    assert cli("record", "demo", "model.norm", "-o", "run").code == 0


def test_a_folder_that_was_there_before_stays(cli, tmp_path):
    (tmp_path / "run").mkdir()
    assert cli("record", "demo", "op:aten.zzz", "-o", "run").code == 2
    assert (tmp_path / "run").is_dir()


def test_nothing_is_removed_when_steps_were_to_be_added(cli, tmp_path):
    assert cli("record", "demo", "op:aten.zzz", "-o", "run", "--append").code == 2
    assert (tmp_path / "run/rank-00000/journal").exists()


def test_what_somebody_else_put_into_the_folder_stays_with_all_of_it(tmp_path):
    Writer(tmp_path / "run", Manifest()).close()
    (tmp_path / "run/notes.txt").write_text("mine")
    files = sorted(tmp_path.rglob("*"))
    _withdraw(tmp_path / "run")
    assert sorted(tmp_path.rglob("*")) == files
    (tmp_path / "run/notes.txt").unlink()
    _withdraw(tmp_path / "run")
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
    answer = cli("record", "demo", "**", "-o", "run", f"--seed={seed}")
    assert answer.code == 2
    assert "is not in the range" in answer.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seed", [(1 << 64) - 1, -(1 << 63)])
def test_a_seed_at_the_end_of_the_range_is_taken(cli, seed):
    assert cli("record", "demo", "model.norm", "-o", "run", f"--seed={seed}").code == 0
