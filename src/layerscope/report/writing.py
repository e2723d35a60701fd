r"""How numbers and names are written on every page, once.

number(0.0123456)        # '0.01235'
printable("a\x1b[31m")   # 'a\u001b[31m': a name can never steer a terminal
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from layerscope.report.parts import Kind, Profile, Value

NOTHING = "-"
DIGITS = 4

# C0 and C1 controls steer terminals; separators break lines; bidirectional and invisible characters make a
# name look like another; lone surrogates cannot be encoded at all.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    r"""Return the text with everything that is not a visible character written out.

    >>> printable("evil\x1b[2J\n")
    'evil\\u001b[2J\\u000a'
    """
    return _UNPRINTABLE.sub(lambda m: f"\\u{ord(m.group()):04x}", text)


def number(value: float) -> str:
    """Write a number with four significant digits, whatever its size.

    >>> [number(x) for x in (1.0, 0.001234567, 12345.6, -1.5e-9, float("inf"), 0.0)]
    ['1.000', '0.001235', '12346', '-1.500e-9', 'inf', '0']
    """
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.{DIGITS - 1}e}".partition("e")
    power = int(exponent)
    if not -4 < power < 5:
        return f"{mantissa}e{power}"
    return f"{value:.{max(0, DIGITS - 1 - power)}f}"


def count(value: int) -> str:
    """Write a whole number with its thousands apart."""
    return f"{value:,}"


def many(count: int, noun: str) -> str:
    """Count things in words.

    >>> many(1, "point"), many(2000, "record")
    ('1 point', '2,000 records')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"


def some(names: Sequence[str], most: int = 3) -> str:
    """Name the first of many, and count the others; one more than `most` is named as well.

    >>> some(["a", "b"], 1), some(["a", "b", "c"], 1)
    ('a, b', 'a and 2 more')
    """
    left = len(names) - most
    return ", ".join(names) if left < 2 else f"{', '.join(names[:most])} and {left:,} more"


def percent(share: float) -> str:
    """Write a share of one; what is not nothing is never written as 0 %, nor what is not all as 100 %.

    >>> [percent(x) for x in (0.0, 1e-9, 0.0312, 0.99999, 1.0)]
    ['0', '<0.01%', '3.12%', '>99.9%', '100%']
    """
    if not math.isfinite(share):
        return number(share)
    if share in (0, 1):
        return "100%" if share else "0"
    if 0 < share < 0.0001:
        return "<0.01%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{share:.2%}" if share < 0.0995 else f"{share:.1%}"


def size(nbytes: int) -> str:
    """Write a number of bytes.

    >>> [size(n) for n in (0, 1023, 1536, 3 << 30)]
    ['0 B', '1023 B', '1.5 KiB', '3.0 GiB']
    """
    if nbytes < 1024:
        return f"{nbytes} B"
    value, units = nbytes / 1024, ["KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1023.95 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.1f} {units[0]}"


def write(value: Value, kind: Kind = "text") -> str:
    """Write a value as its column asks; a value of another type is written as itself, nothing as a dash."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if kind == "percent":
            return percent(value)
        if kind == "bytes" and isinstance(value, int):
            return size(value)
        if isinstance(value, int):
            return count(value) if kind != "number" or abs(value) < 10**DIGITS else number(value)
        return number(value)
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{printable(k)} {write(v, kind)}" for k, v in value.items())
    return ", ".join(write(v, kind) for v in value)


def aligned(texts: Iterable[str]) -> list[str]:
    """Pad numbers so that their points stand under each other; words end where whole numbers do.

    >>> aligned(["1.5", "-10.25", "nan"])
    ['  1.5 ', '-10.25', 'nan   ']
    """
    split = [(t, t.find(".") if re.match(r"(?:>=)?-?\d+\.", t) else len(t)) for t in texts]
    left = max((at for _, at in split), default=0)
    right = max((len(t) - at for t, at in split), default=0)
    return [" " * (left - at) + t + " " * (right - (len(t) - at)) for t, at in split]


def middle(text: str, width: int, *, ellipsis: str = "…") -> str:
    """Shorten a name in the middle: its end tells layers apart, its beginning says which part of the model.

    >>> middle("model.layers.0.self_attn.q_proj", 20)
    'model.l…_attn.q_proj'
    """
    if len(text) <= width:
        return text
    room = max(0, width - len(ellipsis))
    head = room * 2 // 5
    return text[:head] + ellipsis[:width] + text[len(text) - (room - head) :]


# Drawing ----------------------------------------------------------------------------------------

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"
_ASCII_HEIGHTS = "_.-=+*#@"


def bar(share: float, width: int, *, ascii_only: bool = False) -> str:
    """Draw a share of one as a bar of at most `width` characters; what is not nothing leaves a mark.

    >>> bar(0.5, 4), bar(1e-9, 4), bar(0.0, 4)
    ('██', '▏', '')
    """
    if not share > 0:
        return ""
    if ascii_only:
        return "#" * max(1, round(min(share, 1) * width))
    eighths = max(1, round(min(share, 1) * width * 8))
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()


def shares(values: Sequence[float], *, log: bool = False) -> list[float]:
    """Return each value as a share of the largest, for bars; non-finite ones have none.

    On a logarithmic scale the smallest positive value keeps a tenth of the width.
    """
    positive = [v for v in values if 0 < v < math.inf]
    if not positive:
        return [0.0 for _ in values]
    low, high = min(positive), max(positive)
    if not log or low == high:
        return [v / high if 0 < v < math.inf else 0.0 for v in values]
    span = math.log(high) - math.log(low)
    return [0.1 + 0.9 * (math.log(v) - math.log(low)) / span if 0 < v < math.inf else 0.0 for v in values]


def spark(
    values: Sequence[float | None],
    width: int,
    *,
    log: bool = False,
    span: tuple[float, float] | None = None,
    ascii_only: bool = False,
) -> str:
    """Draw values as a line of heights from the smallest to the largest, or over the given span.

    More values than characters: each character shows the one in its share that stands out most. What is not
    finite is drawn as `!`, what was not measured as a gap; on a logarithmic scale, what is not positive has no
    height and is drawn as `0`.

    >>> spark([0, 1, 2, 3], 10)
    '▁▃▆█'
    >>> spark([0, 1e-6, 1e-3, None, 1], 10, log=True)
    '0▁▅ █'
    """
    heights = _ASCII_HEIGHTS if ascii_only else _HEIGHTS
    on_scale = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not log)]
    low, high = span or ((min(on_scale), max(on_scale)) if on_scale else (1.0, 1.0))
    scaled: Callable[[float], float] = (
        math.log if log else lambda v: v / 2
    )  # two huge numbers have no finite difference
    bottom, reach = scaled(low), scaled(high) - scaled(low)

    def drawn(value: float | None) -> str:
        if value is None:
            return " "
        if not math.isfinite(value):
            return "!"
        if log and value <= 0:
            return "0"
        share = (scaled(value) - bottom) / reach if reach > 0 else 0.0
        return heights[round(min(1.0, max(0.0, share)) * (len(heights) - 1))]

    def standing_out(some: Sequence[float | None]) -> float | None:
        there = [v for v in some if v is not None]
        broken = [v for v in there if not math.isfinite(v)]
        return broken[0] if broken else max(there, default=None)

    width = max(1, width)
    if len(values) > width:
        edges = [i * len(values) // width for i in range(width + 1)]
        values = [standing_out(values[a:b]) for a, b in pairwise(edges)]
    return "".join(map(drawn, values))


def landmarks(profile: Profile) -> tuple[tuple[str, float], tuple[str, float], tuple[str, float]] | None:
    """Return the first, the last and the largest of what was measured, each with its label; None: nothing was."""
    there = [(label, v) for label, v in zip(profile.labels, profile.values, strict=True) if v is not None]
    if not there:
        return None
    finite = [pair for pair in there if math.isfinite(pair[1])]
    return there[0], there[-1], max(finite or there, key=lambda pair: pair[1])
