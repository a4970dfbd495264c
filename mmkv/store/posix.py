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

_PIECE_BYTES = 8 << 20


class PosixStore(Store):
    """Copies between host memory and files with plain system calls.

    Never maps a file: a host access to a mapped page of a full or truncated file is a signal, a system call's is an
    error.

    Parameters
    ----------
    threads : int
        How many threads copy at once in one transfer.
    """

    path = "posix"

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lanes = Lanes("mmkv-posix")

    def read(
        self,
        layers: Sequence[LayerCopies],
        progress: Progress,
        after: Sequence[Event] = (),
        gate: Gate | None = None,
    ) -> None:
        """Copy from files into buffers; see `Store.read`."""
        batches = read_batches(layers, _PIECE_BYTES, gate)
        drain(self._lanes, layers, batches, read_piece, progress, threads=self._threads, after=after)

    def write(self, layers: Sequence[LayerCopies], progress: Progress, after: Sequence[Event] = ()) -> None:
        """Copy from buffers into files; see `Store.write`."""
        batches = write_batches(layers, _PIECE_BYTES)
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
        read_scattered(piece, piece.scatter)
        return "posix"
    view = piece.copy.buffer.host_view(piece.buffer_offset, piece.size)
    return "posix-direct" if piece.copy.file.read(view, piece.file_offset) else "posix"


def write_piece(piece: Piece) -> str:
    """Write a piece into its file, or raise what went wrong. Returns the path that it took."""
    if piece.scatter is not None:
        write_gathered(piece, piece.scatter)
        return "posix"
    view = piece.copy.buffer.host_view(piece.buffer_offset, piece.size)
    return "posix-direct" if piece.copy.file.write(view, piece.file_offset) else "posix"
