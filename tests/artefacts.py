"""Files of compiled models, and the same files with one weight changed.

file = saved(Logits(model), ids, "onnx", folder)
change(file, model.state_dict()["model.layers.1.mlp.down_proj.weight"])
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

_FILES = {"torchscript": "model.pt", "export": "model.pt2", "onnx": "model.onnx"}


class Logits(nn.Module):
    """Token ids to logits, which is what can be traced and exported."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


def saved(model: nn.Module, ids: torch.Tensor, kind: str, folder: Path) -> Path:
    """Compile a model with nothing of ours in it, as somebody else would, and save it."""
    file = folder / _FILES[kind]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of tracer and exporter, about the model's Python
        if kind == "torchscript":
            torch.jit.save(torch.jit.trace(model, (ids,), check_trace=False), file)
        elif kind == "export":
            torch.export.save(torch.export.export(model, (ids,)), file)
        else:
            pytest.importorskip("onnxscript")
            pytest.importorskip("onnxruntime")
            torch.onnx.export(model, (ids,), file, dynamo=True, verbose=False)
    return file


def change(file: Path, weight: torch.Tensor, *, factor: float = 1.2) -> None:
    """Multiply the one weight of a saved model that holds these values: exporters rename and transpose them."""
    if file.suffix == ".onnx":
        _change_onnx(file, weight.numpy(), factor)
    elif file.suffix == ".pt2":
        program = torch.export.load(file)
        _multiply(program.state_dict, weight, factor)
        torch.export.save(program, file)
    else:
        module = torch.jit.load(file)
        _multiply(module.state_dict(), weight, factor)
        torch.jit.save(module, file)


def _multiply(tensors: dict[str, torch.Tensor], weight: torch.Tensor, factor: float) -> None:
    [found] = [tensor for tensor in tensors.values() if torch.equal(tensor, weight)]
    with torch.no_grad():
        found.mul_(factor)


def _change_onnx(file: Path, weight: np.ndarray, factor: float) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(file)
    forms = [np.ascontiguousarray(form) for form in (weight, np.swapaxes(weight, -1, -2))]
    arrays = [(tensor, onnx.numpy_helper.to_array(tensor)) for tensor in model.graph.initializer]
    [(found, values)] = [(t, a) for t, a in arrays if any(np.array_equal(a, form) for form in forms)]
    found.CopyFrom(onnx.numpy_helper.from_array(values * values.dtype.type(factor), found.name))
    for path in file.parent.glob(f"{file.name}*"):
        path.unlink()
    onnx.save(model, file)
