"""What `torch.save` wrote, read by `torch.load(weights_only=True)`, with the file mapped and no value touched.

    saved(files, "layer_30_output.pt")      # an Unread: dtype and shape known
    saved(files, "statistics.pt")           # plain Python values

A pickle is a program; torch's own unpickler runs the few functions that tensors need, and nothing else. Classes that it
does not know are given to it as stubs that do nothing, and become an Opaque with the name, for the caller to refuse.
The zip archive is mapped; the older stream, which cannot be, is read whole.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import sys
import threading
import warnings
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from encodings.aliases import aliases
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from layerscope.errors import Damaged, Unsupported
from layerscope.store.address import Folder
from layerscope.store.dtypes import STORED
from layerscope.store.layouts.archives import archive, is_zip
from layerscope.store.layouts.copies import path_of
from layerscope.store.layouts.unread import Unread, mapped

if TYPE_CHECKING:
    import torch

# Pickles beside tensors are small; this one would be a list of a million numbers.
_LARGEST = 64 << 20
_MOST_LEAVES = 100_000
_DEEPEST = 64
_LEGACY = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
# Torch's unpickler calls these for any file, and a few bytes could have them fill the memory.
_GROWING = {"builtins.bytearray"}
_BLOCKED = ("os", "posix", "nt", "sys")  # these it refuses whatever stands in for them
_CODECS = {"hex_codec", "base64_codec", "quopri_codec", "uu_codec", "rot_13"}
_LOCK = threading.Lock()


class _Fillable(type):
    """A class that is equal to dict: torch's unpickler puts keys and values into nothing else."""

    def __eq__(cls, other: object) -> bool:
        return cls is other or other is dict

    __hash__ = type.__hash__


@dataclass(frozen=True)
class Opaque(metaclass=_Fillable):
    """Something that only unpickling could make, by the name of its class or function.

    While torch reads, it stands in for that, and does nothing that is asked of it.
    """

    name: str

    def __new__(cls, *args: object) -> Opaque:
        """Make one; torch makes instances of what one stands for by the same way."""
        return cls if isinstance(cls, Opaque) else super().__new__(cls)

    def __call__(self, *args: object) -> Opaque:
        """Be what a class or a function would return."""
        return self

    def __setstate__(self, state: object) -> None: ...

    def __setitem__(self, key: object, value: object) -> None: ...


def saved(files: Folder, name: str, *, most: int | None = None) -> Any:
    """Read a file that `torch.save` wrote: plain values, with an Unread for each tensor and an Opaque for the rest.

    Raises Damaged when it is cut short or no such file, Unsupported for what is not saved values (TorchScript). Of
    files elsewhere, those over `most` bytes are not fetched.
    """
    stamp = _stamp(path_of(files, name, most=most))
    _opened.cache_clear()  # a file may be written again within one tick of the clock that dates it
    return _opened(files, name, stamp).value


def tensor_in(value: Any, place: str) -> Unread:
    """Return the tensor that a file holds; raises Unsupported with what it is instead."""
    if isinstance(value, Unread):
        return value
    if isinstance(value, Opaque):
        raise Unsupported(
            f"{place} needs unpickling of {value.name}, which is never done; save the tensor itself with torch.save"
        )
    raise Unsupported(f"{place} holds a {type(value).__name__} where a tensor is expected")


def leaves(value: Any, place: str) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    """Walk into tuples, lists and dicts: the path to each leaf, and the leaf."""
    left = _MOST_LEAVES

    def walk(value: Any, path: tuple[int | str, ...]) -> Iterator[tuple[tuple[int | str, ...], Any]]:
        nonlocal left
        left -= 1
        if left < 0:
            raise Damaged(f"{place} is nested without end")
        if isinstance(value, dict):
            for key, item in value.items():
                yield from walk(item, (*path, key if isinstance(key, int) else str(key)))
        elif isinstance(value, (list, tuple)):
            for at, item in enumerate(value):
                yield from walk(item, (*path, at))
        else:
            yield path, value

    return walk(value, ())


# Loading --------------------------------------------------------------------------------------------


class _Opened(NamedTuple):
    value: Any
    tensors: list[torch.Tensor]


def _stamp(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=2)  # two runs that are compared, each of which may have many tensors in one file
def _opened(files: Folder, name: str, stamp: tuple[int, ...]) -> _Opened:
    place, path = f"{files.address}/{name}", path_of(files, name)
    mmap = is_zip(files, name)
    held = _Held(place, path.stat().st_size)
    names = _zip(files, name, held) if mmap else _stream(path, held)
    value, held = _load(path, names, held, mmap=mmap)
    return _Conversion(files, name, held).run(value)


@dataclass(slots=True)
class _Held:
    """The storages of a file, held against what was saved before a tensor is made of them.

    `lengths` are those of the members of a zip archive, `most` how many a stream lists.
    """

    place: str
    size: int
    lengths: set[int] | None = None
    most: int = 0
    total: int = 0
    storages: set[tuple[int, int]] = field(default_factory=set)

    def __call__(self, storage: Any, location: str) -> Any:
        """Take a storage as torch makes it (or maps it), wherever it was before it was saved."""
        length = storage.nbytes()
        self.storages.add((storage.data_ptr(), length))
        self.total += length
        self.most -= 1
        if self.lengths is None and (self.total > self.size or self.most < 0):
            raise ValueError(f"its tensors state {self.total} bytes or more, and the file has {self.size}")
        if self.lengths is not None and length not in self.lengths:
            raise ValueError(f"one of its tensors states {length} bytes, and nothing of that length was saved")
        return storage

    def has(self, begin: int, length: int) -> bool:
        """Whether bytes in memory are those of a storage of the file, or of a part of one."""
        return (begin, length) in self.storages or any(
            at <= begin and begin + length <= at + known for at, known in self.storages
        )


def _zip(files: Folder, name: str, held: _Held) -> dict[str, str]:
    """Check the archive against itself; return the names in its pickle."""
    place = held.place
    with archive(files, name) as (zipped, members):
        by_name = {member.filename.partition("/")[2]: member for member in members}
        if "constants.pkl" in by_name or any(key.startswith("code/") for key in by_name):
            raise Unsupported(f"{place} is a TorchScript archive, a model and not a saved tensor")
        if "data.pkl" not in by_name or len({member.filename.partition("/")[0] for member in members}) > 1:
            raise Damaged(f"{place} is a zip archive that torch.save did not write: there is no data.pkl in it")
        if packed := [m.filename for m in members if m.compress_type != zipfile.ZIP_STORED]:
            raise Unsupported(f"{place}: {packed[0]!r} is compressed, and torch takes what lies there as it is")
        large = max(member.file_size for key, member in by_name.items() if not key.startswith("data/"))
        if large > _LARGEST:
            raise Unsupported(f"{place} has a pickle of {large} bytes; values are expected to be saved as tensors")
        held.lengths = {0, *(member.file_size for key, member in by_name.items() if key.startswith("data/"))}
        return _names(io.BytesIO(zipped.read(by_name["data.pkl"])), place)


def _stream(path: Path, held: _Held) -> dict[str, str]:
    """Check torch's format from before 1.6: five pickles, then the storages one after the other."""
    place = held.place
    with path.open("rb") as file:
        head = file.read(_LARGEST)
    if _LEGACY not in head[:32]:
        if head[:1] == b"\x80":
            raise Unsupported(f"{place} is a plain pickle, and nothing is ever unpickled; save tensors with torch.save")
        found = f"it begins with {head[:8]!r}" if head else "it is empty"
        raise Damaged(f"{place} was not written by torch.save: {found}")
    stream = io.BytesIO(head)
    _, _, about = ([*_operations(stream, place)] for _ in range(3))
    if (("NEWTRUE", None) in about) != (sys.byteorder == "little"):
        raise Unsupported(f"{place} was saved on a machine of the other byte order, which torch takes as it is")
    names = _names(stream, place)
    if "torch.storage.UntypedStorage" in names:
        raise Unsupported(
            f"{place} is of the format from before torch 1.6, and torch reads this dtype from zip archives alone; "
            "save it without _use_new_zipfile_serialization=False"
        )
    held.most = sum("UNICODE" in name or "STRING" in name for name, _ in _operations(stream, place))
    return names


def _operations(stream: io.BytesIO, place: str) -> Iterator[tuple[str, Any]]:
    """List what a pickle consists of, without following it."""
    try:
        for operation, value, _ in pickletools.genops(stream):
            yield operation.name, value
    except Exception as error:
        raise _damaged(place, error) from error


def _names(stream: io.BytesIO, place: str) -> dict[str, str]:
    """List the classes and functions that a pickle speaks of: as it calls them, and as they are called today."""
    names: dict[str, str] = {}
    texts: set[str] = set()
    for operation, value in _operations(stream, place):
        if operation == "PROTO" and value > 3:
            raise Unsupported(
                f"{place} was saved with pickle protocol {value}, which torch.load(weights_only=True) does not read; "
                "save it with torch's own, 2"
            )
        if operation == "GLOBAL":
            module, word = str(value).split(" ", 1)
            today = ".".join(NAME_MAPPING.get((module, word), (IMPORT_MAPPING.get(module, module), word)))
            names |= {f"{module}.{word}": today, today: today}
        elif isinstance(value, str) and len(value) < 32:
            texts.add(re.sub(r"[^a-z0-9]+", "_", value.lower()))
    refused = sorted(name for name in names.values() if name in _GROWING or name.partition(".")[0] in _BLOCKED)
    if "_codecs.encode" in names:
        refused += sorted(f"the codec {text}" for text in texts if aliases.get(text, text) in _CODECS)
    if refused:
        raise Unsupported(f"{place} needs unpickling of {refused[0]}, which is never done")
    return names


def _load(path: Path, names: dict[str, str], held: _Held, *, mmap: bool) -> tuple[Any, _Held]:
    """Have torch read the file, with stubs for what it does not know."""
    import torch

    def loaded() -> tuple[Any, _Held]:
        anew = replace(held, storages=set())
        return torch.load(path, map_location=anew, weights_only=True, mmap=mmap), anew

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of storages that are deprecated
            try:
                return loaded()
            except pickle.UnpicklingError:
                # Torch's own functions come before these. The list is the process's, so for odd files alone.
                stubs: list[Any] = [(Opaque(today), name) for name, today in names.items()]
                stubs.append(Opaque)  # what is given a state must be of a class that torch knows
                with _LOCK, torch.serialization.safe_globals(stubs):
                    return loaded()
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever torch says of damaged bytes
        raise _damaged(held.place, error) from error


def _damaged(place: str, error: Exception) -> Damaged:
    said = str(error).rpartition("WeightsUnpickler error:")[2].split("\n\nCheck the documentation")[0]
    why = " ".join(said.split())[:200] or type(error).__name__
    return Damaged(f"{place} is truncated, or holds what torch.load(weights_only=True) does not read ({why})")


# What was read --------------------------------------------------------------------------------------


class _Conversion:
    """Turns what torch made into plain values; each container once, however often it is referred to."""

    def __init__(self, files: Folder, name: str, held: _Held) -> None:
        self._files, self._name, self._held = files, name, held
        self._done: dict[int, Any] = {}
        self._tensors: list[torch.Tensor] = []

    def run(self, value: Any) -> _Opened:
        return _Opened(self._converted(value, 0), self._tensors)

    def _converted(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, Opaque)):
            return value
        import torch

        if isinstance(value, (torch.dtype, torch.device, torch.layout)):
            return str(value)
        if id(value) not in self._done:
            if depth > _DEEPEST:
                raise Damaged(f"{self._held.place} is nested without end")
            self._done[id(value)] = self._made(value, depth + 1)
        return self._done[id(value)]

    def _made(self, value: Any, depth: int) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            return {self._converted(k, depth): self._converted(item, depth) for k, item in value.items()}
        if isinstance(value, (list, tuple, set)):
            kind = next(kind for kind in (list, tuple, set) if isinstance(value, kind))
            return kind(self._converted(item, depth) for item in value)
        return Opaque(f"{type(value).__module__}.{type(value).__qualname__}")

    def _tensor(self, value: torch.Tensor) -> Unread | Opaque:
        import torch

        files, name, place, number = self._files, self._name, self._held.place, len(self._tensors)
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        if value.is_nested or value.layout != torch.strided or value.device.type != "cpu":
            return Opaque(f"a tensor that is {'nested' if value.is_nested else value.layout} on {value.device}")
        if dtype not in STORED or dtype == "complex32":  # quantised ones too
            return Opaque(f"a tensor of {dtype}")
        if value.is_conj() or value.is_neg():
            return Opaque("a conjugated or negated view")
        length = value.untyped_storage().nbytes()
        if length and not self._held.has(value.untyped_storage().data_ptr(), length):
            raise Damaged(f"{place} has a tensor of {length} bytes that were not saved in it")
        if value.nbytes > max(_LARGEST, 4 * length):
            raise Unsupported(
                f"{place} holds an expanded view: {value.nbytes} bytes told of {length} that were saved; "
                "save the tensor before it is expanded"
            )

        def again() -> torch.Tensor:
            tensors = _opened(files, name, _stamp(path_of(files, name))).tensors
            if len(tensors) <= number:
                raise Damaged(f"{place} is not what it was when it was opened")
            return tensors[number]

        self._tensors.append(value.detach())
        return mapped(dtype, shape, place, again)
