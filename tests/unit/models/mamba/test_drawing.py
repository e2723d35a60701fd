"""Drawn weights: the seed alone decides them, and what they compute is of the size of a trained model's."""

import zlib

import numpy as np
import torch

from layerscope.models.mamba import MambaConfig
from layerscope.models.mamba.drawing import drawn_weights

TINY = MambaConfig(hidden_size=16, num_hidden_layers=2, state_size=4, time_step_rank=2)
IN_PROJ = "backbone.layers.0.mixer.in_proj.weight"


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    one = drawn_weights(TINY, seed=7)
    torch.manual_seed(2)
    np.random.seed(3)
    two, other = drawn_weights(TINY, seed=7), drawn_weights(TINY, seed=8)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one[IN_PROJ], other[IN_PROJ])


def test_the_random_state_is_left_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    drawn_weights(TINY, seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_a_weight_is_the_generators_raw_bits_by_exact_arithmetic():
    bits = np.random.PCG64(np.random.SeedSequence([3, zlib.crc32(IN_PROJ.encode())])).random_raw(8)
    halves = [half for pair in bits.tolist() for half in (pair & 0xFFFFFFFF, pair >> 32)]
    expected = [((half >> 8) / 2**23 - 1) / 4 for half in halves]  # a fan-in of 16
    assert drawn_weights(TINY, seed=3)[IN_PROJ].flatten()[:16].tolist() == expected


def test_the_first_numbers_are_these_on_every_machine():
    drawn = drawn_weights(TINY, seed=0)[IN_PROJ].flatten()[:3].tolist()
    assert drawn == [0.027413219213485718, 0.14535006880760193, 0.23260605335235596]


def test_no_two_weights_are_drawn_alike():
    drawn = drawn_weights(TINY, seed=0)
    assert not torch.equal(drawn[IN_PROJ], drawn["backbone.layers.1.mixer.in_proj.weight"])


def test_rates_and_time_steps_begin_as_in_the_paper():
    drawn = drawn_weights(MambaConfig(hidden_size=256, num_hidden_layers=1, time_step_rank=16), seed=0)
    rates = torch.exp(drawn["backbone.layers.0.mixer.A_log"])
    torch.testing.assert_close(rates, torch.arange(1.0, 17.0).expand(512, 16))
    steps = torch.nn.functional.softplus(drawn["backbone.layers.0.mixer.dt_proj.bias"].double())
    assert 0.001 <= steps.min() < 0.0012
    assert 0.09 < steps.max() <= 0.1
    assert abs(steps.log().mean().exp() - 0.01) < 0.002  # the middle of the logarithmic scale
    assert (drawn["backbone.layers.0.mixer.D"] == 1).all()
