"""A plan: against all subsets of a stack whose errors are put there by hand, and by running what it prints."""

import itertools
import math

import pytest
import torch
from torch import nn

from layerscope.errors import NoSuchPoint
from layerscope.models import Inputs
from layerscope.models.mamba import quamba_small
from layerscope.models.tiny import tiny_transformer
from layerscope.modes import choose, mixed, registry, variant
from layerscope.modes.evaluation import perplexity
from layerscope.modes.mixing import OUTSIDE, stored_bits
from layerscope.modes.plan import last_layer_error, perplexity_increase, plan
from layerscope.modes.registry import Mode, Setting, copied

SIZE = 8
X = [Inputs((torch.full((1, SIZE), 3.0),))]


class Adds(nn.Module):
    """A layer that adds a constant; `weight` is what it takes to store."""

    def __init__(self, stored):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(SIZE))
        self.weight = nn.Parameter(torch.zeros(stored), requires_grad=False)

    def forward(self, x):
        return x + self.bias


class Stack(nn.Module):
    def __init__(self, *stored):
        super().__init__()
        self.layers = nn.ModuleList(map(Adds, stored))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def off_by(*offsets):
    """Shift layer i along axis i, so that errors are orthogonal, and store a quarter of its weight."""

    def make(model, setting):
        own = copied(model)
        for at, offset in enumerate(offsets):
            own.layers[at].bias.data[at] = offset
            own.layers[at].weight = nn.Parameter(own.layers[at].weight.to(torch.int8), requires_grad=False)
        return own

    return Mode("off", "shifts", make)


@pytest.fixture(autouse=True)
def nothing_declared(monkeypatch):
    monkeypatch.setattr(registry, "_DECLARED", {})


OFFSETS = (1.0, 4.0, 0.5, 2.0, 3.0, 0.0)


@pytest.mark.parametrize("within", [0.7, 0.6, 0.5, 0.35, 0.2, 0.1])
def test_layers_of_one_size_are_kept_as_few_as_any_subset_allows(within):
    model = Stack(*[100] * 6)
    (found,) = plan(model, [off_by(*OFFSETS)], last_layer_error(model, X), within=within).plans

    def error(kept):
        return math.sqrt(sum(d * d for at, d in enumerate(OFFSETS) if at not in kept) / (9 * SIZE))

    subsets = [s for n in range(7) for s in itertools.combinations(range(6), n) if error(s) <= within]
    assert found.is_within
    assert len(found.keep) == min(map(len, subsets))
    kept = {int(name.removeprefix("layers.")) for name in found.keep}
    assert found.error == pytest.approx(error(kept), rel=1e-6)
    assert found.bits == 32 * 6 * SIZE + 8 * 100 * 6 + 24 * 100 * len(kept)


def test_a_layer_that_costs_little_is_kept_before_one_that_costs_much():
    model = Stack(100_000, 10, 10)
    mode = off_by(3.0, 2.5, 2.5)
    error = math.sqrt(9 / (9 * SIZE))  # of the large one alone
    (found,) = plan(model, [mode], last_layer_error(model, X), within=error + 0.01).plans
    assert found.keep == ("layers.1", "layers.2")
    model = Stack(10, 10, 10)
    (found,) = plan(model, [mode], last_layer_error(model, X), within=error + 0.07).plans
    assert len(found.keep) == 1


def test_a_mode_within_the_budget_is_kept_as_it_is_and_one_with_more_bits_is_not_tried():
    model = Stack(100, 100)
    wide = Mode("wide", "all of it", lambda model, setting: copied(model))
    found = plan(model, [wide, off_by(0.1, 0.1)], last_layer_error(model, X), within=0.1)
    assert [(one.mode, one.keep, one.runs) for one in found.plans] == [("off", (), 1)]
    assert found.left_out == (("wide", "it takes no fewer bits than that, even with nothing kept"),)
    assert found.bits == stored_bits(model) == 32 * (2 * SIZE + 200)


def test_a_budget_that_nothing_meets_gets_the_least_error_that_was_reached():
    model = Stack(100, 100)
    (found,) = plan(model, [off_by(1.0, 2.0)], last_layer_error(model, X), within=0.0).plans
    assert not found.is_within  # to keep both would be the model itself
    assert found.keep == ("layers.1",)
    assert found.error == pytest.approx(1 / math.sqrt(9 * SIZE))
    assert found.bare == pytest.approx(math.sqrt(5 / (9 * SIZE)))
    (met,) = plan(model, [off_by(1.0, 2.0)], last_layer_error(model, X), within=found.error).plans
    assert (met.is_within, met.keep) == (True, ("layers.1",))


def test_a_mode_that_gives_no_finite_number_is_planned_around():
    model = Stack(100, 100, 100)
    (found,) = plan(model, [off_by(0.5, math.nan, 0.5)], last_layer_error(model, X), within=0.1).plans
    assert (found.is_within, found.keep) == (True, ("layers.1",))
    assert math.isnan(found.bare)


def test_a_mode_that_cannot_run_is_left_out_with_its_reason_and_alone_it_raises():
    def fails(model, setting):
        own = copied(model)
        own.layers[0].forward = None
        return own

    model = Stack(100, 100)
    measure = last_layer_error(model, X)
    broken = Mode("broken", "x", fails)
    found = plan(model, [broken, off_by(0.1, 0.1)], measure, within=0.1)
    assert [one.mode for one in found.plans] == ["off"]
    with pytest.raises(TypeError):
        plan(model, [broken], measure, within=0.1)


@pytest.mark.parametrize("mode", ["int8-dynamic", "int4-weight", "bf16"])
def test_the_printed_code_makes_the_model_that_was_promised(mode):
    model = tiny_transformer(layers=4, hidden=32, heads=2)
    batches = [Inputs((torch.arange(24).view(1, 24),))]
    measure = last_layer_error(model, batches)
    bare = measure(variant(model, mode), None)
    found = plan(model, choose([mode], model).modes, measure, within=bare / 2).best
    assert found.is_within
    assert 0 < len(found.keep) < 4
    exec(found.code(), {})
    made = variant(model, f"{mode}-planned")

    def last(one):
        seen = []
        with one.model.layers[3].register_forward_hook(lambda m, a, out: seen.append(out)), torch.no_grad():
            one(batches[0].args[0])
        return seen[0].double().numpy()

    wanted, got = last(model), last(made)
    assert found.error == pytest.approx(((got - wanted) ** 2).sum() ** 0.5 / (wanted**2).sum() ** 0.5, rel=1e-6)
    assert found.error <= bare / 2
    assert stored_bits(made) == found.bits


def test_a_budget_of_perplexity_is_that_of_the_mixed_model():
    model = tiny_transformer(layers=4, hidden=32, heads=2)
    windows = [torch.tensor([list(b"it was the best of times, it was the worst of times")])]
    own = perplexity(model, windows)
    bare = perplexity(variant(model, "int4-weight"), windows) / own - 1
    within = abs(bare) / 2 if bare > 0 else 0.0
    found = plan(model, choose(["int4-weight"], model).modes, perplexity_increase(model, windows), within=within).best
    exec(found.code(), {})
    made = variant(model, "int4-weight-planned")
    assert found.error == pytest.approx(perplexity(made, windows) / own - 1, abs=1e-9)
    assert found.is_within == (found.error <= within)


def test_code_states_the_setting_that_was_asked_for():
    model = Stack(100, 100)
    setting = Setting(percentile_alpha=0.99)
    found = plan(model, [off_by(1.0, 2.0)], last_layer_error(model, X), within=0.2, setting=setting).best
    assert "Setting(percentile_alpha=0.99)" in found.code()
    assert "Setting" not in plan(model, [off_by(1.0, 2.0)], last_layer_error(model, X), within=0.2).best.code()


def test_code_is_calibrated_on_the_token_ids_that_the_plan_was():
    model = quamba_small()
    ids = torch.arange(8 * 512) % 40  # nothing like the text that the scales come from by themselves
    setting = Setting(calibration=ids)
    batches = [Inputs((torch.tensor([list(b"the quick brown fox jumps over the lazy dog")]),))]
    measure = last_layer_error(model, batches)
    found = plan(model, choose(["2-2"], model).modes, measure, within=10.0, setting=setting).best
    exec(found.code(), {})
    assert measure(variant(model, "2-2-planned", setting), None) == found.error
    assert measure(variant(model, "2-2-planned"), None) != found.error


# What is mixed ----------------------------------------------------------------------------------


def test_a_mixed_model_shares_nothing_and_its_points_keep_their_names():
    from layerscope.runtimes.eager import points

    model = tiny_transformer(layers=2, hidden=32, heads=2)
    before = [place.name for place in points(model)]
    own = mixed(model, "bf16", keep=["model.layers.0"])
    assert [place.name for place in points(own)] == before
    mine = {parameter.data_ptr() for parameter in model.parameters()}
    assert not mine & {parameter.data_ptr() for parameter in own.parameters()}
    assert own.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    assert own.model.layers[1].mlp.up_proj.weight.dtype == own.lm_head.weight.dtype == torch.bfloat16
    kept = mixed(model, "bf16", keep=[OUTSIDE])
    assert kept.lm_head.weight.dtype == torch.float32
    with pytest.raises(NoSuchPoint, match=r"there is no layer 'layers\.0' to keep; the layers of TinyTransformer are"):
        mixed(model, "bf16", keep=["layers.0"])


def test_bits_are_those_of_codes_and_scales():
    model = nn.Sequential(nn.Linear(64, 16, bias=False), nn.Linear(64, 16, bias=False))
    assert stored_bits(model) == 2 * 64 * 16 * 32
    eight = stored_bits(variant(model, "int8-weight"))
    assert 2 * (64 * 16 * 8 + 16 * 32) <= eight < 2 * (64 * 16 * 8 + 16 * 80)
    four = stored_bits(variant(model, "int4-weight"))
    groups = 64 * 16 // 32
    assert four == 2 * (64 * 16 * 4 + groups * (32 + 4))
    model[1].weight = model[0].weight
    assert stored_bits(model) == 64 * 16 * 32
