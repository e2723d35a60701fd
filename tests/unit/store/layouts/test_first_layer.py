"""First-layer input and output in one `.npz` that numpy wrote."""

import json

import numpy as np
import pytest

from layerscope.errors import Ambiguous, NotARun
from layerscope.points import Point
from layerscope.store import open_run


@pytest.fixture(params=[np.savez, np.savez_compressed])
def dump(request, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"mode_{m}_{s}": rng.standard_normal((1, 4, 6)) for m in ("fp32", "2-1") for s in ("input", "output")}
    path = tmp_path / "first_layer_io_all_modes.npz"
    request.param(path, **arrays)
    said = {"timestamp": "2025-01-10 16:00:00", "model": "quamba-130m", "seq_len": 4, "modes": {"2-1": {"input": {}}}}
    (tmp_path / "first_layer_io_all_modes_stats.json").write_text(json.dumps(said))
    return path


def test_input_and_output_of_the_first_layer_are_two_points(dump):
    run = open_run(f"{dump}:2-1")
    assert run.points == [Point("layers.0", "input"), Point("layers.0", "output")]
    wanted = np.load(dump)
    for name, key in {"layers.0:input": "input", "layers.0": "output", "mode_2-1_output": "output"}.items():
        np.testing.assert_array_equal(run.tensor(name).numpy(), wanted[f"mode_2-1_{key}"])
    (entry,) = run.records("layers.0:input")
    pieces = np.concatenate([piece.numpy() for piece in entry.pieces(5)])
    np.testing.assert_array_equal(pieces, wanted["mode_2-1_input"].reshape(-1))


def test_the_folder_that_holds_it_is_the_same_dump(dump):
    assert open_run(dump.parent, mode="fp32").layout == "first-layer"
    with pytest.raises(Ambiguous, match="holds 2 modes: fp32, 2-1"):
        open_run(dump)
    with pytest.raises(NotARun, match="has no mode '9'; it has fp32, 2-1"):
        open_run(dump, mode="9")


def test_what_lies_beside_it_is_said_of_it(dump):
    run = open_run(dump, mode="2-1")
    assert (run.manifest.model, run.manifest.settings) == (
        {"name": "quamba-130m"},
        {"seq_len": 4, "quantised": "mode 2-1"},
    )
    assert open_run(dump, mode="fp32").manifest.settings == {"seq_len": 4}
    assert run.manifest.started == "2025-01-10 16:00:00"
    assert run.notes == []
    assert open_run(dump, mode="fp32").notes == ["first_layer_io_all_modes_stats.json says nothing of mode fp32"]


def test_what_is_odd_is_noted(tmp_path):
    np.savez(tmp_path / "io.npz", mode_0_output=np.ones(2), labels=np.ones(2))
    assert open_run(tmp_path / "io.npz").notes == [
        "there is no input of mode 0",
        "1 other arrays are passed over, 'labels' first",
        "io_stats.json is not there: model and settings are unknown",
    ]


def test_other_keys_are_refused_with_what_was_found(tmp_path):
    np.savez(tmp_path / "io.npz", **{f"k{n}": np.ones(1) for n in range(7)})
    with pytest.raises(NotARun, match=r"expected, and it holds 'k0', 'k1', 'k2', 'k3', 'k4' and 2 more"):
        open_run(tmp_path / "io.npz")
    np.savez(tmp_path / "io.npz")
    with pytest.raises(NotARun, match="it holds nothing"):
        open_run(tmp_path / "io.npz")


def test_pickled_objects_of_another_mode_do_not_stand_in_the_way(tmp_path):
    np.savez(tmp_path / "io.npz", mode_0_output=np.ones(2), mode_1_output=np.array([{}], object))
    assert open_run(f"{tmp_path}/io.npz:0").tensor("layers.0").tolist() == [1, 1]
    with pytest.raises(TypeError, match="pickled Python objects, and nothing is ever unpickled"):
        open_run(f"{tmp_path}/io.npz:1")
