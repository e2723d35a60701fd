"""What torch saved, read without torch's loader, against torch's loader."""

import pickle
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch

from layerscope.errors import Damaged, Unsupported
from layerscope.store.address import LocalFolder
from layerscope.store.layouts import torchfiles
from layerscope.store.layouts.extents import Extent
from layerscope.store.layouts.torchfiles import Opaque, leaves, saved, tensor_in

DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    *("complex64", "complex128", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
]


def some(dtype):
    return torch.arange(1, 61).reshape(3, 4, 5).to(getattr(torch, dtype))


def read(tmp_path):
    return saved(LocalFolder(tmp_path), "x.pt")


def same(one, other):
    bits = [t.contiguous().reshape(-1).view(torch.uint8).tolist() for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and bits[0] == bits[1]


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_torch_saved_is_what_is_read(tmp_path, dtype, zipped):
    whole = some(dtype)
    views = [whole, whole.transpose(0, 2), whole[1:, ::2], whole[0, 0, 0], whole[:0], whole[2]]
    torch.save(views, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    # Torch itself no longer reads the newer dtypes back from the older stream, so the oracle is what was saved.
    for extent, wanted in zip(read(tmp_path), views, strict=True):
        assert isinstance(extent, Extent)
        assert same(extent.load(), wanted)
        assert same(torch.cat([wanted.reshape(-1)[:0], *extent.pieces(5)]), wanted.reshape(-1))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
def test_plain_values_are_themselves(tmp_path, zipped):
    value = {
        "numbers": [1, -2.5, float("inf"), True, None, 2**70],
        "text": ("a", "ü", b"bytes"),
        (1, 2): torch.Size([3, 4]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "ordered": OrderedDict(a=1, b={2, 3}),
    }
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    assert read(tmp_path) == {**value, "dtype": "torch.bfloat16", "device": "cpu", (1, 2): (3, 4)}


def test_a_long_pickle_before_the_tensors_is_read_to_its_end(tmp_path, monkeypatch):
    value = {"a": torch.arange(3.0), "b": list(range(1000)), "c": torch.ones(2, dtype=torch.int8)}
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    monkeypatch.setattr(torchfiles, "_USUAL", 200)
    found = read(tmp_path)
    assert found["b"] == value["b"]
    assert same(found["c"].load(), value["c"])


def test_parameters_and_state_dicts_are_tensors(tmp_path):
    net = torch.nn.Linear(3, 2)
    torch.save({"net": net.state_dict(), "own": net.weight}, tmp_path / "x.pt")
    found = read(tmp_path)
    assert same(found["net"]["bias"].load(), net.bias.detach())
    assert same(found["own"].load(), net.weight.detach())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickle_is_followed(tmp_path, protocol):
    torch.save({"a": torch.ones(2), "b": [1, (2, 3, 4, 5)]}, tmp_path / "x.pt", pickle_protocol=protocol)
    found = read(tmp_path)
    assert found["b"] == [1, (2, 3, 4, 5)]
    assert found["a"].load().tolist() == [1, 1]


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
def test_nothing_that_a_pickle_names_is_called(tmp_path, zipped):
    target = tmp_path / "created"
    torch.save({"a": Evil(target)}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    assert read(tmp_path) == {"a": Opaque("io.open")}
    assert not target.exists()
    torch.load(tmp_path / "x.pt", weights_only=False)["a"].close()
    assert target.exists()  # the trap is a real one


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        (np.ones(3), "_reconstruct"),
        (torch.eye(2).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.ones(2, dtype=torch.complex64).conj(), "conjugated"),
    ],
)
def test_what_only_unpickling_could_make_is_refused_by_name(tmp_path, value, name):
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(Unsupported, match=rf"x\.pt needs unpickling of .*{name}.*, which is never done"):
        tensor_in(read(tmp_path), str(tmp_path / "x.pt"))


def test_what_is_there_instead_of_a_tensor_is_said():
    with pytest.raises(Unsupported, match="f holds a dict where a tensor is expected"):
        tensor_in({}, "f")


def test_a_plain_pickle_and_a_script_are_refused(tmp_path):
    (tmp_path / "x.pt").write_bytes(pickle.dumps(Evil(tmp_path / "created")))
    with pytest.raises(Unsupported, match="nothing is ever unpickled"):
        read(tmp_path)
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "x.pt")
    with pytest.raises(Unsupported, match="TorchScript"):
        read(tmp_path)
    assert not (tmp_path / "created").exists()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
def test_a_file_cut_anywhere_is_damaged_by_name(tmp_path, zipped):
    torch.save(torch.arange(100.0), tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    raw = (tmp_path / "x.pt").read_bytes()
    for left in range(0, len(raw), 37):
        (tmp_path / "x.pt").write_bytes(raw[:left])
        with pytest.raises((Damaged, Unsupported), match=r"x\.pt"):
            tensor_in(read(tmp_path), str(tmp_path / "x.pt"))


def test_changed_bytes_give_the_same_answer_or_a_refusal_and_never_another_error(tmp_path):
    rng = np.random.default_rng(0)
    torch.save({"a": torch.arange(6.0), "b": [1, 2.5, "text"]}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    raw = (tmp_path / "x.pt").read_bytes()
    said = []
    for at in rng.integers(0, len(raw), 150):
        changed = bytearray(raw)
        changed[at] = rng.integers(0, 256)
        (tmp_path / "x.pt").write_bytes(changed)
        try:
            value = read(tmp_path)
            for _, leaf in leaves(value, "x.pt"):
                if isinstance(leaf, Extent):
                    leaf.load()
        except (Damaged, Unsupported) as error:
            said.append(str(error))
    assert len(said) > 20
    assert all("x.pt" in text for text in said)


def doubling(levels):
    """A pickle of tuples within tuples, 2 ** levels leaves in a few bytes."""
    return b"\x80\x02N" + b"2\x86" * levels


def stream(body):
    magic, version = pickle.dumps(0x1950A86A20F9469CFC6C, 2), pickle.dumps(1001, 2)
    about = pickle.dumps({"little_endian": sys.byteorder == "little"}, 2)
    return magic + version + about + body + pickle.dumps([], 2)


def test_a_small_pickle_cannot_take_much_time_or_memory(tmp_path):
    (tmp_path / "x.pt").write_bytes(stream(b"\x80\x02}" + doubling(60)[2:] + b"Ns."))
    with pytest.raises(Damaged, match="truncated or was not written"):
        read(tmp_path)
    (tmp_path / "x.pt").write_bytes(stream(b"\x80\x02]q\x00h\x00a."))
    with pytest.raises(Damaged, match="nested without end"):
        list(leaves(read(tmp_path), "x.pt"))
    (tmp_path / "x.pt").write_bytes(stream(b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little") + b"."))
    with pytest.raises(Damaged, match="truncated or was not written"):
        read(tmp_path)


def test_an_expanded_view_of_little_is_not_written_out(tmp_path):
    torch.save(torch.ones(1).expand(1 << 40), tmp_path / "x.pt")
    with pytest.raises(Unsupported, match="expanded view"):
        read(tmp_path)
    torch.save(torch.ones(1).expand(50, 3), tmp_path / "x.pt")
    assert same(read(tmp_path).load(), torch.ones(50, 3))


def test_leaves_are_walked_with_their_paths():
    value = {"a": [1, (2, None)], "b": "text"}
    assert list(leaves(value, "f")) == [(("a", 0), 1), (("a", 1, 0), 2), (("a", 1, 1), None), (("b",), "text")]


def test_a_saved_tensor_is_described_without_torch(tmp_path):
    torch.save(torch.ones(2, 3), tmp_path / "x.pt")
    code = (
        "import sys; from pathlib import Path; from layerscope.store.address import LocalFolder;"
        "from layerscope.store.layouts.torchfiles import saved; folder = LocalFolder(Path(sys.argv[1]));"
        "print(saved(folder, 'x.pt').shape); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["(2, 3)", "False"]
