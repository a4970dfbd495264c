"""Segments of files in RAM, each mapped and page-locked once for all devices: first what a transfer waits for."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from mmkv import device as cuda
from mmkv.errors import MmkvError
from mmkv.store.files import PoolFile
from mmkv.store.runs import SegmentKey

__all__ = ["LockedSegments"]

_logger = logging.getLogger("mmkv")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value
_DONTFORK, _HUGEPAGE, _POPULATE_WRITE = 10, 14, 23

# Page-locking holds locks of the driver: it gives way to transfers, but not for ever.
_PATIENCE_SECONDS = 0.1
_WORKERS = 4


class LockedSegments:
    """Which segments are mapped and page-locked, and where.

    Host code never touches the maps: they are for the devices.
    """

    def __init__(self) -> None:
        self._bases: dict[SegmentKey, int] = {}
        self._held: dict[SegmentKey, tuple[int, int, int]] = {}
        self._refused: dict[SegmentKey, str] = {}
        self._busy: set[SegmentKey] = set()
        self._wanted: deque[tuple[PoolFile, int, int]] = deque()
        self._changed = threading.Condition()
        self._transfers = 0
        self._workers = 0
        self._closed = False
        self.bases: Mapping[SegmentKey, int] = MappingProxyType(self._bases)

    @property
    def locked_bytes(self) -> int:
        """Bytes that are page-locked now."""
        with self._changed:
            return sum(size for _, size, _ in self._held.values())

    @property
    def reason(self) -> str | None:
        """Why a segment could not be page-locked, `None` if none was refused."""
        with self._changed:
            return next(iter(self._refused.values()), None)

    def prepare(self, places: Iterable[tuple[PoolFile, int, int]], *, first: bool = False) -> None:
        """Page-lock segments in the background, while no transfer is under way. Returns at once.

        Parameters
        ----------
        places : iterable of (PoolFile, int, int)
            Files and segments, each with a device.
        first : bool
            Whether before those that were asked for earlier.
        """
        with self._changed:
            if self._closed:
                return
            new = {(file.identity, segment): (file, segment, device) for file, segment, device in places}
            for key in [*self._bases.keys() & new.keys(), *self._refused.keys() & new.keys(), *self._busy & new.keys()]:
                new.pop(key, None)
            others = [place for place in self._wanted if (place[0].identity, place[1]) not in new]
            self._wanted = deque([*new.values(), *others] if first else [*others, *new.values()])
            starting = max(0, min(_WORKERS, len(self._wanted)) - self._workers)
            self._workers += starting
        for started in range(starting):
            try:
                threading.Thread(target=self._work, name="mmkv-lock", daemon=True).start()
            except RuntimeError:
                # No more threads: those that run do it, or the transfers that need the segments.
                with self._changed:
                    self._workers -= starting - started
                return

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._transfers, timeout=_PATIENCE_SECONDS)
                if self._closed or not self._wanted:
                    self._workers -= 1
                    self._changed.notify_all()
                    return
                file, segment, device = self._wanted.popleft()
            try:
                self.lock(file, segment, device)
            except MmkvError:
                # It was said once, and a transfer that needs the segment takes another path.
                continue

    def transfer_began(self) -> None:
        """Let the background give way."""
        with self._changed:
            self._transfers += 1

    def transfer_ended(self) -> None:
        """Let the background go on after the last transfer."""
        with self._changed:
            self._transfers -= 1
            self._changed.notify_all()

    def lock(self, file: PoolFile, segment: int, device: int) -> None:
        """Map and page-lock a segment, unless it is; another thread that is at it is waited for.

        Raises
        ------
        MmkvError
            It cannot be page-locked; the text says why.
        """
        key = (file.identity, segment)
        with self._changed:
            self._changed.wait_for(lambda: key not in self._busy)
            if key in self._bases:
                return
            if key in self._refused:
                raise MmkvError(self._refused[key])
            if self._closed:
                raise MmkvError("the store is closed")
            self._busy.add(key)
        base, reason = None, ""
        try:
            with cuda.current(device):
                base = _map_and_lock(file, segment)
        except (MmkvError, OSError, RuntimeError) as error:
            reason = f"{file.path}, segment {segment}: {error}"
            raise MmkvError(reason) from error
        finally:
            with self._changed:
                self._busy.discard(key)
                is_first = not self._refused
                if base is None:
                    self._refused[key] = reason or "interrupted"
                else:
                    self._bases[key] = base
                    self._held[key] = (base, file.segment_bytes, device)
                self._changed.notify_all()
            if base is None and is_first:
                _logger.warning("a pool's memory cannot be page-locked, so that its copies are slower: %s", reason)

    def forget(self, file: PoolFile, segment: int) -> None:
        """Unlock and unmap a segment. No transfer may use it."""
        key = (file.identity, segment)
        with self._changed:
            self._wanted = deque(w for w in self._wanted if (w[0].identity, w[1]) != key)
            self._changed.wait_for(lambda: key not in self._busy)
            self._refused.pop(key, None)
            self._bases.pop(key, None)
            held = self._held.pop(key, None)
        if held is not None:
            _unlock_and_unmap(*held)

    def close(self) -> None:
        """Unlock and unmap everything. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._wanted.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._busy and not self._workers)
            held = list(self._held.values())
            self._bases.clear()
            self._held.clear()
        for one in held:
            _unlock_and_unmap(*one)


def _map_and_lock(file: PoolFile, segment: int) -> int:
    size = file.segment_bytes
    offset = segment * size
    # Pages beyond the file's end cannot be locked, and a hole would be filled page by page.
    file.require(offset + size)
    # Not by the mmap module, which keeps a descriptor open for each map.
    base = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file.fd, offset)
    if base == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {size} bytes at {offset} failed: {os.strerror(code)}")
    # Advice that a kernel does not know costs speed only. Pages are made outside the driver's locks.
    for advice in (_DONTFORK, _HUGEPAGE, _POPULATE_WRITE):
        _libc.madvise(base, size, advice)
    try:
        cuda.register_host(base, size)
    except Exception:
        _libc.munmap(base, size)
        raise
    return int(base)


def _unlock_and_unmap(base: int, size: int, device: int) -> None:
    with cuda.current(device):
        cuda.unregister_host(base)
    _libc.munmap(base, size)
