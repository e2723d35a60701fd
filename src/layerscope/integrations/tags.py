"""What a frame's numbers are called where names are flat: TensorBoard's tags, W&B's keys.

    dict(numbers(frame, ("mean", "l2")))     # {"mean/blocks.3:output": 0.12, "l2/blocks.3:output": 8.1, ...}

The statistic stands first, because dashboards group by what is before the slash: one chart per layer, side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from layerscope.errors import Unsupported

if TYPE_CHECKING:
    from layerscope.rules import Frame
    from layerscope.stats import Summary

STATISTICS = ("mean", "std", "absmax", "l2")
_ALL = ("mean", "std", "min", "max", "absmax", "l1", "l2", "rms", "zeros", "p1", "p5", "p50", "p95", "p99")


def known(statistics: Sequence[str]) -> tuple[str, ...]:
    """Refuse statistics that there are not."""
    odd = [word for word in statistics if word not in _ALL]
    if odd:
        raise Unsupported(f"no statistic is called {', '.join(map(repr, odd))}; there are {', '.join(_ALL)}.")
    return tuple(statistics)


def numbers(frame: Frame, statistics: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield every number of a frame; how many values are not finite is told where there are any."""
    for tag, summary in distributions(frame):
        for word in statistics:
            value = _value(summary, word)
            if value is not None:
                yield f"{word}/{tag}", value
        if summary.finite < summary.count:
            yield f"nonfinite/{tag}", float(summary.count - summary.finite)
    for parameter in frame.parameters:
        yield f"weight_rms/{parameter.name}", parameter.weight_rms
        if parameter.update_ratio is not None:
            yield f"update_ratio/{parameter.name}", parameter.update_ratio


def distributions(frame: Frame) -> Iterator[tuple[str, Summary]]:
    """Yield the summary of every point, and of every parameter's gradient."""
    for reading in frame.readings:
        yield str(reading.point), reading.summary
    for parameter in frame.parameters:
        if parameter.gradient is not None:
            yield f"{parameter.name}:gradient", parameter.gradient


def _value(summary: Summary, word: str) -> float | None:
    if word.startswith("p"):
        return summary.percentile(float(word[1:])) if summary.sketch is not None else None
    return float(getattr(summary, word))
