"""writer.py: the background threads, the budget, and what becomes of what cannot be written."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open

import layerscope as ls
from asserts import left_open
from layerscope.errors import Damaged, NotARun, RunBusy, RunExists
from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Blob, Completeness, Manifest, MemoryRun, Missing, Writer, open_run
from layerscope.store import writer as writing
from layerscope.store.appender import Appender
from layerscope.store.destination import Destination
from layerscope.store.layouts.convert import convert
from layerscope.store.manifest import Dropped

A, B = Point("a"), Point("b")
ONES = np.ones(4, np.float32)


def said(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "layerscope"]


def manifest_of(path) -> dict:
    return json.loads((path / "run.json").read_text())


class Gate:
    """Bytes that are not there until the gate opens."""

    def __init__(self, size: int = 4) -> None:
        self.open = threading.Event()
        self.asked = threading.Event()
        self.size = size

    def data(self):
        self.asked.set()
        assert self.open.wait(20)
        return np.zeros(self.size, np.uint8)

    def blob(self) -> Blob:
        return Blob("uint8", (self.size,), self.size, self.data)


# Starting ---------------------------------------------------------------------------------------


def test_run_json_is_there_before_the_first_record_and_says_recording(tmp_path):
    writer = Writer(tmp_path / "deep" / "run", Manifest(mode="bf16"))
    value = manifest_of(tmp_path / "deep" / "run")
    assert (value["mode"], value["completeness"]["state"]) == ("bf16", "recording")
    writer.close()


def test_an_existing_run_is_refused_with_the_way_out_and_not_touched(tmp_path, write):
    write(tmp_path / "run", [("a", Moment(), ONES)]).close()
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(RunExists, match="append=True") as caught:
        Writer(tmp_path / "run", Manifest())
    assert isinstance(caught.value, FileExistsError)
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before


def test_a_run_that_is_being_written_is_busy(tmp_path):
    writer = Writer(tmp_path / "run", Manifest())
    for append in (False, True):
        with pytest.raises(RunBusy):
            Writer(tmp_path / "run", Manifest(), append=append)
    assert writer.write(A, Moment(), summary=None)
    assert writer.close().records == 1


@pytest.mark.parametrize("name", ["notes.txt", "run.json"])
def test_a_folder_of_something_else_is_refused_and_not_touched(tmp_path, name):
    (tmp_path / name).write_text('{"theirs": 1}')
    with pytest.raises(NotARun, match="is not empty and is not a run"):
        Writer(tmp_path, Manifest())
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == '{"theirs": 1}'


def test_a_file_is_refused(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(NotARun, match="is a file"):
        Writer(tmp_path / "run", Manifest())


def test_a_run_whose_ranks_were_removed_still_counts_as_one(tmp_path, write):
    write(tmp_path / "run", []).close()
    shutil.rmtree(tmp_path / "run" / "rank-00000")
    with pytest.raises(RunExists):
        Writer(tmp_path / "run", Manifest())


def test_an_empty_folder_is_fine(tmp_path):
    assert Writer(tmp_path, Manifest()).close().state == "complete"


def test_a_manifest_json_cannot_say_is_refused_and_leaves_nothing_behind(tmp_path):
    with pytest.raises(TypeError, match="JSON has no word for"):
        Writer(tmp_path / "deep" / "run", Manifest(settings={"x": object()}))
    assert list(tmp_path.iterdir()) == []
    assert Writer(tmp_path / "deep" / "run", Manifest()).close().state == "complete"


# Appending --------------------------------------------------------------------------------------


def test_append_goes_on_with_the_numbers(tmp_path, write):
    steps = [("a", Moment(step=n), ONES * n) for n in range(3)]
    write(tmp_path / "run", steps, manifest=Manifest(mode="x", taps=["a"], started="then")).close(forwards=3, points=1)
    writer = Writer(tmp_path / "run", Manifest(mode="y", taps=["b"]), append=True)
    assert writer.next_step == 3
    assert manifest_of(tmp_path / "run")["completeness"]["state"] == "recording"
    writer.write(A, Moment(step=3), blob=Blob("float32", (4,), 16, lambda: ONES * 3))
    assert writer.close(forwards=1, points=1) == Completeness("complete", 4, 1, 4)
    run = open_run(tmp_path / "run")
    assert [run.tensor("a", step=n)[0].item() for n in range(4)] == [0, 1, 2, 3]
    assert (run.manifest.mode, run.manifest.taps, run.manifest.started) == ("y", ["a", "b"], "then")
    found = {}
    for segment in sorted((tmp_path / "run/rank-00000").glob("*.safetensors")):
        with safe_open(segment, "np") as file:
            found[segment.stem] = [key for key in sorted(file.keys()) if key.isdecimal()]
    assert found == {"segment-00000": ["00000000", "00000001", "00000002"], "segment-00001": ["00000003"]}


def test_append_begins_a_run_where_there_is_none(tmp_path):
    writer = Writer(tmp_path / "run", Manifest(), append=True)
    assert writer.next_step == 0
    assert writer.close().state == "complete"


def test_append_seals_what_a_kill_left_first(tmp_path, write):
    writer = write(tmp_path / "run", [("a", Moment(step=n), ONES * n) for n in range(3)])
    writer.flush()
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    writer.close()
    with (tmp_path / "killed/rank-00000/segment-00000.journal").open("ab") as journal:
        journal.write(b"torn by the kill")
    second = Writer(tmp_path / "killed", Manifest(), append=True)
    assert (tmp_path / "killed/rank-00000/segment-00000.safetensors").exists()
    assert second.next_step == 3
    second.write(A, Moment(step=3), blob=Blob("float32", (4,), 16, lambda: ONES * 3))
    assert second.close().records == 4
    run = open_run(tmp_path / "killed")
    assert [run.tensor("a", step=n)[0].item() for n in range(4)] == [0, 1, 2, 3]
    assert run.damaged == []


# Writing ----------------------------------------------------------------------------------------


def test_flush_returns_when_everything_is_readable(tmp_path, write):
    writer = write(tmp_path / "run", [(f"p{n}", Moment(), ONES * n) for n in range(100)])
    writer.flush()
    run = open_run(tmp_path / "run")
    assert [run.tensor(f"p{n}")[0].item() for n in range(100)] == list(range(100))
    writer.close()


def test_a_callable_summary_is_called_between_data_and_release(tmp_path):
    calls = []
    blob = Blob("float32", (4,), 16, lambda: calls.append("data") or ONES, lambda: calls.append("release"))

    summary = summarize(ONES)
    writer = Writer(tmp_path / "run", Manifest())
    writer.write(A, Moment(), blob=blob, summary=lambda: calls.append("summary") or summary)
    writer.flush()
    assert calls == ["data", "summary", "release"]
    assert next(open_run(tmp_path / "run").records()).summary == summary
    writer.close()


def test_close_is_idempotent_and_states_what_it_was_told(tmp_path, write):
    writer = write(tmp_path / "run", [("a", Moment(), ONES)])
    missing = [Missing("b:output", "never called")]
    done = writer.close(forwards=2, points=2, recomputed=1, missing=missing)
    assert done == Completeness("complete", 2, 2, 1, 1, missing)
    assert writer.close() == done
    assert writer.close(forwards=9) == done
    run = open_run(tmp_path / "run")
    assert (run.manifest.completeness, run.complete, run.missing) == (done, False, missing)


def test_close_writes_the_manifest_as_it_is_by_then(tmp_path):
    writer = Writer(tmp_path / "run", Manifest())
    writer.manifest = replace(writer.manifest, settings={"observer": 0.5})
    writer.close()
    assert manifest_of(tmp_path / "run")["settings"] == {"observer": 0.5}


def test_after_close_a_record_is_dropped_and_released(tmp_path, blob):
    writer = Writer(tmp_path / "run", Manifest())
    writer.close()
    released = []
    assert not writer.write(A, Moment(), blob=blob(ONES, release=lambda: released.append(1)))
    assert released == [1]
    assert writer.dropped[0].reason == "the writer was closed"


def test_threads_and_files_are_gone_after_close(tmp_path, write):
    large = np.zeros(1 << 20, np.uint8)  # its checksum is taken in a thread as well
    write(tmp_path / "first", [("a", Moment(), large)]).close()
    opened = left_open()
    for n in range(50):
        write(tmp_path / f"run{n}", [("a", Moment(), large)]).close()
    deadline = time.monotonic() + 5
    while opened() != ([], []) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert opened() == ([], [])


def test_four_threads_write_and_nothing_is_lost(tmp_path):
    writer = Writer(tmp_path / "run", Manifest(), segment_tensors=7)

    def work(name: str) -> None:
        for n in range(50):
            data = np.full(3, n, np.int32)
            writer.write(Point(name), Moment(step=n), blob=Blob("int32", (3,), 12, lambda data=data: data))

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.close().records == 200
    run = open_run(tmp_path / "run")
    for i in range(4):
        steps = [entry.moment.step for entry in run.records(f"t{i}")]
        assert steps == list(range(50))
        assert all(run.tensor(f"t{i}", step=n).tolist() == [n] * 3 for n in steps)


# The budget -------------------------------------------------------------------------------------


def test_a_full_queue_drops_counts_and_says_so_once(tmp_path, caplog):
    gate = Gate(600)
    writer = Writer(tmp_path / "run", Manifest(), budget=6000, wait=0.05)
    assert writer.write(A, Moment(), blob=gate.blob())
    dropped = [not writer.write(B, Moment(step=n), blob=gate.blob()) for n in range(5)]
    assert dropped == [True] * 5
    gate.open.set()
    writer.flush()
    assert writer.write(B, Moment(step=9), blob=gate.blob())
    done = writer.close()
    assert done.records == 2
    [loss] = done.dropped
    assert (loss.point, loss.count, loss.first) == ("b:output", 5, "step=0")
    assert "did not keep up" in loss.reason
    assert len(said(caplog)) == 1
    assert not open_run(tmp_path / "run").complete


def test_only_the_first_of_a_stall_waits(tmp_path):
    gate = Gate(600)
    writer = Writer(tmp_path / "run", Manifest(), budget=6000, wait=0.3)
    writer.write(A, Moment(), blob=gate.blob())
    assert gate.asked.wait(5)
    start = time.monotonic()
    for n in range(200):
        writer.write(B, Moment(step=n), blob=gate.blob())
    assert 0.25 < time.monotonic() - start < 30  # two hundred waits are a minute
    gate.open.set()
    assert writer.close().dropped[0].count == 200


def test_a_queue_that_empties_in_time_drops_nothing(tmp_path):
    gate = Gate(600)
    writer = Writer(tmp_path / "run", Manifest(), budget=6000, wait=10)
    writer.write(A, Moment(), blob=gate.blob())
    threading.Timer(0.1, gate.open.set).start()
    assert writer.write(B, Moment(), blob=gate.blob())
    assert writer.close().dropped == []


def test_a_tensor_larger_than_the_whole_budget_is_taken_when_nothing_waits(tmp_path, blob):
    writer = Writer(tmp_path / "run", Manifest(), budget=1000, wait=5)
    assert writer.write(A, Moment(), blob=blob(np.zeros(5000, np.uint8)))
    assert writer.write(B, Moment(), blob=blob(np.zeros(5000, np.uint8)))
    assert writer.close().dropped == []


def test_what_a_summary_holds_counts_against_the_budget_and_is_released(tmp_path):
    gate, released = Gate(), []
    writer = Writer(tmp_path / "run", Manifest(), budget=10_000, wait=0.05)
    writer.write(A, Moment(), blob=gate.blob())
    args = {"holds": 20_000, "release": lambda: released.append(1)}
    assert not writer.write(B, Moment(), summary=lambda: None, **args)
    assert released == [1]
    gate.open.set()
    writer.flush()
    assert writer.write(B, Moment(), summary=lambda: None, **args)
    writer.close()
    assert released == [1, 1]


# Records that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Blob("qint8", (2,), 2, lambda: b"ab"), "cannot hold dtype 'qint8'"),
        (Blob("float32", (2,), 8, lambda: b"abc"), "3 bytes for a float32 of shape [2]"),
        (Blob("uint8", (2,), 2, lambda: 1 / 0), "ZeroDivisionError"),
        (Blob("uint8", (2,), 2, lambda: np.arange(4, dtype=np.uint8)[::2]), "C-contiguous"),
        (Blob("uint8", (2,), 2, lambda: sys.exit(3)), "SystemExit"),
    ],
)
def test_a_record_that_fails_costs_only_itself(tmp_path, caplog, blob, bad, reason):
    writer = Writer(tmp_path / "run", Manifest())
    released = []
    writer.write(A, Moment(), blob=blob(ONES))
    writer.write(B, Moment(), blob=replace(bad, release=lambda: released.append(1)))
    writer.write(A, Moment(step=1), blob=blob(ONES))
    done = writer.close()
    assert (done.records, released) == (2, [1])
    assert [(d.point, d.count) for d in done.dropped] == [("b:output", 1)]
    assert reason in done.dropped[0].reason
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("note", [{"x": object()}, {1: 2}])
def test_a_note_json_cannot_say_costs_its_record(tmp_path, blob, note):
    writer = Writer(tmp_path / "run", Manifest())
    writer.write(A, Moment(), blob=blob(ONES), note=note)
    done = writer.close()
    assert (done.records, done.dropped[0].count) == (0, 1)


def test_a_summary_that_fails_is_counted_and_the_tensor_kept(tmp_path, blob):
    writer = Writer(tmp_path / "run", Manifest())
    writer.write(A, Moment(), blob=blob(ONES), summary=lambda: 1 / 0)
    writer.write(B, Moment(), summary=lambda: 1 / 0)
    done = writer.close()
    assert done.records == 1
    assert "its summary failed, its tensor is kept: ZeroDivisionError" in done.dropped[0].reason
    assert open_run(tmp_path / "run").tensor("a").tolist() == [1, 1, 1, 1]


def test_a_release_that_fails_is_said_and_nothing_else(tmp_path, blob, caplog):
    writer = Writer(tmp_path / "run", Manifest())
    writer.write(A, Moment(), blob=blob(ONES, release=lambda: 1 / 0))
    assert writer.close().records == 1
    assert "releasing a buffer failed" in said(caplog)[0]


def test_a_logging_handler_that_raises_does_not_reach_the_run(tmp_path):
    class Bad(logging.Handler):
        def handle(self, record):
            raise RuntimeError("handler")

    handler = Bad()
    logging.getLogger("layerscope").addHandler(handler)
    try:
        writer = Writer(tmp_path / "run", Manifest())
        writer.write(A, Moment(), blob=Blob("uint8", (1,), 1, lambda: 1 / 0))
        assert writer.close().dropped[0].count == 1
    finally:
        logging.getLogger("layerscope").removeHandler(handler)


# Hanging and forking ----------------------------------------------------------------------------


def test_close_does_not_wait_for_ever_and_the_thread_goes_on_alone(tmp_path, caplog, monkeypatch):
    gate = Gate()
    writer = Writer(tmp_path / "run", Manifest())
    monkeypatch.setattr(writer._to, "patience", 0.3)
    writer.write(A, Moment(), blob=gate.blob())
    start = time.monotonic()
    assert writer.close().state == "interrupted"
    assert time.monotonic() - start < 30  # by itself it would be patient for a minute
    assert "still wait" in said(caplog)[0]
    gate.open.set()
    assert writer.close().state == "complete"
    assert open_run(tmp_path / "run").complete


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk whose first write takes eight seconds, of a clock that goes on by one whenever it is asked."""
    awake, append = threading.Event(), Appender.append

    class Clock:
        now = 0.0

        def monotonic(self):
            self.now += 1
            if self.now >= 8:
                awake.set()
            return self.now

    def slow(self, *given, **named):
        assert awake.wait(60)
        return append(self, *given, **named)

    clock = Clock()
    monkeypatch.setattr(writing, "time", clock)
    monkeypatch.setattr(Appender, "append", slow)
    yield clock
    assert clock.now >= 8


def test_a_first_write_that_takes_eight_seconds_loses_nothing(tmp_path, slow_disk):
    writer = Writer(tmp_path / "run", Manifest())
    writer.write(A, Moment(), blob=Blob("float32", (4,), 16, lambda: ONES))
    assert writer.close().state == "complete"
    assert open_run(tmp_path / "run").tensor("a").tolist() == ONES.tolist()


def test_a_recording_whose_first_write_takes_eight_seconds_is_complete(tmp_path, slow_disk):
    model = torch.nn.Sequential(torch.nn.Identity())
    with ls.record(model, "0", to=tmp_path / "run") as rec:
        model(torch.ones(4))
    assert rec.completeness.state == "complete"
    assert open_run(tmp_path / "run").tensor("0").tolist() == ONES.tolist()


def test_a_conversion_whose_first_write_takes_eight_seconds_is_whole(tmp_path, slow_disk):
    source = MemoryRun(Manifest())
    source.add(A, Moment(), tensor=torch.ones(4))
    convert(source, tmp_path / "run", layout="layerscope")
    assert open_run(tmp_path / "run").tensor("a").tolist() == ONES.tolist()


def test_a_conversion_that_the_disk_does_not_finish_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(Destination, "patience", 0.1)
    awake, append = threading.Event(), Appender.append
    monkeypatch.setattr(Appender, "append", lambda *given, **named: (awake.wait(60), append(*given, **named))[1])
    source = MemoryRun(Manifest())
    source.add(A, Moment(), tensor=torch.ones(4))
    with pytest.raises(Damaged, match="was not finished: the disk took nothing"):
        convert(source, tmp_path / "run", layout="layerscope")
    awake.set()
    for thread in threading.enumerate():
        if thread.name == "layerscope-writer":
            thread.join(20)


def test_flush_gives_up_when_nothing_moves(tmp_path, caplog):
    gate = Gate()
    writer = Writer(tmp_path / "run", Manifest())
    writer.write(A, Moment(), blob=gate.blob())
    writer.flush(patience=0.2)
    assert "nothing was written" in said(caplog)[0]
    gate.open.set()
    assert writer.close().records == 1


def test_a_process_that_ends_without_closing_leaves_a_sealed_run(tmp_path):
    script = """
import sys, numpy as np
from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer
writer = Writer(sys.argv[1], Manifest())
writer.write(Point("a"), Moment(), blob=Blob("int8", (3,), 3, lambda: b"abc"))
if sys.argv[2] == "raise": raise RuntimeError("the user's own")
"""
    for ending in ("end", "raise"):
        path = tmp_path / ending
        subprocess.run([sys.executable, "-c", script, str(path), ending], capture_output=True, check=False)
        run = open_run(path)
        assert run.state == "interrupted"
        assert run.tensor("a").tolist() == [97, 98, 99]
        assert (path / "rank-00000/segment-00000.safetensors").exists()


def test_a_stuck_device_does_not_keep_the_interpreter_from_ending(tmp_path):
    script = """
import sys, threading
from layerscope.points import Moment, Point
from layerscope.store import Blob, Manifest, Writer
writer = Writer(sys.argv[1], Manifest())
writer._to.patience = 0.5
writer.write(Point("a"), Moment(), blob=Blob("int8", (3,), 3, lambda: threading.Event().wait()))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    assert subprocess.run(command, capture_output=True, check=True, timeout=50).returncode == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_neither_writes_nor_hangs_nor_keeps_the_lock(tmp_path, write):
    writer = write(tmp_path / "run", [("a", Moment(), ONES)])
    writer.flush()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:  # so that the child inherits a lock that nobody will release
        with writer._changed:
            held.set()
            over.wait(20)

    threading.Thread(target=hold).start()
    held.wait(5)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            refused = not writer.write(B, Moment())
            writer.flush()
            quiet = writer.close().state == "recording" and writer.dropped == []
            status = 0 if refused and quiet else 2
        finally:
            os._exit(status)
    over.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert writer.write(B, Moment())
    assert writer.close().records == 2
    second = Writer(tmp_path / "second", Manifest())
    sleeper = os.fork()
    if sleeper == 0:
        time.sleep(60)
        os._exit(0)
    second.close()
    try:
        Writer(tmp_path / "second", Manifest(), append=True).close()  # RunBusy if the child still held the lock
    finally:
        os.kill(sleeper, 9)
        os.waitpid(sleeper, 0)


# Ranks ------------------------------------------------------------------------------------------


def test_ranks_write_their_own_folders_in_any_order(tmp_path, write):
    late = write(tmp_path / "run", [("a", Moment(rank=1), ONES)], rank=1, manifest=Manifest(mode="from 1"))
    assert manifest_of(tmp_path / "run")["mode"] == "from 1"
    first = write(tmp_path / "run", [("a", Moment(rank=0), ONES * 2)], rank=0, manifest=Manifest(mode="from 0"))
    assert manifest_of(tmp_path / "run")["mode"] == "from 0"
    third = write(tmp_path / "run", [("a", Moment(rank=2), ONES * 3)], rank=2, manifest=Manifest(mode="from 2"))
    third.close(forwards=1, missing=[Missing("x", "why")])
    first.close(forwards=1)
    assert open_run(tmp_path / "run").state == "recording"
    late.close(forwards=1)
    assert manifest_of(tmp_path / "run")["mode"] == "from 0"
    run = open_run(tmp_path / "run")
    assert (run.state, run.manifest.completeness.records, run.missing) == ("complete", 3, [Missing("x", "why")])
    assert [run.tensor("a", rank=n)[0].item() for n in range(3)] == [2, 1, 3]
    assert [e.moment.rank for e in run.records()] == [0, 1, 2]


# The disk ---------------------------------------------------------------------------------------


def test_a_removed_folder_is_counted_said_once_and_not_made_again(tmp_path, write, caplog):
    writer = write(tmp_path / "run", [("a", Moment(step=n), ONES) for n in range(3)])
    writer.flush()
    shutil.rmtree(tmp_path / "run")
    for n in range(3, 6):
        writer.write(A, Moment(step=n), blob=Blob("float32", (4,), 16, lambda: ONES))
    done = writer.close()
    assert done.records == 0
    assert sum(d.count for d in done.dropped) == 6
    assert any("folder was removed" in d.reason for d in done.dropped)
    assert not (tmp_path / "run").exists()
    assert len([s for s in said(caplog) if "folder was removed" in s]) == 1


def test_a_rename_that_is_not_supported_leaves_a_readable_partial(tmp_path, write, monkeypatch, caplog):
    real = os.replace

    def refuse(source, target, **kwargs):
        if str(target).endswith(".safetensors"):
            raise OSError(errno.ENOSYS, "Function not implemented")
        return real(source, target, **kwargs)

    monkeypatch.setattr(os, "replace", refuse)
    done = write(tmp_path / "run", [("a", Moment(), ONES)]).close()
    assert (done.records, done.dropped) == (1, [])
    assert "could not be sealed" in said(caplog)[0]
    assert open_run(tmp_path / "run").tensor("a").tolist() == [1, 1, 1, 1]


def test_a_run_json_that_cannot_be_written_at_the_end_is_said_and_not_raised(tmp_path, write, monkeypatch, caplog):
    writer = write(tmp_path / "run", [("a", Moment(), ONES)])
    writer.flush()
    real = os.open

    def refuse(path, *args, **kwargs):
        if "run.json" in str(path):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    assert writer.close().state == "interrupted"
    monkeypatch.undo()
    assert "Read-only file system" in said(caplog)[0]
    run = open_run(tmp_path / "run")
    assert (run.state, run.tensor("a").tolist()) == ("recording", [1, 1, 1, 1])


def test_a_summary_shared_by_two_records_is_read_by_both(tmp_path):
    plain = summarize(np.arange(6, dtype=np.float32))
    writer = Writer(tmp_path / "run", Manifest())
    writer.write(Point("a"), Moment(), summary=plain)
    writer.write(Point("b", "input", (0,)), Moment(), summary=plain, note={"within": "x"})
    writer.close()
    entries = list(open_run(tmp_path / "run").records())
    assert [entry.summary for entry in entries] == [plain] * 2
    assert entries[1].note == {"within": "x"}


def test_what_could_not_be_made_is_listed_in_the_run_and_said_once(tmp_path, caplog, blob):
    writer = Writer(tmp_path / "run", Manifest())
    writer.write(A, Moment(), blob=blob(ONES))
    for step in range(1, 4):
        writer.lose(A, Moment(step=step, batch=step), "there was no room")
    writer.lose(B, Moment(step=2, batch=2), "there was no room")
    done = writer.close(forwards=4, points=2)
    expected = [
        Dropped("a:output", 3, "there was no room", "step=1"),
        Dropped("b:output", 1, "there was no room", "step=2"),
    ]
    run = open_run(tmp_path / "run")
    assert done.dropped == run.manifest.completeness.dropped == expected
    assert (done.records, run.complete, run.tensor("a").tolist()) == (1, False, ONES.tolist())
    [sentence] = said(caplog)
    assert "a:output at step=1 is not recorded: there was no room" in sentence
