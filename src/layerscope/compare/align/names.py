"""Names of modules that mean the same: `transformer.h.3.mlp` and `model.layers.3.mlp` are the main stack's fourth.

names = Names.of(["model.embed_tokens", "model.layers.0"])
canonical(names, without=None)                     # {"model.embed_tokens": "embedding", ...}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from layerscope.points import unwrapped

_PREFIXES = frozenset({"model", "transformer", "backbone", "base_model", "language_model", "module"})
_STACKS = frozenset({"layers", "layer", "h", "blocks", "block"})
_NUMBERED = re.compile(r"(layers?|h|blocks?)_(0|[1-9][0-9]{0,8})")
_ROLES = frozenset({"encoder", "decoder"})
# Parts of a model beside its main stack: never taken for the prefix that an architecture gives to its base model.
_TOWER = re.compile(
    r"vis(ion|ual)|audio|image|video|text|speech|encoder|decoder|tower|draft|mtp|projector|adapter|qformer"
)
_EMBEDDINGS = frozenset({"embed_tokens", "wte", "embeddings", "embedding", "word_embeddings", "tok_embeddings"})
_LOGITS = frozenset({"lm_head", "logits"})


class Root(NamedTuple):
    """Where a stack of numbered layers hangs: what comes before its word, less the usual prefixes."""

    before: tuple[str, ...]

    @property
    def role(self) -> str | None:
        """The first word of where it hangs, which may be `encoder` or `decoder`."""
        return self.before[0] if self.before else None

    @property
    def is_main(self) -> bool:
        """Whether it can be the stack that is meant by `layers.3`."""
        return not self.before or (len(self.before) == 1 and self.before[0] in _ROLES)


@dataclass(slots=True)
class Names:
    """The names of one run, less wrappers and prefixes, and the stacks of layers they show."""

    parts: dict[str, tuple[str, ...]]
    roots: set[Root]
    roles: set[str]

    @classmethod
    def of(cls, names: Iterable[str]) -> Names:
        """Look through the names of one run."""
        parts = {name: _stripped(name) for name in names}
        roots = {root for each in parts.values() if (root := _root(each)) is not None}
        firsts = {root.before[0] if root.before else "" for root in roots}
        if len(firsts) == 1 and (prefix := firsts.pop()) and not _TOWER.search(prefix):
            parts = {name: each[1:] if each[:1] == (prefix,) else each for name, each in parts.items()}
            roots = {Root(root.before[1:]) for root in roots}
        return cls(parts, roots, {each[0] for each in parts.values() if each and each[0] in _ROLES})

    @property
    def main(self) -> Root | None:
        """The one stack that can be meant by `layers.3`; None when there is none, or several."""
        mains = [root for root in self.roots if root.is_main]
        return mains[0] if len(mains) == 1 and len(self.roles) < 2 else None


def _stripped(name: str) -> tuple[str, ...]:
    parts = unwrapped(name).split(".") if name else []
    while parts and parts[0] in _PREFIXES:
        del parts[0]
    split: list[str] = []
    for part in parts:
        match = _NUMBERED.fullmatch(part)
        split += match.groups() if match else (part,)
    return tuple(split)


def stack_of(parts: Sequence[str]) -> int | None:
    """Return where the outermost stack's word is."""
    for at, part in enumerate(parts[:-1]):
        if part in _STACKS and parts[at + 1].isdecimal():
            return at
    return None


def _root(parts: tuple[str, ...]) -> Root | None:
    at = stack_of(parts)
    return None if at is None else Root(parts[:at])


def canonical(names: Names, *, without: str | None) -> dict[str, str]:
    """Return what each name means: main layers as `layers.3`, less the role `without` of the only stack there is."""
    there = {".".join(parts) for parts in names.parts.values()}
    found: dict[str, str] = {}
    for name, parts in names.parts.items():
        if parts[-1:] == ("base_layer",) and ".".join(parts[:-1]) not in there:
            parts = parts[:-1]
        if without is not None and len(parts) > 1 and parts[0] == without:
            parts = parts[1:]
        if (at := stack_of(parts)) is not None:
            parts = (*parts[:at], "layers", *parts[at + 1 :])
        elif len(parts) == 1 and parts[0] in _EMBEDDINGS:
            parts = ("embedding",)
        elif len(parts) == 1 and parts[0] in _LOGITS:
            parts = ("logits",)
        found[name] = ".".join(parts)
    return found


def numbers_of(name: str) -> tuple[int, ...]:
    """Return the numbers that count modules in a name: `h.3.mlp` and `layer_3.mlp` have (3,), `fc1` has none."""
    return tuple(int(n) for n in re.findall(r"(?:(?<![^.])|(?<=_))[0-9]{1,9}(?![^.])", name))


def ending_of(name: str) -> str:
    """Return the last part of a name that is no number."""
    return next((part for part in reversed(name.split(".")) if part and not part.isdecimal()), "")


def tower_of(name: str) -> str:
    """Return the part of a name that says in which of several stacks it is, so that they are never mixed."""
    return next((part for part in name.split(".") if _TOWER.search(part)), "")
