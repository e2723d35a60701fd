"""manifest.py: run.json."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import google_crc32c
import pytest

from layerscope.errors import Damaged, NewerFormat, NotARun
from layerscope.store.manifest import Completeness, Dropped, Manifest, Missing

FULL = Manifest(
    model={"class": "Llama", "lr": math.inf},
    mode="bf16",
    runtime="eager",
    versions={"torch": "2.13.0"},
    device="cpu",
    seed=7,
    weights={"a.b": "0" * 32},
    taps=["model.layers.*"],
    aliases={"attn": ["model.layers.0.self_attn:output"]},
    shared={"b": "a"},
    settings={"note": "NaN", "</script>": ["../../x"]},
    started="2026-11-15T06:00:00+00:00",
    completeness=Completeness(
        "interrupted", 3, 4, 12, 1, [Missing("a:output", "never called")], [Dropped("b:output", 2, "disk", "step=1")]
    ),
)


def written(value: dict) -> str:
    """Write a manifest by hand, with a right checksum."""
    body = json.dumps({k: v for k, v in value.items() if k != "check"}, indent=1).removesuffix("\n}")
    return f'{body},\n "check": "{google_crc32c.value(body.encode()):08x}"\n}}\n'


def test_it_reads_back():
    assert Manifest.loads(FULL.dumps()) == FULL


def test_it_is_json_for_anybody_and_says_what_it_is():
    value = json.loads(FULL.dumps(), parse_constant=pytest.fail)
    assert (value["format"], value["version"]) == ("layerscope", 2)
    assert list(value)[-1] == "check"
    assert written(value) == FULL.dumps()
    assert value["model"] == {"class": "Llama", "lr": "Infinity"}
    assert value["completeness"]["dropped"] == [{"point": "b:output", "count": 2, "reason": "disk", "first": "step=1"}]


def test_keys_of_a_later_minor_are_passed_over():
    value = json.loads(FULL.dumps()) | {"colour": "blue"}
    assert Manifest.loads(written(value)) == FULL


def test_a_newer_format_is_refused_with_the_way_out():
    value = json.loads(FULL.dumps()) | {"version": 3}
    for text in (written(value), json.dumps({"format": "layerscope", "version": 3})):  # with our check, or none
        with pytest.raises(NewerFormat, match="written by format 3; this layerscope reads up to 2: upgrade") as caught:
            Manifest.loads(text)
        assert isinstance(caught.value, NotARun)


def test_the_first_format_was_never_released_and_is_refused_in_a_sentence():
    with pytest.raises(NotARun, match="written by format 1, which was never released; record it again"):
        Manifest.loads(json.dumps({"format": "layerscope", "version": 1, "mode": None}))


def test_every_flipped_bit_is_noticed():
    raw = FULL.dumps().encode()
    for at in range(len(raw)):
        for bit in (0, 3, 6):
            flipped = bytearray(raw)
            flipped[at] ^= 1 << bit
            with pytest.raises(Damaged):
                Manifest.loads(flipped)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": None},
        {"version": "1"},
        {"version": True},
        {"version": 0},
        {"model": 5},
        {"aliases": {"a": 5}},
        {"aliases": {"a": [5]}},
        {"weights": {"a": 5}},
        {"taps": "x"},
        {"seed": "x"},
        {"completeness": 3},
        {"completeness": {"state": 3}},
        {"completeness": {"records": -1}},
        {"completeness": {"missing": [3]}},
        {"completeness": {"missing": [{"point": 1, "reason": "x"}]}},
        {"completeness": {"dropped": {"a": 1}}},
    ],
)
def test_a_manifest_with_wrong_contents_is_damaged_and_not_a_crash(change):
    with pytest.raises(Damaged):
        Manifest.loads(written(json.loads(FULL.dumps()) | change))


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe\x00", b"[" * 100_000, FULL.dumps()[:-20].encode()])
def test_what_is_not_a_manifest_is_damaged(text):
    with pytest.raises(Damaged):
        Manifest.loads(text)


def test_ranks_add_up_to_the_worst_state():
    a = Completeness("complete", 3, 4, 12, 1, [Missing("x", "r")], [Dropped("x", 1, "r", "step=0")])
    b = Completeness("interrupted", 2, 4, 8, 0, [Missing("x", "r"), Missing("y", "r")])
    both = Completeness.of_ranks([a, b])
    assert both == Completeness(
        "interrupted", 3, 4, 20, 1, [Missing("x", "r"), Missing("y", "r")], [Dropped("x", 1, "r", "step=0")]
    )
    assert Completeness.of_ranks([a, Completeness("recording")]).state == "recording"
    assert Completeness.of_ranks([a, Completeness("invented")]).state == "invented"
    assert Completeness.of_ranks([]).state == "unknown"


def test_a_second_recording_into_the_run_adds_to_the_first():
    first = Completeness("complete", 3, 4, 12, 1, [Missing("x", "never called"), Missing("y", "never called")])
    second = Completeness("complete", 2, 5, 8, 0, [Missing("z", "never called")])
    both = first.followed_by(second, recorded=["x"])
    assert (both.forwards, both.points, both.records, both.recomputed) == (5, 5, 20, 1)
    assert [m.point for m in both.missing] == ["y", "z"]


def test_a_second_manifest_speaks_and_loses_no_name():
    later = Manifest(mode="int8", taps=["b"], aliases={"c": ["c:output"]}, started="later")
    both = replace(FULL, taps=["a"]).followed_by(later)
    assert (both.mode, both.taps, both.started) == ("int8", ["a", "b"], FULL.started)
    assert set(both.aliases) == {"attn", "c"}


def test_forwards_that_raised_are_kept_added_up_and_absent_in_old_files():
    some = replace(FULL, completeness=replace(FULL.completeness, failed=2))
    assert Manifest.loads(some.dumps()).completeness.failed == 2
    old = json.loads(some.dumps())
    del old["completeness"]["failed"]
    assert Manifest.loads(written(old)).completeness.failed == 0
    two, three = Completeness(failed=2), Completeness(failed=3)
    assert two.followed_by(three).failed == 5
    assert Completeness.of_ranks([two, three]).failed == 3
    with pytest.raises(Damaged):
        Manifest.loads(written(json.loads(some.dumps().replace('"failed": 2', '"failed": -2'))))
