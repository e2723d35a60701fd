"""What all layers do is no fault; what one of them does alone is."""

from __future__ import annotations

import pytest

from layerscope.diagnose.judge.quantised import Sibling, common, standing_out

ALIKE = [Sibling(f"layers.{i}", 0.008 * (1 + 0.1 * (i % 3)), 1.0 + 1e-4 * (i % 2), True) for i in range(10)]


def with_one(**changed):
    return [*ALIKE[:4], ALIKE[4]._replace(**changed), *ALIKE[5:]]


def test_modules_that_differ_alike_are_common_and_none_stands_out():
    assert common(ALIKE)
    assert standing_out(ALIKE, among=ALIKE) == {}


@pytest.mark.parametrize("changed", [{"error": 0.05}, {"error": float("inf")}, {"scale": 1.05}], ids=str)
def test_one_that_differs_more_stands_out(changed):
    siblings = with_one(**changed)
    assert common(siblings)
    assert list(standing_out(siblings, among=siblings)) == ["layers.4"]


def test_two_of_many_are_faults_and_nothing_common():
    assert not common([s._replace(beyond=i < 2) for i, s in enumerate(ALIKE)])


def test_a_few_modules_tell_nothing_of_what_is_common():
    assert not common(ALIKE[:4])


def test_weights_that_have_nothing_in_common_are_not_quantised():
    assert not common([s._replace(error=1.4, scale=0.01) for s in ALIKE])


def test_a_factor_that_all_share_is_not_quantisation():
    assert not common([s._replace(error=0.05, scale=1.05) for s in ALIKE])
