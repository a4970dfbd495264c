"""What a catalog knows of the units of one version, for who reads its files beside the owner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mmkv.blocks import block_numbers
from mmkv.castagnoli import Values
from mmkv.catalog import Catalog
from mmkv.checksum import UnitStream
from mmkv.directory import Description
from mmkv.errors import ConversationCorrupt
from mmkv.geometry import Extent
from mmkv.sizes import round_up
from mmkv.unit_table import UnitRows, read_bad, read_units
from mmkv.units import Columns

__all__ = ["KnownUnits"]


class KnownUnits:
    """The checksums of a version's blocks and records, in its order.

    Parameters
    ----------
    catalog, description
        Of the pool.
    extents : sequence of Extent
        The version's blocks.
    records : sequence of int
        The records of its checkpoints.

    Attributes
    ----------
    is_bad : bool
        Whether some of it is in quarantine.
    """

    def __init__(
        self, catalog: Catalog, description: Description, extents: Sequence[Extent], records: Sequence[int]
    ) -> None:
        self._geometry = description.geometry
        self._columns = Columns(description.layout)
        blocks = block_numbers(extents)
        numbers = np.array(records, dtype=np.int64)
        with catalog.snapshot():
            found = read_units(catalog, "blocks", self._columns, self._geometry.block_tokens, extents)
            points = [Extent(record, 1) for record in records]
            states = read_units(catalog, "checkpoints", self._columns, 1, points)
            bad = {(row.kind, row.number) for row in read_bad(catalog)}
        self._blocks = _in_order(found, blocks)
        self._states = _in_order(states, numbers)
        self.is_bad = not bad.isdisjoint(
            {("blocks", number) for number in blocks.tolist()} | {("checkpoints", number) for number in records}
        )

    def stream(self, layer: int, name: str, checkpoint: int | None, tokens: int) -> tuple[UnitStream, int]:
        """What takes the checksums of a tensor of the version, and how many bytes behind its last they cover, too."""
        if checkpoint is not None:
            return UnitStream(self._unit_bytes(layer, name, states=True)), 0
        size, block_tokens = self._unit_bytes(layer, name, states=False), self._geometry.block_tokens
        last = (tokens - 1) // block_tokens
        own, covered = tokens - last * block_tokens, max(int(self._blocks.tokens[-1]), tokens - last * block_tokens)
        granule = 1 if layer < 0 else self._geometry.layout.granule
        return UnitStream(size * block_tokens), (round_up(covered, granule) - round_up(own, granule)) * size

    def _unit_bytes(self, layer: int, name: str, *, states: bool) -> int:
        units = self._columns.checkpoints if states else self._columns.blocks
        return next(unit.bytes for unit in units if (unit.layer, unit.name) == (layer, name))

    def compare(
        self, what: str, layer: int, name: str, checkpoint: int | None, values: Values
    ) -> ConversationCorrupt | None:
        """The error, where the checksums of a tensor are not those that were parked; of others nothing is known."""
        units = self._columns.blocks if checkpoint is None else self._columns.checkpoints
        column = [(unit.layer, unit.name) for unit in units].index((layer, name))
        if checkpoint is not None:
            known = self._states.tokens[checkpoint] > 0
            differs = np.array([known and self._states.values[checkpoint, column] != values[0]])
        else:
            differs = (self._blocks.tokens > 0) & (self._blocks.values[:, column] != values)
        if not differs.any():
            return None
        block_tokens = self._geometry.block_tokens
        first = int(np.flatnonzero(differs)[0]) * block_tokens
        end = first + int(self._blocks.tokens[first // block_tokens])
        return ConversationCorrupt(
            f"{what}: layer {layer}, {name!r}, tokens {first} to {end - 1} are not those that were parked",
            layer=layer,
            plane=name,
            tokens=(first, end),
        )


def _in_order(rows: UnitRows, numbers: npt.NDArray[np.int64]) -> UnitRows:
    """The rows of `numbers`, with none known of those that `rows` lack."""
    order = np.argsort(rows.numbers)
    tokens = np.zeros(len(numbers), dtype=np.int64)
    values = np.zeros((len(numbers), rows.values.shape[1]), dtype=np.uint32)
    if len(order):
        at = order[np.minimum(np.searchsorted(rows.numbers, numbers, sorter=order), len(order) - 1)]
        there = rows.numbers[at] == numbers
        tokens[there], values[there] = rows.tokens[at[there]], rows.values[at[there]]
    return UnitRows(numbers, tokens, values)
