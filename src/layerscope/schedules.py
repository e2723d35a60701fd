"""Say at which moments to look, in words that combine.

    every(100) | first(3)                           # every hundredth step, and the first three
    epochs(1, 5) & batches(0)                       # the first batch of epochs 1 and 5
    steps(range(0, 10), 50) & ~when(loss_is_low)    # with a function of the moment

`~` binds tighter than `&`, and `&` than `|`, as in Python. A schedule is a value: it compares, hashes, and prints as
text that `Schedule.parse` reads back; a range prints as `0:10`.
"""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from layerscope.errors import BadText
from layerscope.points import Moment

Function = Callable[[Moment], object]

# How tightly each form binds; a looser one inside a tighter one needs parentheses.
_OR, _AND, _NOT, _WORD = range(4)
_DEEPEST = 100
_LARGEST = 2**63 - 1


class Schedule(ABC):
    """A condition on a moment: call it with one, combine it with `&`, `|` and `~`."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, moment: Moment) -> bool:
        """Tell whether this moment is wanted."""

    @abstractmethod
    def __str__(self) -> str: ...

    @property
    def _binds(self) -> int:
        return _WORD

    def __repr__(self) -> str:
        return str(self)

    def __and__(self, other: Schedule) -> Schedule:
        return _All((*_terms(self, _All), *_terms(other, _All))) if isinstance(other, Schedule) else NotImplemented

    def __or__(self, other: Schedule) -> Schedule:
        return _Any((*_terms(self, _Any), *_terms(other, _Any))) if isinstance(other, Schedule) else NotImplemented

    def __invert__(self) -> Schedule:
        return _Not(self)

    def __bool__(self) -> NoReturn:
        """Refuse, because `every(100) or first(3)` would quietly be every(100)."""
        raise TypeError(f"{self} is neither true nor false before a moment is given; join schedules with & | ~.")

    @staticmethod
    def parse(text: str, *, functions: Mapping[str, Function] | None = None) -> Schedule:
        """Read a schedule from text; `functions` has those that `when(name)` may name.

        >>> Schedule.parse("every(100)|first(3) & ~epochs(0)")
        every(100) | first(3) & ~epochs(0)
        """
        return _Reader(text, functions or {}).schedule()


def every(n: int, *, offset: int = 0) -> Schedule:
    """Every `n`-th step, counted from step `offset` on."""
    return _Every(_count(n, "every(n)", least=1), _count(offset, "every(n, offset=...)"))


def first(n: int) -> Schedule:
    """The first `n` steps."""
    return _First(_count(n, "first(n)", least=1))


def steps(*numbers: int | range) -> Schedule:
    """These steps; numbers and ranges may be mixed."""
    return _among("steps", numbers)


def batches(*numbers: int | range) -> Schedule:
    """These batches of each epoch."""
    return _among("batches", numbers)


def epochs(*numbers: int | range) -> Schedule:
    """These epochs; a moment without an epoch is in none of them."""
    return _among("epochs", numbers)


def when(function: Function, *, name: str | None = None) -> Schedule:
    """The moments for which `function(moment)` is true; it prints as `when(name)`, its own name unless one is given."""
    if not callable(function):
        raise BadText(f"when(function) takes a function of a moment, not {function!r}.")
    if name is None:
        name = str(getattr(function, "__name__", type(function).__name__))
        name = re.sub(r"[()\s]+", "_", name) or "function"
    elif not re.fullmatch(_FUNCTION, name):
        raise BadText(f"{name!r} cannot stand in when(...); a name has no parentheses and no blanks.")
    return _When(function, name)


# The forms --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class _Every(Schedule):
    n: int
    offset: int = 0

    def __call__(self, moment: Moment) -> bool:
        return moment.step >= self.offset and (moment.step - self.offset) % self.n == 0

    def __str__(self) -> str:
        return f"every({self.n}, offset={self.offset})" if self.offset else f"every({self.n})"


@dataclass(frozen=True, slots=True, repr=False)
class _First(Schedule):
    n: int

    def __call__(self, moment: Moment) -> bool:
        return moment.step < self.n

    def __str__(self) -> str:
        return f"first({self.n})"


@dataclass(frozen=True, slots=True, repr=False)
class _Among(Schedule):
    word: Literal["steps", "batches", "epochs"]
    numbers: tuple[int | range, ...]
    single: frozenset[int] = field(init=False, compare=False)
    ranges: tuple[range, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "single", frozenset(each for each in self.numbers if isinstance(each, int)))
        object.__setattr__(self, "ranges", tuple(each for each in self.numbers if isinstance(each, range)))

    def __call__(self, moment: Moment) -> bool:
        number = {"steps": moment.step, "batches": moment.batch, "epochs": moment.epoch}[self.word]
        return number is not None and (number in self.single or any(number in each for each in self.ranges))

    def __str__(self) -> str:
        return f"{self.word}({', '.join(map(_number_text, self.numbers))})"


@dataclass(frozen=True, slots=True, repr=False)
class _When(Schedule):
    function: Function
    name: str

    def __call__(self, moment: Moment) -> bool:
        return bool(self.function(moment))

    def __str__(self) -> str:
        return f"when({self.name})"


@dataclass(frozen=True, slots=True, repr=False)
class _All(Schedule):
    terms: tuple[Schedule, ...]

    @property
    def _binds(self) -> int:
        return _AND

    def __call__(self, moment: Moment) -> bool:
        return all(term(moment) for term in self.terms)

    def __str__(self) -> str:
        return " & ".join(_inside(term, _AND) for term in self.terms)


@dataclass(frozen=True, slots=True, repr=False)
class _Any(Schedule):
    terms: tuple[Schedule, ...]

    @property
    def _binds(self) -> int:
        return _OR

    def __call__(self, moment: Moment) -> bool:
        return any(term(moment) for term in self.terms)

    def __str__(self) -> str:
        return " | ".join(_inside(term, _OR) for term in self.terms)


@dataclass(frozen=True, slots=True, repr=False)
class _Not(Schedule):
    term: Schedule

    @property
    def _binds(self) -> int:
        return _NOT

    def __call__(self, moment: Moment) -> bool:
        return not self.term(moment)

    def __str__(self) -> str:
        return f"~{_inside(self.term, _NOT)}"

    def __invert__(self) -> Schedule:
        return self.term


def _terms(schedule: Schedule, form: type[_All] | type[_Any]) -> tuple[Schedule, ...]:
    # a | (b | c) and (a | b) | c are one schedule, and print without parentheses.
    return schedule.terms if isinstance(schedule, form) else (schedule,)


def _inside(schedule: Schedule, binds: int) -> str:
    return f"({schedule})" if schedule._binds < binds else str(schedule)


def _number_text(number: int | range) -> str:
    if isinstance(number, int):
        return str(number)
    return f"{number.start}:{number.stop}" + (f":{number.step}" if number.step != 1 else "")


def _count(number: object, form: str, *, least: int = 0) -> int:
    try:
        if isinstance(number, bool):
            raise TypeError
        count = operator.index(number)  # type: ignore[arg-type]  # it says so itself, and numpy's integers pass
    except TypeError:
        raise BadText(f"{form} takes whole numbers, not {number!r}.") from None
    if not least <= count <= _LARGEST:
        raise BadText(f"{form} takes numbers from {least} to 2**63 - 1, not {count if count < least else 'more'}.")
    return count


def _among(word: Literal["steps", "batches", "epochs"], numbers: tuple[int | range, ...]) -> Schedule:
    if not numbers:
        raise BadText(f"{word}() names none; write {word}(0, 2) or {word}(range(0, 10)), in text {word}(0:10).")
    return _Among(word, tuple(_number(each, word) for each in numbers))


def _number(number: object, word: str) -> int | range:
    if isinstance(number, (list, tuple, set, frozenset)):
        raise BadText(
            f"{word}(...) takes numbers and ranges one by one; put a star before the {type(number).__name__}."
        )
    if not isinstance(number, range):
        return _count(number, f"{word}(...)")
    if not number:
        raise BadText(f"{word}({_number_text(number)}) is an empty range; the end of a range is not part of it.")
    upwards = number if number.step > 0 else number[::-1]
    _count(upwards.start, f"{word}(...)")
    _count(upwards.stop, f"{word}(...)")
    return upwards


ALWAYS = every(1)


# Reading ----------------------------------------------------------------------------------------

_FUNCTION = r"[^()\s]+"
_TOKEN = re.compile(r"\s*(?:(?P<number>-?[0-9]+)|(?P<word>[A-Za-z_]\w*)|(?P<mark>[()|&~,:=]))")
_WORDS: dict[str, Callable[..., Schedule]] = {
    "every": every,
    "first": first,
    "epochs": epochs,
    "batches": batches,
    "steps": steps,
}
_ALLOWED = (
    "every(n), every(n, offset=k), first(n), steps(0, 10:20), batches(...), epochs(...) and when(name), "
    "joined with & | ~ and parentheses"
)


class _Reader:
    """Recursive descent, one method for each level of binding."""

    def __init__(self, text: str, functions: Mapping[str, Function]) -> None:
        if not isinstance(text, str):
            raise BadText(f"a schedule is text such as 'every(100) | first(3)', not {text!r}.")
        self.text = text
        self.functions = functions
        self.at = 0
        self.depth = 0

    def schedule(self) -> Schedule:
        found = self.any_of()
        if self.peek():
            self.refuse("expected & or | or the end")
        return found

    def any_of(self) -> Schedule:
        found = self.all_of()
        while self.accept("|"):
            found = found | self.all_of()
        return found

    def all_of(self) -> Schedule:
        found = self.inverted()
        while self.accept("&"):
            found = found & self.inverted()
        return found

    def inverted(self) -> Schedule:
        odd = False
        while self.accept("~"):
            odd = not odd
        found = self.condition()
        return ~found if odd else found

    def condition(self) -> Schedule:
        if self.accept("("):
            self.depth += 1
            if self.depth > _DEEPEST:
                self.refuse(f"more than {_DEEPEST} parentheses deep")
            found = self.any_of()
            self.depth -= 1
            self.expect(")")
            return found
        start, word = self.at, self.peek()
        if word == "when":
            self.accept("when")
            return self.function()
        if word not in _WORDS:
            self.refuse("expected a condition")
        self.accept(word)
        self.expect("(")
        numbers: list[int | range] = []
        named: dict[str, int] = {}
        while not self.accept(")"):
            if named:
                self.refuse("offset= comes last")
            if numbers:
                self.expect(",")
            if word == "every" and self.accept("offset"):
                self.expect("=")
                named["offset"] = self.number()
            else:
                numbers.append(self.number_or_range())
        if word in ("every", "first") and (len(numbers) != 1 or isinstance(numbers[0], range)):
            self.at = start
            self.refuse(f"{word} takes one number")
        return _WORDS[word](*numbers, **named)

    def function(self) -> Schedule:
        match = re.compile(rf"\s*\(\s*({_FUNCTION})\s*\)").match(self.text, self.at)
        if match is None:
            self.refuse("expected (name) after when")
        name = match.group(1)
        if name not in self.functions:
            known = f"there are {', '.join(sorted(self.functions))}" if self.functions else "none was given"
            raise BadText(
                f"{self.text!r} needs the function {name!r}, which has no text form; {known}. "
                f"In Python, use Schedule.parse(text, functions={{{name!r}: ...}}) or build it with when(function)."
            )
        self.at = match.end()
        return when(self.functions[name], name=name)

    def number_or_range(self) -> int | range:
        start = self.number()
        if not self.accept(":"):
            return start
        stop = self.number()
        step = self.number() if self.accept(":") else 1
        if step < 1:
            self.refuse("the step of a range is at least 1")
        return range(start, stop, step)

    def number(self) -> int:
        match = _TOKEN.match(self.text, self.at)
        if match is None or match.group("number") is None:
            self.refuse("expected a number")
        if len(match.group("number")) > len(str(_LARGEST)):
            self.refuse(f"numbers end at {_LARGEST}")
        self.at = match.end()
        return int(match.group("number"))

    def peek(self) -> str:
        match = _TOKEN.match(self.text, self.at)
        return match.group().lstrip() if match else self.text[self.at :].strip()[:1]

    def accept(self, token: str) -> bool:
        match = _TOKEN.match(self.text, self.at)
        if match is None or match.group().lstrip() != token:
            return False
        self.at = match.end()
        return True

    def expect(self, token: str) -> None:
        if not self.accept(token):
            self.refuse(f"expected {token}")

    def refuse(self, why: str) -> NoReturn:
        found = self.peek()
        column = len(self.text) - len(self.text[self.at :].lstrip()) + 1
        where = f"column {column}, {found[:20]!r}" if found else "the end"
        text = self.text if len(self.text) <= 200 else f"{self.text[:200]}..."
        raise BadText(f"{text!r} is not a schedule: {why} (at {where}); there are {_ALLOWED}.")
