"""All that mmkv asks of CUDA, through CuPy. Importing this module needs neither CuPy nor CUDA.

CuPy clears the error that a failed CUDA call leaves behind before it raises, and its runtime is its own, so that no
later call of the application reports it.
"""

from __future__ import annotations

import contextlib
import functools
import os
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mmkv.buffer import Buffer
from mmkv.driver import available, copy_batch, cupy_module, current, device_count, runtime_module
from mmkv.errors import MmkvError
from mmkv.layout import FOREIGN_DTYPES, dtype_bytes

__all__ = [
    "Event",
    "allocate",
    "available",
    "compile_kernel",
    "copy_all",
    "copy_aside",
    "copy_async",
    "current",
    "current_ordinal",
    "device_count",
    "device_of_pointer",
    "from_dlpack",
    "launch",
    "new_stream",
    "pinned",
    "producer_events",
    "record",
    "register_host",
    "scratch",
    "stream_handle",
    "synchronize",
    "trim",
    "unregister_host",
    "upload",
]

_NOT_READY = 600
_REGISTER_PORTABLE_MAPPED = 1 | 2
_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3
# An event is waited for with the thread asleep: a spinning one would take a core from the engine.
_BLOCKING_NO_TIMING = 1 | 2
# From so many copies on a batch costs the host less than one call for each.
_LEAST_BATCH = 3
_scratch_devices: set[int] = set()
# CUDA's events that no `Event` stands for at the moment, by device.
_idle_events: dict[int, list[int]] = {}


# --- the current device ---------------------------------------------------------------------------------------------


def current_ordinal() -> int:
    """The device that is current on this thread."""
    return int(runtime_module().getDevice())


def synchronize(device: int) -> None:
    """Wait until all work so far on a device is done."""
    with current(device):
        runtime_module().deviceSynchronize()


# --- streams and events ---------------------------------------------------------------------------------------------


def stream_handle(stream: Any) -> int:
    """The `cudaStream_t` of a CuPy stream, a Torch stream, an object with `__cuda_stream__`, or of a handle itself.

    Raises
    ------
    TypeError
        The object is no stream.
    """
    if isinstance(stream, int | np.integer) and not isinstance(stream, bool):
        if stream < 0:
            raise TypeError(f"{stream!r} is no handle of a CUDA stream: it is negative")
        return int(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    raise TypeError(
        f"{stream!r} is no CUDA stream: give a CuPy or Torch stream, what speaks __cuda_stream__, or a handle as an int"
    )


def _device_of_stream(stream: Any) -> int | None:
    for name in ("device_id", "device_index"):
        ordinal = getattr(stream, name, None)
        if isinstance(ordinal, int) and ordinal >= 0:
            return ordinal
    return None


def _producer_streams(devices: Collection[int], stream: Any) -> dict[int, int]:
    """The handle of the producer's stream on each device that has one."""
    if stream is None:
        return {}
    if isinstance(stream, Mapping):
        for device in stream:
            if not isinstance(device, int):
                raise TypeError(f"a mapping of streams has device ordinals as its keys, not {device!r}")
        return {device: stream_handle(stream[device]) for device in devices if stream.get(device) is not None}
    handle = stream_handle(stream)
    owner = _device_of_stream(stream)
    if owner is None:
        if len(devices) > 1:
            raise ValueError(
                f"the layers lie on the devices {sorted(devices)} and {stream!r} does not say on which one it is: "
                "give a mapping of device ordinals to streams"
            )
        owner = next(iter(devices), None)
    return {current_ordinal() if owner is None else owner: handle}


class Event:
    """A point in a stream's order that a host thread or another stream can wait for. `record` makes one."""

    __slots__ = ("__weakref__", "_handle", "_pid", "device")

    def __init__(self, device: int) -> None:
        """Make an event on a device, which is current."""
        self.device = device
        self._pid = os.getpid()
        self._handle = 0
        idle = _idle_events.setdefault(device, [])
        try:
            self._handle = idle.pop()
        except IndexError:
            self._handle = runtime_module().eventCreateWithFlags(_BLOCKING_NO_TIMING)

    def __repr__(self) -> str:
        return f"Event(device={self.device})"

    def synchronize(self) -> None:
        """Wait, without the interpreter's lock, until the work before the event is done."""
        with current(self.device):
            runtime_module().eventSynchronize(self._handle)

    def done(self) -> bool:
        """Whether the work before the event is done."""
        with current(self.device):
            status = runtime_module().eventQuery(self._handle)
        if status not in (0, _NOT_READY):
            raise MmkvError(f"the work on device {self.device} failed with the CUDA error {status}")
        return bool(status == 0)

    def wait_on(self, stream: int) -> None:
        """Let a stream wait, not the host; the handle 0 is the default stream of the event's device."""
        with current(self.device):
            runtime_module().streamWaitEvent(stream, self._handle)

    def __del__(self) -> None:
        # Kept for the next event: streams that wait for this one do not look at it again. Not in a forked child.
        if self._handle and self._pid == os.getpid():
            _idle_events.setdefault(self.device, []).append(self._handle)


def record(device: int, stream: int) -> Event:
    """An event after all that a stream of the device, given by its handle, has been given so far."""
    with current(device):
        event = Event(device)
        runtime_module().eventRecord(event._handle, stream)
    return event


def producer_events(devices: Collection[int], stream: Any) -> tuple[Event, ...]:
    """Events after the work that produces (or still uses) arrays on `devices`.

    Parameters
    ----------
    devices : collection of int
        The devices of the arrays; none for host arrays.
    stream : stream, mapping of int to stream, or None
        The producer's stream, or one for each device. For a device without one this call waits until all the device's
        work so far is done, so that there is nothing more to wait for.
    """
    handles = _producer_streams(devices, stream)
    events = tuple(record(device, handle) for device, handle in handles.items())
    for device in devices:
        if device not in handles:
            synchronize(device)
    return events


def new_stream(device: int) -> Any:
    """A CuPy stream on a device that does not wait for the default stream."""
    with current(device):
        return cupy_module().cuda.Stream(non_blocking=True)


# --- memory ---------------------------------------------------------------------------------------------------------


@functools.cache
def _device_pool() -> Any:
    # Apart from the application's pool: what is freed here has been waited for, so that no stream's order matters.
    return cupy_module().cuda.MemoryPool()


@functools.cache
def _pinned_pool() -> Any:
    return cupy_module().cuda.PinnedMemoryPool()


@functools.cache
def _own_stream(device: int) -> Any:
    return new_stream(device)


def scratch(device: int, size: int) -> Any:
    """Fresh device memory, which goes back to mmkv's own pool with its last reference. The device is current."""
    _scratch_devices.add(device)
    # CuPy's pool keeps a free list for each current stream; with a stream of our own there is one.
    with _own_stream(device):
        return _device_pool().malloc(size)


def pinned(size: int) -> Any:
    """Page-locked host memory: `.ptr` and the buffer protocol. It goes back to mmkv's pool with its last reference."""
    # The pool keeps a free list for each size: powers of two keep them few.
    return _pinned_pool().malloc(1 << max(size - 1, 511).bit_length())


def trim() -> None:
    """Give memory that mmkv keeps for its next use back to the devices."""
    for device in tuple(_scratch_devices):
        with current(device):
            _device_pool().free_all_blocks()
    for device, handles in tuple(_idle_events.items()):
        with current(device), contextlib.suppress(IndexError):
            while True:
                runtime_module().eventDestroy(handles.pop())
    if _pinned_pool.cache_info().currsize:
        _pinned_pool().free_all_blocks()


def allocate(shape: tuple[int, ...], dtype: str, device: int) -> Any:
    """A zeroed CuPy array; of unsigned bytes or words where NumPy by itself lacks the dtype."""
    cupy = cupy_module()
    # Also where another package has taught NumPy the type.
    numpy_dtype = np.dtype(f"uint{8 * dtype_bytes(dtype)}" if dtype in FOREIGN_DTYPES else dtype)
    with current(device):
        array = cupy.zeros(shape, dtype=numpy_dtype)
        cupy.cuda.get_current_stream().synchronize()
    return array


def copy_aside(buffer: Buffer, stream: Any) -> Buffer:
    """Copy a device buffer to memory of mmkv's own, in the order of the producer's stream.

    An event that is recorded on that stream afterwards covers the copy. Without a stream on the buffer's device the
    host waits for the device and for the copy.

    `stream` is as for `producer_events`.
    """
    if buffer.device is None:
        raise ValueError("a host buffer is not copied aside on a device")
    handle = _producer_streams((buffer.device,), stream).get(buffer.device)
    runtime = runtime_module()
    with current(buffer.device):
        memory = scratch(buffer.device, max(buffer.bytes, 1))
        if handle is None:
            runtime.deviceSynchronize()
        on = _own_stream(buffer.device).ptr if handle is None else handle
        runtime.memcpyAsync(memory.ptr, buffer.address, buffer.bytes, _DEVICE_TO_DEVICE, on)
        if handle is None:
            runtime.streamSynchronize(on)
    return Buffer(memory.ptr, buffer.bytes, buffer.shape, buffer.dtype, buffer.device, True, memory)


def from_dlpack(array: Any) -> Any:
    """A CuPy view of an array on a device that speaks DLPack."""
    return cupy_module().from_dlpack(array)


def device_of_pointer(address: int) -> int:
    """The device that memory at an address lies on."""
    return int(runtime_module().pointerGetAttributes(address).device)


# --- what a store needs ---------------------------------------------------------------------------------------------


def register_host(address: int, size: int) -> None:
    """Page-lock host memory for all devices, so that they reach it at the same address. A device must be current.

    Costs 0.02 to 0.03 s a GB for pages that exist, 0.2 s a GB for others.

    Raises
    ------
    MmkvError
        The driver refuses it; the text says why. No error is left behind in CUDA.
    """
    runtime = runtime_module()
    try:
        runtime.hostRegister(address, size, _REGISTER_PORTABLE_MAPPED)
    except runtime.CUDARuntimeError as error:
        raise MmkvError(f"cudaHostRegister refused {size} bytes: {error}") from error
    if runtime.pointerGetAttributes(address).devicePointer != address:
        runtime.hostUnregister(address)
        raise MmkvError("the device reaches page-locked memory at another address than the host: no unified addresses")


def unregister_host(address: int) -> None:
    """Undo `register_host`. A device must be current."""
    runtime_module().hostUnregister(address)


def copy_async(target: int, source: int, size: int, stream: int, *, to_device: bool) -> None:
    """Give a stream a copy between page-locked memory and its device."""
    kind = _HOST_TO_DEVICE if to_device else _DEVICE_TO_HOST
    runtime_module().memcpyAsync(target, source, size, kind, stream)


def copy_all(
    targets: Sequence[int], sources: Sequence[int], sizes: array[int], stream: int, *, to_device: bool
) -> None:
    """Give a stream copies between page-locked memory and its device, which is current.

    They keep no order among themselves. Costs the host about a microsecond each, three where the driver is older than
    CUDA 12.8.
    """
    if len(sizes) >= _LEAST_BATCH and copy_batch(array("Q", targets), array("Q", sources), sizes, stream):
        return
    kind = _HOST_TO_DEVICE if to_device else _DEVICE_TO_HOST
    copy = runtime_module().memcpyAsync
    for target, source, size in zip(targets, sources, sizes, strict=True):
        copy(target, source, size, kind, stream)


def upload(words: npt.NDArray[np.int64], device: int, stream: Any) -> tuple[int, object]:
    """Copy a table to the device in the order of a CuPy stream. The device must be current.

    Returns
    -------
    address : int
        The table on the device.
    keep : object
        What must live until the stream has used the table.
    """
    staged = pinned(words.nbytes)
    np.frombuffer(staged, dtype=np.int64, count=words.size)[:] = words
    memory = scratch(device, words.nbytes)
    copy_async(memory.ptr, staged.ptr, words.nbytes, stream.ptr, to_device=True)
    return memory.ptr, (staged, memory)


def compile_kernel(source: str, name: str, device: int) -> Any:
    """A CuPy function, compiled for a device.

    Raises
    ------
    MmkvError
        There is no working compiler (NVRTC); the text says why.
    """
    cupy = cupy_module()
    with current(device):
        try:
            # Compiled here; without a look-up at every launch.
            function = cupy.RawKernel(source, name).kernel
        except (RuntimeError, OSError, ImportError, cupy.cuda.compiler.CompileException) as error:
            raise MmkvError(f"a kernel cannot be compiled: {type(error).__name__}: {error}") from error
    return function


def launch(kernel: Any, blocks: int, threads: int, arguments: tuple[int, ...], stream: Any) -> None:
    """Give a CuPy stream a kernel with 64-bit arguments. The stream's device must be current."""
    kernel((blocks,), (threads,), tuple(map(np.int64, arguments)), stream=stream)
