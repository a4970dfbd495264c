"""Reads and writes of a file past the page cache: O_DIRECT, as far as offsets and memory allow."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from mmkv.buffer import host_view

__all__ = ["PAGE", "Unbuffered"]

# What every medium takes as the unit of offsets, sizes and addresses.
PAGE = 4096
_BOUNCE_BYTES = 4 << 20
# What a file system says to a read or write that it cannot do past its cache, though it took the flag at the open.
_UNABLE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_libc = ctypes.CDLL(None, use_errno=True)
# By a foreign call, which lets other threads run meanwhile.
_libc.memmove.restype = ctypes.c_void_p
_libc.memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_own = threading.local()


class Unbuffered:
    """A second descriptor of a file, for reads and writes past the page cache.

    Where the file system refuses one of them, `reason` says why, and every later one is left to the caller.

    Parameters
    ----------
    path : Path
        The file.
    fd : int
        Its descriptor for reads and writes through the page cache.
    readonly : bool
        Whether to open it for reading only.

    Attributes
    ----------
    fd : int
        The descriptor; -1 where there is none, or none any more.
    """

    __slots__ = ("fd", "reason")

    def __init__(self, path: Path, fd: int, *, readonly: bool) -> None:
        self.reason: str | None = None
        self.fd = -1
        flags = (os.O_RDONLY if readonly else os.O_RDWR) | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            opened = os.open(path, flags)
        except OSError as error:
            self.reason = f"{path} does not open with O_DIRECT: {error.strerror}"
            return
        if os.path.sameopenfile(opened, fd):
            self.fd = opened
        else:
            os.close(opened)
            self.reason = f"{path} was replaced while it is open"

    def read(self, address: int, size: int, offset: int) -> int:
        """Read as many leading bytes as can be, and return how many; the caller reads the rest through the cache.

        Raises
        ------
        OSError
            The medium failed.
        """
        done = 0
        while done < size and self.fd >= 0:
            apart = (address + done) % PAGE or (offset + done) % PAGE or size - done < PAGE
            if apart:
                got = self._read_apart(address + done, size - done, offset + done)
            else:
                got = self._call(os.preadv, address + done, (size - done) // PAGE * PAGE, offset + done)
            if got <= 0:
                break
            done += got
        return done

    def write(self, address: int, size: int, offset: int) -> int:
        """Write as many leading whole pages as can be, and return their bytes; the caller writes the rest.

        Raises
        ------
        OSError
            The medium failed.
        """
        done, whole = 0, size // PAGE * PAGE
        while done < whole and self.fd >= 0 and (offset + done) % PAGE == 0:
            if (address + done) % PAGE:
                part = min(whole - done, _BOUNCE_BYTES)
                bounce = _bounce()
                _libc.memmove(bounce, address + done, part)
                put = self._call(os.pwritev, bounce, part, offset + done)
            else:
                put = self._call(os.pwritev, address + done, whole - done, offset + done)
            if put <= 0:
                break
            done += put
        return done

    def _read_apart(self, address: int, size: int, offset: int) -> int:
        """Read by way of memory that is aligned, for what is not."""
        before = offset % PAGE
        # Up to where the memory is aligned as the file is, if it ever is.
        if address % PAGE == before and before:
            size = min(size, PAGE - before)
        size = min(size, _BOUNCE_BYTES - before)
        bounce = _bounce()
        got = self._call(os.preadv, bounce, -(-(before + size) // PAGE) * PAGE, offset - before)
        got = min(got - before, size)
        if got > 0:
            _libc.memmove(address, bounce + before, got)
        return got

    def _call(self, call: Callable[..., int], address: int, size: int, offset: int) -> int:
        try:
            return call(self.fd, [host_view(address, size, writable=True)], offset)
        except OSError as error:
            self.refuse(error)
            return 0

    def refuse(self, error: OSError) -> None:
        """Leave everything to the page cache from now on, if that is what an error asks for; else raise it."""
        if error.errno not in _UNABLE:
            raise error
        self.reason = f"the file system refuses reads or writes with O_DIRECT: {error.strerror}"
        self.close()

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _bounce() -> int:
    """The address of this thread's memory that is aligned to pages."""
    if not hasattr(_own, "bounce"):
        _own.bounce = mmap.mmap(-1, _BOUNCE_BYTES)
        _own.address = ctypes.addressof(ctypes.c_char.from_buffer(_own.bounce))
    return int(_own.address)
