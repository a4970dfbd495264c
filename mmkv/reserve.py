"""Room beside a catalog: what a pool leaves free for it, and a little that is kept for a file system that is full."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["RESERVE_SUFFIX", "Reserve", "headroom"]

RESERVE_SUFFIX = "-reserve"
_SIZES = (256 << 10, 128 << 10, 64 << 10, 32 << 10)
_MOST_HEADROOM = 16 << 20
_HEADROOM_PART = 16


def headroom(directory: Path) -> int:
    """Bytes that the segments of a pool leave free on the file system of its catalog, which grows beside them."""
    status = os.statvfs(directory)
    return min(_MOST_HEADROOM, status.f_blocks * status.f_frsize // _HEADROOM_PART)


class Reserve:
    """A file beside a catalog that only takes space: given up where the file system is full.

    To drop a conversation, to give space back, to flush and to close all write to the catalog first, and so does the
    next opening: without it, a file system that is full would stay so.

    Parameters
    ----------
    catalog : Path
        The catalog's file.
    """

    def __init__(self, catalog: Path) -> None:
        self.path = catalog.with_name(catalog.name + RESERVE_SUFFIX)

    def keep(self) -> None:
        """Take the space, or as much of it as there is. Costs two system calls where it is taken already."""
        # No call owns this: where the space is not to be had, or not now, the next call tries again.
        with contextlib.suppress(OSError):
            held = self._held()
            if held < _SIZES[0]:
                status = os.statvfs(self.path.parent)
                room = held + status.f_bavail * status.f_frsize
                self._take(next((size for size in _SIZES if held < size <= room), 0))

    def _held(self) -> int:
        try:
            return self.path.lstat().st_size
        except FileNotFoundError:
            return 0

    def _take(self, size: int) -> None:
        if size == 0:
            return
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError:
            # Its size says what it holds.
            os.ftruncate(fd, 0)
            raise
        finally:
            os.close(fd)

    def give_up(self) -> bool:
        """Give the space back, for others to take. Whether there was any."""
        held = self._held()
        self.path.unlink(missing_ok=True)
        return held > 0
