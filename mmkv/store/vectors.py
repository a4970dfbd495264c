"""Reads and writes of a file that go to or come from many places in host memory, in one system call."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from mmkv.errors import MmkvError, PoolCorrupt, PoolFull
from mmkv.store.pieces import Piece, Scatter
from mmkv.store.unbuffered import PAGE

__all__ = ["read_scattered", "write_gathered"]

# By ctypes: the os module wants an object for each place.
_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.preadv, _libc.pwritev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_scattered(piece: Piece, scatter: Scatter) -> bool:
    """Read a piece into its places in a host buffer. Returns whether that went past the page cache.

    Raises
    ------
    PoolCorrupt
        The file ends before.
    """
    file = piece.copy.file
    try:
        left, unbuffered = _move_all(_libc.preadv, piece, scatter)
    except OSError as error:
        raise MmkvError(f"cannot read {file.path} at {piece.file_offset}: {error.strerror}") from error
    if left:
        raise PoolCorrupt(
            f"{file.path} ends at {file.size} bytes, before {piece.file_offset + piece.size}: it was truncated"
        )
    return unbuffered


def write_gathered(piece: Piece, scatter: Scatter) -> bool:
    """Write a piece from its places in a host buffer. Returns whether that went past the page cache.

    Raises
    ------
    PoolFull
        The file system has no room.
    """
    file = piece.copy.file
    try:
        left, unbuffered = _move_all(_libc.pwritev, piece, scatter)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise PoolFull(f"no room on the file system of {file.path} ({error.strerror})") from error
        raise MmkvError(f"cannot write {file.path} at {piece.file_offset}: {error.strerror}") from error
    if left:
        raise MmkvError(f"{file.path} takes no more bytes at {piece.file_offset + piece.size - left}")
    return unbuffered


def _move_all(call: Callable[..., Any], piece: Piece, scatter: Scatter) -> tuple[int, bool]:
    """Call until all bytes have moved, or none does any more.

    Returns
    -------
    tuple of int and bool
        How many have not; whether the others went past the page cache.
    """
    places = np.empty((len(scatter.sizes), 2), dtype=np.int64)
    places[:, 0] = scatter.buffer_offsets + piece.copy.buffer.address
    places[:, 1] = scatter.sizes
    file = piece.copy.file
    way = file.unbuffered
    whole_pages = not (places % PAGE).any() and piece.file_offset % PAGE == 0
    done = 0
    while done < piece.size:
        fd = way.fd if way is not None and whole_pages else -1
        moved = call(file.fd if fd < 0 else fd, places.ctypes.data, len(places), piece.file_offset + done)
        if moved < 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            error = OSError(code, os.strerror(code))
            if fd < 0 or way is None:
                raise error
            way.refuse(error)
            continue
        if moved == 0:
            break
        done += moved
        # A short one may end within a page.
        whole_pages = whole_pages and moved % PAGE == 0
        places = _behind(places, moved)
    return piece.size - done, whole_pages and way is not None and way.fd >= 0


def _behind(places: np.ndarray[Any, np.dtype[np.int64]], moved: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The places, less the first `moved` bytes."""
    ends = np.cumsum(places[:, 1])
    whole = int(np.searchsorted(ends, moved, side="right"))
    left = places[whole:].copy()
    if len(left):
        begun = moved - int(ends[whole] - places[whole, 1])
        left[0] += (begun, -begun)
    return left
