"""How far values lie apart, and what form they have, against numpy and by hand."""

import math

import numpy as np
import pytest
import torch

from layerscope.compare.align.similarity import Similarity, form_of
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import MemoryRun

A = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))


def first(**tensors):
    run = MemoryRun()
    for name, tensor in tensors.items():
        run.add(Point(name), Moment(), tensor=tensor)
    return {entry.point: entry for entry in run.records()}


def apart(a, b):
    return Similarity(first(a=a), first(b=b))(Point("a"), Point("b"))


def test_the_same_values_are_not_apart_and_others_by_their_relative_distance():
    assert apart(A, A.clone()) == 0
    other = A + 1
    rows = [np.sort(x.double().numpy(), axis=1) for x in (A, other)]
    expected = np.linalg.norm(rows[0] - rows[1]) / np.linalg.norm(rows[1])
    assert apart(A, other) == pytest.approx(expected * (1 + 2**-10), rel=1e-6)


def test_the_values_of_a_row_count_more_than_their_order():
    turned, raw = A.flip(-1), A * 1.05
    assert 0 < apart(A, turned) < apart(A, raw)
    assert apart(A, A.clone()) < apart(A, turned)


def test_values_that_are_not_finite_are_as_far_as_zeros():
    assert apart(A, torch.full_like(A, math.nan)) == pytest.approx(1 + 2**-10)


def test_what_has_a_summary_only_is_judged_by_its_norm():
    run = MemoryRun()
    run.add(Point("b"), Moment(), summary=summarize(2 * A))
    [entry] = run.records()
    assert form_of(entry) == ((6, 4), "floats")
    assert Similarity({Point("a"): entry}, {Point("b"): entry})(Point("a"), Point("b")) == 0
    assert Similarity(first(a=A), {Point("b"): entry})(Point("a"), Point("b")) == math.inf  # no summary of the other


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("float32", "floats"),
        ("bfloat16", "floats"),
        ("int64", "whole numbers"),
        ("int32", "whole numbers"),
        ("uint8", "whole numbers"),
        ("bool", "whole numbers"),
        ("complex64", "complex numbers"),
    ],
)
def test_runtimes_agree_in_the_kind_of_numbers_and_not_in_their_width(dtype, kind):
    [entry] = first(a=torch.ones(2, 3, dtype=getattr(torch, dtype))).values()
    assert form_of(entry) == ((2, 3), kind)


def test_a_scalar_and_an_empty_tensor_have_a_distance_too():
    assert apart(torch.tensor(2.0), torch.tensor(2.0)) == 0
    assert apart(torch.tensor(2.0), torch.tensor(1.0)) == pytest.approx(0.5 * (1 + 2**-10))
    assert apart(torch.empty(0, 3), torch.empty(0, 3)) == 0
