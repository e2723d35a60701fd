"""A compiled model on disk: a folder with the graph in its compiler's own format, and `taps.json`.

compiled.save("compiled/llama")
load_compiled("compiled/llama")         # in a process that has never seen the model's source
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from layerscope.compiled.backends import NAMES, Backend, named
from layerscope.compiled.model import Compiled
from layerscope.compiled.observing import ObserverEffect
from layerscope.compiled.table import NAME, Table
from layerscope.errors import BadModel, RunExists

__all__ = ["load_compiled", "save"]


def save(backend: Backend, artefact: Any, table: Table, folder: Path) -> Path:
    """Write the folder: whole, under its name, or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunExists(f"{str(folder)!r} is there already, and is not empty; save to another folder, or remove it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        backend.save(artefact, beside)
        kind = backend.NAME if backend.NAME in NAMES else "torchscript"
        (beside / NAME).write_text(table.dumps(backend=kind), "utf-8")
        beside.chmod(0o755)
        beside.replace(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return folder


def load_compiled(path: str | Path) -> Compiled:
    """Return the compiled model that `save` wrote into a folder; its source is not needed."""
    folder = Path(path)
    try:
        text = (folder / NAME).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise BadModel(
            f"{str(path)!r} holds no compiled model: {NAME} cannot be read ({type(error).__name__}). "
            "Give the folder that `compiled.save(folder)` wrote; a bare .pt, .pt2 or .onnx file goes to record()."
        ) from error
    name, table = Table.loads(text)
    if name not in NAMES:
        raise BadModel(f"{str(folder / NAME)!r} names the backend {name!r}; there are {', '.join(NAMES)}.")
    backend = named(name)
    return Compiled(backend, backend.load(folder), table, observer_effect=_effect(table.observer_effect))


def _effect(said: str) -> ObserverEffect:
    if not said:
        return ObserverEffect(reason="not measured: the model was loaded, and the untapped one is not at hand")
    return ObserverEffect(reason=said if said.startswith("not measured") else f"measured before it was saved: {said}")
