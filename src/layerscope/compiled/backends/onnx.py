"""ONNX: torch.export's graph in ONNX's operations, run by ONNX Runtime."""

from __future__ import annotations

import importlib
import logging
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from layerscope.compiled.backends.backend import Made
from layerscope.compiled.backends.export import exported
from layerscope.compiled.tapping import Flat
from layerscope.errors import BadModel, MissingExtra

__all__ = ["FILE", "LIVE", "NAME", "call", "compile", "load", "save"]

NAME = "onnx"
LIVE = False
FILE = "model.onnx"

_ERRORS = 3  # it warns of every constant that it does not fold


class Session:
    """An .onnx file, and the session of ONNX Runtime that runs it; the folder of a passing one goes with it."""

    def __init__(self, path: Path, *, passing: bool = False) -> None:
        onnxruntime = _library("onnxruntime")
        if not path.is_file():
            raise BadModel(f"{str(path)!r} is not there.")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS
        there = onnxruntime.get_available_providers()
        providers = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in there]
        self.path = path
        self.session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        self.inputs = [each.name for each in self.session.get_inputs()]
        self.outputs = [each.name for each in self.session.get_outputs()]
        if passing:
            weakref.finalize(self, shutil.rmtree, path.parent, ignore_errors=True)


def compile(flat: Flat, example: tuple[torch.Tensor, ...], *, dynamic: bool, precise: bool) -> Made:
    """Export the model to a file with an output for each tap, and start a session of it.

    ONNX Runtime optimises the graph when it is loaded; the exporter's own passes only take time, most of it.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        _library(name)
    program = exported(flat, example, dynamic=dynamic)
    path = Path(tempfile.mkdtemp(prefix="layerscope_onnx_")) / FILE
    with _quiet():
        torch.onnx.export(program, (), path, dynamo=True, verbose=False, external_data=True, optimize=False)
    return Made(Session(path, passing=True))


def call(artefact: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run the session, on the tensors' own memory."""
    feed = {name: _value(tensor) for name, tensor in zip(artefact.inputs, tensors, strict=True)}
    made = artefact.session.run_with_ort_values(artefact.outputs, feed)
    return [_tensor(each) for each in made]


def save(artefact: Any, folder: Path) -> None:
    """Copy the file, and the weights that lie beside it."""
    for path in artefact.path.parent.glob(f"{FILE}*"):
        shutil.copyfile(path, folder / path.name)


def load(folder: Path) -> Any:
    """Start a session of the file."""
    return Session(folder / FILE)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's remarks on its own future, and on libraries that nobody asked for, out of the user's log."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _value(tensor: torch.Tensor) -> Any:
    # ONNX Runtime does not read booleans by DLPack, and numpy has no bfloat16.
    tensor, kind = tensor.detach().cpu().contiguous(), _library("onnxruntime").OrtValue
    return kind.ortvalue_from_numpy(tensor.numpy()) if tensor.dtype == torch.bool else kind.from_dlpack(tensor)


def _tensor(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = from_dlpack(value._ortvalue)
    return tensor.view(torch.bool) if value.data_type() == "tensor(bool)" else tensor


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(f"the onnx backend takes {name}: pip install 'layerscope[onnx]'.") from error
