"""The README stays true: its snippets run, in order, and its commands work."""

from __future__ import annotations

import re
import shlex
from copy import deepcopy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


SAYS = {
    "layerscope points tiny-transformer": "model.layers",
    "layerscope record tiny-transformer": "✓ complete",
    "layerscope show": "model.layers.7",
    "layerscope recover": "runs/tiny",
    "layerscope compare runs/tiny": "every value of 8 rows is equal",
    "layerscope report": "the report is run.html",
    "layerscope convert": "mode_fp32_layer_7.npy",
    "layerscope modes quamba-small": "2-1",
    "layerscope record quamba-small": "✓ 3 modes recorded",
    "layerscope compare layer_outputs/fp32": "SUMMARY TABLE",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_python_snippets_run_one_after_the_other(tmp_path, monkeypatch):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    world = {
        "model": LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50)),
        "inputs": {"input_ids": torch.arange(8)[None]},
    }
    world["port"] = deepcopy(world["model"])
    with torch.no_grad():
        world["port"].model.layers[1].mlp.up_proj.weight.mul_(1.05)
    snippets = blocks("python")
    assert len(snippets) >= 4
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), world)
    assert world["rec"].completeness.missing == []
    assert world["total"].count == 8 * 16
    assert world["result"].first_divergence.name == "model.layers.1.mlp.up_proj"
    assert world["finding"].root == "model.layers.1.mlp.up_proj"
    assert (tmp_path / "runs" / "fp32" / "run.json").exists()


def test_the_commands_work(tmp_path, monkeypatch, capsys):
    from layerscope.cli import main

    monkeypatch.chdir(tmp_path)
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("layerscope ")]
    assert len(commands) >= 5
    for command in commands:
        monkeypatch.setattr("sys.argv", shlex.split(command, comments=True))
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code in (0, None), command
        says = next(text for start, text in SAYS.items() if command.startswith(start))
        assert says in capsys.readouterr().out, command


def test_the_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"setup", "demo", "check", "fix", "test", "stress", "bench"} <= targets
    assert set(re.findall(r"^make (\w+)", "\n".join(blocks("bash")), re.MULTILINE)) <= targets
