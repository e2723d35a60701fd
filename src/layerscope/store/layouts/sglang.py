"""SGLang's dumps: one `.pt` per tensor, its tags in the file's name, `{"value": ..., "meta": ...}` inside.

    open_run("dumper/dump_20261115_094500_123456")      # or dumper, where there is one such folder in it
    run.tensor("model.layers.3.mlp", step=1, rank=0)    # step=1___rank=0___dump_index=77___name=...

What the hooks saw (`non_intrusive__NAME.output`, `NAME.inputs.0`) is at the module's point. A name that the user gave
a tensor is a point of its own, `layers.{layer_id}.NAME` where it has that tag; other tags are in the record's note.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from layerscope.errors import LayerscopeError
from layerscope.points import Leaf, Moment, Point, Side, unwrapped
from layerscope.store.address import Folder, folder
from layerscope.store.layouts.foreign import foreign_run
from layerscope.store.layouts.place import DumpPlace
from layerscope.store.layouts.torchfiles import Opaque, leaves, saved
from layerscope.store.layouts.unread import Unread
from layerscope.store.manifest import Missing
from layerscope.store.run import Run
from layerscope.store.source import Item
from layerscope.store.strictjson import JSON

_BETWEEN = re.compile(r"___(?=[A-Za-z](?:(?!___)\w)*=)")
_TAG = re.compile(r"([A-Za-z]\w*)=(.*)", re.DOTALL)
_STEPS = ("step", "curr_step", "forward_pass_id")  # as it was called over the years
_COUNT = re.compile(r"\d{1,18}")
# The module's name may itself have a part called `output`: what the side is stands last.
_HOOKED = re.compile(r"(?:(?P<module>.+)\.)?(?:inputs\.(?P<argument>[^.]+)|output)(?:\.(?P<key>[^.]+))?")
_GRADIENT, _PARAMETER, _BY_HOOK = "grad__", "param__", "non_intrusive__"
_EXPERIMENT = "dump_"
_DEEPEST = 16


@dataclass(frozen=True, slots=True)
class _File:
    """One file, by the tags in its name."""

    file: str
    name: str
    step: int
    rank: int
    number: int
    tags: Mapping[str, str]

    @classmethod
    def parse(cls, file: str) -> _File | None:
        """Read a file's name; None when it is not one of these."""
        if not file.endswith(".pt"):
            return None
        found = [_TAG.fullmatch(tag) for tag in _BETWEEN.split(file.removesuffix(".pt"))]
        tags = {match[1]: match[2] for match in found if match is not None}
        step = next((tags.pop(key) for key in _STEPS if key in tags), "")
        rank, number, name = tags.pop("rank", ""), tags.pop("dump_index", ""), tags.pop("name", None)
        if None in found or name is None or not all(map(_COUNT.fullmatch, (step, rank, number))):
            return None
        return cls(file, name, int(step), int(rank), int(number), tags)


def recognise(place: DumpPlace) -> Run | None:
    """Read a dump, one tensor of it, or one of the dumps in a folder: these are its modes, by their names."""
    names = place.files.names() if place.file is None else [place.file]
    if found := _among(names):
        return _run(place, found)
    dumps = {
        name: found
        for name in names
        if place.file is None and name.startswith(_EXPERIMENT) and (found := _among(place.files.names(name)))
    }
    if not dumps:
        return None
    mode = place.choose(list(dumps))
    return _run(DumpPlace(folder(f"{place.address}/{mode}")), dumps[mode], mode=mode)


def _among(names: Sequence[str]) -> list[_File]:
    return [parsed for name in names if (parsed := _File.parse(name)) is not None]


def _run(place: DumpPlace, found: Sequence[_File], *, mode: str | None = None) -> Run:
    reading = _SglangDump(place.files, sorted(found, key=lambda each: (each.rank, each.number)))
    items = list(reading.items())
    about: dict[str, Any] = {"mode": mode, "runtime": "sglang", "aliases": reading.aliases}
    return foreign_run(place.address, "sglang", items, notes=reading.notes(), missing=reading.missing, **about)


class _SglangDump:
    """The files of one dump as items, and what was odd about them."""

    def __init__(self, files: Folder, found: Sequence[_File]) -> None:
        self._files, self._found = files, found
        self._calls: Counter[tuple[Point, int, int]] = Counter()
        self._left_out: Counter[str] = Counter()
        self.aliases: dict[str, list[str]] = {}
        self.missing: list[Missing] = []

    def items(self) -> Iterator[Item]:
        """Return the tensors in the order they were dumped."""
        for each in self._found:
            point = _point(each)
            if point is None:
                self._left_out["parameters or their gradients"] += 1
            elif each.tags.get("recompute_status") == "recompute":
                self._left_out["tensors that were computed again for the backward"] += 1
            else:
                yield from self._tensors(each, point)

    def notes(self) -> Iterator[str]:
        """Say what is not there, and what was not joined."""
        left = [f"{count} {what}" for what, count in self._left_out.items()]
        if left:
            yield f"not read: {', '.join(left)}"
        if self.missing:
            yield f"{len(self.missing)} tensors cannot be read: {self.missing[0].reason}"
        if any(each.name.startswith(_GRADIENT) for each in self._found):
            yield "gradients are those of the tensors, from all that used them, inside the module and outside"
        ranks = {each.rank for each in self._found}
        if len(ranks) > 1:
            yield (
                f"the tensors of {len(ranks)} ranks are read as they are: those that are shards of one are not joined "
                "(what the dump says of their `dims` is in the notes of the records)"
            )

    def _tensors(self, each: _File, point: Point) -> Iterator[Item]:
        try:
            content = saved(self._files, each.file)
            is_wrapped = isinstance(content, dict) and "value" in content
            value, meta = (content["value"], content.get("meta")) if is_wrapped else (content, None)
            found = list(leaves(value, f"{self._files.address}/{each.file}"))
        except LayerscopeError as error:
            self.missing.append(Missing(str(point), str(error)))
            return
        note = {**each.tags, **_said(meta, each)}
        for path, leaf in found:
            here = Point(point.name, point.side, (*point.leaf, *path))
            if isinstance(leaf, Unread):
                key = here, each.step, each.rank
                moment = Moment(step=each.step, batch=each.step, call=self._calls[key], rank=each.rank)
                self._calls[key] += 1
                if here.name != each.name:
                    aliased = self.aliases.setdefault(each.name, [])
                    aliased += [] if str(here) in aliased else [str(here)]
                yield leaf.item(here, moment, note=note)
            elif isinstance(leaf, Opaque):
                why = f"{each.file} needs unpickling of {leaf.name}, which is never done"
                self.missing.append(Missing(str(here), why))
            else:
                self._left_out["values that are no tensors"] += 1


def _point(each: _File) -> Point | None:
    """Return the point of a file; None when it is a parameter's."""
    graded = each.name.startswith(_GRADIENT)
    name = each.name.removeprefix(_GRADIENT)
    if name.startswith(_PARAMETER):
        return None
    hooked = _HOOKED.fullmatch(name.removeprefix(_BY_HOOK)) if name.startswith(_BY_HOOK) else None
    if hooked is None:
        layer = each.tags.get("layer_id", "")
        name = f"layers.{layer}.{name}" if _COUNT.fullmatch(layer) else name
        return Point(name, "grad_output" if graded else "output")
    side = "output" if hooked["argument"] is None else "input"
    keys = [key for key in (hooked["argument"], hooked["key"]) if key is not None]
    leaf: Leaf = tuple(int(key) if _COUNT.fullmatch(key) else key for key in keys)
    return Point(unwrapped(hooked["module"] or ""), cast(Side, f"grad_{side}" if graded else side), leaf)


def _said(meta: Any, each: _File) -> dict[str, JSON]:
    """Return what `meta` says on top of the name: dims, sizes of the parallel groups."""
    known = {*each.tags, *_STEPS, "name", "rank", "dump_index"}
    plain = _plain(meta, 0) if isinstance(meta, dict) else {}
    return {key: value for key, value in plain.items() if key not in known} if isinstance(plain, dict) else {}


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, dict) and depth < _DEEPEST:
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and depth < _DEEPEST:
        return [_plain(item, depth + 1) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
