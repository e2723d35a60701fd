"""What is handed out and saved: fresh copies, joined epochs, numbered files."""

import json

import numpy as np
import pytest
import torch

from layerscope.errors import Unsupported
from layerscope.monitor.captures import Capture, Held
from layerscope.monitor.items import Outputs, joined, next_number, own_path, statistics, write_custom, write_item
from layerscope.points import Moment, Point


def held(tensor) -> Held:
    return Held(Point("a"), Moment(), tensor.dtype, tuple(tensor.shape), tensor.nbytes, lambda: tensor)


def fetch(one: Held) -> torch.Tensor:
    return one.copy().clone()


def captures(*trees) -> list[Capture]:
    return [Capture(1, n, Moment(1, n, n), tree) for n, tree in enumerate(trees)]


def test_outputs_are_a_mapping_whose_every_access_is_a_copy():
    data = Outputs(captures((held(torch.ones(2)), None), (held(torch.zeros(3)), None)), fetch)
    assert list(data) == [(1, 0), (1, 1)]
    assert len(data) == 2
    assert (1, 5) not in data
    data[1, 0][0].zero_()
    assert data[1, 0][0].tolist() == [1, 1]
    assert data[1, 0][1] is None
    assert repr(data) == "Outputs((1, 0), (1, 1))"


@pytest.mark.parametrize("room", [0, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_an_epoch_is_joined_in_memory_or_in_a_file_to_the_same_end(tmp_path, room, dtype):
    rows = [torch.randn(n, 3).to(dtype) for n in (4, 4, 1)]
    with joined(captures(*map(held, rows)), fetch, room=room, beside=tmp_path / "x.values") as whole:
        assert whole.equal(torch.cat(rows))
        assert bool(list(tmp_path.iterdir())) == (room == 0)
    assert list(tmp_path.iterdir()) == []


def test_what_lies_in_a_file_is_saved_alone_and_whole(tmp_path):
    rows = [torch.randn(100, 3) for _ in range(3)]
    with joined(captures(*map(held, rows)), fetch, room=0, beside=tmp_path / "x.values") as whole:
        path = write_item(tmp_path, "epoch_1_000", {"output": whole}, format="pt")
    assert torch.load(path, weights_only=True)["output"].equal(torch.cat(rows))


@pytest.mark.parametrize(
    "trees",
    [
        (torch.ones(2, 3), torch.ones(2, 4)),
        (torch.ones(2), torch.ones(2).half()),
        (torch.ones(2, 3), torch.ones(2)),
        ((torch.ones(2),), torch.ones(2)),
        ((torch.ones(2), None), (torch.ones(2), torch.ones(2))),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}),
        ([torch.ones(2)], [torch.ones(2), torch.ones(2)]),
    ],
)
def test_what_cannot_be_joined_is_listed(tmp_path, trees):
    from layerscope.runtimes.values import rebuilt

    made = captures(*(rebuilt(tree, lambda leaf, tensor: held(tensor)) for tree in trees))
    with joined(made, fetch, room=1 << 20, beside=tmp_path / "x") as whole:
        assert type(whole) is list
        assert len(whole) == 2


def test_numbers_of_batches_make_a_row(tmp_path):
    with joined(
        captures(held(torch.tensor(1.0)), held(torch.tensor(2.0))), fetch, room=9, beside=tmp_path / "x"
    ) as whole:
        assert whole.tolist() == [1, 2]


def test_statistics_follow_the_structure_and_are_those_of_numpy():
    values = torch.randn(1000)
    found = statistics((values, None, {"a": [values * 2]}))
    assert found[1] is None
    assert found[0]["std"] == pytest.approx(np.std(values.double().numpy()))
    assert found[2]["a"][0]["max"] == pytest.approx((values * 2).max().item())


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
