"""First-layer input and output of several modes in one `.npz`, with keys `mode_{M}_input` and `mode_{M}_output`.

    open_run("first_layer_io_all_modes.npz:2-1").tensor("layers.0:input")

Beside it may lie `{name}_stats.json`, with what the modes have in common.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerscope.errors import NotARun, RunExists
from layerscope.points import Point, Side
from layerscope.store.address import LocalFolder
from layerscope.store.layouts.archives import archive
from layerscope.store.layouts.arrays import array, npz
from layerscope.store.layouts.foreign import foreign_run
from layerscope.store.layouts.place import DumpPlace
from layerscope.store.layouts.quamba import about, said_of
from layerscope.store.layouts.statistics import described, object_in
from layerscope.store.run import Run

if TYPE_CHECKING:
    from layerscope.store.layouts.convert import Job
    from layerscope.store.run import Entry

NAME = "first_layer_io_all_modes.npz"
SIDES: tuple[Side, ...] = ("input", "output")
_KEY = re.compile(r"mode_(.+)_(input|output)", re.DOTALL)


def key(mode: str, side: str) -> str:
    """Return the key of an array."""
    return f"mode_{mode}_{side}"


def statistics_name(name: str) -> str:
    """Return the name of the statistics file that lies beside an archive."""
    return f"{name.removesuffix('.npz')}_stats.json"


def recognise(place: DumpPlace) -> Run | None:
    """Read an `.npz` file, or the folder that has one of the usual name; None for anything else."""
    name = place.file if place.file is not None else NAME if NAME in place.names else None
    if name is None or not name.endswith(".npz"):
        return None
    members = npz(place.files, name)
    sides: dict[str, list[str]] = {}
    for found in members:
        if match := _KEY.fullmatch(found):
            sides.setdefault(match[1], []).append(match[2])
    if not sides:
        there = ", ".join(map(repr, list(members)[:5])) + (f" and {len(members) - 5} more" if len(members) > 5 else "")
        raise NotARun(
            f"{place.files.address}/{name} is no first-layer file: keys mode_{{M}}_input and mode_{{M}}_output are "
            f"expected, and it holds {there or 'nothing'}"
        )
    mode = place.choose(list(sides))
    notes = [f"there is no {side} of mode {mode}" for side in SIDES if side not in sides[mode]]
    others = [found for found in members if not _KEY.fullmatch(found)]
    if others:
        notes.append(f"{len(others)} other arrays are passed over, {others[0]!r} first")
    items = [
        array(place.files, name, members[key(mode, side)]).item(Point("layers.0", side))
        for side in SIDES
        if side in sides[mode]
    ]
    said = _said(place, name, mode, notes)
    aliases = {
        alias: [str(item.point)]
        for item in items
        for alias in (item.point.side, key(mode, item.point.side), f"layer_0_{item.point.side}")
    }
    about = {**said_of(said, mode), "mode": mode, "aliases": aliases}
    return foreign_run(
        f"{place.address}:{mode}", "first-layer", items, notes=notes, reopen=(place.address, mode), **about
    )


def _said(place: DumpPlace, name: str, mode: str, notes: list[str]) -> dict[str, Any]:
    beside = statistics_name(name)
    try:
        said = object_in(place.files, beside)
    except FileNotFoundError:
        notes.append(f"{beside} is not there: model and settings are unknown")
        return {}
    modes = said.pop("modes", {})
    entry = modes.get(mode) if isinstance(modes, dict) else None
    if entry is None:
        notes.append(f"{beside} says nothing of mode {mode}")
    grid = entry.get("quantised") if isinstance(entry, dict) else None
    return {key: value for key, value in said.items() if key != "quantised"} | ({"quantised": grid} if grid else {})


# Writing --------------------------------------------------------------------------------------------


def write(job: Job) -> None:
    """Write the first layer's input and output into one `.npz`, beside the modes that are already in it."""
    from layerscope.store.layouts.decoder import decoder, leaf_of
    from layerscope.store.layouts.files import FileBatch, opened, write_json

    mode, path = job.named_mode, _target(job.path)
    stack = decoder(job.points, address=job.source.address)
    first = next(iter(stack.names.values()))
    if first.rpartition(".")[2] != "0":
        job.notes.append(f"the first layer that was recorded is {first}")
    used: list[Point] = []
    entries: dict[Side, Entry] = {}
    for side in SIDES:
        point = leaf_of(job.points, first, side)
        entry = None if point is None else job.one(point)
        if point is None or entry is None or entry.dtype is None:
            job.notes.append(f"there is no {side} of {first} to write")
        else:
            used.append(point)
            entries[side] = entry
    if not entries:
        raise job.nothing(f"no tensor of the first layer, {first}")
    files = LocalFolder(path.parent)
    old = npz(files, path.name) if path.exists() else {}
    ours = {key(mode, side) for side in SIDES}
    if ours & old.keys() and not job.overwrite:
        raise RunExists(f"{path} already has mode {mode}; overwrite=True or --overwrite replaces it")
    said = _merged(files, statistics_name(path.name), job, entries)
    with FileBatch(path.parent) as batch:
        with (
            opened(batch.new(path.name)) as out,
            zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
        ):
            for name, member in old.items():
                if name not in ours:
                    _copy(files, path.name, member.filename, new)
            grid = job.source.manifest.settings.get("quantised")  # one mode's alone: the other settings are of all
            said["modes"][mode] = {side: _put(job, new, mode, side, entry) for side, entry in entries.items()}
            said["modes"][mode] |= {"quantised": grid} if grid else {}
        write_json(batch.new(statistics_name(path.name)), said)
    job.leave_others(used)


def _target(path: Path) -> Path:
    return path if path.suffix == ".npz" else path / NAME


def _put(job: Job, new: zipfile.ZipFile, mode: str, side: str, entry: Entry) -> dict[str, Any]:
    from layerscope.store.layouts.files import write_npy

    with new.open(f"{key(mode, side)}.npy", "w", force_zip64=True) as out:
        summary, dtype = write_npy(out, entry)
    job.wrote(entry, key(mode, side), dtype)
    return described(summary, written=dtype)


def _copy(files: LocalFolder, name: str, member: str, out: zipfile.ZipFile) -> None:
    """Take over an array of another mode as it is, a stretch at a time."""
    info = zipfile.ZipInfo(member)
    info.compress_type = zipfile.ZIP_DEFLATED
    with (
        archive(files, name, member) as (old, _),
        old.open(member) as source,
        out.open(info, "w", force_zip64=True) as target,
    ):
        shutil.copyfileobj(source, target, 16 << 20)


def _merged(files: LocalFolder, name: str, job: Job, entries: dict[Side, Entry]) -> dict[str, Any]:
    """Return the statistics file with what it says of other modes; what it says of all of them stays."""
    try:
        said = object_in(files, name)
    except FileNotFoundError:
        said = {}
    here = {key: value for key, value in about(job.source.manifest).items() if key != "quantised"}
    shape = next(iter(entries.values())).shape or ()
    settings = {"pretrained_dir": here.pop("pretrained_dir", None), "seq_len": here.pop("seq_len", None)}
    if settings["seq_len"] is None and len(shape) == 3:
        settings["seq_len"] = shape[1]
    fresh = {"timestamp": here.pop("timestamp"), "model": here.pop("model"), **settings, **here}
    if said.get("model") not in (None, fresh["model"]):
        job.notes.append(f"{name} keeps speaking of the model {said['model']}; this mode is of {fresh['model']}")
    modes = said.pop("modes", {})
    return {**fresh, **said, "timestamp": fresh["timestamp"], "modes": modes if isinstance(modes, dict) else {}}
