"""Words for how close two tensors are: published levels of MSE and correlation, changeable.

    PUBLISHED.of(metrics)                                # {'mse': 'very close', 'correlation': 'excellent'}
    PUBLISHED | Bands.parse("mse < 1e-6: fine; mse: off")    # other levels of MSE, correlation as it was

One band is one line of text, the best first, the last of a measure without a limit:

    mse < 1e-4: very close
    mse < 1e-2: fair
    mse: large

A measure is a number of `Metrics`. What is undefined (the correlation of a constant) is in no band: its word is
`undefined`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from layerscope.compare.measure.metrics import Metrics
from layerscope.errors import BadText

UNDEFINED = "undefined"
MEASURES = (
    "mse",
    "rmse",
    "mae",
    "max_abs",
    "relative_mse",
    "relative_mae",
    "max_relative",
    "mean_relative",
    "relative_l2",
    "correlation",
    "cosine",
    "sqnr",
    "fraction_equal",
)

_BAND = re.compile(r"(?P<measure>\w+)\s*(?:(?P<sign>[<>])\s*(?P<limit>[^:\s]+))?\s*:\s*(?P<word>\S.*)")


@dataclass(frozen=True, slots=True)
class Band:
    """One level of one measure: `word` is said where the measure is below (`<`) or above (`>`) the limit.

    Without a limit it is what is left.

    >>> str(Band("mse", "very close", "<", 1e-4))
    'mse < 0.0001: very close'
    >>> Band.parse("mse: large")
    Band(measure='mse', word='large', sign=None, limit=None)
    """

    measure: str
    word: str
    sign: Literal["<", ">"] | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise BadText(f"{self.measure!r} is not a measure that bands can have; there is {', '.join(MEASURES)}.")
        if (self.sign is None) != (self.limit is None) or (self.limit is not None and math.isnan(self.limit)):
            raise BadText(f"a band of {self.measure} has a sign and a limit that is a number, or neither of them.")
        if self.word == UNDEFINED or not self.word.strip() or re.search(r"[;#:\n]", self.word):
            raise BadText(f"{self.word!r} cannot be the word of a band: one of ; # : is in it, or it has a meaning.")

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" {self.sign} {self.limit!r}"
        return f"{self.measure}{limit}: {self.word}"

    @classmethod
    def parse(cls, text: str) -> Band:
        """Read a text form back."""
        match = _BAND.fullmatch(text.strip())
        if match is None:
            raise BadText(
                f"{text.strip()!r} is not a band; write `mse < 1e-4: very close`, or `mse: large` for what is left."
            )
        measure, sign, limit, word = match.group("measure", "sign", "limit", "word")
        try:
            return cls(
                measure, word.strip(), cast(Literal["<", ">"] | None, sign), None if limit is None else float(limit)
            )
        except ValueError as error:
            if isinstance(error, BadText):
                raise
            raise BadText(f"{limit!r} in {text.strip()!r} is not a number.") from None

    def holds(self, value: float) -> bool:
        """Tell whether the value is on this side of the limit."""
        if self.limit is None:
            return True
        return value < self.limit if self.sign == "<" else value > self.limit


@dataclass(frozen=True, slots=True)
class Bands:
    """The levels of one or more measures, the best first.

    `|` takes the right side's levels of every measure that it has, and keeps the others.
    """

    items: tuple[Band, ...]

    def __post_init__(self) -> None:
        for measure, bands in self._by_measure().items():
            *limited, rest = bands
            if rest.limit is not None or any(b.limit is None for b in limited):
                raise BadText(f"the last band of {measure}, and only that, has no limit: `{measure}: large`.")
            if len({b.sign for b in limited}) > 1:
                raise BadText(f"the bands of {measure} point both ways; use < or > in all of them.")
            limits = [b.limit for b in limited if b.limit is not None]
            if limits != sorted(set(limits), reverse=any(b.sign == ">" for b in limited)):
                raise BadText(f"the bands of {measure} are not in order, the best first: {'; '.join(map(str, bands))}.")
            if len({b.word for b in bands}) < len(bands):
                raise BadText(f"two bands of {measure} have the same word: {'; '.join(map(str, bands))}.")

    def __str__(self) -> str:
        return "\n".join(map(str, self.items))

    def __iter__(self) -> Iterator[Band]:
        return iter(self.items)

    def __or__(self, other: Bands) -> Bands:
        theirs = other._by_measure()
        kept = [b for b in self.items if b.measure not in theirs]
        return Bands((*kept, *other.items))

    @classmethod
    def parse(cls, text: str) -> Bands:
        """Read bands from lines, or from one line with semicolons; `#` starts a comment."""
        said = (piece for line in text.splitlines() for piece in line.partition("#")[0].split(";"))
        bands = tuple(Band.parse(piece) for piece in said if piece.strip())
        if not bands:
            raise BadText("these bands say nothing; write `mse < 1e-4: very close`, one band a line.")
        return cls(bands)

    @property
    def measures(self) -> list[str]:
        """The measures that have bands, in the order they were given."""
        return list(self._by_measure())

    def word(self, measure: str, value: float) -> str:
        """Return the word for a value; NaN is `undefined`, not the best."""
        if math.isnan(value):
            return UNDEFINED
        return next(b.word for b in self._by_measure()[measure] if b.holds(value))

    def of(self, metrics: Metrics) -> dict[str, str]:
        """Return each measure's word for this pair."""
        return {measure: self.word(measure, getattr(metrics, measure)) for measure in self.measures}

    def at_or_beyond(self, level: str, metrics: Metrics) -> list[str]:
        """Return the measures by which this pair is in the band of that word or in a worse one.

        `level` is a word, or `measure:word` where several measures use it; hyphens may stand for spaces. Where a
        measure is undefined although the two sides are not equal (all NaN, or a constant), that is worse than any
        band: it cannot be said to be better.
        """
        found = []
        for measure, words in self.level(level).items():
            word = self.word(measure, getattr(metrics, measure))
            unknown = metrics.nonfinite.differing or (word == UNDEFINED and metrics.equal < metrics.count)
            if unknown or word in words:
                found.append(measure)
        return found

    def level(self, level: str) -> dict[str, list[str]]:
        """Return the words of that level and of those below it, by measure; raises BadText when no band has it."""
        measure, _, word = level.rpartition(":")
        wanted = _plain(word)
        found: dict[str, list[str]] = {}
        for name, bands in self._by_measure().items():
            words = [b.word for b in bands]
            at = [i for i, w in enumerate(words) if _plain(w) == wanted]
            if at and measure in ("", name):
                found[name] = words[at[0] :]
        if not found:
            there = "; ".join(
                f"{name}: {', '.join(b.word for b in bands)}" for name, bands in self._by_measure().items()
            )
            raise BadText(f"no band is called {level!r}; there is {there}.")
        return found

    def _by_measure(self) -> Mapping[str, list[Band]]:
        found: dict[str, list[Band]] = {}
        for band in self.items:
            found.setdefault(band.measure, []).append(band)
        return found


def _plain(word: str) -> str:
    return " ".join(word.replace("-", " ").lower().split())


PUBLISHED = Bands.parse(
    """
    mse < 1e-4: very close
    mse < 1e-3: good
    mse < 1e-2: fair
    mse: large
    correlation > 0.9999: nearly perfect
    correlation > 0.999: excellent
    correlation > 0.99: good
    correlation: attention
    """
)
