"""MonitorCallback inside Lightning's Trainer: what is recorded is what was trained on, under the right numbers."""

import math
import os
import signal
from functools import partial

import pytest
import torch

from asserts import assert_no_hooks_left
from layerscope.errors import Stopped

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .*dataloader.* does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]


@pytest.fixture
def module(model):
    """The remembering model as a LightningModule; `module.net` is the model itself."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model

        def training_step(self, batch, batch_idx):
            return self.net(batch)["loss"]

        def validation_step(self, batch, batch_idx):
            self.log("loss", self.net(batch)["loss"])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


class Loader(torch.utils.data.DataLoader):
    """A shuffled loader that can be resumed in the middle of an epoch."""

    def __init__(self, samples):
        super().__init__(samples, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(0))
        self.given, self.first = 0, 0

    def __iter__(self):
        self.given, first = self.first, self.first
        self.first = 0
        for batch in list(super().__iter__())[first:]:
            self.given += 1
            yield batch

    def state_dict(self):
        return {"given": self.given % len(self)}

    def load_state_dict(self, state):
        self.first = state["given"]


@pytest.fixture
def fit(tmp_path, samples, module):
    """Fit: `fit(callback, **settings)`; returns the Trainer."""
    import lightning.pytorch as pl

    def run(*callbacks, ckpt_path=None, validates=False, loader=None, **settings):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        settings = {"max_epochs": 2, "enable_checkpointing": False, **quiet, **settings}
        trainer = pl.Trainer(callbacks=list(callbacks), default_root_dir=tmp_path, **settings)
        check = torch.utils.data.DataLoader([-1 - x for x in samples], batch_size=3) if validates else None
        trainer.fit(module, loader or Loader(samples), check, ckpt_path=ckpt_path, weights_only=True)
        return trainer

    return run


@pytest.fixture
def callback():
    from layerscope.integrations.lightning import MonitorCallback

    return MonitorCallback


def numbered(batches, *, epochs, each):
    return dict(zip([(e, b) for e in epochs for b in range(each)], batches, strict=True))


def test_what_is_recorded_is_what_was_trained_on(model, module, fit, callback, full, recorded, assert_same):
    monitor = full(module, [0, 1], layer="net.seen")
    fit(callback(monitor))
    assert_same(recorded(monitor), numbered(model.trained, epochs=[0, 1], each=5))
    assert_no_hooks_left(module)


def test_only_the_epochs_and_batches_asked_for_are_recorded(model, fit, callback, tmp_path, recorded, assert_same):
    from layerscope.monitor import Monitor

    monitor = Monitor(model, ["seen"], [1], tmp_path / "out", batch_indices=[0, 3])
    fit(callback(monitor), max_epochs=3)
    everything = numbered(model.trained, epochs=range(3), each=5)
    assert_same(recorded(monitor), {key: everything[key] for key in [(1, 0), (1, 3)]})
    assert sorted(path.name for path in (tmp_path / "out").glob("*.pt")) == [
        "single_epoch_1_000.pt",
        "single_epoch_1_001.pt",
    ]


def test_batches_are_the_loaders_when_gradients_accumulate(model, fit, callback, full, recorded, assert_same):
    monitor = full(model, [0, 1])
    trainer = fit(callback(monitor), accumulate_grad_batches=2)
    assert trainer.global_step == 2 * 3
    assert_same(recorded(monitor), numbered(model.trained, epochs=[0, 1], each=5))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_samples_of_each_batch_are_noted(model, samples, fit, callback, full, assert_samples_noted, workers):
    monitor = full(model, [0, 1])
    before = torch.utils.data.DataLoader.__iter__
    loader = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True, num_workers=workers)
    fit(callback(monitor), loader=loader, validates=True, val_check_interval=2)
    assert_samples_noted(monitor, 10)
    assert torch.utils.data.DataLoader.__iter__ is before


@pytest.mark.usefixtures("nobody_leaves")
def test_sigterm_stays_lightnings(model, fit, callback, full, tmp_path):
    from lightning.pytorch import Callback

    class Killed(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(callback(full(model, [0])), Killed())
    assert len(model.trained) in (2, 3)  # whether the batch under way is trained on is Lightning's to say
    saved = torch.load(tmp_path / "out" / "epoch_0_000.pt", weights_only=True)
    assert torch.equal(saved["output"], torch.cat(model.trained))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_validation_and_sanity_checks_pass_unrecorded(model, fit, callback, full, recorded, assert_same):
    monitor = full(model, [0, 1])
    fit(callback(monitor), validates=True, val_check_interval=2)
    assert sum(not trained for trained, _ in model.calls) == 2 + 4 * 4  # the sanity check, then twice an epoch
    assert_same(recorded(monitor), numbered(model.trained, epochs=[0, 1], each=5))


@pytest.mark.parametrize(("stop", "first"), [(3, (0, 3)), (7, (1, 2)), (5, (1, 0))])
def test_a_resumed_run_goes_on_with_the_right_epoch_and_batch(
    model, fit, callback, full, recorded, assert_same, tmp_path, samples, stop, first
):
    from lightning.pytorch.callbacks import ModelCheckpoint

    keep = ModelCheckpoint(tmp_path / "kept", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(keep, enable_checkpointing=True)
    order = [(e, b) for e in (0, 1) for b in range(5)]
    model.calls.clear()
    monitor = full(model, [0, 1])
    fit(callback(monitor), ckpt_path=tmp_path / "kept" / f"step={stop}.ckpt")
    assert len(model.trained) == 10 - stop
    assert_same(recorded(monitor), dict(zip([key for key in order if key >= first], model.trained, strict=True)))


def test_an_epoch_that_is_stopped_early_is_saved(model, module, fit, callback, full, recorded, assert_same, tmp_path):
    from lightning.pytorch import Callback

    class Enough(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step >= 7

    monitor = full(model, [0, 1, 2])
    fit(callback(monitor), Enough(), max_epochs=3)
    assert len(model.trained) == 7
    assert_same(recorded(monitor), dict(zip([*[(0, i) for i in range(5)], (1, 0), (1, 1)], model.trained, strict=True)))
    saved = torch.load(tmp_path / "out" / "epoch_1_000.pt", weights_only=True)
    assert saved["batch_idx"] == [0, 1]
    assert torch.equal(saved["output"], torch.cat(model.trained[5:]))
    assert_no_hooks_left(module)


def test_an_exception_ends_the_watching_and_goes_on(model, module, fit, callback, full, tmp_path):
    from layerscope.monitor import watch

    def fail(net, given):
        if len(model.trained) == 4:
            raise ZeroDivisionError("planted")

    sink = Frames()
    monitor = full(model, [0])
    model.lin.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError, match="planted"):
        fit(callback(monitor, partial(watch, taps="net.seen", sinks=[sink])))
    model.lin._forward_pre_hooks.clear()
    assert_no_hooks_left(module)
    assert sink.closed == 1
    saved = torch.load(tmp_path / "out" / "epoch_0_000.pt", weights_only=True)
    assert torch.equal(saved["output"], torch.cat(model.trained))


class Frames:
    def __init__(self):
        self.frames, self.closed = [], 0

    def write(self, frame):
        self.frames.append(frame)

    def alarm(self, alarm):
        pass

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("together", [1, 2])
def test_a_watch_has_a_frame_for_each_step_of_the_optimizer(model, module, fit, callback, together):
    from layerscope.monitor import watch

    sink = Frames()
    follow = callback(partial(watch, taps="net.seen", parameters=True, sinks=[sink]))
    fit(follow, accumulate_grad_batches=together, validates=True, val_check_interval=2)
    each = math.ceil(5 / together)
    assert [frame.moment.step for frame in sink.frames] == list(range(2 * each))
    assert [frame.moment.epoch for frame in sink.frames] == [0] * each + [1] * each
    assert [frame.moment.batch for frame in sink.frames] == list(range(0, 5, together)) * 2
    steps = [
        model.trained[e * 5 + b : min(e * 5 + b + together, (e + 1) * 5)] for e in (0, 1) for b in range(0, 5, together)
    ]
    for frame, batches in zip(sink.frames, steps, strict=True):
        assert frame.reading("net.seen").summary.mean == pytest.approx(torch.cat(batches).mean().item())
        assert [p.name for p in frame.parameters] == ["net.lin.weight", "net.lin.bias"]
    assert sink.closed == 1
    assert_no_hooks_left(module)


def test_a_rule_that_says_stop_stops_the_trainer(model, module, fit, callback):
    from layerscope.monitor import watch

    follow = callback(partial(watch, taps="net.seen", rules=["exploding(limit=5.5, action=stop)"]))
    with pytest.raises(Stopped, match="exploding"):
        fit(follow)
    assert len(model.trained) < 10
    assert follow.watches[0].alarms[0].point.name == "net.seen"
    assert_no_hooks_left(module)


def test_stop_comes_before_the_weights_are_moved_and_gradients_are_the_steps_own(model, module, fit, callback):
    from lightning.pytorch import Callback

    from layerscope.monitor import watch

    class Weights(Callback):
        def on_train_batch_start(self, trainer, module, *_):
            before.append(model.lin.weight.detach().clone())

    before, gradients, sink = [], [], Frames()
    model.lin.weight.register_hook(lambda gradient: gradients.append(gradient.item()))
    follow = callback(partial(watch, parameters=True, rules=["exploding(limit=5.5, action=stop)"], sinks=[sink]))
    with pytest.raises(Stopped, match="exploding"):
        fit(follow, Weights())
    assert torch.equal(model.lin.weight.detach(), before[-1])
    if len(before) > 1:
        assert not torch.equal(before[0], before[-1])
    found = [p.gradient.mean for frame in sink.frames for p in frame.parameters if p.name == "net.lin.weight"]
    assert found == pytest.approx(gradients)
