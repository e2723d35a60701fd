"""Where a tensor can be seen, and when.

    Point("model.layers.3.self_attn", leaf=(0,))     # where: model.layers.3.self_attn:output[0]
    Moment(step=12, call=1)                          # when: step=12 batch=0 call=1

Both are plain values: they hash, sort in the order a reader expects, and print the same everywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from layerscope.errors import BadText

Side = Literal["input", "output", "grad_input", "grad_output"]
SIDES: tuple[Side, ...] = get_args(Side)
SIDE_TITLES: dict[Side, str] = {  # in the order of a page
    "output": "outputs",
    "input": "inputs",
    "grad_output": "gradients of the outputs",
    "grad_input": "gradients of the inputs",
}
Leaf = tuple[int | str, ...]

# What DDP, torch.compile, FSDP and activation checkpointing put into module names.
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True)
class Point:
    """One place in a model where a tensor can be seen.

    `name` is the module's dotted name ("" is the whole model) or, for `op=True`, the operation's.
    `leaf` walks into a nested value: positions of a tuple or of the positional arguments, keys of
    a dict, names of fields or keyword arguments. The text form reads back whatever the name holds.

    >>> str(Point("blocks.3.attn"))
    'blocks.3.attn:output'
    >>> str(Point("blocks.3.attn", "input", ("hidden_states",)))
    'blocks.3.attn:input[hidden_states]'
    >>> Point.parse("op:aten.softmax")
    Point(name='aten.softmax', side='output', leaf=(), op=True)
    """

    name: str
    side: Side = "output"
    leaf: Leaf = ()
    op: bool = False

    def __str__(self) -> str:
        return f"{self.place}:{self.side}{leaf_text(self.leaf)}"

    def __lt__(self, other: Point) -> bool:
        return self._order < other._order

    @property
    def place(self) -> str:
        """The text form without side and leaf: `.` is the whole model, `op:aten.mm` an operation."""
        if self.op:
            return f"op:{escape(self.name)}"
        return escape(self.name) if self.name not in ("", ".") else "\\." if self.name else "."

    @classmethod
    def parse(cls, text: str) -> Point:
        """Read a text form back; the side may be left out and is then `output`."""
        match = _POINT.fullmatch(text)
        if match is None:
            raise BadText(
                f"{text!r} is not a point; write name, name:side or name:side[leaf], with a side of "
                f"{', '.join(SIDES)}, and a backslash before any of \\ [ ] : * {{ }} ! in a name."
            )
        op, place, side, leaf = match.group("op", "place", "side", "leaf")
        name = "" if place == "." and not op else unescape(place)
        return cls(name, cast(Side, side or "output"), parse_leaf(leaf), bool(op))

    @property
    def _order(self) -> tuple[Any, ...]:
        # Python refuses int() of more than 4300 digits, and a name may be anything.
        natural = tuple((0, int(p), "") if p.isdecimal() and len(p) < 19 else (1, 0, p) for p in self.name.split("."))
        leaf = tuple((0, key, "") if isinstance(key, int) else (1, 0, key) for key in self.leaf)
        return (self.op, natural, SIDES.index(self.side), leaf)


@dataclass(frozen=True, slots=True)
class Moment:
    """When a tensor was seen.

    `epoch` is the caller's (None until it is set); `step` counts outermost forwards, `batch` those of
    the epoch, `call` the calls of one point within a step, `rank` the processes; all four from 0.

    >>> str(Moment(epoch=2, step=40, batch=7))
    'epoch=2 step=40 batch=7'
    """

    epoch: int | None = None
    step: int = 0
    batch: int = 0
    call: int = 0
    rank: int = 0

    def __str__(self) -> str:
        parts = [] if self.epoch is None else [f"epoch={self.epoch}"]
        parts.append(f"step={self.step}")
        if self.batch != self.step:
            parts.append(f"batch={self.batch}")
        parts += [f"{k}={v}" for k, v in (("call", self.call), ("rank", self.rank)) if v]
        return " ".join(parts)

    def __lt__(self, other: Moment) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[int, ...]:
        return (-1 if self.epoch is None else self.epoch, self.step, self.batch, self.call, self.rank)


def caption(point: Point) -> str:
    """Return what a point is called in a picture, whose title says its side.

    >>> caption(Point("")), caption(Point("blocks.0.attn", leaf=(1,)))
    ('the model', 'blocks.0.attn[1]')
    """
    return (point.place if point.name or point.op else "the model") + leaf_text(point.leaf)


def unwrapped(name: str) -> str:
    """Return a module's name without what wrappers added, so that wrapped and plain models align.

    Only leading `module` parts are DDP's; further down, `module` may be the user's own word.

    >>> unwrapped("module._orig_mod.layers.0._checkpoint_wrapped_module.mlp")
    'layers.0.mlp'
    """
    parts = name.split(".")
    while parts and parts[0] in WRAPPERS:
        parts.pop(0)
    return ".".join(p for p in parts if p == "module" or p not in WRAPPERS)


# Text forms -------------------------------------------------------------------------------------

# What would break a line or a terminal, and, with it, everything a pattern gives a meaning to: there, a
# part of a name such as `-1` counts from the end.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_SPECIAL = re.compile(rf"[\\\[\]:*{{}}!]|(?<![^.])-(?=[0-9])|{_UNPRINTABLE.pattern}")
_ESCAPED = re.compile(r"\\(u[0-9a-f]{4}|.)", re.DOTALL)
_PLAIN_KEY = re.compile(r"[A-Za-z_][\w.\-]*")
_LEAF = re.compile(r'\[(?:(?P<index>-?\d+)|(?P<key>[A-Za-z_][\w.\-]*)|(?P<quoted>"(?:[^"\\]|\\.)*"))\]')
_QUOTED_CHAR = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)", re.DOTALL)
_POINT = re.compile(
    # `op:output` is the output of a module called op, not an operation called output.
    rf"(?P<op>op:(?!(?:{'|'.join(SIDES)})(?:\[|\Z)))?"
    r"(?P<place>(?:[^\\\[\]:]|\\.)+)"
    rf"(?::(?P<side>{'|'.join(SIDES)}))?"
    r'(?P<leaf>(?:\[(?:[^\[\]"]*|"(?:[^"\\]|\\.)*")\])*)',
    re.DOTALL,
)


def escape(name: str) -> str:
    r"""Write a name so that it parses back, stays on one line and means only itself in a pattern.

    >>> escape("a:b\n")
    'a\\:b\\u000a'
    """
    return _SPECIAL.sub(lambda m: _escaped(m.group()), name)


def unescape(text: str) -> str:
    """Undo `escape`."""
    return _ESCAPED.sub(lambda m: chr(int(m.group(1)[1:], 16)) if len(m.group(1)) == 5 else m.group(1), text)


def _escaped(char: str) -> str:
    return f"\\u{ord(char):04x}" if char not in "\\[]:*{}!-" else "\\" + char


def leaf_text(leaf: Leaf) -> str:
    """Write a path into a nested value: `[0][attn_weights]`; odd keys are quoted as JSON strings."""
    write: Callable[[int | str], str] = lambda k: (  # noqa: E731
        str(k) if isinstance(k, int) else k if _PLAIN_KEY.fullmatch(k) else _quoted(k)
    )
    return "".join(f"[{write(key)}]" for key in leaf)


def parse_leaf(text: str) -> Leaf:
    """Undo `leaf_text`."""
    leaf: list[int | str] = []
    at = 0
    while at < len(text):
        match = _LEAF.match(text, at)
        if match is None:
            raise BadText(f'{text!r} is not a leaf; write [0], [key] or ["any key"], one after the other.')
        index, key, quoted = match.group("index", "key", "quoted")
        try:
            leaf.append(int(index) if index is not None else key if key is not None else _unquoted(quoted))
        except ValueError as error:
            raise BadText(f"{match.group()!r} is not a leaf: {error}.") from None
        at = match.end()
    return tuple(leaf)


def _quoted(key: str) -> str:
    return _UNPRINTABLE.sub(lambda m: _escaped(m.group()), json.dumps(key, ensure_ascii=False))


def _unquoted(text: str) -> str:
    # One escape at a time: JSON would join two lone surrogates into one character.
    return _QUOTED_CHAR.sub(lambda m: str(json.loads(f'"{m.group()}"')), text[1:-1])
