"""Every kind of row with the fault and without it, on tensors small enough to plant it by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compared import metrics as made_up
from compared import row as written
from layerscope.compare.measure import measure
from layerscope.compare.noise_floor import LIMIT, Noise, Scale, numbers_in
from layerscope.compare.record_pair import RecordPair
from layerscope.compare.routing import Flips
from layerscope.compare.verdicts import judge as judged
from layerscope.compare.verdicts import verdict
from layerscope.points import Moment, Point

R = np.random.default_rng(0)
X = R.standard_normal((1, 64, 32)).astype(np.float32)
EXACT = X.copy()
FAULTY = X * np.float32(1.5)
ERROR = 2.0**-9


def rounded(x=X, seed=1, error=ERROR):
    """Return `x` with independent errors of a relative size, as a coarser dtype makes them."""
    return (x * (1 + error * np.random.default_rng(seed).standard_normal(x.shape))).astype(np.float32)


def pair(name, reference, candidate, *, moment=None, **told):
    point = Point.parse(name)
    found = measure(torch.as_tensor(reference), torch.as_tensor(candidate))
    return RecordPair(point, moment or Moment(), point, "exact", metrics=found, **told)


def noise_of(*pairs):
    numbers = {(one.point, one.moment): numbers_in(one.metrics) for one in pairs if one.metrics.sets is None}
    sets = {(one.point, one.moment): one.metrics.sets for one in pairs if one.metrics.sets is not None}
    return Noise("runs/noise", "float32", numbers, {key: s.changed / s.rows for key, s in sets.items()})


def judge(measured, *, noise=(), limit=LIMIT, **options):
    return judged(measured, scale=Scale(None, noise, limit=limit), **options)


def kinds(*measured, **options):
    return [row.kind for row in judge(measured, candidate="c", **options)]


def only(measured, **options):
    [row] = judge([measured], candidate="c", **options)
    return row


QUIET = noise_of(pair("a", X, rounded(seed=9)))


# What one pair shows by itself ------------------------------------------------------------------


def test_equal_bits_are_the_same():
    row = only(pair("a", X, EXACT))
    assert (row.kind, row.because, row.ratio) == ("same", "every bit is equal", 0.0)


def test_one_changed_value_is_not_the_same():
    changed = X.copy()
    changed[0, 3, 3] = np.nextafter(changed[0, 3, 3], np.float32(np.inf))
    assert only(pair("a", X, changed)).kind == "noise"


def test_equal_values_of_two_dtypes_are_the_same_and_the_dtypes_are_named():
    exact = np.round(X * 4) / 4
    row = only(pair("a", torch.from_numpy(exact), torch.from_numpy(exact).bfloat16()))
    assert (row.kind, row.because) == ("same", "every value is equal, as float32 and bfloat16")


def test_negative_zero_is_the_same_value():
    zeros = np.zeros((2, 3), np.float32)
    assert only(pair("a", zeros, -zeros)).kind == "same"


def test_empty_tensors_are_the_same():
    row = only(pair("a", np.empty((0, 4), np.float32), np.empty((0, 4), np.float32)))
    assert (row.kind, row.because) == ("same", "both are empty")
    other = only(pair("a", np.empty((0, 4), np.float32), np.empty((0, 4), np.float64)))
    assert other.kind == "same"


def test_an_error_as_large_as_the_noise_run_s_is_noise_and_the_ratio_is_told():
    row = only(pair("a", X, rounded(seed=1)), noise=[QUIET])
    assert row.kind == "noise"
    assert row.floor.source == "runs/noise"
    errors = [np.linalg.norm(x.astype(np.float64) - X) / np.linalg.norm(X) for x in (rounded(seed=1), rounded(seed=9))]
    assert row.ratio == pytest.approx(errors[0] / errors[1])
    assert f"{row.ratio:.3g} times the floor" in row.because


def test_an_error_several_times_the_noise_run_s_is_a_root():
    row = only(pair("a", X, rounded(error=3 * ERROR)), noise=[QUIET])
    assert row.kind == "root"
    assert "times the floor" in row.because


def test_the_limit_is_how_many_times_the_floor_may_be():
    three = pair("a", X, rounded(error=3 * ERROR))
    assert only(three, noise=[QUIET], limit=4.0).kind == "noise"
    assert only(three, noise=[QUIET], limit=2.0).kind == "root"


def test_the_estimate_allows_rounding_and_no_fault():
    assert only(pair("a", torch.from_numpy(X), torch.from_numpy(X).bfloat16())).kind == "noise"
    row = only(pair("a", torch.from_numpy(X), (torch.from_numpy(X) * 1.5).bfloat16()))
    assert (row.kind, row.floor.source) == ("root", "estimate")


def test_a_scale_below_the_limit_is_found_by_the_scale():
    loud = noise_of(pair("a", X, rounded(seed=9, error=0.01)))
    scaled = rounded(X * np.float32(1.01), error=0.01)
    row = only(pair("a", X, scaled), noise=[loud])
    assert row.ratio < LIMIT
    assert row.kind == "root"
    assert row.because.startswith("scaled by 1.0098")
    assert only(pair("a", X, rounded(error=0.01)), noise=[loud]).kind == "noise"


def test_one_massive_activation_that_rounds_otherwise_is_noise():
    massive = X.copy()
    massive[0, 5, 7] = 1e4
    quiet = noise_of(pair("a", massive, np.where(massive == 1e4, massive, rounded(massive, seed=9))))
    other = rounded(massive)
    other[0, 5, 7] = 1e4 * (1 + 4 * ERROR)
    row = only(pair("a", massive, other), noise=[quiet])
    assert row.ratio > LIMIT
    assert row.kind == "noise"


def test_one_zeroed_token_is_a_root_and_named():
    zeroed = rounded()
    zeroed[0, 5] = 0
    row = only(pair("a", X, zeroed), noise=[QUIET])
    assert row.kind == "root"
    assert row.because.startswith("token 5 of 64 is off by 1,")
    assert only(pair("a", X, rounded()), noise=[QUIET]).kind == "noise"


def test_a_tenth_of_the_tokens_that_is_off_is_a_root():
    off = rounded()
    off[0, :10] = rounded(error=7 * ERROR)[0, :10]
    row = only(pair("a", X, off), noise=[QUIET])
    assert row.kind == "root"
    assert "a tenth of the tokens" in row.because


@pytest.mark.parametrize("noise", [[], ["noise"]])
def test_values_where_the_reference_has_zeroed_tokens_are_a_root(noise):
    """Padding that the candidate does not mask: no token has a relative error there."""
    padded = X.copy()
    padded[0, 48:] = 0
    quiet = [noise_of(pair("a", padded, rounded(padded, seed=9)))] if noise else []
    healthy = rounded(padded, error=ERROR if noise else 2.0**-24)
    unmasked = healthy.copy()
    unmasked[0, 60:] = X[0, 60:]
    row = only(pair("a", padded, unmasked), noise=quiet)
    assert row.kind == "root"
    assert only(pair("a", padded, healthy), noise=quiet).kind == "noise"


def test_without_a_token_axis_the_whole_error_counts():
    quiet = noise_of(pair("a", X[0], rounded(seed=9)[0]))
    assert only(pair("a", X[0], rounded()[0]), noise=[quiet]).kind == "noise"
    assert only(pair("a", X[0], rounded(error=3 * ERROR)[0]), noise=[quiet]).kind == "root"


def test_a_nan_is_nonfinite_and_its_place_is_told():
    broken = X.copy()
    broken[0, 2, 4:] = np.nan
    row = only(pair("a", X, broken))
    assert row.kind == "nonfinite"
    assert row.because == "28 NaN in the candidate, first at [0, 2, 4]; the reference is finite"


def test_a_reference_with_nan_is_said_to_be_the_odd_one():
    broken = X.copy()
    broken[0, 0, :2] = np.nan, -np.inf
    assert only(pair("a", broken, X)).because.startswith("the reference itself has 1 NaN and 1 infinite values")


def test_infinities_of_other_signs_are_nonfinite_and_the_same_ones_are_the_same():
    infinite = X.copy()
    infinite[0, 0, 0] = np.inf
    other = infinite.copy()
    other[0, 0, 0] = -np.inf
    row = only(pair("a", infinite, other))
    assert (row.kind, row.because) == ("nonfinite", "1 values are not finite in the same way, first at [0, 0, 0]")
    assert only(pair("a", infinite, infinite.copy())).kind == "same"


def test_where_nothing_is_finite_there_is_no_verdict():
    # The same infinities are equal, so this takes a NaN that is none: measured by hand.
    lost = made_up(compared=0, equal=0)
    row = only(RecordPair(Point("a"), Moment(), Point("a"), "exact", metrics=lost))
    assert (row.kind, row.because) == ("degenerate", "no element is finite on both sides")


@pytest.mark.parametrize(("value", "said"), [(0.0, "all zero"), (2.5, "constant (2.5)")])
def test_a_constant_reference_is_degenerate_and_an_equal_candidate_the_same(value, said):
    constant = np.full((1, 4, 8), value, np.float32)
    other = constant.copy()
    other[0, 0, 0] += 1
    row = only(pair("a", constant, other))
    assert row.kind == "degenerate"
    assert said in row.because
    assert "max |d| 1" in row.because
    assert only(pair("a", constant, constant.copy())).kind == "same"


def test_a_constant_candidate_is_a_root():
    assert only(pair("a", X, np.zeros_like(X))).kind == "root"


def test_a_single_number_is_no_constant():
    loss = torch.tensor(2.5)
    assert only(pair("loss", loss, loss * (1 + 2.0**-23))).kind == "noise"
    assert only(pair("loss", loss, loss * 3)).kind == "root"
    assert only(pair("loss", loss * 0, loss)).kind == "degenerate"


@pytest.mark.parametrize(("reference", "candidate"), [(1.0, 1e300), (1e-200, 1.0)])
def test_a_candidate_whose_ratio_to_the_reference_no_number_holds_is_a_root(reference, candidate):
    row = only(pair("a", X.astype(np.float64) * reference, X.astype(np.float64) * candidate))
    assert row.kind == "root"
    assert row.because.startswith("the reference vanishes beside the candidate: max |d| ")
    assert str(verdict([row])) == "differs"
    scaled = X.astype(np.float64) * candidate
    assert only(pair("a", scaled, scaled * (1 + 1e-16))).kind == "same"


@pytest.mark.parametrize(
    ("reference", "candidate", "word"),
    [
        (np.zeros((2, 4, 8)), np.full((2, 4, 8), 3.0), "differs"),
        (np.ones((2, 4, 8)), np.full((2, 4, 8), 3.0), "differs"),
        (np.zeros((2, 4, 8)), np.full((2, 4, 8), 1e-7), "noise"),
        (np.ones((2, 4, 8)), np.full((2, 4, 8), 1 + 1e-7), "noise"),
    ],
    ids=["zero, and far off", "constant, and far off", "zero, and next to it", "constant, and rounded"],
)
def test_a_degenerate_row_makes_a_difference_when_it_is_far_off(reference, candidate, word):
    rows = judge([pair("a", X, X), pair("b", np.float32(reference), np.float32(candidate))], candidate="c")
    assert [row.kind for row in rows] == ["same", "degenerate"]
    assert str(verdict(rows)) == word


def test_complex_numbers_of_modulus_one_are_no_constant():
    turned = torch.polar(torch.ones(4, 8), torch.linspace(0, 3, 32).reshape(4, 8))
    assert kinds(pair("a", turned, -turned)) == ["root"]


def test_bool_tensors_are_whole_numbers():
    mask = torch.ones(4, 8, dtype=torch.bool)
    flipped = mask.clone()
    flipped[0, :3] = False
    row = only(pair("a", mask, flipped))
    assert (row.kind, row.because) == ("root", "3 of 32 whole numbers differ")
    assert only(pair("a", mask, mask.clone())).kind == "same"


def test_whole_numbers_that_differ_are_a_root_however_small_the_error():
    ids = torch.arange(1000, 1200).reshape(1, 200)
    other = ids.clone()
    other[0, 7] += 1
    row = only(pair("a", ids, other))
    assert (row.kind, row.because) == ("root", "1 of 200 whole numbers differ")


def test_the_reason_says_that_weights_differ():
    assert only(pair("a", X, FAULTY, weights_differ=True)).because.endswith("; its weights differ")
    assert "weights" not in only(pair("a", X, FAULTY)).because


def test_a_pairing_by_order_is_doubted_where_the_two_part():
    one = pair("a", X, FAULTY)
    by_order = RecordPair(one.point, one.moment, one.point, "order", metrics=one.metrics)
    assert only(by_order).because.endswith("paired by order and shape alone")
    assert "order" not in only(one).because


@pytest.mark.parametrize("kind", ["missing", "unpaired", "degenerate", "same", "noise"])
def test_what_was_not_measured_keeps_its_kind_and_reason(kind):
    row = only(RecordPair(Point("a"), Moment(), None, "", kind=kind, because="as told"))
    assert (row.kind, row.because, row.metrics, row.floor) == (kind, "as told", None, None)


@pytest.mark.parametrize("kind", ["root", "nonfinite"])
def test_a_difference_told_by_statistics_is_made_once_and_inherited_after(kind):
    told = [RecordPair(Point(name), Moment(), Point(name), "exact", kind=kind, because="told") for name in "ab"]
    rows = judge(told, candidate="c")
    assert [row.kind for row in rows] == [kind, "inherited"]
    assert rows[1].because == "told; a parted before it"


# Whose fault it is ------------------------------------------------------------------------------


def test_without_inputs_the_first_is_the_root_and_the_rest_inherit():
    rows = judge([pair("a", X, EXACT), pair("b", X, FAULTY), pair("c", X, FAULTY)], candidate="c")
    assert [row.kind for row in rows] == ["same", "root", "inherited"]
    assert rows[2].because.endswith("; b parted before it")


def test_inputs_that_agree_make_a_second_root():
    rows = judge(
        [
            pair("a:input[0]", X, EXACT),
            pair("a", X, FAULTY),
            pair("b:input[0]", X, rounded(error=2.0**-24)),
            pair("b", X, FAULTY),
        ],
        candidate="c",
    )
    assert [row.kind for row in rows] == ["same", "root", "noise", "root"]
    assert rows[1].because.endswith("; its input agrees")
    assert rows[3].because.endswith("; its input agrees")


def test_an_input_that_parted_makes_the_output_inherit():
    rows = judge([pair("a", X, FAULTY), pair("b:input[0]", X, FAULTY), pair("b", X, FAULTY)], candidate="c")
    assert [row.kind for row in rows] == ["root", "inherited", "inherited"]
    assert rows[2].because.endswith("; its input differs already")


def test_one_parted_input_of_two_is_enough():
    assert kinds(
        pair("a", X, FAULTY), pair("b:input[0]", X, EXACT), pair("b:input[1]", X, FAULTY), pair("b", X, FAULTY)
    ) == ["root", "same", "inherited", "inherited"]


def test_inputs_of_another_call_say_nothing():
    later = Moment(call=1)
    assert kinds(pair("a", X, FAULTY), pair("b:input[0]", X, EXACT), pair("b", X, FAULTY, moment=later)) == [
        "root",
        "same",
        "inherited",
    ]


@pytest.mark.parametrize("kind", ["missing", "unpaired"])
def test_an_input_that_was_not_compared_does_not_agree(kind):
    unread = RecordPair(Point.parse("b:input[0]"), Moment(), None, "exact", kind=kind, because="unreadable")
    rows = judge([pair("a", X, FAULTY), unread, pair("b", X, FAULTY)], candidate="c")
    assert [row.kind for row in rows] == ["root", kind, "inherited"]
    assert "agrees" not in rows[2].because


def test_a_part_that_parted_makes_the_whole_inherit_though_its_own_input_agrees():
    rows = judge(
        [pair("layer:input[0]", X, EXACT), pair("layer.mlp", X, FAULTY), pair("layer", X, FAULTY)], candidate="c"
    )
    assert [row.kind for row in rows] == ["same", "root", "inherited"]
    assert rows[2].because.endswith("; its part layer.mlp parted before it")


def test_the_whole_model_has_every_module_as_its_part():
    assert kinds(pair("a.b", X, FAULTY), pair(".:input[0]", X, EXACT), pair(".", X, FAULTY)) == [
        "root",
        "same",
        "inherited",
    ]


def test_a_name_that_begins_alike_is_no_part():
    rows = judge([pair("layer1", X, FAULTY), pair("layer:input[0]", X, EXACT), pair("layer", X, FAULTY)], candidate="c")
    assert [row.kind for row in rows] == ["root", "same", "root"]


def test_parts_that_agree_leave_the_fault_with_the_whole():
    rows = judge(
        [pair("layer:input[0]", X, EXACT), pair("layer.mlp", X, EXACT), pair("layer", X, FAULTY)], candidate="c"
    )
    assert [row.kind for row in rows] == ["same", "same", "root"]


def test_a_nan_in_one_token_is_nonfinite_at_the_first_and_inherited_after():
    broken = X.copy()
    broken[0, 3] = np.nan
    rows = judge([pair("a", X, EXACT), pair("b", X, broken), pair("c", X, broken)], candidate="c")
    assert [row.kind for row in rows] == ["same", "nonfinite", "inherited"]
    assert verdict(rows).because.startswith("b parts first: 32 NaN in the candidate")


def test_a_nan_that_agreeing_inputs_cannot_have_made_is_nonfinite_again():
    broken = X.copy()
    broken[0, 3] = np.nan
    assert kinds(pair("a", X, FAULTY), pair("b:input[0]", X, EXACT), pair("b", X, broken)) == [
        "root",
        "same",
        "nonfinite",
    ]


# Gradients --------------------------------------------------------------------------------------


def test_a_gradient_that_a_module_makes_wrong_is_its_root():
    rows = judge(
        [
            pair("b:grad_output", X, EXACT),
            pair("b:grad_input[0]", X, FAULTY),
            pair("a:grad_output", X, FAULTY),
            pair("a:grad_input[0]", X, FAULTY),
        ],
        candidate="c",
    )
    assert [row.kind for row in rows] == ["same", "root", "inherited", "inherited"]
    assert rows[1].because.endswith("; its grad_output agrees")
    assert rows[3].because.endswith("; its grad_output differs already")


def test_two_gradients_with_agreeing_outputs_are_two_roots():
    names = ["b:grad_output", "b:grad_input[0]", "a:grad_output", "a:grad_input[0]"]
    values = [EXACT, FAULTY, EXACT, FAULTY]
    assert kinds(*(pair(n, X, v) for n, v in zip(names, values, strict=True))) == ["same", "root", "same", "root"]


def test_gradients_inherit_what_the_forward_parted_by():
    rows = judge(
        [
            pair("a", X, FAULTY),
            pair("b", X, FAULTY),
            pair("b:grad_output", X, FAULTY),
            pair("a:grad_output", X, FAULTY),
        ],
        candidate="c",
    )
    assert [row.kind for row in rows] == ["root", "inherited", "inherited", "inherited"]


def test_a_healthy_forward_and_parted_gradients_blame_the_first_gradient():
    assert kinds(
        pair("a", X, EXACT), pair("b", X, EXACT), pair("b:grad_output", X, FAULTY), pair("a:grad_output", X, FAULTY)
    ) == ["same", "same", "root", "inherited"]


def test_a_forward_input_is_no_gradient_that_agrees():
    """The gradient of a module whose forward parted is wrong by that, whatever its forward input was."""
    rows = judge(
        [pair("a:input[0]", X, EXACT), pair("a", X, FAULTY), pair("a:grad_input[0]", X, FAULTY)], candidate="c"
    )
    assert [row.kind for row in rows] == ["same", "root", "inherited"]


def test_the_gradient_of_a_parted_forward_inherits_though_its_grad_output_agrees():
    """A nonlinear module's gradient depends on its input: what came in otherwise goes back otherwise."""
    assert kinds(
        pair("a", X, FAULTY),
        pair("b:input[0]", X, FAULTY),
        pair("b:grad_output", X, EXACT),
        pair("b:grad_input[0]", X, FAULTY),
    ) == ["root", "inherited", "same", "inherited"]


# Steps ------------------------------------------------------------------------------------------


def test_the_same_root_is_a_root_again_in_a_later_step():
    later = Moment(step=1, batch=1)
    assert kinds(
        pair("a", X, EXACT), pair("b", X, FAULTY), pair("a", X, EXACT, moment=later), pair("b", X, FAULTY, moment=later)
    ) == ["same", "root", "same", "root"]


def test_another_point_that_parts_in_a_later_step_inherits():
    later = Moment(step=1, batch=1)
    rows = judge(
        [
            pair("a", X, EXACT),
            pair("b", X, FAULTY),
            pair("a", X, FAULTY, moment=later),
            pair("b", X, FAULTY, moment=later),
        ],
        candidate="c",
    )
    assert [row.kind for row in rows] == ["same", "root", "inherited", "root"]
    assert rows[2].because.endswith("; b parted at step=0")


def test_an_estimated_floor_does_not_grow_from_step_to_step():
    deep = [pair(f"layers.{n}", X, rounded(error=2.0**-24, seed=n)) for n in range(4)]
    later = [
        pair(f"layers.{n}", X, rounded(error=2.0**-24, seed=n), moment=Moment(step=step, batch=step))
        for step in range(1, 5)
        for n in range(4)
    ]
    rows = judge([*deep, *later], candidate="c")
    first, last = [row.floor.error for row in rows[:4]], [row.floor.error for row in rows[-4:]]
    assert first == sorted(first)
    assert first[0] < first[-1]
    assert last == first


# Choices ----------------------------------------------------------------------------------------

CHOSEN = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
FLIPPED = torch.tensor([[0, 1], [2, 4], [4, 5], [6, 7]])


def tied(*changed, tied=None, gap=1e-4):
    rows = frozenset(changed)
    return lambda measured: Flips(rows, len(rows) if tied is None else tied, gap)


def test_choices_in_another_order_are_noise_where_scores_decide_it():
    row = only(pair("gate[1]", CHOSEN, CHOSEN.flip(-1)), ties=tied(gap=0.0))
    assert row.kind == "noise"
    assert row.because.startswith("the same numbers in another order, in 4 of 4 rows: choices")


def test_token_ids_in_another_order_are_a_root():
    row = only(pair("embed:input[0]", CHOSEN, CHOSEN.flip(-1)))
    assert (row.kind, row.because) == ("root", "the same numbers in another order, in 4 of 4 rows")


def test_a_scaled_tensor_without_tokens_is_found_by_its_factor():
    flat = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    noisy = noise_of(
        pair("a", flat, flat + 0.009 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(4)))
    )
    assert kinds(pair("a", flat, flat * 1.01), noise=[noisy]) == ["root"]
    assert kinds(pair("a", flat, flat * 1.001), noise=[noisy]) == ["noise"]


def test_choices_that_flip_without_scores_are_a_root():
    row = only(pair("gate[1]", CHOSEN, FLIPPED))
    assert (row.kind, row.because) == ("root", "1 of 4 choices differ")


def test_choices_that_flip_at_near_ties_are_noise():
    row = only(pair("gate[1]", CHOSEN, FLIPPED), ties=tied(1))
    assert row.kind == "noise"
    assert row.because == "1 of 4 choices differ, each a flip at a near-tie: scores at most 0.0001 apart"


def test_choices_that_flip_far_from_a_tie_are_a_root():
    row = only(pair("gate[1]", CHOSEN, FLIPPED), ties=tied(1, tied=0, gap=0.5))
    assert row.kind == "root"
    assert row.because == "1 of 4 choices differ, 1 of them no near-tie (up to 0.5 apart)"


def test_choices_that_noise_alone_flips_as_often_are_noise():
    noise = noise_of(pair("gate[1]", CHOSEN, FLIPPED))
    row = only(pair("gate[1]", CHOSEN, FLIPPED), noise=[noise])
    assert row.kind == "noise"
    assert row.because.endswith("noise alone changes 25.0%")
    all_other = (CHOSEN + 1) % 8
    assert only(pair("gate[1]", CHOSEN, all_other), noise=[noise]).kind == "root"


def routed(*, token, error=0.5):
    """Return rounded values of which one token went through another expert."""
    values = rounded()
    values[0, token] = rounded(error=error)[0, token]
    return values


def after_a_flip(value, *, flip=True):
    quiet = noise_of(pair("gate[1]", CHOSEN, CHOSEN), pair("experts", X, rounded(seed=9)))
    rows = judge(
        [pair("gate[1]", CHOSEN, FLIPPED if flip else CHOSEN), pair("experts", X, value)],
        candidate="c",
        noise=[quiet],
        ties=tied(1),
    )
    return rows[1]


def test_after_a_flip_the_rerouted_token_is_noise_and_without_one_a_root():
    assert after_a_flip(routed(token=1)).kind == "noise"
    assert after_a_flip(routed(token=1), flip=False).kind == "root"


def test_after_a_flip_the_reason_names_it():
    assert after_a_flip(routed(token=1)).because.endswith("a choice at gate flipped at a near-tie")


def test_after_a_flip_a_zeroed_token_is_still_a_root():
    zeroed = routed(token=1)
    zeroed[0, 9] = 0
    row = after_a_flip(zeroed)
    assert row.kind == "root"
    assert row.because.startswith("token 9 of 64")


def test_after_a_flip_a_broad_error_is_still_a_root():
    assert after_a_flip(rounded(error=8 * ERROR)).kind == "root"
    assert after_a_flip(rounded(error=1.5 * ERROR)).kind == "noise"


def test_after_a_flip_a_scale_that_shows_in_most_tokens_is_still_a_root():
    assert after_a_flip(rounded(X * np.float32(1.003))).kind == "root"
    assert after_a_flip(rounded()).kind == "noise"


def test_after_a_flip_expert_batches_of_other_shapes_are_noise():
    told = RecordPair(
        Point("experts.0"), Moment(), Point("experts.0"), "exact", because="shapes differ, [3, 8] against [4, 8]"
    )
    with_flip = judge([pair("gate[1]", CHOSEN, FLIPPED), told], candidate="c", ties=tied(1))
    assert [row.kind for row in with_flip] == ["noise", "noise"]
    assert with_flip[1].because == f"{told.because}: a choice at gate flipped at a near-tie"
    assert kinds(pair("gate[1]", CHOSEN, CHOSEN), told) == ["same", "unpaired"]


def test_after_a_flip_a_point_without_partner_stays_unpaired():
    lone = RecordPair(Point("experts.0"), Moment(), None, "", because="no point of the candidate has this name")
    assert kinds(pair("gate[1]", CHOSEN, FLIPPED), lone, ties=tied(1)) == ["noise", "unpaired"]


def test_a_flip_in_one_step_excuses_nothing_in_the_next():
    later = Moment(step=1, batch=1)
    quiet = noise_of(pair("experts", X, rounded(seed=9), moment=later))
    assert kinds(
        pair("gate[1]", CHOSEN, FLIPPED),
        pair("gate[1]", CHOSEN, CHOSEN, moment=later),
        pair("experts", X, routed(token=1), moment=later),
        noise=[quiet],
        ties=tied(1),
    ) == ["noise", "same", "root"]


def test_tokens_rerouted_where_noise_flips_as_well_are_noise_downstream():
    """Only the choices were recorded, not their scores: the noise run is what says that they flip."""
    loud = rounded(seed=9)  # of the tokens that the noise run's own choices did not send elsewhere
    noise = noise_of(pair("gate[1]", CHOSEN, torch.tensor([[0, 1], [2, 3], [4, 6], [6, 7]])), pair("experts", X, loud))
    measured = [pair("gate[1]", CHOSEN, FLIPPED), pair("experts", X, routed(token=1))]
    unscored = Flips(frozenset({1}), 0, float("nan"))
    assert kinds(*measured, noise=[noise], ties=lambda measured: unscored) == ["noise", "noise"]
    elsewhere = [measured[0], pair("experts", X, routed(token=7))]
    assert kinds(*elsewhere, noise=[noise], ties=lambda measured: unscored) == ["noise", "root"]


# The verdict ------------------------------------------------------------------------------------


def test_equal_rows_are_the_same_run():
    found = verdict([written("a", "same"), written("b", "same")])
    assert (str(found), found.because) == ("same", "every value of 2 rows is equal")
    assert verdict([written("a", "same")]).because == "every value of 1 row is equal"


def test_noise_names_the_largest_ratio():
    found = verdict([written("a", "same"), written("b", "noise", ratio=0.5), written("d", "noise", ratio=1.2)])
    assert (str(found), found.because) == (
        "noise",
        "what differs is noise; the largest error is 1.2 times its floor, at d",
    )


def test_degenerate_rows_are_told_beside_the_noise():
    found = verdict([written("a", "noise", ratio=1.0), written("z", "degenerate", ratio=None)])
    assert str(found) == "noise"
    assert found.because.endswith("; 1 degenerate row differs, see z")
    alone = verdict([written("z", "degenerate", ratio=float("nan"))])
    assert alone.because.startswith("what differs has no relative error")


@pytest.mark.parametrize("kind", ["root", "nonfinite"])
def test_what_parts_first_is_named(kind):
    found = verdict([written("a", "same"), written("b", kind), written("d", "inherited")])
    assert (str(found), found.because) == ("differs", f"b parts first: because of {kind}")


def test_when_is_told_where_there_are_several_steps():
    rows = [written("a", "same", moment=Moment()), written("a", "root", moment=Moment(step=3, batch=3))]
    assert verdict(rows).because == "a parts first at step=3: because of root"


def test_shapes_that_differ_are_a_difference_and_a_lone_point_is_none():
    other_shape = written("b", "unpaired", counterpart=Point("b"))
    assert verdict([written("a", "same"), other_shape]).word == "differs"
    assert verdict([written("a", "same"), other_shape]).because == "b cannot be compared: because of unpaired"
    assert verdict([written("a", "same"), written("b", "unpaired")]).word == "same"


@pytest.mark.parametrize("rows", [[], [written("a", "missing")], [written("a", "unpaired"), written("b", "missing")]])
def test_where_nothing_was_compared_nothing_is_the_same(rows):
    found = verdict(rows)
    assert (str(found), found.because) == ("differs", "nothing could be compared")


def test_what_was_odd_about_measuring_a_pair_is_said_beside_its_kind():
    one = replace(pair("experts.act", X, rounded()), because="read in the order of gate:output[2]")
    assert only(one, noise=[noise_of(pair("experts.act", X, rounded(seed=9)))]).because.endswith(
        "; read in the order of gate:output[2]"
    )


def test_whole_numbers_have_no_ratio_to_a_rounding():
    close = pair("a", X, rounded(error=2.0**-24))
    rows = judge([close, pair("gate[1]", CHOSEN, CHOSEN.flip(-1))], candidate="c", ties=tied(gap=0.0))
    assert rows[1].ratio is None
    assert verdict(rows).because.endswith("times its floor, at a")


def test_choices_in_another_order_excuse_nothing_that_follows():
    flat = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    rows = [pair("gate[1]", CHOSEN, CHOSEN.flip(-1)), pair("experts", flat, flat * 1.5)]
    assert [row.kind for row in judge(rows, candidate="c", ties=tied(gap=0.0))] == ["noise", "root"]
