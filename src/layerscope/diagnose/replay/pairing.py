"""Which module of the candidate is which of the reference.

    partners = pair(reference_calls, candidate_shapes, rules=parse_rules("fuse **.q_proj, ... -> **.qkv_proj"))

As for runs: by declared rule, by name, by what a name means, by order and shape (`compare/alignment.py`). What finds no
partner is judged through the module around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from layerscope.compare.alignment import Alignment, Seen, align
from layerscope.compare.rules import Rule
from layerscope.points import Point

Cut = tuple[int, int]


class Part(NamedTuple):
    """The reference's module that a module is, or is one part of; cuts are along the last axis of the output."""

    reference: str
    reference_cut: Cut | None = None
    own_cut: Cut | None = None


class Pairing(NamedTuple):
    """The candidate's modules with their partners; the reference's with themselves, cut alike; and who has none."""

    candidate: dict[str, tuple[Part, ...]]
    reference: dict[str, tuple[Part, ...]]
    names: dict[str, str]  # of the reference's modules in the candidate
    alone: tuple[tuple[str, str], ...]  # reference's modules without a partner, with the reason
    extra: tuple[str, ...]  # the candidate's


def pair(
    reference: Mapping[str, tuple[int, ...] | None],
    candidate: Mapping[str, tuple[int, ...] | None],
    *,
    rules: Sequence[Rule] = (),
) -> Pairing:
    """Pair the modules of two models that have run; each is given with the shape of its first output."""
    alignment = _aligned(reference, candidate, rules)
    parts: dict[str, list[Part]] = {}
    cuts: dict[str, list[Part]] = {}
    names: dict[str, str] = {}
    for found in alignment.pairs:
        ours, theirs = found.reference.name, found.candidate.name
        parts.setdefault(theirs, []).append(Part(ours, found.reference_cut, found.candidate_cut))
        cuts.setdefault(ours, []).append(Part(ours, found.reference_cut, found.reference_cut))
        names.setdefault(ours, theirs)
    return Pairing(
        {name: tuple(each) for name, each in parts.items()},
        {name: tuple(each) for name, each in cuts.items()},
        names,
        tuple((point.name, why) for point, why in alignment.only_reference),
        tuple(point.name for point, _ in alignment.only_candidate),
    )


def _aligned(
    reference: Mapping[str, tuple[int, ...] | None],
    candidate: Mapping[str, tuple[int, ...] | None],
    rules: Sequence[Rule],
) -> Alignment:
    sides = [[Seen(Point(name), shape, 1) for name, shape in side.items()] for side in (reference, candidate)]
    return align(*sides, rules=rules)
