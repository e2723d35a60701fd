"""Quamba's layout: `mode_{M}_layer_{i}.npy` and `mode_{M}_stats.json`, several modes in one folder.

    open_run("layer_outputs:2-1").tensor("layers.0")        # also layer_0, mode_2-1_layer_0

Layers count from 0. A mode may have dashes in its name. `components` of layers, such as the scan's input, lie beside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerscope.errors import NotARun, RunExists
from layerscope.points import Moment, Point
from layerscope.store.layouts.arrays import npy
from layerscope.store.layouts.components import component_in, components_of, entry_in, file_of, key_of, written_entry
from layerscope.store.layouts.foreign import foreign_run
from layerscope.store.layouts.place import DumpPlace
from layerscope.store.layouts.statistics import described, object_in, summary_of
from layerscope.store.manifest import Manifest, now
from layerscope.store.run import Run
from layerscope.store.source import Item

if TYPE_CHECKING:
    from layerscope.store.layouts.convert import Job

_ARRAY = re.compile(r"mode_(.+)_layer_(\d{1,9})\.npy", re.DOTALL)
_STATISTICS = re.compile(r"mode_(.+)_stats\.json", re.DOTALL)
_ENTRY = re.compile(r"layer_(\d{1,9})")
_NUMBERED = re.compile(r"\d+(?:-\d+)?")  # computes in INT8; a mode of floats is called by their type


def array_name(mode: str, layer: int) -> str:
    """Return the name of a layer's file."""
    return f"mode_{mode}_layer_{layer}.npy"


def statistics_name(mode: str) -> str:
    """Return the name of a mode's statistics file."""
    return f"mode_{mode}_stats.json"


def recognise(place: DumpPlace) -> Run | None:
    """Read a folder in this layout; None when it has no such files."""
    arrays: dict[str, dict[Point, str]] = {}
    statistics: dict[str, str] = {}
    strange = []
    for name in place.names:
        if match := _ARRAY.fullmatch(name):
            arrays.setdefault(match[1], {})[Point(f"layers.{int(match[2])}")] = name
        elif part := component_in(name):
            arrays.setdefault(part[0], {})[part[1]] = name
        elif match := _STATISTICS.fullmatch(name):
            statistics[match[1]] = name
        elif name.startswith("mode_") and name.endswith(".npy"):
            strange.append(name)
    modes = sorted({*arrays, *statistics})
    return _opened(place, place.choose(modes), arrays, statistics, strange) if modes else None


def _opened(
    place: DumpPlace,
    mode: str,
    arrays: Mapping[str, Mapping[Point, str]],
    statistics: Mapping[str, str],
    strange: Sequence[str],
) -> Run:
    said: dict[str, Any] = {}
    notes = [f"{name} is no layer and no component: it is passed over" for name in strange]
    if mode in statistics:
        said = object_in(place.files, statistics[mode])
    else:
        notes.append(f"{statistics_name(mode)} is not there: model and settings are unknown")
    stated = {point: (key, said.pop(key)) for key in list(said) if (point := _entry(key)) is not None}
    files = arrays.get(mode, {})
    items = []
    for point in sorted({*stated, *files}, key=_order):
        key, entry = stated.get(point, ("", None))
        if point in files:
            items.append(npy(place.files, files[point]).item(point, note=_recorded_as(entry)))
            continue
        summary = summary_of(entry)
        if summary is None:
            notes.append(f"{key} has some statistics and no array, too few for a summary: it is passed over")
        else:
            items.append(Item(point, Moment(), None, None, 0, None, summary=summary))
    if not items:
        raise NotARun(
            f"{place.address} has nothing of mode {mode} that can be read: "
            f"{'; '.join(notes) or 'no layer in its file'}. Files mode_{{M}}_layer_{{i}}.npy are looked for."
        )
    aliases = {alias: [str(item.point)] for item in items for alias in _aliases(mode, item.point)}
    about = {**said_of(said, mode), "mode": mode, "aliases": aliases}
    return foreign_run(f"{place.address}:{mode}", "quamba", items, notes=notes, reopen=(place.address, mode), **about)


def _entry(key: str) -> Point | None:
    """Return the point that a key of a statistics file speaks of; None for a setting."""
    match = _ENTRY.fullmatch(key)
    return entry_in(key) if match is None else Point(f"layers.{int(match[1])}")


def _order(point: Point) -> tuple[int, str, str]:
    """Order layers by depth, and within a layer its components before it, inputs first."""
    _, layer, *component = point.name.split(".")
    return int(layer), (*component, "~")[0], point.side


def _aliases(mode: str, point: Point) -> list[str]:
    _, layer, *component = point.name.split(".")
    if component:
        return [key_of(point), f"mode_{mode}_{key_of(point)}"]
    return [f"layer_{layer}", f"mode_{mode}_layer_{layer}", f"layer_{layer}_output"]


def _recorded_as(entry: object) -> dict[str, str]:
    """Return what a statistics file says of the dtype before it was written, where that was another."""
    dtype = entry.get("recorded_dtype") if isinstance(entry, Mapping) else None
    return {"recorded_dtype": dtype.removeprefix("torch.")} if isinstance(dtype, str) else {}


def said_of(said: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """Sort what a statistics file says of a run into the places a manifest has for it.

    The modes of the layout's own tools are quantised, which their files leave to the name: 0, 2-1, 3.
    """
    model = said.get("model")
    started = said.get("timestamp")
    grid = {"quantised": f"mode {mode}"} if _NUMBERED.fullmatch(mode) else {}
    settings = {key: value for key, value in said.items() if key not in ("mode", "model", "timestamp")}
    return {
        "model": dict(model) if isinstance(model, dict) else {} if model is None else {"name": str(model)},
        "started": started if isinstance(started, str) else "",
        "settings": grid | settings,
    }


# Writing --------------------------------------------------------------------------------------------


def write(job: Job) -> None:
    """Write each decoder layer's output as `.npy`, and the statistics of all of them beside."""
    from layerscope.store.layouts.decoder import decoder
    from layerscope.store.layouts.files import FileBatch, write_json, write_npy

    mode, stack = job.named_mode, decoder(job.points, address=job.source.address)
    entries = {depth: entry for depth, point in stack.layers.items() if (entry := job.one(point)) is not None}
    if not entries:
        raise job.nothing("no output of a decoder layer")
    components = components_of(job.points, stack.names)
    there = [name for name in _names(job.path) if mode_of(name) == mode]
    if there and not job.overwrite:
        raise RunExists(f"{job.path} already has mode {mode} ({there[0]}); overwrite=True or --overwrite replaces it")
    said: dict[str, Any] = {"mode": mode, **about(job.source.manifest)}
    with FileBatch(job.path) as batch:
        for depth, entry in entries.items():
            if entry.dtype is None:
                if entry.summary is not None:
                    said[f"layer_{depth}"] = described(entry.summary)
                    job.wrote(entry, statistics_name(mode), None)
                job.leave(entry.point, "only a summary was kept, which goes into the statistics file", records=1)
                continue
            name = array_name(mode, depth)
            summary, dtype = write_npy(batch.new(name), entry)
            said[f"layer_{depth}"] = described(summary, written=dtype)
            job.wrote(entry, name, dtype)
        for part, component in components.items():
            value, more = written_entry(job, component)
            if value is None or value.dtype is None:
                job.leave(component.point, "a component is written as a tensor, and it has none")
                continue
            name = file_of(mode, part)
            summary, dtype = write_npy(batch.new(name), value)
            said[key_of(part)] = described(summary, written=dtype) | more
            job.wrote(value, name, dtype)
        write_json(batch.new(statistics_name(mode)), said)
        for name in there:
            batch.forget(name)
    used = [place for part in components.values() for place in (part.point, part.scale)]
    job.leave_others([*stack.layers.values(), *used])


def about(manifest: Manifest) -> dict[str, Any]:
    """Return what a statistics file says of a run: its model's name, when it was, and the settings."""
    model = manifest.model.get("name") or manifest.model.get("class")
    said: dict[str, Any] = {"model": model, "timestamp": timestamp(manifest.started)}
    taken = {*said, "mode"}
    return said | {k: v for k, v in manifest.settings.items() if k not in taken and _entry(k) is None}


def timestamp(started: str) -> str:
    """Write a moment as the scripts of these layouts do: `2025-01-10 16:00:00`."""
    return (started or now())[:19].replace("T", " ")


def _names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir()) if path.is_dir() else []


def mode_of(name: str) -> str | None:
    """Return the mode that a file's name speaks of; None when it is no file of this layout."""
    match = _ARRAY.fullmatch(name) or _STATISTICS.fullmatch(name)
    part = component_in(name)
    return match[1] if match else part[0] if part else None
