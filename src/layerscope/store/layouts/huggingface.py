"""What transformers' `model_addition_debugger_context` leaves: a call tree in JSON, tensors beside it in safetensors.

    with model_addition_debugger_context(model, debug_path="trace", use_repr=False): model(**inputs)
    open_run("trace")       # or trace/LlamaForCausalLM_debug_tree_FULL_TENSORS.json

With `use_repr=True` (its default) the tree has tensors as printed text: rounded to a few digits and, when large, with
most values left out. No tensor is made of that; shape, dtype and the four printed statistics are in the records' notes.
By default it also prunes the tree to the first and the last layer; the files of the others are still there, and read.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from layerscope.errors import Ambiguous, Damaged, LayerscopeError, Unsupported
from layerscope.points import Leaf, Moment, Point, unwrapped
from layerscope.store.address import Folder
from layerscope.store.dtypes import STORED
from layerscope.store.layouts.copies import path_of
from layerscope.store.layouts.foreign import foreign_run
from layerscope.store.layouts.place import DumpPlace
from layerscope.store.layouts.unread import Unread, later, mapped
from layerscope.store.manifest import Missing
from layerscope.store.run import Run
from layerscope.store.source import Item

if TYPE_CHECKING:
    import torch

_TREES = ("_debug_tree_FULL_TENSORS.json", "_debug_tree_SUMMARY.json")
_TENSORS = ".safetensors"
_SIZE = re.compile(r"torch\.Size\(\[([\d, ]*)\]\)")
_PRINTED = re.compile(r"tensor\((-?(?:nan|inf|[\d.]+(?:e[+-]?\d+)?))[,)]")
_NUMBER = re.compile(r"(?<=\.)\d+(?=[._])")
_STATISTICS = ("mean", "std", "min", "max")
_DTYPES = {known.code: name for name, known in STORED.items() if known.trailing == 1}
_DEEPEST = 100


@dataclass(frozen=True, slots=True)
class _Seen:
    """One tensor of the tree: `file` is where its values are, None when they were printed or left out."""

    point: Point
    moment: Moment
    dtype: str
    shape: tuple[int, ...]
    file: str | None
    said: Mapping[str, Any]


def recognise(place: DumpPlace) -> Run | None:
    """Read a trace: the folder, or one of the two trees in it."""
    trees = [name for name in place.files.names() if name.endswith(_TREES)]
    if place.file is not None:
        trees = [place.file] if place.file in trees else []
    models = sorted({_model(name) for name in trees})
    if not trees:
        return None
    if len(models) > 1:
        raise Ambiguous(
            f"{place.address} holds traces of {', '.join(models)}; open the file of one, as {place.address}/{trees[0]}"
        )
    name = next((name for name in trees if name.endswith(_TREES[0])), trees[0])
    model = models[0]
    tree = _read(place.files, name)
    if tree.get("module_path") != model:
        return None
    reading = _DebuggerDump(place.files, model, tree)
    items = reading.items()
    about: dict[str, Any] = {"model": {"class": model}, "runtime": "transformers"}
    return foreign_run(place.address, "huggingface", items, notes=reading.notes(), missing=reading.missing, **about)


def _model(name: str) -> str:
    return name.removesuffix(_TREES[0]).removesuffix(_TREES[1])


def _read(files: Folder, name: str) -> dict[str, Any]:
    try:
        tree = json.loads(files.read(name))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{files.address}/{name} is not whole ({error})") from error
    return tree if isinstance(tree, dict) else {}


class _DebuggerDump:
    """The tensors of one call tree as items, and what was odd about them."""

    def __init__(self, files: Folder, model: str, tree: dict[str, Any]) -> None:
        self._files, self._model = files, model
        self._there = {name for name in files.names() if name.startswith(model) and name.endswith(_TENSORS)}
        self._calls: Counter[str] = Counter()
        self._seen = list(self._node(tree, 0))
        self._count: Counter[str] = Counter()
        self.missing: list[Missing] = []

    def items(self) -> list[Item]:
        """Return the tensors in the order they were computed."""
        last = {seen.file: n for n, seen in enumerate(self._seen)}
        pruned = self._pruned()
        items: list[Item] = []
        for n, seen in enumerate(self._seen):
            if seen.file is None:
                self._count["printed"] += 1
            elif last[seen.file] != n:
                self._count["overwritten"] += 1
            items.append(self._item(seen, is_there=last[seen.file] == n))
            items += pruned.pop(n, ())
        return [*items, *(item for rest in pruned.values() for item in rest)]

    def notes(self) -> Iterator[str]:
        yield "the debugger keeps the inputs of every module, and the outputs of those that have no modules in them"
        count = self._count
        if count["printed"]:
            yield (
                f"{count['printed']} tensors were printed and not kept: rounded, and with values left out. Their "
                "dtype, shape and printed mean, std (of a sample), min and max are in the notes of the records; "
                "use_repr=False keeps tensors"
            )
        if count["overwritten"]:
            yield (
                f"{count['overwritten']} tensors were overwritten when their module was called again: the debugger has "
                "one file for all calls, and those of the last one are there"
            )
        for between in self._gaps():
            yield f"{between} were pruned from the call tree, as the debugger does unless do_prune_layers=False"
        if count["pruned"]:
            yield f"{count['pruned']} tensors are not in the call tree, and are read by the names of their files"
        if count["unknown"]:
            yield f"{count['unknown']} files that the call tree does not name are not read"
        if self.missing:
            yield f"{len(self.missing)} tensors cannot be read: {self.missing[0].reason}"

    # The call tree ------------------------------------------------------------------------------

    def _node(self, node: Any, depth: int) -> Iterator[_Seen]:
        if not isinstance(node, dict) or not isinstance(node.get("module_path"), str) or depth > _DEEPEST:
            return
        name = unwrapped(node["module_path"].removeprefix(self._model).removeprefix("."))
        moment = Moment(call=self._calls[name])
        self._calls[name] += 1
        inputs, children = node.get("inputs"), node.get("children")
        if isinstance(inputs, dict):
            yield from _tensors(Point(name, "input"), moment, inputs.get("args"))
            yield from _tensors(Point(name, "input"), moment, inputs.get("kwargs"))
        for child in children if isinstance(children, list) else ():
            yield from self._node(child, depth + 1)
        yield from _tensors(Point(name), moment, node.get("outputs"))

    def _item(self, seen: _Seen, *, is_there: bool) -> Item:
        dtype, shape, file = seen.dtype, seen.shape, seen.file
        printed = {key: _printed(seen.said[key]) for key in _STATISTICS if key in seen.said}
        if file in self._there and is_there and dtype in STORED:
            unread = later(self._files, file, dtype, shape, _in_file, "the call tree")
            return unread.item(seen.point, seen.moment, note=printed)
        if file is not None and is_there:
            why = f"no dtype {dtype} is known" if file in self._there else f"{file} is not there"
            self.missing.append(Missing(str(seen.point), why))
        note = {**printed, "dtype": dtype, "shape": list(shape)}
        return Item(seen.point, seen.moment, None, None, 0, None, note=note)

    def _gaps(self) -> Iterator[str]:
        """Name the layers that were pruned from the tree: those between the first and the last one of a list."""
        lists: dict[str, set[int]] = {}
        for name in self._calls:
            prefix, _, number = name.rpartition(".")
            if number.isdecimal() and len(number) < 10:
                lists.setdefault(prefix, set()).add(int(number))
        for prefix, kept in lists.items():
            gone = max(kept) - min(kept) + 1 - len(kept)
            if gone:
                yield f"{gone} of {prefix}.{min(kept)} to {prefix}.{max(kept)}"

    # Files that the tree does not name ----------------------------------------------------------

    def _pruned(self) -> dict[int, list[Item]]:
        """Return the tensors of layers that were pruned from the tree, by the number of the one they come after."""
        named = {seen.file for seen in self._seen}
        rest = sorted(self._there - named)
        if named <= {None}:  # the tree printed its tensors, and these are an earlier trace's
            self._count["unknown"] = len(rest)
            return {}
        twins: dict[str, int] = {}
        for n, seen in enumerate(self._seen):
            for template, _, _ in _templates(seen.file or ""):
                twins.setdefault(template, n)
        found: dict[int, list[tuple[int, int, Item]]] = {}
        for file in rest:
            after, order, point = self._place(file, twins)
            if point is None:
                self._count["unknown"] += 1
                continue
            try:
                item = _in_file(self._files, file).item(point)
            except LayerscopeError as error:
                self.missing.append(Missing(str(point), str(error)))
                continue
            self._count["pruned"] += 1
            self._calls[point.name] += 1
            found.setdefault(after, []).append((*order, item))
        return {n: [item for _, _, item in sorted(items, key=lambda i: i[:2])] for n, items in found.items()}

    def _place(self, file: str, twins: Mapping[str, int]) -> tuple[int, tuple[int, int], Point | None]:
        """Say which tensor a file holds, by the file of the same tensor of another layer, and what it comes after."""
        for template, number, below in _templates(file):
            twin = twins.get(template)
            if twin is None:
                continue
            point = self._seen[twin].point
            parts = point.name.split(".")
            layer = ".".join(parts[: len(parts) - below])
            inside = (n for n, s in enumerate(self._seen) if f"{s.point.name}.".startswith(f"{layer}."))
            parts[len(parts) - 1 - below] = str(number)
            return max(inside), (number, twin), replace(point, name=".".join(parts))
        whole = re.fullmatch(rf"{re.escape(self._model)}_outputs(?:_(.+?))??((?:_\d+)*){re.escape(_TENSORS)}", file)
        if whole is None:
            return -1, (0, 0), None
        keys: Leaf = (*((whole[1],) if whole[1] else ()), *(int(at) for at in whole[2].split("_") if at))
        return len(self._seen), (0, 0), Point("", leaf=keys)


def _tensors(point: Point, moment: Moment, value: Any) -> Iterator[_Seen]:
    """Walk one side of a call; what is no tensor is text."""
    if len(point.leaf) > _DEEPEST:
        return
    children: Iterable[tuple[int | str, Any]] = ()
    if isinstance(value, list):
        children = enumerate(value)
    elif isinstance(value, dict):
        size = _SIZE.fullmatch(str(value.get("shape")))
        if size is not None and isinstance(value.get("dtype"), str):
            shape = tuple(int(n) for n in size[1].split(",") if n.strip())
            file = value.get("value")
            file = file.removeprefix("./") if isinstance(file, str) and file.endswith(_TENSORS) else None
            yield _Seen(point, moment, value["dtype"].removeprefix("torch."), shape, file, value)
            return
        children = value.items()
    for key, child in children:
        yield from _tensors(replace(point, leaf=(*point.leaf, key)), moment, child)


def _printed(text: Any) -> float | str:
    """Return a number that torch printed, with the digits that it printed."""
    match = _PRINTED.match(str(text))
    return float(match[1]) if match else str(text)


def _templates(file: str) -> Iterator[tuple[str, int, int]]:
    """Yield a file's name with one number of the module's name left open, that number, and how many parts follow it."""
    for match in _NUMBER.finditer(file):
        rest = file[match.end() : -len(_TENSORS)]
        yield f"{file[: match.start()]}#{file[match.end() :]}", int(match[0]), rest.count(".")


def _in_file(files: Folder, name: str) -> Unread:
    """Find the one tensor of a safetensors file; raises Damaged when the file is cut short or no such."""
    place = f"{files.address}/{name}"

    def again() -> torch.Tensor:
        with _safe(files, name) as file:
            return cast("torch.Tensor", file.get_tensor("data"))

    with _safe(files, name) as file:
        found = file.get_slice("data")
        dtype, shape = found.get_dtype(), tuple(found.get_shape())
    if dtype not in _DTYPES:
        raise Unsupported(f"{place} holds values of {dtype}, and no dtype of that name is known")
    return mapped(_DTYPES[dtype], shape, place, again)


@contextmanager
def _safe(files: Folder, name: str) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path_of(files, name), framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise
    except (SafetensorError, ValueError, OSError) as error:
        raise Damaged(f"{files.address}/{name} is truncated or has no tensor `data` ({error})") from error
