"""The Monitor's layout: `.pt` items with `epoch, batch_idx, layer, alias, output_shape, output`.

    open_run("monitor_outputs").tensor("attention_weights", epoch=5, batch=0)

They may lie in the folder itself or in folders of epochs below it. The step of an item is not known: it is the batch.
An item of a whole epoch has a list of batches: it stands at the first, and its note has them all.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from layerscope.errors import Damaged, LayerscopeError, RunExists, Unsupported
from layerscope.points import Leaf, Moment, Point
from layerscope.store.layouts.foreign import foreign_run
from layerscope.store.layouts.place import DumpPlace
from layerscope.store.layouts.torchfiles import Opaque, leaves, saved
from layerscope.store.layouts.unread import Unread
from layerscope.store.manifest import Missing
from layerscope.store.run import Run
from layerscope.store.source import Item

if TYPE_CHECKING:
    import torch

    from layerscope.store.layouts.convert import Job
    from layerscope.store.run import Entry

_NAME = re.compile(r"(single_)?epoch_\d+_\d{3,}\.pt")
_KEYS = {"epoch", "batch_idx", "layer", "output"}
# How many files are looked into before a folder is said not to be the Monitor's.
_LOOKED_AT = 8
# Of files elsewhere, larger ones are not fetched to look into: checkpoints end in .pt too.
_LARGEST = 1 << 30


def item_name(epoch: int | None, number: int) -> str:
    """Return the name of an item's file: numbered, never named after a layer."""
    return f"single_epoch_{epoch or 0}_{number:03d}.pt"


def recognise(place: DumpPlace) -> Run | None:
    """Read a folder of such items; None when none of its likeliest `.pt` files holds one."""
    names = _files(place)
    likely = sorted(names, key=lambda name: _NAME.fullmatch(name.rpartition("/")[2]) is None)
    if not any(_holds_items(place, name) for name in likely[:_LOOKED_AT]):
        return None
    items: list[Item] = []
    notes: list[str] = []
    missing: list[Missing] = []
    aliases: dict[str, list[str]] = {}
    for name in names:
        where = f"{place.files.address}/{name}"
        said = _said(saved(place.files, name))
        if not said:
            notes.append(f"{name} is none of the Monitor's items: it is passed over")
        for each in said:
            point, moment, note = _about(each, where)
            alias = each.get("alias")
            if isinstance(alias, str) and alias and alias != point.name:
                aliases[alias] = list(dict.fromkeys([*aliases.get(alias, []), str(point)]))
            for path, leaf in leaves(each["output"], where):
                here = Point(point.name, leaf=path)
                if isinstance(leaf, Unread):
                    items.append(leaf.item(here, moment, note=note))
                elif leaf is None:
                    missing.append(Missing(str(here), f"None at {moment}"))
                elif isinstance(leaf, Opaque):
                    raise Unsupported(f"{where} needs unpickling of {leaf.name}, which is never done")
                else:
                    notes.append(f"{name}: {here} is a {type(leaf).__name__}, no tensor: it is passed over")
    items.sort(key=lambda item: item.moment)
    return foreign_run(place.address, "monitor", items, notes=notes, missing=missing, aliases=aliases)


def _files(place: DumpPlace) -> list[str]:
    """List the `.pt` files here and one folder below."""
    found = []
    for name in place.names:
        if name.endswith(".pt"):
            found.append(name)
        elif "." not in name:
            found += [f"{name}/{below}" for below in place.files.names(name) if below.endswith(".pt")]
    return found


def _holds_items(place: DumpPlace, name: str) -> bool:
    try:
        return bool(_said(saved(place.files, name, most=_LARGEST)))
    except (LayerscopeError, OSError):
        return False


def _said(value: Any) -> list[dict[str, Any]]:
    """Return the items in a file: one, or a list of them."""
    several = value if isinstance(value, list) else [value]
    return several if all(isinstance(each, dict) and each.keys() >= _KEYS for each in several) else []


def _about(item: dict[str, Any], where: str) -> tuple[Point, Moment, dict[str, Any]]:
    epoch, batch, layer = item["epoch"], item["batch_idx"], item["layer"]
    batches = batch if isinstance(batch, (list, tuple)) else [batch]
    numbers = [*batches, *([] if epoch is None else [epoch])]
    if not isinstance(layer, str) or not batches or not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
        raise Damaged(f"{where}: its layer, epoch or batch_idx is not one")
    note = {"batches": list(batches)} if isinstance(batch, (list, tuple)) else {}
    return Point(layer), Moment(epoch=epoch, step=batches[0], batch=batches[0]), note


# Writing --------------------------------------------------------------------------------------------


def write(job: Job) -> None:
    """Write each output at each moment as an item; a module called several times in a batch leaves its last call."""
    from layerscope.store.layouts.files import FileBatch, write_pt
    from layerscope.store.layouts.neuron import own

    path = job.path
    there = [each.name for each in path.iterdir() if _NAME.fullmatch(each.name)] if path.is_dir() else []
    if there and not job.overwrite:
        raise RunExists(f"{path} already has {there[0]}; overwrite=True or --overwrite replaces it")
    places = [p for p in job.points if p.side == "output" and not p.op and (not p.leaf or type(p.leaf[0]) is int)]
    places = [p for p in places if len(p.leaf) < 2]
    groups: dict[tuple[str, int | None, int], dict[Point, Entry]] = {}
    for point in places:
        for entry in job.entries(point):
            moment = entry.moment
            group = groups.setdefault((point.name, moment.epoch, moment.batch), {})
            before = group.get(point)
            if before is not None:
                job.leave(point, f"{before.moment} gives way to {moment}: an item is one call of one batch", records=1)
            group[point] = entry
    if not groups:
        raise job.nothing("no output of a module")
    called = {text: alias for alias, texts in job.source.manifest.aliases.items() for text in texts}
    numbers: dict[int, int] = {}
    with FileBatch(path) as batch:
        for (name, epoch, number), group in sorted(groups.items(), key=lambda each: (each[0][1] or 0, each[0][2])):
            kept = {}
            for point, entry in group.items():
                if entry.dtype is None:
                    job.leave(point, "only a summary was kept, and an item is a tensor", records=1)
                else:
                    kept[point] = entry
            if not kept:
                continue
            file = item_name(epoch, numbers.setdefault(epoch or 0, 0))
            numbers[epoch or 0] += 1
            output = _nested({point.leaf: own(entry.tensor()) for point, entry in kept.items()})
            shape = [_shape(each) for each in output] if isinstance(output, tuple) else _shape(output)
            alias = called.get(str(Point(name)), name)
            about = {"epoch": epoch, "batch_idx": number, "layer": name, "alias": alias}
            write_pt(batch.new(file), {**about, "output_shape": shape, "output": output})
            for entry in kept.values():
                job.wrote(entry, file, entry.dtype)
        for name in there:
            batch.forget(name)
    job.leave_others(places)


def _nested(leaves: dict[Leaf, torch.Tensor]) -> Any:
    """Put the leaves of an output back together; what is not there is None."""
    if () in leaves:
        return leaves[()]
    by_index = {leaf[0]: tensor for leaf, tensor in leaves.items()}
    return tuple(by_index.get(at) for at in range(max(int(at) for at in by_index) + 1))


def _shape(tensor: torch.Tensor | None) -> list[int] | None:
    return None if tensor is None else list(tensor.shape)
