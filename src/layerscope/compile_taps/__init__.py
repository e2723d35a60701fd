"""Compile a model with taps in its graph, and see what its layers compute.

scripted = compile(model, example_inputs, backend="torchscript")
scripted(**inputs)
get_layer_hidden_states()               # the embedding, then every decoder layer
"""

from layerscope.compile_taps.compiled_folder import load_compiled
from layerscope.compile_taps.compiled_model import Compiled
from layerscope.compile_taps.compiling import compile
from layerscope.compile_taps.hidden_states import get_layer_hidden_states

__all__ = ["Compiled", "compile", "get_layer_hidden_states", "load_compiled"]
