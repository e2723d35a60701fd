"""What `torch.save` wrote, read without torch and without unpickling anything.

    saved(files, "layer_30_output.pt")      # an Extent: dtype and shape known, no value read
    saved(files, "statistics.pt")           # plain Python values

A pickle is a program; here nobody runs it. Its instructions are listed by `pickletools` and followed by a machine that
knows numbers, texts, containers and torch's tensors (what `weights_only=True` knows). Anything else becomes an Opaque
with its name, for the caller to refuse. Both of torch's formats are read: the zip archive, and the older stream.
"""

from __future__ import annotations

import io
import pickletools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from layerscope.errors import Damaged, Unsupported
from layerscope.store.address import Folder
from layerscope.store.dtypes import STORED, stored
from layerscope.store.layouts.archives import Member, is_zip, members
from layerscope.store.layouts.extents import Extent

__all__ = ["Opaque", "leaves", "saved", "tensor_in"]

# Pickles beside tensors are small; this one would be a list of a million numbers.
_LARGEST = 64 << 20
_USUAL = 1 << 20
_MOST_LEAVES = 100_000
_DEEPEST = 64
_LEGACY = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")

_STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_DTYPES = {f"torch.{name}" for name in STORED}
# What following a pickle of damaged bytes may come to; `pickletools` warns of escapes that no pickle has.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, EOFError, OverflowError, Warning)


@dataclass(frozen=True, slots=True)
class Opaque:
    """Something that only unpickling could make, by the name of its class or function."""

    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    """The bytes behind tensors: `dtype` is None when the tensor says it."""

    dtype: str | None
    key: str
    count: int
    shift: int = 0  # elements, where it is a view of another


def saved(files: Folder, name: str) -> Any:
    """Read a file that `torch.save` wrote: plain values, with an Extent for each tensor and an Opaque for the rest.

    Raises Damaged when it is cut short or no such file, Unsupported for what is not saved values (TorchScript).
    """
    place = f"{files.address}/{name}"
    try:
        return _from_zip(files, name, place) if is_zip(files, name) else _from_stream(files, name, place)
    except (Damaged, Unsupported):
        raise
    except _UNREADABLE as error:
        raise Damaged(f"{place} is truncated or was not written by torch.save ({str(error)[:200]})") from error


def tensor_in(value: Any, place: str) -> Extent:
    """Return the tensor that a file holds; raises Unsupported with what it is instead."""
    if isinstance(value, Extent):
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
        if left < 0 or len(path) > _DEEPEST:
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


# The two formats ------------------------------------------------------------------------------------


def _from_zip(files: Folder, name: str, place: str) -> Any:
    by_name: dict[str, Member] = {}
    for member in members(files, name):
        by_name[member.name.partition("/")[2]] = member
    if "constants.pkl" in by_name or any(key.startswith("code/") for key in by_name):
        raise Unsupported(f"{place} is a TorchScript archive, a model and not a saved tensor")
    if "data.pkl" not in by_name:
        raise Damaged(f"{place} is a zip archive that torch.save did not write: there is no data.pkl in it")
    order = by_name.get("byteorder")
    swapped = order is not None and order.start(8) != sys.byteorder.encode()
    pickled = by_name["data.pkl"]
    if pickled.size > _LARGEST:
        raise Unsupported(f"{place} has a pickle of {pickled.size} bytes; values are expected to be saved as tensors")

    def extent(storage: _Storage, facts: _Facts) -> Extent:
        member = by_name.get(f"data/{storage.key}")
        if member is None or member.offset is None:
            raise Damaged(f"{place} lacks the bytes of one of its tensors (data/{storage.key})")
        return _placed(files, name, member.offset, member.size, storage, facts, swapped)

    return _Machine(io.BytesIO(pickled.start(pickled.size)), extent).run()


def _from_stream(files: Folder, name: str, place: str) -> Any:
    """Read the pickles at the beginning of the file: a little of it first, for the tensors behind them are large."""
    try:
        return _followed(files, name, place, bytes(files.read(name, length=_USUAL)))
    except _UNREADABLE:
        if files.size(name) <= _USUAL:
            raise
        return _followed(files, name, place, bytes(files.read(name, length=_LARGEST)))


def _followed(files: Folder, name: str, place: str, head: bytes) -> Any:
    """Follow torch's format from before 1.6: five pickles, then the storages one after the other."""
    if _LEGACY not in head[:32]:
        if head[:1] == b"\x80":
            raise Unsupported(f"{place} is a plain pickle, and nothing is ever unpickled; save tensors with torch.save")
        found = f"it begins with {head[:8]!r}" if head else "it is empty"
        raise Damaged(f"{place} was not written by torch.save: {found}")
    stream = io.BytesIO(head)
    storages: dict[str, _Storage] = {}

    def note(storage: _Storage, facts: _Facts) -> None:
        storages[storage.key] = storage

    _Machine(stream, note).run()  # the magic number
    _Machine(stream, note).run()  # the version
    swapped = _Machine(stream, note).run()["little_endian"] != (sys.byteorder == "little")
    values = stream.tell()
    _Machine(stream, note).run()
    keys = _Machine(stream, note).run()
    at, size = stream.tell(), files.size(name)
    begins: dict[str, tuple[int, int]] = {}
    for key in keys:
        count = int.from_bytes(files.read(name, offset=at, length=8), sys.byteorder, signed=True)
        storage = storages.get(_text(key))
        length = count * stored((storage and storage.dtype) or "uint8").itemsize
        if not 0 <= length <= size - at - 8:
            raise Damaged(f"{place} is truncated: a storage states {length} bytes, and {max(0, size - at - 8)} follow")
        begins[key] = at + 8, length
        at += 8 + length
    stream.seek(values)  # once more, now that it is known where the bytes lie
    return _Machine(stream, lambda s, facts: _placed(files, name, *begins[s.key], s, facts, swapped)).run()


@dataclass(frozen=True, slots=True)
class _Facts:
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


def _placed(
    files: Folder, name: str, begins: int, length: int, storage: _Storage, facts: _Facts, swapped: bool
) -> Extent:
    """Put a tensor into its storage, once it is sure to lie inside."""
    itemsize = stored(facts.dtype).itemsize
    begin = begins + (facts.offset + storage.shift) * itemsize
    extent = Extent(files, name, begin, facts.dtype, facts.shape, facts.stride, swapped)
    if begin + extent.span > begins + length:
        raise Damaged(
            f"{files.address}/{name} is truncated: {facts.dtype} of shape {list(facts.shape)} does not fit into the "
            f"{length} bytes that were saved for it"
        )
    if extent.nbytes > max(_LARGEST, 4 * length):
        raise Unsupported(
            f"{files.address}/{name} holds an expanded view: {extent.nbytes} bytes told of {length} that were saved; "
            "save the tensor before it is expanded"
        )
    return extent


# The machine ----------------------------------------------------------------------------------------

_MARK = object()
_Place = Callable[[_Storage, _Facts], Any]


class _Machine:
    """Follows one pickle's instructions, and calls nothing that it names."""

    def __init__(self, stream: io.BytesIO, place: _Place) -> None:
        self._stream, self._place = stream, place
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        for code, value, _ in pickletools.genops(self._stream):
            if code.name == "STOP":
                return self._stack.pop()
            self._step(code.name, value)
        raise EOFError("it has no end")

    def _step(self, name: str, value: Any) -> None:
        stack = self._stack
        if name in ("PROTO", "FRAME"):
            return
        if name in _PUSHED:
            stack.append(value)
        elif name in _FRESH:
            stack.append(_FRESH[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[len(stack) - count :] = [tuple(stack[len(stack) - count :])]
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else int(value)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[int(value)])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "POP":
            stack.pop()
        elif name == "TUPLE":
            items = self._marked()
            stack.append(tuple(items))
        elif name in ("APPENDS", "SETITEMS", "ADDITEMS"):
            self._fill(self._marked())
        elif name == "APPEND":
            self._fill([stack.pop()])
        elif name == "SETITEM":
            item, key = stack.pop(), stack.pop()
            self._fill([key, item])
        elif name == "GLOBAL":
            stack.append(_named(*str(value).split(" ", 1)))
        elif name == "STACK_GLOBAL":
            word, module = stack.pop(), stack.pop()
            stack.append(_named(_text(module), _text(word)))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            stack.append(self._made(function, arguments))
        elif name == "BUILD":
            stack.pop()  # the state of what is opaque anyway, or the attributes of an OrderedDict
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        else:
            raise ValueError(f"a pickle instruction {name} that no tensor needs")

    def _marked(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("a pickle that closes what it did not open")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _fill(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, dict):
            target.update(zip(map(_key, items[::2]), items[1::2], strict=True))
        elif isinstance(target, set):
            target.update(map(_key, items))
        elif not isinstance(target, Opaque):
            raise TypeError(f"{type(target).__name__} takes no items")

    def _made(self, function: Any, arguments: Any) -> Any:
        name = function.name if isinstance(function, Opaque) else ""
        if name in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor"):
            return self._tensor(*arguments[:4], metadata=arguments[6:7])
        if name == "torch._utils._rebuild_tensor_v3":
            return self._tensor(*arguments[:4], dtype=arguments[6], metadata=arguments[7:8])
        if name == "torch._utils._rebuild_parameter":
            return arguments[0]
        if name == "collections.OrderedDict":
            return {_key(key): item for pairs in arguments for key, item in pairs}
        if name in ("builtins.set", "__builtin__.set"):
            return {_key(item) for items in arguments for item in items}
        if name == "_codecs.encode":
            return arguments[0].encode("latin-1")  # how the older protocols write bytes
        if name == "torch.Size":
            return tuple(arguments[0])
        if name == "torch.device":
            return ":".join(str(_key(part)) for part in arguments)
        return function

    def _tensor(
        self, storage: Any, offset: int, shape: Any, stride: Any, *, dtype: str | None = None, metadata: Any = ()
    ) -> Any:
        if isinstance(storage, Opaque):
            return storage  # quantised: its numbers mean nothing without the scale
        if any(metadata):
            return Opaque("a conjugated or negated view")
        kind = (dtype or "").removeprefix("torch.") or storage.dtype
        if kind not in STORED or kind == "complex32":
            return Opaque(f"a tensor of {kind}")
        numbers = (offset, *shape, *stride)
        if len(shape) != len(stride) or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            raise ValueError("a tensor whose shape or strides are none")
        return self._place(storage, _Facts(offset, tuple(shape), tuple(stride), kind))


def _named(module: str, word: str) -> Any:
    """Return what a global stands for: a dtype's text, or a name that nobody looks up."""
    name = f"{module}.{word}"
    return name if name in _DTYPES else Opaque(name)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name that is {type(value).__name__}")
    return value


def _key(value: Any) -> Any:
    """Refuse what is long to hash or to print: tuples within tuples may double at each level."""
    parts = value if isinstance(value, tuple) else (value,)
    if not all(part is None or isinstance(part, (str, int, float, bytes, Opaque)) for part in parts):
        raise TypeError("a key that is neither text nor number")
    return value


def _storage(identity: Any) -> Any:
    kind, storage_type, key, _, count, *view = identity
    word = storage_type.name.rpartition(".")[2] if isinstance(storage_type, Opaque) else ""
    if kind != "storage" or type(count) is not int or count < 0:
        raise ValueError(f"a persistent id {kind!r}")
    if word not in _STORAGES and word != "UntypedStorage":
        return Opaque(f"a {word}")
    # The older stream may make one storage a view of another: its own key, where it begins, how long it is.
    shift = int(view[0][1]) if view and view[0] else 0
    return _Storage(_STORAGES.get(word), _text(key), count, shift)


_PUSHED = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_FRESH: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
