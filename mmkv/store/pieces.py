"""A transfer cut into pieces, each of which is contiguous in its file, so that one call can copy it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mmkv.store.contract import Copy, Gate, LayerCopies

__all__ = ["Batch", "Piece", "Scatter", "read_batches", "write_batches"]

# What a lane takes at a time: so little that it costs no order, so much that tiny pieces do not each cost a turn.
_BATCH_BYTES = 256 << 10
# As many parts as one system call takes.
_MOST_PARTS = 1024
# Runs that are shorter than this share of a piece join their neighbours in the file.
_SHORT = 4


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """Where the parts of a piece lie in the buffer, in the order of the file; int64, shape (parts,)."""

    buffer_offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Bytes that one call copies: contiguous in the file, and in the buffer unless there is a `scatter`."""

    layer: int
    copy: Copy
    file_offset: int
    buffer_offset: int
    size: int
    scatter: Scatter | None = None

    @property
    def host_address(self) -> int | None:
        """Where it lies in the buffer, if that is one place in host memory."""
        buffer = self.copy.buffer
        return buffer.address + self.buffer_offset if buffer.device is None and self.scatter is None else None


Batch: TypeAlias = list[Piece]
# A file offset, a buffer offset, a size, and a scatter.
_Cut: TypeAlias = tuple[int, int, int, Scatter | None]


class _Cutter:
    """Cuts copies into pieces of at most `piece_bytes`. Copies that share their arrays of offsets are cut alike."""

    def __init__(self, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self._known: dict[tuple[int, int, int], list[_Cut]] = {}

    def pieces(self, layer: LayerCopies) -> Iterator[Piece]:
        """The pieces of a layer."""
        for copy in layer.copies:
            key = (id(copy.file_offsets), id(copy.buffer_offsets), id(copy.sizes))
            cuts = self._known.get(key)
            if cuts is None:
                cuts = self._known[key] = list(self._cuts(copy))
            for file_offset, buffer_offset, size, scatter in cuts:
                yield Piece(layer.layer, copy, file_offset, buffer_offset, size, scatter)

    def _cuts(self, copy: Copy) -> Iterator[_Cut]:
        if len(copy.sizes) == 1:
            yield from self._cut_run(int(copy.file_offsets[0]), int(copy.buffer_offsets[0]), int(copy.sizes[0]))
            return
        order = np.argsort(copy.file_offsets, kind="stable")
        in_file, in_buffer, sizes = copy.file_offsets[order], copy.buffer_offsets[order], copy.sizes[order]
        short = sizes * _SHORT < self.piece_bytes
        joins = np.zeros(len(sizes), dtype=bool)
        joins[1:] = (in_file[1:] == in_file[:-1] + sizes[:-1]) & short[1:] & short[:-1]
        if not joins.any():
            for run in zip(in_file.tolist(), in_buffer.tolist(), sizes.tolist(), strict=True):
                yield from self._cut_run(*run)
            return
        heads = np.flatnonzero(~joins).tolist()
        ends = np.cumsum(sizes)
        for head, tail in zip(heads, [*heads[1:], len(sizes)], strict=True):
            start = head
            while start < tail:
                full = int(np.searchsorted(ends, ends[start] - sizes[start] + self.piece_bytes, side="right"))
                stop = max(start + 1, min(tail, full, start + _MOST_PARTS))
                file_offset, buffer_offset = int(in_file[start]), int(in_buffer[start])
                size = int(ends[stop - 1] - ends[start] + sizes[start])
                parts = slice(start, stop)
                if (in_buffer[parts] - in_file[parts] == buffer_offset - file_offset).all():
                    yield from self._cut_run(file_offset, buffer_offset, size)
                else:
                    yield file_offset, buffer_offset, size, Scatter(in_buffer[parts], sizes[parts])
                start = stop

    def _cut_run(self, file_offset: int, buffer_offset: int, size: int) -> Iterator[_Cut]:
        for start in range(0, size, self.piece_bytes):
            yield file_offset + start, buffer_offset + start, min(self.piece_bytes, size - start), None


def read_batches(
    layers: Sequence[LayerCopies], piece_bytes: int, gate: Gate | None = None, *, first_layer_bytes: int | None = None
) -> Iterator[Batch]:
    """A piece at a time or a few small ones, layer after layer, so that the first layer comes first.

    Each layer is past its gate. Lanes that take turns at pieces, not at larger batches of them, all work at the same
    layer until it is there.

    Parameters
    ----------
    piece_bytes : int
        The largest piece.
    first_layer_bytes : int, optional
        The largest piece of the first layer, which is waited for most, where lanes share what limits them.
    """
    cutter = _Cutter(piece_bytes)
    for index, layer in enumerate(layers):
        if gate is not None:
            event = gate(layer.layer)
            if event is not None:
                event.synchronize()
        first = index == 0 and first_layer_bytes
        yield from _batches(_Cutter(first) if first else cutter, layer)


def _batches(cutter: _Cutter, layer: LayerCopies) -> Iterator[Batch]:
    batch: Batch = []
    size = 0
    for piece in cutter.pieces(layer):
        if batch and size + piece.size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.size
    if batch:
        yield batch


def write_batches(layers: Sequence[LayerCopies], piece_bytes: int) -> Iterator[Batch]:
    """A batch a layer: a file's inode lock lets one writer in, so that each lane has a file of its own."""
    cutter = _Cutter(piece_bytes)
    for layer in layers:
        batch = list(cutter.pieces(layer))
        if batch:
            yield batch
