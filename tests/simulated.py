# ruff: noqa: N802 (the names are those of CUDA)
"""A CUDA of two devices and a kvikio, simulated on host memory: their rules, and work that is really asynchronous.

It refuses what CUDA refuses (a copy that spans two registrations, memory that is not page-locked, a kernel on a device
that is not current), so that the logic of the stores can be tested where there is no GPU.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from mmkv import device as cuda
from mmkv import driver
from mmkv.castagnoli import shift
from mmkv.checksum import crc32c
from mmkv.store import direct

DEVICES = 2
# Of all simulations: an event of an earlier one may be handed back to a later one, where it must not be another's.
_handles = itertools.count(1000)


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class OutOfRange(Exception):
    pass


class _Queue:
    """A stream: a thread that does its work in order."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="simulated-stream", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        for job in iter(self.jobs.get, None):
            try:
                job()
            except Exception as error:
                self.error = error

    def drain(self) -> None:
        done = threading.Event()
        self.jobs.put(done.set)
        assert done.wait(30)
        if self.error is not None:
            raise CUDARuntimeError(700, f"cudaErrorIllegalAddress: {self.error}")


class SimulatedCuda:
    """The part of `cupy` that mmkv uses, as an object to put in its place."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.pinned: dict[int, np.ndarray[Any, Any]] = {}
        self.allocated: dict[int, tuple[int, int, object]] = {}
        self.refuse: Callable[[int, int], str | None] = lambda _address, _size: None
        self.registrations = 0
        self.copies = 0
        self.launches = 0
        self.compiler_works = True
        self.takes_batches = True
        self.batches = 0
        self._streams: dict[int, _Queue] = {}
        self._events: dict[int, threading.Event] = {}
        self._event_streams: dict[int, _Queue] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()
        runtime = types.SimpleNamespace(
            **{name: getattr(self, name) for name in dir(self) if not name.startswith("_") and name[0].islower()}
        )
        runtime.CUDARuntimeError = CUDARuntimeError
        self.runtime = runtime
        for device in range(DEVICES):
            self._streams[-device] = _Queue(device)

    # --- cupy.cuda.runtime ---

    def getDeviceCount(self) -> int:
        return DEVICES

    def getDevice(self) -> int:
        return int(self._contexts()[-1]) if self._contexts() else 0

    def hostRegister(self, address: int, size: int, flags: int) -> None:
        assert flags == 3
        with self._lock:
            self.registrations += 1
            reason = self.refuse(address, size)
            if reason is not None:
                raise CUDARuntimeError(1, reason)
            for start, length in self.registered.items():
                if address < start + length and start < address + size:
                    raise CUDARuntimeError(712, "cudaErrorHostMemoryAlreadyRegistered: already mapped")
            self.registered[address] = size

    def hostUnregister(self, address: int) -> None:
        with self._lock:
            if self.registered.pop(address, None) is None:
                raise CUDARuntimeError(713, "cudaErrorHostMemoryNotRegistered: pointer is not registered")

    def pointerGetAttributes(self, address: int) -> Any:
        for start, (size, device, _) in self.allocated.items():
            if start <= address < start + size:
                return types.SimpleNamespace(device=device, devicePointer=address)
        return types.SimpleNamespace(device=self.getDevice(), devicePointer=address)

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        queue = self._queue(stream)
        on_device = {1: (target,), 2: (source,), 3: (target, source)}[kind]
        on_host = {1: (source,), 2: (target,), 3: ()}[kind]
        self._copy(target, source, size, queue, on_device, on_host)

    def copy_batch(self, targets: Any, sources: Any, sizes: Any, stream: int) -> bool:
        if not self.takes_batches:
            return False
        self.batches += 1
        queue = self._queue(stream)
        for target, source, size in zip(targets, sources, sizes, strict=True):
            try:
                self._check_device(target, size, queue.device)
            except CUDARuntimeError:
                pair = ((source,), (target,))
            else:
                pair = ((target,), (source,))
            try:
                self._copy(target, source, size, queue, *pair)
            except CUDARuntimeError:
                return False
        return True

    def _copy(
        self, target: int, source: int, size: int, queue: _Queue, on_device: tuple[int, ...], on_host: tuple[int, ...]
    ) -> None:
        for address in on_device:
            self._check_device(address, size, queue.device)
        for address in on_host:
            self._check_host(address, size)
        self.copies += 1
        queue.jobs.put(lambda: ctypes.memmove(target, source, size) and None)

    def eventCreateWithFlags(self, flags: int) -> int:
        with self._lock:
            handle = next(_handles)
            self._events[handle] = threading.Event()
            return handle

    def eventDestroy(self, event: int) -> None:
        # An event of an earlier simulation may have been handed back to this one.
        self._events.pop(event, None)

    def eventRecord(self, event: int, stream: int) -> None:
        queue = self._queue(stream)
        if queue.device != self.getDevice():
            raise CUDARuntimeError(400, "cudaErrorInvalidResourceHandle: the stream is of another device")
        self._event_streams[event] = queue
        # What waited for it before waits for what it stood for then.
        self._events[event] = fired = threading.Event()
        queue.jobs.put(fired.set)

    def eventQuery(self, event: int) -> int:
        return 0 if self._events[event].is_set() else 600

    def eventSynchronize(self, event: int) -> None:
        assert self._events[event].wait(30)
        if self._event_streams[event].error is not None:
            raise CUDARuntimeError(700, f"cudaErrorIllegalAddress: {self._event_streams[event].error}")

    def streamWaitEvent(self, stream: int, event: int) -> None:
        fired = self._events[event]
        self._queue(stream).jobs.put(lambda: fired.wait(30) and None)

    def streamSynchronize(self, stream: int) -> None:
        self._queue(stream).drain()

    def deviceSynchronize(self) -> None:
        device = self.getDevice()
        for queue in list(self._streams.values()):
            if queue.device == device:
                queue.drain()

    # --- cupy and cupy.cuda ---

    def module(self) -> types.ModuleType:
        cupy = types.ModuleType("cupy")
        cupy.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
            runtime=self.runtime,
            Stream=self._new_stream,
            MemoryPool=lambda: types.SimpleNamespace(malloc=self._malloc, free_all_blocks=lambda: None),
            PinnedMemoryPool=lambda: types.SimpleNamespace(malloc=self._malloc_host, free_all_blocks=lambda: None),
            get_current_stream=lambda: types.SimpleNamespace(synchronize=lambda: None),
            compiler=types.SimpleNamespace(CompileException=OutOfRange),
        )
        cupy.zeros = lambda shape, dtype: SimulatedArray(self, np.zeros(shape, dtype), self.getDevice())  # type: ignore[attr-defined]
        cupy.RawKernel = self._new_kernel  # type: ignore[attr-defined]
        return cupy

    def array(self, values: np.ndarray[Any, Any], device: int = 0) -> SimulatedArray:
        return SimulatedArray(self, values, device)

    def new_gated_stream(self, device: int) -> tuple[int, threading.Event]:
        """A stream whose work waits until the gate is opened."""
        gate = threading.Event()
        with self._lock:
            handle = next(_handles)
            self._streams[handle] = _Queue(device)
        self._streams[handle].jobs.put(lambda: gate.wait(30) and None)
        return handle, gate

    def enqueue(self, stream: int, job: Callable[[], None]) -> None:
        self._queue(stream).jobs.put(job)

    def _new_stream(self, non_blocking: bool) -> Any:
        assert non_blocking
        with self._lock:
            handle = next(_handles)
            self._streams[handle] = _Queue(self.getDevice())
        return SimulatedStream(self, handle)

    def _malloc(self, size: int) -> Any:
        values = np.empty(size, np.uint8)
        self.allocated[values.ctypes.data] = (size, self.getDevice(), values)
        return types.SimpleNamespace(ptr=values.ctypes.data, values=values)

    def _malloc_host(self, size: int) -> Any:
        memory = PinnedMemory(size)
        with self._lock:
            self.pinned[memory.ptr] = np.frombuffer(memory, np.uint8)
        return memory

    def _new_kernel(self, source: str, name: str) -> Any:
        if not self.compiler_works:
            raise OutOfRange("there is no NVRTC")
        made = _KERNELS[name](self, source)
        return types.SimpleNamespace(kernel=made)

    # --- the driver's current context ---

    def _contexts(self) -> list[int]:
        if not hasattr(self._thread, "contexts"):
            self._thread.contexts = []
        return self._thread.contexts  # type: ignore[no-any-return]

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
        handle._obj.value = ordinal
        return 0 if ordinal < DEVICES else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> int:
        context._obj.value = handle.value + 1
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self._contexts().append(context.value - 1)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self._contexts().pop()
        return 0

    # --- the rules ---

    def _queue(self, stream: int) -> _Queue:
        return self._streams[-self.getDevice() if stream == 0 else stream]

    def _check_host(self, address: int, size: int) -> None:
        with self._lock:
            places = [*self.registered.items(), *((start, len(memory)) for start, memory in self.pinned.items())]
        if not any(start <= address and address + size <= start + length for start, length in places):
            raise CUDARuntimeError(1, "cudaErrorInvalidValue: not within one page-locked range")

    def _check_device(self, address: int, size: int, device: int) -> None:
        for start, (length, owner, _) in list(self.allocated.items()):
            if start <= address and address + size <= start + length and owner == device:
                return
        raise CUDARuntimeError(1, f"cudaErrorInvalidValue: not within an allocation on device {device}")

    def close(self) -> None:
        for queue in self._streams.values():
            queue.jobs.put(None)
        for queue in self._streams.values():
            queue.thread.join(30)


class PinnedMemory(bytearray):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.ptr = ctypes.addressof((ctypes.c_char * size).from_buffer(self))


class SimulatedArray:
    def __init__(self, owner: SimulatedCuda, values: np.ndarray[Any, Any], device: int) -> None:
        self.values = np.array(values)
        self.device = types.SimpleNamespace(id=device)
        owner.allocated[self.values.ctypes.data] = (self.values.nbytes, device, self.values)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.values.__array_interface__)

    def set(self, values: np.ndarray[Any, Any]) -> None:
        self.values[...] = values

    def get(self) -> np.ndarray[Any, Any]:
        return self.values.copy()


class SimulatedStream:
    def __init__(self, owner: SimulatedCuda, handle: int) -> None:
        self._owner = owner
        self.ptr = handle
        self.device_id = owner._streams[handle].device

    def __enter__(self) -> SimulatedStream:
        if self.device_id != self._owner.getDevice():
            raise RuntimeError("The device that the stream is created on does not match with the current device")
        self._owner._thread.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        self._owner._thread.stream = None

    def synchronize(self) -> None:
        self._owner.streamSynchronize(self.ptr)


class SimulatedKernel:
    """The kernel that copies the runs of a table."""

    def __init__(self, owner: SimulatedCuda, source: str) -> None:
        self._owner = owner
        defines = [line.split() for line in source.splitlines() if line.startswith("#define")]
        self._piece = next(int(value[:-1]) for _, name, value in defines if name == "PIECE")

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[np.int64, ...], *, stream: Any) -> None:
        owner = self._owner
        owner.launches += 1
        assert stream.device_id == owner.getDevice()
        address, runs, places, to_device = map(int, arguments)

        def copy() -> None:
            owner._check_device(address, 8 * (5 * runs + 1), stream.device_id)
            words = np.ctypeslib.as_array((ctypes.c_int64 * (5 * runs + 1)).from_address(address)).copy()
            slots, in_files, in_buffers, sizes = words[: 4 * runs].reshape(4, runs)
            before = words[4 * runs :]
            assert (np.diff(before) == -(-sizes // self._piece)).all()
            assert before[0] == 0
            count = int(max((slots >> 32).max(), (slots & 0xFFFFFFFF).max())) + 1
            owner._check_device(places, 8 * count, stream.device_id)
            addresses = np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(places)).copy()
            in_files = addresses[slots >> 32] + in_files
            in_buffers = addresses[slots & 0xFFFFFFFF] + in_buffers
            pairs = zip(in_files.tolist(), in_buffers.tolist(), sizes.tolist(), strict=True)
            for in_file, in_buffer, size in pairs:
                for place in (in_file, in_buffer):
                    try:
                        owner._check_host(place, size)
                    except CUDARuntimeError:
                        owner._check_device(place, size, stream.device_id)
                ctypes.memmove(*((in_buffer, in_file) if to_device else (in_file, in_buffer)), size)

        owner.enqueue(stream.ptr, copy)


class SimulatedDigest:
    """The kernel that adds the checksums of parts to those of their units."""

    def __init__(self, owner: SimulatedCuda, source: str) -> None:
        assert "digest_parts" in source
        self._owner = owner

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[np.int64, ...], *, stream: Any) -> None:
        owner = self._owner
        assert stream.device_id == owner.getDevice()
        place, parts, _, results = map(int, arguments)

        def digest() -> None:
            words = np.ctypeslib.as_array((ctypes.c_int64 * (4 * parts)).from_address(place)).copy()
            for address, size, behind, unit in words.reshape(4, parts).T.tolist():
                if not size:
                    continue
                owner._check_device(address, size, stream.device_id)
                value = ctypes.c_uint32.from_address(results + 4 * unit)
                # Without the inverted bits at both ends, which are in the value already.
                remainder = crc32c(ctypes.string_at(address, size), 0xFFFFFFFF) ^ 0xFFFFFFFF
                value.value ^= int(shift(remainder, behind))

        owner.enqueue(stream.ptr, digest)


class SimulatedMover:
    """The kernel that copies words between page-locked memory and its device."""

    def __init__(self, owner: SimulatedCuda, source: str) -> None:
        assert "move_words" in source
        self._owner = owner

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[np.int64, ...], *, stream: Any) -> None:
        owner = self._owner
        assert stream.device_id == owner.getDevice()
        source, target, words = map(int, arguments)

        def move() -> None:
            for place in (source, target):
                try:
                    owner._check_host(place, 8 * words)
                except CUDARuntimeError:
                    owner._check_device(place, 8 * words, stream.device_id)
            ctypes.memmove(target, source, 8 * words)

        owner.enqueue(stream.ptr, move)


_KERNELS: dict[str, Any] = {
    "copy_runs": SimulatedKernel, "digest_parts": SimulatedDigest, "move_words": SimulatedMover,
}  # fmt: skip


def simulated_kvikio(*, compatible: bool = True, corrupt: bool = False) -> types.ModuleType:
    """A kvikio that moves bytes with system calls, and raises what the real one raises."""

    class CuFile:
        opened = 0

        def __init__(self, path: Any, flags: str) -> None:
            assert flags == "r+"
            with _as_runtime_error():
                self._fd = os.open(path, os.O_RDWR)
            CuFile.opened += 1

        def fileno(self) -> int:
            return self._fd

        def close(self) -> None:
            os.close(self._fd)
            CuFile.opened -= 1

        def raw_read(self, buffer: Any, size: int, file_offset: int, dev_offset: int) -> int:
            place, length = _place(buffer)
            assert size <= length
            with _as_runtime_error():
                data = os.pread(self._fd, size, file_offset)
                if len(data) < size:
                    raise OSError(errno.EIO, "pread failed reason: EOF")
            ctypes.memmove(place + dev_offset, data, size)
            return size

        def raw_write(self, buffer: Any, size: int, file_offset: int, dev_offset: int) -> int:
            place, length = _place(buffer)
            assert size <= length
            data = bytearray(ctypes.string_at(place + dev_offset, size))
            if corrupt:
                data[0] ^= 1
            with _as_runtime_error():
                return os.pwrite(self._fd, data, file_offset)

    kvikio = types.ModuleType("kvikio")
    kvikio.CuFile = CuFile  # type: ignore[attr-defined]
    kvikio.CompatMode = types.SimpleNamespace(OFF=0, ON=1, AUTO=2)  # type: ignore[attr-defined]
    kvikio.defaults = types.ModuleType("kvikio.defaults")  # type: ignore[attr-defined]
    kvikio.defaults.is_compat_mode_preferred = lambda: compatible
    kvikio.defaults.get = lambda name: {"compat_mode": 2}[name]
    return kvikio


def _place(buffer: Any) -> tuple[int, int]:
    interface = buffer.__cuda_array_interface__
    return int(interface["data"][0]), int(np.prod(interface["shape"]))


@contextmanager
def _as_runtime_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"Linux system/library function call error at: file_utils.cpp: {error.strerror}") from error


def install_cuda(patch: pytest.MonkeyPatch) -> SimulatedCuda:
    """Put a simulated CUDA in the place of CuPy and the driver."""
    simulated = SimulatedCuda()
    patch.setitem(__import__("sys").modules, "cupy", simulated.module())
    patch.setattr(driver, "_libcuda", lambda: simulated)
    patch.setattr(cuda, "copy_batch", simulated.copy_batch)
    forget_cuda()
    return simulated


def install_kvikio(patch: pytest.MonkeyPatch, **options: bool) -> types.ModuleType:
    """Put a simulated kvikio in the place of the real one."""
    kvikio = simulated_kvikio(**options)
    modules = __import__("sys").modules
    patch.setitem(modules, "kvikio", kvikio)
    patch.setitem(modules, "kvikio.defaults", kvikio.defaults)
    direct._cufile_class.cache_clear()
    return kvikio


def forget_cuda() -> None:
    """Let mmkv look for CUDA anew."""
    for cached in (
        driver._primary_context, driver._batch_call, driver.runtime_module,
        cuda._device_pool, cuda._pinned_pool, cuda._own_stream,
    ):  # fmt: skip
        cached.cache_clear()
    cuda._scratch_devices.clear()
    cuda._idle_events.clear()
    direct._cufile_class.cache_clear()
