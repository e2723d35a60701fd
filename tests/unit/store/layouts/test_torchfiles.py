"""What torch saved, read by torch itself: which values come back, and what is refused before it does harm."""

import os
import pickle
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path

import numpy as np
import pytest
import torch

from layerscope.errors import Damaged, Unsupported
from layerscope.store.address import LocalFolder
from layerscope.store.layouts import torchfiles
from layerscope.store.layouts.torchfiles import Opaque, leaves, saved, tensor_in
from layerscope.store.layouts.unread import Unread

zip_and_stream = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])


def read(tmp_path):
    return saved(LocalFolder(tmp_path), "x.pt")


def save(tmp_path, value, *, zipped=True, **options):
    torch.save(value, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped, **options)


@zip_and_stream
def test_plain_values_are_themselves(tmp_path, zipped):
    value = {
        "numbers": [1, -2.5, float("inf"), True, None, 2**70, 1 + 2j],
        "text": ("a", "ü", b"bytes"),
        (1, 2): torch.Size([3, 4]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "ordered": OrderedDict(a=1, b={2, 3}),
        "counted": Counter("aab"),
    }
    save(tmp_path, value, zipped=zipped)
    assert read(tmp_path) == {**value, "dtype": "torch.bfloat16", "device": "cpu", (1, 2): (3, 4)}


@zip_and_stream
def test_every_tensor_of_a_file_is_read_whatever_it_shares_and_the_file_is_not_opened_for_each(
    tmp_path, zipped, monkeypatch
):
    net, whole = torch.nn.Linear(3, 2), torch.arange(60.0).reshape(3, 4, 5)
    views = [whole, whole.transpose(0, 2), whole[1:, ::2], whole[0, 0, 0], whole[:0], whole[2], whole]
    value = {"views": views, "net": net.state_dict(), "own": net.weight, "again": views}
    save(tmp_path, value, zipped=zipped)
    opened, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **options: opened.append(options) or load(*args, **options))
    found = read(tmp_path)
    for unread, wanted in zip(found["views"], views, strict=True):
        assert torch.equal(unread.load(), wanted)
    assert torch.equal(found["net"]["bias"].load(), net.bias.detach())
    assert torch.equal(found["own"].load(), net.weight.detach())
    assert not found["own"].load().requires_grad
    assert found["again"] is found["views"]
    assert len(opened) == 1
    assert (opened[0]["weights_only"], opened[0]["mmap"]) == (True, zipped)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_protocols_that_torch_reads_back_are_read(tmp_path, protocol):
    save(tmp_path, {"a": torch.ones(2), "b": [1, (2, 3, 4, 5)]}, pickle_protocol=protocol)
    if protocol > 3:
        with pytest.raises(Unsupported, match=rf"x\.pt was saved with pickle protocol {protocol}, which torch\.load"):
            read(tmp_path)
        return
    found = read(tmp_path)
    assert found["b"] == [1, (2, 3, 4, 5)]
    assert found["a"].load().tolist() == [1, 1]


# What is not a tensor -------------------------------------------------------------------------------


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


class Holder:
    def __init__(self):
        self.held = {"a": [1]}


class Stateful(dict):
    """Takes items, and a state after them."""

    def __init__(self):
        self.state = 3


@zip_and_stream
def test_nothing_that_a_pickle_names_is_called(tmp_path, zipped):
    target, allowed = tmp_path / "created", set(torch.serialization.get_safe_globals())
    save(tmp_path, {"a": Evil(target)}, zipped=zipped)
    assert read(tmp_path) == {"a": Opaque("io.open")}
    assert not target.exists()
    assert set(torch.serialization.get_safe_globals()) == allowed
    torch.load(tmp_path / "x.pt", weights_only=False)["a"].close()
    assert target.exists()  # the trap is a real one


@zip_and_stream
def test_an_odd_value_is_opaque_and_does_not_cost_the_file(tmp_path, zipped):
    odd = {
        "class": Evil,
        "object": Holder(),
        "array": np.ones(3),
        "dict": defaultdict(list, a=[1]),
        "stateful": Stateful(),
        "path": Path("a"),
        "error": ValueError("text"),
    }
    odd["stateful"]["key"] = torch.ones(1)
    save(tmp_path, {**odd, "tensor": torch.arange(3.0), "list": [1]}, zipped=zipped)
    found = read(tmp_path)
    assert found["tensor"].load().tolist() == [0, 1, 2]
    assert found["list"] == [1]
    assert {key: type(found[key]) for key in odd} == dict.fromkeys(odd, Opaque)
    assert found["dict"] == Opaque("collections.defaultdict")
    assert found["class"] == Opaque(f"{__name__}.Evil")
    assert found["object"] == Opaque(f"{__name__}.Holder")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        (np.ones(3), "_reconstruct"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, dtype=torch.complex64).conj(), "conjugated"),
        (torch.ones(2, device="meta"), "on meta"),
    ],
)
def test_what_only_unpickling_could_make_is_refused_by_name(tmp_path, value, name):
    save(tmp_path, value)
    with pytest.raises(Unsupported, match=rf"x\.pt needs unpickling of .*{name}.*, which is never done"):
        tensor_in(read(tmp_path), str(tmp_path / "x.pt"))


class Calls:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@zip_and_stream
def test_functions_that_torch_would_call_and_no_tensor_needs_are_refused(tmp_path, zipped):
    encode = __import__("_codecs").encode
    for value, name in (
        (Calls(os.system, "true"), r"posix\.system|os\.system|nt\.system"),
        (Calls(bytearray, 1 << 40), r"builtins\.bytearray"),
        (Calls(encode, b"a", "HEX"), "the codec hex"),
        (Calls(encode, Calls(encode, b"a", "base-64"), "quoted printable"), "the codec"),
        (Calls(encode, "urk", "rot13"), "the codec rot13"),
    ):
        save(tmp_path, value, zipped=zipped)
        with pytest.raises(Unsupported, match=f"needs unpickling of ({name})"):
            read(tmp_path)
    save(tmp_path, {"a": "hex"}, zipped=zipped)
    assert read(tmp_path) == {"a": "hex"}
    save(tmp_path, {"b": b"\xff\x00"}, zipped=zipped)
    assert read(tmp_path)["b"] == b"\xff\x00"


@zip_and_stream
def test_a_tensor_that_was_not_saved_in_the_file_is_damaged(tmp_path, zipped):
    save(tmp_path, Calls(torch.Tensor, 1000), zipped=zipped)
    with pytest.raises(Damaged, match="has a tensor of 4000 bytes that were not saved in it"):
        read(tmp_path)


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "why"), [(deque([1, 2]), "Can only .*list"), (torch.ones(2).as_subclass(Sub), "cls must be a type")]
)
def test_what_cannot_stand_in_as_a_stub_costs_its_file_and_is_refused_in_one_sentence(tmp_path, value, why):
    save(tmp_path, value)
    with pytest.raises(Damaged, match=rf"x\.pt .* holds what torch\.load\(weights_only=True\) does not read \(.*{why}"):
        read(tmp_path)


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


def test_leaves_are_walked_with_their_paths():
    value = {"a": [1, (2, None)], "b": "text"}
    assert list(leaves(value, "f")) == [(("a", 0), 1), (("a", 1, 0), 2), (("a", 1, 1), None), (("b",), "text")]


# Archives and streams that say what is not so -------------------------------------------------------


def rewritten(tmp_path, change, method=zipfile.ZIP_STORED):
    """Write the members of the archive anew, checksums and all, after `change` was made to their bytes."""
    with zipfile.ZipFile(tmp_path / "x.pt") as old:
        members = {name: old.read(name) for name in old.namelist()}
    change(members)
    with zipfile.ZipFile(tmp_path / "x.pt", "w", method) as new:
        for name, data in members.items():
            new.writestr(name, data)


def test_an_archive_that_two_readers_may_see_differently_is_refused(tmp_path):
    value = torch.arange(100.0)
    save(tmp_path, value)
    rewritten(tmp_path, lambda members: None)
    assert torch.equal(read(tmp_path).load(), value)
    rewritten(tmp_path, lambda members: members.update({"x/DATA/0": bytes(400)}))
    with pytest.raises(Damaged, match="'x/DATA/0' is in it twice"):
        read(tmp_path)
    save(tmp_path, value)
    rewritten(tmp_path, lambda members: members.update({"y/data/0": bytes(400)}))
    with pytest.raises(Damaged, match=r"is a zip archive that torch\.save did not write"):
        read(tmp_path)
    save(tmp_path, value)
    rewritten(tmp_path, lambda members: None, zipfile.ZIP_DEFLATED)
    with pytest.raises(Unsupported, match="is compressed, and torch takes what lies there as it is"):
        read(tmp_path)


@pytest.mark.parametrize("count", [99, 101, 1 << 30])
def test_a_tensor_must_state_the_length_of_what_was_saved(tmp_path, count):
    save(tmp_path, torch.arange(100.0))

    def change(members):
        stated = b"X\x03\x00\x00\x00cpuq\x04Kdt"  # where it lay, and its length, 100
        assert stated in members["x/data.pkl"]
        another = stated[:-3] + b"J" + count.to_bytes(4, "little") + b"t"
        members["x/data.pkl"] = members["x/data.pkl"].replace(stated, another)

    rewritten(tmp_path, change)
    with pytest.raises(Damaged, match=r"one of its tensors states .* bytes, and nothing of that length was saved"):
        read(tmp_path)


def test_a_large_pickle_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(torchfiles, "_LARGEST", 10_000)
    save(tmp_path, list(range(1 << 14)))
    with pytest.raises(Unsupported, match=r"x\.pt has a pickle of \d+ bytes"):
        read(tmp_path)
    save(tmp_path, list(range(1 << 14)), zipped=False)
    with pytest.raises(Damaged, match=r"x\.pt is truncated, or holds"):
        read(tmp_path)


def pickled(value):
    return pickle.dumps(value, 2)


def stream(body, *, keys=(), little=sys.byteorder == "little", after=b""):
    about = {"protocol_version": 1001, "little_endian": little, "type_sizes": {}}
    return pickled(0x1950A86A20F9469CFC6C) + pickled(1001) + pickled(about) + body + pickled(list(keys)) + after


def storage(key, count):
    """Return a pickle of a tensor of `count` numbers in a storage of as many."""
    text = f"X{chr(len(key))}\0\0\0{key}".encode()
    number = b"\x8a\x08" + count.to_bytes(8, "little")
    body = b"(X\x07\0\0\0storagectorch\nFloatStorage\n" + text + b"X\x03\0\0\0cpu" + number + b"NtQ"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + body + b"K\0" + number + b"\x85K\x01\x85\x89}tR."


def test_a_stream_that_states_more_than_it_has_is_refused_before_it_is_allocated(tmp_path):
    values = np.arange(3, dtype=np.float32).tobytes()
    told = (3).to_bytes(8, "little") + values
    (tmp_path / "x.pt").write_bytes(stream(storage("7", 3), keys=["7"], after=told))
    assert read(tmp_path).load().tolist() == [0, 1, 2]
    for count in (4, 1 << 20, 1 << 38, 1 << 60):
        (tmp_path / "x.pt").write_bytes(stream(storage("7", count), keys=["7"], after=told))
        with pytest.raises(Damaged, match=r"x\.pt is truncated, or holds"):
            read(tmp_path)
    (tmp_path / "x.pt").write_bytes(stream(storage("7", 3), after=told))  # nobody says where its values are
    with pytest.raises(Damaged, match="its tensors state 12 bytes or more"):
        read(tmp_path)
    (tmp_path / "x.pt").write_bytes(stream(storage("7", 3), keys=["7"], after=told, little=sys.byteorder != "little"))
    with pytest.raises(Unsupported, match="on a machine of the other byte order"):
        read(tmp_path)


def test_a_dtype_that_torch_does_not_read_back_from_a_stream_is_refused_with_the_way_out(tmp_path):
    save(tmp_path, torch.ones(2).to(torch.float8_e5m2), zipped=False)
    with pytest.raises(Unsupported, match="torch reads this dtype from zip archives alone; save it without"):
        read(tmp_path)


def test_a_small_pickle_cannot_take_much_time_or_memory(tmp_path):
    doubling = b"\x80\x02N" + b"2\x86" * 60  # tuples within tuples, 2 ** 60 leaves
    for body, says in (
        (b"\x80\x02}" + doubling[2:] + b"Ns.", "is truncated, or holds"),
        (b"\x80\x02]q\x00h\x00a.", "nested without end"),
        (b"\x80\x02X" + (1 << 30).to_bytes(4, "little") + b".", "is truncated, or holds"),
        (b"\x80\x02N" + b"\x85" * 100 + b".", "nested without end"),
    ):
        (tmp_path / "x.pt").write_bytes(stream(body))
        with pytest.raises(Damaged, match=says):
            read(tmp_path)


def test_what_is_referred_to_often_is_read_once(tmp_path):
    value = torch.ones(1)
    for _ in range(40):
        value = (value, value)
    save(tmp_path, value)
    with pytest.raises(Damaged, match="nested without end"):
        list(leaves(read(tmp_path), "x.pt"))


def test_an_expanded_view_of_little_is_not_written_out(tmp_path):
    save(tmp_path, torch.ones(1).expand(1 << 40))
    with pytest.raises(Unsupported, match="expanded view"):
        read(tmp_path)
    save(tmp_path, torch.ones(1).expand(50, 3))
    found = read(tmp_path)
    assert isinstance(found, Unread)
    assert torch.equal(found.load(), torch.ones(50, 3))
    assert torch.equal(torch.cat(list(found.pieces(7))), torch.ones(150))


def test_a_big_endian_archive_is_turned_around(tmp_path):
    save(tmp_path, torch.arange(3.0))

    def change(members):
        members["x/byteorder"] = b"big" if sys.byteorder == "little" else b"little"
        members["x/data/0"] = np.frombuffer(members["x/data/0"], "<f4").byteswap().tobytes()

    rewritten(tmp_path, change)
    before = (tmp_path / "x.pt").read_bytes()
    assert read(tmp_path).load().tolist() == [0, 1, 2]
    assert (tmp_path / "x.pt").read_bytes() == before


def test_what_a_user_allows_torch_stays_allowed(tmp_path):
    with torch.serialization.safe_globals([Path]):
        allowed = set(torch.serialization.get_safe_globals())
        save(tmp_path, {"a": Evil(tmp_path / "created"), "t": torch.ones(1)})
        assert read(tmp_path)["a"] == Opaque("io.open")
        assert set(torch.serialization.get_safe_globals()) == allowed > {Path}
