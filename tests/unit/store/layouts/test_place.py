"""Which dump and which mode of it an address means."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from layerscope.errors import Ambiguous, NotARun
from layerscope.store import Manifest, open_run
from layerscope.store.address import folder
from layerscope.store.layouts import LAYOUTS, DumpPlace


def dump(path, *modes):
    path.mkdir(parents=True, exist_ok=True)
    for number, mode in enumerate(modes):
        np.save(path / f"mode_{mode}_layer_0.npy", np.full(3, float(number), np.float32))
    return path


def test_one_mode_needs_no_saying(tmp_path):
    run = open_run(dump(tmp_path / "lo", "2-1"))
    assert run.manifest.mode == "2-1"
    assert (run.layout, run.state, run.complete) == ("quamba", "unknown", False)


def test_a_mode_is_said_behind_a_colon_or_by_word(tmp_path, monkeypatch):
    dump(tmp_path / "lo", "fp32", "2-1")
    monkeypatch.chdir(tmp_path)
    for run in (open_run("lo:2-1"), open_run("lo", mode="2-1"), open_run("lo:2-1", mode="2-1"), open_run("lo/:2-1")):
        assert run.manifest.mode == "2-1"
        assert run.tensor("layers.0").tolist() == [1, 1, 1]


def test_a_folder_whose_own_name_has_a_colon_is_meant_by_it(tmp_path):
    dump(tmp_path / "lo", "fp32", "2-1")
    dump(tmp_path / "lo:2-1", "x", "2-1")
    assert open_run(f"{tmp_path}/lo:2-1", mode="x").tensor("layers.0").tolist() == [0, 0, 0]
    assert open_run(f"{tmp_path}/lo:2-1:2-1").manifest.mode == "2-1"
    with pytest.raises(Ambiguous, match="holds 2 modes: 2-1, x"):
        open_run(f"{tmp_path}/lo:2-1")


def test_several_modes_and_none_said_lists_them(tmp_path):
    with pytest.raises(Ambiguous) as told:
        open_run(dump(tmp_path / "lo", "fp32", "0", "2-1"))
    at = tmp_path / "lo"
    assert str(told.value) == f"{at} holds 3 modes: 0, 2-1, fp32; choose one, as {at}:0 or mode='0'"


def test_a_mode_that_is_not_there_lists_those_that_are(tmp_path):
    dump(tmp_path / "lo", "fp32", "0")
    with pytest.raises(NotARun) as told:
        open_run(f"{tmp_path}/lo:2-1")
    assert str(told.value) == f"{tmp_path}/lo has no mode '2-1'; it has 0, fp32"


def test_two_modes_for_one_address_are_refused(tmp_path):
    dump(tmp_path / "lo", "fp32", "0")
    with pytest.raises(NotARun, match="asks for mode 'fp32', and mode='0' for another"):
        open_run(f"{tmp_path}/lo:fp32", mode="0")


def test_a_run_of_our_own_is_checked_against_the_mode(tmp_path, write):
    write(tmp_path / "run", [], manifest=Manifest(mode="bf16")).close()
    assert open_run(tmp_path / "run", mode="bf16").manifest.mode == "bf16"
    with pytest.raises(NotARun, match="has no mode 'fp32': that is mode bf16"):
        open_run(f"{tmp_path}/run:fp32")


def test_a_layout_without_modes_says_so(tmp_path):
    torch.save(torch.ones(2), tmp_path / "layer_1_output.pt")
    with pytest.raises(NotARun, match="has no mode 'fp32': a neuron run that names no mode"):
        open_run(tmp_path, mode="fp32")


@pytest.mark.parametrize("address", ["nothing", "nothing:2-1", "empty", "file.txt", "file.txt:2-1"])
def test_what_is_no_dump_says_what_is_there_and_which_layouts_are_known(tmp_path, address):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("text")
    with pytest.raises(NotARun, match=r"is not a run: .*quamba, first-layer, neuron") as told:
        open_run(f"{tmp_path}/{address}")
    assert "\n" not in str(told.value)


def test_a_dump_elsewhere_is_read_too(tmp_path):
    dump(tmp_path, "2-1", "0")
    np.savez(tmp_path / "io.npz", mode_0_input=np.zeros(2), mode_0_output=np.ones(2))
    torch.save(torch.arange(3.0), tmp_path / "layer_1_output.pt")
    numbered, archive, neuron = (folder(f"memory://dumps/{name}") for name in ("lo", "io", "nn"))
    for name in ("mode_2-1_layer_0.npy", "mode_0_layer_0.npy"):
        numbered.put(name, (tmp_path / name).read_bytes())
    archive.put("io.npz", (tmp_path / "io.npz").read_bytes())
    neuron.put("layer_1_output.pt", (tmp_path / "layer_1_output.pt").read_bytes())
    assert open_run("memory://dumps/lo:0").tensor("layers.0").tolist() == [1, 1, 1]
    assert open_run("memory://dumps/io/io.npz").tensor("layers.0").tolist() == [1, 1]
    assert open_run("memory://dumps/nn").tensor("layers.0").tolist() == [0, 1, 2]


def test_a_dump_travels_by_its_address_and_mode(tmp_path):
    run = open_run(dump(tmp_path / "lo", "fp32", "2-1"), mode="2-1")
    again = pickle.loads(pickle.dumps(run))
    assert (again.address, again.manifest.mode) == (run.address, "2-1")


def test_every_layout_is_there_under_its_name():
    from importlib import import_module

    assert all(callable(import_module(f"layerscope.store.layouts.{name}").recognise) for name in LAYOUTS)


def test_a_place_says_what_was_named(tmp_path):
    whole, one = DumpPlace(folder(tmp_path)), DumpPlace(folder(tmp_path), "a.npz")
    (tmp_path / "a.npz").write_bytes(b"")
    assert (whole.address, whole.names) == (str(tmp_path), ["a.npz"])
    assert (one.address, one.names) == (f"{tmp_path}/a.npz", [])


def test_torch_is_imported_to_open_a_pt_and_for_nothing_else(tmp_path, write):
    write(tmp_path / "ours", [], manifest=Manifest()).close()
    dump(tmp_path / "arrays", "2-1")
    (tmp_path / "neuron").mkdir()
    torch.save(torch.ones(2), tmp_path / "neuron" / "layer_1_output.pt")
    code = (
        "import sys; from layerscope import open_run;"
        "[print(open_run(f'{sys.argv[1]}/{n}').layout, 'torch' in sys.modules) for n in ('ours', 'arrays', 'neuron')]"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["layerscope False", "quamba False", "neuron True"]
