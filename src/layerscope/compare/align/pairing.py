r"""Pairings that the user declares, because no name can tell them.

    parse_rules("fuse **.q_proj, **.k_proj, **.v_proj -> **.qkv_proj")

One rule a line, the reference's name on the left, the candidate's on the right; `#` begins a comment:

    pair   lm_head -> logits
    rename transformer.h.* -> model.layers.*                  # these modules and all within them
    fuse   **.q_proj, **.k_proj, **.v_proj -> **.qkv_proj     # cut along the last axis, in this order
    split  **.gate_up_proj -> **.gate_proj, **.up_proj        # the other way round
    flat   model.layers.*                                     # same values in the same order, other shape
    ignore **.rotary_emb

Names are patterns (`*` within one part, `**` across parts), and what the wildcards on one side of an arrow stand for is
carried to the other, in order. A rule is about every side of its points unless it names one: `**.q_proj:output`. `flat`
and `ignore` take whatever a pattern can say of names, sides and leaves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from layerscope.errors import BadText
from layerscope.patterns import Pattern, renamer
from layerscope.points import SIDES, Point, leaf_text

Verb = Literal["pair", "rename", "fuse", "split", "flat", "ignore"]
_VERBS: tuple[Verb, ...] = get_args(Verb)
_FORMS: dict[Verb, str] = {
    "pair": "pair REFERENCE -> CANDIDATE",
    "rename": "rename REFERENCE -> CANDIDATE",
    "fuse": "fuse PART, PART -> FUSED",
    "split": "split FUSED -> PART, PART",
    "flat": "flat NAME",
    "ignore": "ignore NAME",
}


class FusedPart(NamedTuple):
    """Which part of a fused point another point is."""

    number: int
    fused: Point


@dataclass(frozen=True, slots=True)
class PairingRule:
    """One declared alignment; `left` and `right` are patterns as text.

    >>> str(PairingRule("rename", "transformer.h.*", "model.layers.*"))
    'rename transformer.h.* -> model.layers.*'
    >>> PairingRule.parse("split **.gate_up_proj -> **.gate_proj, **.up_proj").right
    ('**.gate_proj', '**.up_proj')
    """

    verb: Verb
    left: tuple[str, ...]
    right: tuple[str, ...] = ()

    def __init__(self, verb: Verb, left: str | Sequence[str], right: str | Sequence[str] = ()) -> None:
        if verb not in _VERBS:
            raise BadText(f"{verb!r} is no rule; a line begins with one of {', '.join(_VERBS)}.")
        arrow = verb not in ("flat", "ignore")
        sides = [
            tuple(_canonical(text, arrow=arrow) for text in ([side] if isinstance(side, str) else side))
            for side in (left, right)
        ]
        object.__setattr__(self, "verb", verb)
        object.__setattr__(self, "left", sides[0])
        object.__setattr__(self, "right", sides[1])
        self._check()

    def _check(self) -> None:
        left, right = len(self.left), len(self.right)
        fits = {"fuse": left > 1 and right == 1, "split": left == 1 and right > 1, "flat": (left, right) == (1, 0)}
        fits["ignore"] = fits["flat"]
        if not fits.get(self.verb, (left, right) == (1, 1)):
            raise BadText(
                f"{str(self)!r} has {left} on the left and {right} on the right; write `{_FORMS[self.verb]}`."
            )
        if not self.right:
            pattern = _pattern(self.left[0])
            pattern.matches(Point("", pattern.sides[0], pattern.leaf))  # raises if it counts from the end
            return
        patterns = [_pattern(text) for text in (*self.left, *self.right)]
        if len({pattern.kind for pattern in patterns}) > 1:
            raise BadText(f"{str(self)!r} has an operation on one side and a module on the other.")
        named = {pattern.sides for pattern in patterns if len(pattern.sides) == 1}
        if len(named) > 1:
            raise BadText(f"{str(self)!r} names several sides; an input is never paired with an output.")
        if any(pattern.leaf for pattern in patterns) and self.verb != "pair":
            raise BadText(f"{str(self)!r} names a leaf, which only pair, flat and ignore can.")
        for part in range(max(left, right)):
            self._renamer(part)

    def __str__(self) -> str:
        left, right = ", ".join(self.left), ", ".join(self.right)
        return f"{self.verb} {left} -> {right}" if right else f"{self.verb} {left}"

    @classmethod
    def parse(cls, text: str) -> PairingRule:
        """Read one line; raises BadText with what is allowed where it is not a rule."""
        verb, _, rest = _without_comment(text).partition(" ")
        if verb not in _VERBS:
            raise BadText(f"{text.strip()!r} is no rule; a line begins with one of {', '.join(_VERBS)}.")
        left, *right = re.split(r"\s+->\s+", rest.strip())
        if verb in ("flat", "ignore"):
            if right or not left:
                raise BadText(f"{text.strip()!r} is not `{_FORMS[verb]}`.")
            return cls(verb, left)
        if len(right) != 1 or not left:
            raise BadText(f"{text.strip()!r} is not `{_FORMS[verb]}`; the arrow stands between spaces.")
        return cls(verb, _several(left), _several(right[0]))

    def covers(self, point: Point) -> bool:
        """Tell whether a pattern on the left names `point`."""
        return any(_pattern(text).matches(point) for text in self.left)

    def counterpart(self, point: Point) -> Point | None:
        """Return the candidate's point that `pair` or `rename` makes of one of the reference's."""
        return self._carried(point, 0, self.left[0], self.right[0])

    def part(self, point: Point) -> FusedPart | None:
        """Return which part of which fused point this is, by `fuse` or `split`."""
        parts, fused = (self.left, self.right[0]) if self.verb == "fuse" else (self.right, self.left[0])
        for number, text in enumerate(parts):
            if (whole := self._carried(point, number, text, fused)) is not None:
                return FusedPart(number, whole)
        return None

    def _carried(self, point: Point, part: int, source: str, target: str) -> Point | None:
        old, new = _pattern(source), _pattern(target)
        if point.side not in old.sides or point.side not in new.sides or point.op != (old.kind == "op"):
            return None
        if point.leaf[: len(old.leaf)] != old.leaf or (name := self._renamer(part)(point.name)) is None:
            return None
        return Point(name, point.side, new.leaf + point.leaf[len(old.leaf) :], point.op)

    def _renamer(self, part: int) -> Callable[[str], str | None]:
        if self.verb == "split":
            return renamer(_glob(self.right[part]), _glob(self.left[0]))
        below = ".**" if self.verb == "rename" else ""
        left, right = _glob(self.left[part if self.verb == "fuse" else 0]), _glob(self.right[0])
        if below and "." in (left, right):
            raise BadText(f"{str(self)!r} renames the whole model; say what of it: `rename ** -> model.**`.")
        if below and left.split(".")[-1] == right.split(".")[-1] == "**":
            below = ""
        return renamer(left + below, right + below)


def parse_rules(text: str) -> tuple[PairingRule, ...]:
    """Read a file of rules, one a line; errors say which line."""
    rules: list[PairingRule] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not _without_comment(line):
            continue
        try:
            rules.append(PairingRule.parse(line))
        except BadText as error:
            raise BadText(f"line {number} of the rules: {error}") from None
    return tuple(rules)


# Text --------------------------------------------------------------------------------------------

# What separates rules and their names, and so has to be written with a backslash in one.
_SEPARATES = re.compile(r"\\u[0-9a-f]{4}|\\(?:\S|\Z)|\\\s|[\s#,>]", re.DOTALL)
_QUOTED_SEPARATES = re.compile(r"[\s#,>]")
_COMMENT = re.compile(r"(?:\A|(?<=\s))#.*", re.DOTALL)


def _without_comment(line: str) -> str:
    return " ".join(_COMMENT.sub("", line).split())


def _several(text: str) -> list[str]:
    """Split at the commas that no backslash takes the meaning from."""
    names = [match.strip() for match in re.findall(r"(?:\\.|[^\\,])+|(?<=,)(?=,|\Z)", text)]
    if not all(names):
        raise BadText(f"{text!r} has a comma with no name after or before it.")
    return names


@lru_cache(maxsize=1024)
def _pattern(text: str) -> Pattern:
    """Read one name of a rule: like an exclusion, it means every side unless it says which."""
    return replace(Pattern.parse(f"!{text}"), exclude=False)


def _glob(text: str) -> str:
    return _pattern(text).glob


def _canonical(text: str, *, arrow: bool) -> str:
    if not isinstance(text, str):
        raise BadText(f"a rule's names are text such as '**.q_proj', not {type(text).__name__} {text!r}.")
    text = text.strip()
    if text.startswith("!"):
        raise BadText(f"{text!r}: a rule has no !; what it does not name it leaves alone.")
    pattern = _pattern(text)
    if pattern.kind == "type":
        raise BadText(f"{text!r} asks for a class, which a run does not tell; name the modules.")
    if arrow and len(pattern.sides) not in (1, *((len(SIDES),) if pattern.kind == "name" else (2,))):
        raise BadText(f"{text!r} names several sides; a rule with an arrow is about one of them, or all.")
    glob = _SEPARATES.sub(lambda match: _kept(match.group(), arrow=arrow), pattern.glob)
    plain = str(replace(pattern, glob=glob, leaf=(), exclude=True)).removeprefix("!")
    leaf = _QUOTED_SEPARATES.sub(lambda match: f"\\u{ord(match.group()):04x}", leaf_text(pattern.leaf))
    return plain + leaf


def _kept(token: str, *, arrow: bool) -> str:
    char = token[-1]
    if char.isspace() and len(token) <= 2:
        return f"\\u{ord(char):04x}"
    if len(token) > 1 or (token == "," and not arrow):
        return token
    return f"\\{token}"
