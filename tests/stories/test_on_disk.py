"""A user records to disk, is killed, comes back, and finds everything that was acknowledged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors import safe_open

import layerscope as ls
import zoo
from asserts import assert_no_hooks_left, assert_same_bits


def record(to, *, make=zoo.plain, taps="*", steps=1, **options):
    model, (x,) = make()
    with ls.record(model, taps, to=to, **options) as rec:
        for step in range(steps):
            model(x + step)
    return model, x, rec


def test_what_is_read_back_is_what_the_layers_computed(tmp_path):
    model, x, rec = record(tmp_path / "run", steps=3)
    run = ls.open_run(tmp_path / "run")
    for step in range(3):
        assert_same_bits(run.tensor("0", step=step), model[0](x + step))
    assert_same_bits(rec.run.tensor("2", step=2), model(x + 2))
    assert run.complete
    assert run.state == "complete"
    assert run.summary("0", step=1).max == model[0](x + 1).max()


def test_it_can_be_read_while_it_is_recorded(tmp_path):
    model, (x,) = zoo.plain()
    with ls.record(model, "*", to=tmp_path / "run") as rec:
        model(x)
        assert_same_bits(rec["0"], model[0](x))
        rec.flush()
        assert ls.open_run(tmp_path / "run").state == "recording"


def test_a_stock_safetensors_reader_reads_it(tmp_path):
    model, x, _ = record(tmp_path / "run")
    with safe_open(tmp_path / "run" / "rank-00000" / "segment-00000.safetensors", "pt") as file:
        tensors = [file.get_tensor(key) for key in sorted(file.keys()) if key.isdecimal()]
        table = {key for key in file.keys() if key.startswith("table.")}  # noqa: SIM118  (it is no dict)
    assert_same_bits(tensors[0], model[0](x))
    assert len(tensors) == 3
    assert table >= {"table.step", "table.mean", "table.points"}


def test_a_run_that_is_there_is_not_overwritten_and_can_be_added_to(tmp_path):
    record(tmp_path / "run", steps=2)
    with pytest.raises(FileExistsError, match="append=True"):
        record(tmp_path / "run")
    record(tmp_path / "run", steps=2, append=True)
    assert [m.step for m in ls.open_run(tmp_path / "run").moments] == [0, 1, 2, 3]


def test_a_folder_that_is_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        record(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_address_of_fsspec_works_too():
    model, x, _ = record("memory://recorded/run", steps=2)
    assert_same_bits(ls.open_run("memory://recorded/run").tensor("2", step=1), model(x + 1))


def test_the_manifest_says_what_was_recorded(tmp_path):
    record(
        tmp_path / "run",
        taps={"first": "0", "rest": ["1", "2"]},
        options=ls.RecordOptions(name="tiny", mode="fp32"),
        make=zoo.plain,
    )
    manifest = ls.open_run(tmp_path / "run").manifest
    assert manifest.model == {
        "name": "tiny", "class": "torch.nn.modules.container.Sequential", "parameters": 4 * 8 + 8 + 8 * 3 + 3,
    }  # fmt: skip
    assert manifest.mode == "fp32"
    assert manifest.runtime == "eager"
    assert manifest.versions["torch"] == torch.__version__
    assert manifest.seed == 0
    assert manifest.aliases == {"first": ["0:output"], "rest": ["1:output", "2:output"]}
    strict = json.loads((tmp_path / "run" / "run.json").read_text(), parse_constant=pytest.fail)
    assert strict["completeness"]["forwards"] == 1


def test_fingerprints_tell_whose_weights_differ(tmp_path):
    weights = []
    for change in (None, "0.weight", "2.bias"):
        model, (x,) = zoo.plain()
        if change is not None:
            dict(model.named_parameters())[change].data.flatten()[-1] += 1e-3
        with ls.record(model, "0", to=tmp_path / str(change)):
            model(x)
        weights.append(ls.open_run(tmp_path / str(change)).manifest.weights)
    assert set(weights[0]) == {"0", "2"}
    assert [name for name in weights[0] if weights[0][name] != weights[1][name]] == ["0"]
    assert [name for name in weights[0] if weights[0][name] != weights[2][name]] == ["2"]


def test_an_exception_seals_the_run_and_goes_on(tmp_path):
    model, (x,) = zoo.plain()
    last = zoo.Holder(lambda m, x: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), ls.record(model, "*", to=tmp_path / "run"):
        last(model(x))
    run = ls.open_run(tmp_path / "run")
    assert_same_bits(run.tensor("2"), model(x))
    assert not list((tmp_path / "run").rglob("*.partial"))
    assert_no_hooks_left(model)


KILLED = """
import sys, torch, layerscope as ls
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
with ls.record(model, "*", to=sys.argv[1]) as rec:
    for step in range(10**6):
        with torch.no_grad():
            model(torch.full((32, 64), float(step)))
        rec.flush()
        print(step, flush=True)
"""


def test_kill_nine_in_the_middle_loses_nothing_that_was_acknowledged(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), tmp_path / "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) >= 40:
                child.kill()
                break
        rest = child.stdout.read().split()
    acknowledged = int(rest[-1]) if rest else int(line)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))

    def check(run):
        with torch.no_grad():
            for step in range(acknowledged + 1):
                x = torch.full((32, 64), float(step))
                for name in ("0", "1", "2"):
                    x = model[int(name)](x)
                    assert_same_bits(run.tensor(name, step=step), x)

    check(ls.open_run(tmp_path / "run"))
    first = ls.recover(tmp_path / "run")
    check(ls.open_run(tmp_path / "run"))
    assert not list((tmp_path / "run").rglob("*.partial"))
    again = ls.recover(tmp_path / "run")
    assert first.sealed
    assert not again.sealed


def test_a_forked_child_neither_writes_nor_hangs(tmp_path):
    import multiprocessing

    model, (x,) = zoo.plain()
    with ls.record(model, "*", to=tmp_path / "run") as rec:
        process = multiprocessing.get_context("fork").Process(target=lambda: model(x + 100))
        process.start()
        process.join(20)
        assert process.exitcode == 0
        model(x)
    assert_same_bits(rec["2"], model(x))


def test_every_side_of_every_layer_of_a_llama_reads_back(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40))
    ids = torch.arange(1, 9)[None]
    with ls.record(model, "**:*", to=tmp_path / "run") as rec, ls.record(model, "**:*") as kept:
        model(input_ids=ids, labels=ids).loss.backward()
    assert {p.side for p in rec.run.points} == {"input", "output", "grad_input", "grad_output"}
    disk, memory = rec.run, kept.run
    assert [str(p) for p in disk.points] == [str(p) for p in memory.points]
    for entry in disk.records():
        moment = {"step": entry.moment.step, "call": entry.moment.call}
        assert_same_bits(disk.tensor(str(entry.point), **moment), memory.tensor(str(entry.point), **moment))
    reasons = {m.reason for m in rec.completeness.missing}
    assert all("no gradient" in reason or "holds no tensor" in reason for reason in reasons)
