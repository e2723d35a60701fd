"""Files that hold a model: told apart by their contents, opened with the library that made them.

    opened("model.pt2")            # a torch.export.ExportedProgram
    opened(model)                  # what is no path comes back as it is

To open a file runs no pickle: TorchScript has a reader of its own, and an export is looked through first, because
torch would unpickle whatever its configuration asks it to.
"""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any, Literal

from layerscope.errors import BadModel, Unsupported

__all__ = ["SUFFIXES", "is_file", "kind_of", "opened"]

Kind = Literal["torchscript", "export", "onnx", "aoti", "neff", "tensorrt", "ort"]

_AGAIN = "compile the model again with layerscope.compile(..., record_layer_outputs=True)"
_BY_SUFFIX: dict[str, Kind] = {
    ".onnx": "onnx",
    ".ort": "ort",
    ".neff": "neff",
    ".engine": "tensorrt",
    ".plan": "tensorrt",
    ".trt": "tensorrt",
}
_ZIPS = (".pt", ".pth", ".ts", ".pt2")
SUFFIXES = (*_ZIPS, *_BY_SUFFIX)
_PLAIN = ("weight_", "tensor_")  # how an export calls the files it reads as bytes

_OPAQUE: dict[Kind, str] = {
    "aoti": f"an AOTInductor package, machine code in which no layer is left to tap; {_AGAIN}",
    "neff": f"a Neuron NEFF, machine code in which no layer is left to tap; {_AGAIN}",
    "tensorrt": f"a TensorRT engine, machine code in which no layer is left to tap; {_AGAIN}",
    "ort": "in ONNX Runtime's own format, which keeps no names of modules; give the .onnx file it was made from",
}


def is_file(text: str) -> bool:
    """Tell whether the text names a file that holds a model, looking into it where its suffix does not say."""
    return kind_of(Path(text)) is not None


def kind_of(path: Path) -> Kind | None:
    """Tell what a file holds; None when it is not there, or holds no model (a checkpoint of weights alone)."""
    try:
        if not path.is_file():
            return None
    except (OSError, ValueError):
        return None
    suffix = path.suffix.lower()
    return _inside(path) if suffix in _ZIPS else _BY_SUFFIX.get(suffix)


def opened(model: Any) -> Any:
    """Return what the path of a model's file holds, ready for `find`; anything but a path comes back as it is."""
    if not isinstance(model, (str, os.PathLike)):
        return model
    path = Path(model)
    kind = kind_of(path)
    if kind is None:
        raise BadModel(f"{str(model)!r} {_why_not(path)}.")
    if kind in _OPAQUE:
        raise Unsupported(f"{str(model)!r} is {_OPAQUE[kind]}.")
    if kind == "onnx":
        from layerscope.runtimes.onnx import OnnxModel

        return OnnxModel.read(path)
    return _read_torchscript(path) if kind == "torchscript" else _read_export(path)


def _inside(path: Path) -> Kind | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError):
        return None
    folders = {name.partition("/")[2].rpartition("/")[0] for name in names}
    if any(folder.startswith("data/aotinductor") for folder in folders):
        return "aoti"
    if "models" in folders or any(name.endswith("serialized_exported_program.json") for name in names):
        return "export"
    return "torchscript" if any(folder.split("/")[0] == "code" for folder in folders) else None


def _why_not(path: Path) -> str:
    if not path.exists():
        return "is not a file that is there"
    if path.suffix.lower() in _ZIPS:
        return "holds no code: weights alone are not a model; give the function that makes it, file.py:function"
    return f"is not a file of a model layerscope knows ({', '.join(SUFFIXES)})"


def _read_torchscript(path: Path) -> Any:
    import torch

    from layerscope.runtimes.script_graphs import quiet_jit

    try:
        with quiet_jit():
            where = None if torch.cuda.is_available() else "cpu"
            return torch.jit.load(path, map_location=where)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        message = str(error)
        if "Unknown builtin op: " in message:
            op = message.partition("Unknown builtin op: ")[2].split()[0].rstrip(".")
            raise Unsupported(
                f"{str(path)!r} is TorchScript that needs {op}, an operation this process does not have: import the "
                f"library it comes from; what runs inside an engine (a NEFF) cannot be seen either way: {_AGAIN}."
            ) from error
        raise BadModel(f"{str(path)!r} cannot be read as TorchScript: {message.strip().splitlines()[0]}") from error


def _read_export(path: Path) -> Any:
    import torch

    _refuse_pickles(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")  # torch's own, in torch 2.11
            return torch.export.load(path)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise BadModel(f"{str(path)!r} cannot be read as an exported program: {first}.") from error


def _refuse_pickles(path: Path) -> None:
    """Refuse an export that torch could only load by running a pickle."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            content = archive.read(name) if name.endswith((".pt", "_config.json")) else b""
            if (name.endswith(".pt") and not _is_plain(content)) or (
                name.endswith("_config.json") and _asks_for_pickle(content)
            ):
                raise Unsupported(
                    f"{str(path)!r} holds objects that only a pickle can make ({name}), and reading one can run any "
                    "code; if you trust the file, load it with torch.export.load and record the program."
                )


def _asks_for_pickle(config: bytes) -> bool:
    entries = json.loads(config).get("config", {}).values()
    return any(each.get("use_pickle") or not str(each.get("path_name")).startswith(_PLAIN) for each in entries)


def _is_plain(content: bytes) -> bool:
    """Tell whether a .pt file holds tensors and containers alone."""
    import pickle

    import torch

    try:
        torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        return False
    return True
