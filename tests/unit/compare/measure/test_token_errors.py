"""Tokens that come in parts."""

import math

import numpy as np
import pytest

from layerscope.compare.measure.token_errors import TokenErrors


def test_a_token_cut_in_three_is_one_token():
    tokens = TokenErrors()
    tokens.add(np.array([1.0, 2.0]), np.array([4.0, 1.0]), first=0)
    tokens.add(np.array([3.0]), np.array([1.0]), first=1)
    tokens.add(np.array([4.0, 0.0]), np.array([7.0, 5.0]), first=1)
    result = tokens.result(compared=9)
    assert (result.count, result.worst) == (3, 1)
    assert result.error == pytest.approx(1.0)  # 9 / 9
    assert result.median == pytest.approx(0.5)


def test_parts_that_end_with_a_token_are_told_apart():
    tokens = TokenErrors()
    tokens.add(np.array([1.0]), np.array([1.0]), first=0)
    tokens.add(np.array([4.0]), np.array([1.0]), first=1)
    result = tokens.result(compared=2)
    assert (result.count, result.worst, result.error, result.median) == (2, 1, 2.0, 1.5)


def test_where_nothing_was_compared_there_is_no_error():
    tokens = TokenErrors()
    tokens.add(np.zeros(3), np.zeros(3), first=0)
    assert math.isnan(tokens.result(compared=0).error)
