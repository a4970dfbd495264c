"""How the runs of a transfer are handed to a device: long ones to a copy engine, short ones in a table to a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mmkv import device as cuda
from mmkv.store.contract import Copy, LayerCopies

__all__ = ["Batch", "DeviceRuns", "NotLockedError", "Planner", "SegmentKey", "kernel_for", "submit"]

SegmentKey = tuple[tuple[int, int], int]

# From this size on the copy engine is the faster one (measured on an H200: 54 against 51 GB/s).
_LONG_BYTES = 4 << 20
# So few runs cost the copy engine no more than a kernel's start.
_FEW_RUNS = 4
_LISTED_RUNS = 16
_BLOCKS, _THREADS = 16, 512

# Every block takes an equal share of the pieces of the runs [low, high) of a table. The table has `runs` sources,
# targets and sizes, then the number of pieces before each run and before the end.
_SOURCE = r"""
typedef unsigned long long word;
#define PIECE 32768ull

template <typename T>
__device__ void copy_words(char *target, const char *source, word size)
{
    word head = (0 - (word)source) & (sizeof(T) - 1);
    if (head > size) head = size;
    const word count = (size - head) / sizeof(T);
    const word tail = head + count * sizeof(T);
    const T *from = (const T *)(source + head);
    T *to = (T *)(target + head);
    const word step = blockDim.x;
    word i = threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        const T a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
        to[i] = a; to[i + step] = b; to[i + 2 * step] = c; to[i + 3 * step] = d;
    }
    for (; i < count; i += step) to[i] = from[i];
    for (i = threadIdx.x; i < head; i += step) target[i] = source[i];
    for (i = tail + threadIdx.x; i < size; i += step) target[i] = source[i];
}

extern "C" __global__ void copy_runs(const word *table, word runs, word low, word high)
{
    const word *sources = table, *targets = table + runs, *sizes = table + 2 * runs, *before = table + 3 * runs;
    const word total = before[high] - before[low];
    word piece = before[low] + total * blockIdx.x / gridDim.x;
    const word end = before[low] + total * (blockIdx.x + 1) / gridDim.x;
    word run = low, past = high;
    while (past - run > 1) {
        const word middle = run + (past - run) / 2;
        if (before[middle] <= piece) run = middle; else past = middle;
    }
    for (; piece < end; ++piece) {
        while (before[run + 1] <= piece) ++run;
        const word offset = (piece - before[run]) * PIECE;
        const word left = sizes[run] - offset;
        const word size = left < PIECE ? left : PIECE;
        const char *source = (const char *)sources[run] + offset;
        char *target = (char *)targets[run] + offset;
        const word differ = (word)source ^ (word)target;
        if ((differ & 15) == 0) copy_words<uint4>(target, source, size);
        else if ((differ & 7) == 0) copy_words<uint2>(target, source, size);
        else if ((differ & 3) == 0) copy_words<unsigned int>(target, source, size);
        else copy_words<unsigned char>(target, source, size);
    }
}
"""
_PIECE_BYTES = 32768


class NotLockedError(Exception):
    """A run lies in a segment that is not page-locked."""


@dataclass(slots=True, eq=False)
class DeviceRuns:
    """What one layer copies to or from one device.

    Attributes
    ----------
    long : list of (target, source, size)
        What the copy engine takes.
    low, high : int
        The rows of the device's table that the kernel takes.
    """

    long: list[tuple[int, int, int]] = field(default_factory=list)
    low: int = 0
    high: int = 0


@dataclass(slots=True, eq=False)
class Batch:
    """The runs of some layers, with their bytes, by device; and a table of short runs for each device."""

    layers: list[tuple[LayerCopies, int, dict[int, DeviceRuns]]]
    tables: dict[int, npt.NDArray[np.int64]]


class Planner:
    """Finds every run's addresses and chooses who copies it.

    Copies that share their arrays of offsets, as those of like layers do, cost some microseconds each, whatever the
    number of their runs; the first of them some ten nanoseconds a run.

    Parameters
    ----------
    bases : mapping of segment to int
        Where page-locked segments are mapped.
    to_device : bool
        Whether bytes go from files to devices.
    kernel : bool
        Whether a kernel may take short runs.
    """

    def __init__(self, bases: Mapping[SegmentKey, int], *, to_device: bool, kernel: bool) -> None:
        self._bases = bases
        self._to_device = to_device
        self._shapes: dict[tuple[int, int, int, int], _Shape] = {}
        self.kernel = kernel

    def segments(self, copy: Copy) -> list[int]:
        """The segments of its file that a copy touches, in order."""
        return self._shape(copy).segments

    def plan(self, layers: Sequence[LayerCopies]) -> Batch:
        """Plan the copies of some layers.

        Raises
        ------
        NotLockedError
            A run lies in a segment that is not page-locked.
        """
        parts: dict[int, list[_Rows]] = {}
        rows: dict[int, int] = {}
        planned = []
        for layer in layers:
            size, by_device = 0, {}
            for device, copies in _by_device(layer).items():
                runs = by_device[device] = DeviceRuns()
                short: list[tuple[int, int, int]] = []
                tables: list[_Rows] = []
                for copy in copies:
                    shape = self._shape(copy)
                    size += shape.bytes
                    self._place(copy, shape, runs.long, short, tables)
                count = len(short) + sum(table.shape[1] for table in tables)
                if not self.kernel or count <= _FEW_RUNS:
                    runs.long.extend(short)
                    for table in tables:
                        runs.long.extend(zip(*table.tolist(), strict=True))
                    continue
                if short:
                    tables.append(np.array(short, dtype=np.int64).T)
                parts.setdefault(device, []).extend(tables)
                runs.low = rows.get(device, 0)
                runs.high = rows[device] = runs.low + count
            planned.append((layer, size, by_device))
        return Batch(planned, {device: _table(tables) for device, tables in parts.items()})

    def _shape(self, copy: Copy) -> _Shape:
        key = (id(copy.file_offsets), id(copy.buffer_offsets), id(copy.sizes), copy.file.segment_bytes)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = _shape_of(copy)
        return shape

    def _place(
        self,
        copy: Copy,
        shape: _Shape,
        long: list[tuple[int, int, int]],
        short: list[tuple[int, int, int]],
        tables: list[_Rows],
    ) -> None:
        """Add a copy's runs, as targets, sources and sizes, to the long ones, the short ones and the tables."""
        identity, start = copy.file.identity, copy.buffer.address
        try:
            bases = [self._bases[identity, segment] for segment in shape.segments]
        except KeyError:
            raise NotLockedError from None
        for runs, placed in ((shape.long, long), (shape.short, short)):
            for position, inside, offset, size in runs:
                in_file, in_buffer = bases[position] + inside, start + offset
                placed.append((in_buffer, in_file, size) if self._to_device else (in_file, in_buffer, size))
        if shape.many is not None:
            positions, inside, offsets, sizes = shape.many
            files, buffers = np.array(bases, np.int64)[positions] + inside, offsets + start
            tables.append(np.stack((buffers, files, sizes) if self._to_device else (files, buffers, sizes)))


_Rows = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Shape:
    """Where the runs of a copy lie, apart from the addresses of its file's segments and of its buffer.

    A run is a position in `segments`, an offset inside that segment, one in the buffer, and a size. Short runs are
    listed one by one where they are few, and as four rows of an array where they are many.
    """

    segments: list[int]
    bytes: int
    long: list[tuple[int, int, int, int]]
    short: list[tuple[int, int, int, int]]
    many: _Rows | None = None


def _shape_of(copy: Copy) -> _Shape:
    if len(copy.sizes) <= _LISTED_RUNS:
        return _shape_of_few(copy)
    in_segments, inside = np.divmod(copy.file_offsets, copy.file.segment_bytes)
    segments, positions = np.unique(in_segments, return_inverse=True)
    rows = np.stack((positions.reshape(-1), inside, copy.buffer_offsets, copy.sizes))
    is_long = copy.sizes >= _LONG_BYTES
    long, short = rows[:, is_long], rows[:, ~is_long]
    shape = _Shape([int(segment) for segment in segments], copy.bytes, _tuples(long), [])
    if short.shape[1] > _LISTED_RUNS:
        shape.many = short
    else:
        shape.short = _tuples(short)
    return shape


def _shape_of_few(copy: Copy) -> _Shape:
    """The same without NumPy, whose calls cost more than so few runs."""
    runs = list(zip(copy.file_offsets.tolist(), copy.buffer_offsets.tolist(), copy.sizes.tolist(), strict=True))
    segment_bytes = copy.file.segment_bytes
    segments = sorted({offset // segment_bytes for offset, _, _ in runs})
    shape = _Shape(segments, sum(size for _, _, size in runs), [], [])
    for file_offset, buffer_offset, size in runs:
        segment, inside = divmod(file_offset, segment_bytes)
        listed = shape.long if size >= _LONG_BYTES else shape.short
        listed.append((segments.index(segment), inside, buffer_offset, size))
    return shape


def _tuples(rows: _Rows) -> list[tuple[int, int, int, int]]:
    return [(position, inside, offset, size) for position, inside, offset, size in rows.T.tolist()]


def _by_device(layer: LayerCopies) -> dict[int, list[Copy]]:
    copies: dict[int, list[Copy]] = {}
    for copy in layer.copies:
        if len(copy.sizes):
            device = copy.buffer.device
            if device is None:
                raise ValueError(f"layer {layer.layer}, {copy.name!r}: host memory moves by no page-locked map")
            copies.setdefault(device, []).append(copy)
    return copies


def _table(tables: list[_Rows]) -> npt.NDArray[np.int64]:
    """The words of the kernel's table: sources, targets, sizes, and the pieces before each run and the end."""
    targets, sources, sizes = np.concatenate(tables, axis=1)
    before = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(-(-sizes // _PIECE_BYTES), out=before[1:])
    return np.concatenate((sources, targets, sizes, before))


def kernel_for(device: int) -> Any:
    """The kernel that copies a table of runs, compiled for a device. The first call may take a second.

    Raises
    ------
    MmkvError
        There is no working compiler.
    """
    return cuda.compile_kernel(_SOURCE, "copy_runs", device)


def submit(runs: DeviceRuns, stream: Any, kernel: Any, table: tuple[int, int] | None, *, to_device: bool) -> None:
    """Give a CuPy stream a layer's runs on its device, which is current.

    `table` is the address of the device's table and the number of its runs; there is none without short runs.
    """
    for target, source, size in runs.long:
        cuda.copy_async(target, source, size, stream.ptr, to_device=to_device)
    if table is not None and runs.high > runs.low:
        cuda.launch(kernel, _BLOCKS, _THREADS, (*table, runs.low, runs.high), stream)
