"""msprobe's dumps (`mindstudio-probe`): `step{n}/rank{r}/dump.json`, beside it `dump_tensor_data/*.pt`.

    open_run("dump_path"); open_run("dump_path/step0"); open_run("dump_path/step0/rank0/dump.json")

`Module.<name>.<Class>.forward.<n>` is a module's n-th call, `Torch.softmax.<n>.forward` the n-th call of an operation.
What msprobe calls the input of a backward is the gradient at the module's output, and the other way round. It lists
every output, so that a tensor and a tuple of one tensor look the same: both are read as the tensor. `dump.json` is
filled every thousand calls and when the debugger stops; what a killed run left is read by the names of its files.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerscope.errors import Damaged, LayerscopeError
from layerscope.points import Leaf, Moment, Point, Side, unwrapped
from layerscope.store.address import Folder
from layerscope.store.dtypes import STORED
from layerscope.store.layouts.arrays import npy
from layerscope.store.layouts.foreign import foreign_run
from layerscope.store.layouts.place import DumpPlace
from layerscope.store.layouts.torchfiles import saved, tensor_in
from layerscope.store.layouts.unread import Unread, later
from layerscope.store.manifest import Missing
from layerscope.store.run import Run
from layerscope.store.source import Item

_DUMP = "dump.json"
_TENSORS = "dump_tensor_data"
_BESIDE = {_TENSORS, "construct.json", "stack.json"}
_STEP = re.compile(r"step(\d{1,18})")
_RANK = re.compile(r"(rank|proc)(\d{1,18})")
_MODULE = re.compile(
    r"(?:Module|Cell)\.(?:(?P<name>.+)\.)?(?P<kind>[^.]+)\.(?P<stage>forward|backward|parameters_grad)\.(?P<call>\d{1,18})"
)
_OPERATION = re.compile(r"(?P<name>.+)\.(?P<call>\d{1,18})\.(?P<stage>forward|backward)")
_FILE = re.compile(
    r"(?P<of>.+\.(?:(?:for|back)ward\.\d+|\d+\.(?:for|back)ward))\.(?P<part>input|kwargs|output)\.(?P<leaf>.+)\.(?:pt|npy)"
)
_DEEPEST = 100
# What was not read, for the notes.
_STATISTICS = "tensors without their values"
_PARAMETERS = "parameters"
_GRADIENTS = "gradients of parameters"
_OTHERS = "entries that are no call of a module or an operation"


@dataclass(frozen=True, slots=True)
class _MsprobePart:
    """The folder of one rank at one step: where it lies below what was opened, and what it is called."""

    path: str
    step: int = 0
    process: tuple[str, int] = ("rank", 0)

    def inside(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name


def recognise(place: DumpPlace) -> Run | None:
    """Read a dump of msprobe, one of its steps, or one rank of a step."""
    if place.file not in (None, _DUMP):
        return None
    parts = [part for part in _parts(place.files) if _is_dump(place.files, part)]
    if not parts:
        return None
    reading = _MsprobeDump(place.files, parts)
    items = list(reading.items())
    if not items and reading.damage:
        raise Damaged(f"{place.address}: {reading.damage[0]}")
    settings = {key: value for key, value in reading.about.items() if isinstance(value, str)}
    about: dict[str, Any] = {"runtime": "msprobe", "settings": settings}
    return foreign_run(place.address, "msprobe", items, notes=reading.notes(), missing=reading.missing, **about)


def _parts(files: Folder) -> list[_MsprobePart]:
    """List the folders that may hold a `dump.json`, whichever level of the dump was opened."""
    names, here = files.names(), files.address.replace("\\", "/").rstrip("/").split("/")
    if _DUMP in names:
        step = next((int(m[1]) for part in here[-2:] if (m := _STEP.fullmatch(part))), 0)
        return [_MsprobePart("", step, _process(here[-1]) or ("rank", 0))]
    steps = {name: int(m[1]) for name in names if (m := _STEP.fullmatch(name))}
    if not steps:
        own = _STEP.fullmatch(here[-1])
        return [_MsprobePart(n, int(own[1]) if own else 0, p) for n in names if (p := _process(n))]
    return [
        _MsprobePart(f"{name}/{sub}", step, process)
        for name, step in sorted(steps.items(), key=lambda each: each[1])
        for sub in files.names(name)
        if (process := _process(sub))
    ]


def _process(name: str) -> tuple[str, int] | None:
    match = _RANK.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def _is_dump(files: Folder, part: _MsprobePart) -> bool:
    names = files.names(part.path)
    if _DUMP not in names:
        return False
    head = bytes(files.read(part.inside(_DUMP), length=4096))
    says = head.lstrip().startswith(b"{") and b'"task"' in head and b'"level"' in head
    return says or (not head.strip() and len(_BESIDE.intersection(names)) > 1)


class _MsprobeDump:
    """The parts of one dump as items, and what was odd about them."""

    def __init__(self, files: Folder, parts: Sequence[_MsprobePart]) -> None:
        self._files, self._parts = files, parts
        self.about: dict[str, Any] = {}
        self.missing: list[Missing] = []
        self.damage: list[str] = []
        self._left_out: Counter[str] = Counter()
        self._listed: set[tuple[_MsprobePart, str]] = set()
        self._several: set[tuple[str, bool, Moment]] = set()
        # A process without a rank is called by its number; they are counted.
        processes = sorted({p.process[1] for p in parts if p.process[0] == "proc"})
        self._ranks = {("proc", number): rank for rank, number in enumerate(processes)}

    def items(self) -> Iterator[Item]:
        for part in self._parts:
            there = self._files.names(part.inside(_TENSORS))
            try:
                dump = _read(self._files, part)
            except Damaged as error:
                self.damage.append(str(error))
                dump = {"data": {}}
            self.about = self.about or {key: value for key, value in dump.items() if key != "data"}
            files = set(there)
            for name, entry in dump["data"].items():
                yield from self._entry(name, entry, part, files)
            unlisted = [file for file in there if (part, file) not in self._listed]
            yield from self._by_names(part, unlisted, is_empty=not dump["data"])

    def _entry(self, name: str, entry: Any, part: _MsprobePart, there: set[str]) -> Iterator[Item]:
        call = self._call(name, part)
        if call is None or not isinstance(entry, dict):
            self._left_out[_OTHERS] += 1
        elif call.stage == "parameters_grad":
            self._left_out[_GRADIENTS] += len(entry)
        else:
            parameters = entry.get("parameters")
            self._left_out[_PARAMETERS] += len(parameters) if isinstance(parameters, dict) else 0
            outputs = entry.get(call.collapsing)
            if isinstance(outputs, list) and len(outputs) > 1:
                self._several.add(call.which)
            for section, leaf, said in _tensors(entry, backward=call.stage == "backward"):
                yield self._item(call, call.point(section, leaf), said, part, there)

    def _item(self, call: _Call, point: Point, said: dict[str, Any], part: _MsprobePart, there: set[str]) -> Item:
        dtype, shape = said["dtype"].rpartition(".")[2].lower(), tuple(said["shape"])
        stated = {key: value for key, value in said.items() if key not in ("type", "dtype", "shape", "data_name")}
        note = {**call.note, **stated}
        file = said.get("data_name")
        if isinstance(file, str):
            self._listed.add((part, file))
        if isinstance(file, str) and file in there and dtype in STORED:
            unread = later(self._files, part.inside(f"{_TENSORS}/{file}"), dtype, shape, _opened, _DUMP)
            return unread.item(point, call.moment, note=note)
        if isinstance(file, str):
            why = f"no dtype {dtype} is known" if file in there else f"{part.inside(_TENSORS)}/{file} is not there"
            self.missing.append(Missing(str(point), why))
        else:
            self._left_out[_STATISTICS] += 1
        return Item(point, call.moment, None, None, 0, None, note={**note, "dtype": dtype, "shape": list(shape)})

    def _by_names(self, part: _MsprobePart, names: Sequence[str], *, is_empty: bool) -> Iterator[Item]:
        """Read what a killed run left: the names of the files say nearly all that `dump.json` would have."""
        found = [
            (match, call)
            for name in names
            if (match := _FILE.fullmatch(name)) and (call := self._call(match["of"], part)) is not None
        ]
        for match, call in found:
            if match["part"] == call.collapsing and match["leaf"].partition(".")[0] != "0":
                self._several.add(call.which)
        read = 0
        for match, call in found:
            leaf: Leaf = tuple(int(key) if key.isdecimal() else key for key in match["leaf"].split("."))
            if match["part"] == call.collapsing and call.which not in self._several:
                leaf = leaf[1:]
            point = call.point(match["part"], leaf)
            try:
                unread = _opened(self._files, part.inside(f"{_TENSORS}/{match[0]}"))
            except LayerscopeError as error:
                self.missing.append(Missing(str(point), str(error)))
                continue
            read += 1
            yield unread.item(point, call.moment, note=call.note)
        if found:
            self.damage.append(
                f"{part.inside(_DUMP)} does not list everything, as msprobe was ended before the debugger stopped: "
                f"{read} tensors are read by the names of their files, and come in the order of these names"
            )
        elif is_empty:
            self.damage.append(f"{part.inside(_DUMP)} lists nothing, and no tensors lie beside it")

    def _call(self, name: str, part: _MsprobePart) -> _Call | None:
        match = _MODULE.fullmatch(name) or _OPERATION.fullmatch(name)
        if match is None:
            return None
        rank = self._ranks.get(part.process, part.process[1])
        moment = Moment(step=part.step, batch=part.step, call=int(match["call"]), rank=rank)
        if match.re is _OPERATION:
            return _Call(match["name"], match["stage"], moment, {}, is_operation=True)
        return _Call(unwrapped(match["name"] or ""), match["stage"], moment, {"class": match["kind"]})

    def notes(self) -> Iterator[str]:
        yield from self.damage
        if statistics := self._left_out.pop(_STATISTICS, 0):
            yield (
                f"{statistics} tensors were not kept, only Max, Min, Mean and Norm of each: these are in the notes of "
                "the records, and too little to make a summary of"
            )
        if self.missing:
            yield f"{len(self.missing)} tensors that msprobe speaks of cannot be read: {self.missing[0].reason}"
        left = [f"{count} {what}" for what, count in self._left_out.items() if count]
        if left:
            yield f"not read: {', '.join(left)}"
        if len(self._ranks) > 1:
            order = ", ".join(f"proc{number}" for _, number in self._ranks)
            yield f"the processes have no ranks of their own, and are counted: {order}"


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a module or an operation, forward or backward."""

    name: str
    stage: str
    moment: Moment
    note: dict[str, Any]
    is_operation: bool = False

    @property
    def which(self) -> tuple[str, bool, Moment]:
        """What forward and backward of one call have in common."""
        return self.name, self.is_operation, self.moment

    @property
    def collapsing(self) -> str:
        """The section that lists the module's outputs, one for a tensor that is alone."""
        return "input" if self.stage == "backward" else "output"

    def point(self, section: str, leaf: Leaf) -> Point:
        sides = _BACKWARD if self.stage == "backward" else _FORWARD
        return Point(self.name, sides[section], leaf, self.is_operation)


_FORWARD: dict[str, Side] = {"input": "input", "kwargs": "input", "output": "output"}
_BACKWARD: dict[str, Side] = {"input": "grad_output", "kwargs": "grad_input", "output": "grad_input"}


def _read(files: Folder, part: _MsprobePart) -> dict[str, Any]:
    """Return what a `dump.json` says; numbers may be NaN or Infinity, as Python's own writer has them."""
    place = f"{files.address}/{part.inside(_DUMP)}"
    try:
        dump = json.loads(files.read(part.inside(_DUMP)))
    except (ValueError, RecursionError) as error:
        raise Damaged(
            f"{place} is not whole ({error}); msprobe writes it when the debugger stops, so the dump was cut short"
        ) from error
    if not isinstance(dump, dict) or not isinstance(dump.get("data"), dict):
        raise Damaged(f"{place} has no 'data' in it; msprobe writes it when the debugger stops")
    return dump


def _tensors(entry: Mapping[str, Any], *, backward: bool) -> Iterator[tuple[str, Leaf, dict[str, Any]]]:
    """Go through the tensors of a call, in the order of the call: section, leaf, and what is said of it."""
    sections: tuple[tuple[str, Any], ...]
    if backward:
        sections = (("input", _unpacked(entry.get("input"))), ("output", entry.get("output")))
    else:
        arguments = (("input", entry.get("input_args")), ("kwargs", entry.get("input_kwargs")))
        sections = (*arguments, ("output", _unpacked(entry.get("output"))))
    for section, value in sections:
        yield from ((section, leaf, said) for leaf, said in _walk(value, ()))


def _unpacked(values: Any) -> Any:
    return values[0] if isinstance(values, list) and len(values) == 1 else values


def _walk(value: Any, leaf: Leaf) -> Iterator[tuple[Leaf, dict[str, Any]]]:
    if len(leaf) > _DEEPEST:
        return
    if isinstance(value, list):
        for at, child in enumerate(value):
            yield from _walk(child, (*leaf, at))
    elif isinstance(value, dict) and not isinstance(value.get("type"), str):
        for key, child in value.items():
            yield from _walk(child, (*leaf, key))
    elif isinstance(value, dict) and _is_tensor(value):
        yield leaf, value


def _is_tensor(said: Mapping[str, Any]) -> bool:
    shape = said.get("shape")
    return (
        isinstance(said.get("dtype"), str) and isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    )


def _opened(files: Folder, name: str) -> Unread:
    return npy(files, name) if name.endswith(".npy") else tensor_in(saved(files, name), f"{files.address}/{name}")
