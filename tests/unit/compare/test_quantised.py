"""A candidate that says it is quantised is taken at its word only where its outputs show it."""

from __future__ import annotations

import numpy as np
import pytest

from layerscope.compare import compare

LAYERS = 6


@pytest.fixture
def against(tmp_path):
    """Compare six layers with those of a mode that is quantised by definition; `change` makes its outputs."""
    rng = np.random.default_rng(0)

    def run(change, mode="2-1"):
        for layer in range(LAYERS):
            value = rng.normal(size=(2, 16, 64)).astype(np.float32)
            np.save(tmp_path / f"mode_fp32_layer_{layer}.npy", value)
            other = change(layer, value, rng.normal(size=value.shape).astype(np.float32))
            np.save(tmp_path / f"mode_{mode}_layer_{layer}.npy", other)
        return compare(f"{tmp_path}:fp32", f"{tmp_path}:{mode}")

    return run


def test_a_grid_on_every_layer_is_quantised(against):
    found = against(lambda layer, value, noise: value + 0.02 * (1 + layer) * noise)
    assert str(found.verdict) == "quantised"
    assert "mode 2-1, and no layer stands out; its final output is off by 0.1" in found.verdict.because


def test_one_wrong_layer_among_equal_ones_is_no_grid(against):
    found = against(lambda layer, value, noise: value + 0.5 * noise if layer == 3 else value)
    assert (str(found.verdict), found.first_divergence.name) == ("differs", "layers.3")


def test_rows_in_another_order_are_no_grid(against):
    found = against(lambda layer, value, noise: value[:, ::-1].copy() if layer == 2 else value)
    assert (str(found.verdict), found.first_divergence.name) == ("differs", "layers.2")


def test_one_layer_far_off_among_quantised_ones_is_named(against):
    found = against(lambda layer, value, noise: value + (0.9 if layer == 4 else 0.02) * noise)
    assert (str(found.verdict), found.first_divergence.name) == ("differs", "layers.4")


def test_a_candidate_of_which_nothing_is_left_differs(against):
    found = against(lambda layer, value, noise: noise + noise)
    assert str(found.verdict) == "differs"
    assert "nothing is left of layers.5" in found.verdict.because


def test_a_mode_that_says_nothing_of_a_grid_is_judged_by_rounding(against):
    found = against(lambda layer, value, noise: value + 0.2 * noise, mode="port")
    assert str(found.verdict) == "differs"
