"""Numbers and flags that differ are named with both values; those without a say are not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from layerscope.diagnose.causes import Case
from layerscope.diagnose.causes.settings import differing_configuration, differing_settings, other_class, other_function


def case(one, two, **known):
    return Case("m", one.eval(), two.eval(), **known)


@dataclass
class Config:
    rope_theta: float = 1e4
    dtype: str = "float32"


class Attention(nn.Module):
    def __init__(self, config=None, **settings):
        super().__init__()
        self.config = config
        for name, value in settings.items():
            setattr(self, name, value)


def test_an_epsilon_is_told_with_both_values():
    cause = differing_settings(case(nn.LayerNorm(8, eps=1e-6), nn.LayerNorm(8, eps=1e-3)))
    assert cause.kind == "constant"
    assert cause.because == "its eps is 0.001 where the reference has 1e-06"
    assert cause.evidence == {"setting": "eps", "values": (1e-6, 1e-3)}


@pytest.mark.parametrize(
    ("name", "had", "got"),
    [("scaling", 0.25, 0.3), ("is_causal", True, False), ("window", None, 128), ("padding", (1, 1), (0, 1))],
)
def test_all_kinds_of_settings_are_told(name, had, got):
    cause = differing_settings(case(Attention(**{name: had}), Attention(**{name: got})))
    assert cause.evidence["values"] == (had, got)


def test_another_activation_function_is_told_by_name():
    cause = differing_settings(case(Attention(act=nn.functional.silu), Attention(act=nn.functional.relu)))
    assert cause.because == "its act is 'relu' where the reference has 'silu'"


def test_the_same_settings_do_not_differ():
    assert differing_settings(case(nn.LayerNorm(8), nn.LayerNorm(8))) is None
    assert differing_settings(case(Attention(scaling=0.25), Attention(scaling=0.25 + 1e-12))) is None


def test_dropout_counts_only_in_training():
    one, two = nn.Dropout(0.1), nn.Dropout(0.5)
    assert differing_settings(case(one, two)) is None
    two.train()
    assert "its p is 0.5" in differing_settings(Case("m", one, two)).because


def test_a_mode_counts_only_where_it_changes_the_result():
    assert differing_settings(Case("m", nn.Linear(2, 2).eval(), nn.Linear(2, 2).train())) is None
    cause = differing_settings(Case("m", nn.BatchNorm1d(2).eval(), nn.BatchNorm1d(2).train()))
    assert cause.because == "it is in training mode where the reference is in evaluation mode"


def test_a_configuration_is_told_apart_from_settings():
    pair = case(Attention(Config()), Attention(Config(rope_theta=5e5, dtype="bfloat16")))
    assert differing_settings(pair) is None
    assert differing_configuration(pair).because == "its config.rope_theta is 500000 where the reference has 10000"
    assert differing_configuration(case(Attention(Config()), Attention(Config(dtype="bfloat16")))) is None


def test_a_module_that_ran_by_itself_answers_for_itself():
    one, two = nn.Sequential(nn.LayerNorm(8, eps=1e-6)), nn.Sequential(nn.LayerNorm(8, eps=1e-3))
    assert differing_settings(case(one, two, uncalled=())) is None
    assert differing_settings(case(one, two, uncalled=("0",))).evidence["setting"] == "0.eps"


@pytest.mark.parametrize(
    ("one", "two", "apart"),
    [
        (nn.ReLU(), nn.LeakyReLU(0.25), 2.0),  # at -8
        (nn.Tanh(), nn.Hardtanh(), 1 - math.tanh(1)),
        (nn.Identity(), nn.ReLU(), 8.0),
    ],
)
def test_two_functions_are_held_against_each_other(one, two, apart):
    cause = other_function(case(one, two))
    assert cause.kind == "operation"
    assert f"it is {type(two).__name__}" in cause.because
    assert cause.evidence["apart"] == pytest.approx(apart, rel=1e-2)


class Alike(nn.Module):
    def forward(self, x):
        return x.clamp(min=0)


class Across(nn.Module):
    def forward(self, x):
        return x - x.mean()


def test_the_same_function_under_another_name_is_no_cause():
    assert other_function(case(nn.ReLU(), Alike())) is None


def test_what_is_no_function_of_one_number_is_only_named():
    for one, two in ((nn.Softmax(-1), nn.Tanh()), (nn.Linear(3, 3), nn.Bilinear(3, 3, 3)), (nn.Tanh(), Across())):
        assert other_function(case(one, two)) is None
        cause = other_class(case(one, two))
        assert cause.kind == "unknown"
        assert type(two).__name__ in cause.because


def test_a_subclass_is_no_other_class():
    class Mine(nn.Linear):
        """A port of it."""

    assert other_class(case(nn.Linear(3, 3), Mine(3, 3))) is None


def test_random_numbers_are_not_drawn_to_learn_what_a_class_does():
    before = torch.random.get_rng_state()
    other_function(case(nn.Identity().train(), nn.Dropout(0.5)))
    assert torch.equal(torch.random.get_rng_state(), before)
