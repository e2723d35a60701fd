"""Dumps that msprobe made, read against what plain torch hooks saw of the same model."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from layerscope.errors import Damaged, NoSuchPoint
from layerscope.points import Moment, Point
from layerscope.store import open_run
from layerscope.store.address import folder
from layerscope.store.layouts import msprobe
from layerscope.store.layouts.place import DumpPlace

GOLDEN = Path(__file__).parents[3] / "golden" / "peers" / "msprobe"
EXPECTED = load_file(GOLDEN / "expected.safetensors")

# The points of the model in `make_msprobe.py` by hand: those that every call of a module has.
CALLS = {
    "embed": (1, ["input[0]", "output", "grad_output"]),
    "block": (
        2,
        ["input[0]", "input[scale]", "output[0]", "output[1][half]", "grad_output[0]", "grad_input[0]"],
    ),
    "block.up": (2, ["input[0]", "output", "grad_output", "grad_input[0]"]),
    "head": (1, ["input[0]", "output", "grad_output", "grad_input[0]"]),
}
POINTS = [f"{name}:{rest}" for name, (_, sides) in CALLS.items() for rest in sides]
RECORDS = [(f"{name}:{rest}", n) for name, (calls, sides) in CALLS.items() for rest in sides for n in range(calls)]


def read(path, file=None):
    return msprobe.recognise(DumpPlace(folder(path), file))


def dump_folder(path):
    return next(path.glob("step0/proc*"))


@pytest.fixture
def copied(tmp_path):
    shutil.copytree(GOLDEN / "tensor", tmp_path / "dump")
    return tmp_path / "dump"


def rewrite(path, change):
    file = dump_folder(path) / "dump.json"
    dump = json.loads(file.read_text())
    change(dump)
    file.write_text(json.dumps(dump))


@pytest.mark.parametrize(("name", "call"), RECORDS)
def test_every_tensor_is_what_a_plain_hook_saw(name, call):
    run = read(GOLDEN / "tensor")
    expected = EXPECTED[f"{name} call={call}"]
    tensor = run.tensor(name, call=call)
    assert tensor.dtype == expected.dtype
    assert torch.equal(tensor, expected)
    entry = next(run.records(name, call=call))
    assert (entry.dtype, entry.shape) == (str(expected.dtype)[6:], tuple(expected.shape))
    assert entry.nbytes == expected.numel() * expected.element_size()
    assert torch.equal(torch.cat(list(entry.pieces(5))), expected.reshape(-1))


def test_the_points_are_those_of_the_model_and_no_others():
    run = read(GOLDEN / "tensor")
    assert run.layout == "msprobe"
    assert sorted(map(str, run.points)) == sorted(POINTS)
    assert len(run) == len(RECORDS)
    assert run.moments == [Moment(), Moment(call=1)]
    assert run.replaced == 0
    assert next(run.records("block.up", call=1)).note["class"] == "Linear"


def test_the_records_come_in_the_order_of_the_run():
    forward = [str(p) for p in read(GOLDEN / "tensor").points if p.side in ("input", "output")]
    assert [name for name in forward if name.endswith("output") or "[0]" in name] == [
        *(
            "embed:input[0]",
            "embed:output",
            "block.up:input[0]",
            "block.up:output",
            "block:input[0]",
            "block:output[0]",
        ),
        *("head:input[0]", "head:output"),
    ]


def test_parameters_are_not_points_and_the_notes_say_so():
    assert read(GOLDEN / "tensor").notes == ["not read: 6 parameters, 4 gradients of parameters"]


@pytest.mark.parametrize("below", [".", "step0", "rank"])
def test_the_dump_its_step_and_its_rank_open_alike(below):
    path = dump_folder(GOLDEN / "tensor") if below == "rank" else GOLDEN / "tensor" / below
    assert len(read(path)) == len(RECORDS)


def test_the_file_itself_opens_too():
    rank = dump_folder(GOLDEN / "tensor")
    assert torch.equal(read(rank, "dump.json").tensor("head"), EXPECTED["head:output call=0"])
    assert read(rank, "construct.json") is None


def test_steps_and_ranks_are_moments(tmp_path):
    source = dump_folder(GOLDEN / "tensor")
    for step in (3, 12):
        for rank in (0, 1):
            shutil.copytree(source, tmp_path / f"step{step}" / f"rank{rank}")
    run = read(tmp_path)
    assert {(m.step, m.rank) for m in run.moments} == {(3, 0), (3, 1), (12, 0), (12, 1)}
    assert torch.equal(run.tensor("embed", step=12, rank=1), EXPECTED["embed:output call=0"])
    assert {(m.step, m.rank) for m in read(tmp_path / "step12").moments} == {(12, 0), (12, 1)}
    assert {(m.step, m.rank) for m in read(tmp_path / "step12" / "rank1").moments} == {(12, 1)}


def test_processes_without_a_rank_are_counted(copied):
    shutil.copytree(dump_folder(copied), copied / "step0" / "proc99999999")
    run = read(copied)
    assert {m.rank for m in run.moments} == {0, 1}
    assert any("proc99999999" in note for note in run.notes)


def test_the_calls_of_an_operation_are_points_of_an_operation():
    run = read(GOLDEN / "operations")
    sides = [Point("Torch.softmax", side, leaf, op=True) for side, leaf in (("input", (0,)), ("output", ()))]
    grads = [Point("Torch.softmax", side, leaf, op=True) for side, leaf in (("grad_output", ()), ("grad_input", (0,)))]
    assert run.points == [*sides, *grads]
    for call in (0, 1):
        given = EXPECTED[f"block.up:output call={call}"]
        assert torch.equal(run.tensor("op:Torch.softmax:input", call=call), given)
        assert torch.equal(run.tensor("op:Torch.softmax", call=call), torch.softmax(given, -1))
        through = EXPECTED[f"block.up:grad_output call={call}"]
        assert torch.equal(run.tensor("op:Torch.softmax:grad_input", call=call), through)


def test_statistics_alone_are_notes_and_no_summary():
    run = read(GOLDEN / "statistics")
    assert sorted(map(str, run.points)) == sorted(POINTS)
    for name, call in RECORDS:
        entry, expected = next(run.records(name, call=call)), EXPECTED[f"{name} call={call}"]
        assert (entry.dtype, entry.shape, entry.nbytes, entry.summary) == (None, None, 0, None)
        assert (entry.note["dtype"], entry.note["shape"]) == (str(expected.dtype)[6:], list(expected.shape))
        assert math.isclose(entry.note["Max"], expected.max().item(), rel_tol=1e-6)
    with pytest.raises(NoSuchPoint, match="no tensor"):
        run.tensor("head")
    assert any(f"{len(RECORDS)} tensors were not kept" in note for note in run.notes)


def test_numbers_that_json_has_no_word_for_are_read(copied):
    rewrite(copied, lambda dump: dump["data"]["Module.head.Linear.forward.0"]["output"][0].update(Max=math.inf))
    assert "Infinity" in (dump_folder(copied) / "dump.json").read_text()
    assert next(read(copied).records("head")).note["Max"] == math.inf


def test_the_wrappers_of_a_parallel_model_are_not_in_the_names(copied):
    def wrap(dump):
        dump["data"] = {name.replace("Module.", "Module.module."): entry for name, entry in dump["data"].items()}

    rewrite(copied, wrap)
    assert sorted(map(str, read(copied).points)) == sorted(POINTS)


def test_a_killed_run_is_read_by_the_names_of_its_files(copied):
    rewrite(copied, lambda dump: dump.update(data={}))  # what msprobe leaves when it never stops
    (dump_folder(copied) / "dump_tensor_data" / "Module.head.Linear.backward.0.output.0.pt").write_bytes(b"PK\3\4")
    run = read(copied)
    whole = [record for record in RECORDS if record[0] != "head:grad_input[0]"]
    assert sorted((str(e.point), e.moment.call) for e in run.records()) == sorted(whole)
    for name, call in whole:
        assert torch.equal(run.tensor(name, call=call), EXPECTED[f"{name} call={call}"])
    assert [m.point for m in run.missing] == ["head:grad_input[0]"]
    assert any(f"{len(whole)} tensors are read by the names of their files" in note for note in run.notes)


def test_a_run_that_was_killed_between_two_writings_of_the_list_is_read_whole(copied):
    def shorten(dump):
        dump["data"] = dict(list(dump["data"].items())[:4])

    rewrite(copied, shorten)
    run = read(copied)
    assert [str(p) for p in run.points][:2] == ["embed:input[0]", "embed:output"]
    assert sorted((str(e.point), e.moment.call) for e in run.records()) == sorted(RECORDS)
    assert all(torch.equal(run.tensor(name, call=n), EXPECTED[f"{name} call={n}"]) for name, n in RECORDS)
    assert any("does not list everything" in note for note in run.notes)


def test_a_step_without_anything_is_said_to_be_so(copied):
    empty = copied / "step1" / dump_folder(copied).name
    empty.mkdir(parents=True)
    (empty / "dump.json").write_text('{"task": "tensor", "level": "L0", "data": {}}')
    run = read(copied)
    assert len(run) == len(RECORDS)
    assert any("step1" in note and "lists nothing" in note for note in run.notes)
    shutil.rmtree(copied / "step0")
    with pytest.raises(Damaged, match="lists nothing"):
        read(copied)


def test_a_tensor_that_is_gone_is_missing_and_costs_no_other(copied):
    (dump_folder(copied) / "dump_tensor_data" / "Module.head.Linear.forward.0.output.0.pt").unlink()
    run = read(copied)
    assert [m.point for m in run.missing] == ["head:output"]
    assert next(run.records("head")).dtype is None
    assert torch.equal(run.tensor("head:input"), EXPECTED["head:input[0] call=0"])


@pytest.mark.parametrize("name", ["../../outside.pt", "/etc/passwd", "..", ""])
def test_a_name_that_leads_elsewhere_is_no_file_of_the_dump(copied, name):
    torch.save(torch.ones(1, 3, 7), copied / "step0" / "outside.pt")
    rewrite(copied, lambda dump: dump["data"]["Module.head.Linear.forward.0"]["output"][0].update(data_name=name))
    run = read(copied)
    assert [m.point for m in run.missing] == ["head:output"]


def test_a_tensor_that_is_not_what_was_said_is_damaged(copied):
    file = dump_folder(copied) / "dump_tensor_data" / "Module.head.Linear.forward.0.output.0.pt"
    torch.save(torch.ones(2, 2), file)
    with pytest.raises(Damaged, match=r"holds float32 of shape \[2, 2\], and dump.json speaks of"):
        read(copied).tensor("head")


@pytest.mark.parametrize("length", [0, 100, 5000])
def test_a_truncated_list_is_refused_where_there_is_nothing_else(tmp_path, length):
    shutil.copytree(GOLDEN / "statistics", tmp_path / "dump")
    file = dump_folder(tmp_path / "dump") / "dump.json"
    (file.parent / "stack.json").write_text("{}")
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(Damaged, match=r"dump\.json is not whole"):
        read(tmp_path / "dump")


def test_a_step_that_was_cut_short_does_not_hide_the_others(copied):
    shutil.copytree(copied / "step0", copied / "step1")
    file = next(copied.glob("step1/proc*")) / "dump.json"
    file.write_bytes(file.read_bytes()[:2000])
    shutil.rmtree(file.parent / "dump_tensor_data")
    run = read(copied)
    assert len(run) == len(RECORDS)
    assert any("step1" in note and "not whole" in note for note in run.notes)


@pytest.mark.parametrize("text", ["[1, 2]", '{"data": {}}', "", "no json", '{"tasks": 1, "levels": 2}'])
def test_a_dump_json_of_somebody_else_is_not_claimed(tmp_path, text):
    (tmp_path / "dump.json").write_text(text)
    assert read(tmp_path) is None
    (tmp_path / "step0" / "rank0").mkdir(parents=True)
    (tmp_path / "dump.json").rename(tmp_path / "step0" / "rank0" / "dump.json")
    assert read(tmp_path) is None


@pytest.mark.parametrize("name", ["", "step0", "step0/rank0", "rank0"])
def test_an_empty_folder_is_not_claimed(tmp_path, name):
    (tmp_path / name).mkdir(parents=True, exist_ok=True)
    assert read(tmp_path) is None


@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        {"output": 3},
        {"parameters": 3},
        {"output": [{"type": "torch.Tensor"}]},
        {"output": [{"type": 1, "dtype": {}}]},
        {"output": [{"type": "torch.Tensor", "dtype": "torch.float32", "shape": [-1]}]},
    ],
)
def test_an_entry_that_makes_no_sense_is_passed_over(tmp_path, entry):
    shutil.copytree(GOLDEN / "statistics", tmp_path / "dump")
    rewrite(
        tmp_path / "dump", lambda dump: dump["data"].update({"Module.head.Linear.forward.0": entry, "": {}, "x": 3})
    )
    points = list(map(str, read(tmp_path / "dump").points))
    assert "embed:output" in points
    assert "head:output" not in points


def test_open_run_finds_it_by_itself():
    run = open_run(dump_folder(GOLDEN / "tensor") / "dump.json")
    assert (run.layout, len(run)) == ("msprobe", len(RECORDS))
    assert len(pickle.loads(pickle.dumps(run))) == len(RECORDS)
