"""Where the embedding, the decoder layers and the logits of a model are, by its structure and by how a forward runs.

lists = lists_of(model)
order = followed(model, lists, args, kwargs)
stack = stack_of(model, lists, order)           # stack.layers, stack.embedding
head_of(model, stack, order)                    # "lm_head"
"""

from layerscope.compile_taps.decoder.embedding import Embedding
from layerscope.compile_taps.decoder.forward_order import followed
from layerscope.compile_taps.decoder.head import head_of
from layerscope.compile_taps.decoder.stack import Stack, lists_of, stack_of

__all__ = ["Embedding", "Stack", "followed", "head_of", "lists_of", "stack_of"]
