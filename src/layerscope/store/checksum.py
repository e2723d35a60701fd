"""crc32c, the checksum of every tensor and every journal line.

    crc32c(b"123456789")        # 0xE3069283

google-crc32c computes it in hardware (26 GB/s on one core); without it a table in numpy gives the same
number at about 0.8 GB/s.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import cache, lru_cache
from queue import SimpleQueue
from typing import Any, final

import numpy as np
import numpy.typing as npt

__all__ = ["Alongside", "Bytes", "bytes_of", "crc32c", "crc32c_numpy", "text"]

Bytes = npt.NDArray[np.uint8]

# google-crc32c keeps the interpreter lock while it works: 1 MiB is 40 microseconds of somebody else's time.
_PIECE = 1 << 20

# Handing over to another thread and back takes as long as summing this much.
_WORTH_A_THREAD = 512 << 10


def bytes_of(data: Any) -> Bytes:
    """View any C-contiguous buffer as a flat array of bytes, without a copy."""
    if isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1 and data.flags.c_contiguous:
        return data
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("the bytes of a tensor must come as one C-contiguous buffer")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def crc32c(data: Any, value: int = 0) -> int:
    """Return the crc32c of `data`, continued from `value`, the crc32c of what came before it."""
    flat = bytes_of(data)
    extend = _extend()
    for start in range(0, flat.size, _PIECE):
        value = extend(value, flat[start : start + _PIECE])
    return value


def text(value: int) -> str:
    """Write a checksum as it stands in the files: eight hexadecimal digits."""
    return f"{value:08x}"


@final
class Alongside:
    """Sums bytes in a thread of its own while the caller does something else with them: writes them, for one.

    Of a 3 MiB tensor on its way to a tmpfs this hides the whole cost, an eighth of the time (and where both processors
    are busy it gains nothing and loses nothing). Not for two callers at once.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[Bytes | None] = SimpleQueue()
        self._answers: SimpleQueue[int | BaseException] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def of(self, data: Bytes) -> Callable[[], int]:
        """Begin to sum, and return what waits for the sum; it must be called before the next begins."""
        if data.size < _WORTH_A_THREAD or not self._is_started():
            return lambda: crc32c(data)
        self._asked.put(data)
        return self._answer

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread = None

    def _is_started(self) -> bool:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="layerscope-checksum", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads, or an interpreter that is ending
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while (data := self._asked.get()) is not None:
            try:
                self._answers.put(crc32c(data))
            except BaseException as error:  # it belongs to whoever asked
                self._answers.put(error)
            del data

    def _answer(self) -> int:
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer


@cache
def _extend() -> Callable[[int, Bytes], int]:
    try:
        with warnings.catch_warnings():  # it warns when it has only its slow form, which is not used then
            warnings.simplefilter("ignore")
            import google_crc32c
    except ImportError:
        return lambda value, piece: crc32c_numpy(piece, value)
    if google_crc32c.implementation != "c":  # its pure Python form is a thousand times slower than ours
        return lambda value, piece: crc32c_numpy(piece, value)
    extend: Callable[[int, Bytes], int] = google_crc32c.extend
    return extend


# The same in numpy ------------------------------------------------------------------------------
#
# A CRC is linear over GF(2): pieces can be summed apart and joined, where joining shifts the earlier
# sum past the length of the later piece. So the message is cut into lanes that step side by side, four
# bytes a step, and the lanes' sums are joined pairwise.

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected
_ALL = 0xFFFFFFFF
_SHORT = 2048  # bytes below which a plain loop beats the set-up of the lanes


def crc32c_numpy(data: Any, value: int = 0) -> int:
    """Return what `crc32c` returns, with numpy alone."""
    flat = bytes_of(data)
    state = value ^ _ALL
    while flat.size >= _SHORT:
        lanes = 1 << min(14, (flat.size // 64).bit_length() - 1)
        width = flat.size // (4 * lanes) * 4
        body, flat = flat[: lanes * width], flat[lanes * width :]
        state = _shifted(state, body.size) ^ _joined(_lane_sums(body.reshape(lanes, width)), width)
    table = _byte_list()
    for byte in flat.tolist():
        state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state ^ _ALL


def _lane_sums(lanes: Bytes) -> npt.NDArray[np.uint32]:
    high, low = _word_tables()
    sums = np.zeros(lanes.shape[0], np.uint32)
    # Transposed once, so that each step reads one stretch of memory.
    for column in np.ascontiguousarray(lanes.view("<u4").T):
        sums ^= column
        sums = np.take(low, sums & np.uint32(0xFFFF)) ^ np.take(high, sums >> np.uint32(16))
    return sums


def _joined(sums: npt.NDArray[np.uint32], length: int) -> int:
    while sums.size > 1:
        tables = _shift_tables(length)
        early = sums[0::2]
        late = sums[1::2]
        sums = late.copy()
        for i, table in enumerate(tables):
            sums ^= table[(early >> np.uint32(8 * i)) & np.uint32(0xFF)]
        length *= 2
    return int(sums[0])


def _shifted(state: int, length: int) -> int:
    return _times(_shift_matrix(length), state)


@cache
def _byte_table() -> npt.NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), table >> np.uint32(1))
    return table


@cache
def _byte_list() -> list[int]:
    return [int(x) for x in _byte_table()]


@cache
def _word_tables() -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Two tables of 65536: what the upper and the lower half of a 32-bit word become four bytes later."""
    step = _byte_table()
    half = np.arange(1 << 16, dtype=np.uint32)

    def after(state: npt.NDArray[np.uint32], nbytes: int) -> npt.NDArray[np.uint32]:
        for _ in range(nbytes):
            state = step[state & np.uint32(0xFF)] ^ (state >> np.uint32(8))
        return state

    return after(half, 2), after(half, 4)


@lru_cache(maxsize=256)
def _shift_matrix(length: int) -> tuple[int, ...]:
    """The 32 images of the single bits when `length` zero bytes follow."""
    step = _byte_table()
    power = tuple(int(step[(1 << i) & 0xFF]) ^ ((1 << i) >> 8) for i in range(32))
    result = tuple(1 << i for i in range(32))
    while length:
        if length & 1:
            result = tuple(_times(power, column) for column in result)
        power = tuple(_times(power, column) for column in power)
        length >>= 1
    return result


@lru_cache(maxsize=256)
def _shift_tables(length: int) -> tuple[npt.NDArray[np.uint32], ...]:
    matrix = np.array(_shift_matrix(length), np.uint32)
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    return tuple(
        np.bitwise_xor.reduce(np.where(bits, matrix[8 * i : 8 * i + 8], 0), axis=1).astype(np.uint32) for i in range(4)
    )


def _times(matrix: tuple[int, ...], vector: int) -> int:
    total = 0
    for column in matrix:
        if vector & 1:
            total ^= column
        vector >>= 1
    return total
