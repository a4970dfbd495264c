"""The files of a pool and their segments: opened, allocated, checked, synced, given back."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path

from mmkv.errors import MmkvError, PoolCorrupt, PoolFull
from mmkv.refused import refusal
from mmkv.store.unbuffered import PAGE, Unbuffered

__all__ = ["PoolFile"]

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ZEROS = bytes(1 << 20)


class PoolFile:
    """One file of a pool: a row of segments of equal size, some of them allocated.

    Parameters
    ----------
    path : Path
        The file. It is made if `create` is set; a symbolic link is refused.
    segment_bytes : int
        Size of a segment, a multiple of 4096.
    create, readonly : bool
        Whether to make the file where it is missing; whether to open it for reading only.
    unbuffered : bool
        Whether large reads and writes go past the page cache, where the file system lets them: on a disk.

    Attributes
    ----------
    unbuffered : Unbuffered or None
        The way past the page cache.

    Raises
    ------
    PoolCorrupt
        The file is missing, or is no plain file.
    MmkvError
        The process has too many files open.
    """

    __slots__ = ("_sync_error", "fd", "identity", "path", "segment_bytes", "unbuffered")

    def __init__(
        self,
        path: Path,
        segment_bytes: int,
        *,
        create: bool = False,
        readonly: bool = False,
        unbuffered: bool = False,
    ) -> None:
        # Without waiting for a writer, where a pipe stands in the file's place.
        flags = (
            os.O_CLOEXEC
            | os.O_NOFOLLOW
            | os.O_NONBLOCK
            | (os.O_RDONLY if readonly else os.O_RDWR)
            | (os.O_CREAT if create else 0)
        )
        try:
            self.fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise _open_error(path, error) from error
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self.fd)
            raise PoolCorrupt(f"{path} is not a plain file")
        self.path = path
        self.segment_bytes = segment_bytes
        self._sync_error: str | None = None
        self.identity = (status.st_dev, status.st_ino)
        self.unbuffered = Unbuffered(path, self.fd, readonly=readonly) if unbuffered else None

    def __repr__(self) -> str:
        return f"PoolFile({str(self.path)!r}, segment_bytes={self.segment_bytes})"

    @property
    def size(self) -> int:
        """The file's size in bytes, as it is now."""
        return os.fstat(self.fd).st_size

    def require(self, size: int) -> None:
        """Check that the file is whole up to `size` bytes and still has its name.

        Costs one `fstat`. A file cut behind the pool's back would be read short, and, grown again by a write, give
        zeros for what was lost.

        Raises
        ------
        PoolCorrupt
            The file was truncated or deleted.
        """
        status = os.fstat(self.fd)
        if status.st_size < size:
            raise PoolCorrupt(f"{self.path} is truncated: it has {status.st_size} bytes and must have {size}")
        if status.st_nlink == 0:
            raise PoolCorrupt(f"{self.path} was deleted or replaced while the pool is open")

    def allocate(self, segment: int) -> None:
        """Take the space of a segment on the file system; what it holds already is kept.

        Raises
        ------
        PoolFull
            The file system has no room for it. The other segments hold what they held.
        """
        offset = segment * self.segment_bytes
        size_before = self.size
        code = _fallocate(self.fd, 0, offset, self.segment_bytes)
        if code == 0:
            return
        try:
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                self._write_zeros(max(offset, size_before), offset + self.segment_bytes)
                return
            raise OSError(code, os.strerror(code))
        except OSError as error:
            # A failed fallocate may have grown the file part of the way.
            if size_before > offset:
                self._punch(offset, self.segment_bytes)
            elif self.size > size_before:
                os.ftruncate(self.fd, size_before)
            if error.errno in _NO_ROOM:
                raise PoolFull(
                    f"no room on the file system of {self.path} for {self.segment_bytes} bytes more "
                    f"({error.strerror}): free some space, or give the pool a smaller capacity"
                ) from error
            raise MmkvError(f"cannot take space for {self.path}: {error}") from error

    def _write_zeros(self, start: int, end: int) -> None:
        while start < end:
            start += os.pwrite(self.fd, _ZEROS[: end - start], start)

    def give_back(self, segment: int) -> None:
        """Free the space of a segment; it reads as zeros afterwards, and the file keeps its size.

        Every map and registration of it must be gone: a device would go on writing to orphaned pages.
        """
        self._punch(segment * self.segment_bytes, self.segment_bytes)

    def _punch(self, offset: int, size: int) -> None:
        code = _fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, offset, size)
        if code not in (0, errno.EOPNOTSUPP, errno.ENOSYS):
            raise MmkvError(f"cannot give back space of {self.path}: {os.strerror(code)}")

    def trim(self, segments: Collection[int]) -> None:
        """Cut the file behind the last of `segments`, and free what it holds between them. No map of it may exist."""
        end = max(segments, default=-1) + 1
        if self.size > end * self.segment_bytes:
            os.ftruncate(self.fd, end * self.segment_bytes)
        free = 0
        for segment in sorted(segments):
            # What lies between two segments at once: there may be many numbers that no segment has.
            if segment > free:
                self._punch(free * self.segment_bytes, (segment - free) * self.segment_bytes)
            free = segment + 1

    @property
    def buffered_reason(self) -> str | None:
        """Why reads and writes go through the page cache though they were to go past it; `None` if they do not."""
        return None if self.unbuffered is None else self.unbuffered.reason

    def read(self, view: memoryview, offset: int) -> bool:
        """Fill `view` with the bytes at `offset`. Returns whether they went past the page cache.

        Raises
        ------
        PoolCorrupt
            The file ends before.
        """
        done = 0
        if self.unbuffered is not None and len(view) >= PAGE:
            try:
                done = self.unbuffered.read(_address(view), len(view), offset)
            except OSError as error:
                raise MmkvError(f"cannot read {self.path} at {offset}: {error.strerror}") from error
        unbuffered = done > 0
        while done < len(view):
            try:
                got = os.preadv(self.fd, [view[done:]], offset + done)
            except OSError as error:
                raise MmkvError(f"cannot read {self.path} at {offset + done}: {error.strerror}") from error
            if got == 0:
                raise PoolCorrupt(
                    f"{self.path} ends at {self.size} bytes, before {offset + len(view)}: it was truncated"
                )
            done += got
        return unbuffered

    def write(self, view: memoryview, offset: int) -> bool:
        """Write `view` at `offset`. Returns whether it went past the page cache.

        Raises
        ------
        PoolFull
            The file system has no room.
        """
        done = 0
        if self.unbuffered is not None and len(view) >= PAGE:
            try:
                done = self.unbuffered.write(_address(view), len(view), offset)
            except OSError as error:
                raise self._write_error(error, offset) from error
        unbuffered = done > 0
        while done < len(view):
            try:
                wrote = os.pwritev(self.fd, [view[done:]], offset + done)
            except OSError as error:
                raise self._write_error(error, offset + done) from error
            if wrote == 0:
                raise MmkvError(f"{self.path} takes no more bytes at {offset + done}")
            done += wrote
        return unbuffered

    def _write_error(self, error: OSError, offset: int) -> MmkvError:
        if error.errno in _NO_ROOM:
            return PoolFull(f"no room on the file system of {self.path} ({error.strerror})")
        return MmkvError(f"cannot write {self.path} at {offset}: {error.strerror}")

    def sync(self) -> None:
        """Wait until the file's bytes are on the medium.

        Raises
        ------
        MmkvError
            They could not be brought there. Then no later sync succeeds either: after an error the kernel takes the
            pages for clean, so that it would report a success that is none.
        """
        if self._sync_error is not None:
            raise MmkvError(f"{self.path} could not be brought to the medium earlier: {self._sync_error}")
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            self._sync_error = str(error.strerror)
            raise MmkvError(f"cannot bring {self.path} to the medium: {error.strerror}") from error

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        fd, self.fd = self.fd, -1
        try:
            if self.unbuffered is not None:
                self.unbuffered.close()
        finally:
            if fd >= 0:
                os.close(fd)


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _fallocate(fd: int, mode: int, offset: int, size: int) -> int:
    """`fallocate(2)`, taken up again where a signal interrupts it. Returns 0 or the error's number."""
    while _libc.fallocate(fd, mode, offset, size) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return code
    return 0


def _open_error(path: Path, error: OSError) -> Exception:
    if error.errno == errno.ENOENT:
        return PoolCorrupt(f"{path} is missing")
    if error.errno == errno.ELOOP:
        return PoolCorrupt(f"{path} is a symbolic link: a pool's files are plain files")
    return refusal(f"cannot open {path}", error)
