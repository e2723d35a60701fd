"""ONNX: torch.export's graph in ONNX's operations, run by ONNX Runtime."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from layerscope.compile_taps.backends.backend import FileArtefact, Made, Mismatch, sized
from layerscope.compile_taps.backends.export import exported, fixed, quiet, taken
from layerscope.compile_taps.tapped_model import Flat
from layerscope.errors import BadModel, Unsupported
from layerscope.runtimes.observer_effect import ObserverEffect
from layerscope.runtimes.onnx.session import Session, library
from layerscope.runtimes.snapshot import restored

NAME = "onnx"
LIVE = False
FILE = "model.onnx"
RANDOM = "the model draws random numbers, which ONNX Runtime does not take from torch's generator: they are others"
UNMEASURED = ObserverEffect(reason="not measured: the model draws other random numbers at each call")


def compile(flat: Flat, example: tuple[torch.Tensor, ...], *, dynamic: bool, precise: bool) -> Made:
    """Export the model to a file with an output for each tap, and start a session of it.

    ONNX Runtime optimises the graph when it is loaded; the exporter's own passes only take time, most of it.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        library(name)
    random = _checked(flat, example)
    program = exported(flat, example, dynamic=dynamic)
    path = Path(tempfile.mkdtemp(prefix="layerscope_onnx_")) / FILE
    with warnings.catch_warnings(), quiet("torch.onnx"):
        warnings.simplefilter("ignore")
        torch.onnx.export(program, (), path, dynamo=True, verbose=False, external_data=True, optimize=False)
    artefact = FileArtefact(path, Session(path), passing=True)
    notes = fixed(flat, example, [shape for _, shape in _inputs(path)]) if dynamic else ()
    return Made(artefact, (*notes, RANDOM), UNMEASURED) if random else Made(artefact, notes)


def call(artefact: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run the session, on the tensors' own memory."""
    session: Session = artefact.run
    try:
        return list(session.run(dict(zip(session.inputs, tensors, strict=True))).values())
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        said = str(error).splitlines()[0].rpartition(" : ")[2].strip().rstrip(".")
        raise Mismatch([taken(*each) for each in _inputs(artefact.path)], said) from error


def save(artefact: Any, folder: Path) -> None:
    """Copy the file, and the weights that lie beside it."""
    for path in artefact.path.parent.glob(f"{FILE}*"):
        shutil.copyfile(path, folder / path.name)


def load(folder: Path) -> Any:
    """Start a session of the file."""
    if not (folder / FILE).is_file():
        raise BadModel(f"{str(folder / FILE)!r} is not there.")
    return FileArtefact(folder / FILE, Session(folder / FILE))


def _checked(flat: Flat, example: tuple[torch.Tensor, ...]) -> bool:
    """Run the model once, refuse what ONNX would do otherwise without a word, and tell whether it draws numbers."""
    before = {name: buffer.clone() for name, buffer in flat.tapped.model.named_buffers()}
    state = _random_state()
    with restored(flat), torch.no_grad():
        made = flat(*example)
        after = {name: buffer.clone() for name, buffer in flat.tapped.model.named_buffers()}
        drawn = _random_state() != state
    training = " Call model.eval() before you compile it." if flat.training else ""
    changed = [name for name, buffer in after.items() if name not in before or not _equal(before[name], buffer)]
    if changed:
        raise Unsupported(
            f"a call of the model changes its buffer {changed[0]}, and an ONNX graph keeps nothing between calls."
            f"{training or ' Another backend does: torchscript or export.'}"
        )
    if drawn and flat.training:
        raise Unsupported(
            "the model is in training mode and draws random numbers (dropout), which ONNX Runtime does not take from "
            f"torch's generator.{training}"
        )
    odd = [tensor for tensor in (*example, *made) if tensor.is_complex()]
    if odd:
        raise Unsupported(
            f"ONNX has no complex numbers, and the model takes, returns or is tapped for {sized(odd[0])}; use "
            "torch.view_as_real in the model, leave that tap out, or take another backend."
        )
    return drawn


def _random_state() -> list[bytes]:
    states = [torch.random.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    return [state.numpy().tobytes() for state in states]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def _inputs(path: Path) -> list[tuple[str, list[int | None]]]:
    """Return the dtype and the sizes of each input of a file, None for those that are free."""
    onnx = library("onnx")
    kinds = [each.type.tensor_type for each in onnx.load(path, load_external_data=False).graph.input]
    return [
        (
            onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name,
            [size.dim_value if size.HasField("dim_value") else None for size in kind.shape.dim],
        )
        for kind in kinds
    ]
