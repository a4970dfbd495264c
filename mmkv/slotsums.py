"""The checksums of what lies in a slot, taken there, layer by layer: on the host or by the device that holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mmkv.buffer import Buffer
from mmkv.castagnoli import Values
from mmkv.checksum import Parts
from mmkv.digesting import Digester
from mmkv.geometry import TokenRuns
from mmkv.piecesums import PieceSums
from mmkv.plan import Arrays
from mmkv.units import Columns, Spans

__all__ = ["SlotSums"]


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
    expected : ndarray of uint32, shape (spans, units of a block), optional
        The checksums that they should have; on the host, they cost less where they are known.

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
        expected: Values | None = None,
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
        rows = int(self._tokens.sum())
        self._layer_bytes = [
            rows * sum(unit.bytes for unit in columns.blocks[columns.planes[layer]])
            + sum(buffer.bytes for buffer in self._layer_states(layer).values())
            for layer in self.layers
        ]
        self._pieces = self._piece_sums(expected)
        self.blocks = np.zeros((len(spans), len(columns.blocks)), dtype=np.uint32)
        self.states = np.zeros(len(columns.checkpoints), dtype=np.uint32)

    def _piece_sums(self, expected: Values | None) -> PieceSums | None:
        """What takes the checksums of pieces, where all arrays are on the host and each span is one run in them."""
        if not self._spans or len(self._row) != self._spans or (np.diff(self._row) < 0).any():
            return None
        units = self._columns.blocks[:-1]
        arrays = [self._planes[unit.layer][unit.name] for unit in units]
        if any(array.device is not None for array in arrays):
            return None
        sizes = np.array([unit.bytes for unit in units], dtype=np.int64)
        addresses = [array.address for array in arrays]
        return PieceSums(addresses, sizes, self._row, self._tokens, expected)

    @property
    def layers(self) -> range:
        """All layers."""
        return range(len(self._planes))

    @property
    def bytes(self) -> int:
        """What the checksums cover."""
        return sum(self._layer_bytes)

    def layer_bytes(self, layer: int) -> int:
        """What the checksums of a layer cover."""
        return self._layer_bytes[layer]

    def has_states(self, layer: int) -> bool:
        """Whether a layer has states that are summed."""
        return bool(self._layer_states(layer))

    def device(self, layer: int) -> int | None:
        """The device that a layer lies on; `None` for the host, and for one without arrays."""
        arrays = (*self._planes[layer].values(), *self._layer_states(layer).values())
        return arrays[0].device if arrays else None

    def take(self, layers: Sequence[int]) -> None:
        """Take the checksums of layers that lie on one device, whose bytes are down."""
        if self._pieces is None:
            parts = self.parts(layers)
            if parts.count:
                self.put(layers, self._digester.checksums(parts, self.device(layers[0])))
            return
        for layer in layers:
            self._complete(layer, self._pieces)

    def copied(self, address: int, size: int) -> None:
        """Bytes in host memory were copied: take their checksums, if they are of rows in question."""
        if self._pieces is not None:
            self._pieces.add(address, size)

    def _complete(self, layer: int, pieces: PieceSums) -> None:
        """Take the checksums of what was not copied in pieces of which it was told."""
        planes = self._columns.planes[layer]
        self.blocks[:, planes], whole = pieces.values(planes)
        if whole.all() and not self.has_states(layer):
            return
        parts = self.parts([layer])
        values, left = np.zeros(parts.count, dtype=np.uint32), np.ones(parts.count, dtype=bool)
        values[: whole.size], left[: whole.size] = self.blocks[:, planes].T.ravel(), ~whole.T.ravel()
        values[left] = self._digester.checksums(parts.of(left), None)
        self.put([layer], values)

    def _layer_states(self, layer: int) -> Mapping[str, Buffer]:
        return self._states[layer] if self._states else {}

    def parts(self, layers: Sequence[int]) -> Parts:
        """Where the units of some layers lie, in the order in which `put` takes their checksums."""
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

    def put(self, layers: Sequence[int], values: Values) -> None:
        """The checksums of some layers."""
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
