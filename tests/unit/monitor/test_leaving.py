"""SIGTERM while somebody wants to leave in order, and when nobody does any more."""

import os
import signal
import threading
from contextlib import contextmanager

import pytest

from layerscope.monitor.leaving import leave_on_sigterm

pytestmark = pytest.mark.usefixtures("nobody_leaves")


@contextmanager
def leaving():
    release = leave_on_sigterm()
    try:
        yield release
    finally:
        release()


def killed_by(child):
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status)


def test_the_signal_becomes_an_exception_and_the_handler_goes():
    with pytest.raises(SystemExit) as left, leaving():
        os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_without_the_signal_nothing_is_left():
    with leaving(), leaving() as release:
        release()
        release()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_it_lasts_until_the_last_one_lets_go_whoever_came_first():
    first, second = leave_on_sigterm(), leave_on_sigterm()
    first()
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)
    third = leave_on_sigterm()
    second()
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGTERM)
    third()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_somebody_elses_handler_stays():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with leaving():
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_set_in_between_stays():
    with leaving():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_handler_of_ours_that_somebody_puts_back_is_as_good_as_none():
    with leaving():
        found = signal.getsignal(signal.SIGTERM)
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, found)
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os._exit(7)
    assert killed_by(child) == signal.SIGTERM


def test_other_threads_leave_signals_alone():
    found = []

    def block():
        with leaving():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def test_a_forked_child_dies_of_the_signal_as_it_always_did():
    with leaving():
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os._exit(7)
        assert killed_by(child) == signal.SIGTERM


def test_a_forked_child_may_want_to_leave_in_order_itself():
    with leaving():
        child = os.fork()
        if child == 0:
            try:
                leave_on_sigterm()
                os.kill(os.getpid(), signal.SIGTERM)
            except SystemExit as left:
                os._exit(left.code)
            finally:
                os._exit(7)
        _, status = os.waitpid(child, 0)
    assert os.WEXITSTATUS(status) == 143
