"""The text form that the rules here share.

str(exploding(limit=1e3, action="stop"))        # exploding(limit=1000.0, action=stop)
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

from layerscope.errors import BadText
from layerscope.rules.alarms import ACTIONS, Action, Alarm, Need
from layerscope.rules.frames import Frame

_CALL = re.compile(r"\s*(?P<name>\w+)\s*(?:\((?P<settings>[^()]*)\)\s*)?")
_SETTING = re.compile(r"\s*(?P<key>\w+)\s*=\s*(?P<value>[\w.+-]+)\s*")


@dataclass
class Stated(ABC):
    """A rule whose fields are its settings: it compares by them and prints those that are not the usual ones."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()

    action: Action

    @abstractmethod
    def look(self, frame: Frame) -> list[Alarm]:
        """Say what is wrong in this frame."""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise BadText(f"{self.name}: action={self.action!r} is not known; a rule can {', '.join(ACTIONS)}.")

    def __str__(self) -> str:
        own = [f for f in fields(self) if f.init]
        said = [f"{f.name}={getattr(self, f.name)}" for f in own[1:] + own[:1] if getattr(self, f.name) != f.default]
        return f"{self.name}({', '.join(said)})"


def refuse_unless(holds: bool, rule: str, setting: str, value: object, wanted: str) -> None:
    """Raise BadText for a setting that makes no sense."""
    if not holds:
        raise BadText(f"{rule}: {setting}={value!r} makes no sense; give {wanted}.")


def read(text: str) -> tuple[str, dict[str, int | float | str]]:
    """Take the text of a rule apart: its name and its settings."""
    match = _CALL.fullmatch(text)
    if match is None:
        raise BadText(f"{text!r} is not a rule; write NAME or NAME(setting=value, ...).")
    settings: dict[str, int | float | str] = {}
    for part in filter(str.strip, (match.group("settings") or "").split(",")):
        setting = _SETTING.fullmatch(part)
        if setting is None:
            raise BadText(f"{text!r} is not a rule: {part.strip()!r} is not setting=value.")
        settings[setting.group("key")] = _value(setting.group("value"))
    return match.group("name"), settings


def _value(text: str) -> int | float | str:
    if re.fullmatch(r"[+-]?\d{1,18}", text):
        return int(text)
    try:
        number = float(text)
    except ValueError:
        return text
    return text if math.isnan(number) else number
