"""Other people's files, cut, changed or made to harm: one sentence, and nothing of theirs is executed."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import zipfile

import numpy as np
import pytest
import torch

from layerscope.errors import LayerscopeError
from layerscope.store import open_run


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


LAYOUTS = (quamba, first_layer, packed, neuron, monitor)


def everything(path):
    """Read all there is, as `show` would."""
    run = open_run(path)
    return [tensor for entry in run.records() for tensor in (entry.tensor(), *entry.pieces(7))]


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_whole_dump_reads(tmp_path, make):
    make(tmp_path / "dump")
    assert len(everything(tmp_path / "dump")) >= 2


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_file_cut_at_any_length_is_read_right_or_refused_in_one_sentence(tmp_path, make):
    make(tmp_path / "whole")
    right = [tensor.tolist() for tensor in everything(tmp_path / "whole")]
    rng = random.Random(0)
    refused = 0
    for name in sorted(p.name for p in (tmp_path / "whole").iterdir()):
        raw = (tmp_path / "whole" / name).read_bytes()
        for left in {0, 1, len(raw) - 1, *(rng.randrange(len(raw)) for _ in range(6))}:
            shutil.rmtree(tmp_path / "cut", ignore_errors=True)
            shutil.copytree(tmp_path / "whole", tmp_path / "cut")
            (tmp_path / "cut" / name).write_bytes(raw[:left])
            try:
                found = [tensor.tolist() for tensor in everything(tmp_path / "cut")]
            except LayerscopeError as error:
                said = str(error)
                found = None
                refused += 1
            assert found in (None, right)
            assert found is not None or (name in said and "\n" not in said) or "not a run" in said
    assert refused >= 8


@pytest.mark.parametrize("make", LAYOUTS)
def test_changed_bytes_give_an_answer_or_a_refusal_and_no_other_error(tmp_path, make):
    make(tmp_path / "whole")
    rng = random.Random(0)
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    outcomes = set()
    for _ in range(60):
        shutil.rmtree(tmp_path / "changed", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "changed")
        path = tmp_path / "changed" / rng.choice(names)
        raw = bytearray(path.read_bytes())
        for _ in range(3):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        path.write_bytes(raw)
        try:
            everything(tmp_path / "changed")
            outcomes.add("read")
        except LayerscopeError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


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
        "item": lambda p: torch.save(said, p / "single_epoch_1_000.pt"),
    }
    for name, make in dumps.items():
        path = tmp_path / name
        path.mkdir()
        make(path)
        with pytest.raises(LayerscopeError, match=r"unpickl|no \.npy array") as told:
            everything(path)
        assert "\n" not in str(told.value)
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
