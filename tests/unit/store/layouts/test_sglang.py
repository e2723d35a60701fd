"""A dump that SGLang's dumper made, read against what plain torch hooks saw of the same model.

Files of several ranks and of recomputation are written here by hand, from the dumper's source.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from layerscope.errors import Ambiguous, NoSuchPoint, NotARun
from layerscope.points import Moment, Point
from layerscope.store import open_run
from layerscope.store.address import folder
from layerscope.store.layouts import sglang
from layerscope.store.layouts.place import DumpPlace

GOLDEN = Path(__file__).parents[3] / "golden" / "peers" / "sglang"
DUMP = GOLDEN / "dump_tiny"
EXPECTED = load_file(GOLDEN / "expected.safetensors")

# By hand, in the order in which the model of `make_sglang.py` computes: point, call, step.
RECORDS = [
    (".:input[0]", 0, 0),
    ("layers.0:input[0]", 0, 0),
    ("layers.0:input[scale]", 0, 0),
    ("layers.0.output:input[0]", 0, 0),
    ("layers.0.output:output", 0, 0),
    ("layers.0:output[0]", 0, 0),
    ("layers.0:output[1]", 0, 0),
    ("layers.3.residual:output", 0, 0),
    ("layers.3.residual:output", 1, 0),
    (".:output", 0, 0),
    ("layers.3.residual:grad_output", 0, 0),
    ("logits:output", 0, 1),
]


def read(path, **rest):
    return sglang.recognise(DumpPlace(folder(path), **rest))


def written(path, name, value=1.0, *, step=0, rank=0, number=1, meta=None, recompute="disabled"):
    """Write one file as the dumper does."""
    path.mkdir(exist_ok=True)
    file = path / f"step={step}___rank={rank}___dump_index={number}___name={name}___recompute_status={recompute}.pt"
    value = torch.tensor([value]) if isinstance(value, float) else value
    torch.save({"value": value, "meta": meta or {}}, file)
    return file


@pytest.mark.parametrize(("name", "call", "step"), RECORDS)
def test_every_tensor_is_what_a_plain_hook_saw(name, call, step):
    run, expected = read(DUMP), EXPECTED[f"{name} call={call}"]
    tensor = run.tensor(name, call=call, step=step)
    assert tensor.dtype == expected.dtype
    assert torch.equal(tensor, expected)
    entry = next(run.records(name, call=call))
    assert (entry.shape, entry.nbytes) == (tuple(expected.shape), expected.numel() * expected.element_size())
    assert torch.equal(torch.cat(list(entry.pieces(3))), expected.reshape(-1))


def test_the_records_come_in_the_order_of_the_dump_and_there_are_no_others():
    run = read(DUMP)
    assert run.layout == "sglang"
    assert [(str(e.point), e.moment.call, e.moment.step) for e in run.records()] == RECORDS
    assert run.moments == [Moment(), Moment(call=1), Moment(step=1, batch=1)]
    assert run.missing == []


def test_the_notes_say_what_is_not_there():
    assert read(DUMP).notes == [
        "not read: 2 values that are no tensors, 1 parameters or their gradients",
        "gradients are those of the tensors, from all that used them, inside the module and outside",
    ]


def test_tags_and_dims_are_in_the_notes_of_the_records():
    run = read(DUMP)
    note = next(run.records("layers.3.residual")).note
    assert (note["layer_id"], note["dims"], note["world_size"]) == ("3", "s h", 1)
    assert next(run.records("logits")).note["phase"] == "decode"


def test_the_name_in_the_dump_is_an_alias():
    run = read(DUMP)
    assert torch.equal(
        run.tensor("non_intrusive__layers.0.output.inputs.0"), EXPECTED["layers.0.output:input[0] call=0"]
    )


def test_ranks_are_moments_and_are_not_joined(tmp_path):
    for rank in (0, 1):
        meta = {"dims": "b s h[tp]", "sglang_parallel_info": {"tp_rank": rank, "tp_size": 2}}
        written(tmp_path / "dump", "x", float(rank), rank=rank, meta=meta)
    run = read(tmp_path / "dump")
    assert [run.tensor("x", rank=rank).item() for rank in (0, 1)] == [0.0, 1.0]
    assert next(run.records("x", rank=1)).note["sglang_parallel_info"] == {"tp_rank": 1, "tp_size": 2}
    assert any("shards of one are not joined" in note for note in run.notes)


def test_what_was_computed_again_for_the_backward_is_left_out(tmp_path):
    written(tmp_path / "dump", "x", 1.0, recompute="original")
    written(tmp_path / "dump", "x", 2.0, number=2, recompute="recompute")
    run = read(tmp_path / "dump")
    assert run.tensor("x").item() == 1.0
    assert run.notes == ["not read: 1 tensors that were computed again for the backward"]


@pytest.mark.parametrize(
    ("name", "point"),
    [
        (
            "non_intrusive__model.layers.1.mlp.inputs.hidden_states",
            Point("model.layers.1.mlp", "input", ("hidden_states",)),
        ),
        ("non_intrusive__model.layers.1.mlp.inputs.0.1", Point("model.layers.1.mlp", "input", (0, 1))),
        ("non_intrusive__bert.output.output", Point("bert.output")),
        ("non_intrusive__bert.output.inputs.0", Point("bert.output", "input", (0,))),
        ("non_intrusive__output", Point("")),
        ("non_intrusive__inputs.input_ids", Point("", "input", ("input_ids",))),
        ("non_intrusive__module.fc.output", Point("fc")),
        ("grad__non_intrusive__fc.output", Point("fc", "grad_output")),
        ("grad__non_intrusive__fc.inputs.0", Point("fc", "grad_input", (0,))),
        ("a=b", Point("a=b")),
        ("a___b", Point("a___b")),
        ("what.ever[0]:x", Point("what.ever[0]:x")),
    ],
)
def test_a_name_gives_the_point_that_it_means(tmp_path, name, point):
    written(tmp_path / "dump", name)
    assert read(tmp_path / "dump").points == [point]


@pytest.mark.parametrize("key", ["curr_step", "forward_pass_id"])
def test_the_step_by_its_older_names_and_a_tensor_without_meta(tmp_path, key):
    torch.save(torch.tensor([2.5]), tmp_path / f"{key}=7___rank=0___dump_index=1___name=x.pt")
    run = read(tmp_path)
    assert run.tensor("x", step=7).item() == 2.5


def test_a_value_of_several_tensors_has_leaves(tmp_path):
    written(tmp_path / "dump", "x", {"k": torch.ones(1), "pair": (torch.ones(2), 3)})
    run = read(tmp_path / "dump")
    assert run.points == [Point("x", leaf=("k",)), Point("x", leaf=("pair", 0))]
    assert run.notes == ["not read: 1 values that are no tensors"]


def test_the_folder_of_one_dump_opens_it_and_that_of_two_asks_which(tmp_path):
    assert read(GOLDEN).address == str(DUMP)
    for name in ("dump_a", "dump_b"):
        shutil.copytree(DUMP, tmp_path / name)
    with pytest.raises(Ambiguous, match="dump_a, dump_b"):
        read(tmp_path)
    assert read(tmp_path, mode="dump_b").address == str(tmp_path / "dump_b")


def test_one_file_opens_alone():
    file = next(path.name for path in DUMP.iterdir() if "name=logits" in path.name)
    assert read(DUMP, file=file).points == [Point("logits")]


def test_a_file_that_cannot_be_read_is_missing_and_costs_no_other(tmp_path):
    file = written(tmp_path / "dump", "broken")
    file.write_bytes(file.read_bytes()[:100])
    written(tmp_path / "dump", "whole", number=2)
    run = read(tmp_path / "dump")
    assert run.points == [Point("whole")]
    assert any(file.name in note for note in run.notes)
    with pytest.raises(NoSuchPoint, match="broken:output is missing"):
        run.tensor("broken")


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_what_is_odd_in_meta_is_written_down_and_not_called(tmp_path, capsys):
    meta = {"dims": "b s", "odd": Evil(), "size": torch.Size([2]), "x": torch.ones(1), "deep": {"er": [1, None]}}
    written(tmp_path / "dump", "x", meta=meta)
    note = next(read(tmp_path / "dump").records("x")).note
    assert (note["dims"], note["deep"], note["size"]) == ("b s", {"er": [1, None]}, [2])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "name",
    [
        "x.pt",
        "a___b.pt",
        "layer_1_output.pt",
        "name=x.pt",
        "step=0___rank=0___name=x.pt",
        "step=a___rank=0___dump_index=1___name=x.pt",
        "step=0___rank=-1___dump_index=1___name=x.pt",
        "step=0___rank=0___dump_index=1___name=x.npy",
    ],
)
def test_other_files_are_not_claimed(tmp_path, name):
    torch.save({"value": torch.ones(1), "meta": {}}, tmp_path / name)
    assert read(tmp_path) is None
    assert read(tmp_path, file=name) is None


def test_other_folders_are_not_claimed(tmp_path):
    assert read(tmp_path) is None
    (tmp_path / "dump_x").mkdir()
    (tmp_path / "dump_x" / "x.pt").write_bytes(b"")
    assert read(tmp_path) is None


def test_open_run_finds_it_by_itself(tmp_path):
    for name in ("dump_a", "dump_b"):
        shutil.copytree(DUMP, tmp_path / name)
    assert open_run(DUMP).layout == open_run(GOLDEN).layout == "sglang"
    assert open_run(f"{tmp_path}:dump_b").address == str(tmp_path / "dump_b")
    with pytest.raises(NotARun, match="names no mode"):
        open_run(DUMP, mode="fp32")
