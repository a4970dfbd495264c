"""Checksums of rows in host memory, taken of each piece right after its copy, while the processor's cache has it."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mmkv.buffer import host_view
from mmkv.castagnoli import Values, shift_one
from mmkv.checksum import crc32c

__all__ = ["PieceSums"]

_Numbers = npt.NDArray[np.int64]


class PieceSums:
    """Adds up the checksums of units as pieces of them are copied, in any order, by several threads.

    The checksum of a unit is the sum of those of its pieces, each shifted by the bytes behind it. What was copied
    twice, or not at all, shows in the number of bytes that were added, and the unit does not count as whole: whoever
    wants its checksum reads it where it lies.

    Parameters
    ----------
    addresses : sequence of int
        Where the array of each column starts.
    row_bytes : ndarray of int64
        Bytes of a row of each column.
    rows, tokens : ndarray of int64, shape (spans,)
        Where each span starts in the arrays, in rising order, and how many rows it has: of each column, a unit.
    """

    def __init__(self, addresses: Sequence[int], row_bytes: _Numbers, rows: _Numbers, tokens: _Numbers) -> None:
        order = np.argsort(np.asarray(addresses, dtype=np.int64), kind="stable").tolist()
        self._columns = order
        self._addresses = [addresses[column] for column in order]
        self._row_bytes = row_bytes
        self._rows, self._tokens = rows, tokens
        self._starts: dict[int, tuple[list[int], list[int]]] = {}
        self._values = np.zeros((len(rows), len(addresses)), dtype=np.uint32)
        self._added = np.zeros((len(rows), len(addresses)), dtype=np.int64)
        self._lock = threading.Lock()

    def add(self, address: int, size: int) -> None:
        """`size` bytes at `address` were copied."""
        at = bisect_right(self._addresses, address) - 1
        if at < 0:
            return
        column, first = self._columns[at], address - self._addresses[at]
        starts, sizes = self._units(int(self._row_bytes[column]))
        found = []
        for span in range(max(0, bisect_right(starts, first) - 1), len(starts)):
            start = starts[span]
            if start >= first + size:
                break
            low, high = max(start, first), min(start + sizes[span], first + size)
            if low < high:
                value = crc32c(host_view(self._addresses[at] + low, high - low, writable=False))
                found.append((span, shift_one(value, start + sizes[span] - high), high - low))
        with self._lock:
            for span, value, added in found:
                self._values[span, column] ^= value
                self._added[span, column] += added

    def _units(self, row_bytes: int) -> tuple[list[int], list[int]]:
        units = self._starts.get(row_bytes)
        if units is None:
            units = (self._rows * row_bytes).tolist(), (self._tokens * row_bytes).tolist()
            self._starts[row_bytes] = units
        return units

    def values(self, columns: slice) -> tuple[Values, npt.NDArray[np.bool_]]:
        """The checksums of some columns, and which of them are those of whole units; shape (spans, columns)."""
        with self._lock:
            whole = self._added[:, columns] == self._tokens[:, np.newaxis] * self._row_bytes[columns]
            return self._values[:, columns].copy(), whole
