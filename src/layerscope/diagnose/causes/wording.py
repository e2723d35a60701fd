"""How causes put numbers into words.

times(1.05), indices([3, 4, 5], "row")      # "is the reference's times 1.050", "rows 3 to 5"
"""

from __future__ import annotations

from collections.abc import Sequence

from layerscope.report.writing import many, number

__all__ = ["indices", "listed", "shape", "share", "times"]


def times(factor: float) -> str:
    """Say by which factor something is off.

    >>> times(1.05), times(-1.0)
    ("is the reference's times 1.050", "is the reference's with the sign turned")
    """
    turned = abs(factor + 1) < 1e-3
    return "is the reference's with the sign turned" if turned else f"is the reference's times {number(factor)}"


def indices(at: Sequence[int], noun: str) -> str:
    """Name a few of many, or all of a run.

    >>> indices([7], "row"), indices([0, 1, 2], "row"), indices([1, 4], "token"), indices([1, 4, 5, 9, 12], "row")
    ('row 7', 'rows 0 to 2', 'tokens 1 and 4', '5 rows (1, 4, 5, 9, ...)')
    """
    if len(at) == 1:
        return f"{noun} {at[0]}"
    if len(at) > 2 and at[-1] - at[0] == len(at) - 1:
        return f"{noun}s {at[0]} to {at[-1]}"
    if len(at) <= 4:
        return f"{noun}s {listed(at)}"
    return f"{many(len(at), noun)} ({', '.join(map(str, at[:4]))}, ...)"


def listed(things: Sequence[object]) -> str:
    """Join things as a sentence does.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    words = [str(thing) for thing in things]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def shape(sizes: Sequence[int]) -> str:
    """Write a shape.

    >>> shape((2, 3))
    '2 x 3'
    """
    return " x ".join(map(str, sizes)) or "one number"


def share(part: int, whole: int) -> str:
    """Write a share in percent, with as many digits as tell something.

    >>> share(3, 100), share(1, 4096), share(1, 3)
    ('3 %', '0.024 %', '33 %')
    """
    return f"{100 * part / whole:.2g} %" if part < whole else "100 %"
