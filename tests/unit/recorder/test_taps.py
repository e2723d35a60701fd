"""Taps are read in every form the caller may write them, and resolved once."""

from __future__ import annotations

import pytest
import torch

from layerscope.errors import BadText, NoSuchPoint
from layerscope.patterns import Place
from layerscope.points import Moment, Point
from layerscope.recorder.taps import Tap, Want, level_of, plan, taps_of
from layerscope.schedules import every, first, when

PLACES = [Place(""), Place("a", ("Linear",)), Place("b", ("ReLU",)), Place("c", ("Linear",))]
DISK = Want(tensor=True, summary=True, level="full")


def planned(taps, *, default=DISK, shared=None, **options):
    return plan(taps_of(taps), PLACES, shared or {}, default=default, **options)


@pytest.mark.parametrize(
    ("taps", "patterns"),
    [
        ("a", [("a",)]),
        (["a", "b"], [("a", "b")]),
        (("a", Tap("b", keep="summary")), [("a",), ("b",)]),
        (Tap(("a", "!b")), [("a", "!b")]),
        ({"first": "a", "rest": ["b", "c"], "tap": Tap("a:input")}, [("a",), ("b", "c"), ("a:input",)]),
    ],
)
def test_every_form_of_taps_is_read(taps, patterns):
    assert [tap.patterns for tap in taps_of(taps)] == patterns


def test_aliases_stand_for_their_points():
    assert planned({"first": "a", "both": ["a:input", "b"]}).aliases == {
        "first": ["a:output"],
        "both": ["a:input", "b:output"],
    }


@pytest.mark.parametrize("nothing", [[], {}, 7, None])
def test_what_is_no_tap_is_refused(nothing):
    with pytest.raises(BadText):
        taps_of(nothing)


def test_a_pattern_that_matches_nothing_raises_and_names_the_nearest():
    with pytest.raises(NoSuchPoint, match=r"'d'"):
        planned("d")


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep": "tensors"},
        {"statistics": "all"},
        {"statistics": "channels(axis=x)"},
        {"patterns": ()},
        {"patterns": "a:sideways"},
        {"when": "often"},
    ],
)
def test_a_wrong_tap_is_refused_when_it_is_made(wrong):
    with pytest.raises(ValueError, match=r"."):
        Tap(**{"patterns": "a", **wrong})


def test_a_shared_module_is_planned_under_its_first_name():
    assert planned(["b", "c"], shared={"c": "b"}).expected == [Point("b")]


def test_schedules_decide_what_is_due():
    due = planned(["a", Tap("b", when=first(1)), Tap("c", when="every(2)")]).due
    assert [due(Moment(step=s, batch=s)) for s in (0, 1, 2)] == [
        (True, True, True), (True, False, False), (True, False, True),
    ]  # fmt: skip


def test_the_blocks_schedule_holds_for_taps_without_their_own():
    due = planned(["a", Tap("b", when=every(1))], when=first(1)).due
    assert due(Moment(step=5)) == (False, True)


def test_a_schedule_that_taps_share_is_asked_once_at_each_moment():
    asked = []
    shared = when(lambda moment: asked.append(moment.step) or moment.step == 1, name="shared")
    taps = [Tap("a"), Tap("b", when=every(2)), Tap("a")]
    due = planned(taps, when=shared).due
    assert [due(Moment(step=step)) for step in range(3)] == [
        (False, True, False), (True, False, True), (False, True, False),
    ]  # fmt: skip
    assert asked == [0, 1, 2]
    assert planned(taps[1:2], when=shared).due(Moment(step=4)) == (True,)
    assert asked == [0, 1, 2]  # nobody goes by it


def test_two_taps_on_one_point_add_up():
    both = planned([Tap("a", keep="tensor"), Tap("a", keep="summary", statistics="moments")])
    assert both.want((True, True), Point("a")) == Want(tensor=True, summary=True, level="full")
    assert both.want((False, True), Point("a")) == Want(summary=True, level="moments")
    assert not both.want((True, True), Point("b"))


def test_a_leaf_wanted_means_what_lies_under_it():
    wish = planned("a[1]").want
    assert not wish((True,), Point("a", leaf=(0,)))
    assert wish((True,), Point("a", leaf=(1, "key")))


def test_two_functions_of_one_point_are_refused():
    with pytest.raises(BadText, match="two taps keep different things of a:output: mean and amax"):
        planned([Tap("a", keep=torch.mean), Tap("a", keep=torch.amax)])
    assert planned([Tap("a", keep=torch.mean), Tap("b", keep=torch.amax)])


def test_operations_are_planned_when_they_run():
    whole = planned(["a", Tap("op:aten.softmax:input")])
    assert whole.op_named("aten.mm.default") is None
    assert whole.op_named("aten._softmax.default") == "aten.softmax"
    assert whole.want((True, True), Point("aten.softmax", "input", (0,), op=True))
    assert not whole.want((True, True), Point("aten.softmax", "output", op=True))
    assert whole.expected == [Point("a")]


def test_a_tap_prints_what_it_says():
    assert str(Tap(("a", "!b"), keep=torch.mean, when="every(10)", alias="means")) == (
        "a, !b (as means, keep mean, when every(10))"
    )


def test_a_request_is_found_again_by_the_very_point_and_by_an_equal_one():
    whole = planned(["a", Tap("op:aten.softmax:input")])
    due, point = (True, True), Point("a", leaf=(0,))
    request = whole.request(due, point)
    assert request.want == whole.want(due, point)
    assert whole.requests(due)[id(point)] is request
    assert whole.request(due, Point("a", leaf=(0,))) is request
    assert len(whole.requests(due)) == 1  # points made for one call are not collected
    assert whole.request(due, Point("b")).want is None
    assert whole.request((False, True), point).want is None


def test_an_operation_that_turns_up_is_asked_for_in_the_step_under_way():
    whole = planned([Tap("op:aten.softmax:input")])
    under_way, point = whole.requests((True,)), Point("aten.softmax", "input", (0,), op=True)
    assert whole.request((True,), point).want is None
    assert whole.op_named("aten._softmax.default") == "aten.softmax"
    assert id(point) not in under_way
    assert whole.request((True,), point).want
    assert under_way[id(point)].want


# Channels -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "level", "axis"),
    [
        ("full", "full", None),
        ("moments", "moments", None),
        ("channels", "full", -1),
        ("channels(axis=1)", "full", 1),
        ("channels( axis = -2 )", "full", -2),
    ],
)
def test_statistics_are_read_from_their_text(text, level, axis):
    assert level_of(text) == (level, axis)
    wish = planned([Tap("a", keep="summary", statistics=text)]).want((True,), Point("a"))
    assert (wish.level, wish.axis, wish.summary) == (level, axis, True)


def test_a_tap_that_asks_for_channels_gets_them_in_memory_too_unless_it_says_what_to_keep():
    assert planned([Tap("a", statistics="channels")], default=Want(tensor=True)).want((True,), Point("a")).summary
    kept = planned([Tap("a", keep="tensor", statistics="channels")], default=Want(tensor=True))
    assert not kept.want((True,), Point("a")).summary


def test_taps_that_overlap_add_up_to_channels_but_not_of_two_axes():
    both = planned([Tap("a", keep="summary", statistics="moments"), Tap("a", keep="summary", statistics="channels")])
    wish = both.want((True, True), Point("a"))
    assert (wish.level, wish.axis) == ("full", -1)
    with pytest.raises(BadText, match="two taps want channels of a:output along axis -1 and axis 1"):
        planned([Tap("a", statistics="channels"), Tap("a", statistics="channels(axis=1)")])
