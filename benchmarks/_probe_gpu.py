"""Times the stores of device arrays by themselves, without a pool: `python -m benchmarks._probe_gpu DIR`."""

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

from mmkv.buffer import buffer_of
from mmkv.device import Event
from mmkv.store import Copy, DirectStore, LayerCopies, MappedStore, PoolFile, StagedStore, Store, mapped

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

    def moved(self, path: str, size: int) -> None:
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
    room = SEGMENT_BYTES // (sum(PLANES.values())) // 4096 * 4096
    return [(at // room, 0, min(room, tokens - at)) for at in range(0, tokens, room)]


def cut(extents: Extents, tokens: int) -> Extents:
    rng = np.random.default_rng(0)
    pieces = [(s, at, min(tokens, n - at)) for s, _, n in extents for at in range(0, n, tokens)]
    return [pieces[i] for i in rng.permutation(len(pieces))]


def timed(move: Callable[..., None], layers: list[LayerCopies]) -> tuple[float, float, float, dict[str, int]]:
    watch = Watch()
    move(layers, watch)
    submitted = time.perf_counter() - watch.start
    watch.done.wait()
    return watch.end, submitted, watch.times.get(0, 0.0), watch.paths


def show(what: str, store: Store, layers: list[LayerCopies], repeats: int = REPEATS) -> None:
    size = sum(layer.bytes for layer in layers)
    for name, move in (("write", store.write), ("read", store.read)):
        runs = [timed(move, layers) for _ in range(repeats + 1)][1:]
        end = statistics.median(run[0] for run in runs)
        submitted = statistics.median(run[1] for run in runs)
        first = statistics.median(run[2] for run in runs)
        runs_count = sum(len(copy.sizes) for layer in layers for copy in layer.copies)
        print(
            f"{what:34} {name:5} {size / end / 1e9:6.1f} GB/s  {1e3 * end:8.2f} ms  submitted {1e3 * submitted:6.2f} ms"
            f"  first layer {1e3 * first:6.2f} ms  runs {runs_count}  {sorted(runs[-1][3])}", flush=True,
        )  # fmt: skip


def verify(store: Store, layers: list[LayerCopies], arrays: Sequence[dict[str, Any]], cupy: Any) -> None:
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
        files = [PoolFile(directory / f"{n:04}.kv", SEGMENT_BYTES, create=True) for n in range(LAYERS)]
        for file in files:
            for segment in range(SEGMENTS):
                file.allocate(segment)
        whole = contiguous(TOKENS)
        layers = copies_of(files, arrays, whole, 1)
        store = MappedStore(None)
        start = time.perf_counter()
        store.prepare(files, range(SEGMENTS))
        while store.describe()["locked_bytes"] < LAYERS * SEGMENTS * SEGMENT_BYTES:
            time.sleep(0.001)
        print(f"page-locked fresh pages in the background: {time.perf_counter() - start:.2f} s", flush=True)
        verify(store, layers, arrays, cupy)
        show("mapped, whole", store, layers)
        pieces = cut(whole, TOKENS // 64)
        verify(store, copies_of(files, arrays, pieces, 1), arrays, cupy)
        show("mapped, 64 extents", store, copies_of(files, arrays, pieces, 1))
        show("mapped, 8 heads", store, copies_of(files, arrays, whole, 8))
        show("mapped, 8 heads, 64 extents", store, copies_of(files, arrays, pieces, 8))
        show("mapped, pages of 32 tokens", store, copies_of(files, arrays, cut(whole, 32), 1), 3)
        show("mapped, 383 tokens", store, copies_of(files, arrays, [(0, 0, 383)], 1))
        start = time.perf_counter()
        store.close()
        print(f"closed in {time.perf_counter() - start:.2f} s", flush=True)
        for worth in (4, 0):
            mapped._WORTH_LOCKING = worth
            for wait in (None, 0.0, 0.05):
                fresh = MappedStore(DirectStore(directory, 12))
                if wait is not None:
                    fresh.prepare(files, range(SEGMENTS))
                    time.sleep(wait)
                end, _, first, paths = timed(fresh.read, layers)
                size = sum(layer.bytes for layer in layers)
                print(
                    f"first take of a new process, worth {worth}, prepared {wait}: {size / end / 1e9:5.1f} GB/s, "
                    f"first layer {1e3 * first:.1f} ms, {sorted(paths)}", flush=True,
                )  # fmt: skip
                fresh.close()
        for other in (DirectStore(directory, 12), StagedStore(12)):
            print(other.describe())
            show(type(other).__name__, other, layers, 3)
            other.close()
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
