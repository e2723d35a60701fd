"""Points as alignment sees them, and what it answered, in the words of the tests."""

from __future__ import annotations

from layerscope.compare.align.run_points import RunPoint
from layerscope.points import Point


def seen(*texts, shape=(2, 8)):
    return [RunPoint(Point.parse(text), shape, 1) for text in texts]


def paired(alignment, method=None):
    return {str(p.reference): str(p.candidate) for p in alignment.pairs if method in (None, p.method)}


def outputs(names):
    return {f"{a}:output": f"{b}:output" for a, b in names.items()}


def why(only):
    return {str(point): reason for point, reason in only}
