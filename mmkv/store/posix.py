"""Host arrays, on every file system: `preadv` and `pwritev` from several threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmkv.store.contract import Gate, LayerCopies, Progress, Store
from mmkv.store.files import PoolFile
from mmkv.store.lanes import Lanes, drain
from mmkv.store.pieces import Piece, read_batches, write_batches
from mmkv.store.vectors import read_scattered, write_gathered

if TYPE_CHECKING:
    from mmkv.device import Event

__all__ = ["PosixStore"]

# Small enough that the processor's cache has it when its checksum is taken, right after its copy.
_PIECE_BYTES = 2 << 20
# A disk wants many requests at once, whose threads mostly sleep. With larger ones, the first layer would share the
# disk with so many others that it comes late.
_DISK_THREADS, _DISK_PIECE_BYTES, _DISK_FIRST_LAYER_BYTES = 16, 4 << 20, 1 << 20


class PosixStore(Store):
    """Copies between host memory and files with plain system calls.

    Never maps a file: a host access to a mapped page of a full or truncated file is a signal, a system call's is an
    error.

    Parameters
    ----------
    threads : int
        How many threads copy at once in one transfer.
    disk : bool
        Whether the files lie on a disk.
    """

    path = "posix"

    def __init__(self, threads: int, *, disk: bool = False) -> None:
        self._threads = max(threads, _DISK_THREADS) if disk else threads
        self._piece_bytes = _DISK_PIECE_BYTES if disk else _PIECE_BYTES
        self._first_layer_bytes = _DISK_FIRST_LAYER_BYTES if disk else None
        self._lanes = Lanes("mmkv-posix")

    def read(
        self,
        layers: Sequence[LayerCopies],
        progress: Progress,
        after: Sequence[Event] = (),
        gate: Gate | None = None,
    ) -> None:
        """Copy from files into buffers; see `Store.read`."""
        batches = read_batches(layers, self._piece_bytes, gate, first_layer_bytes=self._first_layer_bytes)
        drain(self._lanes, layers, batches, read_piece, progress, threads=self._threads, after=after)

    def write(self, layers: Sequence[LayerCopies], progress: Progress, after: Sequence[Event] = ()) -> None:
        """Copy from buffers into files; see `Store.write`."""
        batches = write_batches(layers, self._piece_bytes)
        drain(self._lanes, layers, batches, write_piece, progress, threads=self._threads, after=after)

    def prepare(self, files: Sequence[PoolFile], segments: Sequence[int]) -> None:
        """Nothing is to be done for a segment."""

    def forget(self, file: PoolFile, segment: int) -> None:
        """Nothing is held of a segment."""

    def close(self) -> None:
        """Stop the idle threads."""
        self._lanes.close()

    def describe(self) -> dict[str, Any]:
        """The path and the number of threads. Receipts say `posix-direct` of what left the page cache out."""
        return {"path": self.path, "threads": self._threads}


def read_piece(piece: Piece) -> str:
    """Read a piece into its buffer, or raise what went wrong. Returns the path that it took."""
    if piece.scatter is not None:
        unbuffered = read_scattered(piece, piece.scatter)
    else:
        view = piece.copy.buffer.host_view(piece.buffer_offset, piece.size)
        unbuffered = piece.copy.file.read(view, piece.file_offset)
    return "posix-direct" if unbuffered else "posix"


def write_piece(piece: Piece) -> str:
    """Write a piece into its file, or raise what went wrong. Returns the path that it took."""
    if piece.scatter is not None:
        unbuffered = write_gathered(piece, piece.scatter)
    else:
        view = piece.copy.buffer.host_view(piece.buffer_offset, piece.size)
        unbuffered = piece.copy.file.write(view, piece.file_offset)
    return "posix-direct" if unbuffered else "posix"
