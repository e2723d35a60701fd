"""A plain loop with Accelerate: what is recorded is what was trained on, under the plain model's names."""

import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from asserts import assert_no_hooks_left
from layerscope import open_run


@pytest.fixture
def accelerator():
    """Make an Accelerator on the CPU; its state is the process's, and does not outlive a test."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    def make(**settings):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return Accelerator(cpu=True, **settings)

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def prepared(accelerator, model, samples):
    """Prepare the model and a shuffled loader: `prepared(**settings)`."""

    def make(**settings):
        made = accelerator(**settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True)
        return made, *made.prepare(model, optimizer, loader)

    return make


def train(accelerator, model, optimizer, batches):
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()


def numbered(batches, *, epochs, each=5):
    return dict(zip([(e, b) for e in epochs for b in range(each)], batches, strict=True))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_what_is_recorded_is_what_was_trained_on(model, prepared, full, recorded, assert_same, precision):
    from layerscope.integrations.accelerate import batches

    accelerator, wrapped, optimizer, loader = prepared(mixed_precision=precision)
    with full(accelerator.unwrap_model(wrapped), [0, 1]) as monitor:
        for epoch in range(2):
            train(accelerator, wrapped, optimizer, batches(loader, monitor, epoch=epoch))
            model(torch.zeros(3, 1))  # between the epochs, in training mode
            model.calls.pop()
    assert_same(recorded(monitor), numbered(model.trained, epochs=[0, 1]))
    assert_no_hooks_left(model)


def test_a_model_that_is_wrapped_in_parts_keeps_its_plain_names(model, accelerator, full, recorded):
    from layerscope.integrations.accelerate import batches

    wrapped = torch.nn.DataParallel(model)  # what prepare makes of a model on several devices has the same form
    with full(accelerator().unwrap_model(wrapped), [0]) as monitor:
        for batch in batches([torch.zeros(1, 1)], monitor, epoch=0):
            wrapped(batch)
    assert [str(point) for point in monitor.run.points] == ["seen:output"]
    assert list(recorded(monitor)) == [(0, 0)]


def test_what_was_skipped_counts(model, prepared, full, recorded, assert_same):
    from accelerate import skip_first_batches

    from layerscope.integrations.accelerate import batches

    accelerator, wrapped, optimizer, loader = prepared()
    with full(model, [3]) as monitor:
        train(accelerator, wrapped, optimizer, batches(skip_first_batches(loader, 2), monitor, epoch=3))
    assert_same(recorded(monitor), dict(zip([(3, 2), (3, 3), (3, 4)], model.trained, strict=True)))


@pytest.mark.parametrize("skipped", [0, 2])
def test_the_samples_of_each_batch_are_noted(model, prepared, full, assert_samples_noted, skipped):
    from accelerate import skip_first_batches

    from layerscope.integrations.accelerate import batches

    accelerator, wrapped, optimizer, loader = prepared()
    with full(model, [0]) as monitor:
        train(accelerator, wrapped, optimizer, batches(skip_first_batches(loader, skipped), monitor, epoch=0))
    assert_samples_noted(monitor, 5 - skipped)


def test_an_epoch_that_is_left_early_is_saved(model, prepared, full, tmp_path):
    from layerscope.integrations.accelerate import batches

    _, wrapped, _, loader = prepared()
    monitor = full(model, [0])
    for batch in batches(loader, monitor, epoch=0):
        wrapped(batch)
        if len(model.trained) == 3:
            break
    saved = torch.load(tmp_path / "out" / "epoch_0_000.pt", weights_only=True)
    assert torch.equal(saved["output"], torch.cat(model.trained))
    monitor.remove_hooks()
    assert_no_hooks_left(model)


RANK = """
import sys, torch
from accelerate import Accelerator
from integrations.conftest import Remembering
from layerscope.integrations.accelerate import batches
from layerscope.monitor import Monitor

torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
samples = [torch.tensor([float(i)]) for i in range(10)]
model = Remembering()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True)
wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
assert type(wrapped).__name__ == "DistributedDataParallel"
assert torch.distributed.get_backend() == "gloo"
layers = {"seen": {"record_type": "epoch_full"}, "lin": {"alias": "line", "record_type": "epoch_full"}}
with Monitor(accelerator.unwrap_model(wrapped), layers, [0, 1], sys.argv[1]) as monitor:
    for epoch in range(2):
        for batch in batches(loader, monitor, epoch=epoch):
            accelerator.backward(wrapped(batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
torch.save(model.trained, f"{sys.argv[1]}/trained-{accelerator.process_index}.pt")
accelerator.end_training()
"""


def test_two_processes_record_what_each_trained_on_in_folders_of_their_own(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path)],
            env={**os.environ, **world, "PYTHONPATH": paths, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    run = open_run(tmp_path / "run")
    assert [str(point) for point in run.points] == ["seen:output", "lin:output"]
    both = []
    for rank in range(2):
        trained = torch.load(tmp_path / f"trained-{rank}.pt", weights_only=True)
        both += trained[: len(trained) // 2]
        records = list(run.records("seen", rank=rank))
        places = [(r.moment.epoch, r.moment.batch) for r in records]
        assert places == [(e, b) for e in (0, 1) for b in range(len(trained) // 2)]
        for record, batch in zip(records, trained, strict=True):
            assert torch.equal(record.tensor(), batch)
            assert record.note == {"sample_indices": batch.flatten().int().tolist()}
        folder = tmp_path if rank == 0 else tmp_path / "rank-00001"
        saved = torch.load(folder / "epoch_0_000.pt", weights_only=True)
        assert torch.equal(saved["output"], torch.cat(trained[: len(trained) // 2]))
    assert set(torch.cat(both).flatten().tolist()) == set(map(float, range(10)))  # together, everything


class Frames:
    def __init__(self):
        self.frames = []

    def write(self, frame):
        self.frames.append(frame)

    def alarm(self, alarm):
        pass

    def close(self):
        pass


def test_a_watch_has_a_frame_for_each_step_of_the_optimizer(model, prepared):
    from layerscope.integrations.accelerate import batches
    from layerscope.monitor import watch

    accelerator, wrapped, optimizer, loader = prepared(gradient_accumulation_steps=2)
    sink = Frames()
    with partial(watch, taps="seen", sinks=[sink])(accelerator.unwrap_model(wrapped), optimizer) as watching:
        for epoch in range(2):
            train(accelerator, wrapped, optimizer, batches(loader, watching, epoch=epoch))
    assert [(f.moment.epoch, f.moment.step, f.moment.batch) for f in sink.frames] == [
        *[(0, 0, 0), (0, 1, 2), (0, 2, 4)],
        *[(1, 3, 0), (1, 4, 2), (1, 5, 4)],
    ]
    steps = [model.trained[e * 5 + b : min(e * 5 + b + 2, (e + 1) * 5)] for e in (0, 1) for b in (0, 2, 4)]
    for frame, several in zip(sink.frames, steps, strict=True):
        assert frame.reading("seen").summary.mean == pytest.approx(torch.cat(several).mean().item())
