"""What the tests of the stores share: a progress that remembers, arrays of every kind, and random copies."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmkv.buffer import buffer_of
from mmkv.device import Event
from mmkv.store import Copy, LayerCopies, PoolFile, Store
from mmkv.store.contract import Gate

SEGMENT_BYTES = (4 << 20) + (64 << 10)
SEGMENTS = 2


class Recorder:
    """A `Progress` that remembers what it was told, in order."""

    def __init__(self, *, stopped: bool = False) -> None:
        self.landings: list[int] = []
        self.submissions: list[tuple[int, Event]] = []
        self.bytes: dict[str, int] = {}
        self.errors: list[Exception] = []
        self.releases = 0
        self._stopped = stopped
        self._released = threading.Event()
        self._lock = threading.Lock()

    @property
    def stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        self._stopped = True

    def submitted(self, layer: int, event: Event) -> None:
        self.submissions.append((layer, event))

    def landed(self, layer: int) -> None:
        assert not self.releases
        self.landings.append(layer)

    def moved(self, path: str, size: int, address: int | None = None) -> None:
        with self._lock:
            self.bytes[path] = self.bytes.get(path, 0) + size

    def failed(self, error: Exception) -> None:
        self.errors.append(error)
        self._stopped = True

    def released(self) -> None:
        self.releases += 1
        self._released.set()

    def wait(self, seconds: float = 60) -> None:
        assert self._released.wait(seconds), f"not released; errors: {self.errors}"
        assert self.releases == 1

    def ok(self) -> Recorder:
        self.wait()
        if self.errors:
            raise self.errors[0]
        return self


@dataclass
class Rig:
    """A store and the kind of arrays that it moves."""

    store: Store
    paths: set[str]
    array_of: Callable[[np.ndarray[Any, Any]], Any]
    bytes_of: Callable[[Any], np.ndarray[Any, Any]]
    directory: Path
    files: list[PoolFile]

    def file(self, name: str) -> PoolFile:
        """A file whose segments are full of a mark."""
        file = PoolFile(self.directory / name, SEGMENT_BYTES, create=True)
        for segment in range(SEGMENTS):
            file.allocate(segment)
        os.pwrite(file.fd, b"\xaa" * (SEGMENTS * SEGMENT_BYTES), 0)
        self.files.append(file)
        return file

    def read(self, layers: Sequence[LayerCopies], after: Sequence[Event] = (), gate: Gate | None = None) -> Recorder:
        recorder = Recorder()
        self.store.read(layers, recorder, after, gate)
        return recorder

    def write(self, layers: Sequence[LayerCopies], after: Sequence[Event] = ()) -> Recorder:
        recorder = Recorder()
        self.store.write(layers, recorder, after)
        return recorder


@dataclass
class Case:
    """Copies of some layers, with the arrays and files and what they hold at first."""

    layers: list[LayerCopies]
    arrays: list[tuple[Copy, Any]]

    def in_files(self) -> list[np.ndarray[Any, Any]]:
        """The bytes of each copy's file, read around the store."""
        return [
            np.frombuffer(os.pread(copy.file.fd, SEGMENTS * SEGMENT_BYTES, 0), np.uint8).copy()
            for copy, _ in self.arrays
        ]

    def scatter(self, rng: np.random.Generator) -> None:
        """Write random bytes into the files, around the store."""
        for file in {copy.file for copy, _ in self.arrays}:
            os.pwrite(file.fd, rng.bytes(SEGMENTS * SEGMENT_BYTES), 0)

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)


def runs_of(copy: Copy) -> list[tuple[int, int, int]]:
    return list(zip(copy.file_offsets.tolist(), copy.buffer_offsets.tolist(), copy.sizes.tolist(), strict=True))


def make_case(
    rig: Rig, rng: np.random.Generator, sizes: Sequence[Sequence[Sequence[int]]], *, tag: str = "", shift: int = 0
) -> Case:
    """Copies with runs of these sizes: `sizes[layer][plane]` lists the runs, which lie in random places and order.

    Runs of a plane never overlap, and none crosses a border of segments. `shift` misaligns array against file.
    """
    layers, arrays = [], []
    for number, planes in enumerate(sizes):
        copies = []
        file = rig.file(f"{tag}{number:04}.kv") if any(planes) else None
        for index, runs in enumerate(planes):
            if file is None:
                continue
            room = SEGMENT_BYTES // len(planes) // 16 * 16
            places = _places(rng, runs, room, index, shift)
            order = rng.permutation(len(runs))
            buffer_offsets, end = np.zeros(len(runs), np.int64), 0
            for position in order.tolist():
                end += int(rng.integers(0, 3)) * 16
                buffer_offsets[position] = end
                end += runs[position]
            array = rig.array_of(rng.integers(0, 256, max(end, 1), dtype=np.uint8))
            copy = Copy(
                f"plane{index}", file, buffer_of(array), np.array(places, np.int64), buffer_offsets,
                np.array(runs, np.int64),
            )  # fmt: skip
            copies.append(copy)
            arrays.append((copy, array))
        layers.append(LayerCopies(number, tuple(copies)))
    return Case(layers, arrays)


def make_paged_case(
    rig: Rig, rng: np.random.Generator, layers: int, page_bytes: Sequence[int], pages: int, *, tag: str = ""
) -> Case:
    """Copies of pages that follow each other in the file and lie in random places of the arrays.

    Like layers share their arrays of offsets. Two pages at the end follow each other in both.
    """
    shares = []
    for index, size in enumerate(page_bytes):
        table = np.append(rng.permutation(pages - 2), (pages - 2, pages - 1))
        start = sum(page_bytes[:index]) * pages
        order = rng.permutation(pages)
        shares.append((start + size * order, size * table[order], np.full(pages, size, np.int64)))
    assert sum(page_bytes) * pages <= SEGMENT_BYTES
    case = Case([], [])
    for number in range(layers):
        file = rig.file(f"{tag}{number:04}.kv")
        copies = []
        for index, share in enumerate(shares):
            array = rig.array_of(rng.integers(0, 256, page_bytes[index] * pages, dtype=np.uint8))
            copies.append(Copy(f"plane{index}", file, buffer_of(array), *share))
            case.arrays.append((copies[-1], array))
        case.layers.append(LayerCopies(number, tuple(copies)))
    return case


def _places(rng: np.random.Generator, runs: Sequence[int], room: int, plane: int, shift: int) -> list[int]:
    used = [shift] * SEGMENTS
    places = []
    for size in runs:
        segment = int(rng.integers(0, SEGMENTS))
        if used[segment] + size > room:
            segment = int(np.argmin(used))
        assert used[segment] + size <= room
        places.append(segment * SEGMENT_BYTES + plane * room + used[segment])
        used[segment] += size
    return places
