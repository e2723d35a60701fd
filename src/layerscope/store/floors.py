"""What a reference carries so that others can be judged by it: floors, check rows, and what feeds what.

    run.floors.to_dicts()                # point, class, relative_l2, ..., checked
    write_floors("runs/fp32", floors)    # one file beside run.json, whole or not at all

The file is safetensors: a tensor per column, check rows as numbered tensors, and everything that has a name in one JSON
text kept as bytes. It carries a checksum of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from layerscope.errors import Damaged
from layerscope.store.address import Address, Folder, folder
from layerscope.store.checksum import crc32c
from layerscope.store.table import RecordTable

if TYPE_CHECKING:
    import torch

    from layerscope.checks import ErrorNumbers
    from layerscope.checks.check import Check

FLOORS = "floors.safetensors"
_VERSION = 1
_COLUMNS = ("relative_l2", "median", "p90", "worst", "column", "factor")

Fed: TypeAlias = "tuple[str, int, str | None, int]"  # an input and its call; the point that fed it and its call


@dataclass(frozen=True, slots=True)
class Checked:
    """How a module is checked, and its own residual in each class of arithmetic."""

    check: Check
    floors: Mapping[str, float]


@dataclass(frozen=True)
class Floors:
    """Floors of a run by point and class, one set of numbers for each twin; the table has the largest of them.

    `step` is the moment they were measured at, `shapes` and `axes` are those of each point, `fed` says which output
    each input is, where it is one, and `tokens` which tokens count. `left_out` says what was not measured, and why.
    """

    points: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    axes: tuple[int, ...] = ()
    # By class, then twin: a number for each point.
    twins: Mapping[str, Mapping[str, tuple[ErrorNumbers | None, ...]]] = field(default_factory=dict)
    checks: Mapping[str, Checked] = field(default_factory=dict)
    fed: tuple[Fed, ...] = ()
    tokens: torch.Tensor | None = None
    arithmetic: str = ""
    step: tuple[int | None, int, int, int] = (None, 0, 0, 0)  # epoch, step, batch, rank
    weights: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # fingerprints as cast, by class
    left_out: tuple[str, ...] = ()
    started: str = ""  # of the run they belong to

    @cached_property
    def _table(self) -> RecordTable:
        return RecordTable(self._rows())

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the floors as rows."""
        return self._table.to_dicts()

    def to_pandas(self) -> Any:
        """Return the floors as a data frame."""
        return self._table.to_pandas()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.to_dicts())

    def __len__(self) -> int:
        return len(self.to_dicts())

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """Say what was measured, and what was left out."""
        said = []
        if self.twins:
            classes = ", ".join(f"{name} ({len(twins)} twins)" for name, twins in self.twins.items())
            said.append(f"floors of {len(self.points):,} points for {classes}")
        if self.checks:
            said.append(f"check rows of {len(self.checks):,} modules, {self.nbytes:,} bytes")
        return [*said, *(f"left out: {one}" for one in self.left_out)]

    @property
    def nbytes(self) -> int:
        """What the check rows take."""
        return sum(t.nbytes for one in self.checks.values() for t in one.check.tensors.values())

    def largest(self, name: str) -> dict[str, ErrorNumbers]:
        """Return the largest of each number over the twins of a class, by point."""
        from layerscope.checks import largest_of

        found: dict[str, ErrorNumbers] = {}
        for at, point in enumerate(self.points):
            several = [n for twin in self.twins.get(name, {}).values() if (n := twin[at]) is not None]
            if several:
                found[point] = largest_of(several)
        return found

    def _rows(self) -> Iterator[dict[str, Any]]:
        from layerscope.points import Point

        for name in self.twins:
            for point, numbers in self.largest(name).items():
                where = Point.parse(point)
                checked = self.checks.get(where.name) if where.side == "output" and not where.leaf else None
                own = checked.floors.get(name) if checked is not None else None
                yield {"point": point, "class": name, **dict(zip(_COLUMNS, numbers[:6], strict=True)), "checked": own}

    def dumps(self) -> bytes:
        """Write the file's bytes."""
        import torch
        from safetensors.torch import save

        from layerscope.checks import ErrorNumbers

        tensors: dict[str, torch.Tensor] = {}
        blank = (math.nan,) * len(ErrorNumbers._fields)
        for number, twins in enumerate(self.twins.values()):
            for other, column in enumerate(ErrorNumbers._fields):
                values = [[(one or blank)[other] for one in twin] for twin in twins.values()]
                tensors[f"floors.{number}.{column}"] = torch.tensor(values, dtype=torch.float64)
        for number, one in enumerate(self.checks.values()):
            for other, tensor in enumerate(one.check.tensors.values()):
                tensors[f"check.{number}.{other}"] = tensor.float().contiguous()
        if self.tokens is not None:
            tensors["tokens"] = self.tokens.to(torch.uint8).contiguous()
        said = {
            "version": _VERSION,
            "points": self.points,
            "shapes": self.shapes,
            "axes": self.axes,
            "classes": {name: list(twins) for name, twins in self.twins.items()},
            "checks": [
                {
                    "module": name,
                    "kind": one.check.kind,
                    "terms": one.check.terms,
                    "settings": dict(one.check.settings),
                    "tensors": list(one.check.tensors),
                    "floors": {k: None if math.isnan(v) else v for k, v in one.floors.items()},
                }
                for name, one in self.checks.items()
            ],
            "fed": self.fed,
            "arithmetic": self.arithmetic,
            "step": self.step,
            "weights": self.weights,
            "left_out": self.left_out,
            "started": self.started,
        }
        text = json.dumps(said, allow_nan=False).encode("ascii")
        tensors["names"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return save(tensors, {"format": "layerscope-floors", "checksum": f"{_sum(tensors):08x}"})

    @classmethod
    def loads(cls, data: bytes) -> Floors:
        """Read them back; raises Damaged for what is not what was written."""
        import torch
        from safetensors import SafetensorError
        from safetensors.torch import load

        from layerscope.checks import ErrorNumbers
        from layerscope.checks.check import Check

        try:
            size = int.from_bytes(data[:8], "little")
            stated = json.loads(data[8 : 8 + size])["__metadata__"]["checksum"]
            tensors = load(bytes(data))
            if f"{_sum(tensors):08x}" != stated:
                raise Damaged(f"{FLOORS} is damaged: its checksum is not the one it states")
            said = json.loads(bytes(tensors["names"].numpy().tobytes()))
            twins: dict[str, dict[str, tuple[ErrorNumbers | None, ...]]] = {}
            for number, (name, names) in enumerate(said["classes"].items()):
                columns = [tensors[f"floors.{number}.{column}"] for column in ErrorNumbers._fields]
                table = torch.stack(columns, -1).tolist()
                twins[name] = {
                    twin: tuple(None if math.isnan(row[7]) else _numbers(row) for row in rows)
                    for twin, rows in zip(names, table, strict=True)
                }
            checks = {}
            for number, one in enumerate(said["checks"]):
                kept = {name: tensors[f"check.{number}.{at}"] for at, name in enumerate(one["tensors"])}
                check = Check(one["kind"], one["terms"], one["settings"], kept)
                checks[one["module"]] = Checked(
                    check, {k: math.nan if v is None else v for k, v in one["floors"].items()}
                )
            epoch, step, batch, rank = said["step"]
            return cls(
                tuple(said["points"]),
                tuple(tuple(shape) for shape in said["shapes"]),
                tuple(said["axes"]),
                twins,
                checks,
                tuple((a, b, c, d) for a, b, c, d in said["fed"]),
                tensors["tokens"].bool() if "tokens" in tensors else None,
                said["arithmetic"],
                (epoch, step, batch, rank),
                said["weights"],
                tuple(said["left_out"]),
                said["started"],
            )
        except Damaged:
            raise
        except (SafetensorError, KeyError, ValueError, TypeError, RecursionError) as error:
            raise Damaged(f"{FLOORS} is damaged: {error}") from error


def _numbers(row: list[float]) -> ErrorNumbers:
    from layerscope.checks import ErrorNumbers

    return ErrorNumbers._make([*row[:7], int(row[7]), int(row[8])])


def _sum(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return a checksum of every tensor's name, shape and bytes."""
    total = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        total = crc32c(f"{name} {list(tensor.shape)} {tensor.dtype}".encode(), total)
        total = crc32c(tensor.contiguous().reshape(-1).numpy().tobytes(), total)
    return total


def write_floors(run: Address, floors: Floors) -> None:
    """Put the file into a run's folder, so that a reader sees none, the old one or the new one."""
    folder(run).put(FLOORS, floors.dumps())


def read_floors(place: Folder, started: str) -> Floors | None:
    """Read a run's floors, None where it has none; raises Damaged for a file that cannot be read, or another run's."""
    if FLOORS not in place.names():
        return None
    found = Floors.loads(bytes(place.read(FLOORS)))
    if found.started and started and found.started != started:
        raise Damaged(f"{FLOORS} belongs to a run that began at {found.started}, and this one began at {started}")
    return found
