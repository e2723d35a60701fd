"""TorchScript's objects are read from their pickle, and what torch never writes there is refused, not run."""

from __future__ import annotations

import os
import pickle
import zipfile

import pytest
import torch
from torch import nn

from layerscope.runtimes.archives.script_objects import ScriptTensor, script_objects


def test_a_module_has_the_attributes_that_torch_gave_it(tmp_path):
    torch.jit.save(torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.ReLU())), tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as archive:
        root = script_objects(archive.read("model/data.pkl"))
    layer = root.attributes["0"]
    assert layer.kind.endswith("Linear")
    assert layer.attributes["training"] is True
    held = [value for value in layer.attributes.values() if isinstance(value, ScriptTensor)]
    assert sorted(tensor.count for tensor in held) == [2, 6]
    assert not layer.opaque


class Trap:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_call_stays_a_name(tmp_path):
    content = pickle.dumps(Trap(str(tmp_path / "made")), protocol=2)
    assert script_objects(content) == f"{os.mkdir.__module__}.mkdir"
    assert not (tmp_path / "made").exists()
    pickle.loads(content)
    assert (tmp_path / "made").exists()  # the trap is a real one


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", bytearray(3)], ids=lambda value: type(value).__name__)
def test_instructions_that_torch_does_not_write_are_refused(value):
    with pytest.raises(ValueError, match="that torch does not write"):
        script_objects(pickle.dumps(value, protocol=5))


def test_a_key_that_would_take_for_ever_to_hash_is_left_out():
    """Tuples within tuples, each twice in the next: sixty levels are 2 ** 60 numbers to hash."""
    levels = b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(60))
    assert list(script_objects(b"\x80\x02}(K\x01q\x00" + levels + b"K\x05u.")) == [1]


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02", b"\x80\x02.", b"\x80\x02h\x05.", b"\x80\x02u.", b"\x80\x02K\x01R."]
)
def test_what_is_no_pickle_raises_and_nothing_else(content):
    with pytest.raises((ValueError, LookupError, EOFError, TypeError)):
        script_objects(content)
