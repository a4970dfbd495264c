"""The kernel that computes CRC32C of many units in device memory, whose parts may lie anywhere in it.

A warp takes a chunk of a part, `CHUNK` bytes counted from the part's end. In each step it loads 512 bytes, 16 a lane,
and each lane keeps four remainders, one for each word of its 16 bytes: a remainder is multiplied by x^4096 and the
new word is added. That product is a sum of `DIGITS` entries of tables in shared memory. A table of 32 entries has no
bank conflicts, whatever the lanes look up, since equal banks are equal words; one of 64 has two entries a bank.

At the end of a chunk a lane's four remainders are joined, each 32 bits behind the other, then those of all lanes in
five rounds of exchanges, then the warp multiplies by x for each bit that comes behind the chunk in its unit, six bits
of that distance at a time, and adds the result to the unit's value. Sums have no order, so parts, chunks and warps
need none.

What it costs, with 6 digits (widths 5, 5, 6, 5, 5, 6): for the 32 words of a warp 6 look-ups, 2 of which take two
turns, 14 shifts, masks and additions of three operands, and 7 additions of addresses. A multiprocessor has one turn of
look-ups, 2 of the operations and 4 instructions in all a cycle, so 128 bytes take 8, 7 and 7 cycles: at most 16 bytes a
cycle, which is 3.7 TB/s on 132 multiprocessors at 1.75 GHz. What is left of a chunk of 16 KiB adds a tenth.
"""

from __future__ import annotations

import functools
import logging
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmkv import device as cuda
from mmkv.castagnoli import Values, columns, power, shift, tables
from mmkv.checksum import Parts
from mmkv.errors import MmkvError

__all__ = ["Digest", "DigestKernel", "Shape"]

_logger = logging.getLogger("mmkv")

_LANES = 32
_VECTOR_BYTES = 16
_STEP_BYTES = _LANES * _VECTOR_BYTES
# Distances are looked up six bits at a time; a unit may be as large as so many of them say.
_DISTANCE_BITS, _DISTANCE_LEVELS = 6, 6
_ONES = np.uint32(0xFFFFFFFF)

# A table has, for each of its `parts`, its address, its size, the bytes of its unit behind it and the number of its
# unit; then the number of chunks before each part and before the end. Parts are read in aligned vectors of 16 bytes, so
# up to 15 bytes beside a part are loaded, of the same 16, and masked.
_SOURCE = r"""
typedef unsigned long long word;

enum { STEP, WORD, LANES, OPERATORS = LANES + 5 };

__device__ __forceinline__ unsigned multiply(const unsigned *table, unsigned value)
{
    unsigned product = 0;
    #pragma unroll
    for (unsigned k = 0; k < DIGITS; ++k) {
        const unsigned start = 32 * k / DIGITS, width = 32 * (k + 1) / DIGITS - start;
        product ^= table[k * ENTRIES + (value >> start & ((1u << width) - 1))];
    }
    return product;
}

// A word without the first `front` and the last `back` bytes of its vector, in which it is the word `k`.
__device__ __forceinline__ unsigned without(unsigned value, int k, int front, int back)
{
    front = min(max(front - 4 * k, 0), 4);
    back = min(max(back - 4 * (3 - k), 0), 4);
    return value & (unsigned)(0xffffffffull << 8 * front) & (unsigned)(0xffffffffull >> 8 * back);
}

extern "C" __global__ void __launch_bounds__(THREADS)
digest_parts(const word *table, word parts, const unsigned *operators, unsigned *values)
{
    __shared__ unsigned tables[OPERATORS * DIGITS * ENTRIES];
    for (unsigned i = threadIdx.x; i < OPERATORS * DIGITS * ENTRIES; i += THREADS) tables[i] = operators[i];
    __syncthreads();
    const unsigned *distances = operators + OPERATORS * DIGITS * ENTRIES;
    const word *addresses = table, *sizes = table + parts, *behinds = table + 2 * parts, *units = table + 3 * parts;
    const word *before = table + 4 * parts;
    const word own = blockIdx.x * (THREADS / 32) + threadIdx.x / 32, all = gridDim.x * (THREADS / 32);
    const int lane = threadIdx.x % 32;

    word chunk = before[parts] * own / all;
    const word end = before[parts] * (own + 1) / all;
    word part = 0, past = parts;
    while (past - part > 1) {
        const word middle = part + (past - part) / 2;
        if (before[middle] <= chunk) part = middle; else past = middle;
    }
    for (; chunk < end; ++chunk) {
        while (before[part + 1] <= chunk) ++part;
        const word start = addresses[part], stop = start + sizes[part];
        const word first = start & ~15ull, last = (stop + 15) & ~15ull;
        const word skipped = (chunk - before[part]) * CHUNK;
        const int count = min(last - skipped - first, (word)CHUNK) / 16;
        const uint4 *vectors = (const uint4 *)(last - skipped) - count;
        const int front = (word)vectors == first ? start - first : 0;
        const int back = skipped == 0 ? last - stop : 0;

        uint4 sums = {0, 0, 0, 0};
        for (int left = (count + 31) / 32; left > 0; left -= LOADS) {
            uint4 loaded[LOADS];
            #pragma unroll
            for (int k = 0; k < LOADS; ++k) {
                // Steps are counted from the end; the first one may lack lanes, and the last ones of `LOADS` may lack.
                const int at = count - 32 * (left - k) + lane;
                loaded[k] = at >= 0 && at < count ? vectors[at] : uint4{0, 0, 0, 0};
                if (front + back) {
                    const int cut = at == 0 ? front : 0, cut_back = at == count - 1 ? back : 0;
                    loaded[k].x = without(loaded[k].x, 0, cut, cut_back);
                    loaded[k].y = without(loaded[k].y, 1, cut, cut_back);
                    loaded[k].z = without(loaded[k].z, 2, cut, cut_back);
                    loaded[k].w = without(loaded[k].w, 3, cut, cut_back);
                }
            }
            #pragma unroll
            for (int k = 0; k < LOADS; ++k) {
                if (k >= left) break;
                sums.x = multiply(tables, sums.x) ^ loaded[k].x;
                sums.y = multiply(tables, sums.y) ^ loaded[k].y;
                sums.z = multiply(tables, sums.z) ^ loaded[k].z;
                sums.w = multiply(tables, sums.w) ^ loaded[k].w;
            }
        }
        const unsigned *by_word = tables + WORD * DIGITS * ENTRIES;
        unsigned sum = multiply(by_word, sums.x) ^ sums.y;
        sum = multiply(by_word, sum) ^ sums.z;
        sum = multiply(by_word, sum) ^ sums.w;
        sum = multiply(by_word, sum);
        #pragma unroll
        for (int level = 0; level < 5; ++level) {
            const unsigned other = __shfl_xor_sync(~0u, sum, 1 << level);
            const bool upper = lane >> level & 1;
            sum = multiply(tables + (LANES + level) * DIGITS * ENTRIES, upper ? other : sum) ^ (upper ? sum : other);
        }
        // The lowest digit's factors make up for these 16 bytes.
        word distance = behinds[part] + skipped + 16 - (last - stop);
        for (const unsigned *level = distances; distance; level += 32 << DISTANCE_BITS) {
            const unsigned column = level[(distance & ((1 << DISTANCE_BITS) - 1)) * 32 + lane];
            sum = sum >> lane & 1 ? column : 0;
            #pragma unroll
            for (int apart = 1; apart < 32; apart *= 2) sum ^= __shfl_xor_sync(~0u, sum, apart);
            distance >>= DISTANCE_BITS;
        }
        if (lane == 0) atomicXor(values + units[part], sum);
    }
}
"""


# Tables come, and checksums go, by this and not by a copy engine: that does one after the other, and what the transfer
# itself has given it, the whole conversation, most often, comes first.
_MOVER = r"""
typedef unsigned long long word;

extern "C" __global__ void move_words(const word *from, word *to, word count)
{
    const word all = gridDim.x * (word)blockDim.x;
    for (word i = blockIdx.x * (word)blockDim.x + threadIdx.x; i < count; i += all) to[i] = from[i];
}
"""
_MOVER_THREADS, _MOVER_BLOCKS = 256, 32


@dataclass(frozen=True)
class Shape:
    """How the kernel is cut; chosen with `benchmarks/checksum_kernel.py`.

    Attributes
    ----------
    digits : int
        How many look-ups make a product.
    loads : int
        How many loads of 16 bytes each thread has under way at once.
    chunk_bytes : int
        What a warp does at a time.
    threads, blocks : int
        Threads of a block, and blocks at most.
    """

    digits: int = 6
    loads: int = 4
    chunk_bytes: int = 16 << 10
    threads: int = 256
    blocks: int = 4 * 132

    def source(self) -> str:
        """The kernel's source."""
        defines = {
            "DIGITS": self.digits,
            "ENTRIES": 1 << -(-32 // self.digits),
            "LOADS": self.loads,
            "CHUNK": self.chunk_bytes,
            "THREADS": self.threads,
            "DISTANCE_BITS": _DISTANCE_BITS,
        }
        return "".join(f"#define {name} {value}\n" for name, value in defines.items()) + _SOURCE

    def operators(self) -> Values:
        """The tables that the kernel loads into shared memory, and the factors of distances behind them."""
        words = [tables(power(bits), self.digits).ravel() for bits in _FACTORS]
        return np.concatenate([*words, _distance_factors()])

    def table(self, parts: Parts) -> npt.NDArray[np.int64]:
        """The words of the kernel's table of parts."""
        reach = 1 << _DISTANCE_BITS * _DISTANCE_LEVELS
        if parts.unit_sizes.max(initial=0) > reach - _STEP_BYTES:
            raise ValueError(f"a unit of {parts.unit_sizes.max()} bytes is larger than {reach - _STEP_BYTES}")
        first = parts.addresses & -_VECTOR_BYTES
        # Chunks are counted from the vector that a part ends in.
        vectors = -(-(parts.addresses + parts.sizes - first) // _VECTOR_BYTES)
        chunks = -(-vectors // (self.chunk_bytes // _VECTOR_BYTES))
        before = np.zeros(len(chunks) + 1, dtype=np.int64)
        np.cumsum(np.where(parts.sizes > 0, chunks, 0), out=before[1:])
        return np.concatenate((parts.addresses, parts.sizes, parts.behind, parts.units, before))


# By how many bits the values are apart that the kernel joins: of a lane in two steps, the words of a vector, two lanes.
_FACTORS = (8 * _STEP_BYTES, 32, *(8 * _VECTOR_BYTES << level for level in range(5)))


@functools.cache
def _distance_factors() -> Values:
    """For each digit of a distance in bytes, the columns of its factor; the lowest also takes 16 bytes away."""
    exponents = [
        8 * (digit << _DISTANCE_BITS * level) - (0 if level else 8 * _VECTOR_BYTES)
        for level in range(_DISTANCE_LEVELS)
        for digit in range(1 << _DISTANCE_BITS)
    ]
    return np.concatenate([columns(power(exponent)) for exponent in exponents])


class Digest:
    """Checksums of units that a stream computes."""

    __slots__ = ("_count", "_keep", "_staged")

    def __init__(self, staged: Any, count: int, keep: object) -> None:
        self._staged, self._count, self._keep = staged, count, keep

    def values(self) -> Values:
        """The checksums, in the units' order. Only once the stream has come so far."""
        return np.frombuffer(self._staged, dtype=np.uint32, count=self._count).copy()


class DigestKernel:
    """The kernel, compiled for each device when it is first needed there.

    Attributes
    ----------
    refused : str or None
        Why it could not be compiled.
    """

    def __init__(self, shape: Shape | None = None) -> None:
        self.refused: str | None = None
        self._shape = Shape() if shape is None else shape
        self._functions: dict[int, tuple[Any, Any, int, object]] = {}
        self._lock = threading.Lock()

    def ready(self, device: int) -> bool:
        """Whether the kernel can run on a device; compiles it there, which may take a second."""
        if device in self._functions:
            return True
        with self._lock:
            if device not in self._functions and self.refused is None:
                try:
                    self._functions[device] = self._compiled(device)
                except MmkvError as error:
                    self.refused = str(error)
                    _logger.warning("checksums of device memory cannot be computed there: %s", error)
        return device in self._functions

    def _compiled(self, device: int) -> tuple[Any, Any, int, object]:
        function = cuda.compile_kernel(self._shape.source(), "digest_parts", device)
        mover = cuda.compile_kernel(_MOVER, "move_words", device)
        stream = cuda.new_stream(device)
        with cuda.current(device):
            operators, keep = cuda.upload(self._shape.operators().view(np.int64), device, stream)
            stream.synchronize()
        return function, mover, operators, keep

    def launch(self, parts: Parts, device: int, stream: Any, values: npt.ArrayLike | None = None) -> Digest:
        """Give a CuPy stream on a device, which is current and ready, the checksums of units in its memory.

        Costs the host some milliseconds for 100,000 parts.

        Parameters
        ----------
        parts : Parts
            The units.
        device : int
            The device.
        stream : cupy.cuda.Stream
            In whose order the memory is read.
        values : array_like of uint32, optional
            The checksums of what comes before each unit, which this continues.

        Returns
        -------
        Digest
            To keep until the stream has come so far.

        Raises
        ------
        ValueError
            A unit is too large.
        """
        shape = self._shape
        function, mover, operators, _ = self._functions[device]
        table = shape.table(parts)
        # A checksum starts and ends with inverted bits; what comes of those depends on the unit's size alone.
        results = np.zeros(parts.count + parts.count % 2, dtype=np.uint32)
        if values is None:
            # Most units are of a few sizes.
            sizes, which = np.unique(parts.unit_sizes, return_inverse=True)
            results[: parts.count] = np.array([_of_zeros(size) for size in sizes.tolist()], dtype=np.uint32)[which]
        else:
            results[: parts.count] = shift(np.asarray(values, np.uint32) ^ _ONES, parts.unit_sizes) ^ _ONES
        words = np.concatenate((table, results.view(np.int64)))
        given, there, staged = (
            cuda.pinned(words.nbytes),
            cuda.scratch(device, words.nbytes),
            cuda.pinned(results.nbytes),
        )
        np.frombuffer(given, dtype=np.int64, count=len(words))[:] = words
        _move(mover, given.ptr, there.ptr, len(words), stream)
        warps = shape.threads // _LANES
        blocks = min(shape.blocks, -(-int(table[-1]) // warps))
        on_device = there.ptr + table.nbytes
        if blocks:
            arguments = (there.ptr, len(parts.sizes), operators, on_device)
            cuda.launch(function, blocks, shape.threads, arguments, stream)
        _move(mover, on_device, staged.ptr, len(results) // 2, stream)
        return Digest(staged, parts.count, (given, there))


@functools.lru_cache(maxsize=1 << 12)
def _of_zeros(size: int) -> int:
    """The checksum of so many zeros."""
    return int(shift(_ONES, size)) ^ int(_ONES)


def _move(mover: Any, source: int, target: int, words: int, stream: Any) -> None:
    if words:
        blocks = min(_MOVER_BLOCKS, -(-words // _MOVER_THREADS))
        cuda.launch(mover, blocks, _MOVER_THREADS, (source, target, words), stream)
