"""How CUDA is reached: CuPy and its runtime, and the driver by ctypes for what CuPy lacks. Neither is imported here."""

from __future__ import annotations

import ctypes
import functools
import threading
from array import array
from collections.abc import Callable
from typing import Any

from mmkv.errors import MmkvError

__all__ = ["available", "copy_batch", "cupy_module", "current", "device_count", "runtime_module"]

# The version of the driver's interface whose batches name the copy that fails; later drivers keep it.
_BATCH_VERSION = 12080
_IN_STREAM_ORDER = 1


def cupy_module() -> Any:
    """CuPy.

    Raises
    ------
    MmkvError
        It is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise MmkvError(
            f"device arrays need CuPy, which cannot be imported ({error}): install cupy-cuda13x or cupy-cuda12x"
        ) from error
    return cupy


@functools.cache
def runtime_module() -> Any:
    """CuPy's binding of the CUDA runtime, looked up once."""
    return cupy_module().cuda.runtime


def available() -> bool:
    """Whether CuPy is installed and sees a CUDA device."""
    return device_count() > 0


def device_count() -> int:
    """How many CUDA devices CuPy sees; 0 where there is no CuPy, no driver or no device."""
    try:
        import cupy
    except ImportError:
        return 0
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


@functools.cache
def _libcuda() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    _checked(library.cuInit(0), "cuInit")
    return library


def _checked(status: int, call: str) -> None:
    if status != 0:
        raise MmkvError(f"the CUDA driver refused {call} with the error {status}")


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """The context that the runtime uses on a device. It is kept for the life of the process, as the runtime does."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _checked(_libcuda().cuDeviceGet(ctypes.byref(handle), device), f"device {device}")
    _checked(_libcuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"a context on device {device}")
    return context


class _Thread(threading.local):
    """The device that this thread has made current, here."""

    device: int | None = None


_thread = _Thread()


class current:  # noqa: N801 (used like a function)
    """Make a device current on this thread, and the former one again on leaving.

    Pushes the device's context instead of setting the device, so that a thread without a context has none afterwards:
    to set device 0 again would make a context of some hundred MB there. Within itself it costs next to nothing.
    """

    __slots__ = ("_device", "_former", "_pushed")

    def __init__(self, device: int) -> None:
        self._device = device
        self._former: int | None = None
        self._pushed = False

    def __enter__(self) -> None:
        former = _thread.device
        if former != self._device:
            _checked(_libcuda().cuCtxPushCurrent_v2(_primary_context(self._device)), f"device {self._device}")
            self._former, self._pushed = former, True
            _thread.device = self._device

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            _thread.device = self._former
            _libcuda().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_BATCH_PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p),
)
_attributes = _Attributes(_IN_STREAM_ORDER, _Location(), _Location(), 0)
_first = ctypes.c_size_t(0)
_ATTRIBUTES, _FIRST = ctypes.addressof(_attributes), ctypes.addressof(_first)


@functools.cache
def _batch_call() -> Callable[..., int] | None:
    """`cuMemcpyBatchAsync`, `None` where the driver is older than that."""
    find = getattr(_libcuda(), "cuGetProcAddress_v2", None)
    if find is None:
        return None
    found, outcome = ctypes.c_void_p(), ctypes.c_int()
    status = find(b"cuMemcpyBatchAsync", ctypes.byref(found), _BATCH_VERSION, ctypes.c_uint64(0), ctypes.byref(outcome))
    if status != 0 or not found.value:
        return None
    return _BATCH_PROTOTYPE(found.value)


def copy_batch(targets: array[int], sources: array[int], sizes: array[int], stream: int) -> bool:
    """Give a stream copies in one call, about a microsecond each; they keep no order among themselves.

    Returns
    -------
    bool
        Whether all were taken. If not, some may have been: give them to the stream one by one.
    """
    call = _batch_call()
    if call is None:
        return False
    failed = ctypes.c_size_t(0)
    status = call(
        targets.buffer_info()[0], sources.buffer_info()[0], sizes.buffer_info()[0], len(sizes),
        _ATTRIBUTES, _FIRST, 1, ctypes.addressof(failed), stream,
    )  # fmt: skip
    return status == 0
