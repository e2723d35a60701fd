"""A test of what every layer computes, against a run stored beside it.

    def test_layers(layers):
        layers.check(model, inputs)                             # every module's outputs
        layers.check(model, inputs, "model.layers.*", name="decoder")

The first time, and whenever a change is wanted, `pytest --layers-update` stores what the model computes in
`__layers__/<test file>/<test>` beside the test file; it belongs into version control. Without the option the test fails
when there is no stored run, when a layer differs from it by more than rounding explains, and when either has a layer
that the other has not.

The stored run holds the tensors themselves, so it is as large as the activations: small inputs and fewer taps
(`"model.layers.*"`, `["type:Linear", "!**.experts.**"]`) make it small. Nothing here imports torch before a check runs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from layerscope.compare.result import Comparison
    from layerscope.store import Run

FOLDER = "__layers__"
UPDATE = "--layers-update"

_PLAIN = re.compile(r"[a-z0-9_]{1,60}")
_OUTPUT = "layerscope"


@pytest.fixture
def layers(request: pytest.FixtureRequest) -> Layers:
    """Check what every layer computes against a run stored beside the test: `layers.check(model, inputs)`."""
    return Layers(request.node, request.config.stash[_TALLY], update=request.config.getoption(UPDATE))


class Layers:
    """The stored runs of one test."""

    def __init__(self, test: pytest.Item, tally: _Tally, *, update: bool) -> None:
        self._test = test
        self._tally = tally
        self._update = update
        self._checks: list[Path] = []

    def check(
        self,
        model: Any,
        inputs: Any,
        taps: Any = "**",
        *,
        noise: str | os.PathLike[str] | Run | Sequence[Any] | None = None,
        limit: float | None = None,
        pairing: str | os.PathLike[str] | Sequence[Any] = (),
        name: str | None = None,
        keep: Any = "tensor",
        allow_partial: bool = False,
    ) -> None:
        """Run the model once and fail unless its layers match those stored for this test.

        `inputs` is a mapping (keyword arguments), a tuple (positional ones) or the one argument. The model is called
        under `torch.no_grad()` and otherwise as it is: in training mode, dropout is the caller's to still. `taps` and
        `keep` are those of `record`; `noise`, `limit`, `pairing` and `allow_partial` those of
        `assert_runs_match`. Without a noise run the floor is an estimate. The second check of a test is stored under
        `2`, and so on, or under the `name` it is given.
        """
        __tracebackhide__ = True
        stored = self._claim(name)
        told = {"noise": noise, "limit": limit, "pairing": pairing}
        match = _Match({key: value for key, value in told.items() if value is not None}, allow_partial)
        if self._update:
            self._store(stored, model, inputs, taps, keep, match)
        elif not stored.is_dir():
            raise AssertionError(f"no layers are stored for this test in {_shown(stored)}\n{self._way_out()}")
        else:
            text = match.failure(stored, _recorded(model, inputs, taps, keep))
            if text is not None:
                raise AssertionError(f"{text}\n\n{self._way_out()}")

    def _claim(self, name: str | None) -> Path:
        """Return where a check's run is stored; two checks of one test never share a place."""
        number = len(self._checks) + 1
        suffix = f"-{_safe(name)}" if name is not None else f"-{number}" if number > 1 else ""
        place = _home(self._test.path) / f"{_safe(_name_of(self._test))}{suffix}"
        if place in self._checks:
            raise ValueError(f"this test has already checked layers called {name or number!r}; give each check a name")
        self._checks.append(place)
        self._tally.checked += 1
        self._tally.used.add(str(place))
        return place

    def _store(self, stored: Path, model: Any, inputs: Any, taps: Any, keep: Any, match: _Match) -> None:
        """Store what the model computes now, unless the stored run agrees with it."""
        stored.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".writing-", dir=stored.parent) as beside:
            fresh = Path(beside) / "fresh"
            run = _recorded(model, inputs, taps, keep, to=fresh)
            if stored.exists() and match.failure(stored, run) is None:
                return
            _put(fresh, stored, old=Path(beside) / "old")
        self._tally.updated += 1

    def _way_out(self) -> str:
        command = f"pytest {UPDATE} {shlex.quote(self._test.nodeid)}"
        return f"If what the model computes now is right, store it with\n    {command}"


def _recorded(model: Any, inputs: Any, taps: Any, keep: Any, *, to: Path | None = None) -> Run:
    import torch

    from layerscope.errors import Incomplete
    from layerscope.recorder import RecordOptions, record

    with torch.no_grad(), record(model, taps, to=to, keep=keep, options=RecordOptions(weights=True)) as recording:
        if isinstance(inputs, Mapping):
            recording.model(**inputs)
        else:
            recording.model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    run = recording.run
    if run.dropped:
        lost = run.dropped[0]
        raise Incomplete(f"{lost.count} records of {lost.point} were lost and nothing is stored: {lost.reason}")
    return run


@dataclass(frozen=True, slots=True)
class _Match:
    """When a run counts as the stored one: what `compare` is told, and whether all of it must be comparable."""

    how: Mapping[str, Any]
    allow_partial: bool

    def failure(self, stored: Path, run: Run) -> str | None:
        """Say where the run parts from the stored one, or why it cannot be told; None when it matches."""
        from layerscope.compare.asserting import mismatch
        from layerscope.compare.comparing import compare
        from layerscope.errors import Damaged, Incomparable, NotARun

        try:
            found = compare(stored, run, **self.how)
        except (Damaged, Incomparable, NotARun) as error:
            return f"this run cannot be compared with the stored one: {error}"
        return mismatch(_named(found, stored), allow_partial=self.allow_partial)


def _named(comparison: Comparison, stored: Path) -> Comparison:
    """Call the two sides what they are to the reader of a failed test."""
    (now,) = comparison.candidates
    return replace(
        comparison,
        reference="the stored run",
        address=_shown(stored),
        candidates=(replace(now, candidate="this run", address="the model as it is now"),),
    )


def _put(fresh: Path, stored: Path, *, old: Path) -> None:
    """Move a whole run into its place, and what was there out of the way; what fails leaves the old one there."""
    if stored.exists():
        stored.rename(old)
    try:
        fresh.rename(stored)
    except OSError:
        if old.exists():
            old.rename(stored)
        raise


# Where runs are stored --------------------------------------------------------------------------


def _home(file: Path) -> Path:
    return file.parent / FOLDER / file.stem


def _name_of(test: pytest.Item) -> str:
    """Return a test's name within its file; its node id would not do, because pytest-xdist may add to it."""
    chain = test.listchain()
    file = max((at for at, node in enumerate(chain) if isinstance(node, pytest.File)), default=-1)
    return "::".join(node.name for node in chain[file + 1 :])


def _safe(text: str) -> str:
    """Return a name for a folder: the text itself where that is harmless, else what is harmless of it and a hash.

    >>> _safe("test_layers"), _safe("test_it[../../etc]")
    ('test_layers', 'test_it_etc_.c6aeb6fd81')
    """
    if _PLAIN.fullmatch(text):
        return text
    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:10]
    return f"{re.sub('[^A-Za-z0-9_]+', '_', text)[:60]}.{digest}"


def _shown(path: Path) -> str:
    return os.path.relpath(path)


# The whole session ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tally:
    """What the checks of a session came to: in one process, or in a worker of pytest-xdist, added up at the end.

    `collected` and `passed` count the tests of each file: only where all of them passed is it known that a stored run
    is not used.
    """

    checked: int = 0
    updated: int = 0
    used: set[str] = field(default_factory=set)
    collected: Counter[str] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)

    def add(self, other: _Tally) -> None:
        """Add a worker's; every worker collects all tests, and runs its share."""
        self.checked += other.checked
        self.updated += other.updated
        self.used |= other.used
        self.collected |= other.collected
        self.passed += other.passed

    def dumps(self) -> dict[str, Any]:
        """Return what pytest-xdist carries from a worker to the controller."""
        return {
            "checked": self.checked,
            "updated": self.updated,
            "used": sorted(self.used),
            "collected": dict(self.collected),
            "passed": dict(self.passed),
        }

    @classmethod
    def loads(cls, value: Mapping[str, Any]) -> _Tally:
        """Undo `dumps`."""
        counts = Counter(value["collected"]), Counter(value["passed"])
        return cls(value["checked"], value["updated"], set(value["used"]), *counts)

    def unused(self) -> list[Path]:
        """Return the stored runs that no test has used, of the files whose tests all ran and passed."""
        files = [Path(file) for file, count in self.collected.items() if self.passed[file] >= count]
        homes = [_home(file) for file in files]
        for folder in dict.fromkeys(file.parent for file in files):
            for home in _folders(folder / FOLDER):
                homes += [] if any(path.stem == home.name for path in folder.iterdir() if path.is_file()) else [home]
        return sorted(run for home in homes for run in _folders(home) if str(run) not in self.used)


def _folders(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


_TALLY = pytest.StashKey[_Tally]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer the option that accepts what the models compute now."""
    group = parser.getgroup("layerscope")
    group.addoption(
        UPDATE, action="store_true", help=f"store what the models compute now in {FOLDER} instead of checking it"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count."""
    config.stash[_TALLY] = _Tally()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Count the tests of each file before any of them is deselected."""
    config.stash[_TALLY].collected.update(str(item.path) for item in items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count the tests that passed."""
    report = yield
    if report.when == "call" and report.passed:
        item.config.stash[_TALLY].passed[str(item.path)] += 1
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand a worker's counts to the controller."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_OUTPUT] = session.config.stash[_TALLY].dumps()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take a worker's counts; one that crashed has left none."""
    value = getattr(node, "workeroutput", {}).get(_OUTPUT)
    if value is not None:
        node.config.stash[_TALLY].add(_Tally.loads(value))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many runs were checked and stored, and list those that no test used."""
    tally = config.stash[_TALLY]
    chosen = any("::" in arg for arg in config.args) or config.getoption("lf", default=False)
    unused = [] if chosen else tally.unused()
    if tally.checked or unused:
        line = f"layers: {tally.checked} checked, {tally.updated} stored"
        terminalreporter.write_line(f"{line}, {len(unused)} unused:" if unused else line)
        for run in unused:
            terminalreporter.write_line(f"    {_shown(run)}")
