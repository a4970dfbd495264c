"""Device arrays, where nothing better is to be had: system calls and a page-locked bounce buffer for each thread."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from mmkv import device as cuda
from mmkv.device import Event
from mmkv.errors import MmkvError
from mmkv.store.contract import Gate, LayerCopies, Progress, Store
from mmkv.store.files import PoolFile
from mmkv.store.kernel import CopyKernel
from mmkv.store.lanes import Lanes, drain
from mmkv.store.pieces import Piece, read_batches, write_batches

__all__ = ["StagedStore"]

_PIECE_BYTES = 4 << 20


class StagedStore(Store):
    """Copies between device memory and files through host memory: `preadv` or `pwritev`, and a copy by the device.

    Rows that lie scattered in device memory but together in the file are copied together, by a kernel.

    Parameters
    ----------
    threads : int
        How many threads copy at once in one transfer; each takes 4 MiB of page-locked memory.
    reason : str, optional
        Why no faster path is taken.
    """

    path = "posix"

    def __init__(self, threads: int, reason: str | None = None) -> None:
        self._threads = threads
        self._reason = reason
        self._lanes = Lanes("mmkv-staged")
        self._kernel = CopyKernel()
        self._idle: list[_Bounce] = []
        self._lock = threading.Lock()

    def read(
        self,
        layers: Sequence[LayerCopies],
        progress: Progress,
        after: Sequence[Event] = (),
        gate: Gate | None = None,
    ) -> None:
        """Copy from files into buffers; see `Store.read`."""
        batches = read_batches(layers, _PIECE_BYTES, gate)
        drain(self._lanes, layers, batches, self._read, progress, threads=self._threads, after=after)

    def write(self, layers: Sequence[LayerCopies], progress: Progress, after: Sequence[Event] = ()) -> None:
        """Copy from buffers into files; see `Store.write`."""
        batches = write_batches(layers, _PIECE_BYTES)
        drain(self._lanes, layers, batches, self._write, progress, threads=self._threads, after=after)

    def prepare(self, files: Sequence[PoolFile], segments: Sequence[int]) -> None:
        """Nothing is to be done for a segment."""

    def forget(self, file: PoolFile, segment: int) -> None:
        """Nothing is held of a segment."""

    def close(self) -> None:
        """Free the bounce buffers and stop the idle threads."""
        self._lanes.close()
        with self._lock:
            self._idle.clear()
        cuda.trim()

    def describe(self) -> dict[str, Any]:
        """The path, the number of threads, and why no faster path is taken."""
        reason = {} if self._reason is None else {"reason": self._reason}
        return {"path": self.path, "threads": self._threads, **reason}

    def _read(self, piece: Piece) -> str:
        bounce = self._bounce()
        unbuffered = piece.copy.file.read(bounce.view(piece), piece.file_offset)
        bounce.copy(piece, to_device=True)
        self._give_back(bounce)
        return "posix-direct" if unbuffered else "posix"

    def _write(self, piece: Piece) -> str:
        bounce = self._bounce()
        bounce.copy(piece, to_device=False)
        unbuffered = piece.copy.file.write(bounce.view(piece), piece.file_offset)
        self._give_back(bounce)
        return "posix-direct" if unbuffered else "posix"

    def _bounce(self) -> _Bounce:
        with self._lock:
            return self._idle.pop() if self._idle else _Bounce(self._kernel)

    def _give_back(self, bounce: _Bounce) -> None:
        # One whose copy failed is not given back: the device may still be at it.
        with self._lock:
            self._idle.append(bounce)


class _Bounce:
    """Page-locked memory for one piece, and a stream for each device."""

    __slots__ = ("_kernel", "_memory", "_streams", "_view")

    def __init__(self, kernel: CopyKernel) -> None:
        self._kernel = kernel
        self._memory = cuda.pinned(_PIECE_BYTES)
        self._view = memoryview(self._memory).cast("B")
        self._streams: dict[int, Any] = {}

    def view(self, piece: Piece) -> memoryview:
        """The memory that a piece takes."""
        return self._view[: piece.size]

    def copy(self, piece: Piece, *, to_device: bool) -> None:
        """Copy a piece to or from its array, and wait for it."""
        device = piece.copy.buffer.device
        if device is None:
            raise MmkvError("host memory needs no bounce buffer")
        if device not in self._streams:
            self._streams[device] = cuda.new_stream(device)
        stream = self._streams[device]
        with cuda.current(device):
            keep = self._submit(piece, device, stream, to_device=to_device)
            stream.synchronize()
        del keep

    def _submit(self, piece: Piece, device: int, stream: Any, *, to_device: bool) -> object:
        memory, buffer, scatter = self._memory.ptr, piece.copy.buffer.address, piece.scatter
        if scatter is not None and self._kernel.ready(device):
            return self._kernel.move_parts(memory, buffer, scatter, device, stream, to_buffer=to_device)
        if scatter is None:
            offsets, sizes = [piece.buffer_offset], [piece.size]
        else:
            offsets, sizes = scatter.buffer_offsets.tolist(), scatter.sizes.tolist()
        in_array = [buffer + offset for offset in offsets]
        in_memory = [memory + before for before in accumulate(sizes[:-1], initial=0)]
        targets, sources = (in_array, in_memory) if to_device else (in_memory, in_array)
        cuda.copy_all(targets, sources, array("Q", sizes), stream.ptr, to_device=to_device)
        return None
