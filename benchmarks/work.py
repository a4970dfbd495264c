"""What is parked: layouts, bytes that no model computed, ids that no pool has seen, and where pools are made."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

import mmkv
from benchmarks.memory import Memory, PlaneRows
from mmkv.medium import medium_of

__all__ = [
    "Ids",
    "Noise",
    "default_directory",
    "default_disk",
    "digest",
    "heads_layout",
    "layout_of",
    "new_ids",
    "temporary_directory",
    "wipe",
]

Ids = npt.NDArray[np.int64]

_SPREAD = 1 << 24
_PART = 1 << 24
_random = np.random.default_rng()


def layout_of(layers: int, row_bytes: int) -> mmkv.Layout:
    """A layout with so many bytes a token and layer: keys, packed values and scales, as 512, 256 and 48 of 816."""
    scale = row_bytes // 17
    v = (row_bytes - scale) // 3
    sizes = {"k": row_bytes - scale - v, "v": v, "scale": scale}
    planes = {name: mmkv.Plane("uint8", (size,)) for name, size in sizes.items() if size}
    return mmkv.Layout([mmkv.Layer(planes)] * layers, model="pool_vs_ram")


def heads_layout(layout: mmkv.Layout, heads: int) -> mmkv.Layout:
    """The same bytes with each head a plane of its own."""
    planes = {
        f"{name}.{head}": mmkv.Plane("uint8", (plane.token_bytes // heads,))
        for name, plane in layout.layers[0].planes.items()
        for head in range(heads)
    }
    return mmkv.Layout([mmkv.Layer(planes)] * len(layout.layers), model=f"{layout.model}, {heads} heads")


def new_ids(count: int) -> Ids:
    """Ids that no pool has seen."""
    return _random.integers(0, 1 << 62, count, dtype=np.int64)


class Noise:
    """Random bytes, other ones for each conversation and array.

    The bytes of an array are a window of one random buffer, so that they can be made, and checked, at the speed of
    memory.

    Parameters
    ----------
    memory : Memory
        Where the arrays lie.
    largest : int
        Bytes of the largest array.
    """

    def __init__(self, memory: Memory, largest: int) -> None:
        self._memory = memory
        self._starts: dict[tuple[str, int, str], int] = {}
        words = _random.integers(0, 1 << 63, (largest + _SPREAD) // 8 + 1, dtype=np.int64)
        self._bytes = memory.xp.asarray(words).view(np.uint8)

    def _windows(self, name: str, rows: Sequence[PlaneRows], start: int, stop: int) -> Iterator[tuple[Any, Any]]:
        """Rows `[start, stop)` of each array as bytes, and what they are to be."""
        for plane in rows:
            window = self._starts.setdefault(
                (name, plane.layer, plane.name), 8 * int(_random.integers(_SPREAD // 8))
            )  # fmt: skip
            first, end = start * plane.row_bytes, stop * plane.row_bytes
            yield self._memory.flat(plane.array)[first:end], self._bytes[window + first : window + end]

    def write(self, name: str, rows: Sequence[PlaneRows], start: int, stop: int) -> None:
        """Set rows `[start, stop)` to the bytes of a conversation."""
        for found, expected in self._windows(name, rows, start, stop):
            found[:] = expected
        self._memory.synchronize()

    def require(self, name: str, rows: Sequence[PlaneRows], stop: int, whose: str) -> None:
        """Raise unless the first `stop` rows are the bytes of a conversation."""
        xp = self._memory.xp
        for plane, (found, expected) in zip(rows, self._windows(name, rows, 0, stop), strict=True):
            for at in range(0, len(found), _PART if xp is np else max(len(found), 1)):
                part = slice(at, at + _PART) if xp is np else slice(None)
                if not bool(xp.array_equal(_words(found[part]), _words(expected[part]))):
                    raise RuntimeError(
                        f"{whose} gave other bytes than were parked: layer {plane.layer}, {plane.name!r}"
                    )

    def copied(self, memory: Memory) -> Noise:
        """The same bytes in another memory, also those that are yet to be chosen."""
        other = Noise.__new__(Noise)
        other._memory = memory
        other._starts = self._starts
        host = self._bytes if self._memory.xp is np else self._bytes.get()
        other._bytes = memory.xp.asarray(host)
        return other

    def forget(self, name: str) -> None:
        """Let a conversation's next bytes be others."""
        self._starts = {key: start for key, start in self._starts.items() if key[0] != name}


def _words(array: Any) -> Any:
    return array.view(np.int64) if len(array) % 8 == 0 and _address(array) % 8 == 0 else array


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def wipe(memory: Memory, rows: Sequence[PlaneRows]) -> None:
    """Clear a slot, so that nothing but a take brings its bytes back."""
    for plane in rows:
        memory.flat(plane.array)[:] = 0
    memory.synchronize()


def digest(memory: Memory, rows: Sequence[PlaneRows], tokens: int) -> str:
    """A checksum of the first rows of a slot, taken on the host: the same in every process."""
    state = xxhash.xxh3_128()
    for plane in rows:
        part = memory.flat(plane.array)[: tokens * plane.row_bytes]
        state.update(np.ascontiguousarray(part if memory.xp is np else part.get()).data)
    return state.hexdigest()


@contextmanager
def temporary_directory(parent: Path) -> Iterator[Path]:
    """A directory that is removed at the end, with what is in it, also after Ctrl-C or a `kill`."""

    def terminate(*_: object) -> None:
        raise SystemExit(143)

    former = None
    with suppress(ValueError):
        # On another thread than the main one there is no handler to set.
        former = signal.signal(signal.SIGTERM, terminate)
    parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="mmkv-bench-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if former is not None:
            signal.signal(signal.SIGTERM, former)


def default_directory() -> Path:
    """A tmpfs where there is one."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def default_disk() -> Path:
    """A directory that is not in RAM, if the usual places have one."""
    places = (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd())
    return next((place for place in places if place.is_dir() and not medium_of(place).in_ram), places[0])
