"""records.py: which records there are, and how they are found; the oracle is a plain list."""

from __future__ import annotations

import numpy as np
import pytest

from layerscope.points import Moment
from layerscope.store.columns import Columns, Has
from layerscope.store.records import _LOOKS, WHEN, Records


def part(rows: list[tuple[str, Moment]], *, numbers=None, **more) -> Columns:
    points = list(dict.fromkeys(point for point, _ in rows))
    arrays = {"point": np.array([points.index(point) for point, _ in rows], np.uint8)}
    arrays["has"] = np.array([Has.EPOCH * (m.epoch is not None) for _, m in rows], np.uint16)
    arrays["record"] = np.array(range(len(rows)) if numbers is None else numbers, np.int64)
    for name in WHEN:
        arrays[name] = np.array([getattr(m, name) or 0 for _, m in rows], np.int64)
    return Columns(len(rows), arrays, points, [], [], **more)


def told(records: Records, places) -> list[tuple[str, Moment]]:
    return [(records.text(int(at)), records.moment(int(at))) for at in places]


def random_rows(rng, count: int) -> list[tuple[str, Moment]]:
    def moment() -> Moment:
        epoch = None if rng.random() < 0.5 else int(rng.integers(0, 2))
        return Moment(epoch, *(int(n) for n in rng.integers(-1, 3, 4)))

    return [(f"p{rng.integers(0, 4)}:output", moment()) for _ in range(count)]


@pytest.mark.parametrize("seed", range(30))
def test_what_counts_and_what_is_found_is_what_a_list_says(seed):
    rng = np.random.default_rng(seed)
    lists = [random_rows(rng, int(rng.integers(0, 40))) for _ in range(3)]
    begins = np.cumsum([0, *map(len, lists)])
    records = Records([part(rows, numbers=range(at, at + len(rows))) for at, rows in zip(begins, lists, strict=False)])
    rows = [row for each in lists for row in each]
    last = {row: n for n, row in enumerate(rows)}
    kept = sorted(last.values())
    assert records.kept.tolist() == kept
    assert (len(records), records.replaced) == (len(kept), len(rows) - len(kept))
    assert told(records, records.kept) == [rows[n] for n in kept]
    assert records.points == list(dict.fromkeys(rows[n][0] for n in kept))
    assert records.moments == sorted({rows[n][1] for n in kept})
    for texts in (None, ["p1:output"], ["p3:output", "p0:output", "p3:output"], ["absent"], []):
        for when in ({}, {"step": 1}, {"epoch": 0}, {"step": -1, "rank": 2}, {"call": 2**70}):
            naive = [
                n for n in kept
                if (texts is None or rows[n][0] in texts) and all(getattr(rows[n][1], k) == v for k, v in when.items())
            ]  # fmt: skip
            for _ in range(_LOOKS):  # by looking through all, and then by point
                assert records.find(texts, when).tolist() == naive


@pytest.mark.parametrize("seed", range(30))
def test_parts_that_say_what_they_span_are_looked_through_no_further_and_give_the_same(seed):
    rng = np.random.default_rng(seed)
    lists = [list(dict.fromkeys(random_rows(rng, int(rng.integers(0, 30))))) for _ in range(6)]
    rows = [row for each in lists for row in each]
    begins = np.cumsum([0, *map(len, lists)])
    known = []
    for at, each in zip(begins, lists, strict=False):
        steps, ranks = [m.step for _, m in each], {m.rank for _, m in each}
        span = (min(steps), max(steps)) if each else None
        known.append(part(each, numbers=range(at, at + len(each)), unique=True, steps=span, ranks=sorted(ranks)))
    assert Records(known).kept.tolist() == sorted({row: n for n, row in enumerate(rows)}.values())


def test_the_later_one_counts_by_its_number_and_never_by_the_order_of_files():
    rows = [("a:output", Moment(step=1))]
    assert Records([part(rows, numbers=[9]), part(rows, numbers=[4])]).kept.tolist() == [0]
    assert Records([part(rows, numbers=[4]), part(rows, numbers=[9])]).kept.tolist() == [1]
    assert Records([part(rows, numbers=[4]), part(rows, numbers=[9])], [1, 0]).kept.tolist() == [0]


def test_rows_that_are_not_what_was_written_do_not_count_and_bring_back_what_they_replaced():
    rows = [("a:output", Moment(step=1)), ("b:output", Moment()), ("a:output", Moment(step=1))]
    assert Records([part(rows)]).kept.tolist() == [1, 2]
    assert Records([part(rows, bad={2})]).kept.tolist() == [0, 1]


@pytest.mark.parametrize("known", [True, False])
def test_parts_that_cannot_overlap_are_taken_as_they_are_and_others_compared(known):
    one = [("a:output", Moment(step=n)) for n in range(3)]
    two = [("a:output", Moment(step=n)) for n in range(2, 5)]
    more = [
        {"numbers": range(span[0], span[0] + 3), "unique": known, "steps": span if known else None, "ranks": [0]}
        for span in ((0, 2), (2, 4))
    ]
    records = Records([part(rows, **each) for rows, each in zip((one, two), more, strict=True)])
    assert records.kept.tolist() == [0, 1, 3, 4, 5]


def test_moments_at_the_ends_of_64_bits_are_told_apart():
    far = [Moment(step=n, batch=b) for n in (-(2**63), 2**63 - 1) for b in (-(2**63), 0, 2**63 - 1)]
    records = Records([part([("a:output", m) for m in (*far, *far)])])
    assert records.kept.tolist() == list(range(6, 12))
    assert records.moments == sorted(far)


def test_no_parts_are_no_records():
    records = Records([])
    assert (len(records), records.points, records.moments, records.find().tolist()) == (0, [], [], [])


def test_a_place_is_in_a_part():
    records = Records([part([("a:output", Moment())] * 2), part([]), part([("b:output", Moment())])])
    assert [records.part(at) for at in range(3)] == [(0, 0), (0, 1), (2, 0)]
