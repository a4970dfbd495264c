"""A transfer's progress that takes the checksums of what the stores tell of: of pieces, then of whole layers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mmkv.errors import TransferError
from mmkv.slotsums import SlotSums
from mmkv.store.contract import Progress

if TYPE_CHECKING:
    from mmkv.device import Event

__all__ = ["Summing", "Sums"]

# What one launch on a device has: it costs the host a millisecond. The last layers have one each, so that little is
# left to do when the last one has landed.
_LAUNCH_BYTES = 256 << 20
_LAST_LAYERS = 2


class Sums(Protocol):
    """Checksums that are taken layer by layer; see `SlotSums`."""

    def take(self, layers: Sequence[int]) -> None:
        """The bytes of some layers are down."""

    def copied(self, address: int, size: int) -> None:
        """Bytes in host memory were copied, of which the processor's cache may still have some."""

    def has_states(self, layer: int) -> bool:
        """Whether a layer has states that are summed."""


class Summing:
    """Stands between the stores and a transfer; see `mmkv.store.contract.Progress` for what it hears.

    Layers on a device are taken together from some 256 MiB on, all others at once, by the thread of the store that told
    of them: meanwhile the other layers are on their way. On the host, most of a layer was taken before, piece by piece.

    Parameters
    ----------
    whole : Progress
        Who hears of everything.
    sums : sequence of Sums
        Where the checksums go. The first one says where the layers lie.
    stores_by_layer : sequence of int
        How many stores move a part of each layer.
    first : bool
        Whether every layer counts as landed only when its checksums were taken: in a park, whose slot may be
        overwritten from then on. Rows of a take stay as they are when their layer is used, so that it can be at once;
        its states do not, so that a layer whose states are summed has to wait, too.
    """

    def __init__(
        self, whole: Progress, sums: tuple[SlotSums, *tuple[Sums, ...]], stores_by_layer: Sequence[int], *, first: bool
    ) -> None:
        self._whole = whole
        self._sums = sums
        self._first = [first or any(one.has_states(layer) for one in sums) for layer in range(len(stores_by_layer))]
        self._together = first
        self._missing = list(stores_by_layer)
        self._left = sum(1 for stores in stores_by_layer if stores)
        self._waiting: dict[int, list[int]] = {}
        self._lock = threading.Lock()
        self.failed = whole.failed
        self.released = whole.released

    @property
    def stopped(self) -> bool:
        """See `Progress.stopped`."""
        return self._whole.stopped

    def submitted(self, layer: int, event: Event) -> None:
        """See `Progress.submitted`."""
        if not self._first[layer]:
            self._whole.submitted(layer, event)

    def moved(self, path: str, size: int, address: int | None = None) -> None:
        """See `Progress.moved`."""
        if address is not None and not self._whole.stopped:
            try:
                for sums in self._sums:
                    sums.copied(address, size)
            except Exception as error:
                self._whole.failed(TransferError(f"{size} bytes: their checksums could not be taken: {error}"))
        self._whole.moved(path, size)

    def landed(self, layer: int) -> None:
        """See `Progress.landed`."""
        with self._lock:
            self._missing[layer] -= 1
            whole = self._missing[layer] == 0
            self._left -= whole
            due = self._due(layer) if whole else []
        if not self._first[layer] or not whole:
            self._whole.landed(layer)
        for layers in due:
            self._take(layers)

    def _due(self, layer: int) -> list[list[int]]:
        """The layers whose turn has come with this one; those of a list lie on one device."""
        device = self._sums[0].device(layer)
        due = []
        if device is None:
            due.append([layer])
        else:
            waiting = self._waiting.setdefault(device, [])
            waiting.append(layer)
            # Who takes waits for a layer's states.
            urgent = self._first[layer] and not self._together
            urgent = urgent or self._left < _LAST_LAYERS
            if urgent or sum(map(self._sums[0].layer_bytes, waiting)) >= _LAUNCH_BYTES:
                due.append(self._waiting.pop(device))
        if self._left == 0:
            due += self._waiting.values()
            self._waiting = {}
        return due

    def _take(self, layers: list[int]) -> None:
        if self._whole.stopped:
            return
        try:
            for sums in self._sums:
                sums.take(layers)
        except TransferError as error:
            self._whole.failed(error)
            return
        except Exception as error:
            self._whole.failed(
                TransferError(f"layers {layers[0]} to {layers[-1]}: their checksums could not be taken: {error}")
            )
            return
        for layer in layers:
            if self._first[layer]:
                self._whole.landed(layer)
