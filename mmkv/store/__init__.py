"""How bytes reach a medium: one contract, and one module for each way."""

from __future__ import annotations

import logging
from pathlib import Path

from mmkv import device as cuda
from mmkv.errors import MmkvError
from mmkv.medium import Medium
from mmkv.store.contract import Copy, LayerCopies, Progress, Store
from mmkv.store.direct import DirectStore
from mmkv.store.files import PoolFile
from mmkv.store.mapped import MappedStore
from mmkv.store.posix import PosixStore
from mmkv.store.staged import StagedStore

__all__ = [
    "Copy",
    "DirectStore",
    "LayerCopies",
    "MappedStore",
    "PoolFile",
    "PosixStore",
    "Progress",
    "StagedStore",
    "Store",
    "open_device_store",
]

_CHOICES = ("auto", "mapped", "direct", "posix")
_logger = logging.getLogger("mmkv")


def open_device_store(medium: Medium, *, choice: str = "auto", threads: int, directory: Path) -> Store:
    """The store that moves device arrays to and from files in `directory`.

    Parameters
    ----------
    directory : Path
        Where the files lie.
    medium : Medium
        What the directory lies on.
    choice : str
        `mapped`, `direct` or `posix` forces one; `auto` takes the page-locked map in RAM, kvikio elsewhere, and plain
        system calls where there is no kvikio, with a warning.
    threads : int
        How many threads copy at once in one transfer, where threads copy.

    Raises
    ------
    MmkvError
        There is no device, or the forced choice is not possible here; the text says why.
    """
    if choice not in _CHOICES:
        raise ValueError(f"store {choice!r} is unknown: it is one of {', '.join(_CHOICES)}")
    if not cuda.available():
        raise MmkvError("device arrays need CuPy and a CUDA device, and there is none that CuPy sees")
    if medium.fs_type == "hugetlbfs":
        if choice in ("direct", "posix"):
            raise MmkvError(f"store {choice!r} writes with system calls, which hugetlbfs does not have: use 'mapped'")
        return MappedStore(None)
    if choice == "mapped" and not medium.in_ram:
        raise MmkvError(
            f"store 'mapped' needs files in RAM, and {directory} lies on {medium.fs_type}: "
            "put the pool on tmpfs, or use 'direct'"
        )
    if choice == "posix":
        return StagedStore(threads)
    if choice == "direct":
        return DirectStore(directory, threads)
    if medium.in_ram:
        # kvikio is a tenth faster there, but the first take would wait for its import and for its buffers.
        return MappedStore(StagedStore(threads))
    try:
        return DirectStore(directory, threads)
    except MmkvError as error:
        _logger.warning("device arrays go through host memory, which is slower: %s", error)
        return StagedStore(threads, str(error))
