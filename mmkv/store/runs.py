"""How the runs of a transfer reach a device: few or long ones by its copy engine, many short ones by a kernel."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from mmkv.errors import MmkvError, TransferError
from mmkv.store.contract import Copy, LayerCopies
from mmkv.store.files import PoolFile
from mmkv.store.kernel import Words, table_words

__all__ = ["NotLockedError", "PlannedLayer", "Planner", "SegmentKey", "Shape", "Share", "segments_of"]

SegmentKey: TypeAlias = "tuple[tuple[int, int], int]"

# The copy engine takes runs that are so long on the average, or so few. In a batch a run costs it 0.8 microseconds
# more than its bytes do, and the kernel is 7 % slower on the bytes: they are even at 600 KB (measured on an H200).
_LONG_BYTES = 1 << 20
_FEW_RUNS = 8


class NotLockedError(Exception):
    """A run lies in a segment that is not page-locked."""


@dataclass(slots=True, eq=False)
class Shape:
    """What the copies of a layer on one device are, apart from where its segments and its buffers lie.

    Like layers have like shapes, so that the runs are looked at once. Addresses are found by slots: for each copy those
    of its segments, then that of its buffer.

    Attributes
    ----------
    segments : list of list of int
        The segments of each copy's file that it touches, in order.
    bytes : int
        Bytes of all runs.
    in_files, in_buffers : list of (slot, offset)
        Where each run lies, for the copy engine; empty if the kernel takes the runs.
    sizes : array of uint64
        The sizes of those runs.
    table : ndarray of int64, optional
        The words of the kernel's table.
    runs : int
        How many runs there are.
    placed : int
        Where the table lies on the device, 0 before it does.
    """

    segments: list[list[int]]
    bytes: int
    runs: int
    in_files: list[tuple[int, int]]
    in_buffers: list[tuple[int, int]]
    sizes: array[int]
    table: Words | None = None
    placed: int = 0

    def copies(self, addresses: list[int], *, to_device: bool) -> tuple[list[int], list[int]]:
        """The targets and the sources of what the copy engine takes."""
        in_files = [addresses[slot] + offset for slot, offset in self.in_files]
        in_buffers = [addresses[slot] + offset for slot, offset in self.in_buffers]
        return (in_buffers, in_files) if to_device else (in_files, in_buffers)


@dataclass(slots=True, eq=False)
class Share:
    """What a layer copies to or from one device: a shape, and what its slots stand for.

    `placed` says where the addresses lie on the device, for the kernel.
    """

    device: int
    shape: Shape
    addresses: list[int]
    placed: int = 0


@dataclass(slots=True, eq=False)
class PlannedLayer:
    """A layer and its share on each device."""

    layer: int
    shares: list[Share]

    @property
    def bytes(self) -> int:
        """Bytes of all shares."""
        return sum(share.shape.bytes for share in self.shares)


class Planner:
    """Finds every run's address and chooses who copies it.

    The first of like layers costs some ten nanoseconds a run, the others some microseconds each. Layers are alike if
    they share their arrays of offsets.

    Parameters
    ----------
    bases : mapping of segment to int
        Where page-locked segments are mapped.
    kernel : bool
        Whether a kernel may take short runs.
    """

    def __init__(self, bases: Mapping[SegmentKey, int], *, kernel: bool) -> None:
        self._bases = bases
        self._like: dict[tuple[int | None, ...], list[tuple[int, list[int] | None, Shape]]] = {}
        self.kernel = kernel

    def plan(self, layer: LayerCopies) -> PlannedLayer:
        """Plan the copies of a layer, whose files must be whole.

        Raises
        ------
        NotLockedError
            A run lies in a segment that is not page-locked.
        TransferError
            A file was truncated or deleted.
        """
        key: list[int | None] = [self.kernel]
        for copy in layer.copies:
            key += (
                id(copy.file_offsets), id(copy.buffer_offsets), id(copy.sizes), copy.file.segment_bytes,
                copy.buffer.device,
            )  # fmt: skip
        like = self._like.get(tuple(key))
        if like is None:
            like = self._like[tuple(key)] = self._shapes_of(layer)
        shares = []
        for device, positions, shape in like:
            copies = layer.copies if positions is None else [layer.copies[position] for position in positions]
            shares.append(Share(device, shape, self._addresses(layer.layer, copies, shape)))
        return PlannedLayer(layer.layer, shares)

    def _shapes_of(self, layer: LayerCopies) -> list[tuple[int, list[int] | None, Shape]]:
        """The devices that a layer's copies go to or come from, which copies those are, and their shape."""
        positions: dict[int, list[int]] = {}
        for position, copy in enumerate(layer.copies):
            device = copy.buffer.device
            if device is None:
                raise ValueError(f"layer {layer.layer}, {copy.name!r}: host memory moves by no page-locked map")
            if len(copy.sizes):
                positions.setdefault(device, []).append(position)
        return [
            (
                device,
                None if len(own) == len(layer.copies) else own,
                self._shape_of([layer.copies[position] for position in own]),
            )
            for device, own in positions.items()
        ]

    def _addresses(self, layer: int, copies: Sequence[Copy], shape: Shape) -> list[int]:
        """What the slots of a shape stand for in a layer."""
        addresses: list[int] = []
        file: PoolFile | None = None
        segments: list[int] = []
        bases: list[int] = []
        for copy, touched in zip(copies, shape.segments, strict=True):
            # Most often a layer's planes lie in the same segments of one file.
            if copy.file is not file or touched is not segments:
                file, segments = copy.file, touched
                try:
                    bases = [self._bases[file.identity, segment] for segment in segments]
                except KeyError:
                    raise NotLockedError from None
                _require_whole(layer, copy, segments)
            addresses += bases
            addresses.append(copy.buffer.address)
        return addresses

    def _shape_of(self, copies: Sequence[Copy]) -> Shape:
        runs = sum(len(copy.sizes) for copy in copies)
        size = sum(copy.bytes for copy in copies)
        segments: list[list[int]] = []
        for copy in copies:
            found = segments_of(copy)
            segments.append(next((known for known in segments if known == found), found))
        shape = Shape(segments, size, runs, [], [], array("Q"))
        if self.kernel and runs > _FEW_RUNS and size < runs * _LONG_BYTES:
            _tabulate(shape, copies)
        else:
            _list(shape, copies)
        return shape


def segments_of(copy: Copy) -> list[int]:
    """The segments of its file that a copy touches, in order."""
    segment_bytes = copy.file.segment_bytes
    if len(copy.file_offsets) <= _FEW_RUNS:
        # Without NumPy, whose calls cost more than so few runs.
        return sorted({offset // segment_bytes for offset in copy.file_offsets.tolist()})
    return [int(segment) for segment in np.unique(copy.file_offsets // segment_bytes)]


def _list(shape: Shape, copies: Sequence[Copy]) -> None:
    """List the runs for the copy engine."""
    slot = 0
    for copy, segments in zip(copies, shape.segments, strict=True):
        segment_bytes, buffer_slot = copy.file.segment_bytes, slot + len(segments)
        slots = {segment: slot + position for position, segment in enumerate(segments)}
        for offset in copy.file_offsets.tolist():
            segment, inside = divmod(offset, segment_bytes)
            shape.in_files.append((slots[segment], inside))
        shape.in_buffers += [(buffer_slot, offset) for offset in copy.buffer_offsets.tolist()]
        shape.sizes.extend(copy.sizes.tolist())
        slot = buffer_slot + 1


def _tabulate(shape: Shape, copies: Sequence[Copy]) -> None:
    """Make the kernel's table of the runs."""
    slot = 0
    slots, inside = [], []
    for copy, segments in zip(copies, shape.segments, strict=True):
        in_segments, within = np.divmod(copy.file_offsets, copy.file.segment_bytes)
        file_slots = np.searchsorted(np.array(segments), in_segments) + slot
        slot += len(segments)
        slots.append(file_slots << 32 | slot)
        inside.append(within)
        slot += 1
    shape.table = table_words(
        np.concatenate(slots),
        np.concatenate(inside),
        np.concatenate([copy.buffer_offsets for copy in copies]),
        np.concatenate([copy.sizes for copy in copies]),
    )


def _require_whole(layer: int, copy: Copy, segments: list[int]) -> None:
    """Check that the file reaches to the end of the last segment that is touched: a map does not tell."""
    try:
        copy.file.require((segments[-1] + 1) * copy.file.segment_bytes)
    except MmkvError as error:
        raise TransferError(f"layer {layer}, {copy.name!r}: {error}", layer=layer, plane=copy.name) from error
