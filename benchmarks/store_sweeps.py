"""Times device arrays through a pool and through its stores alone: `python -m benchmarks.store_sweeps DIR`."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import pool_sweeps
from mmkv import device as cuda
from mmkv import driver
from mmkv.buffer import buffer_of
from mmkv.device import Event
from mmkv.store import Copy, DirectStore, LayerCopies, MappedStore, PoolFile, StagedStore, Store, kernel, runs, staged

LAYERS, TOKENS, SEGMENT_BYTES, SEGMENTS, REPEATS = 48, 131_072, 32 << 20, 6, 5
PLANES = {"k": 512, "v": 256, "scale": 48}
Extents = list[tuple[int, int, int]]


class Watch:
    """A progress that notes times."""

    stopped = False

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: dict[int, float] = {}
        self.paths: dict[str, int] = {}
        self.done = threading.Event()
        self.end = 0.0

    def submitted(self, layer: int, event: Event) -> None:
        pass

    def landed(self, layer: int) -> None:
        self.times[layer] = time.perf_counter() - self.start

    def moved(self, path: str, size: int, _address: int | None = None) -> None:
        self.paths[path] = self.paths.get(path, 0) + size

    def failed(self, error: Exception) -> None:
        print("FAILED", error)

    def released(self) -> None:
        self.end = time.perf_counter() - self.start
        self.done.set()


def copies_of(
    files: Sequence[PoolFile], arrays: Sequence[dict[str, Any]], extents: Extents, heads: int
) -> list[LayerCopies]:
    """The copies of a conversation in extents of (segment, first token within, tokens)."""
    room = SEGMENT_BYTES // (sum(PLANES.values())) // 4096 * 4096
    table = np.array(extents, np.int64)
    places, region = [], 0
    for name, width in PLANES.items():
        share = width // heads
        sizes = table[:, 2] * share
        for head in range(heads):
            buffer_offsets = head * TOKENS * share + np.concatenate(([0], np.cumsum(sizes)[:-1]))
            offsets = table[:, 0] * SEGMENT_BYTES + region + head * room * share + table[:, 1] * share
            places.append((name, offsets, buffer_offsets, sizes))
        region += room * width
    return [
        LayerCopies(number, tuple(Copy(name, file, buffer_of(planes[name]), *place) for name, *place in places))
        for number, (file, planes) in enumerate(zip(files, arrays, strict=True))
    ]


def contiguous(tokens: int) -> Extents:
    """One extent a segment, one behind the other."""
    room = SEGMENT_BYTES // (sum(PLANES.values())) // 4096 * 4096
    return [(at // room, 0, min(room, tokens - at)) for at in range(0, tokens, room)]


def cut(extents: Extents, tokens: int) -> Extents:
    """The same tokens in extents of `tokens` each."""
    rng = np.random.default_rng(0)
    pieces = [(s, at, min(tokens, n - at)) for s, _, n in extents for at in range(0, n, tokens)]
    return [pieces[i] for i in rng.permutation(len(pieces))]


def timed(move: Callable[..., None], layers: list[LayerCopies]) -> tuple[float, float, float, dict[str, int]]:
    """Seconds until the end, until submitted and until the first layer, and the bytes by path."""
    watch = Watch()
    move(layers, watch)
    submitted = time.perf_counter() - watch.start
    watch.done.wait()
    return watch.end, submitted, watch.times.get(0, 0.0), watch.paths


def show(what: str, store: Store, layers: list[LayerCopies], repeats: int = REPEATS) -> None:
    """Time writes and reads, and print their medians."""
    size = sum(layer.bytes for layer in layers)
    for name, move in (("write", store.write), ("read", store.read)):
        all_runs = [timed(move, layers) for _ in range(repeats + 1)][1:]
        end = statistics.median(run[0] for run in all_runs)
        submitted = statistics.median(run[1] for run in all_runs)
        first = statistics.median(run[2] for run in all_runs)
        runs_count = sum(len(copy.sizes) for layer in layers for copy in layer.copies)
        print(
            f"{what:34} {name:5} {size / end / 1e9:6.1f} GB/s  {1e3 * end:8.2f} ms  submitted {1e3 * submitted:6.2f} ms"
            f"  first layer {1e3 * first:6.2f} ms  runs {runs_count}  {sorted(all_runs[-1][3])}", flush=True,
        )  # fmt: skip


def verify(store: Store, layers: list[LayerCopies], arrays: Sequence[dict[str, Any]], cupy: Any) -> None:
    """Write, clear and read the arrays, and compare."""
    sums = [{name: cupy.asnumpy(array).copy() for name, array in planes.items()} for planes in (arrays[0], arrays[-1])]
    timed(store.write, layers)
    for planes in (arrays[0], arrays[-1]):
        for array in planes.values():
            array.fill(0)
    cupy.cuda.runtime.deviceSynchronize()
    timed(store.read, layers)
    for planes, before in zip((arrays[0], arrays[-1]), sums, strict=True):
        for name, array in planes.items():
            assert np.array_equal(cupy.asnumpy(array), before[name]), name
    print("verified")


def ceiling(cupy: Any, arrays: Sequence[dict[str, Any]]) -> None:
    """Time page-locked RAM, the limit."""
    runtime = cupy.cuda.runtime
    size = sum(a.nbytes for planes in arrays for a in planes.values())
    host = runtime.hostAlloc(size, 1)
    stream = cupy.cuda.Stream(non_blocking=True)
    for name, kind in (("write", 2), ("read", 1)):
        times = []
        for _ in range(REPEATS + 1):
            start, at = time.perf_counter(), host
            for planes in arrays:
                for array in planes.values():
                    pair = (at, array.data.ptr) if kind == 2 else (array.data.ptr, at)
                    runtime.memcpyAsync(*pair, array.nbytes, kind, stream.ptr)
                    at += array.nbytes
            stream.synchronize()
            times.append(time.perf_counter() - start)
        print(f"{'page-locked RAM':34} {name:5} {size / statistics.median(times[1:]) / 1e9:6.1f} GB/s", flush=True)
    runtime.freeHost(host)


def locked(store: MappedStore, files: Sequence[PoolFile]) -> float:
    """Page-lock everything; the seconds that it took."""
    start = time.perf_counter()
    store.prepare(files, range(SEGMENTS))
    while store.describe()["locked_bytes"] < len(files) * SEGMENTS * SEGMENT_BYTES:
        time.sleep(0.001)
    return time.perf_counter() - start


def sweep_kernel(store: MappedStore, layers: list[LayerCopies], what: str) -> None:
    """What the kernel does with each number of blocks, loads under way and order of the warps."""
    size = sum(layer.bytes for layer in layers)
    for neighbours in (True, False):
        for loads in (4, 8, 16):
            kernel._NEIGHBOURS, kernel._LOADS = neighbours, loads
            store._kernel = kernel.CopyKernel()
            cells = []
            for blocks in (8, 16, 24, 32):
                kernel._READ_BLOCKS = kernel._WRITE_BLOCKS = blocks
                ends = [min(timed(move, layers)[0] for _ in range(3)) for move in (store.write, store.read)]
                cells.append(f"{blocks:3}: {size / ends[0] / 1e9:4.1f} / {size / ends[1] / 1e9:4.1f}")
            print(
                f"{what}, neighbours {neighbours!s:5}, loads {loads:2}, write / read  " + "   ".join(cells), flush=True
            )


def keep_kernel(store: MappedStore, neighbours: bool, loads: int, blocks: tuple[int, int]) -> None:
    """Go back to what the module says."""
    kernel._NEIGHBOURS, kernel._LOADS = neighbours, loads
    kernel._WRITE_BLOCKS, kernel._READ_BLOCKS = blocks
    store._kernel = kernel.CopyKernel()


def sweep_kernels(store: MappedStore, files: Sequence[PoolFile], arrays: Sequence[dict[str, Any]]) -> None:
    """The kernel on pages of a plane of 16 KiB and 32 KiB, with their smaller fellows, and on extents."""
    kept = kernel._NEIGHBOURS, kernel._LOADS, (kernel._WRITE_BLOCKS, kernel._READ_BLOCKS)
    whole = contiguous(TOKENS)
    for tokens, what in ((32, "pages of 16 KiB"), (64, "pages of 32 KiB"), (2048, "extents of 1 MiB")):
        sweep_kernel(store, copies_of(files[:12], arrays[:12], cut(whole, tokens), 1), what)
    keep_kernel(store, *kept)


def sweep_engine(store: MappedStore, files: Sequence[PoolFile], arrays: Sequence[dict[str, Any]]) -> None:
    """From which size of runs on the copy engine is the faster one, and what batches spare the host."""
    kept, whole = runs._LONG_BYTES, contiguous(TOKENS)
    cases = [(f"extents of {n} tokens", copies_of(files, arrays, cut(whole, n), 1)) for n in (2048, 4096, 8192)]
    cases.append(("8 heads", copies_of(files, arrays, whole, 8)))
    for what, layers in cases:
        for long_bytes, who in ((1, "engine"), (1 << 40, "kernel")):
            runs._LONG_BYTES = long_bytes
            show(f"{what}, {who}", store, layers, 2)
    runs._LONG_BYTES = kept
    least = cuda._LEAST_BATCH
    for what, extents in (("whole", whole), ("383 tokens", [(0, 0, 383)])):
        for batch in (1, 1 << 40):
            cuda._LEAST_BATCH = batch
            show(f"{what}, {'batches' if batch == 1 else 'copy by copy'}", store, copies_of(files, arrays, extents, 1))
    cuda._LEAST_BATCH = least


def first_takes(directory: Path, files: Sequence[PoolFile], layers: list[LayerCopies]) -> None:
    """Reads that begin while nothing is page-locked, and go on while the background page-locks."""
    size = sum(layer.bytes for layer in layers)
    for megabytes in (0, 1, 2, 4):
        if megabytes:
            staged._PIECE_BYTES = megabytes << 20
        name = f"bounce buffers of {megabytes} MiB" if megabytes else "kvikio"
        store = MappedStore(StagedStore(12) if megabytes else DirectStore(directory, 12))
        start = time.perf_counter()
        store.prepare(files, range(SEGMENTS))
        takes = []
        for _ in range(4):
            end, _, first, paths = timed(store.read, layers)
            takes.append(f"{size / end / 1e9:5.1f} GB/s (first layer {1e3 * first:5.1f} ms, {'+'.join(sorted(paths))})")
        while store.describe()["locked_bytes"] < LAYERS * SEGMENTS * SEGMENT_BYTES:
            time.sleep(0.001)
        print(f"takes one after the other by {name}: {', '.join(takes)}; all page-locked after "
              f"{time.perf_counter() - start:.2f} s", flush=True)  # fmt: skip
        store.close()


def main(where: Path) -> None:
    """Time everything in a directory on tmpfs."""
    import cupy

    directory = where / f"mmkv-probe-{os.getpid()}"
    directory.mkdir()
    try:
        arrays = [
            {name: cupy.random.randint(0, 256, (TOKENS, width), dtype=cupy.uint8) for name, width in PLANES.items()}
            for _ in range(LAYERS)
        ]
        cupy.cuda.runtime.deviceSynchronize()
        ceiling(cupy, arrays)
        print("batches:", driver._batch_call() is not None)
        pool_sweeps.main(directory / "pool", arrays)
        shutil.rmtree(directory / "pool")
        files = [PoolFile(directory / f"{n:04}.kv", SEGMENT_BYTES, create=True) for n in range(LAYERS)]
        for file in files:
            for segment in range(SEGMENTS):
                file.allocate(segment)
        whole = contiguous(TOKENS)
        layers = copies_of(files, arrays, whole, 1)
        store = MappedStore(None)
        print(f"page-locked fresh pages in the background: {locked(store, files):.2f} s", flush=True)
        verify(store, layers, arrays, cupy)
        show("mapped, whole", store, layers)
        pieces = cut(whole, TOKENS // 64)
        for what, extents, heads in (("64 extents", pieces, 1), ("8 heads, 64 extents", pieces, 8)):
            verify(store, copies_of(files, arrays, extents, heads), arrays, cupy)
            show(f"mapped, {what}", store, copies_of(files, arrays, extents, heads), 3)
        pages = copies_of(files, arrays, cut(whole, 32), 1)
        verify(store, pages, arrays, cupy)
        show("mapped, pages of 32 tokens", store, pages, 3)
        sweep_kernels(store, files, arrays)
        sweep_engine(store, files, arrays)
        start = time.perf_counter()
        store.close()
        print(f"closed in {time.perf_counter() - start:.2f} s", flush=True)
        first_takes(directory, files, layers)
        for other in (DirectStore(directory, 12), StagedStore(12)):
            name = type(other).__name__
            verify(other, pages, arrays, cupy)
            show(f"{name}, whole", other, layers, 2)
            show(f"{name}, pages of 32 tokens", other, pages, 1)
            other.close()
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
