r"""Select points of a model by name, type, operation or side.

    select(["model.layers.*:input", "!model.layers.3"], places)

A pattern is one line of text:

    model.layers.*              `*` stays within one part of the dotted name
    **.self_attn                `**` crosses parts: none, one or many
    .                           the whole model
    model.{norm,layers.{0,-1}}  braces are written out first, as in a shell; -1 counts from the end
    model.layers[0:4].mlp       a slice of the numbered modules, by number
    type:*Norm                  modules by class, or by a class they derive from
    op:aten.softmax             operations: any overload, and `_softmax` as well
    model.norm:input            a side; default output; several with commas, `:io` for two of them, `:*` for all
    model.layers.3[1]           what the side holds at [1]; default every leaf
    !model.layers.3             without these: every side unless one is given

A backslash takes the meaning from the character after it, so that `str(point)` is a pattern for just that
point. Patterns are parsed once into a cached recipe of exact names and one regular expression.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from layerscope.errors import BadText, NoSuchPoint
from layerscope.points import SIDES, Leaf, Point, Side, escape, leaf_text, parse_leaf, unescape, unwrapped

Kind = Literal["name", "type", "op"]

# They hold modules or parameters and have no forward: a tap there would stay silent for ever.
_CONTAINERS = ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
_MOST_ALTERNATIVES = 10_000


class Place(NamedTuple):
    """One module of a model: its name without wrappers, its class and the classes that one derives from."""

    name: str
    types: tuple[str, ...] = ()


class Split(NamedTuple):
    """The patterns that speak of modules, and those that speak of operations."""

    modules: tuple[Pattern, ...]
    ops: tuple[Pattern, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """What one line of the language says, as a value; `parse` and `str` are its text form.

    >>> Pattern.parse("model.layers.*:input[0]")
    Pattern(glob='model.layers.*', kind='name', sides=('input',), leaf=(0,), exclude=False)
    >>> str(Pattern("*Norm", "type", exclude=True))
    '!type:*Norm:output'
    """

    glob: str
    kind: Kind = "name"
    sides: tuple[Side, ...] = ("output",)
    leaf: Leaf = ()
    exclude: bool = False

    def __post_init__(self) -> None:
        if not self.sides or not set(self.sides) <= set(SIDES):
            raise BadText(f"{self.sides!r} are not sides; the sides are {', '.join(SIDES)}.")
        if not set(self.sides) <= set(_sides_of(self.kind)):
            raise BadText(
                f"operations have no gradient side, but {self.glob!r} asks for {', '.join(self.sides)}; "
                "write op:NAME:input or op:NAME:output, or take the gradient at a module."
            )
        if self.exclude and self.kind == "op" and self.leaf:
            raise BadText(
                f"an operation is excluded whole, not its {leaf_text(self.leaf)}; ask for the leaves to keep."
            )
        object.__setattr__(self, "sides", tuple(side for side in SIDES if side in self.sides))
        if not self.glob:
            raise BadText("an empty pattern; write `.` for the whole model, `**` for every module.")
        if self.glob.startswith("!"):
            raise BadText(f"the ! that excludes comes first of all in a pattern, not before {self.glob[1:]!r}.")
        if not _GLOB.fullmatch(self.glob):
            raise BadText(f"{self.glob!r} is not a name; a backslash goes before [ ] : and \\ in one.")
        _recipe(self.kind, self.glob)

    def __str__(self) -> str:
        every = _sides_of(self.kind)
        usual = every if self.exclude else ("output",)
        # `op:output` is the output of a module called op; an operation called output has to say its side.
        unclear = self.kind != "name" and _SIDE_LIST.fullmatch(self.glob)
        if self.sides == usual and not unclear:
            sides = ""
        elif self.sides == every and self.glob not in ("op", "type"):
            sides = ":*"
        else:
            sides = ":" + ",".join(self.sides)
        kind = "" if self.kind == "name" else f"{self.kind}:"
        return f"{'!' * self.exclude}{kind}{self.glob}{sides}{leaf_text(self.leaf)}"

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Read a pattern; raises BadText with what is allowed where it is not one."""
        if not isinstance(text, str):
            raise BadText(f"a pattern is text such as 'model.layers.*', not {type(text).__name__} {text!r}.")
        return _parse(text)

    def matches(self, point: Point, types: tuple[str, ...] = ()) -> bool:
        """Tell whether this names `point`, whose module has the classes `types`; `!` is not looked at.

        A leaf names all that lies under it. What counts from the end needs the whole model and raises
        BadText: `select` knows it.
        """
        if point.op != (self.kind == "op") or point.side not in self.sides:
            return False
        if point.leaf[: len(self.leaf)] != self.leaf:
            return False
        if self.kind == "op":
            return self.matches_op(point.name)
        recipe = _recipe(self.kind, self.glob)
        if self.kind == "type":
            return any(recipe.matches(name) for name in types)
        if recipe.counts_from_the_end:
            raise BadText(
                f"{str(self)!r} counts from the end, which takes the model's list of modules, "
                f"and only {str(point)!r} is at hand; write the number."
            )
        return recipe.matches(point.name) or point.name in recipe.resolved(_numbered([point.name]), [point.name])

    def matches_op(self, qualified: str) -> bool:
        """Tell whether this names an operation, given as `aten::_softmax.default` or `aten._softmax.default`."""
        if self.kind != "op":
            return False
        recipe = _recipe("op", self.glob)
        return any(recipe.matches(name) for name in _op_names(qualified))


def select(patterns: str | Pattern | Iterable[str | Pattern], places: Iterable[Place]) -> list[Point]:
    """Return the points that `patterns` name among a model's modules, in the modules' order.

    A point with leaf () stands for every leaf of its side. Exclusions alone mean everything but those.
    Containers (ModuleList and its kin) are passed over, because they are never called. Operations are
    not found among modules: patterns with `op:` are `select_op`'s.

    Raises NoSuchPoint when any one pattern matches nothing, because a tap that silently matches nothing
    looks exactly like a layer that never ran, and an exclusion that does records too much.
    """
    model = _Model(places)
    asked = _parsed(patterns)
    wanted = [pattern for pattern in asked if pattern.kind != "op" and not pattern.exclude]
    unwanted = [pattern for pattern in asked if pattern.kind != "op" and pattern.exclude]
    chosen: dict[int, _Chosen] = {}
    for pattern in wanted:
        for at in model.running(pattern):
            chosen.setdefault(at, {}).update(_asked(pattern))
    if unwanted and all(pattern.exclude for pattern in asked):
        chosen = {at: {("output", ()): None} for at in range(len(model.places)) if not model.holds(at)}
    sides = {side for each in chosen.values() for side, _ in each}
    for pattern in unwanted:
        excluded = model.running(pattern)
        if sides and sides.isdisjoint(pattern.sides):
            raise NoSuchPoint(
                f"the exclusion {str(pattern)!r} takes nothing away: of the sides, only {', '.join(sorted(sides))} "
                "is asked for. Leave the side out to exclude them all."
            )
        for at in excluded:
            if at in chosen:
                chosen[at] = _less(chosen[at], pattern, Point(model.places[at].name).place)
    points = {
        Point(model.places[at].name, side, leaf): None for at in sorted(chosen) for side, leaf in _in_order(chosen[at])
    }
    if chosen and not points:
        raise NoSuchPoint(
            f"nothing is left to record: {_listed(map(str, unwanted))} takes away all that was asked for "
            f"({len(chosen)} of {len(model.places)} modules); exclude less, or ask for more."
        )
    return list(points)


def select_op(patterns: str | Pattern | Iterable[str | Pattern], qualified: str) -> list[Point]:
    """Return the points of one operation that `patterns` name; none is no error, for which will run is not known.

    >>> [str(point) for point in select_op("op:aten.softmax", "aten::_softmax.default")]
    ['op:aten.softmax:output']
    """
    chosen: _Chosen = {}
    named = [pattern for pattern in split(patterns).ops if pattern.matches_op(qualified)]
    for pattern in named:
        if not pattern.exclude:
            chosen.update(_asked(pattern))
    name = op_name(qualified)
    for pattern in named:
        if pattern.exclude:
            chosen = _less(chosen, pattern, f"op:{name}")
    return [Point(name, side, leaf, op=True) for side, leaf in _in_order(chosen)]


def split(patterns: str | Pattern | Iterable[str | Pattern]) -> Split:
    """Tell the patterns about modules from those about operations, parsing what is text."""
    asked = _parsed(patterns)
    return Split(
        tuple(pattern for pattern in asked if pattern.kind != "op"),
        tuple(pattern for pattern in asked if pattern.kind == "op"),
    )


def op_name(qualified: str) -> str:
    """Return the one name an operation goes by: no overload, no private underscore; in-place `_` stays.

    >>> op_name("aten::_softmax.default"), op_name("aten.add_.Tensor"), op_name("aten.__and__.Tensor")
    ('aten.softmax', 'aten.add_', 'aten.__and__')
    """
    library, packet, _ = _op_parts(qualified)
    return f"{library}.{_public(packet)}" if library else _public(packet)


@lru_cache(maxsize=1024)
def renamer(before: str, after: str) -> Callable[[str], str | None]:
    """Return what makes `after` of a name that `before` matches, and None of any other; wildcards are carried in order.

    >>> renamer("transformer.h.*.**", "model.layers.*.**")("transformer.h.3.attn")
    'model.layers.3.attn'
    """
    old, new = _template(before), _template(after)
    wild = [[token for part in parts for token in part if token.startswith("*")] for parts in (old, new)]
    if [len(token) > 1 for token in wild[0]] != [len(token) > 1 for token in wild[1]]:
        raise BadText(
            f"{before!r} has the wildcards {' '.join(wild[0]) or '(none)'} and {after!r} has "
            f"{' '.join(wild[1]) or '(none)'}; what they stand for is carried over in order, so they must be the same."
        )
    regex = re.compile(_capturing(old), re.DOTALL)

    def renamed(name: str) -> str | None:
        match = regex.fullmatch(name)
        if match is None:
            return None
        values = iter(match.groups(""))
        written = (
            "".join(next(values) if token.startswith("*") else unescape(token) for token in part) for part in new
        )
        return ".".join(text for text, part in zip(written, new, strict=True) if text or not _is_deep(part))

    return renamed


# Reading ----------------------------------------------------------------------------------------

_SLICE = re.compile(r"\[(-?[0-9]{1,9})?:(-?[0-9]{1,9})?(?::(-?[0-9]{1,9})?)?\]")
_GLOB = re.compile(rf"(?:[^\\\[\]:]|\\.|{_SLICE.pattern})*", re.DOTALL)
_SIDE_LIST = re.compile(rf"(?:{'|'.join(SIDES)})(?:,(?:{'|'.join(SIDES)}))*")
_KIND = re.compile(rf"(type|op):(?!{_SIDE_LIST.pattern}(?:\[|\Z))")
_LIBRARY = re.compile(r"\A((?:[^\\\[\]:]|\\.)*)::", re.DOTALL)
_LEAVES = re.compile(r'(?:\[(?:[^\[\]"]*|"(?:[^"\\]|\\.)*")\])+', re.DOTALL)


@lru_cache(maxsize=16_384)
def _parse(text: str) -> Pattern:
    rest = text.removeprefix("!")
    exclude = rest != text
    kind: Kind = "name"
    if match := _KIND.match(rest):
        kind = "type" if match.group(1) == "type" else "op"
        rest = rest[match.end() :]
        if kind == "op":
            rest = _LIBRARY.sub(r"\1.", rest)
    match = _GLOB.match(rest)
    assert match is not None  # it matches the empty text too
    glob, rest = match.group(), rest[match.end() :]
    if not glob and not rest.startswith(("[", "]")):
        raise BadText(f"{text!r} is an empty pattern; write `.` for the whole model, `**` for every module.")
    sides = _sides_of(kind) if exclude else ("output",)
    if rest.startswith(":"):
        written, bracket, rest = rest[1:].partition("[")
        rest = bracket + rest
        written = "input,output" if written == "io" else written
        if written != "*" and not _SIDE_LIST.fullmatch(written):
            raise BadText(
                f"{text!r} has no side called {written!r}; the sides are {', '.join(SIDES)}, several with commas, "
                "`:io` for both of the forward, `:*` for all. "
                "A colon in a name is written \\:, and a pattern starts with type: or op:."
            )
        sides = _sides_of(kind) if written == "*" else tuple(side for side in SIDES if side in written.split(","))
    if rest:
        _refuse_unless_leaves(text, glob, rest)
    return Pattern(glob, kind, sides, parse_leaf(rest), exclude)


def _refuse_unless_leaves(text: str, glob: str, rest: str) -> None:
    match = _LEAVES.match(rest)
    if rest.startswith("\\"):
        raise BadText(f"{text!r} ends in a lone backslash; a backslash itself is written \\\\.")
    if rest.startswith("]"):
        raise BadText(f"{text!r} has a ] without its [; one that belongs to a name is written \\].")
    after = rest[match.end() :] if match else "["
    if match is None or after.startswith("["):
        raise BadText(
            f"{text!r} opens a [ that is never closed or holds no leaf; write a leaf as [0], [key] or "
            '["any key"], a slice of numbered modules as [0:4], and a [ in a name as \\[.'
        )
    leaves = match.group()
    if after.startswith(":"):
        raise BadText(f"the leaf comes last: not {text!r} but {glob + after + leaves!r}.")
    if after:
        number = re.fullmatch(r"\[(-?[0-9]+)\]", leaves)
        instead = f"{glob}.{number.group(1)}{after}" if number else f"{glob}{after}{leaves}"
        shown = leaves if leaves.isprintable() else ascii(leaves)
        raise BadText(
            f"{text!r} goes on after the leaf {shown}, which comes last; did you mean {instead!r}? "
            "A numbered module is a part of the name: model.layers.0.mlp; a slice has a colon: model.layers[0:4].mlp."
        )


def _parsed(patterns: str | Pattern | Iterable[str | Pattern]) -> list[Pattern]:
    if isinstance(patterns, Mapping):
        raise BadText("a mapping has aliases for keys; pass its values, the patterns.")
    several = [patterns] if isinstance(patterns, (str, Pattern)) else list(patterns)
    if not several:
        raise BadText("no pattern given; `**` is every module, `.` the whole model.")
    return [pattern if isinstance(pattern, Pattern) else Pattern.parse(pattern) for pattern in several]


def _sides_of(kind: Kind) -> tuple[Side, ...]:
    return ("input", "output") if kind == "op" else SIDES


# The recipe -------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """What one part of a dotted name has to be: `**` (deep), one of its siblings' numbers, or a regex."""

    regex: str = ""
    literal: str | None = None
    deep: bool = False
    numbers: slice | None = None


class _Stages(NamedTuple):
    """A pattern with numbers that only the model knows: (what comes before, which numbers)..., what comes after."""

    before: tuple[tuple[re.Pattern[str], slice], ...]
    after: re.Pattern[str]


class _Recipe(NamedTuple):
    """A glob made ready: names to look up, a regex for the rest, and what depends on the model's numbers."""

    names: frozenset[str]
    regex: re.Pattern[str] | None
    staged: tuple[_Stages, ...]

    @property
    def counts_from_the_end(self) -> bool:
        bounds = [(numbers.start, numbers.stop) for stages in self.staged for _, numbers in stages.before]
        return any(bound is not None and bound < 0 for pair in bounds for bound in pair)

    def matches(self, name: str) -> bool:
        return name in self.names or (self.regex is not None and self.regex.fullmatch(name) is not None)

    def resolved(self, numbered: Mapping[str, Sequence[int]], names: Sequence[str]) -> set[str]:
        """Return those of `names` that the numbered part matches, `numbered` being who has which numbers.

        From left to right: the heads are the names reached so far, each ending in a number. Going through
        the ancestors of a name instead of one big regex finds every way in which `**` may divide it.
        """
        found: set[str] = set()
        for stages in self.staged:
            heads: set[str] | None = None
            for regex, numbers in stages.before:
                heads = {
                    f"{parent}.{number}" if parent else str(number)
                    for parent, have in numbered.items()
                    if _continues(parent, heads, regex)
                    for number in _in_slice(numbers, have)
                }
            found.update(name for name in names if _continues(name, heads, stages.after))
        return found


@lru_cache(maxsize=16_384)
def _recipe(kind: Kind, glob: str) -> _Recipe:
    names: set[str] = set()
    regexes: list[str] = []
    staged: list[_Stages] = []
    for flat in _alternatives(glob):
        for text in (flat, _without_underscore(flat)) if kind == "op" else (flat,):
            parts = _parts(text, glob=glob, numbers=kind == "name")
            if any(part.numbers is not None for part in parts):
                staged.append(_stages(parts))
            elif all(part.literal is not None for part in parts):
                names.add("" if text == "." and kind == "name" else ".".join(part.literal or "" for part in parts))
            else:
                regexes.append(_regex(parts))
    regex = re.compile("|".join(dict.fromkeys(regexes)), re.DOTALL) if regexes else None
    return _Recipe(frozenset(names), regex, tuple(staged))


_BRACE_TOKEN = re.compile(r"\\.|\[[^\]]*\]|[{},]|[^\\\[{},]+", re.DOTALL)


def _alternatives(glob: str) -> list[str]:
    """Write the braces out: `a.{b,c}` is `a.b` and `a.c`."""
    finished: list[list[str]] = [[]]
    current: list[list[str]] = [[""]]
    for token in _BRACE_TOKEN.findall(glob):
        if token == "{":
            finished.append([])
            current.append([""])
        elif token == "," and len(current) > 1:
            finished[-1] += current[-1]
            current[-1] = [""]
        elif token == "}":
            if len(current) == 1:
                raise BadText(f"{glob!r} has a }} without its {{; one that belongs to a name is written \\}}.")
            choices = finished.pop() + current.pop()
            if len(choices) * len(current[-1]) > _MOST_ALTERNATIVES:
                raise BadText(
                    f"the braces of {glob[:60]!r} stand for over {_MOST_ALTERNATIVES} names; "
                    "write `*`, a slice, or several patterns."
                )
            current[-1] = [start + choice for start in current[-1] for choice in choices]
        else:
            current[-1] = [start + token for start in current[-1]]
    if len(current) > 1:
        raise BadText(f"{glob!r} has a {{ without its }}; one that belongs to a name is written \\{{.")
    if "" in current[0]:
        raise BadText(f"the braces of {glob!r} hold an empty name; write `.` for the whole model.")
    return list(dict.fromkeys(current[0]))


_PART_TOKEN = re.compile(r"\\u[0-9a-f]{4}|\\.|\[[^\]]*\]|\*+|\.|[^\\\[*.]+", re.DOTALL)
_FROM_THE_END = re.compile(r"-([1-9][0-9]{0,8})")


def _parts(flat: str, *, glob: str, numbers: bool) -> list[_Part]:
    parts: list[_Part] = []
    tokens: list[str] = []
    after_slice = False
    for token in [*_PART_TOKEN.findall(flat), "."]:
        if token == ".":
            if not after_slice:
                parts.append(_part(tokens, numbers=numbers))
            tokens, after_slice = [], False
        elif token.startswith("["):
            if not numbers:
                raise BadText(f"{glob!r} has a slice, which numbers modules; types and operations have none.")
            if tokens:
                parts.append(_part(tokens, numbers=numbers))
            parts.append(_Part(numbers=_slice(token)))
            tokens, after_slice = [], True
        elif after_slice:
            raise BadText(f"{glob!r} goes on with {token!r} after a slice; a dot, a side or a leaf may follow one.")
        else:
            tokens.append(token)
    return parts


def _part(tokens: list[str], *, numbers: bool) -> _Part:
    text = "".join(tokens)
    if numbers and (match := _FROM_THE_END.fullmatch(text)):
        back = -int(match.group(1))
        return _Part(numbers=slice(back, back + 1 if back < -1 else None))
    if text.strip("*") == "" and text:
        return _Part(deep=True) if len(text) > 1 else _Part(regex=r"[^.]+")
    if any(token.startswith("*") for token in tokens):
        pieces = (
            (r".*" if len(token) > 1 else r"[^.]*") if token.startswith("*") else re.escape(unescape(token))
            for token in tokens
        )
        return _Part(regex="".join(pieces))
    name = "".join(map(unescape, tokens))
    return _Part(regex=re.escape(name), literal=name)


def _template(glob: str) -> list[list[str]]:
    """Return the tokens of each part of a glob whose wildcards are to be carried over."""
    parts: list[list[str]] = [[]]
    for token in _PART_TOKEN.findall(glob if glob != "." else ""):
        if token == ".":
            parts.append([])
        elif token.startswith("[") or (not token.startswith("\\") and set(token) & set("{}")):
            raise BadText(f"{glob!r} has {token!r}, which stands for several names; to carry names over, write `*`.")
        else:
            parts[-1].append(token)
    if any(_FROM_THE_END.fullmatch("".join(part)) for part in parts):
        raise BadText(f"{glob!r} counts from the end; to carry names over, write `*` or the number.")
    return parts


def _is_deep(part: Sequence[str]) -> bool:
    return len(part) == 1 and len(part[0]) > 1 and not part[0].strip("*")


def _capturing(parts: Sequence[Sequence[str]]) -> str:
    """Join a template into one expression with a group for each wildcard."""
    written, dot = "", ""
    for at, part in enumerate(parts):
        if _is_deep(part) and at < len(parts) - 1:
            written, dot = written + dot + r"(?:(.*)\.)?", ""
        elif _is_deep(part):
            written += r"(?:\.(.*))?" if dot else "(.*)"
        else:
            for token in part:
                wild = "(.*)" if len(token) > 1 else "([^.]+)" if len(part) == 1 else "([^.]*)"
                written += dot + (wild if token.startswith("*") else re.escape(unescape(token)))
                dot = ""
            written, dot = written + ("" if part else dot), r"\."
    return written


def _slice(token: str) -> slice:
    match = _SLICE.fullmatch(token)
    assert match is not None  # _GLOB lets no other bracket through
    start, stop, step = (None if bound is None else int(bound) for bound in match.groups())
    if step is not None and step < 1:
        raise BadText(f"the step of {token} is not positive; points come in the model's order either way.")
    return slice(start, stop, step)


def _regex(parts: Sequence[_Part], *, within: bool = False) -> str:
    """Join parts into one expression; `within` says that a part of the name comes before."""
    written = ""
    dot = r"\." if within else ""
    for at, part in enumerate(parts):
        if not part.deep:
            written += dot + part.regex
            dot = r"\."
        elif all(later.deep for later in parts[at:]):
            return written + (r"(?:\..*)?" if dot else ".*")
        else:
            written += dot + r"(?:.*\.)?"
            dot = ""
    return written


def _stages(parts: Sequence[_Part]) -> _Stages:
    before: list[tuple[re.Pattern[str], slice]] = []
    since = 0
    for at, part in enumerate(parts):
        if part.numbers is not None:
            before.append((re.compile(_regex(parts[since:at], within=bool(before)), re.DOTALL), part.numbers))
            since = at + 1
    return _Stages(tuple(before), re.compile(_regex(parts[since:], within=True), re.DOTALL))


def _continues(name: str, heads: set[str] | None, regex: re.Pattern[str]) -> bool:
    """Tell whether `name` is one of `heads` and then `regex`; no heads at all: `regex` from the beginning."""
    if heads is None:
        return regex.fullmatch(name) is not None
    return any(regex.fullmatch(name, len(head)) for head in _ancestors(name) if head in heads)


def _ancestors(name: str) -> Iterator[str]:
    """Yield `a`, `a.b`, `a.b.c` of `a.b.c`."""
    for dot in re.finditer(r"\.", name):
        yield name[: dot.start()]
    yield name


def _numbered(names: Iterable[str]) -> dict[str, list[int]]:
    """Return the numbers of each module's numbered children, sorted; "" is the root."""
    found: dict[str, set[int]] = {}
    for name in names:
        for ancestor in _ancestors(name):
            parent, _, last = ancestor.rpartition(".")
            if re.fullmatch(r"0|[1-9][0-9]{0,17}", last):
                found.setdefault(parent, set()).add(int(last))
    return {parent: sorted(numbers) for parent, numbers in found.items()}


def _in_slice(bounds: slice, numbers: Sequence[int]) -> list[int]:
    """Return the numbers that a slice takes: by number, so that a part of a model has the same layers as the whole."""

    def number(bound: int) -> int:
        return bound if bound >= 0 else numbers[max(bound, -len(numbers))]

    start = 0 if bounds.start is None else number(bounds.start)
    stop = numbers[-1] + 1 if bounds.stop is None else number(bounds.stop)
    taken = range(start, stop, bounds.step or 1)
    return [each for each in numbers if each in taken]


# What is chosen of one module or operation ---------------------------------------------------------

_Chosen = dict[tuple[Side, Leaf], None]  # in the order it was asked for


def _asked(pattern: Pattern) -> _Chosen:
    return dict.fromkeys((side, pattern.leaf) for side in pattern.sides)


def _less(chosen: _Chosen, pattern: Pattern, place: str) -> _Chosen:
    """Return what an exclusion leaves; raises where it would take away a part of what is asked for whole."""
    kept: _Chosen = {}
    for side, leaf in chosen:
        if side not in pattern.sides or leaf[: len(pattern.leaf)] != pattern.leaf:
            kept[side, leaf] = None
        if side in pattern.sides and len(leaf) < len(pattern.leaf) and pattern.leaf[: len(leaf)] == leaf:
            raise BadText(
                f"{str(pattern)!r} would take one leaf out of {f'{place}:{side}{leaf_text(leaf)}'!r}, which is asked "
                "for whole; ask for the leaves to keep, name[0] and so on, instead."
            )
    return kept


def _in_order(chosen: _Chosen) -> list[tuple[Side, Leaf]]:
    """Return what is chosen, sides in their order, without the leaves that another one covers."""
    covered = [(side, leaf) for side, leaf in chosen if any((side, leaf[:n]) in chosen for n in range(len(leaf)))]
    return sorted((each for each in chosen if each not in covered), key=lambda each: SIDES.index(each[0]))


# Operations -------------------------------------------------------------------------------------


def _op_parts(qualified: str) -> tuple[str, str, str]:
    library, colons, rest = qualified.partition("::")
    if colons:
        packet, _, overload = rest.partition(".")
        return library, packet, overload or "default"  # torch writes aten::relu for aten.relu.default
    parts = qualified.split(".", 2)
    return ("", parts[0], "") if len(parts) == 1 else (parts[0], parts[1], "".join(parts[2:]))


def _op_names(qualified: str) -> Iterator[str]:
    """Yield the names one operation answers to, with and without library, underscore and overload."""
    library, packet, overload = _op_parts(qualified)
    for name in dict.fromkeys((packet, _public(packet))):
        yield name
        if library:
            yield f"{library}.{name}"
        if library and overload:
            yield f"{library}.{name}.{overload}"


def _public(packet: str) -> str:
    return packet[1:] if re.match(r"_[^_]", packet) else packet


def _without_underscore(flat: str) -> str:
    """`aten._softmax` also asks for `aten.softmax`; `aten._*` asks for the private ones only."""
    return re.sub(r"\A((?:[^.\\]|\\.)*\.)?_(?=[A-Za-z0-9])", lambda m: m.group(1) or "", flat)


# A model's modules, and what to say when they are not there ----------------------------------------


class _Model:
    def __init__(self, places: Iterable[Place]) -> None:
        self.places = list(places)

    @cached_property
    def by_name(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for at, place in enumerate(self.places):
            found.setdefault(place.name, []).append(at)
        return found

    @cached_property
    def numbered(self) -> dict[str, list[int]]:
        return _numbered(self.by_name)

    def holds(self, at: int) -> bool:
        """Tell whether a module only holds others: exactly a ModuleList, say, and not a class made from it."""
        types = self.places[at].types
        return types[:1] != () and types[0] in _CONTAINERS and types[1:2] in ((), ("Module",))

    def matching(self, pattern: Pattern) -> list[int]:
        recipe = _recipe(pattern.kind, pattern.glob)
        if pattern.kind == "type":
            asked = {types: any(map(recipe.matches, types)) for types in {place.types for place in self.places}}
            return [at for at, place in enumerate(self.places) if asked[place.types]]
        names = {name for name in recipe.names if name in self.by_name}
        if recipe.regex is not None:
            names.update(filter(recipe.regex.fullmatch, self.by_name))
        if recipe.staged:
            names |= recipe.resolved(self.numbered, list(self.by_name))
        return sorted(at for name in names for at in self.by_name[name])

    def running(self, pattern: Pattern) -> list[int]:
        """Return where the modules are that `pattern` names and that can be called; raises when there are none."""
        found = self.matching(pattern)
        running = [at for at in found if not self.holds(at)]
        if not running:
            raise NoSuchPoint(self._nothing(pattern, found))
        return running

    def _nothing(self, pattern: Pattern, held: list[int]) -> str:
        subject = f"{'the exclusion' if pattern.exclude else 'the pattern'} {str(pattern)!r} matches no module"
        if not self.places:
            return f"{subject}: the model has none."
        if held:
            said = [f"that runs, among {len(self.places)}", self._why_held(pattern, held)]
        elif pattern.kind == "type":
            said = [f"among {len(self.places)}", self._types(pattern)]
        else:
            hints = filter(None, (self._wrapped(pattern), self._too_far(pattern), self._deeper(pattern)))
            said = [
                f"among {len(self.places)}",
                *list(hints)[:1],
                self._nearest(pattern),
            ]
        return f"{subject} {'; '.join(said)}. `layerscope points MODEL` lists them all."

    def _why_held(self, pattern: Pattern, held: list[int]) -> str:
        name, (kind, *_) = self.places[held[0]]
        why = f"{Point(name).place} is a {kind}, which holds others and is never called itself"
        if pattern.kind == "type":
            return why
        if pattern.leaf and f"{name}.{pattern.leaf[0]}" in self.by_name:
            meant = replace(pattern, glob=f"{pattern.glob}.{escape(str(pattern.leaf[0]))}", leaf=pattern.leaf[1:])
        else:
            meant = replace(pattern, glob=f"{pattern.glob}.*", leaf=())
        return f"{why}, did you mean {str(meant)!r}"

    def _types(self, pattern: Pattern) -> str:
        found = Counter(place.types[0] for place in self.places if place.types)
        near = get_close_matches(pattern.glob.rpartition(".")[2], found, n=1)
        hint = f"did you mean {str(replace(pattern, glob=escape(near[0])))!r}; " if near else ""
        return f"{hint}there are {_listed(f'{name} ({count})' for name, count in found.most_common())}"

    def _wrapped(self, pattern: Pattern) -> str | None:
        glob = unwrapped(pattern.glob)
        if glob in ("", pattern.glob) or not (meant := self._names_something(pattern, glob)):
            return None
        return f"names leave out what wrappers add, did you mean {str(meant)!r}"

    def _too_far(self, pattern: Pattern) -> str | None:
        for flat in _alternatives(pattern.glob):
            parts = _parts(flat, glob=pattern.glob, numbers=True)
            for at, part in enumerate(parts):
                asked = part.numbers
                if part.literal is not None and re.fullmatch("[0-9]{1,9}", part.literal):
                    asked = slice(int(part.literal), int(part.literal) + 1)
                if asked is None:
                    continue
                before = re.compile(_regex(parts[:at]), re.DOTALL)
                having = {parent: have for parent, have in self.numbered.items() if before.fullmatch(parent)}
                if having and not any(_in_slice(asked, have) for have in having.values()):
                    parent, have = next(iter(having.items()))
                    there = f"{len(have)} numbered modules, {have[0]} to {have[-1]}"
                    return f"{Point(parent).place} has {there if len(have) > 1 else f'one numbered module, {have[0]}'}"
                if part.numbers is not None:
                    break  # a regex cannot say what comes before the next number
        return None

    def _deeper(self, pattern: Pattern) -> str | None:
        meant = self._names_something(pattern, f"**.{pattern.glob}")
        return f"did you mean {str(meant)!r}" if meant else None

    def _names_something(self, pattern: Pattern, glob: str) -> Pattern | None:
        try:
            meant = replace(pattern, glob=glob)
        except BadText:
            return None  # half a brace, say: no hint is better than a wrong one
        return meant if any(not self.holds(at) for at in self.matching(meant)) else None

    def _nearest(self, pattern: Pattern) -> str:
        names = [place.name for at, place in enumerate(self.places) if not self.holds(at)]
        # `**.attn` says nothing of where it is: compare with the ends of names only.
        asked = pattern.glob.removeprefix("**.")
        parts = 0 if asked == pattern.glob else asked.count(".") + 1
        matcher = SequenceMatcher(b=asked)
        scored: list[tuple[float, int]] = []
        for at, name in enumerate(names):
            matcher.set_seq1(".".join(name.split(".")[-parts:]))
            # The quick ones are upper bounds: without them ten thousand names take a second.
            if matcher.real_quick_ratio() >= 0.6 and matcher.quick_ratio() >= 0.6 and matcher.ratio() >= 0.6:
                scored.append((-matcher.ratio(), at))
        near = [Point(names[at]).place for _, at in sorted(scored)[:3]]
        return (
            f"nearest: {', '.join(near)}" if near else f"there are: {_listed((Point(n).place for n in names), most=3)}"
        )


def _listed(texts: Iterable[str], *, most: int = 12) -> str:
    several = list(texts)
    more = [f"and {len(several) - most} more"] if len(several) > most else []
    return ", ".join([*several[:most], *more])
