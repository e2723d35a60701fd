"""NVIDIA's own driver, called without letting go of the interpreter.

    launch = launcher(function, 0, stream, threads=128, shared=0, arguments=2)
    launch(address, count, programs)
    copy = copying(0)
    copy(to, source, size, stream)

Nothing here waits for the device, and a call takes two microseconds. To let go of the interpreter and get it back can
take milliseconds when another thread is busy.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

Launch = Callable[..., None]  # takes the kernel's arguments, a pointer as an address, and how many programs run it

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_HIDDEN = 4  # pointers that Triton's kernels take beside their arguments, by its version: memory that ours do not use


class _Config(ctypes.Structure):
    """A CUlaunchConfig."""

    _fields_ = (
        ("programs", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("how_many", ctypes.c_uint),
    )


def why_no_driver() -> str:
    """Say why the driver cannot be called; empty when it can."""
    try:
        _driver()
    except (OSError, AttributeError) as error:
        return f"NVIDIA's driver cannot be called ({error})"
    return ""


@cache
def _driver() -> Any:
    driver = ctypes.PyDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    address = ctypes.c_void_p
    driver.cuLaunchKernelEx.argtypes = (address, address, address, address)
    for copy in (driver.cuMemcpyDtoHAsync_v2, driver.cuMemcpyDtoDAsync_v2):
        copy.argtypes = (address, address, ctypes.c_size_t, address)
    return driver


def launcher(function: int, device: int, stream: int, *, threads: int, shared: int, arguments: int) -> Launch:
    """Return the launch of a kernel loaded on a device, whose arguments are 64 bits wide; for one thread at a time.

    The stream is one of the device's, which must be the current one when it is launched.
    """
    call = _driver().cuLaunchKernelEx
    width = ctypes.sizeof(ctypes.c_int64)
    # The arguments and, behind them, the configuration, which begins with the number of programs: one call writes all.
    room = (ctypes.c_int64 * (arguments + ctypes.sizeof(_Config) // width + _HIDDEN))()
    first = ctypes.addressof(room)
    config = _Config.from_buffer(room, arguments * width)
    config.programs[:], config.threads[:] = (1, 1, 1), (threads, 1, 1)
    config.shared, config.stream = shared, stream
    hidden = range(len(room) - _HIDDEN, len(room))
    pointers = (ctypes.c_void_p * (arguments + _HIDDEN))(*(first + at * width for at in (*range(arguments), *hidden)))
    write, configured = struct.Struct(f"{arguments}qI").pack_into, ctypes.addressof(config)

    def refused(code: int, programs: int) -> None:
        what = f"to launch a kernel of {programs} programs"
        _insist(code, device, what, call, configured, function, pointers, None)

    def launch(*numbers: int) -> None:
        write(room, 0, *numbers)
        code = call(configured, function, pointers, None)
        if code:
            refused(code, numbers[-1])

    return launch


def copying(device: int, *, on_device: bool = False) -> Callable[[int, int, int, int], None]:
    """Return the copy from a device to page-locked memory, or within the device: to, from, bytes, stream.

    torch's takes tensors, and to make one of each room costs more than the copy.
    """
    call = _driver().cuMemcpyDtoDAsync_v2 if on_device else _driver().cuMemcpyDtoHAsync_v2

    def copy(to: int, source: int, size: int, stream: int) -> None:
        code = call(to, source, size, stream)
        if code:
            where = "on the device" if on_device else "to the host"
            _insist(code, device, f"a copy of {size} bytes {where}", call, to, source, size, stream)

    return copy


def _insist(code: int, device: int, what: str, call: Any, *arguments: Any) -> None:
    """Repeat a call once, if this thread was only new to the device, and raise otherwise."""
    if code == _NO_CONTEXT:
        _enter(device)
        code = call(*arguments)
    if code:
        raise RuntimeError(f"the driver refused {what}: CUDA error {code}")


def allow_captures() -> None:
    """Have what this thread asks of the driver not spoil a CUDA graph that another thread captures."""
    relaxed = ctypes.c_int(2)
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


def _enter(device: int) -> None:
    """Have this thread work on a device as the rest of the process does; one that is new to CUDA does not yet."""
    driver, handle, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    code = driver.cuDeviceGet(ctypes.byref(handle), device)
    code = code or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    code = code or driver.cuCtxSetCurrent(context)
    if code:
        raise RuntimeError(f"the driver does not let this thread work on device {device}: CUDA error {code}")
