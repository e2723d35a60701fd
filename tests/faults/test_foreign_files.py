"""Other people's files, cut, changed or made to harm: one sentence, and nothing of theirs is executed."""

from __future__ import annotations

import json
import pickle
import random
import re
import shutil
import zipfile
from importlib import import_module

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from layerscope.errors import LayerscopeError, NotARun
from layerscope.store import open_run
from layerscope.store.address import folder
from layerscope.store.layouts import LAYOUTS, DumpPlace


class Trap:
    """Unpickled, it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def quamba(path):
    path.mkdir()
    np.save(path / "mode_0_layer_0.npy", np.arange(40.0))
    np.save(path / "mode_0_layer_1.npy", np.arange(40.0))
    (path / "mode_0_stats.json").write_text(json.dumps({"mode": "0", "model": "m"}))


def first_layer(path):
    path.mkdir()
    np.savez(path / "first_layer_io_all_modes.npz", mode_0_input=np.arange(9.0), mode_0_output=np.arange(9.0))


def packed(path):
    path.mkdir()
    np.savez_compressed(path / "first_layer_io_all_modes.npz", mode_0_input=np.arange(9.0), mode_0_output=np.ones(9))


def neuron(path):
    path.mkdir()
    for name in ("embedding", "layer_1", "layer_2"):
        torch.save(torch.arange(40.0), path / f"{name}_output.pt")
    torch.save({"layer_0": {"mean": 1.0}}, path / "statistics.pt")


def monitor(path):
    path.mkdir()
    said = {"epoch": 1, "layer": "attn", "alias": "a", "output_shape": [4]}
    for batch in range(2):
        torch.save({**said, "batch_idx": batch, "output": torch.arange(4.0)}, path / f"{batch}.pt")


def sglang(path):
    path.mkdir()
    for number in range(2):
        file = f"step=0___rank=0___dump_index={number}___name=x{number}___recompute_status=disabled.pt"
        torch.save({"value": torch.arange(4.0), "meta": {"dims": "s h"}}, path / file)


def msprobe(path):
    there = path / "step0" / "rank0" / "dump_tensor_data"
    there.mkdir(parents=True)
    data = {}
    for name in ("up", "down"):
        file = f"Module.{name}.Linear.forward.0.output.0.pt"
        said = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [40], "data_name": file}
        data[f"Module.{name}.Linear.forward.0"] = {"input_args": [], "input_kwargs": {}, "output": [said]}
        torch.save(torch.arange(40.0), there / file)
    dump = {"task": "tensor", "level": "L0", "data": data}
    (there.parent / "dump.json").write_text(json.dumps(dump))
    (there.parent / "stack.json").write_text("{}")


def huggingface(path):
    path.mkdir()
    children = []
    for name in ("Tiny.up", "Tiny.down"):
        file = f"{name}_outputs.safetensors"
        said = {"shape": "torch.Size([900])", "dtype": "torch.float32", "value": f"./{file}"}
        children.append({"module_path": name, "inputs": None, "outputs": said, "children": []})
        save_file({"data": torch.arange(900.0)}, path / file)
    tree = {"module_path": "Tiny", "inputs": None, "outputs": None, "children": children}
    (path / "Tiny_debug_tree_FULL_TENSORS.json").write_text(json.dumps(tree))


MADE = {
    "quamba": (quamba,),
    "first_layer": (first_layer, packed),
    "neuron": (neuron,),
    "monitor": (monitor,),
    "sglang": (sglang,),
    "msprobe": (msprobe,),
    "huggingface": (huggingface,),
}
each = pytest.mark.parametrize("make", [make for several in MADE.values() for make in several])


def everything(path):
    """Read all there is, as `show` would; return it by point and moment, and why the rest is not there."""
    run = open_run(path)
    found = {}
    for entry in run.records():
        if entry.dtype is not None:
            whole, pieces = entry.tensor(), list(entry.pieces(7))
            assert all(0 < len(piece) <= 7 for piece in pieces)
            assert [n for piece in pieces for n in map(str, piece.tolist())] == [*map(str, whole.reshape(-1).tolist())]
            found[entry.point, entry.moment] = whole.tolist()
    return found, [missing.reason for missing in run.missing]


def files_of(path):
    return sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())


def copied(path, to):
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(path, to)
    return to


def test_every_layout_is_here():
    assert set(MADE) == set(LAYOUTS)


@each
def test_a_whole_dump_reads_and_is_claimed_by_its_own_layout_alone(tmp_path, make):
    make(tmp_path / "dump")
    found, missing = everything(tmp_path / "dump")
    assert (len(found) >= 2, missing) == (True, [])
    place = DumpPlace(folder(tmp_path / "dump"))
    claimed = [name for name in LAYOUTS if import_module(f"layerscope.store.layouts.{name}").recognise(place)]
    assert [make in MADE[name] for name in claimed] == [True]
    for file in files_of(tmp_path / "dump"):
        (tmp_path / "dump" / file).unlink()
    with pytest.raises(NotARun, match="is not a run"):
        open_run(tmp_path / "dump")


@each
def test_a_file_cut_at_any_length_is_read_right_or_refused_in_one_sentence(tmp_path, make):
    make(tmp_path / "whole")
    right, _ = everything(tmp_path / "whole")
    rng = random.Random(0)
    refused = 0
    for file in files_of(tmp_path / "whole"):
        raw = (tmp_path / "whole" / file).read_bytes()
        for left in {0, 1, len(raw) - 1, *(rng.randrange(len(raw)) for _ in range(6))}:
            cut = copied(tmp_path / "whole", tmp_path / "cut")
            (cut / file).write_bytes(raw[:left])
            try:
                found, said = everything(cut)
            except LayerscopeError as error:
                found, said = {}, [str(error)]
            refused += bool(said)
            assert found.items() <= right.items()
            assert found == right or said
            assert all((file.name in why and "\n" not in why) or "not a run" in why for why in said)
    assert refused >= 8


@each
def test_changed_bytes_give_an_answer_or_a_refusal_and_no_other_error(tmp_path, make):
    make(tmp_path / "whole")
    rng = random.Random(0)
    files = files_of(tmp_path / "whole")
    outcomes = set()
    for _ in range(60):
        changed = copied(tmp_path / "whole", tmp_path / "changed") / rng.choice(files)
        raw = bytearray(changed.read_bytes())
        for _ in range(3):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        changed.write_bytes(raw)
        try:
            _, said = everything(tmp_path / "changed")
            outcomes.add("refused" if said else "read")
        except LayerscopeError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


def evil_msprobe(path, trap):
    path.rmdir()
    msprobe(path)
    for file in path.rglob("*.pt"):
        torch.save(trap, file)


def test_nothing_is_executed_from_any_file(tmp_path):
    mark = tmp_path / "created"
    trap = Trap(mark)
    objects = np.array([trap], object)
    said = {"epoch": 1, "batch_idx": 0, "layer": "a", "alias": "a", "output_shape": None, "output": trap}

    def plain(path):
        path.write_bytes(pickle.dumps(trap))

    dumps = {
        "npy": lambda p: np.save(p / "mode_0_layer_0.npy", objects, allow_pickle=True),
        "npz": lambda p: np.savez(p / "first_layer_io_all_modes.npz", mode_0_input=objects),
        "pt": lambda p: torch.save(trap, p / "layer_1_output.pt"),
        "old pt": lambda p: torch.save(trap, p / "layer_1_output.pt", _use_new_zipfile_serialization=False),
        "pickle": lambda p: plain(p / "layer_1_output.pt"),
        "pickle as npy": lambda p: plain(p / "mode_0_layer_0.npy"),
        "sglang": lambda p: torch.save({"value": trap}, p / "step=0___rank=0___dump_index=1___name=x.pt"),
        "msprobe": lambda p: evil_msprobe(p, trap),
        "item": lambda p: torch.save(said, p / "single_epoch_1_000.pt"),
    }
    for name, make in dumps.items():
        path = tmp_path / name
        path.mkdir()
        make(path)
        try:
            found, why = everything(path)
        except LayerscopeError as error:
            found, why = {}, [str(error)]
        assert found == {}
        assert re.search(r"unpickl|no \.npy array", "".join(why))
        assert "\n" not in "".join(why)
    assert not mark.exists()
    pickle.loads(pickle.dumps(trap)).close()
    assert mark.exists()  # the trap is a real one


def test_names_inside_an_archive_are_keys_and_never_paths(tmp_path):
    names = ("mode_../../evil_input", "mode_/etc/passwd_output")
    np.savez(tmp_path / "io.npz", **dict.fromkeys(names, np.ones(2)))
    before = sorted(tmp_path.rglob("*"))
    assert open_run(tmp_path / "io.npz", mode="../../evil").tensor("layers.0:input").tolist() == [1, 1]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_bomb_takes_no_more_than_it_says_and_what_it_says_is_checked(tmp_path):
    text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}"
    header = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    (tmp_path / "mode_0_layer_0.npy").write_bytes(header + bytes(100))
    with pytest.raises(LayerscopeError, match=r"truncated: .* takes 8000000000000 bytes, not 100"):
        open_run(tmp_path)
    with zipfile.ZipFile(tmp_path / "io.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("mode_0_input.npy", header + bytes(1 << 20))
    with pytest.raises(LayerscopeError, match=r"mode_0_input.*truncated"):
        open_run(tmp_path / "io.npz")
