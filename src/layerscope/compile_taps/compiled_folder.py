"""A compiled model on disk: a folder with the graph in its compiler's own format, and `taps.json`.

compiled.save("compiled/llama")
load_compiled("compiled/llama")         # in a process that has never seen the model's source
read_table("compiled/llama").table     # what it can give; its graph is not loaded
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from layerscope.compile_taps.backends import NAMES, Backend, named
from layerscope.compile_taps.compiled_model import Compiled
from layerscope.compile_taps.tap_table import TapTable
from layerscope.errors import BadModel, LayerscopeError, RunExists, Unsupported
from layerscope.runtimes.model_files import TAPS
from layerscope.runtimes.observer_effect import ObserverEffect


class Saved(NamedTuple):
    """What a folder says of the model in it."""

    backend: str
    table: TapTable


def save(backend: Backend, artefact: Any, table: TapTable, folder: Path) -> Path:
    """Write the folder: whole, under its name, or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunExists(f"{str(folder)!r} is there already, and is not empty; save to another folder, or remove it.")
    if folder.resolve() == Path.cwd():
        raise RunExists(f"{str(folder)!r} is the folder you are in, which cannot be written whole; name one inside it.")
    made = [above for above in folder.parents if not above.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise RunExists(
            f"{str(folder)!r} cannot be made ({error.strerror or error}: {str(error.filename or folder)!r}); save to "
            "another folder."
        ) from error
    try:
        _write(backend, artefact, table, beside)
        beside.replace(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        for above in made:
            with suppress(OSError):  # others may have put something there
                above.rmdir()
        raise
    return folder


def _write(backend: Backend, artefact: Any, table: TapTable, folder: Path) -> None:
    try:
        backend.save(artefact, folder)
    except (LayerscopeError, OSError):
        raise
    except Exception as error:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise Unsupported(
            f"{backend.NAME} compiled this model and cannot save it: {said.rstrip('.:')}. Compile it with another "
            "backend for a file: 'export', 'onnx', 'aoti' or 'torchscript'."
        ) from error
    kind = backend.NAME if backend.NAME in NAMES else "torchscript"
    (folder / TAPS).write_text(table.dumps(backend=kind), "utf-8")
    folder.chmod(0o755)


def load_compiled(path: str | Path) -> Compiled:
    """Return the compiled model that `save` wrote into a folder; its source is not needed."""
    name, table = read_table(path)
    backend = named(name)
    return Compiled(backend, backend.load(Path(path)), table, observer_effect=_effect(table.observer_effect))


def read_table(path: str | Path) -> Saved:
    """Return what a folder says of the model saved there: the name of its backend, and the table of its taps."""
    folder = Path(path)
    try:
        text = (folder / TAPS).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise BadModel(
            f"{str(path)!r} holds no compiled model: {TAPS} cannot be read ({type(error).__name__}). "
            "Give the folder that `compiled.save(folder)` wrote; a bare .pt, .pt2 or .onnx file goes to record()."
        ) from error
    try:
        name, table = TapTable.loads(text)
    except BadModel as error:
        raise BadModel(f"{str(path)!r} holds no compiled model: {error}") from error
    if name not in NAMES:
        raise BadModel(f"{str(folder / TAPS)!r} names the backend {name!r}; there are {', '.join(NAMES)}.")
    return Saved(name, table)


def _effect(said: str) -> ObserverEffect:
    if not said:
        return ObserverEffect(reason="not measured: the model was loaded, and the untapped one is not at hand")
    return ObserverEffect(reason=said if said.startswith("not measured") else f"measured before it was saved: {said}")
