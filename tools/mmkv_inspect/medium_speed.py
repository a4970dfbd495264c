"""How fast a medium writes and reads: some hundred MB in files without a name, so that nothing stays behind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from mmkv.medium import Medium

__all__ = ["MediumSpeed", "measure_medium", "unnamed_file"]

_BYTES = 256 << 20
_PIECE = 4 << 20
_FILES = 8
_SECONDS = 1.5
_MORE_PASSES = 2


@dataclass(frozen=True, slots=True)
class MediumSpeed:
    """What was measured; 10**9 bytes a second.

    Attributes
    ----------
    fresh_gbps : float or None
        The first write, where the files are in RAM: into pages that have to be cleared.
    write_gbps, read_gbps : float
        Writing, on a disk until the bytes are on it; reading, on a disk past the page cache.
    how : str
        `tmpfs copies`, `O_DIRECT`, or `page cache, synced` where the file system refuses O_DIRECT.
    bytes, files : int
        How much was moved each time, and in how many files at once.
    """

    fresh_gbps: float | None
    write_gbps: float
    read_gbps: float
    how: str
    bytes: int
    files: int


def measure_medium(medium: Medium, *, seconds: float = _SECONDS) -> MediumSpeed:
    """Write and read files in the medium's directory, for so many seconds each at most; in RAM the best of three.

    Raises
    ------
    OSError
        There is no room, or it cannot be written.
    """
    cores = len(os.sched_getaffinity(0))
    count = max(2, min(_FILES, cores))
    size = min(_BYTES, medium.free_bytes() // 4) // (count * _PIECE) * _PIECE
    if size < _PIECE:
        raise OSError(errno.ENOSPC, "too little space is free to measure it", str(medium.path))
    files = [unnamed_file(medium.path) for _ in range(count)]
    try:
        for file in files:
            os.posix_fallocate(file, 0, size)
        direct = not medium.in_ram and all(_set_direct(file) for file in files)
        how = "tmpfs copies" if medium.in_ram else "O_DIRECT" if direct else "page cache, synced"
        sizes = [size] * count
        fresh = _rate(files, sizes, os.pwritev, seconds)[0] if medium.in_ram else None
        written, sizes = _rate(files, sizes, os.pwritev, seconds, sync=not medium.in_ram)
        if not medium.in_ram:
            for file in files:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        # No more than was written: on a disk the rest is known to be zeroes.
        read, _ = _rate(files, sizes, os.preadv, seconds)
        # Passes over memory are so short that another process spoils one now and then.
        for _ in range(_MORE_PASSES if medium.in_ram else 0):
            written = max(written, _rate(files, sizes, os.pwritev, seconds)[0])
            read = max(read, _rate(files, sizes, os.preadv, seconds)[0])
    finally:
        for file in files:
            os.close(file)
    return MediumSpeed(fresh, written, read, how, sum(sizes), count)


def unnamed_file(directory: Path) -> int:
    """A descriptor of a file that is gone when it is closed, also if the process is killed."""
    with suppress(OSError, AttributeError):
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    file, name = tempfile.mkstemp(prefix=".mmkv-probe-", dir=directory)
    os.unlink(name)
    return file


def _rate(
    files: Sequence[int],
    sizes: Sequence[int],
    move: Callable[[int, list[memoryview], int], int],
    seconds: float,
    *,
    sync: bool = False,
) -> tuple[float, list[int]]:
    """Bytes a second of all files together, and how far each came before the time was over."""

    def run(file: int, size: int, block: mmap.mmap) -> int:
        done = 0
        with memoryview(block) as view:
            while done < size and (done == 0 or time.monotonic() < deadline):
                moved = move(file, [view], done)
                if moved <= 0:
                    raise OSError(errno.EIO, "the file ended while it was read")
                done += moved
        if sync:
            os.fdatasync(file)
        return done

    with ExitStack() as blocks, ThreadPoolExecutor(len(files)) as threads:
        # Anonymous maps start at a page's start, as O_DIRECT wants it.
        own = [blocks.enter_context(mmap.mmap(-1, _PIECE)) for _ in files]
        for block in own:
            block.write(os.urandom(_PIECE))
        deadline = time.monotonic() + seconds
        started = time.perf_counter()
        done = list(threads.map(run, files, sizes, own))
        return sum(done) / (time.perf_counter() - started) / 1e9, done


def _set_direct(file: int) -> bool:
    """Switch O_DIRECT on, unless a write through it is refused, as on some overlay and network file systems."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, 4096) as block, memoryview(block) as view:
            if os.pwritev(file, [view], 0) == len(view):
                return True
    except OSError:
        pass
    fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return False
