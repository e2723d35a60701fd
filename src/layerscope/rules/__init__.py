"""What to watch for while a model trains.

    watch(model, optimizer, rules=[nonfinite(action="stop"), exploding(limit=1e3)])
    parse_rule("exploding(limit=1000.0, action=stop)")

A rule is a value: it compares, and prints as text that `parse_rule` reads back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layerscope.errors import BadText
from layerscope.rules.alarms import ACTIONS, Action, Alarm, Need, Rule
from layerscope.rules.dead import dead
from layerscope.rules.exploding import exploding
from layerscope.rules.frames import Frame, ParameterReading, Reading
from layerscope.rules.nonfinite import nonfinite
from layerscope.rules.saturated import saturated
from layerscope.rules.stating import read
from layerscope.rules.stuck import stuck
from layerscope.rules.vanishing import vanishing

__all__ = [
    "ACTIONS",
    "Action",
    "Alarm",
    "Frame",
    "Need",
    "ParameterReading",
    "Reading",
    "Rule",
    "dead",
    "exploding",
    "nonfinite",
    "parse_rule",
    "saturated",
    "stuck",
    "vanishing",
]

_RULES: dict[str, Callable[..., Any]] = {
    "nonfinite": nonfinite,
    "exploding": exploding,
    "vanishing": vanishing,
    "dead": dead,
    "saturated": saturated,
    "stuck": stuck,
}


def parse_rule(text: str) -> Rule:
    """Read a rule from its text.

    >>> str(parse_rule("exploding( limit=1e3, action=stop )"))
    'exploding(limit=1000.0, action=stop)'
    """
    name, settings = read(text)
    if name not in _RULES:
        raise BadText(f"there is no rule {name!r}; there are {', '.join(_RULES)}.")
    known = _RULES[name].__annotations__.keys() - {"return"}
    unknown = [setting for setting in settings if setting not in known]
    if unknown:
        raise BadText(f"{name} has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    try:
        rule: Rule = _RULES[name](**settings)
    except TypeError as error:
        raise BadText(f"{text!r} is not a rule: {error}.") from None
    return rule
