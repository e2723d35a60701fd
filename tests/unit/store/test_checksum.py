"""checksum.py: crc32c, against the numbers of RFC 3720 and against google-crc32c."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pytest

from layerscope.store.checksum import bytes_of, crc32c, text

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
def test_known_values(data, value):
    assert crc32c(data) == value


@pytest.mark.parametrize("size", [1, 63, 65_537, 1 << 20, (1 << 20) + 5, (3 << 20) + 1])
def test_pieces_and_parts_give_the_number_of_the_whole(size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    expected = google_crc32c.value(data.tobytes())
    cut = size // 3
    assert crc32c(data) == crc32c(data[cut:], crc32c(data[:cut])) == expected


def test_a_single_flipped_bit_changes_it():
    data = np.zeros(5000, np.uint8)
    before = crc32c(data)
    data[4321] ^= 16
    assert crc32c(data) != before


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
