"""Somebody's own checkpoint lies where the documents put it, in each of three formats, and their commands run on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoints
import layerscope as ls
from layerscope import open_run
from layerscope.cli import main
from layerscope.errors import BadModel, BadText, NoSuchMode
from layerscope.models.mamba import quamba_small, sample_batches
from layerscope.modes import variant
from layerscope.modes.preparing import DEFAULT_DIR, prepare

MODEL = "quamba-130m-w8a8"


def test_the_drawn_weights_are_said_to_be_drawn(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    ready = prepare(MODEL, pretrained_dir=DEFAULT_DIR)
    assert ready.ran == (f"{DEFAULT_DIR} is not there: {MODEL} runs with weights drawn from seed 0, not trained")
    assert ready.settings["ran"] == ready.ran


def test_a_w8a8_folder_computes_with_its_own_codes_and_scales(tmp_path):
    """Layer 0 of mode 0 in numpy, from the tensors in the file alone."""
    folder = checkpoints.quamba(quamba_small(), tmp_path / "q")
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    ids = sample_batches(1, 24, split="recorded")[0]
    model = variant(prepare("quamba-small", pretrained_dir=str(folder)).model, "0")
    seen = []
    model.backbone.layers[0].register_forward_hook(lambda _, __, out: seen.append(out))
    with torch.no_grad():
        model(ids)
    t = {
        k.removeprefix("backbone.layers.0."): (v.double().numpy() if isinstance(v, torch.Tensor) else v)
        for k, v in stored.items()
    }
    g, rank, states = checkpoints.GRIDS, 8, 16

    def grid(x, scale):
        return np.clip(np.rint(x / scale), -127, 127) * scale

    def project(x, name, rows, out=None):
        y = x @ (t[f"mixer.{name}.weight"][:, :rows] * t[f"mixer.{name}.b"])
        return y if out is None else grid(y, out)

    def silu(x):
        return x / (1 + np.exp(-x))

    hidden = t["backbone.embedding.weight"][ids[0]]
    normed = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-5) * t["norm.weight"]
    x, z = np.split(project(grid(normed, g["norm"]), "in_proj", 512, g["in"]), 2, axis=-1)
    taps = t["mixer.conv1d.weight"] * t["mixer.conv1d.weight_scale"]
    past = np.pad(x, ((3, 0), (0, 0)))
    conv = sum(past[k : k + len(x)] * taps[:, k] for k in range(4))
    u = grid(silu(conv + t["mixer.conv1d.bias"] * t["mixer.conv1d.bias_scale"]), g["u"])
    low, b, c = np.split(project(u, "x_proj", rank + 2 * states, g["x"]), [rank, rank + states], axis=-1)
    s = {k.removeprefix("mixer.selective_scan."): v for k, v in t.items() if "selective_scan" in k}
    delta = np.log1p(np.exp(project(low, "dt_proj", 256, g["dt"]) + s["dt_bias"] * s["dt_bias_scale"]))
    a, d = -np.exp(s["A_log"] * s["A_scale"]), s["D"] * s["D_scale"]
    state, y = np.zeros_like(a), np.zeros_like(u)
    for at in range(len(u)):
        state = np.exp(delta[at][:, None] * a) * state + (delta[at] * u[at])[:, None] * b[at]
        y[at] = (state * c[at]).sum(-1) + d * u[at]
    out = hidden + project(grid(y * silu(z), g["y"]), "out_proj", 128)
    got = seen[0][0].double().numpy()
    assert np.linalg.norm(got - out) <= 2e-3 * np.linalg.norm(out)  # a value on a border may take the other code


def test_fused_hadamard_transforms_are_named_and_refused(tmp_path):
    folder = checkpoints.quamba(quamba_small(), tmp_path / "q", hadamard=True)
    with pytest.raises(BadModel, match=r"Hadamard transforms fused into its weights \(backbone\.layers\.0\.mixer\.had"):
        prepare("quamba-small", pretrained_dir=str(folder))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"ssm_cfg": {"layer": "Mamba2"}}, "layers of the kind 'Mamba2'"),
        ({"ssm_cfg": {"layer": "W4A8QMamba"}}, "layers of the kind 'W4A8QMamba'"),
        ({"ssm_cfg": {"layer": "W8A8QMamba", "use_had_transform": True}}, "Hadamard transforms fused into its weights"),
        ({"rms_norm": False}, "LayerNorm in the place of RMSNorm"),
        ({"attn_layer_idx": [1]}, "attention layers"),
        ({"embedding_cfg": {"layer": "W8O16Embedding"}}, "embedding_cfg 'W8O16Embedding'"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, told, said):
    folder = checkpoints.state_spaces(quamba_small(), tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | told
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModel, match=said):
        prepare(str(folder))


def tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "fox": 2, "of": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))


def test_a_tokenizer_in_the_folder_reads_prompts_and_texts(tmp_path):
    pytest.importorskip("tokenizers")
    folder = checkpoints.state_spaces(quamba_small(), tmp_path / "m")
    tokenizer(folder)
    (batch,) = prepare(str(folder), prompt="the fox of").batches()
    assert batch.kwargs["input_ids"].tolist() == [[1, 2, 3]]
    (tmp_path / "text.txt").write_text("the fox of the " * 2 + "of of of of " * 2)
    ready = prepare(str(folder), calib_file=str(tmp_path / "text.txt"), calib_data_num=1, calib_seqlen=8)
    assert ready.setting.calibration.tolist() == [1, 2, 3, 1, 1, 2, 3, 1]
    (batch,) = ready.batches()
    assert batch.args[0].tolist() == [[3] * 8]  # the other half: nothing is recorded that was calibrated on
    assert ready.settings["tokens"].startswith("token ids are by the tokenizer in")
    assert set(prepare(str(folder)).setting.calibration.tolist()) <= {0, 1, 2, 3}


def test_a_large_vocabulary_without_a_tokenizer_needs_ids(tmp_path):
    model = quamba_small()
    folder = checkpoints.state_spaces(model, tmp_path / "m")
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    for name in ("backbone.embedding.weight", "lm_head.weight"):
        weights[name] = torch.cat((weights[name], weights[name][:48]))
    torch.save(weights, folder / "pytorch_model.bin")
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 300}  # 304 with its padding
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadModel, match=r"a vocabulary of 304 and no tokenizer.*--calib_file"):
        prepare(str(folder))
    np.save(tmp_path / "ids.npy", np.arange(300))
    ready = prepare(str(folder), calib_file=str(tmp_path / "ids.npy"), calib_data_num=1, calib_seqlen=4)
    assert next(iter(ready.batches())).args[0].tolist() == [[150, 151, 152, 153]]
    np.save(tmp_path / "ids.npy", np.arange(305))
    with pytest.raises(BadText, match="has the token id 304, and the model knows 304"):
        prepare(str(folder), calib_file=str(tmp_path / "ids.npy"))


def test_record_without_modes_reads_the_folder_too(tmp_path):
    folder = checkpoints.state_spaces(quamba_small(), tmp_path / "m")
    with pytest.raises(SystemExit) as left:
        main(["record", str(folder), "backbone.layers.0", "--no-floors", "-o", str(tmp_path / "r")])
    assert not left.value.code
    assert [str(point) for point in open_run(tmp_path / "r").points] == ["backbone.layers.0:output"]


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory):
    """A Mamba2 as transformers saves it, where `--pretrained_dir` finds it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=256, hidden_size=32, num_hidden_layers=3, state_size=8, num_heads=4, head_dim=16, n_groups=1,
        chunk_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    theirs = transformers.Mamba2ForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("mamba2") / MODEL
    theirs.save_pretrained(folder)
    return theirs, folder


def test_a_mamba2_of_transformers_is_recorded_in_the_modes_that_any_model_has(mamba2, tmp_path):
    theirs, folder = mamba2
    command = [sys.executable, "-m", "layerscope", "record", str(folder), "--layers", "all", "-o", str(tmp_path / "r")]
    done = subprocess.run(
        [*command, "--mode", "fp32,bf16", "--prompt", "hello"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = []
    for layer in theirs.backbone.layers:
        layer.register_forward_hook(lambda _, __, out: seen.append(out))
    with torch.no_grad():
        theirs(torch.tensor([list(b"hello")]))
    for at, expected in enumerate(seen):
        name = f"backbone.layers.{at}"
        np.testing.assert_allclose(ls.open_run(tmp_path / "r" / "fp32").tensor(name), expected, rtol=1e-5, atol=1e-6)
        assert ls.open_run(tmp_path / "r" / "bf16").tensor(name).shape == expected.shape


def test_a_mamba2_has_none_of_quambas_modes_and_says_which_it_has(mamba2):
    ready = prepare(MODEL, pretrained_dir=str(mamba2[1].parent))
    assert ready.ran == f"{MODEL} runs with the weights in {mamba2[1]}"
    with pytest.raises(NoSuchMode, match=r"there is no mode '2-1' of Mamba2ForCausalLM.*fp32"):
        variant(ready.model, "2-1")
