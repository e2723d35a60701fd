"""Which points of a run are the embedding, the decoder layers and the logits.

    stack = decoder(run.points)
    stack.layers[3]         # Point("model.layers.3"), or its first leaf where it returned a tuple

Layouts that number their layers need to know; a run has names alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerscope.errors import Ambiguous, NoSuchPoint
from layerscope.points import Leaf, Point, Side

STACKS = ("layers", "h", "blocks", "layer", "block")
EMBEDDINGS = (
    *("embedding", "embeddings", "embed_tokens", "embed", "wte"),
    *("word_embeddings", "tok_embeddings", "embed_in"),
)
LOGITS = ("logits", "lm_head")
# The words that a layer's first argument goes by, where it is given by name.
ARGUMENTS = ("hidden_states", "x", "input", "inputs")


@dataclass(frozen=True, slots=True)
class DecoderNames:
    """The main stack of a model: its module names by depth, and the points that lie at its ends."""

    layers: dict[int, Point]
    names: dict[int, str]
    embedding: Point | None
    logits: Point | None


def decoder(points: Sequence[Point], *, address: str) -> DecoderNames:
    """Find the numbered stack with the most layers; raises NoSuchPoint where there is none, Ambiguous for two alike."""
    stacks: dict[str, dict[int, str]] = {}
    for point in points:
        above, _, last = point.name.rpartition(".")
        if not point.op and last.isdecimal() and len(last) < 10 and not point.side.startswith("grad"):
            stacks.setdefault(above, {})[int(last)] = point.name
    if not stacks:
        raise NoSuchPoint(
            f"no decoder layers among the {len(points)} points of {address}: names such as model.layers.3, "
            "transformer.h.3 or blocks.3 are looked for"
        )
    best = max(_rank(above, layers) for above, layers in stacks.items())
    found = [above for above, layers in stacks.items() if _rank(above, layers) == best]
    if len(found) > 1:
        raise Ambiguous(
            f"{address} has {len(found)} stacks of {best[2]} layers: {', '.join(f'{a}.*' for a in found)}; "
            "choose one of them by a pattern"
        )
    names = dict(sorted(stacks[found[0]].items()))
    layers = {depth: at for depth, name in names.items() if (at := leaf_of(points, name)) is not None}
    return DecoderNames(layers, names, _end(points, EMBEDDINGS), _logits(points))


def leaf_of(points: Sequence[Point], name: str, side: Side = "output") -> Point | None:
    """Return the leaf of a module's value that the hidden states are: the value itself, or the first of several."""
    leaves = [p for p in points if p.name == name and p.side == side and not p.op]
    usual: list[Leaf] = [(), (0,), *((word,) for word in ARGUMENTS)]
    for leaf in usual:
        if Point(name, side, leaf) in leaves:
            return Point(name, side, leaf)
    return leaves[0] if len(leaves) == 1 else None


def _rank(above: str, layers: dict[int, str]) -> tuple[bool, bool, int]:
    parts = above.split(".")
    inside = any(part.isdecimal() for part in parts)  # the experts of a layer may be more than the layers
    return not inside, parts[-1] in STACKS, len(layers)


def _end(points: Sequence[Point], words: Sequence[str]) -> Point | None:
    """Return the outermost module of one of these names."""
    named = {p.name for p in points if p.name.rpartition(".")[2] in words and not p.op}
    for name in sorted(named, key=lambda name: (name.count("."), words.index(name.rpartition(".")[2]))):
        at = leaf_of(points, name)
        if at is not None:
            return at
    return None


def _logits(points: Sequence[Point]) -> Point | None:
    whole = Point("", leaf=("logits",))
    return whole if whole in points else _end(points, LOGITS)
