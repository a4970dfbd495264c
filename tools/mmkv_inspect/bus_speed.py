"""How fast the bus is between host memory and each GPU, and whether files in a directory can be page-locked."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mmkv import device as cuda
from mmkv.buffer import buffer_of
from mmkv.errors import MmkvError
from mmkv.medium import Medium
from mmkv_inspect.medium_speed import unnamed_file

__all__ = ["BusSpeed", "PathHere", "measure_bus", "path_here"]

_BYTES = 64 << 20
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class BusSpeed:
    """What was measured on one device; 10**9 bytes a second.

    Attributes
    ----------
    device : int
        Its ordinal.
    name : str
        What it is.
    to_device_gbps, from_device_gbps : float
        Copies of page-locked memory, one way at a time.
    map_to_device_gbps, map_from_device_gbps : float or None
        The same of a page-locked map of a file in the directory; `None` where it cannot be page-locked.
    reason : str or None
        Why it cannot.
    """

    device: int
    name: str
    to_device_gbps: float
    from_device_gbps: float
    map_to_device_gbps: float | None
    map_from_device_gbps: float | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class PathHere:
    """The path that a pool's device arrays would take in a directory, as receipts name it, and why."""

    path: str
    reason: str | None
    details: dict[str, Any]


def path_here(medium: Medium) -> PathHere:
    """What a pool in the directory would choose. Without a device: what host arrays take, and why only they."""
    from mmkv.store import open_device_store

    threads = max(2, min(12, os.cpu_count() or 2))
    try:
        store = open_device_store(medium, threads=threads, directory=medium.path)
    except MmkvError as error:
        return PathHere("posix", str(error), {"threads": threads})
    try:
        details = store.describe()
    finally:
        store.close()
    return PathHere(str(details["path"]), details.get("reason"), details)


def measure_bus(medium: Medium) -> list[BusSpeed]:
    """Every device's speeds; an empty list where there is none. Costs half a second and 128 MiB a device."""
    return [_measure(device, medium) for device in range(cuda.device_count())]


def _measure(device: int, medium: Medium) -> BusSpeed:
    pinned = cuda.pinned(_BYTES)
    array = cuda.allocate((_BYTES,), "uint8", device)
    stream = cuda.new_stream(device)
    address = buffer_of(array).address

    def rate(host: int, *, to_device: bool) -> float:
        pair = (address, host) if to_device else (host, address)
        times = []
        with cuda.current(device):
            for _ in range(_REPEATS):
                started = time.perf_counter()
                cuda.copy_async(*pair, _BYTES, stream.ptr, to_device=to_device)
                stream.synchronize()
                times.append(time.perf_counter() - started)
        return _BYTES / sorted(times)[_REPEATS // 2] / 1e9

    to_device, from_device = rate(pinned.ptr, to_device=True), rate(pinned.ptr, to_device=False)
    into = out = reason = None
    if medium.in_ram:
        try:
            with _locked_map(medium, device) as base:
                into, out = rate(base, to_device=True), rate(base, to_device=False)
        except (MmkvError, OSError) as error:
            reason = str(error)
    return BusSpeed(device, _name(device), to_device, from_device, into, out, reason)


@contextmanager
def _locked_map(medium: Medium, device: int) -> Iterator[int]:
    """The address of a page-locked map of a file in the directory."""
    file = unnamed_file(medium.path)
    try:
        # Before it is mapped: no access to the map can then be a signal.
        os.posix_fallocate(file, 0, _BYTES)
        with mmap.mmap(file, _BYTES) as block:
            first = ctypes.c_char.from_buffer(block)
            base = ctypes.addressof(first)
            try:
                with cuda.current(device):
                    cuda.register_host(base, _BYTES)
                try:
                    yield base
                finally:
                    with cuda.current(device):
                        cuda.unregister_host(base)
            finally:
                # A map cannot be closed while something views it.
                del first
    finally:
        os.close(file)


def _name(device: int) -> str:
    import cupy

    try:
        name = cupy.cuda.runtime.getDeviceProperties(device)["name"]
    except (AttributeError, KeyError, RuntimeError):
        return "a CUDA device"
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
