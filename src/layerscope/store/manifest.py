"""What a run says about itself, and `run.json`, the file it says it in.

    manifest = Manifest(model={"class": "LlamaForCausalLM"}, mode="bf16", seed=0)
    Manifest.loads(manifest.dumps()) == manifest

It is written before the first record, so that a killed run says what it was, and again at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from datetime import datetime, timezone
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from layerscope.errors import Damaged, NewerFormat, NotARun
from layerscope.store import strictjson
from layerscope.store.checksum import crc32c, text

FORMAT = "layerscope"
VERSION = 2
NAME = "run.json"

# From worst to best: a run of several ranks is in the worst state that one of them is in.
STATES = ("unknown", "recording", "interrupted", "recovered", "complete")


@dataclass(frozen=True, slots=True)
class Missing:
    """A point that was asked for and is not there, or not always, and why."""

    point: str
    reason: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """Records of one point that were lost for one reason; `first` is the moment of the first of them."""

    point: str
    count: int
    reason: str
    first: str


@dataclass(frozen=True, slots=True)
class Completeness:
    """How much of what was asked for a run holds.

    `points` is how many points were expected to fire, `records` how many records were acknowledged, `failed` how many
    of the forwards raised: records of theirs are absent.
    """

    state: str = "recording"
    forwards: int = 0
    points: int = 0
    records: int = 0
    recomputed: int = 0
    missing: list[Missing] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    failed: int = 0

    @classmethod
    def of_ranks(cls, parts: Iterable[Completeness]) -> Completeness:
        """Join what several ranks say of themselves: they run the same forwards, and lose their own records."""
        parts = list(parts)
        worst = min((p.state for p in parts), key=_worse, default="unknown")
        return cls(
            state=worst,
            forwards=max((p.forwards for p in parts), default=0),
            points=max((p.points for p in parts), default=0),
            records=sum(p.records for p in parts),
            recomputed=sum(p.recomputed for p in parts),
            missing=list(dict.fromkeys(m for p in parts for m in p.missing)),
            dropped=[d for p in parts for d in p.dropped],
            failed=max((p.failed for p in parts), default=0),
        )

    def followed_by(self, later: Completeness, *, recorded: Iterable[str] = ()) -> Completeness:
        """Join two recordings into the same run, one after the other (`append=True`).

        What the first missed and the second recorded is no longer missing.
        """
        there = {*recorded, *(m.point for m in later.missing)}
        return replace(
            later,
            forwards=self.forwards + later.forwards,
            points=max(self.points, later.points),
            records=self.records + later.records,
            recomputed=self.recomputed + later.recomputed,
            missing=[*(m for m in self.missing if m.point not in there), *later.missing],
            dropped=[*self.dropped, *later.dropped],
            failed=self.failed + later.failed,
        )


def now() -> str:
    """Return this second in UTC, as ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What made a run: the model and its mode, where and with what it ran, what was tapped, how complete it is.

    `weights` maps module names to fingerprints, `aliases` an alias to the points it stands for (text
    forms), `shared` the other names of a shared module to its first; `settings` is the caller's. `ranks` is how many
    processes had begun to record when it was written, so that a folder of theirs that vanished is missed, and
    `segments` how many records and bytes each sealed segment of this rank has, for the same reason.
    """

    model: dict[str, Any] = field(default_factory=dict)
    mode: str | None = None
    runtime: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    device: str = ""
    seed: int | None = None
    weights: dict[str, str] = field(default_factory=dict)
    taps: list[str] = field(default_factory=list)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    started: str = field(default_factory=now)
    completeness: Completeness = field(default_factory=Completeness)
    ranks: int | None = None
    segments: dict[str, list[int]] = field(default_factory=dict)

    def dumps(self) -> str:
        """Write `run.json`: strict JSON, indented, ending in a newline; its last key is the crc32c of all before it."""
        value = {"format": FORMAT, "version": VERSION, **asdict(self)}
        body = strictjson.dumps(value, indent=1).removesuffix("\n}")
        return f'{body},\n "check": "{text(crc32c(body.encode()))}"\n}}\n'

    @classmethod
    def loads(cls, data: str | bytes | bytearray) -> Manifest:
        """Read `run.json` back.

        Raises NewerFormat for a later version, NotARun for the first, and Damaged for what is not what was written.
        """
        raw = data.encode() if isinstance(data, str) else bytes(data)
        try:
            value = strictjson.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{NAME} is not JSON ({error})") from error
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise Damaged(f"{NAME} does not say that it is a {FORMAT} run")
        body, _, check = raw.rpartition(b',\n "check": ')
        if check != b'"%s"\n}\n' % text(crc32c(body)).encode():
            if not check.startswith(b'"'):  # the first format had none
                check_version(value.get("version"))
            raise Damaged(f"{NAME} is not what was written: its checksum differs")
        check_version(value.get("version"))
        try:
            found: Manifest = _fitting(cls, value)
            return found
        except (TypeError, ValueError) as error:
            raise Damaged(f"{NAME} holds what it should not: {str(error)[:200]}") from None

    def followed_by(self, later: Manifest) -> Manifest:
        """Join the manifests of two recordings into one run: the later one speaks, no name is lost."""
        return replace(
            later,
            weights=self.weights | later.weights,
            taps=list(dict.fromkeys([*self.taps, *later.taps])),
            aliases=self.aliases | later.aliases,
            shared=self.shared | later.shared,
            started=self.started,
            segments=self.segments | later.segments,
        )


def check_version(version: object) -> None:
    """Refuse a format of the future, and what is no version at all."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise Damaged(f"there is no format version (found {version!r})")
    if version < VERSION:
        raise NotARun(f"this run was written by format {version}, which was never released; record it again")
    if version > VERSION:
        raise NewerFormat(
            f"this run was written by format {version}; this layerscope reads up to {VERSION}: upgrade layerscope"
        )


def _fitting(kind: Any, value: Any, where: str = "it") -> Any:
    """Return a value read from JSON as what a field's type says; raises TypeError for one that does not fit.

    Keys that a class has no field for are passed over; numbers of these classes are counts, and not negative.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if isinstance(kind, UnionType):
        return None if value is None else _fitting(inner[0], value, where)
    if is_dataclass(kind) and isinstance(kind, type):
        types = _types(kind)
        there = {name: value[name] for name in types if name in _of(dict, value, where)}
        return kind(**{name: _fitting(types[name], each, name) for name, each in there.items()})
    if origin is list:
        return [_fitting(inner[0], each, where) for each in _of(list, value, where)]
    if origin is dict:
        return {name: _fitting(inner[1], each, where) for name, each in _of(dict, value, where).items()}
    return _of(kind, value, where)


_types = cache(get_type_hints)


def _of(kind: type, value: Any, where: str) -> Any:
    if type(value) is not kind or (type(value) is int and value < 0 and where != "seed"):
        raise TypeError(f"{where!r} is {value!r}")
    return value


def _worse(state: str) -> int:
    return STATES.index(state) if state in STATES else 0
