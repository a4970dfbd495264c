"""Checksums of rows in host memory, taken of each piece right after its copy, while the processor's cache has it."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from mmkv.buffer import host_view
from mmkv.castagnoli import Values, shift_one
from mmkv.checksum import crc32c, leading_checksums

__all__ = ["PieceSums"]

_Numbers = npt.NDArray[np.int64]


class PieceSums:
    """Adds up the checksums of units as pieces of them are copied, in any order, by several threads.

    The checksum of a unit is the sum of those of its pieces, each shifted by the bytes behind it. What was copied
    twice, or not at all, shows in the number of bytes that were added, and the unit does not count as whole: whoever
    wants its checksum reads it where it lies.

    Where it is known what the units should have, all whole units of a piece are compared by one checksum; each has one
    of its own only where that differs.

    Parameters
    ----------
    addresses : sequence of int
        Where the array of each column starts.
    row_bytes : ndarray of int64
        Bytes of a row of each column.
    rows, tokens : ndarray of int64, shape (spans,)
        Where each span starts in the arrays, in rising order, and how many rows it has: of each column, a unit.
    expected : ndarray of uint32, shape (spans, columns), optional
        The checksums that the units should have.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        row_bytes: _Numbers,
        rows: _Numbers,
        tokens: _Numbers,
        expected: Values | None = None,
    ) -> None:
        order = np.argsort(np.asarray(addresses, dtype=np.int64), kind="stable").tolist()
        self._columns = order
        self._addresses = [addresses[column] for column in order]
        self._row_bytes = row_bytes
        self._rows, self._tokens = rows, tokens
        # Units that are apart have bytes between them that belong to none.
        self._expected = None if expected is None or (rows[1:] != rows[:-1] + tokens[:-1]).any() else expected
        self._units: dict[int, tuple[list[int], list[int]]] = {}
        self._leading: dict[int, list[int]] = {}
        self._as_expected: deque[tuple[int, int, int]] = deque()
        self._values = np.zeros((len(rows), len(addresses)), dtype=np.uint32)
        self._added = np.zeros((len(rows), len(addresses)), dtype=np.int64)
        self._lock = threading.Lock()

    def add(self, address: int, size: int) -> None:
        """`size` bytes at `address` were copied."""
        at = bisect_right(self._addresses, address) - 1
        if at < 0:
            return
        column, start = self._columns[at], self._addresses[at]
        first, last = address - start, address - start + size
        starts, ends = self._units_of(int(self._row_bytes[column]))
        span, past = bisect_right(ends, first), bisect_left(starts, last)
        if self._expected is None:
            self._sum_each(column, start, first, last, range(span, past))
            return
        whole, past_whole = bisect_left(starts, first), bisect_right(ends, last)
        if past_whole - whole > 1 and self._are_as_expected(column, start, whole, past_whole):
            self._as_expected.append((column, whole, past_whole))
            self._sum_each(column, start, first, last, (*range(span, whole), *range(past_whole, past)))
        else:
            self._sum_each(column, start, first, last, range(span, past))

    def _units_of(self, row_bytes: int) -> tuple[list[int], list[int]]:
        """Where the units of a column start and end in its array."""
        units = self._units.get(row_bytes)
        if units is None:
            units = (self._rows * row_bytes).tolist(), ((self._rows + self._tokens) * row_bytes).tolist()
            self._units[row_bytes] = units
        return units

    def _sum_each(self, column: int, start: int, first: int, last: int, spans: Iterable[int]) -> None:
        starts, ends = self._units_of(int(self._row_bytes[column]))
        found = []
        for span in spans:
            low, high = max(starts[span], first), min(ends[span], last)
            value = crc32c(host_view(start + low, high - low, writable=False))
            found.append((span, shift_one(value, ends[span] - high), high - low))
        with self._lock:
            for span, value, added in found:
                self._values[span, column] ^= value
                self._added[span, column] += added

    def _are_as_expected(self, column: int, start: int, span: int, past: int) -> bool:
        starts, ends = self._units_of(int(self._row_bytes[column]))
        size = ends[past - 1] - starts[span]
        leading = self._leading_of(column)
        value = crc32c(host_view(start + starts[span], size, writable=False))
        return value == leading[past] ^ shift_one(leading[span], size)

    def _leading_of(self, column: int) -> list[int]:
        """What the first units of a column, none to all, should have together."""
        leading = self._leading.get(column)
        if leading is None:
            with self._lock:
                # Unless another thread has done it meanwhile.
                if column not in self._leading:
                    self._lead(int(self._row_bytes[column]))
                leading = self._leading[column]
        return leading

    def _lead(self, row_bytes: int) -> None:
        assert self._expected is not None
        alike = np.flatnonzero(self._row_bytes == row_bytes)
        values = leading_checksums(self._expected[:, alike], self._tokens * row_bytes)
        self._leading |= zip(alike.tolist(), values.T.tolist(), strict=True)

    def values(self, columns: slice) -> tuple[Values, npt.NDArray[np.bool_]]:
        """The checksums of some columns, and which of them are those of whole units; shape (spans, columns)."""
        with self._lock:
            while self._as_expected:
                column, span, past = self._as_expected.popleft()
                assert self._expected is not None
                self._values[span:past, column] ^= self._expected[span:past, column]
                self._added[span:past, column] += self._tokens[span:past] * self._row_bytes[column]
            whole = self._added[:, columns] == self._tokens[:, np.newaxis] * self._row_bytes[columns]
            return self._values[:, columns].copy(), whole
