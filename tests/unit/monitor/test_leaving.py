"""SIGTERM inside the block, and outside it."""

import os
import signal
import threading

import pytest

from layerscope.monitor.leaving import leaving_on_sigterm


def test_the_signal_becomes_an_exception_and_the_handler_goes():
    with pytest.raises(SystemExit) as left, leaving_on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
    assert left.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_without_the_signal_nothing_is_left():
    with leaving_on_sigterm(), leaving_on_sigterm():
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_somebody_elses_handler_stays():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with leaving_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_set_inside_the_block_stays():
    with leaving_on_sigterm():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_other_threads_leave_signals_alone():
    found = []

    def block():
        with leaving_on_sigterm():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def test_a_forked_child_dies_of_the_signal_as_it_always_did():
    with leaving_on_sigterm():
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os._exit(7)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
