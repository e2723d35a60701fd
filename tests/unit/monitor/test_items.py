"""What is handed out and saved: fresh copies, numbered files."""

import copy
import json

import numpy as np
import pytest
import torch

from layerscope.errors import Unsupported
from layerscope.monitor.captures import CapturedOutput, Held
from layerscope.monitor.items import Outputs, next_number, own_path, write_custom, write_item
from layerscope.points import Moment, Point


def held(tensor) -> Held:
    return Held(Point("a"), Moment(), tensor.dtype, tuple(tensor.shape), tensor.nbytes, lambda: tensor)


def fetch(one: Held) -> torch.Tensor:
    return one.copy().clone()


def captures(*trees) -> list[CapturedOutput]:
    return [CapturedOutput(1, n, Moment(1, n, n), tree) for n, tree in enumerate(trees)]


def test_outputs_are_a_mapping_whose_every_access_is_a_copy():
    data = Outputs(captures((held(torch.ones(2)), None), (held(torch.zeros(3)), None)), fetch)
    assert list(data) == [(1, 0), (1, 1)]
    assert len(data) == 2
    assert (1, 5) not in data
    data[1, 0][0].zero_()
    assert data[1, 0][0].tolist() == [1, 1]
    assert data[1, 0][1] is None
    assert repr(data) == "Outputs((1, 0), (1, 1))"


def test_outputs_are_copied_and_saved_as_a_dict(tmp_path):
    data = Outputs(captures(held(torch.ones(2)), held(torch.zeros(3))), fetch)
    torch.save({"a": data}, tmp_path / "x.pt")
    for again in (copy.deepcopy(data), torch.load(tmp_path / "x.pt", weights_only=True)["a"]):
        assert isinstance(again, dict)
        assert {key: value.tolist() for key, value in again.items()} == {(1, 0): [1, 1], (1, 1): [0, 0, 0]}


def test_numbers_go_on_behind_what_is_there(tmp_path):
    assert next_number(tmp_path / "missing", "epoch_1") == 0
    for name in ("epoch_1_003.pt", "epoch_1_007.npy", "epoch_11_900.pt", "single_epoch_1_100.pt", "epoch_1_x.pt"):
        (tmp_path / name).touch()
    assert next_number(tmp_path, "epoch_1") == 8
    assert next_number(tmp_path, "single_epoch_1") == 101


def test_an_item_as_numpy_has_its_words_beside_it(tmp_path):
    item = {
        "epoch": 1,
        "alias": "a",
        "output_shape": {3: [2]},
        "output": {3: torch.ones(2).bfloat16()},
        "nan": float("nan"),
    }
    assert write_item(tmp_path, "x", item, format="npy") == tmp_path / "x.npz"
    with np.load(tmp_path / "x.npz", allow_pickle=False) as arrays:
        assert arrays["3"].tolist() == [1, 1]
    about = json.loads((tmp_path / "x.json").read_text())
    assert (about["dtype"], about["file"], about["nan"], about["output_shape"]) == (
        {"3": "bfloat16"},
        "x.npz",
        "NaN",
        {"3": [2]},
    )


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        write_item(tmp_path, "x", {"output": torch.ones(1)}, format="pt")
    assert list(tmp_path.iterdir()) == []


def test_own_names_stay_in_the_folder(tmp_path):
    assert own_path(tmp_path, "a/b.pt", taken=tmp_path / "run") == tmp_path / "a" / "b.pt"
    for name in ("..", "../x", "/x", "", "a/../..", "run", "run/journal"):
        with pytest.raises(ValueError, match="name"):
            own_path(tmp_path, name, taken=tmp_path / "run")


def test_an_array_file_holds_one_array(tmp_path):
    write_custom(tmp_path / "a.npy", torch.arange(3))
    assert np.load(tmp_path / "a.npy").tolist() == [0, 1, 2]
    with pytest.raises(Unsupported, match="holds one array"):
        write_custom(tmp_path / "b.npy", [1, 2])
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]
