"""Which values are worth a record: a comparison of a statistic, or a function of the tensor.

    condition_of("absmax > 100")(tensor)    # True where its largest finite magnitude is above 100
    condition_of("nonfinite > 0")           # prints as it was written

A condition is asked at the moment of the hook. Of a tensor on a GPU the model waits for the answer.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from layerscope.errors import BadText

if TYPE_CHECKING:
    import torch

    from layerscope.stats import Summary

_SIGNS: Final = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_STATISTICS: Final[dict[str, Callable[[Summary], float]]] = {
    **{
        name: operator.attrgetter(name)
        for name in ("absmax", "max", "min", "mean", "std", "rms", "l1", "l2", "count", "finite", "nan", "zeros")
    },
    "inf": lambda summary: summary.posinf + summary.neginf,
    "nonfinite": lambda summary: summary.count - summary.finite,
}
_TEXT = re.compile(rf"\s*(\w+)\s*({'|'.join(_SIGNS)})\s*([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True, slots=True)
class Threshold:
    """A statistic of a tensor against a number; moments are over the finite values, and NaN meets nothing.

    >>> str(Threshold.parse("absmax>1e4"))
    'absmax > 10000'
    """

    statistic: str
    sign: str
    number: float

    @staticmethod
    def parse(text: str) -> Threshold:
        """Read `STATISTIC SIGN NUMBER`."""
        match = _TEXT.fullmatch(text)
        if match is None or match[1] not in _STATISTICS:
            raise BadText(
                f"if_value={text!r} is no condition; write a statistic ({', '.join(_STATISTICS)}), a sign "
                f"({' '.join(_SIGNS)}) and a number, such as 'absmax > 100', or give a function of a tensor."
            )
        return Threshold(match[1], match[2], float(match[3]))

    def __str__(self) -> str:
        return f"{self.statistic} {self.sign} {self.number:.17g}"

    def __call__(self, tensor: torch.Tensor) -> bool:
        """Tell whether the tensor meets it."""
        from layerscope.recorder.tensors import plain
        from layerscope.stats import summarize

        values, _ = plain(tensor)
        summary = summarize(values.cpu(), level="moments")
        return bool(_SIGNS[self.sign](_STATISTICS[self.statistic](summary), self.number))


Condition = Threshold | Callable[["torch.Tensor"], Any]


def condition_of(value: Any) -> Condition | None:
    """Read a condition: its text, a function of a tensor, or None."""
    if isinstance(value, str):
        return Threshold.parse(value)
    if value is None or callable(value):
        return value  # type: ignore[no-any-return]
    raise BadText(f"if_value={value!r} is no condition; write 'absmax > 100', or give a function of a tensor.")
