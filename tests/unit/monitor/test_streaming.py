"""An epoch written batch by batch: what torch and numpy read of it is the batches, joined by them."""

import json
import zipfile

import numpy as np
import pytest
import torch

from layerscope.monitor.captures import CapturedOutput, Held
from layerscope.monitor.streaming import joined, write_epoch
from layerscope.points import Moment, Point
from layerscope.runtimes.values import rebuilt
from layerscope.store.address import LocalFolder
from layerscope.store.layouts.torchfiles import saved

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.float8_e4m3fn),
]


def held(tensor) -> Held:
    return Held(Point("a"), Moment(), tensor.dtype, tuple(tensor.shape), tensor.nbytes, lambda: tensor)


def pieces(one: Held):
    """Give the values in pieces of five, as a store does."""
    yield from one.copy().reshape(-1).split(5) if one.nbytes else ()


def epoch(*outputs) -> list[CapturedOutput]:
    trees = (rebuilt(output, lambda leaf, tensor: held(tensor)) for output in outputs)
    return [CapturedOutput(1, n, Moment(1, n, n), tree) for n, tree in enumerate(trees)]


def written(folder, *outputs, format="pt", **about):
    return write_epoch(folder, "epoch_1_000", about, joined(epoch(*outputs)), pieces, format=format)


def loaded(folder, *outputs, **how):
    return torch.load(written(folder, *outputs), weights_only=True, **how)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mapped", [False, True])
def test_torch_reads_the_batches_joined(tmp_path, dtype, mapped):
    rows = [(torch.randn(n, 3) * 9).to(dtype) for n in (4, 4, 1)]
    output = loaded(tmp_path, *rows, mmap=mapped)["output"]
    assert output.dtype == dtype
    assert torch.equal(output.view(torch.uint8), torch.cat([row.view(torch.uint8) for row in rows]))
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_1_000.pt"]


def test_it_reads_as_what_torch_itself_saves(tmp_path):
    rows = [torch.randn(2, 3), torch.randn(1, 3)]
    found = loaded(tmp_path, *rows)
    said = found.pop("statistics"), found.pop("output_shape")
    assert said[1] == [3, 3]
    torch.save({"output": torch.cat(rows)}, tmp_path / "torch.pt")
    expected = torch.load(tmp_path / "torch.pt", weights_only=True)
    assert found.keys() == expected.keys()
    assert found["output"].equal(expected["output"])
    assert found["output"].stride() == expected["output"].stride()
    with zipfile.ZipFile(tmp_path / "epoch_1_000.pt") as archive:
        assert archive.testzip() is None


def test_every_tensor_lies_where_it_can_be_mapped(tmp_path):
    path = written(tmp_path, {"a": torch.ones(3), "bcd": torch.ones(5, dtype=torch.float64)})
    reader = torch._C.PyTorchFileReader(str(path))
    assert [reader.get_record_offset(f"data/{n}") % 64 for n in (0, 1)] == [0, 0]


def test_structures_stay_and_none_and_numbers_with_them(tmp_path):
    output = loaded(tmp_path, *[(torch.full((2,), n), None, {"k": [torch.full((1, 2), -n)], "n": 7}) for n in (1, 2)])
    assert output["output_shape"] == [[4], None, {"k": [[2, 2]], "n": None}]
    first, none, rest = output["output"]
    assert (first.tolist(), none, rest["n"]) == ([1, 1, 2, 2], None, 7)
    assert rest["k"][0].tolist() == [[-1, -1], [-2, -2]]


def test_parts_are_joined_by_their_names_whatever_their_order(tmp_path):
    output = loaded(tmp_path, {"a": torch.ones(1), "b": torch.zeros(1)}, {"b": torch.zeros(1), "a": torch.ones(1)})
    assert output["output"]["a"].tolist() == [1, 1]
    assert output["output"]["b"].tolist() == [0, 0]


@pytest.mark.parametrize(
    "outputs",
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
def test_what_cannot_be_joined_is_listed(tmp_path, outputs):
    found = loaded(tmp_path, *outputs)["output"]
    assert type(found) is list
    assert str(found) == str(list(outputs))


def test_numbers_of_batches_make_a_row_and_empty_batches_none(tmp_path):
    assert loaded(tmp_path, torch.tensor(1.0), torch.tensor(2.0))["output"].tolist() == [1, 2]
    assert loaded(tmp_path, torch.ones(0, 3), torch.ones(2, 3))["output"].shape == (2, 3)
    assert loaded(tmp_path, torch.ones(0, 3))["output"].shape == (0, 3)


def test_statistics_are_numpys_of_the_whole(tmp_path):
    rows = [torch.randn(300, 4), torch.randn(7, 4) * 100]
    found = loaded(tmp_path, *[(row, None) for row in rows])["statistics"]
    whole = torch.cat(rows).double().numpy()
    assert found[1] is None
    for word in ("mean", "std", "min", "max"):
        assert found[0][word] == pytest.approx(getattr(np, word)(whole), rel=1e-9)
    assert found[0]["first_10"] == whole.flatten()[:10].tolist()
    assert (found[0]["count"], found[0]["shape"]) == (whole.size, [307, 4])


def test_our_reader_reads_it_without_torch(tmp_path):
    written(tmp_path, torch.ones(2, 3), torch.zeros(1, 3), alias="a")
    found = saved(LocalFolder(tmp_path), "epoch_1_000.pt")
    assert (found["alias"], tuple(found["output"].shape)) == ("a", (3, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_numpy_reads_the_batches_joined(tmp_path, dtype):
    rows = [(torch.randn(n, 3) > 0).to(dtype) for n in (4, 1)]
    path = written(tmp_path, *rows, format="npy", alias="a")
    assert path.name == "epoch_1_000.npy"
    assert np.load(path).tolist() == torch.cat(rows).float().tolist()
    about = json.loads(path.with_suffix(".json").read_text())
    assert (about["alias"], about["dtype"], about["file"]) == ("a", str(dtype)[6:], "epoch_1_000.npy")
    assert about["statistics"]["shape"] == [5, 3]


def test_several_arrays_are_in_one_file(tmp_path):
    path = written(tmp_path, *[(torch.full((2,), n), {"k": torch.full((1,), -n)}) for n in (1.0, 2.0)], format="npy")
    with np.load(path, allow_pickle=False) as arrays:
        assert {name: arrays[name].tolist() for name in arrays} == {"0": [1, 1, 2, 2], "1.k": [-1, -2]}


@pytest.mark.parametrize("format", ["pt", "npy"])
def test_a_file_is_whole_or_not_there(tmp_path, format):
    def refuse(one):
        if one.shape[0] == 1:
            raise OSError(28, "No space left on device")
        return pieces(one)

    with pytest.raises(OSError, match="No space"):
        write_epoch(tmp_path, "x", {}, joined(epoch(torch.ones(2), torch.ones(1))), refuse, format=format)
    assert list(tmp_path.iterdir()) == []
