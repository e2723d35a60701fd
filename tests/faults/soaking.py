"""All of it at once, for long: training that is recorded and watched, on a small disk that fills and is freed, under a
clock that jumps, with a reader beside it, and kills.

    python tests/faults/soaking.py FOLDER MINUTES       # its figures as JSON; as root FOLDER becomes a small disk

Two processes train, recording after recording. One is never killed and says after each what it holds: memory, files,
threads, mappings. The other is killed at random, and what could be read before the kill must be there after it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import layerscope as ls
from layerscope.errors import NotARun

STEPS, ROWS, WIDTH = 24, 4, 256
POINTS = 5  # of the model, itself included
DISK = "8m"
RULES = ["nonfinite", "exploding", "dead", "saturated", "stuck"]


def batch(number: int, step: int) -> torch.Tensor:
    """What the model is given in a step of a recording: it can be told from its first element."""
    values = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).clone()
    values[0, 0] = (number * STEPS + step) / 2**22
    return values


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Identity(), nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 4))


class Sink:
    """A sink of somebody's own, which may fail."""

    def __init__(self, *, fails: bool) -> None:
        self.frames, self.fails = 0, fails

    def write(self, frame: object) -> None:
        self.frames += 1
        if self.fails:
            raise RuntimeError("the sink failed")

    def alarm(self, alarm: object) -> None:
        if self.fails:
            raise RuntimeError("the sink failed")

    def close(self) -> None:
        pass


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, between: Callable[[int], None]) -> bytes:
    """Train for a recording; return the weights."""
    for step in range(STEPS):
        between(step)
        optimizer.zero_grad()
        model(batch(number, step)).square().mean().backward()
        optimizer.step()
    return b"".join(each.detach().numpy().tobytes() for each in model.parameters())


def record(say: Callable[..., None], folder: str, first: int, seed: int) -> None:
    """Train and record until somebody kills this process."""
    torch.set_num_threads(1)
    logging.disable()
    chance, clock, ahead = random.Random(seed), time.time, 0.0
    time.time = lambda: clock() + ahead
    for number in itertools.count(first):
        model = net()
        plain = train(model, torch.optim.SGD(model.parameters(), lr=0.01), number, lambda step: None)
        path, model, sink = Path(folder, f"{number}-of-{seed}"), net(), Sink(fails=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        say("begins", path.name)
        recording = ls.record(model, "**", to=path)
        try:
            recording.__enter__()
        except OSError:  # the disk is full: it could not begin, and said so
            say("refused", number)
            time.sleep(0.05)
            continue

        def between(step: int, recording: Any = recording) -> None:
            nonlocal ahead
            ahead = chance.choice([-1, 1]) * chance.expovariate(1e-7)
            if step and step % 8 == 0:
                recording.flush()
                say("safe", len(recording.run))

        with ls.watch(model, optimizer, rules=RULES, sinks=[sink, Sink(fails=True)], parameters=True):
            weights = train(model, optimizer, number, between)
        recording.__exit__(None, None, None)
        done = recording.completeness
        say("done", done.records, sum(each.count for each in done.dropped), weights == plain, sink.frames)
        del recording
        gc.collect()
        say("holds", *holds())


def holds() -> tuple[int, int, int, int]:
    """Return the resident bytes, open files, threads and mappings of this process."""
    here = Path("/proc/self")
    resident = int((here / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files, threads = (len(list((here / each).iterdir())) for each in ("fd", "task"))
    return resident, files, threads, (here / "maps").read_text("utf-8", "replace").count("\n")


def assert_right(path: Path, *, whole: bool = True) -> int:
    """Check everything that can be read of a recording; return how many records there are."""
    number, run = int(path.name.partition("-")[0]), ls.open_run(path)
    found: dict[str, list[int]] = {}
    for entry in run.records():
        found.setdefault(str(entry.point), []).append(entry.moment.step)
        if str(entry.point) == "0:output":
            assert entry.tensor().equal(batch(number, entry.moment.step)), entry
        else:
            assert entry.tensor().isfinite().all()
    assert not whole or run.damaged == [], (path, run.damaged)
    assert all(steps == sorted(set(steps)) for steps in found.values())
    return len(run)


class Trainer:
    """A process that records, as seen from here."""

    def __init__(self, context: Any, folder: Path, first: int, seed: int) -> None:
        self.folder, self.seed, self.first = folder, seed, first
        self.safe, self.path, self.held = 0, folder / "0-of-none", []
        self.conn, other = context.Pipe(duplex=False)
        self.process = context.Process(target=_run, args=(other, str(folder), first, seed), daemon=True)
        self.process.start()
        other.close()

    def hear(self) -> Iterator[tuple[Any, ...]]:
        """Give what it said meanwhile; each recording that ended is checked, and removed."""
        with contextlib.suppress(EOFError, OSError):
            while self.conn.poll():
                word, *rest = told = self.conn.recv()
                if word == "begins":
                    self.path, self.safe = self.folder / rest[0], 0
                    self.first = int(rest[0].partition("-")[0]) + 1
                elif word == "safe":
                    self.safe = rest[0]
                elif word == "holds":
                    self.held.append(rest)
                yield told

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _run(conn: Connection, folder: str, first: int, seed: int) -> None:
    record(lambda *words: conn.send(words), folder, first, seed)


class Soak:
    """Let both trainers run, with everything that happens to them; `figures` says what came of it."""

    def __init__(self, folder: Path, *, seed: int = 0, every: float = 2.0) -> None:
        self.folder, self.chance, self.every = folder, random.Random(seed), every
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["faults.soaking"])
        self.started, self.counts = time.monotonic(), dict.fromkeys(
            ("recordings", "records", "dropped", "kills", "recovered", "refused", "full", "reads", "frames", "alarms"),
            0,
        )  # fmt: skip
        self.held: list[tuple[int, ...]] = []
        self._again = lambda first: Trainer(context, folder, first, 1)
        self.steady, self.victim = Trainer(context, folder, 0, 0), self._again(0)
        self._kill_at = self._fill_at = time.monotonic() + every

    def run(self, over: Callable[[], bool]) -> dict[str, Any]:
        try:
            while not over():
                self._turn()
        finally:
            self.steady.kill()
            self.victim.kill()
        return self.figures()

    def _turn(self) -> None:
        for trainer in (self.steady, self.victim):
            assert trainer.process.is_alive(), f"a trainer ended by itself: {trainer.process.exitcode}"
            self._settle(trainer)
            with contextlib.suppress(NotARun):  # it begins just now
                assert_right(trainer.path, whole=False)
                self.counts["reads"] += 1
                if ls.open_run(trainer.path).damaged:  # a look at what the writer takes back just now, on a full disk
                    self.counts["alarms"] += 1
                    time.sleep(0.2)
                    assert ls.open_run(trainer.path).damaged == [], trainer.path
        now = time.monotonic()
        if now > self._fill_at:
            self._fill_or_free()
            full = (self.folder / "ballast").exists()
            self._fill_at = now + self.chance.expovariate((4 if full else 1) / self.every)
        if now > self._kill_at and self.victim.safe:
            self._kill_at = now + self.chance.expovariate(1 / self.every)
            self._kill()
        self.held.append(holds())
        time.sleep(0.02)

    def _settle(self, trainer: Trainer) -> None:
        for word, *rest in trainer.hear():
            if word == "refused":
                self.counts["refused"] += 1
            elif word == "done":
                records, dropped, same, frames = rest
                assert same, "recording changed the training"
                assert frames == STEPS
                assert records + dropped == STEPS * POINTS, (trainer.path, rest)
                assert assert_right(trainer.path) == records
                self.counts["recordings"] += 1
                for name, number in (("records", records), ("dropped", dropped), ("frames", frames)):
                    self.counts[name] += number
                shutil.rmtree(trainer.path)

    def _fill_or_free(self) -> None:
        ballast = self.folder / "ballast"
        if ballast.exists():
            ballast.unlink()
        elif os.path.ismount(self.folder):
            self.counts["full"] += 1
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))

    def _kill(self) -> None:
        victim = self.victim
        victim.kill()
        self._settle(victim)
        self.counts["kills"] += 1
        if victim.path.exists() and victim.safe:
            assert assert_right(victim.path) >= victim.safe
            (self.folder / "ballast").unlink(missing_ok=True)
            assert [each for each in ls.recover(victim.path).lost if each.acknowledged] == []
            kept = assert_right(victim.path)
            assert kept >= victim.safe
            self.counts["recovered"] += kept
            assert ls.recover(victim.path)[:3] == (0, 0, [])
        shutil.rmtree(victim.path, ignore_errors=True)
        victim.conn.close()
        self.victim = self._again(victim.first)

    def figures(self) -> dict[str, Any]:
        """Return what was counted, and how much more is held in the last tenth than in the second: medians."""
        grown = {}
        for who, held in (("trainer", self.steady.held), ("reader", self.held)):
            tenth = len(held) // 10
            if not tenth:
                continue
            for at, name in enumerate(("resident", "files", "threads", "mappings")):
                then, now = (
                    statistics.median(each[at] for each in part) for part in (held[tenth:][:tenth], held[-tenth:])
                )
                grown[f"{who}_{name}"] = int(now - then)
        return {"seconds": round(time.monotonic() - self.started), **self.counts, "grown": grown}


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount one at the folder, where that is allowed; else nothing is ever full."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], capture_output=True, check=False
    )
    try:
        yield
    finally:
        if not mounted.returncode:
            subprocess.run(["umount", "-l", folder], check=True)


if __name__ == "__main__":
    where, until = Path(sys.argv[1]), time.monotonic() + 60 * float(sys.argv[2])
    where.mkdir(parents=True, exist_ok=True)
    with small_disk(where):
        found = Soak(where).run(lambda: time.monotonic() > until)
    sys.stdout.write(json.dumps(found) + "\n")
