"""Host memory for one conversation: page-locked beforehand, or fresh from the heap at each park."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Protocol

from benchmarks.memory import Memory, PlaneRows

__all__ = ["LockedRoom", "PageableRoom", "Room"]


class Room(Protocol):
    """Host memory for one conversation."""

    def out(self, rows: Sequence[PlaneRows], start: int, stop: int) -> None:
        """Copy rows `[start, stop)` of a slot into it, and wait until they are there."""

    def back(self, rows: Sequence[PlaneRows], start: int, stop: int) -> None:
        """Copy rows `[start, stop)` back into a slot, and wait until they are there."""

    def free(self) -> None:
        """Give the memory back."""


class LockedRoom:
    """Memory that was allocated beforehand, page-locked for a device: asynchronous copies on one stream."""

    def __init__(self, memory: Memory, rows: Sequence[PlaneRows], tokens: int) -> None:
        self._memory = memory
        self._offsets: list[int] = []
        end = 0
        for plane in rows:
            self._offsets.append(end)
            end += -(-tokens * plane.row_bytes // 4096) * 4096
        self._base = memory.lock(end)

    def out(self, rows: Sequence[PlaneRows], start: int, stop: int) -> None:
        for plane, offset in zip(rows, self._offsets, strict=True):
            at, size = start * plane.row_bytes, (stop - start) * plane.row_bytes
            self._memory.copy_async(self._base + offset + at, plane.address + at, size, to_device=False)
        self._memory.wait()

    def back(self, rows: Sequence[PlaneRows], start: int, stop: int) -> None:
        for plane, offset in zip(rows, self._offsets, strict=True):
            at, size = start * plane.row_bytes, (stop - start) * plane.row_bytes
            self._memory.copy_async(plane.address + at, self._base + offset + at, size, to_device=True)
        self._memory.wait()

    def free(self) -> None:
        self._memory.unlock(self._base)


class PageableRoom:
    """As the bug report's engine does it: layer by layer, synchronously, into fresh heap memory at each park.

    A large block of the heap is an anonymous map, whose pages come one by one as they are written.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._layers: dict[int, mmap.mmap] = {}

    def out(self, rows: Sequence[PlaneRows], start: int, stop: int) -> None:
        if start:
            raise ValueError("this room keeps nothing: all rows move")
        self.free()
        for layer, planes in _by_layer(rows):
            size = sum(stop * plane.row_bytes for plane in planes)
            block = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._layers[layer] = block
            at = _address(block)
            for plane in planes:
                self._memory.copy(at, plane.address, stop * plane.row_bytes, to_device=False)
                at += stop * plane.row_bytes

    def back(self, rows: Sequence[PlaneRows], start: int, stop: int) -> None:
        if start:
            raise ValueError("this room keeps nothing: all rows move")
        for layer, planes in _by_layer(rows):
            at = _address(self._layers[layer])
            for plane in planes:
                self._memory.copy(plane.address, at, stop * plane.row_bytes, to_device=True)
                at += stop * plane.row_bytes
        # A copy of pageable memory may return while its last part is on its way.
        self._memory.synchronize()

    def free(self) -> None:
        for block in self._layers.values():
            block.close()
        self._layers.clear()


def _address(block: mmap.mmap) -> int:
    view = ctypes.c_char.from_buffer(block)
    try:
        return ctypes.addressof(view)
    finally:
        # The map can be closed only when nothing views it.
        del view


def _by_layer(rows: Sequence[PlaneRows]) -> list[tuple[int, list[PlaneRows]]]:
    layers: dict[int, list[PlaneRows]] = {}
    for plane in rows:
        layers.setdefault(plane.layer, []).append(plane)
    return list(layers.items())
