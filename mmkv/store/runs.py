"""How the runs of a transfer are handed to a device: long ones to a copy engine, short ones in a table to a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mmkv import device as cuda
from mmkv.store.contract import Copy, LayerCopies

__all__ = ["Batch", "DeviceRuns", "NotLockedError", "SegmentKey", "kernel_for", "plan", "segments_of", "submit"]

SegmentKey = tuple[tuple[int, int], int]

# From this size on the copy engine is the faster one (measured on an H200: 54 against 51 GB/s).
_LONG_BYTES = 4 << 20
# So few runs cost the copy engine no more than a kernel's start.
_FEW_RUNS = 4
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
    """The runs of some layers by layer and device, and a table of short runs for each device."""

    layers: list[tuple[LayerCopies, int, dict[int, DeviceRuns]]]
    tables: dict[int, npt.NDArray[np.int64]]


def segments_of(copy: Copy) -> list[int]:
    """The segments of its file that a copy touches, in order."""
    if len(copy.file_offsets) > 16:
        return [int(segment) for segment in np.unique(copy.file_offsets // copy.file.segment_bytes)]
    return sorted({offset // copy.file.segment_bytes for offset in copy.file_offsets.tolist()})


def plan(layers: Sequence[LayerCopies], bases: Mapping[SegmentKey, int], *, to_device: bool, kernel: bool) -> Batch:
    """Find every run's addresses and choose who copies it. Costs some microseconds a copy, nanoseconds a run.

    `bases` says where page-locked segments are mapped, `kernel` whether a kernel may take short runs.

    Raises
    ------
    NotLockedError
        A run lies in a segment that `bases` lacks.
    """
    parts: dict[int, list[npt.NDArray[np.int64]]] = {}
    rows: dict[int, int] = {}
    planned = []
    for layer in layers:
        size, by_device = 0, {}
        for device, copies in _by_device(layer).items():
            runs = by_device[device] = DeviceRuns()
            few: list[tuple[int, int, int]] = []
            tables: list[npt.NDArray[np.int64]] = []
            for copy in copies:
                if len(copy.sizes) <= 16:
                    size += _few_addresses(copy, bases, to_device, few)
                else:
                    table = _addresses(copy, bases, to_device)
                    size += int(table[2].sum())
                    tables.append(table)
            short = [run for run in few if run[2] < _LONG_BYTES]
            runs.long.extend(run for run in few if run[2] >= _LONG_BYTES)
            for table in tables:
                is_long = table[2] >= _LONG_BYTES
                runs.long.extend(zip(*table[:, is_long].tolist(), strict=True))
            tables = [table[:, table[2] < _LONG_BYTES] for table in tables]
            count = len(short) + sum(table.shape[1] for table in tables)
            if not kernel or count <= _FEW_RUNS:
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


def _by_device(layer: LayerCopies) -> dict[int, list[Copy]]:
    copies: dict[int, list[Copy]] = {}
    for copy in layer.copies:
        if len(copy.sizes):
            device = copy.buffer.device
            if device is None:
                raise ValueError(f"layer {layer.layer}, {copy.name!r}: host memory moves by no page-locked map")
            copies.setdefault(device, []).append(copy)
    return copies


def _few_addresses(
    copy: Copy, bases: Mapping[SegmentKey, int], to_device: bool, runs: list[tuple[int, int, int]]
) -> int:
    identity, segment_bytes, start = copy.file.identity, copy.file.segment_bytes, copy.buffer.address
    total = 0
    places = zip(copy.file_offsets.tolist(), copy.buffer_offsets.tolist(), copy.sizes.tolist(), strict=True)
    for file_offset, buffer_offset, size in places:
        segment, inside = divmod(file_offset, segment_bytes)
        base = bases.get((identity, segment))
        if base is None:
            raise NotLockedError
        pair = (start + buffer_offset, base + inside)
        runs.append((*pair, size) if to_device else (*reversed(pair), size))
        total += size
    return total


def _addresses(copy: Copy, bases: Mapping[SegmentKey, int], to_device: bool) -> npt.NDArray[np.int64]:
    """Targets, sources and sizes of a copy's runs, one row each."""
    segments = copy.file_offsets // copy.file.segment_bytes
    first = int(segments.min())
    known = np.array(
        [bases.get((copy.file.identity, segment), 0) for segment in range(first, int(segments.max()) + 1)], np.int64
    )
    base = known[segments - first]
    if not base.all():
        raise NotLockedError
    in_file = base + (copy.file_offsets - segments * copy.file.segment_bytes)
    in_buffer = copy.buffer.address + copy.buffer_offsets
    return np.stack((in_buffer, in_file, copy.sizes) if to_device else (in_file, in_buffer, copy.sizes))


def _table(tables: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
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
