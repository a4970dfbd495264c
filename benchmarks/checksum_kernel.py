"""Times the checksum kernel in its shapes, and checks it: `python -m benchmarks.checksum_kernel [GB]`.

Every shape runs over the same memory, in units of several sizes, in rows scattered over pages, and as one unit; its
values must be the host's. The shape that wins belongs into the defaults of `mmkv.store.digest.Shape`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mmkv import device as cuda
from mmkv.checksum import Parts, Values, combine, host_checksums
from mmkv.driver import cupy_module
from mmkv.errors import MmkvError
from mmkv.store.digest import DigestKernel, Shape

DEVICE, REPEATS, CHECKED = 0, 5, 8 << 20
SHAPES = {
    "as it is": Shape(),
    "7 digits": Shape(digits=7),
    "8 digits": Shape(digits=8),
    "4 digits": Shape(digits=4),
    "2 loads": Shape(loads=2),
    "8 loads": Shape(loads=8),
    "8 KiB chunks": Shape(chunk_bytes=8 << 10),
    "32 KiB chunks": Shape(chunk_bytes=32 << 10),
    "7 digits, 32 KiB": Shape(digits=7, chunk_bytes=32 << 10),
    "128 threads": Shape(threads=128, blocks=8 * 132),
    "512 threads": Shape(threads=512, blocks=2 * 132),
    "half the warps": Shape(blocks=2 * 132),
    "2 loads, twice the warps": Shape(loads=2, blocks=8 * 132),
    "32 blocks of 256": Shape(blocks=32),
}


def cases(base: int, size: int) -> dict[str, Parts]:
    """Units that memory of `size` bytes at `base` is cut into, by name."""
    rng = np.random.default_rng(1)
    pages = base + rng.permutation(100_000) * 768
    odd_sizes = rng.integers(1, 30_000, 20_000)
    odd = base + rng.integers(0, size - odd_sizes)
    return {
        "one unit": Parts.cut([base], [size], size),
        "1 MiB": Parts.cut([base], [size], 1 << 20),
        "256 KiB": Parts.cut([base], [size], 256 << 10),
        "24 KiB": Parts.cut([base], [size // 4], 24 << 10),
        "4 KiB": Parts.cut([base], [size // 4], 4 << 10),
        "pages of 768 B": Parts.cut(pages, np.full(100_000, 768), 24 << 10),
        "rows of 48 B": Parts.cut(pages, np.full(100_000, 48), 24 << 10),
        "odd": Parts(odd, odd_sizes, np.arange(len(odd)), len(odd)),
        "64 MiB": Parts.cut([base], [64 << 20], 256 << 10),
    }


def timed(work: Callable[[], None], stream: Any) -> float:
    """The median time of some work on the stream, in seconds."""
    events = cupy_module().cuda
    work()
    times = []
    for _ in range(REPEATS):
        start, end = events.Event(), events.Event()
        start.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        times.append(events.get_elapsed_time(start, end) / 1e3)
    return float(statistics.median(times))


def kernel_seconds(shape: Shape, function: Any, parts: Parts, stream: Any) -> float:
    """The time of the kernel alone."""
    table = shape.table(parts)
    words = np.concatenate((table, shape.operators().view(np.int64), np.zeros(parts.count // 2 + 1, np.int64)))
    place, keep = cuda.upload(words, DEVICE, stream)
    operators = place + table.nbytes
    arguments = (place, len(parts.sizes), operators, operators + shape.operators().nbytes)
    blocks = min(shape.blocks, -(-int(table[-1]) // (shape.threads // 32)))
    seconds = timed(lambda: cuda.launch(function, blocks, shape.threads, arguments, stream), stream)
    del keep
    return seconds


def values_of(kernel: DigestKernel, parts: Parts, stream: Any) -> tuple[Values, float, float]:
    """The checksums, the host's time for the launch, and the time until the values are there."""
    start = time.perf_counter()
    digest = kernel.launch(parts, DEVICE, stream)
    launched = time.perf_counter() - start
    stream.synchronize()
    done = time.perf_counter() - start
    return digest.values(), launched, done


def check(name: str, parts: Parts, values: Values, base: int, host: np.ndarray[Any, Any]) -> bool:
    """Compare the values of units that lie in what the host has a copy of; whether they are the same."""
    ends = parts.addresses + parts.sizes
    outside = np.unique(parts.units[ends > base + len(host)])
    inside = np.setdiff1d(np.unique(parts.units), outside)[:2000]
    chosen = np.isin(parts.units, inside)
    here = Parts(
        parts.addresses[chosen] - base + host.ctypes.data,
        parts.sizes[chosen],
        np.searchsorted(inside, parts.units[chosen]),
        len(inside),
    )
    wrong = int(np.count_nonzero(host_checksums(here) != values[inside]))
    if wrong:
        print(f"WRONG {name}: {wrong} of {len(inside)} units")
    return not wrong


def main() -> None:
    """Print the table."""
    try:
        cupy = cupy_module()
    except MmkvError as error:
        raise SystemExit(f"error: {error}") from None
    size = int(float(sys.argv[1]) * 1e9 if len(sys.argv) > 1 else 5e9) // 4096 * 4096
    with cuda.current(DEVICE):
        stream = cuda.new_stream(DEVICE)
        data = cupy.arange(size // 4, dtype=cupy.uint32)
        data *= np.uint32(2654435761)
        data ^= data >> np.uint32(15)
        cupy.cuda.runtime.deviceSynchronize()
        base = data.data.ptr
        host = np.frombuffer(data[: CHECKED // 4].get().tobytes(), dtype=np.uint8)
        todo = cases(base, size)
        with stream:
            total = cupy.empty((), cupy.uint64)
            seconds = timed(lambda: data.view(cupy.uint64).sum(out=total), stream)
        print(f"a sum of all {size / 1e9:.1f} GB: {size / seconds / 1e9:.0f} GB/s\n")
        print("GB/s".ljust(26) + "".join(name.rjust(16) for name in todo))
        known: dict[str, Values] = {}
        sound = True
        for label, shape in SHAPES.items():
            kernel = DigestKernel(shape)
            if not kernel.ready(DEVICE):
                print(label, kernel.refused)
                continue
            function = kernel._functions[DEVICE][0]
            rates = []
            for name, parts in todo.items():
                values, _, _ = values_of(kernel, parts, stream)
                if name not in known:
                    sound &= check(f"{label}, {name}", parts, values, base, host)
                if (known.setdefault(name, values) != values).any():
                    print(f"WRONG {label}, {name}: not what another shape computes")
                    sound = False
                rates.append(int(parts.sizes.sum()) / kernel_seconds(shape, function, parts, stream) / 1e9)
            print(label.ljust(26) + "".join(f"{rate:16.0f}" for rate in rates), flush=True)
        joined = 0
        for value, length in zip(known["1 MiB"], todo["1 MiB"].unit_sizes, strict=True):
            joined = int(combine(joined, value, length))
        if joined != known["one unit"][0]:
            print("WRONG one unit: not what its pieces make")
            sound = False
        print("\nwith the table, as it is".ljust(27) + "     parts  launched ms    values ms")
        kernel = DigestKernel()
        kernel.ready(DEVICE)
        for name, parts in todo.items():
            runs = [values_of(kernel, parts, stream)[1:] for _ in range(REPEATS)]
            launched, done = (1e3 * statistics.median(column) for column in zip(*runs, strict=True))
            print(name.ljust(26) + f"{len(parts.sizes):10}{launched:13.2f}{done:13.2f}")
    if not sound:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
