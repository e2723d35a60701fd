"""checksum.py: crc32c, against the numbers of RFC 3720 and against google-crc32c."""

from __future__ import annotations

import sys
import threading
import time

import google_crc32c
import numpy as np
import pytest

from asserts import left_open
from layerscope.store import checksum
from layerscope.store.checksum import Alongside, bytes_of, crc32c, crc32c_numpy, text

# RFC 3720, appendix B.4, and the check value of the CRC catalogue.
KNOWN = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


@pytest.mark.parametrize(("data", "value"), KNOWN)
@pytest.mark.parametrize("function", [crc32c, crc32c_numpy])
def test_known_values(function, data, value):
    assert function(data) == value


@pytest.mark.parametrize("size", [1, 63, 64, 2047, 2048, 2049, 65_537, 1 << 20, (1 << 20) + 5, (3 << 20) + 1])
def test_numpy_gives_googles_number_whole_and_in_two_parts(size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    expected = google_crc32c.value(data.tobytes())
    assert crc32c(data) == crc32c_numpy(data) == expected
    cut = size // 3
    assert crc32c_numpy(data[cut:], crc32c_numpy(data[:cut])) == expected
    assert crc32c(data[cut:], crc32c(data[:cut])) == expected


def test_a_single_flipped_bit_changes_it():
    data = np.zeros(5000, np.uint8)
    before = crc32c_numpy(data)
    data[4321] ^= 16
    assert crc32c_numpy(data) != before


@pytest.mark.parametrize("missing", ["absent", "slow"])
def test_without_google_the_number_is_the_same(monkeypatch, missing):
    if missing == "absent":
        monkeypatch.setitem(sys.modules, "google_crc32c", None)
    else:
        monkeypatch.setattr(google_crc32c, "implementation", "python")
        monkeypatch.setattr(google_crc32c, "extend", lambda *a: pytest.fail("the slow form was used"))
    checksum._extend.cache_clear()
    try:
        assert crc32c(b"123456789") == 0xE3069283
    finally:
        monkeypatch.undo()
        checksum._extend.cache_clear()


def test_any_contiguous_buffer_is_taken_without_a_copy():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    for data in (array, array.data, array.tobytes(), bytearray(array.tobytes())):
        assert bytes_of(data).tobytes() == array.tobytes()
    assert np.shares_memory(bytes_of(array), array)
    assert bytes_of(np.zeros((0, 3))).size == 0


def test_a_buffer_with_holes_is_refused():
    with pytest.raises(ValueError, match="C-contiguous"):
        bytes_of(np.arange(12).reshape(3, 4).T)


def test_it_is_written_with_eight_digits():
    assert text(0xAB) == "000000ab"


def test_alongside_gives_the_same_numbers_small_and_large():
    alongside = Alongside()
    for size in (0, 10, 1 << 20, 3 << 20, 7, 2 << 20):
        data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        assert alongside.of(data)() == google_crc32c.value(data.tobytes())
    alongside.close()


def test_alongside_really_works_beside_the_caller_and_its_thread_ends():
    alongside, data = Alongside(), np.zeros(1 << 20, np.uint8)
    opened = left_open()
    answer = alongside.of(data)
    assert len(opened()[0]) == 1
    assert answer() == google_crc32c.value(bytes(1 << 20))
    alongside.close()
    deadline = time.monotonic() + 5
    while opened()[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert opened()[0] == []


def test_alongside_hands_an_error_to_whoever_asked_and_goes_on(monkeypatch):
    alongside, data = Alongside(), np.zeros(1 << 20, np.uint8)
    with monkeypatch.context() as patch:
        patch.setattr(checksum, "_extend", lambda: 1 / 0)
        answer = alongside.of(data)
        with pytest.raises(ZeroDivisionError):
            answer()
    assert alongside.of(data)() == google_crc32c.value(bytes(1 << 20))
    alongside.close()


def test_alongside_sums_itself_where_no_thread_can_be_had(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert Alongside().of(np.zeros(1 << 20, np.uint8))() == google_crc32c.value(bytes(1 << 20))
