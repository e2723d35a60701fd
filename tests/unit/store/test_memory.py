"""memory.py: what is special about a run that is never written."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from layerscope.points import Moment, Point
from layerscope.stats import summarize
from layerscope.store import Completeness, Manifest, MemoryRun, Missing
from layerscope.store.manifest import Dropped


def test_the_tensor_is_the_one_that_was_added():
    run, x = MemoryRun(Manifest(mode="x")), torch.ones(3)
    run.add(Point("a"), Moment(), tensor=x, note={"k": 1})
    assert run.tensor("a") is x
    assert (run.address, run.manifest.mode) == ("memory", "x")
    assert next(run.records()).note == {"k": 1}


def test_what_is_added_after_a_question_is_found_by_the_next():
    run = MemoryRun()
    run.add(Point("a"), Moment(), tensor=torch.ones(1))
    assert len(run) == 1
    run.add(Point("b"), Moment(), tensor=torch.ones(1))
    run.add(Point("a"), Moment(), tensor=torch.zeros(1))
    assert (len(run), run.replaced, run.tensor("a").item()) == (2, 1, 0)


def test_closing_states_completeness_as_the_writer_does():
    run = MemoryRun()
    run.add(Point("a"), Moment(), tensor=torch.ones(1))
    assert run.state == "recording"
    missing = [Missing("b:output", "never called")]
    assert run.close(forwards=2, points=2, missing=missing) == Completeness("complete", 2, 2, 1, 0, missing)
    assert (run.state, run.missing, run.complete) == ("complete", missing, False)


def test_threads_may_ask_while_others_add():
    run = MemoryRun()
    errors = []

    def add() -> None:
        for n in range(300):
            run.add(Point(threading.current_thread().name), Moment(step=n), tensor=torch.ones(1))

    def ask() -> None:
        try:
            for _ in range(30):
                run.points, len(run)
        except Exception as error:  # the test's own report
            errors.append(error)

    threads = [threading.Thread(target=work, name=f"t{n}") for n, work in enumerate([add, add, ask, ask])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(run) == 600


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_may_ask_too():
    run = MemoryRun()
    run.add(Point("a"), Moment(), tensor=torch.ones(1))
    assert len(run) == 1
    pid = os.fork()
    if pid == 0:
        os._exit(0 if len(run) == 1 and str(run.points[0]) == "a:output" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_run_with_forwards_that_raised_is_not_complete():
    for failed in (0, 1):
        run = MemoryRun(Manifest())
        assert run.close(forwards=3, failed=failed).failed == failed
        assert run.complete is (failed == 0)


def test_a_summary_that_is_made_later_is_made_when_it_is_asked_for():
    run, made = MemoryRun(), []
    run.add(Point("a"), Moment(), summary=lambda: made.append(1) or summarize(torch.ones(3)))
    assert (len(run), made) == (1, [])
    assert run.summary("a").mean == 1
    assert made


def test_a_run_that_follows_another_is_empty_and_goes_on_counting():
    run = MemoryRun(Manifest(mode="x"))
    for step in range(3):
        run.add(Point("a"), Moment(step=step), tensor=torch.ones(1) * step)
    second = run.following()
    assert (len(second), second.manifest.mode, len(run)) == (0, "x", 3)
    second.add(Point("a"), Moment(step=3), tensor=torch.ones(1) * 3)
    third = second.following()
    assert third.close().records == 4
    assert [run.tensor("a", step=step).item() for step in range(3)] == [0, 1, 2]
    assert [m.step for m in second.moments] == [3]


def test_what_could_not_be_made_is_listed_and_said_once(caplog):
    run = MemoryRun()
    for step in range(3):
        run.lose(Point("a"), Moment(step=step, batch=step), "there was no room")
    run.lose(Point("b", "input", (0,)), Moment(step=1, batch=1), "there was no room")
    following = run.following()
    following.lose(Point("a"), Moment(step=7, batch=7), "there was no room")
    following.lose(Point("a"), Moment(step=8, batch=8), "the device is gone")
    done = following.close(forwards=9)
    assert done.dropped == [
        Dropped("a:output", 4, "there was no room", "step=0"),
        Dropped("b:input[0]", 1, "there was no room", "step=1"),
        Dropped("a:output", 1, "the device is gone", "step=8"),
    ]
    assert (done.records, following.complete) == (0, False)
    assert [record.getMessage().split(" is not recorded")[0] for record in caplog.records] == [
        "memory: a:output at step=0",
        "memory: a:output at step=8",
    ]


def test_a_run_that_lost_nothing_has_nothing_dropped():
    run = MemoryRun()
    assert (run.close(forwards=1).dropped, run.complete) == ([], True)
