"""Frames made by hand, for tests of rules and sinks."""

from __future__ import annotations

import torch

from layerscope.points import Moment, Point
from layerscope.rules import Frame, ParameterReading, Reading
from layerscope.stats import summarize


def reading(point, values, *, active=None, bounds=None):
    """A reading of a tensor, or of one value all over."""
    tensor = values if isinstance(values, torch.Tensor) else torch.full((8,), float(values))
    return Reading(Point.parse(point), summarize(tensor, level="moments"), active, bounds)


def parameter(name, *, gradient=None, ratio=None):
    """A parameter with a constant gradient."""
    found = None if gradient is None else summarize(torch.full((8,), float(gradient)), level="moments")
    return ParameterReading(name, 1.0, found, ratio)


def frame(step, *readings, parameters=()):
    """A frame of one step."""
    return Frame(Moment(step=step, batch=step), readings, tuple(parameters))


def looked(rule, frames):
    """Everything a rule says about frames, one after the other."""
    return [alarm for each in frames for alarm in rule.look(each)]
