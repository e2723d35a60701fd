"""Files and folders that hold a model: told apart by their contents, listed, opened with the library that made them.

    listed("model.pt2")            # what is in it: nothing is loaded, nothing runs
    opened("model.pt2")            # a torch.export.ExportedProgram, to be run
    opened(model)                  # what is no path comes back as it is

A TorchScript or .pt2 file is a program, and to open one is to run it: torch evaluates what its texts say. Pickles are
refused all the same: they are not expected there.
"""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerscope.errors import BadModel, Unsupported, first_line
from layerscope.runtimes.archives.zip_archive import BROKEN, EXPECTED, MEND, Archive

if TYPE_CHECKING:
    from layerscope.runtimes.listing import Listing

Kind = Literal["torchscript", "export", "onnx", "aoti", "neff", "tensorrt", "ort", "compiled"]

TAPS = "taps.json"  # what makes a folder one that a compiled model was saved to

_AGAIN = "compile the model again with layerscope.compile(..., record_layer_outputs=True)"
_BY_SUFFIX: dict[str, Kind] = {
    ".onnx": "onnx",
    ".ort": "ort",
    ".neff": "neff",
    ".engine": "tensorrt",
    ".plan": "tensorrt",
    ".trt": "tensorrt",
}
_ZIPS = (".pt", ".pth", ".ts", ".jit", ".pt2")
SUFFIXES = (*_ZIPS, *_BY_SUFFIX)
_ZIP = b"PK\x03\x04"  # how an archive begins
_PICKLE = b"\x80"
_PLAIN = ("weight_", "tensor_")  # how an export calls the files it reads as bytes
_LEGACY = ("serialized_state_dict.json", "serialized_constants.json")  # pickles of torch 2.1, whatever they are called
_LARGEST = 64 << 20

_OPAQUE: dict[Kind, str] = {
    "aoti": f"an AOTInductor package, machine code in which no layer is left to tap; {_AGAIN}",
    "neff": f"a Neuron NEFF, machine code in which no layer is left to tap; {_AGAIN}",
    "tensorrt": f"a TensorRT engine, machine code in which no layer is left to tap; {_AGAIN}",
    "ort": "in ONNX Runtime's own format, which keeps no names of modules; give the .onnx file it was made from",
}


def is_file(text: str) -> bool:
    """Tell whether the text names a file or folder that holds a compiled model, by what is in it."""
    return kind_of(Path(text)) is not None


def kind_of(path: Path) -> Kind | None:
    """Tell what a file or folder holds; None when it is not there, or holds no model (a checkpoint's weights alone)."""
    try:
        if not path.is_file():
            return "compiled" if (path / TAPS).is_file() else None
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
    if kind == "compiled":
        raise Unsupported(
            f"{str(model)!r} is a folder that a compiled model was saved to, not a model's file; record what "
            "layerscope.load_compiled(folder) returns."
        )
    if kind in _OPAQUE:
        if (path.parent / TAPS).is_file():
            what = _OPAQUE[kind].partition(",")[0]
            raise Unsupported(f"{str(model)!r} is {what}; the taps in it are known to its folder: give that.")
        raise Unsupported(f"{str(model)!r} is {_OPAQUE[kind]}.")
    if kind == "onnx":
        from layerscope.runtimes.onnx import OnnxModel

        return OnnxModel.read(path)
    return _read_torchscript(path) if kind == "torchscript" else _read_export(path)


def listed(path: Path) -> Listing | None:
    """Return what a file of a program says of itself, without running it; None for what is no such file."""
    kind = kind_of(path)
    if kind == "export":
        from layerscope.runtimes.archives import read_export

        return read_export(path)
    if kind == "torchscript":
        from layerscope.runtimes.archives import read_script

        return read_script(path)
    return None


def _inside(path: Path) -> Kind | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (*BROKEN, OSError):
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
        return damage(path, EXPECTED, begins=(_ZIP, _PICKLE)) or (
            "holds no code: weights alone are not a model, and a pickled module is not read; give the function that "
            "makes it, file.py:function"
        )
    return f"is not a file of a model layerscope knows ({', '.join(SUFFIXES)})"


def damage(path: Path, expected: str, *, begins: tuple[bytes, ...]) -> str:
    """Say in what way a file is not what was `expected`, and what to do; nothing where no fault is seen."""
    try:
        with path.open("rb") as file:
            start = file.read(40)
        if start.startswith(_ZIP):
            zipfile.ZipFile(path).close()
    except OSError as error:
        return f"cannot be read: {error.strerror or type(error).__name__}"
    except BROKEN:
        how = "is damaged, no longer" if zipfile.is_zipfile(path) else "ends too early for"
        return f"{how} {expected}; {MEND}"
    if start.startswith(begins):
        return ""
    line = (start.decode("utf-8", errors="replace").splitlines() or [""])[0]
    is_text = line.isprintable() and "\ufffd" not in line
    what = f"text that begins with {line!r}, " if is_text and line else "" if start else "empty, "
    return f"is {what}not {expected}; {MEND}"


def _read_torchscript(path: Path) -> Any:
    import torch

    from layerscope.runtimes.script_graphs import quiet_jit

    try:
        with quiet_jit():
            where = None if torch.cuda.is_available() else "cpu"
            return torch.jit.load(path, map_location=where)  # type: ignore[no-untyped-call]
    except (RuntimeError, UnicodeDecodeError) as error:
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
        raise BadModel(f"{str(path)!r} cannot be read as an exported program: {first_line(error)}.") from error


def _refuse_pickles(path: Path) -> None:
    """Refuse an export that torch could only load by running a pickle."""
    archive = Archive(path)
    for name in archive.names:
        try:
            pickled = _is_pickled(archive, name)
        except BROKEN as error:
            raise error if isinstance(error, BadModel) else archive.damaged() from error
        if pickled:
            raise Unsupported(
                f"{str(path)!r} holds objects that only a pickle can make ({name}), and reading one can run any "
                "code; if you trust the file, load it with torch.export.load and record the program."
            )


def _is_pickled(archive: Archive, name: str) -> bool:
    folded = name.casefold()  # torch does not tell model.PT from model.pt
    if folded.endswith("_config.json"):
        return _asks_for_pickle(archive.read(name, most=_LARGEST))
    held = folded.endswith(".pt") or folded in _LEGACY
    return held and not _is_plain(archive.read(name, most=archive.path.stat().st_size))


def _asks_for_pickle(config: bytes) -> bool:
    entries = json.loads(config).get("config", {}).values()
    return any(each.get("use_pickle") or not str(each.get("path_name")).startswith(_PLAIN) for each in entries)


def _is_plain(content: bytes) -> bool:
    """Tell whether a .pt file holds tensors and containers alone."""
    import torch

    try:
        torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception:  # of what is none, torch's reader raises whatever comes
        return False
    return True
