"""The kernel that copies many short runs between a device and memory that it reaches, on a few multiprocessors."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from mmkv import device as cuda
from mmkv.errors import MmkvError
from mmkv.store.pieces import Scatter

__all__ = ["CopyKernel", "Words", "table_words"]

_logger = logging.getLogger("mmkv")

Words = npt.NDArray[np.int64]

# Measured with `benchmarks/store_sweeps.py`: what fills the bus with the fewest multiprocessors.
_READ_BLOCKS, _WRITE_BLOCKS = 16, 16
_THREADS = 512
# Loads of 16 bytes that each thread has under way at once: they come over the bus, which takes microseconds.
_LOADS = 8
# Whether the warps of a block take neighbouring pieces, or each warp a row of its own.
_NEIGHBOURS = True

# A piece is what a warp copies at once. Every block takes an equal share of the pieces. A table has, for each of its
# `runs`, the slots of its file and of its buffer in `addresses`, its offsets in both and its size; then the number of
# pieces before each run and before the end.
_SOURCE = r"""
typedef unsigned long long word;

template <typename T>
__device__ __forceinline__ void copy_piece(char *target, const char *source, unsigned size, unsigned lane)
{
    unsigned head = (0 - (word)source) & (sizeof(T) - 1);
    if (head > size) head = size;
    const unsigned count = (size - head) / sizeof(T);
    const unsigned tail = head + count * sizeof(T);
    const T *from = (const T *)(source + head);
    T *to = (T *)(target + head);
    for (unsigned i = lane; i < count; i += 32 * LOADS) {
        T values[LOADS];
        #pragma unroll
        for (unsigned k = 0; k < LOADS; ++k) if (i + 32 * k < count) values[k] = from[i + 32 * k];
        #pragma unroll
        for (unsigned k = 0; k < LOADS; ++k) if (i + 32 * k < count) to[i + 32 * k] = values[k];
    }
    if (lane < head) target[lane] = source[lane];
    if (tail + lane < size) target[tail + lane] = source[tail + lane];
}

extern "C" __global__ void __launch_bounds__(THREADS)
copy_runs(const word *table, word runs, const word *addresses, word to_device)
{
    const word *slots = table, *in_files = table + runs, *in_buffers = table + 2 * runs;
    const word *sizes = table + 3 * runs, *before = table + 4 * runs;
    const word total = before[runs];
    const word warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const unsigned lane = threadIdx.x % 32;
#if NEIGHBOURS
    word piece = total * blockIdx.x / gridDim.x + warp;
    const word end = total * (blockIdx.x + 1) / gridDim.x, step = warps;
#else
    const word own = blockIdx.x * warps + warp, all = gridDim.x * warps;
    word piece = total * own / all;
    const word end = total * (own + 1) / all, step = 1;
#endif
    word run = 0, past = runs;
    while (past - run > 1) {
        const word middle = run + (past - run) / 2;
        if (before[middle] <= piece) run = middle; else past = middle;
    }
    for (; piece < end; piece += step) {
        while (before[run + 1] <= piece) ++run;
        const word offset = (piece - before[run]) * PIECE;
        const word left = sizes[run] - offset;
        const unsigned size = left < PIECE ? left : PIECE;
        char *file = (char *)(addresses[slots[run] >> 32] + in_files[run] + offset);
        char *buffer = (char *)(addresses[slots[run] & 0xffffffff] + in_buffers[run] + offset);
        const char *source = to_device ? file : buffer;
        char *target = to_device ? buffer : file;
        const word differ = (word)source ^ (word)target;
        if ((differ & 15) == 0) copy_piece<uint4>(target, source, size, lane);
        else if ((differ & 7) == 0) copy_piece<uint2>(target, source, size, lane);
        else if ((differ & 3) == 0) copy_piece<unsigned>(target, source, size, lane);
        else copy_piece<unsigned char>(target, source, size, lane);
    }
}
"""


def _piece_bytes() -> int:
    return 32 * 16 * _LOADS


def _source() -> str:
    defines = {"LOADS": _LOADS, "PIECE": _piece_bytes(), "THREADS": _THREADS, "NEIGHBOURS": int(_NEIGHBOURS)}
    return "".join(f"#define {name} {value}u\n" for name, value in defines.items()) + _SOURCE


class CopyKernel:
    """The kernel, compiled for each device when it is first needed there.

    Attributes
    ----------
    refused : str or None
        Why it could not be compiled.
    """

    def __init__(self) -> None:
        self.refused: str | None = None
        self._functions: dict[int, Any] = {}
        self._lock = threading.Lock()

    def ready(self, device: int) -> bool:
        """Whether the kernel can run on a device; compiles it there, which may take a second."""
        if device in self._functions:
            return True
        with self._lock:
            if device not in self._functions and self.refused is None:
                try:
                    self._functions[device] = cuda.compile_kernel(_source(), "copy_runs", device)
                except MmkvError as error:
                    self.refused = str(error)
                    _logger.warning("many short copies go one by one, which is slower: %s", error)
        return device in self._functions

    def launch(self, device: int, stream: Any, table: tuple[int, int], addresses: int, *, to_device: bool) -> None:
        """Give a CuPy stream on a device, which is current and ready, the copies of a table.

        `table` is its address on the device and the number of its runs, `addresses` that of what its slots stand for.
        """
        blocks = _READ_BLOCKS if to_device else _WRITE_BLOCKS
        cuda.launch(self._functions[device], blocks, _THREADS, (*table, addresses, int(to_device)), stream)

    def move_parts(
        self, bounce: int, buffer: int, scatter: Scatter, device: int, stream: Any, *, to_buffer: bool
    ) -> object:
        """Copy between the parts of a buffer and a row of them at `bounce`, in the order of a stream.

        The device must be current and ready. Returns what must live until the copy is done.
        """
        sizes = scatter.sizes
        table = table_words(np.ones_like(sizes), np.cumsum(sizes) - sizes, scatter.buffer_offsets, sizes)
        place, keep = cuda.upload(np.append(table, (bounce, buffer)), device, stream)
        self.launch(device, stream, (place, len(sizes)), place + table.nbytes, to_device=to_buffer)
        return keep


def table_words(slots: Words, in_files: Words, in_buffers: Words, sizes: Words) -> Words:
    """The words of a table; a run's slots are `file << 32 | buffer`."""
    before = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(-(-sizes // _piece_bytes()), out=before[1:])
    return np.concatenate((slots, in_files, in_buffers, sizes, before))
