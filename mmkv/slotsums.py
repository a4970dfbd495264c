"""The checksums of what lies in a slot, taken there, layer by layer: on the host or by the device that holds it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mmkv import device as cuda
from mmkv.buffer import Buffer
from mmkv.castagnoli import Values
from mmkv.checksum import Parts, crc32c, host_checksums
from mmkv.geometry import TokenRuns
from mmkv.plan import Arrays
from mmkv.store.digest import DigestKernel
from mmkv.units import Columns, Spans

__all__ = ["Digester", "SlotSums"]

_BOUNCE_BYTES = 4 << 20


class Digester:
    """Computes checksums where the bytes are; the kernel is compiled once for each device."""

    def __init__(self) -> None:
        self._kernel = DigestKernel()
        self._streams: dict[int, Any] = {}
        self._lock = threading.Lock()

    def prepare(self, device: int) -> None:
        """Compile the kernel for a device ahead of need; takes a second."""
        self._kernel.ready(device)

    def checksums(self, parts: Parts, device: int | None) -> Values:
        """The checksums of units on a device, or in host memory; waits for them.

        What wrote the bytes has been waited for.
        """
        if device is None or not parts.count:
            return host_checksums(parts)
        if not self._kernel.ready(device):
            return self._through_host(parts, device)
        stream = self._stream(device)
        with cuda.current(device):
            digest = self._kernel.launch(parts, device, stream)
            stream.synchronize()
        return digest.values()

    def _through_host(self, parts: Parts, device: int) -> Values:
        """The same on the host, to which the bytes are copied: where there is no compiler for the kernel."""
        values = np.zeros(parts.count, dtype=np.uint32)
        bounce, stream = cuda.pinned(_BOUNCE_BYTES), self._stream(device)
        view = memoryview(bounce).cast("B")
        columns = (parts.units.tolist(), parts.addresses.tolist(), parts.sizes.tolist())
        with cuda.current(device):
            for unit, address, size in zip(*columns, strict=True):
                for at in range(0, size, _BOUNCE_BYTES):
                    length = min(_BOUNCE_BYTES, size - at)
                    cuda.copy_async(bounce.ptr, address + at, length, stream.ptr, to_device=False)
                    stream.synchronize()
                    values[unit] = crc32c(view[:length], int(values[unit]))
        return values

    def _stream(self, device: int) -> Any:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = cuda.new_stream(device)
            return self._streams[device]

    def close(self) -> None:
        """Let go of the streams."""
        with self._lock:
            self._streams.clear()


class SlotSums:
    """The checksums of some rows of a slot, a row of them for each span, and of its states.

    Where the rows lie is found from the slot and the tokens alone, not from the copies that move them, so that what a
    wrong copy did shows.

    Parameters
    ----------
    digester : Digester
        Computes them.
    columns : Columns
        The units of the layout.
    slot : Slot, PagedSlot or the like
        The arrays.
    states : sequence of dict of str to Buffer
        The states of each layer that are summed; none where no states move.
    spans : Spans
        The rows, of which each span lies in one block.

    Attributes
    ----------
    blocks : ndarray of uint32, shape (spans, units of a block)
        Zero until its layer was taken; the column of the ids stays so.
    states : ndarray of uint32, shape (units of a record,)
        Likewise.
    """

    def __init__(
        self,
        digester: Digester,
        columns: Columns,
        slot: Arrays,
        states: Sequence[Mapping[str, Buffer]],
        spans: Spans,
    ) -> None:
        self._digester = digester
        self._columns = columns
        self._planes = slot.memory.planes
        self._states = states
        self._spans = len(spans)
        zeros = np.zeros(len(spans), dtype=np.int64)
        pieces, self._row = slot.place(TokenRuns(zeros, zeros, spans.token, spans.tokens))
        self._tokens = pieces.tokens
        self._span = np.searchsorted(spans.token, pieces.token, side="right") - 1
        self.blocks = np.zeros((len(spans), len(columns.blocks)), dtype=np.uint32)
        self.states = np.zeros(len(columns.checkpoints), dtype=np.uint32)

    @property
    def bytes(self) -> int:
        """What the checksums cover."""
        return sum(map(self.layer_bytes, range(len(self._planes))))

    def layer_bytes(self, layer: int) -> int:
        """What the checksums of a layer cover."""
        rows = int(self._tokens.sum())
        size = rows * sum(unit.bytes for unit in self._columns.blocks[self._columns.planes[layer]])
        return size + sum(buffer.bytes for buffer in self._layer_states(layer).values())

    def device(self, layer: int) -> int | None:
        """The device that a layer lies on; `None` for the host, and for one without arrays."""
        arrays = (*self._planes[layer].values(), *self._layer_states(layer).values())
        return arrays[0].device if arrays else None

    def take(self, layers: Iterable[int]) -> None:
        """Take the checksums of layers that lie on one device, whose bytes are down."""
        layers = list(layers)
        parts = self._parts(layers)
        if parts.count:
            values = self._digester.checksums(parts, self.device(layers[0]))
            self._put(layers, values)

    def _layer_states(self, layer: int) -> Mapping[str, Buffer]:
        return self._states[layer] if self._states else {}

    def _parts(self, layers: Sequence[int]) -> Parts:
        addresses, sizes, units = [], [], []
        count = 0
        for layer in layers:
            for unit in self._columns.blocks[self._columns.planes[layer]]:
                if self._spans:
                    addresses.append(self._planes[layer][unit.name].address + self._row * unit.bytes)
                    sizes.append(self._tokens * unit.bytes)
                    units.append(self._span + count)
                    count += self._spans
            for buffer in self._layer_states(layer).values():
                addresses.append(np.array([buffer.address]))
                sizes.append(np.array([buffer.bytes]))
                units.append(np.array([count]))
                count += 1
        if not count:
            nothing = np.zeros(0, dtype=np.int64)
            return Parts(nothing, nothing, nothing, 0)
        return Parts(np.concatenate(addresses), np.concatenate(sizes), np.concatenate(units), count)

    def _put(self, layers: Sequence[int], values: Values) -> None:
        at = 0
        for layer in layers:
            planes, states = self._columns.planes[layer], self._columns.states[layer]
            width = planes.stop - planes.start if self._spans else 0
            found = values[at : at + width * self._spans].reshape(width, self._spans)
            if width:
                self.blocks[:, planes] = found.T
            at += width * self._spans
            count = len(self._layer_states(layer))
            if count:
                self.states[states] = values[at : at + count]
            at += count
