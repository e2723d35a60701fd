"""What is known of a compiled model: how it is called, what it returns, which output is which tap.

    table = TapTable.loads(Path("compiled/taps.json").read_text())
    table.taps[3].point             # "model.layers.2:output"

It is stored beside the compiled graph, which knows its outputs by number alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from layerscope.compile_taps.arguments import Arguments
from layerscope.compile_taps.value_forms import Form, counted
from layerscope.errors import BadModel
from layerscope.points import Point
from layerscope.runtimes.model_files import TAPS
from layerscope.store import Missing, strictjson

FORMAT, VERSION = "layerscope-compiled", 1


@dataclass(frozen=True, slots=True)
class TapEntry:
    """One tapped tensor: its point, and which call of it in a forward."""

    point: str
    call: int = 0

    @property
    def key(self) -> str:
        """What `taps()` calls it: a module's name where that says all, else the point."""
        point = Point.parse(self.point)
        text = point.place if point.side == "output" and not point.leaf else self.point
        return f"{text} call={self.call}" if self.call else text


@dataclass(frozen=True, slots=True)
class TapTable:
    """What one compilation knows; `points` were asked for, `taps` fire, `missing` do not.

    `hidden` numbers the taps that are the hidden states, the embedding first where `embedded`; `logits` says whether
    they are an output or a tap, and which.
    """

    points: tuple[str, ...]
    arguments: Arguments
    output: Form
    outputs: int
    taps: tuple[TapEntry, ...]
    hidden: tuple[int, ...]
    embedded: bool
    logits: tuple[str, int] | None
    missing: tuple[Missing, ...] = ()
    notes: tuple[str, ...] = ()
    observer_effect: str = ""

    @property
    def takes(self) -> tuple[str, ...]:
        """The arguments that the model is called with; those that are part of what was compiled are not among them."""
        return tuple(str(name) for name, form in self.arguments.form["fields"] if "value" not in form)

    def noting(self, *notes: str) -> TapTable:
        """Return the table with more to say."""
        return replace(self, notes=(*self.notes, *notes))

    def dumps(self, *, backend: str) -> str:
        """Write it as strict JSON."""
        said = {"format": FORMAT, "version": VERSION, "backend": backend, **asdict(self)}
        return strictjson.dumps(said, indent=1) + "\n"

    @classmethod
    def loads(cls, text: str) -> tuple[str, TapTable]:
        """Read a table back, with the name of its backend; raises BadModel for what is none."""
        try:
            said: Any = strictjson.loads(text)
            if said["format"] != FORMAT or said["version"] != VERSION:
                raise ValueError(f"format {said['format']} {said['version']}")
            arguments = said["arguments"]
            logits = said["logits"]
            table = cls(
                points=tuple(said["points"]),
                arguments=Arguments(tuple(arguments["parameters"]), arguments["form"], dict(arguments["defaults"])),
                output=said["output"],
                outputs=int(said["outputs"]),
                taps=tuple(TapEntry(tap["point"], tap["call"]) for tap in said["taps"]),
                hidden=tuple(said["hidden"]),
                embedded=bool(said["embedded"]),
                logits=None if logits is None else (str(logits[0]), int(logits[1])),
                missing=tuple(Missing(each["point"], each["reason"]) for each in said["missing"]),
                notes=tuple(said["notes"]),
                observer_effect=str(said["observer_effect"]),
            )
            _check(table)
            return str(said["backend"]), table
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            said = str(error).rstrip(".")
            raise BadModel(f"{TAPS} is not a table of taps that this layerscope reads: {said}.") from error


def _check(table: TapTable) -> None:
    """Raise ValueError for a table that names what it has not: its graph would be read by wrong numbers."""
    if table.arguments.form.get("is") != "dict" or "fields" not in table.arguments.form:
        raise ValueError("its arguments have no names")
    for form in (table.arguments.form, *table.arguments.defaults.values()):
        counted(form)
    if counted(table.output) != table.outputs:
        raise ValueError(f"it has {table.outputs} outputs, and the form of others")
    for text in (*table.points, *(tap.point for tap in table.taps), *(each.point for each in table.missing)):
        Point.parse(text)
    if not all(type(tap.call) is int for tap in table.taps):
        raise ValueError("a tap's call is no number")
    there = {"tap": len(table.taps), "output": table.outputs}
    named = [("tap", at) for at in table.hidden] + ([table.logits] if table.logits else [])
    for place, at in named:
        if type(at) is not int or not 0 <= at < there.get(place, 0):
            raise ValueError(f"it has no {place} {at!r}")
