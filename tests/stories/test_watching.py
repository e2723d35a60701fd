"""Somebody trains a model and leaves the watch on: it says what goes wrong, where and when, and nothing otherwise."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from layerscope.errors import Stopped
from layerscope.monitor.watching import watch
from layerscope.rules import dead, exploding, nonfinite, saturated, stuck, vanishing

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_and_watch.py"


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def _talkative():
    """Give the log its level back: the example is a program, and quiets it."""
    log = logging.getLogger("layerscope")
    level = log.level
    yield
    log.setLevel(level)


class Logarithm(nn.Module):
    def forward(self, x):
        return torch.log(x)


def train(model, rule, *, steps=40, lr=0.05, data=None, given=None, **wishes):
    """Fit a small regression under one rule; return what was said."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(given or model.parameters(), lr=lr)
    with watch(model, optimizer, rules=[rule], **wishes) as watching:
        for step in range(steps):
            x = torch.randn(32, 6, generator=generator) if data is None else data(step, generator)
            optimizer.zero_grad()
            (model(x) - x.sum(-1, keepdim=True)).square().mean().backward()
            optimizer.step()
    return watching.alarms


def mlp(act=nn.ReLU, *, depth=3, width=24):
    torch.manual_seed(1)
    layers = [nn.Linear(6, width), act()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), act()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def positive(step, generator):
    return torch.rand(32, 6, generator=generator) + 0.5


def with_a_zero_in_step_7(step, generator):
    x = positive(step, generator)
    if step == 7:
        x[3, 2] = 0.0
    return x


def logarithmic():
    torch.manual_seed(1)
    return nn.Sequential(nn.Identity(), Logarithm(), nn.Linear(6, 1))


def test_the_layer_that_made_the_first_infinity_is_named_with_the_frames_before_it():
    alarms = train(logarithmic(), nonfinite(frames=4), data=with_a_zero_in_step_7, lr=0.01)
    first = alarms[0]
    assert (str(first.point), first.moment.step, first.value) == ("1:output", 7, 1)
    assert "1 -inf of 192 values come out, and what went in is finite" in first.because
    assert [frame.moment.step for frame in first.frames] == [3, 4, 5, 6]


def test_the_same_training_without_the_zero_is_finite():
    assert train(logarithmic(), nonfinite(), data=positive, lr=0.01) == []


def test_a_learning_rate_too_high_is_an_explosion_before_anything_is_infinite():
    alarms = train(mlp(), exploding(limit=1e3), lr=0.6, gradients=True, steps=12)
    assert alarms
    assert alarms[0].value > alarms[0].threshold
    assert alarms[0].moment.step <= 12


def test_stop_ends_the_training_at_the_step_that_exploded():
    model = mlp()
    with pytest.raises(Stopped, match="exploding: "):
        train(model, exploding(limit=1e3, action="stop"), lr=0.6, steps=100)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_learning_rate_that_fits_does_not_explode():
    assert train(mlp(), exploding(), gradients=True, steps=150) == []


def test_gradients_that_die_out_on_the_way_back_are_named_from_the_front():
    alarms = train(mlp(nn.Sigmoid, depth=16), vanishing())
    assert "0:grad_output" in [alarm.where for alarm in alarms]
    assert "30:grad_output" not in [alarm.where for alarm in alarms]
    assert {alarm.moment.step for alarm in alarms} == {4}


def test_a_network_of_moderate_depth_has_gradients_all_the_way():
    assert train(mlp(nn.ReLU, depth=5), vanishing(), parameters=True) == []


def buried():
    model = mlp()
    nn.init.constant_(model[2].bias, -50.0)
    return model


def test_a_layer_whose_units_never_fire_is_named():
    alarms = train(buried(), dead(window=10))
    assert [(alarm.where, alarm.moment.step, alarm.value) for alarm in alarms] == [("3:output", 9, 1.0)]


def test_a_layer_whose_units_do_fire_is_not():
    assert train(mlp(), dead(window=10)) == []


def loud():
    model = mlp(nn.Tanh)
    with torch.no_grad():
        model[2].weight.mul_(200)
    return model


def test_a_tanh_driven_to_its_ends_is_named():
    alarms = train(loud(), saturated())
    assert [(alarm.where, alarm.moment.step) for alarm in alarms] == [("3:output", 0)]


def test_a_tanh_in_its_range_is_not():
    assert train(mlp(nn.Tanh), saturated()) == []


def test_a_parameter_that_the_optimizer_was_not_given_is_named():
    model = mlp()
    given = [p for name, p in model.named_parameters() if name != "2.weight"]
    [alarm] = train(model, stuck(), given=given)
    assert (alarm.parameter, alarm.moment.step, alarm.value) == ("2.weight", 4, 0.0)
    assert "the optimizer was not given it" in alarm.because


def test_updates_that_bfloat16_swallows_are_named():
    model = mlp().bfloat16()
    with torch.no_grad():
        model[4].weight.fill_(1.0)
    alarms = train(model, stuck(), lr=1e-7, data=lambda _, g: torch.randn(32, 6, generator=g).bfloat16())
    assert "parameter 4.weight" in [alarm.where for alarm in alarms]


def test_parameters_that_all_move_are_not():
    assert train(mlp(), stuck()) == []


def test_a_healthy_transformer_with_a_mask_of_minus_infinity_raises_no_alarm():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    rules = [nonfinite(), exploding(), vanishing(), dead(window=10), saturated(), stuck()]
    with watch(model, optimizer, rules=rules) as watching:
        for _ in range(25):
            optimizer.zero_grad()
            x = torch.randn(4, 6, 16)
            (model(x, mask=mask) - x.cumsum(1)).square().mean().backward()
            optimizer.step()
    assert mask.isinf().any()
    assert watching.alarms == []
    assert watching.counts == {}


def test_attention_maps_of_transformers_are_kept(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, attn_implementation="eager", **sizes)).train()
    optimizer = torch.optim.AdamW(model.parameters())
    frames = []

    class Frames:
        def write(self, frame):
            frames.append(frame)

        def alarm(self, alarm):
            raise AssertionError(alarm)

        def close(self):
            frames.append(None)

    ids = torch.randint(0, 50, (3, 9))
    with watch(model, optimizer, attention="**.self_attn", rules=["nonfinite", "exploding"], sinks=[Frames()]):
        for _ in range(2):
            optimizer.zero_grad()
            out = model(input_ids=ids, labels=ids, output_attentions=True)
            out.loss.backward()
            optimizer.step()
    assert frames.pop() is None
    [first, last] = [frame.images["model.layers.1.self_attn:output[1]"] for frame in frames]
    assert first.shape == (4, 9, 9)
    assert torch.equal(last, out.attentions[1][0].detach())
    assert torch.allclose(last.sum(-1), torch.ones(4, 9))


@pytest.mark.usefixtures("_talkative")
def test_the_example_shows_attention_at_three_epochs_and_catches_the_planted_explosion(capsys, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("train_and_watch", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_and_watch", example)
    spec.loader.exec_module(example)
    assert example.main(["--quick", "--to", str(tmp_path / "run")]) == 0
    page = capsys.readouterr().out
    assert page.count("attention of blocks.") == 3
    assert "the healthy training raised no alarm" in page
    assert "caught: exploding: " in page
