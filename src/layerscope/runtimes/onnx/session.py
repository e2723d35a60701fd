"""A session of ONNX Runtime that takes and gives tensors, without copying them.

    session = Session(Path("model.onnx"))
    session.run({"input_ids": ids})["logits"]

It has as many threads as torch has.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from layerscope.errors import BadModel, MissingExtra

_ERRORS = 3  # below that, it warns of every constant that it does not fold
_WEIGHTS = "session.model_external_initializers_file_folder_path"


class Session:
    """The graph of an .onnx file, ready to run; `graph` is an edited copy of it, to be run in its place."""

    def __init__(self, path: Path, graph: bytes | None = None) -> None:
        onnxruntime = library("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ERRORS
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry(_WEIGHTS, str(path.resolve().parent))
        there = onnxruntime.get_available_providers()
        providers = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in there]
        try:
            self._session = onnxruntime.InferenceSession(graph or str(path), options, providers=providers)
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise BadModel(f"{str(path)!r} cannot be run by ONNX Runtime: {said}") from error
        self._value = onnxruntime.OrtValue
        self.inputs: list[str] = [each.name for each in self._session.get_inputs()]
        self.outputs: list[str] = [each.name for each in self._session.get_outputs()]

    def run(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the graph on its inputs, by name; return its outputs, in order."""
        feed = {name: self._taken(tensor.detach().cpu().contiguous()) for name, tensor in given.items()}
        made = self._session.run_with_ort_values(self.outputs, feed)
        return {name: _tensor(value) for name, value in zip(self.outputs, made, strict=True)}

    def _taken(self, tensor: torch.Tensor) -> Any:
        # ONNX Runtime does not read booleans by DLPack, and numpy has no bfloat16.
        if tensor.dtype == torch.bool:
            return self._value.ortvalue_from_numpy(tensor.numpy())
        return self._value.from_dlpack(tensor)


def library(name: str) -> Any:
    """Import a library of the extra `onnx`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(f"ONNX takes {name}: pip install 'layerscope[onnx]'.") from error


def _tensor(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = from_dlpack(value._ortvalue)
    return tensor.view(torch.bool) if value.data_type() == "tensor(bool)" else tensor
