"""Compile a model with taps in its graph, and see what its layers compute.

scripted = compile(model, example_inputs, backend="torchscript")
scripted(**inputs)
get_layer_hidden_states()               # the embedding, then every decoder layer
"""

from layerscope.compiled.compiling import compile
from layerscope.compiled.hidden_states import get_layer_hidden_states
from layerscope.compiled.model import Compiled
from layerscope.compiled.saving import load_compiled

__all__ = ["Compiled", "compile", "get_layer_hidden_states", "load_compiled"]
