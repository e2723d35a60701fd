from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import layerscope as ls
from asserts import assert_no_hooks_left, hooks_on, left_open
from layerscope.errors import NoSuchPoint, Stopped, Unsupported
from layerscope.monitor.watching import watch
from layerscope.points import Point
from layerscope.recorder import Tap
from layerscope.rules import Alarm, exploding


class Kept:
    """A sink that keeps what it is told."""

    def __init__(self):
        self.frames, self.alarms, self.closed = [], [], 0

    def write(self, frame):
        self.frames.append(frame)

    def alarm(self, alarm):
        self.alarms.append(alarm)

    def close(self):
        self.closed += 1


class Always:
    """A rule that fires on every output it sees."""

    name, needs = "always", frozenset()

    def __init__(self, action="warn"):
        self.action = action

    def look(self, frame):
        return [
            Alarm(self.name, r.point, frame.moment, 1.0, 0.0, "it always does", self.action) for r in frame.readings
        ]


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=True, average_attn_weights=False)[0]


def trained(model=None, **wishes):
    """A model, its optimizer, and a step to train it by."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inside = 8 if isinstance(model, Attending) else 4

    def step(forwards=1):
        optimizer.zero_grad()
        for _ in range(forwards):
            shape = (2, 5, inside) if isinstance(model, Attending) else (2, inside)
            model(torch.randn(shape)).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def test_every_layer_has_a_reading_each_step_that_is_due():
    model, optimizer, step = trained()
    sink = Kept()
    with watch(model, optimizer, every=3, sinks=[sink]):
        for _ in range(7):
            step()
    assert [frame.moment.step for frame in sink.frames] == [0, 3, 6]
    assert [str(r.point) for r in sink.frames[0].readings] == ["0:output", "1:output", "2:output", ".:output"]
    assert sink.closed == 1
    assert_no_hooks_left(model)


@pytest.mark.parametrize("every", [2, "every(2)", ls.every(2), ls.steps(0, 2)], ids=str)
def test_the_schedule_may_be_a_number_a_text_or_a_schedule(every):
    model, optimizer, step = trained()
    sink = Kept()
    with watch(model, optimizer, every=every, sinks=[sink]):
        for _ in range(4):
            step()
    assert [frame.moment.step for frame in sink.frames] == [0, 2]


def test_readings_are_the_statistics_of_the_tensors():
    model, optimizer, _ = trained()
    sink, x = Kept(), torch.randn(64, 4)
    expected = model[0](x).detach().double()
    with watch(model, optimizer, taps="0", sinks=[sink]):
        model(x).sum().backward()
        optimizer.step()
    summary = sink.frames[0].reading("0").summary
    assert abs(summary.mean - expected.mean().item()) < 1e-7
    assert abs(summary.std - expected.std(correction=0).item()) < 1e-7


def test_several_forwards_of_one_optimizer_step_are_one_frame():
    model, optimizer, step = trained()
    sink = Kept()
    with watch(model, optimizer, sinks=[sink]):
        step(forwards=3)
        step()
    assert [frame.moment.step for frame in sink.frames] == [0, 1]
    assert [frame.reading("0").summary.tensors for frame in sink.frames] == [3, 1]


def test_evaluation_is_passed_over_and_not_counted():
    model, optimizer, step = trained()
    sink = Kept()
    with watch(model, optimizer, sinks=[sink]):
        step()
        model.eval()
        with torch.no_grad():
            model(torch.randn(100, 4))
        model.train()
        step()
    assert [frame.reading("0").summary.shape for frame in sink.frames] == [(2, 8), (2, 8)]
    assert [frame.moment.step for frame in sink.frames] == [0, 1]


def test_a_pause_lets_forwards_pass_uncounted():
    model, *_ = trained()
    sink = Kept()
    with watch(model, sinks=[sink]) as watching:
        for rows in (1, 2, 3, 4):
            watching.pause() if rows in (1, 3) else watching.resume()
            model(torch.randn(rows, 4))
    found = [(frame.moment.step, frame.reading("0").summary.shape[0]) for frame in sink.frames]
    assert found == [(0, 2), (1, 4)]


def test_without_an_optimizer_every_forward_is_a_step():
    model, *_ = trained()
    sink = Kept()
    with watch(model, sinks=[sink]), torch.no_grad():
        for _ in range(3):
            model.eval()(torch.randn(2, 4))
    assert [frame.moment.step for frame in sink.frames] == [0, 1, 2]


def test_the_caller_names_epochs_and_batches_and_steps_go_on():
    model, optimizer, step = trained()
    sink = Kept()
    with watch(model, optimizer, sinks=[sink]) as watching:
        for epoch in range(2):
            watching.moment(epoch=epoch)
            step()
            step()
        watching.moment(batch=7)
        step()
    found = [(f.moment.epoch, f.moment.step, f.moment.batch) for f in sink.frames]
    assert found == [(0, 0, 0), (0, 1, 1), (1, 2, 0), (1, 3, 1), (1, 4, 7)]


def test_gradients_and_parameters_are_read_when_asked_for():
    model, optimizer, step = trained()
    sink = Kept()
    with watch(model, optimizer, gradients=True, parameters=True, every=2, sinks=[sink]):
        before = model[2].weight.detach().clone()
        step()
        change = (model[2].weight.detach() - before).norm() / before.norm()
        gradient = model[2].weight.grad.double()
        step()
    [frame] = sink.frames
    assert {r.point.side for r in frame.readings} == {"output", "grad_output"}
    reading = next(p for p in frame.parameters if p.name == "2.weight")
    assert reading.update_ratio == pytest.approx(change.item(), rel=1e-5)
    assert reading.gradient.rms == pytest.approx(gradient.square().mean().sqrt().item(), rel=1e-6)
    assert len(frame.parameters) == 4


def test_attention_maps_are_those_the_model_computed():
    model, optimizer, step = trained(Attending())
    sink, seen = Kept(), []
    model.attn.register_forward_hook(lambda module, args, output: seen.append(output[1].detach()))
    tap = Tap("attn", when=ls.epochs(1))
    with watch(model, optimizer, attention=tap, sinks=[sink]) as watching:
        for epoch in range(3):
            watching.moment(epoch=epoch)
            step()
    assert [list(frame.images) for frame in sink.frames] == [[], ["attn:output[1]"], []]
    assert torch.equal(sink.frames[1].images["attn:output[1]"], seen[1][0])


def test_attention_maps_go_whole_to_the_run_on_disk(tmp_path):
    model, optimizer, step = trained(Attending())
    with watch(model, optimizer, attention="attn", to=tmp_path / "run") as watching:
        step()
    assert watching.run.tensor("attn[1]").shape == (2, 2, 5, 5)
    assert watching.run.points != []


def test_an_attention_module_that_gives_no_map_is_said(caplog):
    class Silent(Attending):
        def forward(self, x):
            return self.attn(x, x, x, need_weights=False)[0]

    model, optimizer, step = trained(Silent())
    with watch(model, optimizer, attention="attn"):
        step()
    assert sum("no attention map came from attn:output[1]" in message for message in caplog.messages) == 1


def test_a_layer_that_does_not_exist_is_refused_before_the_training():
    with pytest.raises(NoSuchPoint):
        watch(trained()[0], taps="blocks.*")
    with pytest.raises(NoSuchPoint):
        watch(trained()[0], attention="attn")


@pytest.mark.parametrize("wish", [{"parameters": True}, {"rules": ["stuck"]}])
def test_parameters_need_the_optimizer(wish):
    with pytest.raises(ValueError, match=r"watch\(model, optimizer\)"):
        watch(trained()[0], **wish)


def test_an_alarm_is_said_once_for_each_place_then_counted(caplog):
    model, optimizer, step = trained()
    sink, told = Kept(), []
    with watch(model, optimizer, rules=[Always()], sinks=[sink], on_alarm=told.append) as w:
        for _ in range(5):
            step()
    assert [alarm.where for alarm in w.alarms] == ["0:output", "1:output", "2:output", ".:output"]
    assert sink.alarms == told == w.alarms
    assert w.counts["always", "0:output"] == 5
    assert sum("always: 0:output at step=0" in message for message in caplog.messages) == 1


def test_stop_raises_out_of_the_step_and_leaves_nothing_behind():
    model, optimizer, step = trained()
    sink = Kept()
    with (
        watch(model, optimizer, rules=[Always("stop")], sinks=[sink]),
        pytest.raises(Stopped, match="always: 0:output at step=0"),
    ):
        step()
    assert len(sink.frames) == 1
    assert_no_hooks_left(model)
    step()


def test_stop_without_an_optimizer_raises_at_the_end_of_the_block_at_the_latest():
    model, *_ = trained()
    with pytest.raises(Stopped), watch(model, rules=[Always("stop")]):
        model(torch.randn(2, 4))
    with watch(model, rules=[Always("stop")]) as watching:
        model(torch.randn(2, 4))
        with pytest.raises(Stopped):
            watching.flush()


class At(Always):
    """A rule that fires in some steps, at another place each time."""

    name = "at"

    def __init__(self, *steps, action="snapshot"):
        super().__init__(action)
        self.steps = steps

    def look(self, frame):
        n = frame.moment.step
        return [Alarm("at", Point(str(n)), frame.moment, 1, 0, "planned", self.action)] if n in self.steps else []


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_a_snapshot_has_the_tensors_of_the_step_that_raised_the_alarm(tmp_path, on_disk, with_optimizer):
    model, optimizer, step = trained()
    seen = []
    model[2].register_forward_hook(lambda module, args, output: seen.append((args[0].detach(), output.detach())))
    wishes = {"gradients": True, "to": tmp_path / "run" if on_disk else None, "rules": [At(3)]}
    with watch(model, optimizer if with_optimizer else None, **wishes) as watching:
        for _ in range(6):
            step()
    run = watching.run
    whole = [record for record in run.records() if record.shape is not None]
    assert {record.moment.step for record in whole} == {3}
    assert {record.point.side for record in whole} == {"output", "grad_output"}
    assert torch.equal(run.tensor("1", step=3), seen[3][0])
    assert torch.equal(run.tensor("2", step=3), seen[3][1])
    if on_disk:
        assert next(iter(run.records("2", step=3))).summary.mean == pytest.approx(seen[3][1].mean().item())


def test_a_rule_may_take_a_snapshot_and_the_same_one_stop():
    model, optimizer, step = trained()
    rules = [At(2, action="stop"), At(2, action="snapshot")]
    with watch(model, optimizer, rules=rules) as watching:
        step()
        step()
        with pytest.raises(Stopped):
            step()
    assert {record.moment.step for record in watching.run.records()} == {2}


def test_there_are_three_snapshots_of_a_rule_and_then_nothing_is_held_any_more():
    model, optimizer, step = trained()
    with watch(model, optimizer, rules=[At(1, 2, 4, 5, 6)]) as watching:
        for _ in range(8):
            step()
        assert not watching._gathering.holds
        assert watching._gathering.sights == []
    assert {record.moment.step for record in watching.run.records()} == {1, 2, 4}


def test_what_was_changed_in_place_is_left_out_of_a_snapshot_and_said(caplog):
    model, optimizer, step = trained(nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 1)))
    with watch(model, optimizer, rules=[At(0)]) as watching:
        step()
    assert sorted(str(record.point) for record in watching.run.records()) == [".:output", "1:output", "2:output"]
    assert "the snapshot at step=0 is without 0:output: changed in place since" in caplog.text


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("parameters", [False, True])
def test_stop_comes_before_the_optimizer_has_moved_anything(parameters):
    model, optimizer, step = trained()
    sink, late = Kept(), At(2, action="warn")
    with watch(model, optimizer, parameters=parameters, rules=[At(2, action="stop"), late], sinks=[sink]) as watching:
        step()
        step()
        before = weights(model)
        with pytest.raises(Stopped, match="at step=2"):
            step()
        assert all(torch.equal(mine, old) for mine, old in zip(weights(model), before, strict=True))
        assert [frame.moment.step for frame in sink.frames] == [0, 1, 2]
        step()  # whoever goes on all the same
    assert [alarm.action for alarm in watching.alarms] == ["stop", "warn"]
    assert watching.counts["at", "2:output"] == 4  # both rules, twice
    assert not torch.equal(weights(model)[0], before[0])


def test_a_gradient_of_a_parameter_that_is_not_finite_stops_before_the_step():
    model, optimizer, step = trained()
    model[0].weight.register_hook(lambda gradient: gradient * float("nan"))
    before = weights(model)
    with (
        watch(model, optimizer, parameters=True, rules=["nonfinite(action=stop)"]),
        pytest.raises(Stopped, match=r"parameter 0\.weight"),
    ):
        step()
    assert all(torch.equal(mine, old) for mine, old in zip(weights(model), before, strict=True))


@pytest.mark.parametrize("judges", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_with_a_closure_is_judged_after_it_or_where_the_closure_says_so(by_name, judges):
    model, optimizer, _ = trained()
    sink, before = Kept(), weights(model)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        if judges:
            watching.judge()
        return loss

    with (
        watch(model, optimizer, parameters=True, rules=[Always("stop")], sinks=[sink]) as watching,
        pytest.raises(Stopped),
    ):
        optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    moved = not torch.equal(weights(model)[0], before[0])
    assert moved != judges
    assert len(sink.frames) == 1
    gradient = next(p.gradient for p in sink.frames[0].parameters if p.name == "2.bias")
    assert gradient.mean == pytest.approx(model[2].bias.grad.mean().item())


def test_what_a_sink_a_rule_or_a_callback_raises_is_said_once_and_stops_nothing(caplog):
    class Broken(Kept):
        def write(self, frame):
            raise OSError("disk full")

        def close(self):
            raise OSError("disk full")

    class Confused(Always):
        def look(self, frame):
            raise KeyError("layer")

    def shout(alarm):
        raise RuntimeError("no voice")

    model, optimizer, step = trained()
    good = Kept()
    with watch(model, optimizer, rules=[Confused(), Always()], sinks=[Broken(), good], on_alarm=shout) as watching:
        for _ in range(3):
            step()
    assert len(good.frames) == 3
    assert len(watching.alarms) == 4
    for words in (
        "Broken.write raised OSError",
        "Broken did not take 3 of 3 frames",
        "the rule always raised KeyError",
        "on_alarm raised",
    ):
        assert sum(words in message for message in caplog.messages) == 1


@pytest.mark.usefixtures("nobody_leaves")
def test_sigterm_ends_the_block_in_order():
    model, optimizer, step = trained()
    sink = Kept()

    def killed():
        step()
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit, match="143"), watch(model, optimizer, sinks=[sink]):
        killed()
    assert (len(sink.frames), sink.closed) == (1, 1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert_no_hooks_left(model)


def test_a_rule_used_in_two_watches_remembers_in_neither():
    rule = exploding(growth=2, window=1)
    model, optimizer, _ = trained()
    for scale in (1.0, 1000.0):
        with watch(model, optimizer, rules=[rule]) as watching:
            model(torch.ones(2, 4) * scale).sum().backward()
            optimizer.step()
        assert watching.alarms == []
    assert rule == exploding(growth=2, window=1)


def test_an_optimizer_inside_a_wrapper_is_found_and_a_stranger_is_refused():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    model, optimizer, step = trained()
    sink = Kept()
    with watch(model, Wrapper(optimizer), sinks=[sink]):
        step()
        assert len(sink.frames) == 1
    with pytest.raises(Unsupported, match="a Wrapper is no torch"):
        watch(model, Wrapper(None))


def test_a_schedule_that_raises_does_not_stop_the_training(caplog):
    def broken(moment):
        raise ZeroDivisionError

    model, optimizer, step = trained()
    with watch(model, optimizer, every=ls.when(broken), parameters=True):
        step()
        step()
    assert sum("the schedule raised ZeroDivisionError" in message for message in caplog.messages) == 1


def test_a_moment_that_is_none_is_refused_and_changes_nothing():
    model, optimizer, step = trained()
    sink = Kept()
    with watch(model, optimizer, sinks=[sink]) as watching:
        with pytest.raises(ValueError, match="batch=-1"):
            watching.moment(batch=-1)
        step()
    assert [frame.moment.batch for frame in sink.frames] == [0]


def test_a_model_that_never_runs_is_said_and_not_raised(caplog):
    model, optimizer, _ = trained()
    with watch(model, optimizer):
        pass
    assert any("no forward" in message for message in caplog.messages)


@pytest.mark.parametrize(
    "wish", [{"every": 1}, {"every": 3, "gradients": True, "parameters": True, "statistics": "full"}]
)
def test_training_is_the_same_to_the_last_bit(wish, tmp_path):
    def run(watched):
        torch.manual_seed(3)
        model, optimizer, _ = trained(nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []

        def steps():
            for _ in range(20):
                optimizer.zero_grad()
                loss = model(torch.randn(8, 4)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

        if watched:
            rules = ["nonfinite", "exploding", "vanishing", "dead(window=5)", "saturated", "stuck"]
            with watch(model, optimizer, rules=rules, to=tmp_path / "run", **wish):
                steps()
        else:
            steps()
        return losses, [p.detach().clone() for p in model.parameters()], torch.get_rng_state()

    (losses, weights, state), (plain_losses, plain_weights, plain_state) = run(True), run(False)
    assert losses == plain_losses
    assert all(torch.equal(mine, plain) for mine, plain in zip(weights, plain_weights, strict=True))
    assert torch.equal(state, plain_state)


def grown(steps):
    """How many objects, bytes and hooks `steps` steps leave behind, and which threads and files, with everything on."""
    model, optimizer, step = trained()
    rules = ["nonfinite", "exploding", "vanishing", "dead(window=5)", "saturated", "stuck"]
    with watch(model, optimizer, gradients=True, parameters=True, statistics="full", rules=rules):
        for _ in range(100):
            step()
        before, opened = there(model), left_open()
        for _ in range(steps):
            step()
        after, still = there(model), opened()
    return [now - then for now, then in zip(after, before, strict=True)], still


def there(model):
    gc.collect()
    return len(gc.get_objects()), resident(), hooks_on(model)


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts what /proc shows")
@pytest.mark.parametrize("steps", [300, pytest.param(10_000, marks=pytest.mark.stress)])
def test_many_steps_leave_nothing_behind(steps):
    (objects, memory, hooks), still = grown(steps)
    assert objects < 200
    assert memory < 16 << 20
    assert hooks == 0
    assert still == ([], [])
