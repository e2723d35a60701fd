"""The driver is called with what its C interface says, byte by byte; a driver of our own in C's clothes reads it."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace

import pytest

from layerscope.stats import driver

FUNCTION, STREAM, CONTEXT = 0x7F00_0000_1230, 0x7F00_0000_4560, 0x7F00_0000_7890
CONFIG = struct.Struct("=3I3II4xQQI4x")  # cuda.h's CUlaunchConfig: grid, block, shared, stream, attributes, how many
WORD = struct.Struct("=q")
HIDDEN = 4
INVALID_CONTEXT, OUT_OF_MEMORY = 201, 2


class Driver:
    """Takes down what it is called with; `codes` are what the next calls return, then success."""

    def __init__(self, *, arguments=0):
        self.arguments = arguments
        self.codes = []
        self.launches, self.copies, self.entered = [], [], []
        address, number = ctypes.c_void_p, ctypes.c_int
        calls = {
            "cuLaunchKernelEx": (self.launch, address, address, address, address),
            "cuMemcpyDtoHAsync_v2": (self.copy, address, address, ctypes.c_size_t, address),
            "cuMemcpyDtoDAsync_v2": (self.copy, address, address, ctypes.c_size_t, address),
            "cuDeviceGet": (self.device, address, number),
            "cuDevicePrimaryCtxRetain": (self.retain, address, number),
            "cuCtxSetCurrent": (self.set_current, address),
        }
        for name, (call, *kinds) in calls.items():
            setattr(self, name, ctypes.PYFUNCTYPE(number, *kinds)(call))

    def code(self):
        return self.codes.pop(0) if self.codes else 0

    def launch(self, config, function, pointers, extra):
        count = self.arguments + HIDDEN
        places = struct.unpack(f"={count}Q", ctypes.string_at(pointers, 8 * count))
        words = [WORD.unpack(ctypes.string_at(place, 8))[0] for place in places]
        self.launches.append((CONFIG.unpack(ctypes.string_at(config, CONFIG.size)), function, words, extra))
        return self.code()

    def copy(self, to, source, size, stream):
        self.copies.append((to, source, size, stream))
        return self.code()

    def device(self, handle, ordinal):
        ctypes.c_int.from_address(handle).value = 100 + ordinal
        return 0

    def retain(self, context, handle):
        ctypes.c_void_p.from_address(context).value = CONTEXT + handle
        return 0

    def set_current(self, context):
        self.entered.append(context)
        return 0


@pytest.fixture
def theirs(monkeypatch):
    """The driver that is called in this test."""
    fake = Driver()
    monkeypatch.setattr(driver, "_driver", lambda: fake)
    return fake


def launching(theirs, *, arguments, device=0, shared=0):
    theirs.arguments = arguments
    return driver.launcher(FUNCTION, device, STREAM, threads=128, shared=shared, arguments=arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (7,),
        ((1 << 47) - 256, 3, -1),
        (-(1 << 63), (1 << 63) - 1, 0, 1 << 40, (1 << 32) + 5, *range(-3, 4)),
    ],
    ids=len,
)
def test_a_launch_has_its_grid_its_stream_and_every_argument(theirs, arguments):
    launch = launching(theirs, arguments=len(arguments), shared=4096)
    launch(*arguments, 132)
    config = (132, 1, 1, 128, 1, 1, 4096, STREAM, 0, 0)
    assert theirs.launches == [(config, FUNCTION, [*arguments, *[0] * HIDDEN], None)]


def test_the_next_launch_has_its_own_numbers_and_nothing_of_the_last(theirs):
    launch = launching(theirs, arguments=3)
    launch(1 << 45, -5, 9, 4_000_000_000)
    launch(1 << 41, 8, -9, 1)
    assert [(config[0], words[:3]) for config, _, words, _ in theirs.launches] == [
        (4_000_000_000, [1 << 45, -5, 9]),
        (1, [1 << 41, 8, -9]),
    ]
    assert {config[1:] for config, _, _, _ in theirs.launches} == {(1, 1, 128, 1, 1, 0, STREAM, 0, 0)}
    assert all(words[3:] == [0] * HIDDEN for _, _, words, _ in theirs.launches)


def test_two_launches_of_one_kernel_do_not_share_their_memory(theirs):
    first, second = (launching(theirs, arguments=1) for _ in range(2))
    first(11, 1)
    second(22, 2)
    first(33, 3)
    assert [(config[0], words[0]) for config, _, words, _ in theirs.launches] == [(1, 11), (2, 22), (3, 33)]


@pytest.mark.parametrize(
    "numbers",
    [(1,), (1, 2, 3), (1.5, 2), (1 << 63, 2), (1, -1), (1, 1 << 32)],
    ids=["too few", "too many", "not whole", "too large", "less than no programs", "too many programs"],
)
def test_arguments_that_do_not_fit_are_refused_before_the_driver_hears_of_them(theirs, numbers):
    launch = launching(theirs, arguments=1)
    with pytest.raises((struct.error, TypeError, OverflowError)):
        launch(*numbers)
    assert theirs.launches == []
    launch(7, 1)
    assert theirs.launches[0][2][0] == 7


def test_a_launch_that_is_refused_names_the_error(theirs):
    theirs.codes = [OUT_OF_MEMORY]
    with pytest.raises(RuntimeError, match=r"refused to launch a kernel of 132 programs: CUDA error 2$"):
        launching(theirs, arguments=1)(5, 132)
    assert (len(theirs.launches), theirs.entered) == (1, [])


def test_a_thread_that_is_new_to_the_device_enters_it_and_launches_again(theirs):
    theirs.codes = [INVALID_CONTEXT]
    launching(theirs, arguments=1, device=3)(5, 132)
    assert theirs.entered == [CONTEXT + 103]
    assert len(theirs.launches) == 2
    assert theirs.launches[0] == theirs.launches[1]


def test_a_device_that_cannot_be_entered_is_tried_once(theirs):
    theirs.codes = [INVALID_CONTEXT, INVALID_CONTEXT]
    with pytest.raises(RuntimeError, match="CUDA error 201"):
        launching(theirs, arguments=0)(1)
    assert (len(theirs.launches), len(theirs.entered)) == (2, 1)


def test_a_copy_has_where_to_where_from_how_much_and_in_which_stream(theirs):
    driver.copying(0)(1 << 46, (1 << 47) - 512, 5 << 32, STREAM)
    assert theirs.copies == [(1 << 46, (1 << 47) - 512, 5 << 32, STREAM)]


def test_addresses_and_sizes_are_handed_over_whole(monkeypatch):
    """Without being told, ctypes takes a number for a C int."""
    names = ("cuLaunchKernelEx", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoDAsync_v2")
    library = SimpleNamespace(**{name: SimpleNamespace() for name in names})
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: library)
    told = driver._driver.__wrapped__()
    for name in names:
        assert [ctypes.sizeof(kind) for kind in getattr(told, name).argtypes] == [8] * 4


def test_a_copy_enters_the_device_where_it_must_and_names_its_error(theirs):
    copy = driver.copying(1)
    theirs.codes = [INVALID_CONTEXT, 0, OUT_OF_MEMORY]
    copy(1 << 46, 1 << 47, 64, STREAM)
    assert (len(theirs.copies), theirs.entered) == (2, [CONTEXT + 101])
    with pytest.raises(RuntimeError, match=r"refused a copy of 65 bytes to the host: CUDA error 2$"):
        copy(1 << 46, 1 << 47, 65, STREAM)


def test_the_memory_of_a_launch_lives_as_long_as_the_launch(theirs):
    launch = launching(theirs, arguments=2)
    rooms = [ctypes.create_string_buffer(b"\xff" * 256) for _ in range(200)]  # what would lie in freed memory
    launch(1 << 44, -1, 2)
    del rooms
    assert theirs.launches[0][2] == [1 << 44, -1, *[0] * HIDDEN]


# Where there is no driver -----------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch):
    """What loading the library gives in this test: a call of its name."""
    driver._driver.cache_clear()
    yield lambda load: monkeypatch.setattr(ctypes, "PyDLL", load)
    driver._driver.cache_clear()


def test_a_missing_library_is_said(library):
    def load(name):
        raise OSError(f"{name}: cannot open shared object file")

    library(load)
    assert driver.why_no_driver() == ("NVIDIA's driver cannot be called (libcuda.so.1: cannot open shared object file)")


def test_a_driver_too_old_for_the_call_is_said(library):
    class Old:
        def __init__(self, name):
            self.cuMemcpyDtoHAsync_v2 = type("Call", (), {})()

    library(Old)
    assert "has no attribute 'cuLaunchKernelEx'" in driver.why_no_driver()


def test_a_driver_that_is_there_is_no_reason(library):
    library(lambda name: Driver())
    assert driver.why_no_driver() == ""
    assert driver._driver() is driver._driver()
