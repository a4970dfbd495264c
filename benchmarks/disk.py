"""What a disk can do: plain reads and writes of files past the page cache, by several threads."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mmkv.store.files import PoolFile

__all__ = ["PlainFiles"]

_PIECE = 8 << 20


class PlainFiles:
    """Files of one size in a directory, preallocated and written once, and memory to read them into.

    Parameters
    ----------
    directory : Path
        Where they lie.
    files : int
        How many, as a pool has one for each layer.
    size : int
        Bytes of all of them.
    threads : int
        How many threads read or write at once.
    """

    def __init__(self, directory: Path, files: int, size: int, threads: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._threads = threads
        each = -(-size // files // _PIECE) * _PIECE
        self.size = each * files
        self._paths = [directory / f"{number:04d}" for number in range(files)]
        for path in self._paths:
            file = PoolFile(path, each, create=True)
            file.allocate(0)
            file.close()
        self._memory = [memoryview(mmap.mmap(-1, _PIECE)) for _ in range(threads)]
        for view in self._memory:
            view[:] = os.urandom(len(view))
        self._fds = [os.open(path, os.O_RDWR | os.O_DIRECT) for path in self._paths]
        self._pieces = [(fd, offset) for fd in self._fds for offset in range(0, each, _PIECE)]
        self.write()

    def read(self) -> float:
        """Read everything, file after file; the seconds it takes."""
        return self._run(os.preadv, self._pieces)

    def write(self) -> float:
        """Write everything, each thread into files of its own, and sync; the seconds it takes."""
        started = time.perf_counter()
        shares = [self._pieces[number :: len(self._fds)] for number in range(len(self._fds))]
        self._run(os.pwritev, [piece for share in shares for piece in share])
        for fd in self._fds:
            os.fdatasync(fd)
        return time.perf_counter() - started

    def _run(self, call: Callable[..., int], pieces: list[tuple[int, int]]) -> float:
        started = time.perf_counter()
        queue = iter(pieces)

        def work(view: memoryview) -> None:
            # An iterator over a list hands each item to one thread.
            for fd, offset in queue:
                if call(fd, [view], offset) != _PIECE:
                    raise RuntimeError(f"a short read or write at {offset}")

        with ThreadPoolExecutor(self._threads) as threads:
            for done in [threads.submit(work, view) for view in self._memory]:
                done.result()
        return time.perf_counter() - started

    def close(self) -> None:
        """Close and delete the files."""
        for fd, path in zip(self._fds, self._paths, strict=True):
            os.close(fd)
            path.unlink()
