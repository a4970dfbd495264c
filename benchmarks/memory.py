"""The memory that a benchmark's slots lie in, host or device, and the few ways to copy between it and the host's."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

import mmkv
from benchmarks.asking import require_device
from mmkv import device as cuda
from mmkv.buffer import allocate_host, buffer_of

__all__ = ["Arrays", "DeviceMemory", "HostMemory", "Memory", "PlaneRows", "allocate_slot", "memory_of", "rows_of"]

Arrays: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PlaneRows:
    """One array of a slot, as bytes: so many entries of its first axis, of `row_bytes` each."""

    layer: int
    name: str
    array: Any
    address: int
    row_bytes: int
    entries: int


def rows_of(arrays: Arrays) -> list[PlaneRows]:
    """The arrays of a slot, layer by layer; found out once, for it costs some microseconds an array."""
    rows = []
    for layer, planes in enumerate(arrays):
        for name, array in planes.items():
            buffer = buffer_of(array)
            entries = buffer.shape[0]
            rows.append(PlaneRows(layer, name, array, buffer.address, buffer.bytes // entries, entries))
    return rows


class Memory(Protocol):
    """The kind of memory that slots lie in."""

    device: str
    xp: ModuleType

    @property
    def on_device(self) -> bool:
        """Whether a GPU holds it."""

    def allocate(self, shape: tuple[int, ...]) -> Any:
        """A zeroed array of unsigned bytes."""

    def flat(self, array: Any) -> Any:
        """An array's bytes, one-dimensional, as an array of `xp`; no copy."""

    def synchronize(self) -> None:
        """Wait until all that was started on this memory is done."""

    def lock(self, size: int) -> int:
        """The address of new host memory that copies at full speed: page-locked for a device, else at a page."""

    def unlock(self, address: int) -> None:
        """Free what `lock` gave."""

    def copy_async(self, target: int, source: int, size: int, *, to_device: bool) -> None:
        """Copy between this memory and what `lock` gave, on the RAM pool's own stream."""

    def wait(self) -> None:
        """Wait until all that `copy_async` was given is done."""

    def copy(self, target: int, source: int, size: int, *, to_device: bool) -> None:
        """Copy between this memory and any host memory, and wait for it."""


class HostMemory:
    """NumPy arrays."""

    device = "cpu"
    xp: ModuleType = np
    on_device = False

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}

    def allocate(self, shape: tuple[int, ...]) -> Any:
        return allocate_host(shape, "uint8")

    def flat(self, array: Any) -> Any:
        return array.reshape(-1).view(np.uint8)

    def synchronize(self) -> None:
        pass

    def lock(self, size: int) -> int:
        # Aligned as the slot's arrays are, so that neither side has the faster memory.
        array = allocate_host((size,), "uint8")
        array[:] = 0
        self._held[array.ctypes.data] = array
        return int(array.ctypes.data)

    def unlock(self, address: int) -> None:
        del self._held[address]

    def copy_async(self, target: int, source: int, size: int, *, to_device: bool) -> None:  # noqa: ARG002
        np.copyto(_host_bytes(target, size), _host_bytes(source, size))

    def wait(self) -> None:
        pass

    def copy(self, target: int, source: int, size: int, *, to_device: bool) -> None:
        self.copy_async(target, source, size, to_device=to_device)


class DeviceMemory:
    """CuPy arrays on one device."""

    on_device = True

    def __init__(self, device: str) -> None:
        import cupy

        self._cupy = cupy
        self.xp: ModuleType = cupy
        self.device = device
        self.ordinal = int(device.partition(":")[2] or 0)
        cupy.cuda.Device(self.ordinal).use()
        self._stream = cuda.new_stream(self.ordinal)
        # What an engine would compute on.
        self.compute_stream = cuda.new_stream(self.ordinal)

    def allocate(self, shape: tuple[int, ...]) -> Any:
        return cuda.allocate(shape, "uint8", self.ordinal)

    def flat(self, array: Any) -> Any:
        return array.reshape(-1).view(self.xp.uint8)

    def synchronize(self) -> None:
        cuda.synchronize(self.ordinal)

    def lock(self, size: int) -> int:
        return int(self._cupy.cuda.runtime.hostAlloc(size, 1))

    def unlock(self, address: int) -> None:
        self._cupy.cuda.runtime.freeHost(address)

    def copy_async(self, target: int, source: int, size: int, *, to_device: bool) -> None:
        cuda.copy_async(target, source, size, self._stream.ptr, to_device=to_device)

    def wait(self) -> None:
        self._stream.synchronize()

    def copy(self, target: int, source: int, size: int, *, to_device: bool) -> None:
        self._cupy.cuda.runtime.memcpy(target, source, size, 1 if to_device else 2)

    def mark(self, stream: Any) -> Any:
        """A point in a stream's order whose time can be read."""
        event = self._cupy.cuda.Event()
        event.record(stream)
        return event

    def seconds_between(self, start: Any, end: Any) -> float:
        """The time between two marks; waits for the second."""
        end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(start, end)) / 1e3

    def trim(self) -> None:
        """Give freed memory back to the device."""
        self.synchronize()
        self._cupy.get_default_memory_pool().free_all_blocks()


def memory_of(device: str) -> Memory:
    """The memory of `cpu`, or of `cuda:0` and so on; the program ends where that cannot be used."""
    require_device(device)
    return HostMemory() if device == "cpu" else DeviceMemory(device)


def allocate_slot(memory: Memory, layout: mmkv.Layout, tokens: int) -> mmkv.Slot:
    """A slot of arrays of unsigned bytes; `layout` has no other planes."""
    arrays = [
        {name: memory.allocate((tokens, *plane.shape)) for name, plane in layer.planes.items()}
        for layer in layout.layers
    ]
    slot = mmkv.Slot(layout, arrays)
    slot.arrays = arrays
    return slot


def _host_bytes(address: int, size: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
