"""A Monitor in bad weather: kills, signals, a full disk, a folder that is gone. Training never notices."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from asserts import hooks_on, left_open
from faults.monitoring import BATCH, rows
from faults.test_full_disk import small_disk  # noqa: F401
from layerscope import open_run
from layerscope.monitor import Monitor

SCRIPT = Path(__file__).with_name("monitoring.py")


@pytest.fixture(autouse=True)
def _one_thread():
    """Keep small operations from waiting for threads of a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stopped(way: str, folder: Path, number: signal.Signals, *, after: int = 20) -> tuple[int, int]:
    """Train in another process, stop it after some batches; return what was safe, and its status. Raises for a hang."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SCRIPT.parents[1], *sys.path)))}
    child = subprocess.Popen(
        [sys.executable, str(SCRIPT), way, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    safe = [int(child.stdout.readline() or -1)]
    while 0 <= safe[-1] < after:
        safe.append(int(child.stdout.readline() or -1))
    child.send_signal(number)
    out, err = child.communicate(timeout=60)
    assert safe[-1] >= 0, err
    whole = (out.rpartition("\n")[0]).split()
    return max([safe[-1], *map(int, whole)]), child.returncode


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.stress) for n in range(1, 10))])
def test_kill_9_in_the_middle_of_an_epoch_loses_nothing_acknowledged(tmp_path, seed):
    safe, _ = stopped("trainer", tmp_path, signal.SIGKILL, after=10 + 30 * seed)
    run = open_run(tmp_path / "run")
    entries = list(run.records("0"))
    assert len(entries) >= safe
    assert run.damaged == []
    for entry in entries:
        n = entry.moment.batch
        assert entry.moment.epoch == 1
        assert entry.tensor().equal(rows()[n * BATCH : (n + 1) * BATCH])
        assert entry.note == {"sample_indices": list(range(n * BATCH, (n + 1) * BATCH))}


@pytest.mark.parametrize(
    ("way", "number", "status"),
    [
        ("bare", signal.SIGTERM, 143),
        ("bare", signal.SIGINT, -signal.SIGINT),
        pytest.param("trainer", signal.SIGTERM, 143, marks=pytest.mark.stress),
        pytest.param("block", signal.SIGTERM, 143, marks=pytest.mark.stress),
        pytest.param("finally", signal.SIGTERM, 143, marks=pytest.mark.stress),
        pytest.param("trainer", signal.SIGINT, -signal.SIGINT, marks=pytest.mark.stress),
        pytest.param("finally", signal.SIGINT, -signal.SIGINT, marks=pytest.mark.stress),
    ],
)
def test_a_signal_saves_the_epoch_so_far_and_the_process_goes(tmp_path, way, number, status):
    safe, returned = stopped(way, tmp_path, number)
    assert returned == status
    item = torch.load(tmp_path / "epoch_1_000.pt", weights_only=True)
    count = len(item["batch_idx"])
    assert count >= safe
    assert item["output"].equal(rows()[: count * BATCH])
    assert open_run(tmp_path / "run").state == "complete"


def trained(net: nn.Module, monitor: Monitor | None, *, between=lambda step: None) -> list[float]:
    """Train for three epochs of four batches, as the documentation does it; return the losses."""
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for epoch in range(3):
        if monitor is not None:
            monitor.set_epoch(epoch)
        for n in range(4):
            if monitor is not None:
                monitor.set_batch_idx(n)
            loss = net(torch.randn(64, 100)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            between(epoch * 4 + n)
        if monitor is not None:
            for data in (monitor.get_single_data(), monitor.get_epoch_data()):
                for info in data.values():
                    list(info["data"].values())
            monitor.save_single_outputs()
            monitor.save_epoch_outputs()
            monitor.save_custom_output(torch.zeros(10), "custom.pt")
            monitor.clear_current_epoch_data()
    if monitor is not None:
        monitor.remove_hooks()
    return losses


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(100, 3000), nn.ReLU(), nn.Linear(3000, 3))


LAYERS = {"0": {"record_type": "epoch_full"}, "2": {"alias": "out"}}


@pytest.mark.parametrize("budget", [1 << 30, 1 << 20])
def test_a_full_disk_never_stops_the_training(small_disk, caplog, budget):  # noqa: F811
    watched = net()
    # 768 kB for each batch of layer 0, and the disk has 4 MiB.
    monitor = Monitor(watched, LAYERS, range(3), small_disk / "out", [0], budget=budget)
    assert trained(watched, monitor) == trained(net(), None)
    assert "No space left on device" in caplog.text
    assert hooks_on(watched) == 0
    for path in (small_disk / "out").glob("*.pt"):
        assert torch.load(path, weights_only=True) is not None  # whole, or not there
    assert not list((small_disk / "out").glob("*.partial"))
    assert not list((small_disk / "out").glob("*.values*"))


@pytest.mark.parametrize("budget", [1 << 30, 1 << 20])
def test_a_removed_folder_never_stops_the_training(tmp_path, budget, caplog):
    watched = net()
    monitor = Monitor(watched, LAYERS, range(3), tmp_path / "out", [0], budget=budget)

    def remove(step):
        if step == 5:
            shutil.rmtree(tmp_path / "out")

    assert trained(watched, monitor, between=remove) == trained(net(), None)
    item = torch.load(tmp_path / "out" / "single_epoch_2_000.pt", weights_only=True)
    assert item["output"].shape == (64, 3)
    whole = tmp_path / "out" / "epoch_2_000.pt"
    if budget > 1 << 20:  # what is in memory is saved all the same
        assert torch.load(whole, weights_only=True)["output"].shape == (256, 3000)
    else:
        assert "are lost" in caplog.text


def test_a_folder_that_becomes_read_only_or_a_file_never_stops_the_training(tmp_path, caplog):
    watched = net()
    monitor = Monitor(watched, LAYERS, range(3), tmp_path / "out", [0])

    def replace(step):
        if step == 5:
            shutil.rmtree(tmp_path / "out")
            (tmp_path / "out").write_text("a file")

    assert trained(watched, monitor, between=replace) == trained(net(), None)
    assert "could not be saved" in caplog.text
    assert (tmp_path / "out").read_text() == "a file"


EPOCH = """
import sys, torch
from growing import growth
from layerscope.monitor import Monitor

torch.set_num_threads(1)
batches = int(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Identity())

def epoch(monitor, number, batches):
    monitor.set_epoch(number)
    for n in range(batches):
        monitor.set_batch_idx(n)
        model(torch.full((512, 512), float(n)))
    return monitor.save_epoch_outputs()

for budget in map(int, sys.argv[3:]):
    layers = {"0": {"record_type": "epoch_full"}}
    monitor = Monitor(model, layers, [0, 1], f"{sys.argv[1]}/{budget}", budget=budget << 20)
    epoch(monitor, 0, 1)
    [path], grown = growth(lambda: epoch(monitor, 1, batches))
    output = torch.load(path, weights_only=True, mmap=True)["output"]
    assert output.shape == (512 * batches, 512)
    assert output[::512, 7].tolist() == list(range(batches))
    monitor.remove_hooks()
    print(grown)
"""


def megabytes_grown(folder: Path, *, batches: int, budgets: tuple[int, ...]) -> list[int]:
    """Save an epoch of 1 MiB batches for each budget in another process; return by how many MB that grew meanwhile."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SCRIPT.parents[1], *sys.path)))}
    command = [sys.executable, "-c", EPOCH, folder, str(batches), *map(str, budgets)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is sampled in /proc")
def test_saving_an_epoch_takes_the_memory_of_the_budget_and_not_of_the_epoch(tmp_path):
    small, large = megabytes_grown(tmp_path, batches=48, budgets=(4, 1024))
    assert small < 24
    assert large > 40  # the check can fail


@pytest.mark.stress
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is sampled in /proc")
def test_saving_a_gibibyte_takes_the_memory_of_the_budget(tmp_path):
    [grown] = megabytes_grown(tmp_path, batches=1024, budgets=(64,))
    assert grown < 128


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_steps(tmp_path: Path, *, steps: int, epoch: int, growth: int) -> None:
    """Train long and compare memory, hooks, threads and files of the end with those of the first tenth."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    monitor = Monitor(
        model, {"*": {"record_type": "epoch_full"}, ".": {}}, range(0, steps, 2), tmp_path, [0], budget=1 << 20
    )

    first: tuple[int, int, Callable[[], tuple[list[str], list[str]]]] | None = None
    for step in range(steps):
        if step % epoch == 0:
            monitor.set_epoch(step // epoch)
            if step == steps // 10 // epoch * epoch:
                first = resident(), hooks_on(model), left_open()
        monitor.set_batch_idx(step % epoch)
        model(torch.ones(8, 16)).sum().backward()
    monitor.get_epoch_data()
    assert first is not None
    memory, hooks, opened = first
    assert hooks_on(model) == hooks
    assert opened() == ([], [])
    assert resident() - memory < growth
    monitor.remove_hooks()
    assert len(monitor.run) == (steps // epoch + 1) // 2 * (3 * epoch + 1)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory and files are counted in /proc")
def test_five_hundred_steps_leave_nothing_behind(tmp_path):
    check_steps(tmp_path, steps=500, epoch=25, growth=24 << 20)


@pytest.mark.stress
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory and files are counted in /proc")
def test_ten_thousand_steps_leave_nothing_behind(tmp_path):
    check_steps(tmp_path, steps=10_000, epoch=100, growth=16 << 20)
