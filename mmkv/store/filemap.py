"""Maps of files in RAM, as buffers that the kernel reads from and writes to: no host code touches their pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from mmkv.buffer import Buffer
from mmkv.errors import MmkvError
from mmkv.store.files import PoolFile

__all__ = ["map_file"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value
_NORESERVE = 0x4000
_DONTFORK, _HUGEPAGE = 10, 14


class _Map:
    """Unmaps when nobody holds it any more."""

    __slots__ = ("__weakref__",)


def map_file(file: PoolFile, size: int) -> Buffer:
    """The first `size` bytes of a file as a host buffer, whether the file has them already or not.

    It is for system calls alone: given a page that the file does not have, they fail with EFAULT, where an access by
    host code is a signal. Costs address space only. Unmapped with the buffer.

    Raises
    ------
    MmkvError
        The address space does not suffice.
    """
    base = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _NORESERVE, file.fd, 0)
    if base == _MAP_FAILED:
        code = ctypes.get_errno()
        raise MmkvError(f"cannot map {size} bytes of {file.path}: {os.strerror(code)}; see ulimit -v")
    # Advice that a kernel does not know costs speed only.
    for advice in (_DONTFORK, _HUGEPAGE):
        _libc.madvise(base, size, advice)
    owner = _Map()
    weakref.finalize(owner, _unmap, base, size, os.getpid())
    return Buffer(int(base), size, (size,), "uint8", None, True, owner)


def _unmap(base: int, size: int, pid: int) -> None:
    # A forked child does not have the map: what lies at its place there is somebody else's.
    if os.getpid() == pid:
        _libc.munmap(base, size)
