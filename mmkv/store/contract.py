"""What every store promises: to copy runs of bytes between buffers and pool files, and to tell how far it is."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mmkv.buffer import Buffer
    from mmkv.device import Event
    from mmkv.store.files import PoolFile

__all__ = ["Copy", "Gate", "LayerCopies", "Progress", "Store"]

# Called before a layer's copies begin; blocks until its buffers may be overwritten, or gives an event that says when.
# Raises where they never will be.
Gate: TypeAlias = "Callable[[int], Event | None]"


# Not frozen: a transfer makes hundreds before its first byte moves, and a frozen one takes four times as long.
@dataclass(slots=True, eq=False)
class Copy:
    """The share of one array in a transfer: runs that are contiguous in the file and in the buffer.

    No run crosses the border of a segment. Nobody changes one.

    Attributes
    ----------
    name : str
        The plane or the state.
    file : PoolFile
        The file that holds the bytes.
    buffer : Buffer
        The array.
    file_offsets, buffer_offsets, sizes : ndarray of int64, shape (runs,)
        Where each run starts in the file and in the buffer, and its size, in bytes.
    """

    name: str
    file: PoolFile
    buffer: Buffer
    file_offsets: npt.NDArray[np.int64]
    buffer_offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    @property
    def bytes(self) -> int:
        """Bytes of all runs."""
        return int(self.sizes[0] if len(self.sizes) == 1 else self.sizes.sum())


@dataclass(slots=True, eq=False)
class LayerCopies:
    """All copies of one layer in a transfer. The buffers of a store's call are all of one kind of memory."""

    layer: int
    copies: tuple[Copy, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.bytes for copy in self.copies)


class Progress(Protocol):
    """Whom a store tells how far a transfer is. Every call is safe from any thread."""

    @property
    def stopped(self) -> bool:
        """Whether the transfer failed, was cancelled or timed out: start no further copy."""

    def submitted(self, layer: int, event: Event) -> None:
        """The layer's copies are in a stream's order and `event` fires after them."""

    def landed(self, layer: int) -> None:
        """The layer's bytes are where they belong."""

    def moved(self, path: str, size: int, address: int | None = None) -> None:
        """`size` bytes went by `path`; to or from one place in host memory, a store may say at which address."""

    def failed(self, error: Exception) -> None:
        """A copy failed; no layer lands from now on. The first error counts."""

    def released(self) -> None:
        """The store and the hardware let go of every buffer and block: the last call, made exactly once."""


class Store(abc.ABC):
    """How bytes move between buffers and the files of one pool.

    `read` and `write` return when the work is under way, not when it is done; they raise nothing for what goes wrong
    with the bytes but tell `progress`. A layer whose copies are empty lands, too. The caller keeps files open,
    segments allocated and buffers alive until `progress.released()`.
    """

    @abc.abstractmethod
    def read(
        self,
        layers: Sequence[LayerCopies],
        progress: Progress,
        after: Sequence[Event] = (),
        gate: Gate | None = None,
    ) -> None:
        """Copy from files into buffers, layer by layer, once `after` has fired and the layer's `gate` lets it."""

    @abc.abstractmethod
    def write(self, layers: Sequence[LayerCopies], progress: Progress, after: Sequence[Event] = ()) -> None:
        """Copy from buffers into files, once `after` has fired; layers may land in any order."""

    @abc.abstractmethod
    def prepare(self, files: Sequence[PoolFile], segments: Sequence[int]) -> None:
        """Get ready, in the background, for transfers that touch these segments of `files`, which are allocated."""

    @abc.abstractmethod
    def forget(self, file: PoolFile, segment: int) -> None:
        """Let go of what is held of a segment (maps, registrations), which is about to be given back."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of everything. The caller sees to it that no transfer is under way."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """What this store is and why, in plain values: `path`, and `reason` where a faster path was not to be had."""
