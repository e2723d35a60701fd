"""AWS Neuron: `torch_neuronx.trace`, whose result is a TorchScript file around a compiled graph.

It has not run on Neuron hardware nor with its compiler: it is tested against a stand-in of the same signature. The taps
are functional outputs of the traced function, as NxD Inference's own tensor capture makes them.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from layerscope.compile_taps.backends import torchscript
from layerscope.compile_taps.backends.backend import Made
from layerscope.compile_taps.tapped_model import Flat
from layerscope.errors import MissingExtra

NAME = "neuron"
LIVE = False

call, save = torchscript.call, torchscript.save


def compile(flat: Flat, example: tuple[torch.Tensor, ...], *, dynamic: bool, precise: bool) -> Made:
    """Trace the model for the example's sizes: Neuron's graphs have no others."""
    traced: Any = _library().trace(flat, example)
    return Made(traced, ("Neuron compiles for the sizes of the example alone",) if dynamic else ())


def load(folder: Path) -> Any:
    """Read the file back; torch_neuronx brings the operation that runs the graph."""
    _library()
    return torchscript.load(folder)


def _library() -> Any:
    try:
        return importlib.import_module("torch_neuronx")
    except ImportError as error:
        raise MissingExtra(
            "the neuron backend takes torch_neuronx, from the AWS Neuron SDK: "
            "see its setup guide for the machine's image; every other backend runs here."
        ) from error
