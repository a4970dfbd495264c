"""A park's progress that takes the checksums on the devices ahead of the copies, which do not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mmkv import device as cuda
from mmkv.device import Event
from mmkv.digesting import Digester
from mmkv.errors import MmkvError, TransferError
from mmkv.slotsums import SlotSums
from mmkv.store.contract import Progress
from mmkv.store.digest import Digest

__all__ = ["SummingAhead"]

# So much, or a layer, is one launch: the first one is done before the first layer is copied.
_LAUNCH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """Checksums that a stream computes, and the event after them."""

    layers: Sequence[int]
    digest: Digest
    stream: Any
    event: Event


class SummingAhead:
    """Stands between the stores and a park from devices; see `mmkv.store.contract.Progress` for what it hears.

    A thread of its own launches the checksums of all layers, once what produced the slot is done. A layer is submitted,
    and has landed, when both its copy and its checksums are or have: its slot may be overwritten from then on. `whole`
    hears `released` once more, when all checksums are there.

    Parameters
    ----------
    whole : Progress
        Who hears of everything.
    sums : SlotSums
        Where the checksums go.
    digester : Digester
        Computes them.
    """

    def __init__(self, whole: Progress, sums: SlotSums, digester: Digester) -> None:
        self._whole = whole
        self._sums = sums
        self._digester = digester
        self._changed = threading.Condition()
        self._by_layer: dict[int, _Launched] = {}
        # Copies that were submitted before the checksums of their layers.
        self._early: list[tuple[int, Event]] = []
        self._failed = False
        self._summed = {layer for layer in sums.layers if sums.layer_bytes(layer)}
        self.moved = whole.moved
        self.failed = whole.failed
        self.released = whole.released

    def begin(self, after: Sequence[Event]) -> None:
        """Begin to take the checksums once `after` has fired."""
        try:
            threading.Thread(target=self._run, args=(after,), name="mmkv-checksums", daemon=True).start()
        except RuntimeError:
            # As at the interpreter's end, or at the limit of threads.
            self._run(after)

    def _run(self, after: Sequence[Event]) -> None:
        launched: list[_Launched] = []
        try:
            self._launch_all(after, launched)
            for one in launched:
                one.event.synchronize()
                self._sums.put(one.layers, one.digest.values())
        except Exception as error:
            self._whole.failed(TransferError(f"the checksums could not be taken: {error}"))
            self._settle(launched)
        finally:
            with self._changed:
                self._failed = self._failed or len(self._by_layer) < len(self._summed)
                self._changed.notify_all()
            self._whole.released()

    def _launch_all(self, after: Sequence[Event], launched: list[_Launched]) -> None:
        # Nobody else's: copies of this park are waited for in it.
        on: dict[int, Any] = {}
        for device, layers in self._batches():
            if self._whole.stopped:
                return
            if device not in on:
                on[device] = cuda.new_stream(device)
                for event in after:
                    event.wait_on(on[device].ptr)
            digest = self._digester.launch(self._sums.parts(layers), device, on[device])
            one = _Launched(layers, digest, on[device], cuda.record(device, on[device].ptr))
            launched.append(one)
            with self._changed:
                self._by_layer |= dict.fromkeys(layers, one)
                early = [pair for pair in self._early if pair[0] in self._by_layer]
                self._early = [pair for pair in self._early if pair[0] not in self._by_layer]
                self._changed.notify_all()
            for layer, copied in early:
                self._submit(layer, copied, one)

    def _batches(self) -> Iterator[tuple[int, list[int]]]:
        """The devices and the layers that are summed, in order, some at once."""
        batch: list[int] = []
        for layer in sorted(self._summed):
            if batch and (
                self._bytes([*batch, layer]) > _LAUNCH_BYTES or self._device(batch[0]) != self._device(layer)
            ):
                yield self._device(batch[0]), batch
                batch = []
            batch.append(layer)
        if batch:
            yield self._device(batch[0]), batch

    def _bytes(self, layers: Sequence[int]) -> int:
        return sum(map(self._sums.layer_bytes, layers))

    def _device(self, layer: int) -> int:
        device = self._sums.device(layer)
        assert device is not None
        return device

    def _settle(self, launched: Sequence[_Launched]) -> None:
        """Wait until the devices do not read the slot any more."""
        for one in launched:
            # What fails, too, has been told of.
            with suppress(MmkvError, RuntimeError):
                one.event.synchronize()

    # What the stores call

    @property
    def stopped(self) -> bool:
        """See `Progress.stopped`."""
        return self._whole.stopped

    def submitted(self, layer: int, event: Event) -> None:
        """See `Progress.submitted`."""
        with self._changed:
            one = self._by_layer.get(layer)
            if one is None and layer in self._summed:
                self._early.append((layer, event))
                return
        if one is None:
            self._whole.submitted(layer, event)
        else:
            self._submit(layer, event, one)

    def _submit(self, layer: int, copied: Event, one: _Launched) -> None:
        # The stream has the checksums behind it; with the copy, too, one event says both.
        with self._changed:
            copied.wait_on(one.stream.ptr)
            both = cuda.record(one.event.device, one.stream.ptr)
        self._whole.submitted(layer, both)

    def landed(self, layer: int) -> None:
        """See `Progress.landed`."""
        if layer in self._summed:
            with self._changed:
                self._changed.wait_for(lambda: layer in self._by_layer or self._failed)
                one = self._by_layer.get(layer)
            if one is None:
                return
            one.event.synchronize()
        self._whole.landed(layer)
