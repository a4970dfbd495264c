"""Checksums where the bytes are: on the host, or on a device, in streams of mmkv's own."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from mmkv import device as cuda
from mmkv.castagnoli import Values
from mmkv.checksum import Parts, crc32c, host_checksums
from mmkv.store.digest import Digest, DigestKernel

__all__ = ["Digester"]

_BOUNCE_BYTES = 4 << 20


class Digester:
    """Computes checksums where the bytes are; the kernel is compiled once for each device."""

    def __init__(self) -> None:
        self._kernel = DigestKernel()
        self._idle: dict[int, list[Any]] = {}
        self._preparing: set[int] = set()
        self._ready: set[int] = set()
        self._lock = threading.Lock()

    def prepare(self, devices: Collection[int]) -> None:
        """Compile the kernel for some devices, in the background, where that was not begun yet; takes a second."""
        with self._lock:
            new = set(devices) - self._preparing
            self._preparing |= new
        if new:
            with suppress(RuntimeError):
                # Where no thread can be started, who needs it first compiles it.
                threading.Thread(target=self._compile, args=(new,), name="mmkv-compile", daemon=True).start()

    def _compile(self, devices: Collection[int]) -> None:
        for device in devices:
            if self._kernel.ready(device):
                self._ready.add(device)

    def is_ready(self, devices: Collection[int]) -> bool:
        """Whether the kernel was compiled for all of some devices."""
        return self._ready.issuperset(devices)

    def checksums(self, parts: Parts, device: int | None) -> Values:
        """The checksums of units on a device, or in host memory; waits for them.

        What wrote the bytes has been waited for.
        """
        if device is None or not parts.count:
            return host_checksums(parts)
        with self.stream(device) as stream:
            if not self._kernel.ready(device):
                return _through_host(parts, device, stream)
            digest = self.launch(parts, device, stream)
            with cuda.current(device):
                stream.synchronize()
            return digest.values()

    def launch(self, parts: Parts, device: int, stream: Any) -> Digest:
        """Give a stream on a device, where the kernel is ready, the checksums of units there."""
        with cuda.current(device):
            return self._kernel.launch(parts, device, stream)

    @contextmanager
    def stream(self, device: int) -> Iterator[Any]:
        """A stream on a device, of which nobody else makes use meanwhile, and which has nothing left to do at the end.

        After an error it is not used again: the device may still be at it.
        """
        with self._lock:
            idle = self._idle.setdefault(device, [])
            stream = idle.pop() if idle else None
        if stream is None:
            stream = cuda.new_stream(device)
        yield stream
        with self._lock:
            idle.append(stream)

    def close(self) -> None:
        """Let go of the streams."""
        with self._lock:
            self._idle.clear()


def _through_host(parts: Parts, device: int, stream: Any) -> Values:
    """The same on the host, to which the bytes are copied: where there is no compiler for the kernel."""
    values = np.zeros(parts.count, dtype=np.uint32)
    bounce = cuda.pinned(_BOUNCE_BYTES)
    view = memoryview(bounce).cast("B")
    columns = (parts.units.tolist(), parts.addresses.tolist(), parts.sizes.tolist())
    with cuda.current(device):
        for unit, address, size in zip(*columns, strict=True):
            for at in range(0, size, _BOUNCE_BYTES):
                length = min(_BOUNCE_BYTES, size - at)
                cuda.copy_async(bounce.ptr, address + at, length, stream.ptr, to_device=False)
                stream.synchronize()
                values[unit] = crc32c(view[:length], int(values[unit]))
    return values
