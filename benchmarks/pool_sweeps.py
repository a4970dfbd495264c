"""Times a pool on device arrays; a part of `benchmarks.store_sweeps`, and the process that reopens its pool."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mmkv

PLANES = {"k": (4, 128), "v": (4, 64), "scale": (48,)}
CAPACITY = "64GiB"
REPEATS = 5
# Milliseconds until the call returned and until the first layer was ready, the seconds of all, and the receipt.
Times = tuple[float, float, float, mmkv.Receipt]


def layout_of(layers: int) -> mmkv.Layout:
    """The layout of the arrays."""
    planes = {name: mmkv.Plane("uint8", shape) for name, shape in PLANES.items()}
    return mmkv.Layout(layers=[mmkv.Layer(planes=planes)] * layers, model="probe")


def slot_of(arrays: Sequence[dict[str, Any]]) -> mmkv.Slot:
    """A slot of the arrays, in the planes' shapes."""
    shaped = [{name: array.reshape(-1, *PLANES[name]) for name, array in planes.items()} for planes in arrays]
    return mmkv.Slot(layout_of(len(arrays)), shaped)


def wait_until_locked(pool: mmkv.Pool) -> float:
    """Wait until everything that is allocated is page-locked; the seconds that it took."""
    start = time.perf_counter()
    store = pool._movers.device_store()
    wanted = sum(len(segments) * file.segment_bytes for files, segments in pool._space.allocated() for file in files)
    while store.describe()["locked_bytes"] < wanted and time.perf_counter() - start < 20:
        time.sleep(0.002)
    return time.perf_counter() - start


def take(pool: mmkv.Pool, slot: mmkv.Slot, stream: Any, consumer: Any) -> Times:
    """Take a conversation; the first layer is ready when a consumer's stream sees it."""
    import cupy

    begin, ready = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record(consumer)
    start = time.perf_counter()
    transfer = pool.take("whole", slot, stream=stream)
    submitted = time.perf_counter() - start
    transfer.wait(0, stream=consumer)
    ready.record(consumer)
    receipt = transfer.result()
    end = time.perf_counter() - start
    ready.synchronize()
    return 1e3 * submitted, cupy.cuda.get_elapsed_time(begin, ready), end, receipt


def show(what: str, size: int, runs: Sequence[Times]) -> None:
    """Print the medians of some transfers."""
    submitted = statistics.median(run[0] for run in runs)
    first = statistics.median(run[1] for run in runs)
    end = statistics.median(run[2] for run in runs)
    print(
        f"pool, {what:34} {size / end / 1e9:6.1f} GB/s  {1e3 * end:8.2f} ms  submitted {submitted:6.2f} ms"
        f"  first layer {first:6.2f} ms  {runs[-1][3].path}", flush=True,
    )  # fmt: skip


def park(pool: mmkv.Pool, name: str, slot: mmkv.Slot, ids: Any, stream: Any) -> Times:
    """Park a conversation."""
    start = time.perf_counter()
    transfer = pool.park(name, slot, ids, stream=stream)
    submitted = time.perf_counter() - start
    receipt = transfer.result()
    return 1e3 * submitted, float("nan"), time.perf_counter() - start, receipt


def checksum(arrays: Sequence[dict[str, Any]]) -> list[int]:
    """A sum of every array that depends on the order of its bytes."""
    import cupy

    sums = []
    for planes in arrays:
        for array in planes.values():
            words = array.reshape(-1).view(cupy.uint64)
            sums.append(int((words * cupy.arange(1, 2 * len(words), 2, dtype=cupy.uint64)).sum()))
    return sums


def main(path: Path, arrays: Sequence[dict[str, Any]]) -> None:
    """Park and take in a new pool, and take in a process of its own that reopens it."""
    import cupy

    size = sum(array.nbytes for planes in arrays for array in planes.values())
    slot, tokens = slot_of(arrays), len(arrays[0]["k"])
    ids = np.arange(tokens)
    stream, consumer = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    before = checksum(arrays)
    with mmkv.Pool.open(path, layout_of(len(arrays)), capacity=CAPACITY) as pool:
        show("park into fresh pages", size, [park(pool, "whole", slot, ids, stream)])
        print(f"all page-locked {wait_until_locked(pool):.2f} s later")
        for planes in arrays:
            for array in planes.values():
                array.fill(0)
        stream.synchronize()
        cupy.cuda.runtime.deviceSynchronize()
        take(pool, slot, stream, consumer)
        assert checksum(arrays) == before
        show("take whole", size, [take(pool, slot, stream, consumer) for _ in range(REPEATS)])
        parks = []
        for number in range(REPEATS + 2):
            parks.append(park(pool, "other", slot, ids + tokens * (number + 1), stream))
            pool.drop("other")
            wait_until_locked(pool)
        show("park whole", size, parks[2:])
        few = size // tokens * 383
        pool.park("grows", slot, ids[: tokens - 8 * 383] + 1, stream=stream).result()
        wait_until_locked(pool)
        grown = [park(pool, "grows", slot, ids[: tokens - n * 383] + 1, stream) for n in range(7, 0, -1)]
        show("park 383 tokens more", few, grown[1:])
        pool.drop("grows")
        swaps = []
        for number in range(5):
            start = time.perf_counter()
            leaving, arriving = pool.swap(
                slot, leaving="leaves", leaving_ids=ids + tokens * (20 + number), arriving="whole", stream=stream
            )
            submitted = time.perf_counter() - start
            leaving.result()
            receipt = arriving.result()
            swaps.append((1e3 * submitted, float("nan"), time.perf_counter() - start, receipt))
            pool.drop("leaves")
            wait_until_locked(pool)
        show("swap, both ways together", 2 * size, swaps[2:])
        assert checksum(arrays) == before
    for _ in range(2):
        command = [sys.executable, "-m", "benchmarks.pool_sweeps", str(path), str(tokens), str(len(arrays))]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        *lines, sums = found.stdout.splitlines()
        print("\n".join(lines), flush=True)
        assert sums == str(before), "a new process took other bytes"


def reopen(path: Path, tokens: int, layers: int) -> None:
    """Take at once from a pool that was just opened, as a new process does."""
    import cupy

    arrays = [
        {name: cupy.zeros((tokens, int(np.prod(shape))), cupy.uint8) for name, shape in PLANES.items()}
        for _ in range(layers)
    ]
    slot = slot_of(arrays)
    size = sum(array.nbytes for planes in arrays for array in planes.values())
    stream, consumer = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Event().record(stream)
    cupy.cuda.runtime.deviceSynchronize()
    start = time.perf_counter()
    with mmkv.Pool.open(path) as pool:
        print(f"reopened in {1e3 * (time.perf_counter() - start):.1f} ms")
        for turn in ("first", "second", "third"):
            show(f"{turn} take of a new process", size, [take(pool, slot, stream, consumer)])
        print(f"all page-locked {wait_until_locked(pool):.2f} s later")
        show("then", size, [take(pool, slot, stream, consumer) for _ in range(2)][1:])
    print(checksum(arrays))


if __name__ == "__main__":
    reopen(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
