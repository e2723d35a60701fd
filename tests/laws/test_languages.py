"""Laws of the three small languages: points, patterns, schedules."""

import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from layerscope.errors import BadText, NoSuchPoint
from layerscope.patterns import Pattern, Place, op_name, select, select_op
from layerscope.points import SIDES, Moment, Point, escape, unescape
from layerscope.schedules import Schedule, batches, epochs, every, first, steps, when

modest = settings(max_examples=150, deadline=None)

# Names and leaves as hostile as they come: everything that has a meaning somewhere, surrogates included.
scraps = st.sampled_from(
    [
        *(".", "..", "*", "**", "!", "\\", "[", "]", "[0]", "[0:4]", "{", "}", ",", ":", "::", ":output", "-1", "-"),
        *("op", "op:", "type", "type:", "input", "0", "1", "a", "b", "\\u0041", "u0041", "%s", "{}", '"', "'", " "),
        *("\n", "\r", "\t", "\x00", "\x1b[2J", "\u2028", "\ud83d", "\ude00", "\U0001f600", "größe", "层"),
        *("/etc/passwd", "../", "</script>"),
    ]
)
characters = st.text(st.characters(exclude_categories=()), max_size=8)
names = st.one_of(
    st.lists(st.one_of(scraps, characters), max_size=6).map("".join),
    st.sampled_from(["", ".", "op", "type", "x" * 300, "层" * 300, "9" * 5000]),
)
leaves = st.lists(st.one_of(st.integers(), names), max_size=3).map(tuple)
sides = st.sampled_from(SIDES)
points = st.builds(Point, names, sides, leaves)
libraries = st.sampled_from(["aten", "mylib"])
ops = st.builds(
    lambda library, packet, side, leaf: Point(f"{library}.{packet}", side, leaf, op=True),
    libraries,
    names.filter(lambda name: name and "." not in name and "::" not in name),
    st.sampled_from(["input", "output"]),
    leaves,
)


# Points -----------------------------------------------------------------------------------------


@modest
@given(st.one_of(points, ops))
def test_the_text_of_a_point_reads_back(point):
    assert Point.parse(str(point)) == point


@modest
@given(st.one_of(points, ops))
def test_the_text_of_a_point_is_one_line_that_any_terminal_and_file_can_take(point):
    text = str(point)
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text
    assert text.encode("utf-8").decode("utf-8") == text


@modest
@given(names)
def test_escape_has_an_inverse(name):
    assert unescape(escape(name)) == name


@modest
@given(names)
def test_any_text_is_a_point_or_bad_text(text):
    try:
        point = Point.parse(text)
    except BadText:
        return
    assert Point.parse(str(point)) == point


@modest
@given(st.lists(st.one_of(points, ops), max_size=6))
def test_points_can_always_be_sorted(some):
    ordered = sorted(some)
    assert not any(later < earlier for earlier, later in pairwise(ordered))


# Patterns: text ---------------------------------------------------------------------------------


@modest
@given(st.one_of(names, st.lists(st.one_of(scraps, sides.map(":{}".format)), max_size=8).map("".join)))
@example("op:output")
@example("op:output:output")
@example("type:input,output")
@example("op:a\\::input")
def test_any_text_is_a_pattern_that_reads_back_or_bad_text(text):
    try:
        pattern = Pattern.parse(text)
    except BadText:
        return
    assert Pattern.parse(str(pattern)) == pattern


@modest
@given(
    st.one_of(names.map(escape), st.sampled_from(["*", "a.**", "{a,b.-1}", "a[0:2].b", "op", "type", "output"])),
    st.sampled_from(["name", "type", "op"]),
    st.sets(sides, min_size=1),
    leaves,
    st.booleans(),
)
def test_a_pattern_made_from_parts_reads_back(glob, kind, wanted, leaf, exclude):
    try:
        pattern = Pattern(glob, kind, tuple(wanted), leaf, exclude)
    except BadText:
        return
    assert Pattern.parse(str(pattern)) == pattern


@modest
@given(points, st.lists(names, max_size=8))
def test_the_text_of_a_point_is_a_pattern_for_just_that_point(point, others):
    places = [Place(name, ("Thing", "Module")) for name in dict.fromkeys([*others, point.name, "", "a", "0", "1"])]
    assert select(str(point), places) == [point]
    pattern = Pattern.parse(str(point))
    assert pattern.matches(point)
    assert not any(
        pattern.matches(Point(place.name, point.side, point.leaf)) for place in places if place.name != point.name
    )
    excluded = "!" + str(Point(point.name, point.side))
    assert [p.name for p in select([f"**:{point.side}", excluded], places)] == [
        place.name for place in places if place.name != point.name
    ]


@modest
@given(ops)
def test_the_text_of_an_operations_point_selects_that_operation(point):
    library, packet = point.name.split(".", 1)
    assert select_op(str(point), f"{library}::{packet}") == [
        Point(op_name(point.name), point.side, point.leaf, op=True)
    ]
    assert select_op(str(point), f"{library}::not{packet}") == []


# Patterns: meaning, against a naive matcher -------------------------------------------------------

trees = st.recursive(
    st.just(([], {})),
    lambda inner: st.tuples(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(["a", "b", "ab", "x1"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def names_in(tree, prefix=()):
    """The dotted names of a tree of modules: numbered children first, then named ones."""
    numbered, named = tree
    yield prefix
    for number, child in enumerate(numbered):
        yield from names_in(child, (*prefix, str(number)))
    for name, child in named.items():
        yield from names_in(child, (*prefix, name))


# One part of a pattern is a list of alternatives; an alternative is "**", a slice, or a plain glob of one part.
globs = st.lists(st.sampled_from(["*", "a", "b", "0", "1", "x"]), min_size=1, max_size=3).map(
    lambda bits: re.sub(r"\*+", "*", "".join(bits))
)
bounds = st.one_of(st.none(), st.integers(-5, 5))
slices = st.builds(slice, bounds, bounds, st.one_of(st.none(), st.integers(1, 3)))
from_the_end = st.integers(-5, -1)
pattern_parts = st.one_of(
    st.just(["**"]),
    globs.map(lambda glob: [glob]),
    slices.map(lambda cut: [cut]),
    from_the_end.map(lambda number: [number]),
    st.lists(st.one_of(globs, from_the_end), min_size=2, max_size=3),
)


def written(parts):
    """The text of a pattern made of parts."""
    text = ""
    for at, alternatives in enumerate(parts):
        first_alternative = alternatives[0]
        if isinstance(first_alternative, slice):
            cut = first_alternative
            shown = ["" if bound is None else str(bound) for bound in (cut.start, cut.stop)]
            text += f"[{':'.join(shown)}{'' if cut.step is None else f':{cut.step}'}]"
            continue
        dot = "." if at else ""
        several = ",".join(map(str, alternatives))
        text += dot + (f"{{{several}}}" if len(alternatives) > 1 else several)
    return text


def fits_part(glob, part):
    """Match one part, one character at a time; a lone star wants at least one."""
    if glob == "*":
        return part != ""
    if not glob:
        return not part
    if glob[0] == "*":
        return any(fits_rest(glob[1:], part[n:]) for n in range(len(part) + 1))
    return part[:1] == glob[0] and fits_rest(glob[1:], part[1:])


def fits_rest(glob, part):
    return True if glob == "*" else fits_part(glob, part)


def fits(parts, name, siblings, done=()):
    """Match a name, a tuple of parts, by trying everything; `siblings` counts the numbered children of each name."""
    if not parts:
        return not name
    alternatives, rest = parts[0], parts[1:]
    if alternatives == ["**"]:
        return any(fits(rest, name[n:], siblings, done + name[:n]) for n in range(len(name) + 1))
    if not name:
        return False
    here = list(map(str, range(siblings.get(done, 0))))
    for each in alternatives:
        if isinstance(each, slice):
            found = name[0] in here[each]
        elif isinstance(each, int):
            found = -each <= len(here) and name[0] == here[each]
        else:
            found = fits_part(each, name[0])
        if found and fits(rest, name[1:], siblings, (*done, name[0])):
            return True
    return False


def chosen(patterns, places):
    try:
        return [point.name for point in select(patterns, places)]
    except NoSuchPoint:
        return []


@settings(max_examples=400, deadline=None)
@given(trees, st.lists(pattern_parts, min_size=1, max_size=4))
@example(([], {"a": ([([], {"b": ([([], {})] * 2, {})})] * 2, {})}), [["**"], [-1], ["**"]])
@example(([([], {})] * 4, {}), [[slice(-3, None, 2)]])
def test_globs_mean_what_a_naive_matcher_says(tree, parts):
    found = list(names_in(tree))
    siblings = {name: sum(other[:-1] == name and other[-1].isdecimal() for other in found if other) for name in found}
    places = [Place(".".join(name), ("Thing", "Module")) for name in found]
    expected = [".".join(name) for name in found if fits(parts, name, siblings)]
    assert chosen(written(parts), places) == expected


@modest
@given(trees, st.lists(st.lists(pattern_parts, min_size=1, max_size=3), min_size=1, max_size=3), st.data())
def test_several_patterns_are_a_union_and_exclusions_a_difference(tree, several, data):
    places = [Place(".".join(name), ("Thing", "Module")) for name in names_in(tree)]
    texts = [written(parts) for parts in several]
    found = {text: set(chosen(text, places)) for text in texts}
    split = data.draw(st.integers(0, len(texts)))
    wanted, unwanted = texts[:split], texts[split:]
    everything = {place.name for place in places} if not wanted else set().union(*(found[text] for text in wanted))
    expected = everything.difference(*(found[text] for text in unwanted))
    if not all(found.values()):
        expected = set()  # a pattern that matches nothing raises
    order = data.draw(st.permutations([*wanted, *(f"!{text}" for text in unwanted)]))
    assert chosen(order, places) == [place.name for place in places if place.name in expected]


@modest
@given(trees, st.lists(pattern_parts, min_size=1, max_size=4))
def test_matching_one_point_agrees_with_selecting_among_all(tree, parts):
    places = [Place(".".join(name), ("Thing", "Module")) for name in names_in(tree)]
    pattern = Pattern.parse(written(parts))
    if any(counts_from_the_end(each) for alternatives in parts for each in alternatives):
        with pytest.raises(BadText, match="counts from the end"):
            pattern.matches(Point("a"))
        return
    found = chosen(pattern, places)
    assert [place.name for place in places if pattern.matches(Point(place.name))] == found


def counts_from_the_end(each):
    bounds = (each.start, each.stop) if isinstance(each, slice) else (each,)
    return any(isinstance(bound, int) and bound < 0 for bound in bounds)


# Schedules --------------------------------------------------------------------------------------


def is_odd(moment):
    return moment.step % 2 == 1


def is_late(moment):
    return (moment.epoch or 0) > 1


FUNCTIONS = {"is_odd": is_odd, "is_late": is_late}
MOMENTS = [Moment(epoch, step, batch) for epoch in (None, 0, 1, 2, 5) for step in range(12) for batch in (0, 1, step)]

small = st.integers(0, 12)
ranges = st.builds(range, small, small, st.integers(1, 4)).filter(len)
several_numbers = st.lists(st.one_of(small, ranges), min_size=1, max_size=3)


def holds(number, numbers):
    return any(number == each if isinstance(each, int) else number in list(each) for each in numbers)


# Each strategy gives a pair: a schedule, and the plain Python that it has to agree with.
words = st.one_of(
    st.tuples(st.integers(1, 6), small).map(
        lambda n: (every(n[0], offset=n[1]), lambda m: m.step in range(n[1], 1000, n[0]))
    ),
    st.integers(1, 12).map(lambda n: (first(n), lambda m: m.step in range(n))),
    several_numbers.map(lambda ns: (steps(*ns), lambda m: holds(m.step, ns))),
    several_numbers.map(lambda ns: (batches(*ns), lambda m: holds(m.batch, ns))),
    several_numbers.map(lambda ns: (epochs(*ns), lambda m: m.epoch is not None and holds(m.epoch, ns))),
    st.sampled_from([is_odd, is_late]).map(lambda f: (when(f), f)),
)
schedules = st.recursive(
    words,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: (p[0][0] & p[1][0], lambda m: p[0][1](m) and p[1][1](m))),
        st.tuples(inner, inner).map(lambda p: (p[0][0] | p[1][0], lambda m: p[0][1](m) or p[1][1](m))),
        inner.map(lambda p: (~p[0], lambda m: not p[1](m))),
    ),
    max_leaves=8,
)
plain = schedules.map(lambda pair: pair[0])


@modest
@given(schedules)
def test_schedules_are_boolean_algebra(pair):
    schedule, oracle = pair
    assert [schedule(moment) for moment in MOMENTS] == [bool(oracle(moment)) for moment in MOMENTS]


@modest
@given(plain)
def test_the_text_of_a_schedule_reads_back(schedule):
    assert Schedule.parse(str(schedule), functions=FUNCTIONS) == schedule
    assert hash(Schedule.parse(str(schedule), functions=FUNCTIONS)) == hash(schedule)


@modest
@given(plain)
def test_the_text_of_a_schedule_means_to_python_what_it_means_to_us(schedule):
    # Each word becomes the bits of the moments it takes: Python's own & | ~ on integers, with its own precedence.
    def bits(taken):
        return sum(1 << at for at, moment in enumerate(MOMENTS) if taken(moment))

    words = {
        "every": lambda n, offset=0: bits(lambda m: m.step >= offset and (m.step - offset) % n == 0),
        "first": lambda n: bits(lambda m: m.step < n),
        "steps": lambda *ns: bits(lambda m: holds(m.step, ns)),
        "batches": lambda *ns: bits(lambda m: holds(m.batch, ns)),
        "epochs": lambda *ns: bits(lambda m: m.epoch is not None and holds(m.epoch, ns)),
        "when": bits,
        **FUNCTIONS,
    }
    python = re.sub(r"(\d+):(\d+)(?::(\d+))?", lambda m: f"range({m[1]}, {m[2]}, {m[3] or 1})", str(schedule))
    everything = (1 << len(MOMENTS)) - 1
    assert eval(python, {"__builtins__": {}, "range": range}, words) & everything == bits(schedule)


@modest
@given(plain, plain, plain)
def test_the_laws_of_boole(a, b, c):
    def same(left, right):
        return all(left(moment) == right(moment) for moment in MOMENTS)

    assert same(a & b, b & a)
    assert same(a | b, b | a)
    assert (a & b) & c == a & (b & c)
    assert (a | b) | c == a | (b | c)
    assert same(a & (b | c), (a & b) | (a & c))
    assert same(~(a & b), ~a | ~b)
    assert same(~(a | b), ~a & ~b)
    assert ~~a == a
    assert same(a | ~a, every(1))
    assert not any((a & ~a)(moment) for moment in MOMENTS)


fragments = st.sampled_from(
    [
        "every(",
        "first(3)",
        "steps(",
        "0:4",
        "1",
        ",",
        ")",
        "(",
        "|",
        "&",
        "~",
        " ",
        "when(is_odd)",
        "offset=",
        "x",
        "-",
        "9",
    ]
)


@modest
@given(st.one_of(names, st.lists(fragments, max_size=10).map("".join)))
def test_any_text_is_a_schedule_that_reads_back_or_bad_text(text):
    try:
        schedule = Schedule.parse(text, functions=FUNCTIONS)
    except BadText:
        return
    assert Schedule.parse(str(schedule), functions=FUNCTIONS) == schedule
