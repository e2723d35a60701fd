"""What error is to be expected, from noise runs measured by hand and from closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from layerscope.compare.floors import ESTIMATED, Noise, expected, off_most, rounding, step_of
from layerscope.compare.measure import measure
from layerscope.compare.metrics import Tokens
from layerscope.compare.rows import Floor
from layerscope.points import Moment, Point
from layerscope.store.dtypes import STORED

X = np.random.default_rng(0).standard_normal((1, 16, 8)).astype(np.float32)
KEY = (Point("a"), Moment())
SAME = measure(X, X.copy())


def off(error, *, tokens=slice(None)):
    """Return a pair whose relative L2 error is `error`, or that of these tokens."""
    other = X.astype(np.float64)
    other[0, tokens] *= 1 + error
    return measure(X.astype(np.float64), other)


def floor_of(metrics=SAME, *, key=KEY, noise=(), depth=0, coarsest=0.0, before=None):
    return expected(key, metrics, noise=noise, depth=depth, coarsest=coarsest, before=before)


def test_the_floor_is_the_largest_error_of_several_noise_runs_and_names_it():
    small, large = Noise("small", {KEY: off(1e-3)}), Noise("large", {KEY: off(-1e-2)})
    for noise in ([small, large], [large, small]):
        found = floor_of(noise=noise)
        assert found.floor.source == "large"
        assert found.floor.error == pytest.approx(1e-2)
        assert found.scale == pytest.approx(1e-2)
    alone = floor_of(noise=[small])
    assert alone.floor.source == "small"
    assert alone.floor.error == pytest.approx(1e-3)


def test_the_tokens_are_the_worst_of_all_noise_runs():
    found = floor_of(noise=[Noise("one", {KEY: off(1e-2, tokens=3)}), Noise("other", {KEY: off(2e-3)})])
    assert found.tokens.worst == pytest.approx(1e-2)
    assert found.tokens.median == pytest.approx(2e-3)


def test_tokens_that_noise_sent_elsewhere_are_no_measure_of_rounding():
    loud = off(0.5, tokens=3)
    assert floor_of(noise=[Noise("n", {KEY: loud})]).tokens.worst == pytest.approx(0.5)
    rerouted = {step_of(Moment()): frozenset({3})}
    assert floor_of(noise=[Noise("n", {KEY: loud}, rerouted)]).tokens.worst == pytest.approx(rounding("float32"))
    elsewhere = {step_of(Moment(step=1)): frozenset({3})}
    assert floor_of(noise=[Noise("n", {KEY: loud}, elsewhere)]).tokens.worst == pytest.approx(0.5)


def test_a_point_that_the_noise_run_lacks_has_the_floor_before_it():
    noise = [Noise("n", {(Point("b"), Moment()): off(1e-3)})]
    before = Floor(3e-3, "n")
    assert floor_of(noise=noise, before=before).floor == before
    assert floor_of(noise=noise, before=before).tokens is None


def test_without_a_floor_before_it_the_point_is_estimated():
    noise = [Noise("n", {(Point("b"), Moment()): off(1e-3)})]
    assert floor_of(noise=noise).floor.source == "estimate"
    assert floor_of(before=Floor(3e-3, "n")).floor.source == "estimate"


def test_a_noise_run_without_a_relative_error_does_not_count():
    zeros = np.zeros_like(X)
    broken = measure(zeros, X)
    assert math.isnan(broken.relative_l2)
    assert floor_of(noise=[Noise("n", {KEY: broken})]).floor.source == "estimate"
    assert floor_of(noise=[Noise("n", {KEY: broken}), Noise("m", {KEY: off(1e-3)})]).floor.source == "m"


def test_the_stored_dtype_rounds_whatever_the_noise_run_shows():
    halves = measure(torch.from_numpy(X), torch.from_numpy(X).bfloat16())
    quiet = [Noise("n", {KEY: SAME})]
    found = floor_of(halves, noise=quiet)
    assert (found.floor.error, found.floor.source) == (rounding("bfloat16"), "n")
    assert found.tokens == (rounding("bfloat16"),) * 3
    assert floor_of(SAME, noise=quiet).floor.error == rounding("float32")
    assert floor_of(halves, noise=[Noise("n", {})], before=Floor(1e-9, "n")).floor.error == rounding("bfloat16")


def test_the_share_of_choices_that_noise_changed_is_told():
    chosen = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    flipped = torch.tensor([[0, 1], [2, 4], [4, 5], [6, 7]])
    assert floor_of(noise=[Noise("n", {KEY: measure(chosen, flipped)})]).changed == 0.25
    assert floor_of(noise=[Noise("n", {KEY: off(1e-3)})]).changed is None


def test_the_estimate_grows_with_depth_as_a_random_walk():
    errors = [floor_of(depth=depth, coarsest=2.0**-8).floor.error for depth in (0, 1, 4, 16, 64)]
    assert errors[0] == 2.0**-8
    grown = [error / errors[0] - 1 for error in errors]
    assert grown == pytest.approx([0, 0.5, 1, 2, 4])  # four times as deep, twice as much


def test_the_estimate_knows_the_coarsest_dtype_on_the_way():
    assert floor_of(coarsest=2.0**-8).floor == Floor(2.0**-8, "estimate")
    halves = measure(torch.from_numpy(X), torch.from_numpy(X).half())
    assert floor_of(halves).floor == Floor(rounding("float16"), "estimate")
    assert rounding("float32") <= floor_of(coarsest=0.0).floor.error < rounding("float16")


ROUNDS = ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]


# torch says 2**-3 of float8_e5m2fnuz, which has two bits behind the point.
@pytest.mark.parametrize("dtype", ["float64", "complex64", "complex128", *ROUNDS[:-1]])
def test_rounding_follows_torch_s_epsilon(dtype):
    assert rounding(dtype) == torch.finfo(getattr(torch, dtype)).eps / 4


@pytest.mark.parametrize("dtype", ROUNDS)
def test_rounding_is_about_what_a_dtype_is_off_by(dtype):
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    off_by = measure(values, values.to(getattr(torch, dtype))).relative_l2
    assert off_by == pytest.approx(rounding(dtype), rel=0.25)


def test_every_stored_dtype_that_rounds_has_a_rounding_and_whole_numbers_have_none():
    rounds = {name for name in STORED if rounding(name)}
    assert rounds == {name for name in STORED if name.startswith(("float", "bfloat", "complex"))}


def test_an_unknown_dtype_is_taken_as_one_that_does_not_round():
    assert rounding("float9_made_up") == 0.0
    assert ESTIMATED > 1


def test_the_worst_token_that_stayed_is_found_and_none_where_all_left():
    tokens = Tokens(8, 3, 0.5, 0.1, 0.2, ((3, 0.5), (1, 0.25)))
    assert off_most(tokens, ()) == (3, 0.5)
    assert off_most(tokens, {3}) == (1, 0.25)
    assert off_most(tokens, {1, 3}) is None


def test_a_step_is_the_same_for_every_call_and_not_for_another_rank():
    assert step_of(Moment(step=2, call=1)) == step_of(Moment(step=2, call=5))
    assert step_of(Moment(step=2, rank=1)) != step_of(Moment(step=2))
    assert step_of(Moment(epoch=1, step=2)) != step_of(Moment(step=2))
