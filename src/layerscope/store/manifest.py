"""What a run says about itself, and `run.json`, the file it says it in.

    manifest = Manifest(model={"class": "LlamaForCausalLM"}, mode="bf16", seed=0)
    Manifest.loads(manifest.dumps()) == manifest

It is written before the first record, so that a killed run says what it was, and again at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from typing import Any

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
        known = {f.name: value[f.name] for f in fields(cls) if f.name in value}
        for name, is_right in _RIGHT.items():
            if name in known and not is_right(known[name]):
                raise Damaged(f"{NAME}: {name!r} holds what it should not: {str(known[name])[:80]}")
        if "completeness" in known:
            known["completeness"] = _completeness(known["completeness"])
        return cls(**known)

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


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_text_to_text(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


_RIGHT: dict[str, Callable[[Any], bool]] = {
    "model": lambda v: isinstance(v, dict),
    "mode": lambda v: v is None or _is_text(v),
    "runtime": _is_text,
    "versions": lambda v: isinstance(v, dict),
    "device": _is_text,
    "seed": lambda v: v is None or isinstance(v, int),
    "weights": _is_text_to_text,
    "taps": _is_texts,
    "aliases": lambda v: isinstance(v, dict) and all(map(_is_texts, v.values())),
    "shared": _is_text_to_text,
    "settings": lambda v: isinstance(v, dict),
    "started": _is_text,
    "completeness": lambda v: isinstance(v, dict),
    "ranks": lambda v: v is None or _is_count(v),
    "segments": lambda v: (
        isinstance(v, dict) and all(isinstance(n, list) and all(map(_is_count, n)) for n in v.values())
    ),
}


def _completeness(value: dict[str, Any]) -> Completeness:
    known = {f.name: value[f.name] for f in fields(Completeness) if f.name in value}
    state = known.get("state", "unknown")
    counts = [known[name] for name in ("forwards", "points", "records", "recomputed", "failed") if name in known]
    if not _is_text(state) or not all(map(_is_count, counts)):
        raise Damaged(f"{NAME}: 'completeness' holds what it should not: {str(value)[:80]}")
    known["missing"] = _rows(Missing, known.get("missing", []))
    known["dropped"] = _rows(Dropped, known.get("dropped", []))
    return Completeness(**known)


def _rows(kind: Any, values: Any) -> list[Any]:
    try:
        rows = [kind(**value) for value in values]
        if not all(_is_text(r.point) and _is_text(r.reason) and _is_count(getattr(r, "count", 0)) for r in rows):
            raise TypeError
        return rows
    except TypeError:
        raise Damaged(f"{NAME}: no list of {kind.__name__.lower()} records: {str(values)[:80]}") from None


def _worse(state: str) -> int:
    return STATES.index(state) if state in STATES else 0
