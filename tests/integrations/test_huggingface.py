"""MonitorCallback inside transformers' Trainer: what is recorded is what was trained on, under the right numbers."""

import gc
import math
import threading
from functools import partial

import pytest
import torch

from asserts import assert_no_hooks_left
from layerscope.errors import Stopped


@pytest.fixture
def trainer(tmp_path, samples):
    """Make a Trainer of small batches: `trainer(model, callback, **arguments)`."""
    from transformers import Trainer, TrainingArguments

    def make(model, *callbacks, evaluates=(), **arguments):
        settings = {
            "output_dir": str(tmp_path / "trainer"),
            "per_device_train_batch_size": 2,
            "num_train_epochs": 2,
            "use_cpu": True,
            "dataloader_pin_memory": False,
            "report_to": [],
            "disable_tqdm": True,
            "save_strategy": "no",
            "per_device_eval_batch_size": 3,
            "logging_strategy": "no",
            **arguments,
        }
        data = [{"x": x, "labels": x} for x in samples]
        return Trainer(
            model,
            TrainingArguments(**settings),
            train_dataset=data,
            eval_dataset=[{"x": -1 - x, "labels": x} for x in samples],
            callbacks=list(callbacks),
        )

    return make


@pytest.fixture
def callback():
    from layerscope.integrations.huggingface import MonitorCallback

    return MonitorCallback


def numbered(batches, *, epochs, each, first=(0, 0)):
    """Number batches as a loop over `epochs` of `each` would."""
    places = [(e, b) for e in epochs for b in range(each) if (e, b) >= first]
    return dict(zip(places, batches, strict=True))


def test_what_is_recorded_is_what_was_trained_on(model, trainer, callback, full, recorded, assert_same):
    monitor = full(model, [0, 1])
    trainer(model, callback(monitor)).train()
    assert_same(recorded(monitor), numbered(model.trained, epochs=[0, 1], each=5))
    assert_no_hooks_left(model)


def test_only_the_epochs_and_batches_asked_for_are_recorded(model, trainer, callback, tmp_path, recorded, assert_same):
    from layerscope.monitor import Monitor

    monitor = Monitor(model, ["seen"], [1], tmp_path / "out", batch_indices=[0, 3])
    trainer(model, callback(monitor), num_train_epochs=3).train()
    everything = numbered(model.trained, epochs=range(3), each=5)
    assert_same(recorded(monitor), {key: everything[key] for key in [(1, 0), (1, 3)]})
    items = [torch.load(path, weights_only=True) for path in sorted((tmp_path / "out").glob("*.pt"))]
    assert [(item["epoch"], item["batch_idx"]) for item in items] == [(1, 0), (1, 3)]
    assert all(torch.equal(item["output"], everything[1, item["batch_idx"]]) for item in items)


@pytest.mark.parametrize("together", [2, 3])
def test_batches_are_the_loaders_when_gradients_accumulate(
    model, trainer, callback, full, recorded, assert_same, together
):
    monitor = full(model, [0, 1])
    training = trainer(model, callback(monitor), gradient_accumulation_steps=together)
    training.train()
    assert training.state.global_step == 2 * math.ceil(5 / together)
    assert_same(recorded(monitor), numbered(model.trained, epochs=[0, 1], each=5))


def test_evaluations_pass_unrecorded(model, trainer, callback, full, recorded, assert_same):
    monitor = full(model, [0, 1])
    often = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    training = trainer(model, callback(monitor), **often)
    training.evaluate()
    training.train()
    assert sum(not trained for trained, _ in model.calls) == 4 * (1 + 1 + 5)  # by hand, at the start, every second step
    assert_same(recorded(monitor), numbered(model.trained, epochs=[0, 1], each=5))


@pytest.mark.parametrize(
    ("together", "checkpoint", "first"), [(1, 3, (0, 3)), (1, 7, (1, 2)), (2, 4, (1, 2)), (1, 5, (1, 0))]
)
def test_a_resumed_run_goes_on_with_the_right_epoch_and_batch(
    model, trainer, callback, full, recorded, assert_same, together, checkpoint, first
):
    settings = {"gradient_accumulation_steps": together, "save_strategy": "steps", "save_steps": 1}
    whole = trainer(model, **settings)
    whole.train()
    everything = numbered(model.trained, epochs=[0, 1], each=5)
    model.calls.clear()
    monitor = full(model, [0, 1])
    trainer(model, callback(monitor), **settings).train(f"{whole.args.output_dir}/checkpoint-{checkpoint}")
    assert_same(recorded(monitor), {key: value for key, value in everything.items() if key >= first})


@pytest.mark.parametrize(("together", "workers"), [(1, 0), (2, 0), (1, 2)])
def test_the_samples_of_each_batch_are_noted(
    model, trainer, callback, full, assert_samples_noted, together, workers, tmp_path
):
    monitor = full(model, [0, 1])
    training = trainer(
        model,
        callback(monitor),
        gradient_accumulation_steps=together,
        dataloader_num_workers=workers,
        eval_strategy="steps",
        eval_steps=2,
    )
    training.train()
    assert_samples_noted(monitor, 10)
    item = torch.load(tmp_path / "out" / "epoch_1_000.pt", weights_only=True)
    assert [n for batch in item["sample_indices"] for n in batch] == item["output"].flatten().int().tolist()


def test_the_samples_are_noted_after_a_checkpoint_too(model, trainer, callback, full, assert_samples_noted):
    settings = {"save_strategy": "steps", "save_steps": 1}
    whole = trainer(model, **settings)
    whole.train()
    monitor = full(model, [0, 1])
    trainer(model, callback(monitor), **settings).train(f"{whole.args.output_dir}/checkpoint-7")
    assert_samples_noted(monitor, 3)


def test_the_loader_has_its_own_sampler_back(model, trainer, callback, full):
    from transformers import TrainerCallback

    class Watching(TrainerCallback):
        def on_train_begin(self, args, state, control, **said):
            self.loader = said["train_dataloader"]
            self.sampler = self.loader.batch_sampler

    watching = Watching()
    trainer(model, watching, callback(full(model, [0]))).train()  # who comes first sees the loader as it was
    assert watching.loader.batch_sampler is watching.sampler


def test_an_epoch_that_is_stopped_early_is_saved(model, trainer, callback, full, recorded, assert_same, tmp_path):
    from transformers import TrainerCallback

    class Enough(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 7

    monitor = full(model, [0, 1, 2])
    trainer(model, callback(monitor), Enough(), num_train_epochs=3).train()
    assert len(model.trained) == 7
    assert_same(recorded(monitor), dict(zip([*[(0, i) for i in range(5)], (1, 0), (1, 1)], model.trained, strict=True)))
    saved = torch.load(tmp_path / "out" / "epoch_1_000.pt", weights_only=True)
    assert saved["batch_idx"] == [0, 1]
    assert torch.equal(saved["output"], torch.cat(model.trained[5:]))
    assert_no_hooks_left(model)


def test_an_epoch_that_is_cut_short_is_followed_by_the_next(model, trainer, callback, full, recorded, assert_same):
    from transformers import TrainerCallback

    class Shorter(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_epoch_stop = state.global_step == 2

    monitor = full(model, [0, 1])
    trainer(model, callback(monitor), Shorter()).train()
    assert_same(recorded(monitor), dict(zip([(0, 0), (0, 1), *((1, i) for i in range(5))], model.trained, strict=True)))


def test_an_exception_ends_the_watching_and_goes_on(model, trainer, callback, full, recorded, tmp_path):
    def fail(module, given):
        if len(model.trained) == 4:
            raise ZeroDivisionError("planted")

    monitor = full(model, [0])
    model.lin.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError, match="planted"), callback(monitor) as watching:
        trainer(model, watching).train()
    model.lin._forward_pre_hooks.clear()
    assert_no_hooks_left(model)
    saved = torch.load(tmp_path / "out" / "epoch_0_000.pt", weights_only=True)
    assert torch.equal(saved["output"], torch.cat(model.trained))


def failing(model):
    """Have the fourth training forward fail."""

    def fail(module, given):
        if len(model.trained) == 4:
            raise ZeroDivisionError("planted")

    return model.lin.register_forward_pre_hook(fail)


def test_without_a_block_a_training_that_fails_is_saved_when_the_model_goes(trainer, callback, full, tmp_path):
    from integrations.conftest import Remembering

    def train():
        model = Remembering()
        failing(model)
        with pytest.raises(ZeroDivisionError, match="planted"):
            trainer(model, callback(full(model, [0]))).train()
        return torch.cat(model.trained)

    trained = train()
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "layerscope-saving":
            thread.join()
    saved = torch.load(tmp_path / "out" / "epoch_0_000.pt", weights_only=True)
    assert torch.equal(saved["output"], trained)


def test_without_a_block_a_training_that_fails_is_saved_when_the_next_begins(model, trainer, callback, full, tmp_path):
    watching = callback(full(model, [0]))
    planted = failing(model)
    with pytest.raises(ZeroDivisionError, match="planted"):
        trainer(model, watching).train()
    failed = torch.cat(model.trained)
    planted.remove()
    model.calls.clear()
    trainer(model, watching, num_train_epochs=1).train()
    first, second = (torch.load(tmp_path / "out" / f"epoch_0_{n:03d}.pt", weights_only=True) for n in (0, 1))
    assert torch.equal(first["output"], failed)
    assert torch.equal(second["output"], torch.cat(model.trained))
    assert_no_hooks_left(model)


class Frames:
    def __init__(self):
        self.frames, self.alarms, self.closed = [], [], 0

    def write(self, frame):
        self.frames.append(frame)

    def alarm(self, alarm):
        self.alarms.append(alarm)

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("together", [1, 2])
def test_a_watch_has_a_frame_for_each_step_of_the_optimizer(model, trainer, callback, together):
    from layerscope.monitor import watch

    sink = Frames()
    follow = callback(partial(watch, taps="seen", parameters=True, sinks=[sink]))
    trainer(model, follow, gradient_accumulation_steps=together, eval_strategy="steps", eval_steps=1).train()
    each = math.ceil(5 / together)
    assert [frame.moment.step for frame in sink.frames] == list(range(2 * each))
    assert [frame.moment.epoch for frame in sink.frames] == [0] * each + [1] * each
    assert [frame.moment.batch for frame in sink.frames] == list(range(0, 5, together)) * 2
    steps = [
        model.trained[e * 5 + b : min(e * 5 + b + together, (e + 1) * 5)] for e in (0, 1) for b in range(0, 5, together)
    ]
    for frame, batches in zip(sink.frames, steps, strict=True):
        assert frame.reading("seen").summary.mean == pytest.approx(torch.cat(batches).mean().item())
        assert [p.name for p in frame.parameters] == ["lin.weight", "lin.bias"]
    assert sink.closed == 1
    assert_no_hooks_left(model)


def test_a_rule_that_says_stop_stops_the_trainer(model, trainer, callback):
    from layerscope.monitor import watch

    sink = Frames()
    rules = ["exploding(limit=5.5, action=stop)"]
    with (
        pytest.raises(Stopped, match="exploding"),
        callback(partial(watch, taps="seen", rules=rules, sinks=[sink])) as following,
    ):
        trainer(model, following).train()
    assert len(model.trained) < 10
    assert following.watches[0].alarms[0].point.name == "seen"
    assert sink.closed == 1
    assert_no_hooks_left(model)


def test_weights_and_losses_are_the_same_with_and_without(trainer, callback, full):
    from layerscope.monitor import watch

    ends = []
    for watched in (False, True):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
        net.forward = lambda x, labels=None, net=net: {"loss": (net[1](net[0](x)) - x).square().mean()}
        follow = [callback(full(net, [0], layer="0"), partial(watch, parameters=True))] if watched else []
        loss = trainer(net, *follow, learning_rate=0.1, seed=0).train().training_loss
        ends.append((loss, [p.detach().clone() for p in net.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


def test_something_else_than_a_monitor_is_refused(callback):
    with pytest.raises(TypeError, match="give a Monitor, a Watch, or a function that makes a Watch"):
        callback(3)
    with pytest.raises(TypeError, match="not nothing"):
        callback()
