"""Live models from text: built-in ones, a function's, a local checkpoint's.

    loaded = load_model("tiny-transformer")

To import this package loads neither torch nor transformers; to load a model does.
"""

from __future__ import annotations

from layerscope.models.inputs import DEFAULT_PROMPT, Inputs
from layerscope.models.loading import BUILT_IN, BuiltIn, Loaded, is_model, load_model

__all__ = ["BUILT_IN", "DEFAULT_PROMPT", "BuiltIn", "Inputs", "Loaded", "is_model", "load_model"]
