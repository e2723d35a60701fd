"""The Neuron layout: `embedding_output.pt`, `layer_1_output.pt` ... `layer_N_output.pt`, `logits_output.pt`.

    open_run("full_model").tensor("layers.29")      # also layer_30_output: files count from 1, layers from 0

`layer_0` is the embedding. `statistics.pt` and `metadata.pt` lie beside them.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

from layerscope.errors import Damaged, RunExists
from layerscope.points import Moment, Point
from layerscope.store.layouts.foreign import foreign_run
from layerscope.store.layouts.place import DumpPlace
from layerscope.store.layouts.quamba import about
from layerscope.store.layouts.statistics import described, summary_of
from layerscope.store.layouts.torchfiles import Opaque, leaves, saved, tensor_in
from layerscope.store.layouts.unread import Unread
from layerscope.store.run import Run
from layerscope.store.source import Item

if TYPE_CHECKING:
    import torch

    from layerscope.store.layouts.convert import Job

EMBEDDING, LOGITS = "embedding_output.pt", "logits_output.pt"
STATISTICS, METADATA = "statistics.pt", "metadata.pt"
_LAYER = re.compile(r"layer_(\d{1,9})_output\.pt")
_ENTRY = re.compile(r"layer_(\d{1,9})")
_IDS = 1 << 20  # of integers in metadata, such as token ids, as many are read


def layer_name(number: int) -> str:
    """Return the name of a layer's file, counted from 1."""
    return f"layer_{number}_output.pt"


def recognise(place: DumpPlace) -> Run | None:
    """Read a folder in this layout; None when it has no such files."""
    names = place.names
    numbered = {int(match[1]): name for name in names if (match := _LAYER.fullmatch(name))}
    if not numbered and EMBEDDING not in names and not {STATISTICS, METADATA} <= set(names):
        return None
    notes: list[str] = []
    about = _dictionary(place, METADATA, notes)
    statistics = _dictionary(place, STATISTICS, notes)
    files: dict[str, str] = {EMBEDDING: "embedding"} if EMBEDDING in names else {}
    if 0 in numbered and EMBEDDING in names:
        notes.append(f"{numbered[0]} is passed over: layer 0 is the embedding, and {EMBEDDING} has that")
    elif 0 in numbered:
        files[numbered[0]] = "embedding"
    numbered.pop(0, None)
    files |= {numbered[n]: f"layers.{n - 1}" for n in sorted(numbered)}
    if LOGITS in names:
        files[LOGITS] = "logits"
    holes = sorted(set(range(1, max(numbered, default=0) + 1)) - numbered.keys())
    if holes:
        listed = f"{', '.join(map(str, holes[:8]))}{' and more' if len(holes) > 8 else ''}"
        notes.append(f"the numbering has holes: of {max(numbered)} layers there is no {listed}")
    items = [_item(place, name, Point(point)) for name, point in files.items()]
    items += _summaries(statistics, {item.point.name for item in items}, notes)
    items.sort(key=_depth)
    started = str(about.get("timestamp") or "")
    said = {**_said(about), "aliases": _aliases(files, items), "started": started}
    return foreign_run(place.address, "neuron", items, notes=notes, **said)


def _item(place: DumpPlace, name: str, point: Point) -> Item:
    return tensor_in(saved(place.files, name), f"{place.files.address}/{name}").item(point)


def _summaries(statistics: dict[str, Any], there: set[str], notes: list[str]) -> list[Item]:
    """Return what has statistics and no tensor, where they are enough to be a summary."""
    found = []
    for key, entry in statistics.items():
        match = _ENTRY.fullmatch(key)
        if match is None:
            continue
        name = "embedding" if int(match[1]) == 0 else f"layers.{int(match[1]) - 1}"
        if name in there:
            continue
        summary = summary_of(entry)
        if summary is None:
            notes.append(f"{key} has some statistics and no tensor, too few for a summary: it is passed over")
        else:
            found.append(Item(Point(name), Moment(), None, None, 0, None, summary=summary))
    return found


def _depth(item: Item) -> tuple[int, int]:
    kind, _, number = item.point.name.partition(".")
    return ("embedding", "layers", "logits").index(kind), int(number or 0)


def _dictionary(place: DumpPlace, name: str, notes: list[str]) -> dict[str, Any]:
    """Read one of the two files beside the tensors; what only unpickling could make is left out and noted."""
    try:
        value = saved(place.files, name)
    except FileNotFoundError:
        notes.append(f"{name} is not there")
        return {}
    if not isinstance(value, dict):
        found = value.name if isinstance(value, Opaque) else type(value).__name__
        raise Damaged(f"{place.files.address}/{name} holds a {found}, and a dict is expected")
    plain = {}
    for key, item in value.items():
        opaque = [leaf for _, leaf in leaves(item, name) if isinstance(leaf, Opaque)]
        if opaque:
            notes.append(
                f"{name}: {key!r} needs unpickling of {opaque[0].name}, which is never done; it is passed over"
            )
        else:
            plain[str(key)] = item
    return plain


def _said(about: dict[str, Any]) -> dict[str, Any]:
    model = about.get("model", about.get("model_name", about.get("model_path")))
    mode = about.get("mode")
    settings = {key: _plain(value) for key, value in about.items() if key not in ("model", "mode", "timestamp")}
    return {
        "model": dict(model) if isinstance(model, dict) else {} if model is None else {"name": str(model)},
        "mode": None if mode is None else str(mode),
        "settings": settings,
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; a tensor is told by its dtype and shape, token ids by themselves."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Unread) and value.dtype.startswith(("int", "uint")) and prod(value.shape) <= _IDS:
        return value.load().tolist()
    return str(value) if isinstance(value, Unread) else type(value).__name__


def _aliases(files: dict[str, str], items: list[Item]) -> dict[str, list[str]]:
    aliases = {name.removesuffix(".pt"): [str(Point(point))] for name, point in files.items()}
    for item in items:
        name = item.point.name
        if name == "embedding":
            aliases["layer_0"] = [str(item.point)]
        elif name.startswith("layers."):
            aliases[f"layer_{int(name.partition('.')[2]) + 1}"] = [str(item.point)]
    return aliases


# Writing --------------------------------------------------------------------------------------------


def write(job: Job) -> None:
    """Write embedding, decoder layers and logits as one `.pt` each, with `statistics.pt` and `metadata.pt` beside."""
    from layerscope.stats import summarize
    from layerscope.store.layouts.decoder import decoder
    from layerscope.store.layouts.files import FileBatch, write_pt

    stack = decoder(job.points, address=job.source.address)
    places: dict[str, tuple[str | None, Point | None]] = {EMBEDDING: ("layer_0", stack.embedding)}
    places |= {layer_name(depth + 1): (f"layer_{depth + 1}", point) for depth, point in stack.layers.items()}
    places[LOGITS] = (None, stack.logits)
    if stack.embedding is None:
        job.notes.append("no embedding was recorded: embedding_output.pt is not written")
    entries = {
        name: (key, entry)
        for name, (key, point) in places.items()
        if point is not None and (entry := job.one(point)) is not None
    }
    if not entries:
        raise job.nothing("no output of embedding, layers or logits")
    path = job.path
    there = [each.name for each in path.iterdir() if _is_ours(each.name)] if path.is_dir() else []
    if there and not job.overwrite:
        raise RunExists(f"{path} already has {there[0]}; overwrite=True or --overwrite replaces it")
    statistics: dict[str, Any] = {}
    with FileBatch(path) as batch:
        for name, (key, entry) in entries.items():
            summary = entry.summary
            if entry.dtype is None:
                job.leave(entry.point, f"only a summary was kept, which goes into {STATISTICS}", records=1)
                if summary is not None:
                    job.wrote(entry, STATISTICS, None)
            else:
                tensor = own(entry.tensor())
                summary = summary or summarize(tensor, level="moments")
                write_pt(batch.new(name), tensor)
                job.wrote(entry, name, entry.dtype)
            if key is not None and summary is not None:
                statistics[key] = {**described(summary, sample=True), "dtype": f"torch.{summary.dtype}"}
        write_pt(batch.new(STATISTICS), statistics)
        write_pt(batch.new(METADATA), _metadata(job, len(stack.layers)))
        for name in there:
            batch.forget(name)
    job.leave_others([point for _, point in places.values()])


def own(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with bytes of its own: torch saves the whole storage that a view looks into."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.contiguous().clone()


def _is_ours(name: str) -> bool:
    return name in (EMBEDDING, LOGITS, STATISTICS, METADATA) or _LAYER.fullmatch(name) is not None


def _metadata(job: Job, layers: int) -> dict[str, Any]:
    """Return what the scripts of this layout look up: token ids are a tensor, as they gave them to the model."""
    import torch

    said = about(job.source.manifest)
    if isinstance(said.get("input_ids"), list):
        said["input_ids"] = torch.tensor(said["input_ids"])
    return {**said, "mode": job.mode, "num_layers": layers, "source": job.source.address}
